"""Results that an operation returns to the host: a count, a sum, whether all elements are finite.

An answer is a Python number, or a 0-dim tensor on the device that computed it. Reading a tensor waits for the device,
so callers read all answers of a step at once.
"""

from struct import Struct

import torch
from torch import Tensor

__all__ = ["Answer", "read"]

Answer = bool | int | float | Tensor

_DOUBLE, _LONG, _FLOAT, _INT = Struct("<d"), Struct("<q"), Struct("<f"), Struct("<i")


def read(*answers: Answer) -> tuple[bool | int | float, ...]:
    """Answers as Python numbers, with one device synchronisation for all of them.

    Args:
        answers: Python numbers, which pass through, and tensors of one element. Tensors of one device are gathered
            into a single small tensor, exactly, and read once.

    Returns:
        As many numbers, in the same order: bool for boolean, int for integer and float for floating point answers.

    >>> read(3, torch.tensor(4), torch.tensor(True), torch.tensor(0.5))
    (3, 4, True, 0.5)
    """
    numbers: list[bool | int | float] = [0] * len(answers)
    places: dict[torch.device, list[int]] = {}
    for i, answer in enumerate(answers):
        if not isinstance(answer, Tensor):
            numbers[i] = answer
        elif answer.device.type == "cpu":
            numbers[i] = answer.item()
        else:
            places.setdefault(answer.device, []).append(i)
    for there in places.values():
        for i, number in zip(there, _read_together([answers[i] for i in there]), strict=True):  # type: ignore[misc]
            numbers[i] = number
    return tuple(numbers)


def _read_together(answers: list[Tensor]) -> list[bool | int | float]:
    words = torch.stack([_as_word(answer) for answer in answers]).tolist()
    return [_from_word(word, answer.dtype) for word, answer in zip(words, answers, strict=True)]


def _as_word(answer: Tensor) -> Tensor:
    """Any number as an int64, without loss."""
    answer = answer.detach().reshape(())
    if answer.dtype == torch.float64:
        return answer.view(torch.int64)
    if answer.is_floating_point():
        return answer.to(torch.float32).view(torch.int32).to(torch.int64)
    return answer.to(torch.int64)


def _from_word(word: int, dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return bool(word)
    if dtype == torch.float64:
        return float(_DOUBLE.unpack(_LONG.pack(word))[0])
    if dtype.is_floating_point:
        return float(_FLOAT.unpack(_INT.pack(word))[0])
    return word
