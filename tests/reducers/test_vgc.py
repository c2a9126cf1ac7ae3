"""VGC: the invariants of the paper's criterion, step by step on one worker and together on several."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.compressors import BF16, Identity
from tersegrad.core import HEADER_NBYTES, Layout, Reducer, Step, reduce, state
from tersegrad.reducers import VGC, Dense
from tersegrad.testing import inputs, runs
from tersegrad.wrappers import ErrorFeedback


class Run:
    """ErrorFeedback(VGC) on one worker, with gradients and squares from outside."""

    def __init__(self, vgc: VGC, numel: int, names: tuple[str, ...] = ("x",)):
        self.reducer: Reducer = ErrorFeedback(vgc)
        self.layout = Layout(names, tuple((numel // len(names),) for _ in names))
        self.comm = threads.run(1, lambda comm: comm)[0]
        self.state = self.reducer.init(self.layout, self.comm)
        self.number = 0

    def step(self, gradient: Tensor, squares: Tensor | None) -> Tensor:
        out = gradient.clone()
        reduce(self.reducer, Step(self.layout, self.number, squares=squares), out, out, self.state, self.comm)
        state.commit(self.state)
        self.number += 1
        return out

    @property
    def r(self) -> Tensor:
        return self.state["residual"]

    @property
    def v(self) -> Tensor:
        return self.state["inner"]["variance"]


def samples(numel: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mean gradient and VGC's squares, sum over samples of (g / B)^2, of a batch of random per-sample gradients."""
    g = torch.randn(batch, numel, generator=torch.Generator().manual_seed(seed)) + 0.3
    return g.mean(0), (g / batch).square().sum(0)


def test_the_printed_algorithm_element_by_element():
    """Against a loop over the elements as the paper writes it, for many steps."""
    vgc = Run(VGC(alpha=1.5, zeta=0.9, values=Identity()), 60)
    r, v = [0.0] * 60, [0.0] * 60
    for step in range(40):
        gradient, squares = samples(60, 8, step)
        sent = vgc.step(gradient, squares)
        for i in range(60):
            r[i], v[i] = r[i] + float(gradient[i]), v[i] + float(squares[i])
            if r[i] ** 2 > 1.5 * v[i]:
                assert float(sent[i]) == pytest.approx(r[i], rel=1e-5)
                r[i], v[i] = 0.0, 0.0
            else:
                assert float(sent[i]) == 0.0
                v[i] *= 0.9
        assert torch.allclose(vgc.r, torch.tensor(r), atol=1e-5)
        assert torch.allclose(vgc.v, torch.tensor(v), atol=1e-5)


@cases(rule=["paper", "ours"])
def test_the_printed_hybrid_element_by_element(rule):
    tau = 0.25 if rule == "paper" else 0.1
    vgc = Run(VGC(alpha=1.0, zeta=0.9, tau=tau, rule=rule), 60)
    r, v = [0.0] * 60, [0.0] * 60
    total = torch.zeros(60)
    for step in range(40):
        gradient, squares = samples(60, 8, step)
        sent = vgc.step(gradient, squares)
        total += gradient - sent
        for i in range(60):
            r[i], v[i] = r[i] + float(gradient[i]), v[i] + float(squares[i])
            if abs(r[i]) > tau and r[i] ** 2 > v[i]:
                part = tau if rule == "paper" else abs(r[i]) // tau * tau
                v[i] = max(v[i] - 2 * abs(r[i]) * part + part * part, 0.0)  # with r before the subtraction
                sign = 1.0 if r[i] > 0 else -1.0
                assert float(sent[i]) == pytest.approx(sign * part)
                r[i] -= sign * part
            else:
                assert float(sent[i]) == 0.0
                v[i] *= 0.9
        assert torch.allclose(vgc.v, torch.tensor(v), atol=1e-5)
    assert torch.allclose(vgc.r, total, atol=1e-5)
    assert (vgc.v >= 0).all()


@cases("alpha expected", [(1.0, 20.0), (1.5, 87.1), (2.0, 247.0)])
def test_pure_noise_waits_as_long_as_the_notes_say(alpha, expected):
    """g ~ N(0, 1), v += 1: steps per send in steady state, simulated for the notes with another program."""
    numel, begin, steps = 4000, 1500, 3000
    vgc = Run(VGC(alpha=alpha, values=Identity()), numel)
    generator, ones = torch.Generator().manual_seed(1), torch.ones(numel)
    sends = 0
    for step in range(steps):
        sent = vgc.step(torch.randn(numel, generator=generator), ones)
        sends += int(sent.count_nonzero()) if step >= begin else 0
    assert numel * (steps - begin) / sends == pytest.approx(expected, rel=0.06)


def test_masks_shrink_as_alpha_grows():
    gradient, squares = samples(5000, 8, 0)
    sent = [Run(VGC(alpha=a, values=Identity()), 5000).step(gradient, squares) != 0 for a in (0.0, 0.5, 1.0, 2.0, 4.0)]
    for weaker, stronger in pairwise(sent):
        assert (weaker | ~stronger).all()
        assert weaker.sum() > stronger.sum() > 0


@cases(scale=[2.0**-20, 2.0**-3, 2.0**15, -1.0])
def test_masks_do_not_depend_on_scale_or_sign(scale):
    plain, scaled = Run(VGC(alpha=1.5), 2000), Run(VGC(alpha=1.5), 2000)
    for step in range(5):
        gradient, squares = samples(2000, 8, step)
        assert torch.equal(plain.step(gradient, squares) * scale, scaled.step(gradient * scale, squares * scale**2))


