"""The hook under real DDP in four gloo processes."""

import pytest
import torch

from support import ddp_cases
from support.registered import IN_PROCESSES
from tersegrad import attach

SPARSE = "ErrorFeedback(AllGather(TopK(ratio=0.05)))"
PER_TENSOR = "ErrorFeedback(AllGather(PerTensor(TopK(ratio=0.05))))"
MIXED = "ByName({'conv*': Dense()}, default=ErrorFeedback(AllGather(TopK(ratio=0.05))))"

OPTIONS = {
    "default": {},
    "one bucket": {"bucket_cap_mb": 25},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
}


def all_equal(values):
    return all(v == values[0] for v in values)


@pytest.mark.parametrize("spec", [repr(r) for r in IN_PROCESSES])
def test_every_method_keeps_replicas_identical(gloo4, spec):
    results = gloo4.run(ddp_cases.train, spec, {})
    assert all_equal([r["digest"] for r in results])
    assert all(r["losses"][-1] == r["losses"][-1] for r in results), "a loss became NaN"
    assert results[0]["metrics"]["steps"] == 6
    assert results[0]["metrics"]["buckets"] > 1


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("spec", [SPARSE, MIXED])
def test_ddp_options(gloo4, spec, option):
    assert all_equal([r["digest"] for r in gloo4.run(ddp_cases.train, spec, OPTIONS[option])])


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_without_the_worker_are_the_same(gloo4, option):
    for found in gloo4.run(ddp_cases.straight_to_the_group, "Dense()", OPTIONS[option], 8):
        assert found["plain"] == 5  # all but those in which DDP may cut its buckets anew
        assert "wrong" not in found
        assert found["propagate"] == found["skip"]
        assert found["waited"]


def test_auto_rests_where_all_is_dense(gloo4):
    never = "Auto({'bf16': AllReduce(BF16())}, budget=1e-09, margin=0.9, change=1e9, warmup=1, trial=3, window=2)"
    results = gloo4.run(ddp_cases.straight_to_the_group, never, {}, 60)
    assert all_equal([found["plain"] for found in results])
    assert results[0]["plain"] > 10
    for found in results:
        assert found["propagate"][0] == found["skip"][0]


@pytest.mark.parametrize("option", OPTIONS)
def test_dense_is_plain_ddp(gloo4, option):
    assert max(gloo4.run(ddp_cases.same_as_plain, OPTIONS[option])) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_mixed_dtypes(gloo4, dtype):
    assert max(gloo4.run(ddp_cases.same_as_plain, {}, dtype)) < (1e-6 if dtype == "float64" else 2e-2)
    assert all_equal([r["digest"] for r in gloo4.run(ddp_cases.train, SPARSE, {}, 1, dtype)])


def test_accumulation_with_no_sync(gloo4):
    results = gloo4.run(ddp_cases.train, SPARSE, {}, 3)
    assert all_equal([r["digest"] for r in results])
    assert results[0]["metrics"]["steps"] == 6


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("spec", [SPARSE, PER_TENSOR])
def test_nothing_is_lost_when_ddp_cuts_its_buckets_anew(gloo4, spec, option):
    assert max(gloo4.run(ddp_cases.telescoping, spec, OPTIONS[option])) < 1e-5


@pytest.mark.parametrize("spec", [PER_TENSOR, "AllGather(PerTensor(BF16()))"])
def test_resume_is_bit_identical_with_other_buckets(gloo4, spec):
    for result in gloo4.run(ddp_cases.resume, spec):
        assert result["whole"] == result["resumed"]


# static graph with no_sync in its first step fails inside torch, with plain DDP too
@pytest.mark.parametrize(
    ("option", "accumulate"), [(o, k) for o in OPTIONS for k in (1, 3) if o != "static graph" or k == 1]
)
def test_squares_of_single_samples_are_ready_in_the_hook(gloo4, option, accumulate):
    assert max(gloo4.run(ddp_cases.squares_in_the_hook, OPTIONS[option], accumulate)) < 1e-4


