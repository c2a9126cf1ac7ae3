"""The laws catch what they are for: each of these reducers breaks one of them, as a public one did or could."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tersegrad.compressors import Identity, TopK
from tersegrad.core import (
    Comm,
    Compressor,
    Layout,
    Memory,
    Payload,
    Reducer,
    State,
    Step,
    Sum,
    Traits,
    Wrapper,
    accumulate,
    added,
    back_buffer,
    decode_sum,
    nothing_left,
    param,
    reduce,
    stage,
    subtract,
)
from tersegrad.reducers import AllGather
from tersegrad.testing import check_compressor, check_reducer
from tersegrad.testing.compressors import check_decode_sum, check_hostile_bytes
from tersegrad.testing.inputs import GRADIENT
from tersegrad.testing.reducers import check_degenerate, check_idle, check_state, check_telescoping


class _Base(Reducer):
    """A correct reducer to break: keeps the law with Identity payloads."""

    def init(self, layout: Layout, comm: Comm) -> State:
        return AllGather(Identity()).init(layout, comm)

    def start(self, step: Step, x, out: Tensor, state: State, comm: Comm):
        self.all_at_once(step, added(x), out, state, comm)
        return nothing_left

    def all_at_once(self, step: Step, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        reduce(AllGather(Identity()), step, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _Correct(_Base):
    pass


@dataclass(frozen=True, repr=False)
class _SumInsteadOfMean(_Base):
    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x, out, state, comm)
        out.mul_(comm.size)


@dataclass(frozen=True, repr=False)
class _ForgetsTheRest(_Base):
    def all_at_once(self, step, x, out, state, comm):
        reduce(AllGather(TopK(0.1)), step, x, out, {"values": {}}, comm)
        if out is not x:
            x.zero_()


@dataclass(frozen=True, repr=False)
class _KeepsWhatItSent(_Base):
    def all_at_once(self, step, x, out, state, comm):
        before = x.clone()
        super().all_at_once(step, x, out, state, comm)
        if out is not x:
            x.copy_(before)


@dataclass(frozen=True, repr=False)
class _OwnCopyUnquantised(_Base):
    """The owner keeps its unrounded values, the others see rounded ones: replicas drift."""

    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x, out, state, comm)
        if comm.rank:
            out.copy_(out.bfloat16())


@dataclass(frozen=True, repr=False)
class _LaundersNan(_Base):
    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x.nan_to_num_(0.0, 0.0, 0.0), out, state, comm)


@dataclass(frozen=True, repr=False)
class _NanOnlyAtHome(_Base):
    def all_at_once(self, step, x, out, state, comm):
        bad = not bool(x.isfinite().all())
        super().all_at_once(step, x.nan_to_num_(0.0, 0.0, 0.0), out, state, comm)
        if bad:
            out.fill_(float("nan"))


@dataclass(frozen=True, repr=False)
class _ReseedsTheWorld(_Base):
    def all_at_once(self, step, x, out, state, comm):
        torch.manual_seed(0)
        super().all_at_once(step, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _WritesNextDoor(_Base):
    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x, out, state, comm)
        if out.storage_offset():
            torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(0.0)


@dataclass(frozen=True, repr=False)
class _MemoryInTheObject(_Base):
    def all_at_once(self, step, x, out, state, comm):
        state["_count"] = state.get("_count", 0) + 1  # scratch that is not scratch
        super().all_at_once(step, x, out, state, comm)
        out.add_(0.001 * state["_count"])


@dataclass(frozen=True, repr=False)
class _ChangesStateAtOnce(_Base):
    def all_at_once(self, step, x, out, state, comm):
        state["count"] = state.get("count", 0) + 1
        super().all_at_once(step, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _RemembersNan(_Base):
    def init(self, layout, comm):
        return {**super().init(layout, comm), "residual": layout.zeros()}

    def all_at_once(self, step, x, out, state, comm):
        state["residual"] = torch.full_like(x, float(x.sum()))
        super().all_at_once(step, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _BucketSizedTable(_Base):
    """A tensor in the state that is neither per element nor a single tensor's own."""

    def init(self, layout, comm):
        return {**super().init(layout, comm), "table": torch.zeros(16)}


@dataclass(frozen=True, repr=False)
class _DrawsFromTheClock(_Base):
    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x, out, state, comm)
        out.add_(torch.rand(1, generator=torch.Generator().manual_seed(torch.Generator().seed() % 2**31)) * 1e-3)


@dataclass(frozen=True, repr=False)
class _DividesByTheNorm(_Base):
    def all_at_once(self, step, x, out, state, comm):
        norm = x.norm()
        super().all_at_once(step, x.div_(norm), out, state, comm)
        out.mul_(norm)


@dataclass(frozen=True, repr=False)
class _SaysThatAllIsWell(_Base):
    def start(self, step, x, out, state, comm):
        super().start(step, x, out, state, comm)
        return lambda: True


