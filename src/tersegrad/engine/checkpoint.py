"""Saved memory: which state a rank takes up, whether it fits, and what becomes of it when the number of ranks changes.

What a handle saves (``Handle.state_dict``) is one rank's: residuals differ from rank to rank. With as many ranks as
before, each takes its own and goes on to the bit. With others, every rank takes the mean R of what the n old ones
remembered: the mean over m new ranks of R is what the mean over the old ones was.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tersegrad.core import Reducer, State

FORMAT = 3
READABLE = (2, 3)

Saved = dict[str, Any]
Shards = Iterable[Saved]


def select(saved: Saved | Shards, rank: int, ranks: int) -> Saved:
    """The one state that a rank takes up, out of its own or of all."""
    if isinstance(saved, dict):
        _require_format(saved)
        if saved["ranks"] != ranks:
            raise ValueError(
                f"the state was saved by {saved['ranks']} ranks, and now there are {ranks}. Give the states of all "
                f"{saved['ranks']} ranks: handle.load_state_dict([torch.load(file) for file in files])."
            )
        if saved["rank"] != rank:
            raise ValueError(
                f"this is the state of rank {saved['rank']}, and this is rank {rank}: every rank loads its own."
            )
        return saved
    return _one_of_all(saved, rank, ranks)


def _one_of_all(saved: Shards, rank: int, ranks: int) -> Saved:
    mean, seen, own, first = _Mean(), set(), None, None
    for state in saved:
        _require_format(state)
        first = first or {key: value for key, value in state.items() if key != "tensors"}
        for key in ("ranks", "spec", "step", "run"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"the states are of different runs: {key} is {first.get(key)!r} here and {state.get(key)!r} there."
                )
        if state["rank"] in seen:
            raise ValueError(f"the state of rank {state['rank']} was given twice.")
        seen.add(state["rank"])
        if state["ranks"] == ranks:
            own = state if state["rank"] == rank else own
        else:
            mean.add(state["tensors"])
    if first is None:
        raise ValueError("no state was given.")
    if missing := sorted(set(range(first["ranks"])) - seen):
        raise ValueError(
            f"the state of rank {', '.join(map(str, missing))} is missing: all {first['ranks']} are needed."
        )
    return own or {**first, "tensors": mean.result("")}


class _Mean:
    """The mean of nested states, one after the other: of tensors; of numbers only where all are the same."""

    def __init__(self) -> None:
        self.count = 0
        self.first: Any = None
        self.same = True
        self.total: Tensor | None = None
        self.children: dict[str, _Mean] = {}

    def add(self, value: Any) -> None:
        """Counts one more in."""
        self.count += 1
        if isinstance(value, dict):
            for key, child in value.items():
                self.children.setdefault(key, _Mean()).add(child)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        else:
            self.same = self.same and (self.count == 1 or value == self.first)
            self.first = value if self.count == 1 else self.first

    def _add_tensor(self, value: Tensor) -> None:
        if self.total is None:
            self.first = value
            self.total = torch.zeros(value.shape, dtype=torch.float64)
        self.same = self.same and value.shape == self.first.shape and torch.equal(value, self.first)
        if value.is_floating_point() and value.shape == self.total.shape:
            self.total += value
        elif not self.same:
            self.total = torch.empty(0)  # cannot be averaged

    def result(self, path: str) -> Any:
        """What all have, their mean; what some have, or what is each one's own, is left out."""
        if self.children or self.first is None:
            results = {
                k: c.result(f"{path}/{k}") for k, c in self.children.items() if c.count == self.count or not path
            }
            return {key: value for key, value in results.items() if value is not None}
        if self.same:
            return self.first
        if self.total is None:
            return None
        if not self.first.is_floating_point() or self.total.shape != self.first.shape:
            raise ValueError(
                f"{path[1:]} is different on every rank and cannot be averaged, so the number of ranks cannot change. "
                "Load with as many ranks as saved it, call flush() and step the optimizer there, and save again."
            )
        return (self.total / self.count).to(self.first.dtype)


def require_fit(
    saved: Saved,
    spec: Reducer,
    sizes: dict[str, int],
    required: frozenset[str],
    fresh: Callable[[str], State],
    strict: bool,
) -> dict[str, State]:
    """The entries that belong to the model; refuses others, or leaves them out if not ``strict``."""
    if saved["spec"] != repr(spec):
        raise ValueError(
            f"the state was saved by {saved['spec']}, and this model is attached to {spec!r}. "
            "Attach with the spec that saved it."
        )
    entries = saved["tensors"]
    wrong = {name: _misfit(entries[name], fresh(name)) for name in entries if name in sizes}
    if strict:
        if unknown := sorted(set(entries) - set(sizes)):
            raise ValueError(
                f"the state has entries for parameters that the model does not have: {', '.join(unknown)}."
            )
        if entries and (missing := sorted(required - set(entries))):
            raise ValueError(f"the state has no entry for these parameters of the model: {', '.join(missing)}.")
        for name, text in wrong.items():
            if text:
                raise ValueError(f"the state does not fit parameter {name}: {text}. With strict=False it begins anew.")
    return {name: entries[name] for name, text in wrong.items() if not text}


def _misfit(saved: State, fresh: State, path: str = "") -> str:
    """Where a saved state has another shape than a fresh one; empty if it fits."""
    for key, value in saved.items():
        expected = fresh.get(key)
        if isinstance(value, dict) and isinstance(expected, dict):
            if text := _misfit(value, expected, f"{path}{key}/"):
                return text
        elif isinstance(value, Tensor) and isinstance(expected, Tensor) and value.numel() != expected.numel():
            return f"{path}{key} has {value.numel()} elements, and {expected.numel()} are needed"
    return ""


def identity(saved: Saved) -> dict[str, Any]:
    """What the states that ranks load together have in common; buckets may differ, and are a hash."""
    buckets = hashlib.blake2b(repr(saved["buckets"]).encode(), digest_size=8).hexdigest()
    return {"step": saved["step"], "run": saved.get("run", ""), "ranks": saved["ranks"], "buckets": buckets}


def disagreement(heard: dict[int, dict[str, Any]]) -> str:
    """In what the states differ that ranks have loaded; empty if in nothing. By rank, as ``identity`` gives them."""
    for key in ("step", "run", "ranks"):
        told = {rank: said[key] for rank, said in heard.items()}
        if len(set(told.values())) > 1:
            words = ", ".join(f"{key} {value} on rank {rank}" for rank, value in told.items())
            return (
                f"the ranks have loaded states that do not belong together: {words}. All ranks load what was saved "
                "after the same step of the same run. Nothing was loaded."
            )
    return ""


def _require_format(saved: Any) -> None:
    found = saved.get("format") if isinstance(saved, dict) else None
    if found not in READABLE:
        raise ValueError(f"this is a state of format {found!r}; this version reads {' and '.join(map(str, READABLE))}.")
    if found == 2 and "LowMemory(" in saved["spec"]:
        raise ValueError(
            "this state was saved by tersegrad 0.1, which coded the residual of LowMemory in another way. Load it with "
            "that version, call flush() and step the optimizer there, and save again."
        )
