"""States are cut by tensor name and joined in any other order."""

import torch

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.specs import parse

SHAPES = {"a": (2, 3), "b": (4,), "c": (1, 5), "d": ()}


def bucket(*names: str) -> Layout:
    return Layout(names, tuple(SHAPES[n] for n in names))


def fresh(b: Layout) -> dict:
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


def filled(b: Layout) -> dict:
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
    pieces = state.split(filled(whole), whole)
    assert set(pieces) == set("abcd")
    assert "_scratch" not in pieces["a"]
    first, second = bucket("d", "c"), bucket("b", "a")
    new_first, new_second = fresh(first), fresh(second)
    state.merge(pieces, new_first, first)
    state.merge(pieces, new_second, second)
    assert new_first["residual"].tolist() == [15, 10, 11, 12, 13, 14]
    assert new_second["residual"].tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]
    assert new_first["parts"]["small"]["inner"]["m"].tolist() == [104]
    assert new_second["parts"]["small"]["inner"]["m"].tolist() == [100, 101, 102, 103]
    assert new_second["parts"]["small"]["inner"]["count"] == 9
    assert new_first["own"]["c"]["factor"].tolist() == [[2, 2], [2, 2]]
    assert new_first["step"] == 5


def test_two_buckets_become_one():
    first, second = bucket("a", "b"), bucket("c", "d")
    pieces = state.split(filled(first), first) | state.split(filled_part(second), second)
    whole = bucket("d", "a", "c", "b")
    joined = fresh(whole)
    state.merge(pieces, joined, whole)
    assert joined["residual"].tolist() == [5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 7, 8, 9]


def filled_part(b: Layout) -> dict:
    s = fresh(b)
    s["residual"] = torch.arange(b.numel, dtype=torch.float32)
    return s


def test_unknown_tensors_start_afresh():
    b = bucket("a", "b")
    joined = fresh(b)
    state.merge({"b": {"residual": torch.ones(4)}}, joined, b)
    assert joined["residual"].tolist() == [0] * 6 + [1] * 4


def test_copy_has_no_scratch_and_shares_nothing():
    s = filled(bucket("a", "b"))
    c = state.copy(s)
    c["residual"].zero_()
    assert "_scratch" not in c
    assert s["residual"].sum() == 45


@cases(spec=["AllGather(PerTensor(SIDCo(0.1)))", "PowerSGD(rank=1)"])
def test_a_parameter_whose_name_begins_with_an_underscore_is_saved_like_any_other(spec):
    bucket = Layout(("_stem.weight", "b"), ((40, 30), (7,)))
    reducer = parse(spec)

    def work(comm):
        memory = reducer.init(bucket, comm)
        before = state.copy(memory)
        x = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0))
        reduce(reducer, Step(bucket), x, torch.empty_like(x), memory, comm)
        state.commit(memory)
        return before, state.copy(memory), state.split(memory, bucket)["_stem.weight"]

    before, after, piece = threads.run(1, work)[0]
    assert repr(before) != repr(after), "the step left no trace in what is saved"
    assert "tensor _stem.weight" in repr(piece)
