"""Work that pauses where it needs numbers from the device, so that several pieces of work are answered by one read.

It is a generator: it yields answers of kernels, and is sent the same as numbers.

    count, finite = yield kernel.above(x, threshold, positions), kernel.all_finite(x)
"""

from collections.abc import Generator
from itertools import islice
from typing import Any, TypeVar

from tersegrad import kernels

T = TypeVar("T")
Number = bool | int | float
Paused = Generator[tuple[kernels.Answer, ...], tuple[Number, ...], T]


def run(work: Paused[T]) -> T:
    """Work to its end; each pause is one read."""
    try:
        asked = next(work)
        while True:
            asked = work.send(kernels.read(*asked))
    except StopIteration as end:
        result: T = end.value
        return result


def done(value: T) -> Paused[T]:
    """Work that does not pause."""
    yield from ()
    return value


def ask(*answers: kernels.Answer) -> Paused[tuple[Number, ...]]:
    """The numbers alone, as work to go on ``together`` with other work."""
    return (yield answers)


def together(*works: Paused[Any]) -> Paused[list[Any]]:
    """Several pieces of work that pause at the same time; returns what each returns."""
    results: list[Any] = [None] * len(works)
    paused: dict[int, tuple[kernels.Answer, ...]] = {}
    numbers: dict[int, tuple[Number, ...]] = {}

    def advance(i: int) -> None:
        try:
            paused[i] = works[i].send(numbers[i]) if i in numbers else next(works[i])
        except StopIteration as end:
            paused.pop(i, None)
            results[i] = end.value

    for i in range(len(works)):
        advance(i)
    while paused:
        read = iter((yield tuple(answer for asked in paused.values() for answer in asked)))
        numbers = {i: tuple(islice(read, len(asked))) for i, asked in paused.items()}
        for i in numbers:
            advance(i)
    return results