@dataclass(frozen=True, repr=False)
class _ForgetsASummand(_Base):
    def start(self, step, x, out, state, comm):
        if isinstance(x, Sum):
            x = x.total.copy_(x.b)
        return super().start(step, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _OverwritesInput(Compressor):
    def encode(self, x, state):
        return Identity().encode(x.mul_(2.0), state)

    def decode_add(self, payload, acc, scale):
        Identity().decode_add(payload, acc, scale)


@dataclass(frozen=True, repr=False)
class _LikeIdentity(Compressor):
    def encode(self, x, state):
        return Identity().encode(x, state)

    def decode_add(self, payload, acc, scale):
        Identity().decode_add(payload, acc, scale)


@dataclass(frozen=True, repr=False)
class _KeepsTheScaleAtHome(_LikeIdentity):
    def encode(self, x, state):
        state["_scale"] = 4.0
        return super().encode(x / 4.0, state)


@decode_sum.register
def _decode_with_the_scale(compressor: _KeepsTheScaleAtHome, payloads, scale, out, state):
    out.zero_()
    for payload in payloads:
        accumulate(compressor, payload, out, scale)
    out.mul_(state.get("_scale", 1.0))


@subtract.register
def _subtract_with_the_scale(compressor: _KeepsTheScaleAtHome, payload, x, state):
    accumulate(compressor, payload, x, -4.0)


@dataclass(frozen=True, repr=False)
class _RoundsUp(_LikeIdentity):
    def traits(self):
        return Traits(unbiased=True, contracts=False)

    def encode(self, x, state):
        return super().encode(torch.where(x.abs() < 1e6, x.mul(16.0).ceil().div(16.0), x), state)


@dataclass(frozen=True, repr=False)
class _Doubles(_LikeIdentity):
    def encode(self, x, state):
        return super().encode(x * 2.01, state)


@dataclass(frozen=True, repr=False)
class _SaysThatItIsExact(_LikeIdentity):
    def traits(self):
        return Traits(error=0.0)

    def encode(self, x, state):
        return super().encode(x.bfloat16().float(), state)


@dataclass(frozen=True, repr=False)
class _AddsOnTopOfWhatWasThere(_LikeIdentity):
    pass


@decode_sum.register
def _decode_on_top(compressor: _AddsOnTopOfWhatWasThere, payloads, scale, out, state):
    for payload in payloads:
        accumulate(compressor, payload, out, scale)


@dataclass(frozen=True, repr=False)
class _SaysThatSumsAreNotFinite(_LikeIdentity):
    pass


@decode_sum.register
def _decode_and_say_no(compressor: _SaysThatSumsAreNotFinite, payloads, scale, out, state):
    out.zero_()
    for payload in payloads:
        accumulate(compressor, payload, out, scale)
    return False


@dataclass(frozen=True, repr=False)
class _TrustsTheWire(Compressor):
    """Writes wherever the bytes say."""

    def encode(self, x, state):
        payload = Payload.empty(8, x.numel(), state, x.device)
        payload.body.view(torch.int64)[0] = 3
        return payload

    def decode_add(self, payload, acc, scale):
        place = int.from_bytes(bytes(payload.body[:1].tolist()), "little") % (acc.numel() + 20)
        torch.as_strided(acc, (1,), (1,), acc.storage_offset() + place).add_(scale)


# ---- what states that it may lose something is held to that ----------------------------------------


@dataclass(frozen=True, repr=False)
class _Scaled(_Base):
    """The mean times a factor, while all of x is gone; it states that it may lose as much as anybody may."""

    factor: float = param(1.5)

    def loses(self, workers):
        return 0.5

    def all_at_once(self, step, x, out, state, comm):
        super().all_at_once(step, x, out, state, comm)
        out.mul_(self.factor)


@dataclass(frozen=True, repr=False)
class _LosesMoreThanItStates(_Base):
    def loses(self, workers):
        return 0.01

    def all_at_once(self, step, x, out, state, comm):
        x[::2] = 0.0
        super().all_at_once(step, x, out, state, comm)
        if out is x:
            return
        x.zero_()


@dataclass(frozen=True, repr=False)
class _StatesThatItMayLoseAll(_Base):
    def loses(self, workers):
        return 1.0


@dataclass(frozen=True, repr=False)
class _Smuggler(Reducer):
    """All bytes but four go past the meter."""

    def init(self, layout, comm):
        return {}

    def start(self, step, x, out, state, comm):
        x, past = added(x), comm
        while hasattr(past, "inner"):
            past = past.inner
        if out is not x:
            out.copy_(x)
            x.zero_()
        past.all_reduce(out.div_(comm.size))
        comm.all_reduce(torch.zeros(1))
        return nothing_left


# ---- wrappers ------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _WaitsInStart(Wrapper):
    inner: Reducer = param(AllGather(TopK(0.1)))

    def start(self, step, x, out, state, comm):
        finite = reduce(self.inner, step, x, out, state["inner"], comm)
        return lambda: finite


@dataclass(frozen=True, repr=False)
class _AddsUpEarly(Wrapper):
    inner: Reducer = param(AllGather(TopK(0.1)))

    def start(self, step, x, out, state, comm):
        return super().start(step, added(x), out, state, comm)


@dataclass(frozen=True, repr=False)
class _SecretMemory(Reducer):
    """A residual that nobody is told of: two such memories in a chain would not be refused."""

    def init(self, layout, comm):
        return {"residual": layout.zeros(), "inner": AllGather(TopK(0.1)).init(layout, comm)}

    def start(self, step, x, out, state, comm):
        x = added(x)
        total = torch.add(state["residual"], x, out=back_buffer(state, "residual"))
        reduce(AllGather(TopK(0.1)), step, total, out, state["inner"], comm)
        stage(state, residual=total)
        if out is not x:
            x.zero_()
        return nothing_left

    def residual(self, layout, state):
        return state["residual"]

    def clear(self, layout, state):
        stage(state, residual=back_buffer(state, "residual").zero_())


@dataclass(frozen=True, repr=False)
class _ForgetsWhatNobodyUsed(Memory):
    """Where one worker has no gradient, its residual is neither sent nor kept."""

    inner: Reducer = param(AllGather(TopK(0.1)))

    def start(self, step, x, out, state, comm):
        total = self._total(step, x, state)
        finish_inner = self.inner.start(step, total, out, state["inner"], comm)

        def finish():
            finite = finish_inner()
            stage(state, residual=total.total)
            if out is not total.b:
                total.b.zero_()
            return finite

        return finish


CASES = [
    (_Scaled(1.5), "times what left the workers"),
    (_Scaled(0.5), "times what left the workers"),
    (_Scaled(0.0), "conservation|times what left"),
    (_Smuggler(), "were counted"),
    (_LosesMoreThanItStates(), "conservation"),
    (_StatesThatItMayLoseAll(), "states that it may lose"),
    (_WaitsInStart(), "it waits in start"),
    (_AddsUpEarly(), "adds a Sum up"),
    (_SecretMemory(), "nothing in it is a Memory"),
    (_SaysThatItIsExact(), "the stated error"),
    (_SumInsteadOfMean(), "conservation"),
    (_ForgetsTheRest(), "conservation"),
    (_KeepsWhatItSent(), "conservation"),
    (_OwnCopyUnquantised(), "replicas differ"),
    (_LaundersNan(), "given a finite mean"),
    (_NanOnlyAtHome(), "rank 0 was given a finite"),
    (_ReseedsTheWorld(), "torch's global generator"),
    (_WritesNextDoor(), "outside x or out"),
    (_ChangesStateAtOnce(), "changed the state itself"),
    (_RemembersNan(), "changed the state itself"),
    (_BucketSizedTable(), "one entry per element"),
    (_SaysThatAllIsWell(), "was said to be True"),
    (_ForgetsASummand(), "another mean"),
    (_OverwritesInput(), "encode changed its input"),
    (_KeepsTheScaleAtHome(), "payload alone decodes to something else"),
    (_SaysThatSumsAreNotFinite(), "it says of a sum that it is finite: False"),
    (_RoundsUp(), "unbiased, it says"),
    (_Doubles(), "the rest is longer"),
]


@pytest.mark.parametrize(("broken", "says"), CASES, ids=[type(broken).__name__ for broken, _ in CASES])
def test_the_laws_catch(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_reducer(broken) if isinstance(broken, Reducer) else check_compressor(broken)


# These break several laws, and the kit stops at the first; here is the one that they are for.
SINGLE_LAWS = [
    (_AddsOnTopOfWhatWasThere(), lambda c: check_decode_sum(c, torch.ones(20)), "another sum than one after the other"),
    (_MemoryInTheObject(), check_state, "scratch dropped between steps, differs"),
    (_DrawsFromTheClock(), check_state, "second run"),
    (_DividesByTheNorm(), lambda r: check_degenerate(r, torch.zeros(10)), "non-finite mean"),
    (_ForgetsWhatNobodyUsed(), check_idle, "conservation, some idle"),
    (_TrustsTheWire(), lambda c: check_hostile_bytes(c, torch.ones(20), 200, 1), "outside the accumulator"),
]


@pytest.mark.parametrize(
    ("broken", "law", "says"), SINGLE_LAWS, ids=[type(broken).__name__ for broken, _, _ in SINGLE_LAWS]
)
def test_a_law_catches(broken, law, says):
    with pytest.raises(AssertionError, match=says):
        law(broken)


def test_the_laws_pass_the_correct_one():
    check_reducer(_Correct())


def test_a_residual_that_is_added_twice_is_caught_by_the_telescoping_sum():
    @dataclass(frozen=True, repr=False)
    class _Twice(Memory):
        inner: Reducer = param(AllGather(TopK(0.1)))

        def start(self, step, x, out, state, comm):
            x = added(x)
            total = x + 2 * state["residual"]
            reduce(self.inner, step, total, out, state["inner"], comm)
            stage(state, residual=total)
            if out is not x:
                x.zero_()
            return nothing_left

    with pytest.raises(AssertionError, match="telescoping"):
        check_telescoping(_Twice(), 2, GRADIENT)
