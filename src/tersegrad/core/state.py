"""State: what a method remembers of one bucket. Staged, committed or rolled back; split by tensor and merged again.

The rules are in the docstring of ``tersegrad.core``.
"""

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from tersegrad.core.layout import Layout

State = dict[str, Any]

_STAGED, _BACK, _REPORT = "_staged", "_back_", "_report"

# ---- for methods ---------------------------------------------------------------------------------


def scratch(
    state: State, key: str, numel: int, dtype: torch.dtype, device: torch.device, zeroed: bool = False
) -> Tensor:
    """A buffer that lives in the state between steps, so that steady state allocates nothing; contents undefined.

    ``zeroed``: when it is made it holds zeros, and later what was last written to it.
    """
    buffer = state.get("_" + key)
    if buffer is None or buffer.numel() < numel:
        make = torch.zeros if zeroed else torch.empty
        buffer = state["_" + key] = make(numel, dtype=dtype, device=device)
    return buffer[:numel]


def reserve(state: State, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``scratch``, for results of unknown length: all of the buffer that has grown so far, at least ``numel``."""
    scratch(state, key, numel, dtype, device)
    buffer: Tensor = state["_" + key]
    return buffer


def stage(state: State, **changes: Any) -> None:
    """Notes what the state shall hold once the step is committed."""
    state.setdefault(_STAGED, {}).update(changes)


def staged(state: State) -> State:
    """The state as it will be if the step is committed."""
    return {**state, **state.get(_STAGED, {})}


def back_buffer(state: State, key: str) -> Tensor:
    """A tensor like ``state[key]`` to write its next value into: two buffers that are swapped at each commit."""
    buffer = state.get(_BACK + key)
    return torch.empty_like(state[key]) if buffer is None else buffer


def free_back_buffer(state: State, key: str) -> None:
    """Frees the buffer that ``back_buffer`` would return; it is made anew when it is needed again."""
    state.pop(_BACK + key, None)


def report(state: State, **numbers: Any) -> None:
    """What ``metrics()`` shows of this method: "sent" of how many ("of"), "empty" sends, and a "layer"'s figures."""
    state.setdefault(_REPORT, {}).update(numbers)


# ---- for the engine ------------------------------------------------------------------------------


def commit(state: State) -> None:
    """Makes what was staged the state. Tensors that are replaced become back buffers."""
    _settle(state, keep=True)


def roll_back(state: State) -> None:
    """Forgets what was staged."""
    _settle(state, keep=False)


def _settle(state: State, keep: bool) -> None:
    for key, value in state.pop(_STAGED, {}).items():
        retired = state.get(key) if keep else value
        if keep:
            state[key] = value
        if isinstance(retired, Tensor):
            state[_BACK + key] = retired
    for key, value in state.items():
        if isinstance(value, dict) and not key.startswith("_"):
            _settle(value, keep)


def hold(state: State, layout: Layout, names: Container[str]) -> None:
    """Forgets what was staged for these tensors alone. Numbers belong to the bucket: they stay staged."""
    changed = state.get(_STAGED, {})
    if isinstance(state.get("names"), list) and all(name in names for name in layout.names):
        return roll_back(state)
    for key, value in changed.items():
        before = state.get(key)
        if isinstance(value, Tensor) and isinstance(before, Tensor) and before.shape == value.shape == (layout.numel,):
            for part in layout.ranges(names):
                value[part] = before[part]
    for key, value in state.items():
        if isinstance(value, dict) and not key.startswith("_"):
            hold(value, _covered(value, layout), names)
    return None


def reports(state: State) -> Iterator[State]:
    """What every method in a state has reported."""
    for key, value in state.items():
        if key == _REPORT:
            yield value
        elif isinstance(value, dict) and not key.startswith("_"):
            yield from reports(value)


def split(state: State, layout: Layout) -> dict[str, State]:
    """One piece per tensor name. Tensors in the pieces are views of the state's own."""
    pieces: dict[str, State] = {name: {} for name in layout.names}
    for key, value in state.items():
        if key.startswith("_") or key == "names":
            continue
        for name, part in _split_value(value, layout):
            pieces[name][key] = part
    return pieces


def _split_value(value: Any, layout: Layout) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(split(value, _covered(value, layout)).items())
    if not isinstance(value, Tensor):
        return [(name, value) for name in layout.names]
    if len(layout.names) == 1:
        return [(layout.names[0], value)]
    assert value.shape == (layout.numel,), "a tensor in the state of several tensors has one entry per element"
    return list(zip(layout.names, value.split(layout.sizes), strict=True))


def merge(pieces: dict[str, State], state: State, layout: Layout) -> None:
    """Writes into a fresh state of this bucket whatever the pieces know about its tensors."""
    known = [name for name in layout.names if name in pieces]
    keys = dict.fromkeys(key for name in known for key in pieces[name])
    for key in keys:
        values = {name: pieces[name][key] for name in known if key in pieces[name]}
        state[key] = _merge_value(values, state.get(key), layout)


def _merge_value(values: dict[str, Any], fresh: Any, layout: Layout) -> Any:
    first = next(iter(values.values()))
    if isinstance(first, dict):
        nested: State = {} if fresh is None else fresh
        merge(values, nested, _covered(nested, layout))
        return nested
    if not isinstance(first, Tensor):
        return first
    if len(layout.names) == 1:
        return first.to(layout.device, copy=True)
    whole = torch.zeros(layout.numel, dtype=first.dtype, device=layout.device) if fresh is None else fresh
    for name, part in zip(layout.names, whole.split(layout.sizes), strict=True):
        if name in values:
            part.copy_(values[name].reshape(-1))
    return whole


def _covered(state: State, layout: Layout) -> Layout:
    """The part of the bucket that a nested state is about."""
    if "names" not in state:
        return layout
    return layout.subset([layout.names.index(name) for name in state["names"]])


def drop_scratch(state: State) -> None:
    """Frees all that may vanish at any time between two steps; what a step has staged stays."""
    for key in [key for key in state if key.startswith("_") and key != _STAGED]:
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
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
