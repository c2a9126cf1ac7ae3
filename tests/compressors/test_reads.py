"""What kernels tell the host is read with ``kernels.read``, and all of an encoding at once: on a device it waits."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from support.registered import COMPRESSORS
from tersegrad import kernels
from tersegrad.core import Layout, Sum, encode
from tersegrad.core import state as states
from tersegrad.core.pausing import ask, done, run, together
from tersegrad.kernels import cpu
from tersegrad.kernels.ops import OPS
from tersegrad.specs import parse

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((90, 100), (100,), (30, 10, 3, 3)))
SIZES = {"packed_nbytes", "top_k_capacity"}  # which the host computes itself

# How often an encoding reads, at most; of all other compressors: once.
MOST = {
    # Nothing is asked.
    "Identity": 0,
    "FP16": 0,
    "BF16": 0,
    "PerTensor(BF16())": 0,
    # The number of positions, on which all launches depend that follow.
    "Threshold": 2,
    "Strom": 2,
    # Whether blocks must be scaled, before their bins are compared.
    "FFT": 2,
    "PerTensor(FFT())": 2,
    # A threshold from a sample, and then as above.
    "SampledTopK": 3,
    # A threshold that is searched: each count decides where to look next.
    "GaussianK": 6,
    "RedSync": 8,
    "SIDCo": 6,
    "FFT(theta=0.9, select='sidco', order='channels_last')": 6,
}


def most(spec):
    return MOST.get(repr(spec), MOST.get(type(spec).__name__, 1))


class Unread:
    """An answer that is of no use until it was read."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        raise AssertionError("an answer was looked at without kernels.read")

    __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __bool__
    __hash__ = None


def unread(result):
    if isinstance(result, tuple):
        fields = [unread(value) for value in result]
        return type(result)(*fields) if hasattr(result, "_fields") else tuple(fields)
    return Unread(result) if isinstance(result, bool | int | float) else result


def answering(name):
    op = getattr(cpu, name)
    return op if name in SIZES else lambda *args: unread(op(*args))


@contextmanager
def counting():
    """The number of answers of each read; kernels give answers that cannot be looked at otherwise."""
    read, calls = kernels.read, []

    def counted(*answers):
        calls.append(len(answers))
        return read(*(answer.value if isinstance(answer, Unread) else answer for answer in answers))

    backend = kernels.register("cpu", {name: answering(name) for name in OPS if hasattr(cpu, name)})
    try:
        with mock.patch.object(kernels, "read", counted):
            yield calls
    finally:
        kernels.unregister(backend)


GRADIENT = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0)).pow_(3)


@pytest.mark.parametrize("spec", COMPRESSORS, ids=repr)
def test_an_encoding_reads_once_or_as_often_as_its_data_flow_demands(spec):
    state = spec.init(LAYOUT, 0)
    encode(spec, GRADIENT, state)  # tunes what is tuned every so many steps
    states.commit(state)
    for x in (-GRADIENT, Sum(0.5 * GRADIENT, 0.5 * GRADIENT, torch.empty_like(GRADIENT))):
        with counting() as calls:
            assert encode(spec, x, state).finite
        states.commit(state)
        assert len(calls) <= most(spec), calls


@pytest.mark.parametrize("spec", COMPRESSORS, ids=repr)
def test_so_does_one_that_finds_a_nan(spec):
    state = spec.init(LAYOUT, 0)
    for where in (0, 5000, -1):
        x = GRADIENT.clone()
        x[where] = torch.nan
        with counting() as calls:
            payload = encode(spec, Sum(x, torch.zeros_like(x), torch.empty_like(x)), state)
        assert not payload.finite or not bool(payload.body.view(payload_dtype(spec)).isfinite().all())
        assert len(calls) <= most(spec) + 1, calls  # one more where something is tuned
        states.roll_back(state)


def payload_dtype(spec):
    return getattr(spec, "dtype", getattr(getattr(spec, "inner", None), "dtype", torch.float32))


def test_values_and_positions_are_read_together_whatever_their_codec():
    for values in ("Blockwise()", "QSGD(bits=8)", "Natural()", "RangeFloat(4)", "BF16()"):
        spec = parse(f"PerTensor(TopK(0.1, values={values}))")
        state = spec.init(LAYOUT, 0)
        encode(spec, GRADIENT, state)
        states.commit(state)
        with counting() as calls:
            encode(spec, -GRADIENT, state)
        assert len(calls) == 1
        assert calls[0] >= 3 * len(LAYOUT.names), "of every tensor: is it finite, are its values, how long are indices"


def test_a_look_without_reading_is_noticed():
    with counting(), pytest.raises(AssertionError, match=r"without kernels\.read"):
        bool(kernels.on(torch.ones(3)).all_finite(torch.ones(3)))


def test_work_that_pauses_goes_on_together():
    def sum_of(*numbers):
        total = 0
        for number in numbers:
            (got,) = yield (number,)
            total += got
        return total

    def all_work():
        return (yield from together(sum_of(1), done("nothing"), sum_of(2, 3, 4), ask(5, 6), sum_of()))

    with counting() as calls:
        assert run(all_work()) == [1, "nothing", 9, (5, 6), 0]
    assert calls == [4, 1, 1]
    assert run(together()) == []
