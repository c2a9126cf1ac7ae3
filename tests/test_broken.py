"""The laws catch what they are for: each of these reducers breaks one of them, as a public one did or could."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support import laws
from tersegrad.compressors import Identity, TopK
from tersegrad.core import Bucket, Comm, Compressor, Payload, Reducer, State, later
from tersegrad.reducers import AllGather
from tersegrad.testing import check_compressor, check_reducer

GRADIENT = laws.laplace(laws.BUCKET.numel)


class _Base(Reducer):
    """A correct reducer to break: keeps the law with Identity payloads."""

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return AllGather(Identity()).init(bucket, comm)

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        AllGather(Identity()).reduce(bucket, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _Correct(_Base):
    pass


@dataclass(frozen=True, repr=False)
class _SumInsteadOfMean(_Base):
    def reduce(self, bucket, x, out, state, comm):
        super().reduce(bucket, x, out, state, comm)
        out.mul_(comm.size)


@dataclass(frozen=True, repr=False)
class _ForgetsTheRest(_Base):
    def reduce(self, bucket, x, out, state, comm):
        AllGather(TopK(0.1)).reduce(bucket, x, out, {"values": {}}, comm)
        if out is not x:
            x.zero_()


@dataclass(frozen=True, repr=False)
class _KeepsWhatItSent(_Base):
    def reduce(self, bucket, x, out, state, comm):
        before = x.clone()
        super().reduce(bucket, x, out, state, comm)
        if out is not x:
            x.copy_(before)


@dataclass(frozen=True, repr=False)
class _OwnCopyUnquantised(_Base):
    """The owner keeps its unrounded values, the others see rounded ones: replicas drift."""

    def reduce(self, bucket, x, out, state, comm):
        super().reduce(bucket, x, out, state, comm)
        if comm.rank:
            out.copy_(out.bfloat16())


@dataclass(frozen=True, repr=False)
class _LaundersNan(_Base):
    def reduce(self, bucket, x, out, state, comm):
        super().reduce(bucket, x.nan_to_num_(0.0, 0.0, 0.0), out, state, comm)


@dataclass(frozen=True, repr=False)
class _NanOnlyAtHome(_Base):
    def reduce(self, bucket, x, out, state, comm):
        bad = not bool(x.isfinite().all())
        super().reduce(bucket, x.nan_to_num_(0.0, 0.0, 0.0), out, state, comm)
        if bad:
            out.fill_(float("nan"))


@dataclass(frozen=True, repr=False)
class _ReseedsTheWorld(_Base):
    def reduce(self, bucket, x, out, state, comm):
        torch.manual_seed(0)
        super().reduce(bucket, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _WritesNextDoor(_Base):
    def reduce(self, bucket, x, out, state, comm):
        super().reduce(bucket, x, out, state, comm)
        if out.storage_offset():
            torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(0.0)


@dataclass(frozen=True, repr=False)
class _MemoryInTheObject(_Base):
    def reduce(self, bucket, x, out, state, comm):
        state["_count"] = state.get("_count", 0) + 1  # scratch that is not scratch
        super().reduce(bucket, x, out, state, comm)
        out.add_(0.001 * state["_count"])


@dataclass(frozen=True, repr=False)
class _ChangesStateAtOnce(_Base):
    def reduce(self, bucket, x, out, state, comm):
        state["count"] = state.get("count", 0) + 1
        super().reduce(bucket, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _RemembersNan(_Base):
    def init(self, bucket, comm):
        return {**super().init(bucket, comm), "residual": torch.zeros(bucket.numel)}

    def reduce(self, bucket, x, out, state, comm):
        state["residual"] = torch.full_like(x, float(x.sum()))
        super().reduce(bucket, x, out, state, comm)


@dataclass(frozen=True, repr=False)
class _BucketSizedTable(_Base):
    """A tensor in the state that is neither per element nor a single tensor's own."""

    def init(self, bucket, comm):
        return {**super().init(bucket, comm), "table": torch.zeros(16)}


@dataclass(frozen=True, repr=False)
class _DrawsFromTheClock(_Base):
    def reduce(self, bucket, x, out, state, comm):
        super().reduce(bucket, x, out, state, comm)
        out.add_(torch.rand(1, generator=torch.Generator().manual_seed(torch.Generator().seed() % 2**31)) * 1e-3)


@dataclass(frozen=True, repr=False)
class _DividesByTheNorm(_Base):
    def reduce(self, bucket, x, out, state, comm):
        norm = x.norm()
        super().reduce(bucket, x.div_(norm), out, state, comm)
        out.mul_(norm)


