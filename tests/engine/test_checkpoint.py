"""Which saved state a rank takes up, and what becomes of it when the number of ranks changes."""

import pytest
import torch

from tersegrad.engine import checkpoint


def saved(rank, ranks, tensors, **more):
    about = {"format": checkpoint.FORMAT, "spec": "S()", "step": 7, "rank": rank, "ranks": ranks, "buckets": [["w"]]}
    return {**about, "tensors": {"w": tensors}, **more}


def merged(*tensors, ranks=2):
    states = [saved(rank, len(tensors), t) for rank, t in enumerate(tensors)]
    return checkpoint.select(iter(states), 0, ranks)["tensors"]["w"]


def test_the_mean_of_what_is_late():
    one, two, three = torch.tensor([1.0, 2.0]), torch.tensor([2.0, -2.0]), torch.tensor([6.0, 0.0])
    assert torch.equal(merged({"r": one}, {"r": two}, {"r": three})["r"], torch.tensor([3.0, 0.0]))


def test_what_is_the_same_everywhere_stays_to_the_bit():
    basis = torch.randn(5, 3)
    found = merged(
        {"basis": basis, "n": 3, "name": "a"},
        {"basis": basis, "n": 3, "name": "a"},
        {"basis": basis, "n": 3, "name": "a"},
    )
    assert torch.equal(found["basis"], basis)
    assert (found["n"], found["name"]) == (3, "a")


def test_what_is_each_rank_s_own_begins_anew():
    """Seeds: two ranks with the same one would make the same errors."""
    assert merged({"seed": 1, "calls": 5}, {"seed": 2, "calls": 5}, {"seed": 3, "calls": 5}) == {"calls": 5}


def test_bytes_cannot_be_averaged():
    a, b = torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)
    with pytest.raises(ValueError, match="w/inner/frame is different on every rank and cannot be averaged"):
        merged({"inner": {"frame": a}}, {"inner": {"frame": b}}, {"inner": {"frame": a}})


def test_narrow_floats_keep_their_dtype():
    a, b = (torch.tensor([v], dtype=torch.bfloat16) for v in (1.0, 2.0))
    assert merged({"r": a}, {"r": b}, {"r": b}, {"r": a})["r"].dtype == torch.bfloat16


def test_with_as_many_ranks_each_takes_its_own():
    states = [saved(rank, 3, {"r": torch.full((2,), float(rank))}) for rank in (2, 0, 1)]
    for rank in range(3):
        assert checkpoint.select(states, rank, 3)["tensors"]["w"]["r"][0] == rank


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([], "no state"),
        ([saved(0, 2, {}), saved(1, 2, {}, step=8)], "step is 7 here and 8 there"),
        ([saved(0, 2, {}), saved(1, 2, {}, spec="T()")], "different runs"),
        ([saved(0, 3, {}), saved(2, 3, {})], "rank 1 is missing"),
        ([saved(0, 2, {}), saved(0, 2, {})], "twice"),
    ],
)
def test_states_that_are_not_one_run_s_are_refused(states, says):
    with pytest.raises(ValueError, match=says):
        checkpoint.select(states, 0, 4)
