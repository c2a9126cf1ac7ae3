"""Nothing is lost in silence, and ranks that differ are told so: in four real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import trust_cases as cases

EXIT_SCRIPT = Path(__file__).parents[1] / "support" / "exit_script.py"


def all_equal(values):
    return all(v == values[0] for v in values)


# ---- nothing is lost -----------------------------------------------------------------------------

EXACT = [
    "topk",
    "powersgd",
    "int8",
    "vgc",
    "onebit",
    "efsignsgd",
    "LowMemory(AllGather(TopK(0.05)), codec=Identity())",
    "Every(Dense(), n=3)",
    "MomentumCorrection(AllGather(TopK(0.05)), momentum=0.0)",
    "ErrorFeedback(GradiVeQ(warmup=0, learn=3, compress=9, worst=None, linear=True, tiny=0))",
    "ByName({'often*': Dense()}, default=ErrorFeedback(Ring(TopK(0.1))), tiny=0)",
    "Auto({'topk': AllGather(TopK(0.1))}, warmup=1, trial=3)",
]


def test_nothing_of_a_branch_that_is_rarely_used_is_lost(gloo4):
    for found in gloo4.run(cases.experts, EXACT, 21):
        for spec, result in found.items():
            assert result["worst"] < 1e-5, f"{spec}: {result}"
            assert result["kept"], f"{spec}: what is remembered of a tensor that nobody used has changed"


def test_what_momentum_remembers_of_an_unused_branch_stays(gloo4):
    for found in gloo4.run(cases.experts, ["dgc", "MomentumCorrection(Ring(BF16()), nesterov=True)"], 12):
        assert all(result["kept"] for result in found.values()), found


def test_flush_under_a_grad_scaler_is_applied_as_a_gradient_is(gloo4):
    for found in gloo4.run(cases.flush_under_a_scaler):
        assert found["late"] > 0.1
        assert found["off"] < 1e-5 * found["late"]
        assert found["left"] == 0


def test_clipping_comes_after_backward_and_unscale(gloo4):
    for found in gloo4.run(cases.clipping):
        assert found["exact"] < 1e-6, "the same as plain DDP"
        assert found["step"] > 0.1
        assert found["sparse step"] <= 4 * 0.5 * 0.1 * 1.001, "every step is at most (learning rate) * (norm limit)"


# ---- ranks that differ ---------------------------------------------------------------------------


def test_arguments_that_differ_are_refused_on_all_ranks(gloo4):
    results = gloo4.run(cases.arguments)
    assert all_equal(results)
    said = results[0]
    assert "They differ in seed (0 on rank 0, 7 on rank 2)" in said["seed"]
    assert "nonfinite (propagate on rank 0, skip on rank 2)" in said["nonfinite"]
    assert "scaler (none on rank 0, given on rank 2)" in said["scaler"]
    assert "check_replicas (None on rank 0, 5 on rank 2)" in said["check_replicas"]
    assert "AllReduce(BF16()) on rank 2" in said["spec"]
    assert "learning rate (0.1 on rank 0, 0.2 on rank 2)" in said["learning rate"]
    assert "find_unused_parameters (False on rank 0, True on rank 2)" in said["find_unused_parameters"]
    assert "They differ in names, shapes and dtypes" in said["names"]
    assert all(text.startswith("ValueError: the workers do not agree") for text in said.values()), said


@pytest.mark.parametrize("spec", ["randomk", "Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=3)"])
def test_states_that_do_not_belong_together_are_refused_on_all_ranks(gloo4, spec):
    results = gloo4.run(cases.states, spec)
    for rank, found in enumerate(results):
        assert "step 4 on rank 0, step 4 on rank 1, step 2 on rank 2" in found["step"]
        assert "run 0123456789abcdef on rank 2" in found["run"]
        assert ("saved by Other()" if rank == 2 else "rank 2 could not load its state") in found["misfit"]
        assert found["kept"], "nothing was loaded"
        assert found["loaded"]
    assert all_equal([found["digest"] for found in results])


def test_a_state_that_one_rank_loads_alone_is_refused_on_all_ranks(gloo4):
    for said in gloo4.run(cases.loaded_alone, "Every(Dense(), n=3)"):
        assert "rank 2 was given a state of step 2 to load, and ranks 0, 1, 3 were not given any" in said


def test_sums_without_a_frame_notice_another_step(gloo4):
    for found in gloo4.run(cases.out_of_step):
        for spec, said in found.items():
            assert said.startswith("StepsDifferError: the ranks are not in the same step"), f"{spec}: {said}"
            step = cases.noticed_in(cases.SUMS[spec])
            assert f"step {step} on rank 0 and 1 and 3, step {step + 1} on rank 2" in said, f"{spec}: {said}"


def test_a_learning_rate_that_differs_is_noticed_before_lengths_do(gloo4):
    for found in gloo4.run(cases.other_learning_rate):
        assert (
            "the learning rate, which a schedule follows, differs: 0.1 on rank 0 and 1 and 3, 0.02 on rank 2"
            in (found["said"])
        )


# ---- errors that a program can catch -------------------------------------------------------------


@pytest.mark.parametrize("spec", ["topk", "none"])
def test_a_step_that_is_not_finite_can_be_caught(gloo4, spec):
    results = gloo4.run(cases.nonfinite_is_caught, spec)
    for found in results:
        assert "the mean gradient of last.bias" in found["caught"]
        assert all(loss == loss for loss in found["losses"]), "training goes on"
        assert found["counted"] == 1
    assert all_equal([found["digest"] for found in results])


@pytest.mark.parametrize("spec", ["topk", "vgc", "ErrorFeedback(TwoShot(TopK(0.1)))"])
def test_a_body_that_cannot_be_decoded_names_its_sender(gloo4, spec):
    for rank, found in enumerate(gloo4.run(cases.bad_body, spec)):
        if rank != 2:
            assert "rank 2 sent a frame that cannot be decoded" in found["caught"], found


def test_replicas_that_differ_without_a_majority(gloo4):
    for said in gloo4.run(cases.replicas_are_caught):
        assert "parameter last.bias is not the same on all ranks: no majority of ranks holds the same, 0 and 1 " in said
        assert "against 2 and 3" in said


def test_in_a_subgroup_the_timeout_counts_and_ranks_are_global(gloo4):
    said = gloo4.run(cases.lost_in_a_subgroup)
    assert "rank 3 does answer, but did not come to step 3 in time" in said[1]
    assert "This rank, 1, saw in step 3: " in said[1]
    assert "4000ms" in said[1]
    assert said[0] == said[2] == "outside"


def test_a_hook_that_is_handed_no_bucket(gloo4):
    for said in gloo4.run(cases.no_bucket):
        assert "TypeError: DDP handed the hook a tuple instead of a bucket" in said
        assert 'optimize_ddp = "ddp_optimizer"' in said


# ---- kinds of gradients, parameters and optimizers -----------------------------------------------


def test_gradients_of_unusual_dtypes(gloo4):
    specs = ["none", "topk", "ErrorFeedback(AllGather(TopK(0.1, values=BF16())))", "powersgd", "int8"]
    for found in gloo4.run(cases.dtypes, specs):
        for (kind, spec), result in found.items():
            exact = {"complex64": 1e-6, "float64": 1e-15 if spec == "none" else 1e-6, "bfloat16": 0.05}[kind]
            assert result["error"] < exact, f"{kind}, {spec}: {result}"
            rounded = kind == "float64" and spec != "none"
            assert ("weight: gradients in float64 are rounded to float32" in str(result["warned"])) == rounded


def test_gradients_and_optimizers_that_are_refused_at_attach(gloo4):
    for said in gloo4.run(cases.refusals):
        assert "ValueError: 0.weight has sparse gradients" in said["sparse"]
        assert "must know that the optimizer has none" in said["dgc alone"]
        assert "and so has Adam" in said["dgc adam"]
        assert "it would be applied twice" in said["signum momentum"]
        assert "works with torch.optim.SGD" in said["ahead alone"]
        assert "compresses no parameter of this model: " in said["gradiveq"]
        assert said["sparse with none"].count("0.0") == 6, "the rows of four ranks have a gradient"


@pytest.mark.parametrize("spec", ["topk", "none", "powersgd"])
def test_parameters_frozen_after_ddp_or_ignored_by_it(gloo4, spec):
    for found in gloo4.run(cases.frozen_or_ignored, spec):
        assert found["frozen"] == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert found["ignored"] == ["0.weight", "1.bias", "1.weight"]


# ---- a shared key --------------------------------------------------------------------------------

FRAMED = ["topk", "signsgd", "int8", "vgc", "ErrorFeedback(Ring(TopK(0.1)))", "Ring(BF16(), pieces=1)"]


def test_a_shared_key_changes_no_bit_and_keeps_other_keys_out(gloo4):
    for rank, found in enumerate(gloo4.run(cases.signed, FRAMED)):
        assert all(found.pop(spec) for spec in FRAMED), found
        assert f"rank {'0, 1, 3' if rank == 2 else '2'} has another TERSEGRAD_KEY than this rank" in found["another"]
        assert "TERSEGRAD_KEY (given on rank 0, none on rank 2)" in found["none"]
        assert "fewer than 16 can be guessed" in found["short"]
        assert "sends sums, which have none" in found["sums"]


@pytest.mark.parametrize("how", ["changed", "replayed"])
def test_a_shared_key_keeps_strangers_frames_out(gloo4, how):
    for rank, said in enumerate(gloo4.run(cases.strangers, how, "a key that all ranks were given")):
        if rank != 2:
            assert "FrameError: a frame that rank 2 should have sent is not signed with this run's key" in said
    assert gloo4.run(cases.strangers, "replayed", "")[0] == "nothing", "a checksum is no signature"


# ---- the end of a process ------------------------------------------------------------------------


def _exit_codes(pairs: int, busy: int = 0) -> dict[str, list[int]]:
    command = [sys.executable, str(EXIT_SCRIPT), str(pairs), str(busy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_scripts_that_do_not_close_end_with_0():
    found = _exit_codes(1)
    assert set(found) == {"topk", "none", "powersgd, destroyed", "topk, destroyed", "topk, busy", "powersgd, busy"}
    assert all(codes == [0, 0] for codes in found.values()), found


@pytest.mark.slow
def test_200_processes_on_an_overloaded_machine_end_with_0():
    found = _exit_codes(17, busy=4)
    assert sum(len(codes) for codes in found.values()) >= 200
    assert not any(any(codes) for codes in found.values()), found