@dataclass(frozen=True, repr=False)
class _SaysThatAllIsWell(_Base):
    def start(self, bucket, x, out, state, comm):
        self.reduce(bucket, x, out, state, comm)
        return lambda: True


@dataclass(frozen=True, repr=False)
class _ForgetsASummand(_Base):
    def start_sum(self, bucket, a, b, total, out, state, comm):
        return self.start(bucket, total.copy_(b), out, state, comm)


@dataclass(frozen=True, repr=False)
class _OverwritesInput(Compressor):
    def encode(self, x, state):
        return Identity().encode(x.mul_(2.0), state)

    def add_decoded(self, payload, acc, scale):
        Identity().add_decoded(payload, acc, scale)


@dataclass(frozen=True, repr=False)
class _LikeIdentity(Compressor):
    def encode(self, x, state):
        return Identity().encode(x, state)

    def add_decoded(self, payload, acc, scale):
        Identity().add_decoded(payload, acc, scale)


@dataclass(frozen=True, repr=False)
class _KeepsTheScaleAtHome(_LikeIdentity):
    def encode(self, x, state):
        state["_scale"] = 4.0
        return super().encode(x / 4.0, state)

    def finish(self, acc, out, state):
        out.mul_(state.get("_scale", 1.0))

    def remove(self, payload, x, state):
        self.accumulate(payload, x, -4.0)


@dataclass(frozen=True, repr=False)
class _RoundsUp(_LikeIdentity):
    unbiased = True
    contracts = False

    def encode(self, x, state):
        return super().encode(torch.where(x.abs() < 1e6, x.mul(16.0).ceil().div(16.0), x), state)


@dataclass(frozen=True, repr=False)
class _Doubles(_LikeIdentity):
    def encode(self, x, state):
        return super().encode(x * 2.01, state)


@dataclass(frozen=True, repr=False)
class _AddsOnTopOfWhatWasThere(_LikeIdentity):
    def sum_decoded(self, payloads, scale, out, state):
        for payload in payloads:
            self.accumulate(payload, out, scale)


@dataclass(frozen=True, repr=False)
class _SaysThatSumsAreNotFinite(_LikeIdentity):
    def sum_decoded(self, payloads, scale, out, state):
        super().sum_decoded(payloads, scale, out, state)
        return False


@dataclass(frozen=True, repr=False)
class _TrustsTheWire(Compressor):
    """Writes wherever the bytes say."""

    def encode(self, x, state):
        payload = Payload.empty(8, x.numel(), state, x.device)
        payload.body.view(torch.int64)[0] = 3
        return payload

    def add_decoded(self, payload, acc, scale):
        place = int.from_bytes(bytes(payload.body[:1].tolist()), "little") % (acc.numel() + 20)
        torch.as_strided(acc, (1,), (1,), acc.storage_offset() + place).add_(scale)


CASES = [
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
    (_AddsOnTopOfWhatWasThere(), "another sum than one after the other"),
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
    (_MemoryInTheObject(), laws.check_state, "scratch dropped between steps, differs"),
    (_DrawsFromTheClock(), laws.check_state, "second run"),
    (_DividesByTheNorm(), lambda r: laws.check_degenerate(r, torch.zeros(10)), "non-finite mean"),
    (_TrustsTheWire(), lambda c: laws.check_hostile_bytes(c, torch.ones(20), 200, 1), "outside the accumulator"),
]


@pytest.mark.parametrize(
    ("broken", "law", "says"), SINGLE_LAWS, ids=[type(broken).__name__ for broken, _, _ in SINGLE_LAWS]
)
def test_a_law_catches(broken, law, says):
    with pytest.raises(AssertionError, match=says):
        law(broken)


def test_the_laws_pass_the_correct_one():
    check_reducer(_Correct())


def test_a_double_memory_is_caught_by_the_telescoping_sum():
    @dataclass(frozen=True, repr=False)
    class _Twice(_Base):
        remembers = True

        def init(self, bucket, comm):
            return {**AllGather(TopK(0.1)).init(bucket, comm), "residual": torch.zeros(bucket.numel)}

        def reduce(self, bucket, x, out, state, comm):
            total = x + 2 * state["residual"]
            AllGather(TopK(0.1)).reduce(bucket, total, out, state, comm)
            later(state, residual=total)
            if out is not x:
                x.zero_()

    with pytest.raises(AssertionError, match="telescoping"):
        laws.check_telescoping(_Twice(), 2, GRADIENT)
