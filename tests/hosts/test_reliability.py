"""What docs/reliability.md promises, in four real processes: NaN, loss scales, checkpoints, restarts, DDP's corners."""

import pytest

from support import reliability_cases as cases
from tersegrad.specs import PRESETS

SPARSE = "ErrorFeedback(AllGather(TopK(0.05)))"
EVERY = list(PRESETS)


def all_equal(values):
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("spec", [SPARSE, "none", "bf16"])
@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_what_becomes_of_a_step_that_is_not_finite(gloo4, policy, spec, value):
    for found in gloo4.run(cases.overflow, spec, policy, value):
        assert found["kept"], "the memory is what it was before the step, in every bucket"
        if policy == "propagate":
            assert not found["finite"], "every rank sees it"
        if policy == "skip":
            assert found["zero"]
            assert found["counted"] == 1
        if policy == "raise":
            assert "the mean gradient of last.bias" in found["said"]
            assert "is not finite" in found["said"]
        else:
            assert all(loss == loss for loss in found["losses"]), "training goes on"


@pytest.mark.parametrize("spec", ["sidco", "vgc", "fft", "dgc", "signsgd", "randomk", "int8", "powersgd"])
def test_nobody_launders_or_remembers_an_overflow(gloo4, spec):
    results = gloo4.run(cases.overflow, spec, "propagate", float("inf"))
    assert not any(r["finite"] for r in results)
    assert all(r["kept"] for r in results)
    assert all_equal([r["digest"] for r in results])


@pytest.mark.parametrize("spec", [SPARSE, "ErrorFeedback(AllGather(PerTensor(TopK(0.05))))"])
def test_a_change_of_the_loss_scale_loses_nothing(gloo4, spec):
    assert max(gloo4.run(cases.scale_changes, spec)) < 1e-5


@pytest.mark.parametrize("spec", [SPARSE, "powersgd", "vgc", "sidco", "none"])
def test_one_overflow_halves_the_scale_once(gloo4, spec):
    results = gloo4.run(cases.amp, spec, 3)
    for found in results:
        assert found["scales"] == [2.0**16] * 3 + [2.0**15] * 5
        assert all(loss == loss for loss in found["losses"])
    assert all_equal([r["digest"] for r in results])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [SPARSE, "bf16", "qsgd", "powersgd"])
def test_narrow_parameters(gloo4, spec, dtype):
    results = gloo4.run(cases.narrow_parameters, spec, dtype)
    assert all(r["finite"] for r in results)
    assert all_equal([r["bytes"] for r in results])


def test_resume_is_bit_identical_for_every_preset(gloo4):
    for start in range(0, len(EVERY), 6):
        for found in gloo4.run(cases.resume, EVERY[start : start + 6]):
            assert all(found.values()), found


OTHERS = [
    "ErrorFeedback(Ring(TopK(0.1)))",
    "ErrorFeedback(TwoShot(QSGD(8)))",
    "GradiVeQ(warmup=1, learn=3, compress=2, worst=None, tiny=0)",
    "LowMemory(AllGather(TopK(0.1)))",
    "Schedule(ErrorFeedback(AllGather(TopK(0.1))), 'ratio', steps={0: 0.1, 4: 0.2})",
    "Every(AllGather(TopK(0.1)), n=4)",
]


def test_resume_is_bit_identical_for_what_no_preset_has(gloo4):
    for found in gloo4.run(cases.resume, OTHERS):
        assert all(found.values()), found


def test_the_number_of_ranks_may_change(gloo4, tmp_path):
    specs = [SPARSE, "powersgd", "vgc", "sidco", "dgc", "ErrorFeedback(Ring(QSGD(8)))"]
    for found in gloo4.run(cases.elastic, specs, str(tmp_path)):
        for (spec, size), seen in found.items():
            assert seen["worst"] <= 1e-6 * seen["largest"], (spec, size)
            assert seen["largest"] > 0, spec
            assert "saved by 4 ranks" in seen["refused"], "one rank's state is not enough"
            assert seen["finite"]


def test_through_torch_distributed_checkpoint(gloo4, tmp_path):
    results = gloo4.run(cases.through_dcp, str(tmp_path))
    assert all(r["four"] for r in results)
    assert [r.get("two") for r in results] == [True, True, None, None]


def test_a_state_that_does_not_fit_says_why(gloo4):
    for said in gloo4.run(cases.misfits):
        assert "does not have: ghost" in said["extra"]
        assert "no entry for these parameters of the model: last.bias" in said["missing"]
        assert "does not fit parameter last.weight" in said["misshapen"]
        assert "3 elements, and 1200 are needed" in said["misshapen"]
        assert "saved by Dense()" in said["spec"]
        assert "format 99" in said["format"]
        assert "every rank loads its own" in said["rank"]
        assert "format None" in said["not a state"]
        assert "is missing: all 4 are needed" in said["one missing"]
        assert "twice" in said["twice"]


def test_a_replica_that_differs_is_named_on_every_rank(gloo4):
    for found in gloo4.run(cases.replicas):
        assert "parameter hidden.bias is not the same on all ranks: rank 2 holds something else" in found["said"]
        assert "2 of 11 parameters" in found["said"]


@pytest.mark.parametrize("spec", [SPARSE, "none", "ErrorFeedback(Ring(BF16()))"])
def test_uneven_inputs(gloo4, spec):
    assert all_equal(gloo4.run(cases.joined, spec))


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_compiled_models(gloo4, order):
    results = gloo4.run(cases.compiled, SPARSE, order)[:2]
    assert all_equal([r["digest"] for r in results])
    assert results[0]["steps"] == 3