@pytest.mark.parametrize("after_loading", [False, True])
@pytest.mark.parametrize("spec", [SPARSE, MIXED, "ErrorFeedback(VGC(alpha=2.0))", "ErrorFeedback(VGC(tau=0.01))"])
def test_flush_hands_out_all_that_was_late(gloo4, spec, after_loading):
    for result in gloo4.run(ddp_cases.flush, spec, after_loading):
        assert result["error"] < 1e-5
        assert result["flushed"] > 0
        assert result["left"] == 0


SHORT_TOPK4 = (
    "ErrorFeedback(Schedule(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))), 'ratio', steps={0: 0.25, 4: 0.03}))"
)
IN_PHASE = {  # spec, steps to get into the phase, what is sent in it at most, and the link
    "auto past its trials": ("Auto({'topk': AllGather(TopK(0.02))}, warmup=1, trial=3)", 60, 10.0, "20Mbit"),
    "gradiveq past its warm-up": (
        "GradiVeQ(warmup=2, learn=3, compress=50, worst=None, drift=None, tiny=0, linear=True)",
        8,
        1.0,
        None,
    ),
    "topk4 past its beginning": (SHORT_TOPK4, 6, 20.0, None),
    "ahead past its beginning": (f"StepAhead({SHORT_TOPK4})", 6, 20.0, None),
    "dgc past its beginning": (
        "ByDimension({1: MomentumCorrection(Dense(), nesterov=True, masking=False)}, MomentumCorrection(Schedule("
        "AllGather(TopK(0.01)), 'ratio', steps={0: 0.25, 4: 0.01}), nesterov=True, masking=False))",
        6,
        4.0,
        None,
    ),
    "dgc-paper past its beginning": (
        "ByDimension({1: MomentumCorrection(Dense(), masking=False)}, MomentumCorrection(Schedule("
        "AllGather(PerTensor(SampledTopK(0.01))), 'ratio', steps={0: 0.25, 4: 0.01})))",
        6,
        4.0,
        None,
    ),
    "a warm-up that is over": ("Warmup(ErrorFeedback(AllGather(TopK(0.05))), steps=3)", 6, 5.0, None),
}


@pytest.mark.parametrize("phase", IN_PHASE)
def test_replicas_and_resuming_in_the_phase_that_a_preset_is_for(gloo4, phase):
    spec, before, ratio, bandwidth = IN_PHASE[phase]
    results = gloo4.run(ddp_cases.in_phase, spec, before, 4, bandwidth)
    assert all_equal([r["digest"] for r in results])
    assert min(r["ratio"] for r in results) > ratio, "it does not compress here"
    if "auto" not in phase:  # which goes by the clock
        assert all(r["resumed"] == r["digest"] for r in results)
    if "gradiveq" in phase:
        assert any(report["fits"] for report in results[0]["layers"].values())


PERIODS = {  # spec, and steps that end in the middle of one of its phases
    "gradiveq warms up": ("GradiVeQ(warmup=4, learn=3, compress=50, worst=None, drift=None, tiny=0, linear=True)", 2),
    "gradiveq learns": (
        "GradiVeQ(warmup=2, learn=4, compress=50, worst=None, tiny=0, linear=True, learning=TwoShot(QSGD(4)))",
        4,
    ),
    "topk4 begins": (SHORT_TOPK4, 3),
    "ahead begins": (f"StepAhead({SHORT_TOPK4})", 3),
    "dgc begins": (
        "MomentumCorrection(Schedule(AllGather(PerTensor(SampledTopK(0.01))), 'ratio', steps={0: 0.25, 4: 0.01}))",
        3,
    ),
    "after the first step, topk": ("topk", 1),  # before DDP has made its final buckets
    "after the first step, powersgd": ("powersgd", 1),
    "after the first step, int8": ("int8", 1),
    "every third step": ("Every(AllGather(TopK(0.1)), n=3)", 4),
    "a warm-up": ("Warmup(ErrorFeedback(AllGather(TopK(0.05))), steps=4)", 3),
    "stages of sidco": ("sidco-paper", 3),
    "auto has decided": ("Auto({'topk': AllGather(TopK(0.02))}, warmup=1, trial=3, window=1000, change=1e9)", 60),
}


