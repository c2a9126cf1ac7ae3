"""The laws catch what they are for: each of these reducers breaks one of them, as a public one did or could."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import laws
from tersegrad.compressors import Identity, TopK
from tersegrad.core import Bucket, Comm, Compressor, Payload, Reducer, State, later
from tersegrad.reducers import AllGather

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
class _OverwritesInput(Compressor):
    def encode(self, x, state):
        return Identity().encode(x.mul_(2.0), state)

    def add_decoded(self, payload, acc, scale):
        Identity().add_decoded(payload, acc, scale)


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
    (_SumInsteadOfMean(), lambda r: laws.check_conservation(r, 2, GRADIENT), "conservation"),
    (_ForgetsTheRest(), lambda r: laws.check_conservation(r, 2, GRADIENT), "conservation"),
    (_KeepsWhatItSent(), lambda r: laws.check_conservation(r, 2, GRADIENT), "conservation"),
    (_OwnCopyUnquantised(), lambda r: laws.check_replicas_identical(r, 2, GRADIENT), "replicas differ"),
    (_LaundersNan(), lambda r: laws.check_nonfinite(r, 2, GRADIENT, float("nan"), 5), "given a finite mean"),
    (
        _NanOnlyAtHome(),
        lambda r: laws.check_nonfinite(r, 2, GRADIENT, float("inf"), 5),
        "rank 0 was given a finite",
    ),
    (_ReseedsTheWorld(), lambda r: laws.check_rng_untouched(r, GRADIENT), "torch's global generator"),
    (_WritesNextDoor(), lambda r: laws.check_stays_inside(r, 2, GRADIENT), "outside x or out"),
    (_MemoryInTheObject(), lambda r: laws.check_scratch_is_scratch(r, 2, GRADIENT), "dropping scratch"),
    (_MemoryInTheObject(), lambda r: laws.check_checkpoint(r, 2, GRADIENT), "resumed run differs"),
    (_ChangesStateAtOnce(), lambda r: laws.check_conservation(r, 2, GRADIENT), "changed the state itself"),
    (
        _RemembersNan(),
        lambda r: laws.check_nonfinite(r, 2, GRADIENT, float("nan"), 5),
        "changed the state itself",
    ),
    (_BucketSizedTable(), lambda r: laws.check_state_rules(r, GRADIENT), "one entry per element"),
    (_DrawsFromTheClock(), lambda r: laws.check_deterministic(r, 1, GRADIENT), "two runs differ"),
    (_DividesByTheNorm(), lambda r: laws.check_degenerate(r, 2, torch.zeros(10)), "non-finite mean"),
    (
        _OverwritesInput(),
        lambda c: laws.check_codec_leaves_input(c, GRADIENT(0, 0)),
        "encode changed its input",
    ),
    (
        _TrustsTheWire(),
        lambda c: laws.check_hostile_bytes(c, torch.ones(20), 200, 1),
        "outside the accumulator",
    ),
]


@pytest.mark.parametrize(("broken", "check", "says"), CASES, ids=lambda v: repr(v) if isinstance(v, Reducer) else "")
def test_the_laws_catch(broken, check, says):
    with pytest.raises(AssertionError, match=says):
        check(broken)


def test_the_laws_pass_the_correct_one():
    reducer = _Correct()
    for size in (1, 2, 3):
        laws.check_conservation(reducer, size, GRADIENT)
        laws.check_replicas_identical(reducer, size, GRADIENT)
        laws.check_nonfinite(reducer, size, GRADIENT, float("nan"), 5)
    laws.check_scratch_is_scratch(reducer, 2, GRADIENT)
    laws.check_checkpoint(reducer, 2, GRADIENT)


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
