"""``inspect`` and ``bench`` of whole methods: the figures are those of the method that was asked for."""

import re

import pytest
import torch

from tersegrad import parse
from tersegrad.cli import bench, main, whole
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.core import Layout, Step, reduce
from tersegrad.core import state as states
from tersegrad.plan import made_up

LAYOUT = Layout(("weight", "bias"), ((32, 32, 3, 3), (32,)))
GRADIENTS = made_up.gaussian(LAYOUT, 0)
QUICK = "GradiVeQ(slice_size=64, loss=0.1, learn=8, warmup=50, worst=None, tiny=0)"


def inspected(capsys, *argv: str) -> dict[str, str]:
    """The lines of one spec, by their first word."""
    assert main(["inspect", *argv]) == 0
    block = capsys.readouterr().out.split("\n\n")[-1]
    return {line.split()[0]: line for line in block.splitlines()}


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return float(found[1])


def test_inspect_runs_vgc_itself(capsys):
    lines = inspected(capsys, "vgc", "--shape", "32x32x3x3")
    assert "ErrorFeedback(VGC())" in lines["vgc"]
    assert "made-up gradients of 32x32x3x3" in lines["run"]
    assert "made up, as of 32 samples" in lines["squares"]
    sent = number(r"\((.*)%\)", lines["sent"])
    assert 1 < sent < 50, "neither everything nor nothing passes the test"
    assert number(r"torch.topk of (\S+) %", lines["topk"]) == pytest.approx(sent, rel=0.06)


def test_alpha_of_vgc_is_seen(capsys):
    ratios = []
    for alpha in (1.0, 3.0):
        lines = inspected(capsys, f"ErrorFeedback(VGC(alpha={alpha}))", "--shape", "32x32x3x3")
        ratios.append(number(r"(\S+)x fewer", lines["ratio"]))
    assert ratios[1] > 1.5 * ratios[0]


def test_inspect_of_powersgd_counts_both_factors(capsys):
    lines = inspected(capsys, "powersgd", "--shape", "64x100")
    assert f"({4 * 2 * (64 + 100)} bytes)" in lines["payload"]
    assert "torch.topk of 5.1 %" in lines["topk"], "its share of float32's bytes"


def test_inspect_of_gradiveq_is_of_its_compressed_phase(capsys):
    lines = inspected(capsys, QUICK, "--shape", "32x32x3x3")
    assert number(r"(\d+) coefficients for every", lines["basis"]) < 64
    assert number(r"(\S+)x fewer", lines["ratio"]) > 1.5
    assert "step 31 of 2 workers" in lines["run"]


def test_a_basis_that_training_would_refuse_is_shown_with_what_it_misses(capsys):
    lines = inspected(capsys, QUICK.replace("worst=None", "worst=1e-9"), "--shape", "32x32x3x3")
    assert number(r"which miss (\d+)% of the energy", lines["basis"]) >= 1
    assert number(r"(\S+)x fewer", lines["ratio"]) > 1.2


def test_inspect_of_auto_shows_every_candidate(capsys):
    assert main(["inspect", "auto", "--shape", "32x32x3x3"]) == 0
    text = capsys.readouterr().out
    for name, method in (("bf16", "BF16()"), ("topk", "TopK("), ("powersgd", "PowerSGD()"), ("twoshot", "TopK(")):
        assert re.search(rf"^auto: {name} = .*{re.escape(method)}", text, re.MULTILINE)


def test_a_gradient_of_the_users_own_has_its_own_shape(tmp_path, capsys):
    torch.save(torch.randn(40, 50), tmp_path / "g.pt")
    assert "gradients of 40x50" in inspected(capsys, "powersgd", "--gradient", str(tmp_path / "g.pt"))["run"]
    assert main(["inspect", "powersgd", "--gradient", str(tmp_path / "g.pt"), "--shape", "3x7"]) == 2
    assert "--shape 3x7 has 21 elements, and there are 2000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["vgc", "powersgd", QUICK, "dgc", "none", "signsgd", "LowMemory(AllGather(TopK(0.1)))", "Every(Dense(), n=2)"],
)
def test_bench_times_whole_methods(text):
    x = GRADIENTS.signal
    (result,), baselines = bench.run([text], x, 2, GRADIENTS)
    assert result.encode.median > 0
    assert len(result.encode.rounds) == len(result.accumulate.rounds) == 2
    shown = bench.show([result], baselines, x.numel(), GRADIENTS)
    assert text in shown
    assert "run by 2 workers in turns" in shown
    assert "gradients of 32x32x3x3 and 32: the vector, and noise of 4 times its size" in shown


def test_bench_of_auto_has_a_row_for_each_candidate():
    results, _ = bench.run(["auto"], GRADIENTS.signal, 1, GRADIENTS)
    assert [r.spec for r in results] == [f"auto: {name}" for name in ("bf16", "topk", "powersgd", "twoshot")]
    assert [r.ratio for r in results][:2] == [0.5, 0.03]


def test_bytes_are_those_that_a_worker_sends_in_that_step():
    spec = parse("ErrorFeedback(VGC(alpha=1.5))")
    method = whole.Whole(spec, GRADIENTS)
    before = method.steps

    def work(comm):
        state = spec.init(LAYOUT, comm)
        for number in range(before + 1):
            metered = Metered(comm)
            x = GRADIENTS.of(comm.rank, number)
            step = Step(LAYOUT, number, squares=GRADIENTS.squares)
            reduce(spec, step, x, torch.empty_like(x), state, metered)
            states.commit(state)
        return metered.total.sent

    assert method.step().nbytes == threads.run(2, work)[0]


def test_the_error_is_what_the_mean_lacks():
    method = whole.Whole(parse("MomentumCorrection(AllGather(TopK(0.25)), momentum=0.5)"), GRADIENTS)
    seen = method.step()
    assert 0 < whole.error_of(seen) < 1
    assert whole.error_of(whole.Whole(parse("none"), GRADIENTS).step()) == 0
    assert whole.topk_error(torch.tensor([3.0, 0.0, 4.0]), 1 / 3) == pytest.approx(3 / 5)


def test_workers_and_steps_have_other_noise_around_the_same_signal():
    many = torch.stack([GRADIENTS.of(rank, step) for rank in range(2) for step in range(400)])
    weight = slice(0, LAYOUT.sizes[0])
    assert float((many.mean(0) - GRADIENTS.signal)[weight].norm() / GRADIENTS.signal[weight].norm()) < 0.25
    noise = (many - GRADIENTS.signal)[:, weight]
    assert float(noise.square().mean() / GRADIENTS.signal[weight].square().mean()) == pytest.approx(16, rel=0.01)
    assert not torch.equal(many[0], many[1])


def test_a_worker_that_fails_is_named_by_its_error():
    broken = made_up.Gradients(GRADIENTS.signal, Layout.flat(5))
    with pytest.raises(Exception, match=r"sizes|size"):
        whole.Whole(parse("none"), broken)
