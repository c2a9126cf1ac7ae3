"""States are cut by tensor name and joined in any other order."""

import torch

from tersegrad import state
from tersegrad.core import Bucket

SHAPES = {"a": (2, 3), "b": (4,), "c": (1, 5), "d": ()}


def bucket(*names: str) -> Bucket:
    return Bucket(names, tuple(SHAPES[n] for n in names))


def fresh(b: Bucket) -> dict:
    vectors = [i for i, name in enumerate(b.names) if name in "bd"]
    part = b.subset(vectors)
    parts = (
        {"small": {"names": list(part.names), "inner": {"m": torch.zeros(part.numel), "count": 0}}} if vectors else {}
    )
    own = {name: {"names": [name], "factor": torch.zeros(2, 2)} for name in b.names}
    return {
        "residual": torch.zeros(b.numel),
        "_scratch": torch.ones(3),
        "step": 0,
        "parts": parts,
        "own": own,
    }


def filled(b: Bucket) -> dict:
    s = fresh(b)
    s["residual"] = torch.arange(b.numel, dtype=torch.float32)
    s["step"] = 5
    if s["parts"]:
        s["parts"]["small"]["inner"] = {
            "m": torch.arange(len(s["parts"]["small"]["inner"]["m"])) + 100.0,
            "count": 9,
        }
    for i, name in enumerate(b.names):
        s["own"][name]["factor"] = torch.full((2, 2), float(i))
    return s


def test_one_bucket_becomes_two_in_another_order():
    whole = bucket("a", "b", "c", "d")
    pieces = state.cut(filled(whole), whole)
    assert set(pieces) == set("abcd")
    assert "_scratch" not in pieces["a"]
    first, second = bucket("d", "c"), bucket("b", "a")
    new_first, new_second = fresh(first), fresh(second)
    state.paste(pieces, new_first, first)
    state.paste(pieces, new_second, second)
    assert new_first["residual"].tolist() == [15, 10, 11, 12, 13, 14]
    assert new_second["residual"].tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert new_first["parts"]["small"]["inner"]["m"].tolist() == [104]
    assert new_second["parts"]["small"]["inner"]["m"].tolist() == [100, 101, 102, 103]
    assert new_second["parts"]["small"]["inner"]["count"] == 9
    assert new_first["own"]["c"]["factor"].tolist() == [[2, 2], [2, 2]]
    assert new_first["step"] == 5


def test_two_buckets_become_one():
    first, second = bucket("a", "b"), bucket("c", "d")
    pieces = state.cut(filled(first), first) | state.cut(filled_part(second), second)
    whole = bucket("d", "a", "c", "b")
    joined = fresh(whole)
    state.paste(pieces, joined, whole)
    assert joined["residual"].tolist() == [5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 7, 8, 9]


def filled_part(b: Bucket) -> dict:
    s = fresh(b)
    s["residual"] = torch.arange(b.numel, dtype=torch.float32)
    return s


def test_unknown_tensors_start_afresh():
    b = bucket("a", "b")
    joined = fresh(b)
    state.paste({"b": {"residual": torch.ones(4)}}, joined, b)
    assert joined["residual"].tolist() == [0] * 6 + [1] * 4


def test_copy_has_no_scratch_and_shares_nothing():
    s = filled(bucket("a", "b"))
    c = state.copy(s)
    c["residual"].zero_()
    assert "_scratch" not in c
    assert s["residual"].sum() == 45
