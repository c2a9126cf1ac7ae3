"""``VGC(rule="paper")`` and the hybrid against the printed listings, in NumPy float32: bit-equal for 30 steps."""

import numpy as np
import pytest
import torch

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.compressors._multiples import Multiples
from tersegrad.core import Layout, Step, accumulate, encode, reduce, state
from tersegrad.reducers import VGC
from tersegrad.wrappers import ErrorFeedback

F = np.float32
STEPS = 30


def quantised(values, top):
    """Powers of two below 2^floor(log2 top): sign * 2^(E - d), and whether d is at most 7."""
    exponent = np.frexp(top)[1] - 1
    fraction, binade = np.frexp(np.abs(values))
    nearest = np.where(fraction >= 0.75, binade, binade - 1)  # 0.75 * 2^e is 1.5 * 2^(e - 1): ties go up
    nearest = np.minimum(nearest, exponent)
    return np.sign(values) * np.exp2(nearest.astype(F)), exponent - nearest <= 7


class Printed:
    """The listings, for tensors of one worker. ``most``: how many times tau an element may send at once."""

    def __init__(self, sizes, alpha, zeta, tau=None, after=False, most=1):
        self.r, self.v = np.zeros(sum(sizes), F), np.zeros(sum(sizes), F)
        self.sizes, self.alpha, self.zeta = sizes, F(alpha), F(zeta)
        self.tau, self.after, self.most = None if tau is None else F(tau), after, F(most)

    def step(self, gradient, squares):
        self.r, self.v = self.r + gradient, self.v + squares
        passes = self.r * self.r > self.alpha * self.v
        sent = np.zeros_like(self.r)
        if self.tau is None:
            start = 0
            for size in self.sizes:
                part = slice(start, start + size)
                value, visible = quantised(self.r[part], np.abs(self.r[part]).max())
                sent[part] = np.where(passes[part] & visible, value, F(0))
                start += size
            self.r = np.where(passes, F(0), self.r)
            self.v = np.where(passes, F(0), self.v * self.zeta)
            return sent
        passes &= np.abs(self.r) > self.tau
        times = np.minimum(np.floor(np.abs(self.r) / self.tau), self.most)
        part = times * self.tau
        sent = np.where(passes, np.sign(self.r) * part, F(0))
        left = self.r - sent
        r = np.abs(left if self.after else self.r)
        corrected = np.maximum((self.v - F(2) * (r * part)) + part * part, F(0))
        self.v = np.where(passes, corrected, self.v * self.zeta)
        self.r = left
        return sent


def compare(vgc, oracle, sizes, batch, scale, generator):
    layout = Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))
    reducer, comm = ErrorFeedback(vgc), threads.run(1, lambda comm: comm)[0]
    memory = reducer.init(layout, comm)
    drift = generator.normal(0, 0.3, sum(sizes))
    sends = 0
    for number in range(STEPS):
        samples = ((generator.normal(0, 1, (batch, sum(sizes))) + drift) * scale).astype(F)
        gradient, squares = samples.mean(0, dtype=F), np.square(samples / F(batch)).sum(0, dtype=F)
        out = torch.from_numpy(gradient.copy())
        reduce(reducer, Step(layout, number, squares=torch.from_numpy(squares)), out, out, memory, comm)
        state.commit(memory)
        want = oracle.step(gradient, squares)
        assert np.array_equal(out.numpy() != 0, want != 0)
        assert np.array_equal(out.numpy(), want)
        assert np.array_equal(memory["residual"].numpy(), oracle.r)
        assert np.array_equal(memory["inner"]["variance"].numpy(), oracle.v)
        sends += int((want != 0).sum())
    return sends


def random_case(seed):
    generator = np.random.default_rng(seed)
    sizes = [int(n) for n in generator.integers(1, 90, generator.integers(1, 5))]
    alpha, zeta = float(generator.uniform(0.2, 3)), float(generator.uniform(0.9, 1))
    return generator, sizes, alpha, zeta, int(generator.integers(2, 33)), float(10.0 ** generator.integers(-6, 3))


def test_the_printed_listing_to_the_bit():
    sends = 0
    for seed in range(16):
        generator, sizes, alpha, zeta, batch, scale = random_case(seed)
        vgc, oracle = VGC(alpha, zeta, rule="paper"), Printed(sizes, alpha, zeta)
        sends += compare(vgc, oracle, sizes, batch, scale, generator)
    assert sends > 4_000


@cases("rule most", [("paper", 1), ("ours", 256)])
@cases(correction=["before", "after"])
def test_the_hybrid_to_the_bit(rule, most, correction):
    sends = 0
    for seed in range(6):
        generator, sizes, alpha, zeta, batch, scale = random_case(seed)
        tau = scale * float(generator.uniform(0.02, 0.6))
        vgc = VGC(alpha, zeta, tau=tau, rule=rule, correction=correction)
        oracle = Printed(sizes, alpha, zeta, tau, correction == "after", most)
        sends += compare(vgc, oracle, sizes, batch, scale, generator)
    assert sends > 1_500


def test_what_the_paper_loses():
    """Far below the tensor's largest, which need not be sent itself: zeroed and not sent."""
    gradient = torch.tensor([100.0, 0.3, 1.0])
    squares = torch.tensor([1e4, 1e-6, 1e-6])  # the largest does not pass
    for rule, sent, left in (("paper", [0.0, 0.0, 1.0], [100.0, 0.0, 0.0]), ("ours", [0.0, 0.25, 1.0], None)):
        reducer, comm = ErrorFeedback(VGC(1.5, rule=rule)), threads.run(1, lambda comm: comm)[0]
        layout = Layout.flat(3)
        memory, out = reducer.init(layout, comm), gradient.clone()
        reduce(reducer, Step(layout, 0, squares=squares), out, out, memory, comm)
        state.commit(memory)
        assert out.tolist() == sent
        assert memory["residual"].tolist() == (left or [100.0, pytest.approx(0.05), 0.0])


@cases("values nbytes", [([1.0, -1.5, 1.9], 8), ([1.0, -2.5, 1.0], 16), ([1.0, -3.0, 5.9], 24), ([1e9, 2.0, 1.0], 24)])
def test_multiples_take_a_bit_each_while_they_are_one(values, nbytes):
    codec, x = Multiples(1.0), torch.tensor(values)
    payload = encode(codec, x, codec.init(Layout.flat(3), 0))
    assert payload.body.numel() == nbytes
    decoded = torch.zeros(3)
    accumulate(codec, payload, decoded)
    assert torch.equal(decoded, x.sign() * x.abs().floor().clamp(1, 256))