def test_resume_in_the_middle_of_a_phase(gloo4):
    for found in gloo4.run(ddp_cases.in_phases, PERIODS):
        assert all(found.values()), found


LARGE = ["none", "bf16", "topk", "sidco", "int8", "powersgd", "topk4", "ErrorFeedback(Ring(TopK(0.02)))"]


def test_nothing_is_lost_in_buckets_of_a_million_floats(gloo4):
    for found in gloo4.run(ddp_cases.large, LARGE):
        for spec, result in found.items():
            assert result["same"], f"{spec}: replicas differ"
            assert result["largest"] > 1 << 20
            assert result["error"] < (0.02 if spec == "bf16" else 1e-5), f"{spec}: {result}"


def test_refusals_say_what_to_do(gloo4):
    for said in gloo4.run(ddp_cases.refusals):
        assert "TypeError: attach() needs a DistributedDataParallel model, and this is a Net" in said["not ddp"]
        assert "'topkk' in 'topkk' is unknown" in said["unknown"]
        assert "is a compressor" in said["compressor"]
        assert "optimizer=optimizer" in said["lr"]
        assert "Give the optimizer momentum=0" in said["momentum"]
        assert "give the seconds" in said["timeout"]
        assert "rank 0: tersegrad" in said["disagree"]
        assert "AllReduce(BF16())" in said["disagree"]
        assert "attached already" in said["twice"]
        assert "Call close()" in said["twice"]
        assert "format 99" in said["format"]
        assert "saved by Dense()" in said["other spec"]
        assert "no entry for these parameters of the model: conv.bias" in said["missing"]
        assert "does not have: head.weight" in said["extra"]
        assert "has a communication hook already" in said["hook"]


def test_close_gives_the_model_back_and_attach_takes_it_again(gloo4):
    results = gloo4.run(ddp_cases.close_and_reattach)
    assert all_equal([r["digest"] for r in results])
    for result in results:
        assert result["difference"] < 1e-6
        assert result["steps"] == 2
        assert result["ratio"] > 2


def test_a_worker_error_surfaces_with_its_own_message(gloo4):
    for message, groups_left in gloo4.run(ddp_cases.worker_error):
        assert groups_left == 0
        assert "the cable was cut" in message


def test_unused_parameters(gloo4):
    results = gloo4.run(ddp_cases.unused_parameters)
    assert all_equal(results)
    assert results[0]["finite"]


def test_one_overflow_is_seen_everywhere_and_remembered_nowhere(gloo4):
    for result in gloo4.run(ddp_cases.overflow):
        assert result == {"seen": True, "same": True, "nonfinite_steps": 1}


def test_model_on_a_subgroup(gloo4):
    results = gloo4.run(ddp_cases.on_a_subgroup)
    assert results[0] == results[2] == "outside"
    assert results[1] == results[3] != "outside"


def test_two_models_in_one_process(gloo4):
    assert all_equal(gloo4.run(ddp_cases.two_models))


@pytest.mark.parametrize("spec", ["topk", "bf16"])
def test_global_rng_untouched(gloo4, spec):
    assert all(gloo4.run(ddp_cases.rng_after, spec))


def test_metrics_count_what_was_sent(gloo4):
    plain, sparse = (gloo4.run(ddp_cases.train, spec, {})[0]["metrics"] for spec in ("none", SPARSE))
    assert plain["bytes_sent"] == plain["dense_bytes"]
    assert plain["ratio"] == 1.0
    assert plain["residual_norm"] == 0
    assert sparse["dense_bytes"] == plain["dense_bytes"]
    assert sparse["ratio"] == sparse["dense_bytes"] / sparse["bytes_sent"] > 2
    assert sparse["residual_norm"] > 0
    assert min(sparse[f"{part}_seconds"] for part in ("encode", "wait", "decode")) > 0


def test_attach_without_a_process_group():
    with pytest.raises(
        RuntimeError, match=r"Start the script with torchrun and call torch.distributed.init_process_group"
    ):
        attach(torch.nn.Linear(2, 2), "topk")
