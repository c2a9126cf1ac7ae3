"""A bucket's state: cut by tensor name and joined in another order, and settled after a step (rules in ``core``)."""

from typing import Any

import torch
from torch import Tensor

from tersegrad.core import Bucket, State


def cut(state: State, bucket: Bucket) -> dict[str, State]:
    """One piece per tensor name. Tensors in the pieces are views of the state's own."""
    pieces: dict[str, State] = {name: {} for name in bucket.names}
    for key, value in state.items():
        if key.startswith("_") or key == "names":
            continue
        for name, part in _cut_value(value, bucket):
            pieces[name][key] = part
    return pieces


def _cut_value(value: Any, bucket: Bucket) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(cut(value, _covered(value, bucket)).items())
    if not isinstance(value, Tensor):
        return [(name, value) for name in bucket.names]
    if len(bucket.names) == 1:
        return [(bucket.names[0], value)]
    assert value.shape == (bucket.numel,), "a tensor in the state of several tensors has one entry per element"
    return list(zip(bucket.names, value.split(bucket.sizes), strict=True))


def paste(pieces: dict[str, State], state: State, bucket: Bucket) -> None:
    """Writes into a fresh state of this bucket whatever the pieces know about its tensors."""
    known = [name for name in bucket.names if name in pieces]
    keys = dict.fromkeys(key for name in known for key in pieces[name])
    for key in keys:
        values = {name: pieces[name][key] for name in known if key in pieces[name]}
        state[key] = _paste_value(values, state.get(key), bucket)


def _paste_value(values: dict[str, Any], fresh: Any, bucket: Bucket) -> Any:
    first = next(iter(values.values()))
    if isinstance(first, dict):
        nested: State = {} if fresh is None else fresh
        paste(values, nested, _covered(nested, bucket))
        return nested
    if not isinstance(first, Tensor):
        return first
    if len(bucket.names) == 1:
        return first.clone()
    whole = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device) if fresh is None else fresh
    for name, part in zip(bucket.names, whole.split(bucket.sizes), strict=True):
        if name in values:
            part.copy_(values[name].reshape(-1))
    return whole


def _covered(state: State, bucket: Bucket) -> Bucket:
    """The part of the bucket that a nested state speaks of."""
    if "names" not in state:
        return bucket
    return bucket.subset([bucket.names.index(name) for name in state["names"]])


def settle(state: State, keep: bool) -> None:
    """Ends a step: what was noted with ``later`` becomes the state, or is forgotten. Replaced tensors become spares."""
    for key, value in state.pop("_next", {}).items():
        retired = state.get(key) if keep else value
        if keep:
            state[key] = value
        if isinstance(retired, Tensor):
            state["_spare_" + key] = retired
    for key, value in state.items():
        if isinstance(value, dict) and not key.startswith("_"):
            settle(value, keep)


def drop_scratch(state: State) -> None:
    """Gives back all that may vanish at any time; what a step has noted stays."""
    for key in [key for key in state if key.startswith("_") and key != "_next"]:
        del state[key]
    for value in state.values():
        if isinstance(value, dict):
            drop_scratch(value)


def copy(state: State) -> State:
    """A deep copy without scratch, plain enough for ``torch.load(weights_only=True)``."""
    return {key: _copied(value) for key, value in state.items() if not key.startswith("_")}


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return copy(value)
    return value.detach().clone() if isinstance(value, Tensor) else value