def test_alpha_0_unquantised_is_dense():
    for ours, dense in zip(
        runs.run(ErrorFeedback(VGC(alpha=0.0, values=Identity())), 3, inputs.laplace(inputs.LAYOUT.numel)),
        runs.run(Dense(), 3, inputs.laplace(inputs.LAYOUT.numel)),
        strict=True,
    ):
        for a, b in zip(ours.means, dense.means, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        assert not ours.held[-1].any()


def test_samples_that_agree_are_sent_if_there_are_more_than_alpha_of_them():
    for batch in (1, 2, 4):  # r^2 <= B v, with equality where all samples are equal
        gradient = torch.ones(10)
        squares = torch.full((10,), 1 / batch)
        for alpha in (1.0, 2.0, 3.0):
            assert bool(Run(VGC(alpha=alpha), 10).step(gradient, squares).any()) == (batch > alpha)


def test_zero_gradients_send_nothing():
    vgc = Run(VGC(alpha=1.0), 100)
    assert not vgc.step(torch.zeros(100), torch.zeros(100)).any()


def test_what_4_bits_cannot_show_waits_and_its_variance_decays():
    gradient = torch.tensor([1.0, 0.75 / 128, 0.74 / 128, 0.74 / 128, 1e-4, 0.5])
    squares = gradient.square() / 100
    vgc = Run(VGC(alpha=1.5, zeta=0.9), 6, ("a", "b"))  # the second tensor has a largest of its own
    sent = vgc.step(gradient, squares)
    assert (sent != 0).tolist() == [True, True, False, True, False, True]
    waiting = sent == 0
    assert torch.equal(vgc.r[waiting], gradient[waiting])
    assert torch.equal(vgc.v[waiting], squares[waiting] * torch.tensor(0.9))
    assert not vgc.v[~waiting].any()


def test_drop_forgets_exactly_the_rounding():
    drop, plain = Run(VGC(alpha=1.5, rounding="drop"), 300), Run(VGC(alpha=1.5, values=Identity()), 300)
    for step in range(10):
        gradient, squares = samples(300, 8, step)
        gradient += gradient.sign() * 0.1  # no dust: all within 7 binades
        drop.step(gradient, squares)
        plain.step(gradient, squares)
        assert torch.equal(drop.r, plain.r)
        assert torch.equal(drop.v, plain.v)


def test_feedback_keeps_exactly_the_rounding():
    vgc = Run(VGC(alpha=1.5), 300)
    total = torch.zeros(300, dtype=torch.float64)
    for step in range(10):
        gradient, squares = samples(300, 8, step)
        total += gradient.double() - vgc.step(gradient, squares).double()
    assert torch.allclose(vgc.r.double(), total, atol=1e-5)


def test_words_carry_the_same_values_in_the_papers_bytes():
    packed, words = (Run(VGC(alpha=1.0, layout=layout), 4000, ("a", "b")) for layout in ("packed", "words"))
    for step in range(3):
        gradient, squares = samples(4000, 8, step)
        sent = packed.step(gradient, squares)
        assert torch.equal(sent, words.step(gradient, squares))
    exchange = words.state["inner"]["exchange"]
    count, nbytes = exchange["_report"]["sent"], exchange["_payload"].numel()
    assert count == int(sent.count_nonzero()) > 0
    assert nbytes >= 4 * count + HEADER_NBYTES
    assert packed.state["inner"]["exchange"]["_payload"].numel() < nbytes


def test_a_residual_that_was_sent_is_cleared_with_its_variance():
    vgc = Run(VGC(alpha=2.0), 100)
    vgc.step(*samples(100, 4, 0))
    residual = vgc.reducer.residual(vgc.layout, vgc.state).clone()
    assert torch.equal(residual, vgc.r)
    assert residual.any()
    vgc.reducer.clear(vgc.layout, vgc.state)
    assert torch.equal(vgc.r, residual), "staged, and not yet committed"
    state.commit(vgc.state)
    assert not vgc.r.any()
    assert not vgc.v.any()


def test_without_squares_it_says_what_is_missing():
    vgc = Run(VGC(), 10)
    with pytest.raises(ValueError, match="no squares"):
        vgc.step(torch.ones(10), None)


@cases(
    "arguments message",
    [
        ({"alpha": -1.0}, "alpha is a number from 0"),
        ({"alpha": True}, "alpha is a number"),
        ({"zeta": 1.5}, "zeta is a number from 0 to 1"),
        ({"tau": 0.0}, "positive number"),
        ({"rounding": "up"}, "'feedback' or 'drop'"),
        ({"squares": "tokens"}, "'samples' or 'sampled' or 'microbatch'"),
        ({"layout": "bits"}, "'packed' or 'words'"),
        ({"values": BF16(), "tau": 0.1}, "Leave values out"),
        ({"values": BF16(), "layout": "words"}, "Leave values out"),
        ({"tau": 0.1, "rounding": "drop"}, "nothing is rounded"),
        ({"tau": 0.1, "layout": "words"}, "no room for a multiple"),
        ({"rule": "mine"}, "'ours' or 'paper'"),
        ({"values": BF16(), "rule": "paper"}, "Leave values out"),
        ({"correction": "after"}, "a matter of the hybrid"),
        ({"tau": 0.1, "correction": "later"}, "'before' or 'after'"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VGC(**arguments)
