"""AllReduce: bodies are divided, added on their way and decoded once; only what is Summable may be."""

import pytest
import torch

from support.cases import cases
from support.exchange_cases import reduced
from support.registered import ONE_OF_EACH
from tersegrad import AllReduce, Dense, Identity, RandomK, TopK
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.compressors import BF16, FP16
from tersegrad.core import Layout, Step, Summable, reduce


def gaussian(rank, n=1000):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


@cases(codec=[BF16(), FP16(), Identity()], size=[1, 2, 3, 4])
def test_the_sum_is_made_in_the_compressed_form(codec, size):
    """As torch adds them, worker after worker, after dividing; a worker's rest is what its own share did not carry."""
    xs = [gaussian(rank) for rank in range(size)]
    shares = [x.to(codec.dtype) / size for x in xs]
    total = shares[0].clone()
    for share in shares[1:]:
        total = total + share
    for x, share, (out, rest) in zip(xs, shares, reduced(AllReduce(codec), xs), strict=True):
        assert torch.equal(out, total.float())
        assert torch.allclose(rest, x - size * share.float(), atol=1e-6)


def test_large_values_are_divided_before_they_are_added():
    xs = [torch.full((10,), 60000.0) for _ in range(4)]  # a sum of two is beyond float16
    for out, _ in reduced(AllReduce(FP16()), xs):
        assert torch.equal(out, torch.full((10,), 60000.0))


def test_workers_draw_the_same_positions():
    xs = [gaussian(rank) + 3.0 for rank in range(3)]
    out, rest = reduced(AllReduce(RandomK(0.1)), xs)[1]
    sent = out != 0
    assert int(sent.sum()) == 100
    torch.testing.assert_close(out[sent], torch.stack(xs).mean(0)[sent])
    assert torch.equal(rest[~sent], xs[1][~sent])
    assert float(rest[sent].abs().max()) < 1e-5


def test_traffic_does_not_grow_with_the_workers():
    def payload(size):
        def work(comm):
            meter, x, layout, reducer = Metered(comm), gaussian(comm.rank), Layout.flat(1000), AllReduce(BF16())
            reduce(reducer, Step(layout), x, x, reducer.init(layout, comm), meter)
            return meter.total.payload, meter.total.calls

        return set(threads.run(size, work))

    assert all(payload(size) == {(2000, 1)} for size in (2, 3, 5))


def test_what_it_may_lose_is_rounding_in_the_narrow_form():
    assert [AllReduce(Identity()).loses(n) for n in (2, 8)] == [0.0, 0.0]
    assert [AllReduce(BF16()).loses(n) for n in (2, 8)] == [2 * 2.0**-7, 8 * 2.0**-7]
    assert AllReduce(FP16()).loses(4) == 4 * 2.0**-10


def test_what_is_not_summable_is_refused_with_what_to_use():
    with pytest.raises(
        ValueError, match=r"TopK payloads cannot be added before decoding. Use AllGather\(TopK\(ratio=0.1\)\)"
    ):
        AllReduce(TopK(0.1))
    for compressor in ONE_OF_EACH:
        if isinstance(compressor, Summable):
            assert AllReduce(compressor).compressor == compressor
        else:
            with pytest.raises(ValueError, match="cannot be added before decoding"):
                AllReduce(compressor)
    with pytest.raises(TypeError, match=r"Write e\.g\. AllReduce\(BF16\(\)\)"):
        AllReduce(Dense())
