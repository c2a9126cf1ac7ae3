"""``tersegrad bench``: what is compared with what, and that the encodings are those of a running training."""

import pytest
import torch

from tersegrad import parse
from tersegrad.cli import bench

X = torch.distributions.Laplace(0.0, 1.0).sample((20_000,))


def test_topk_is_asked_for_as_many_as_the_spec_sends():
    specs = ["TopK(0.05)", "sidco", "bf16", "AllGather(PerTensor(TopK(0.002)))"]
    results, baselines = bench.run(specs, X, 2)
    assert [r.topk for r in results] == [f"torch.topk of {share} %" for share in ("5", "1", "50", "0.2")]
    assert set(baselines) == {"copy", "add_", *(r.topk for r in results)}
    text = bench.show(results, baselines, X.numel())
    assert "topk/ at own ratio" in text
    assert "(0.2 %)" in text


def test_one_ratio_for_all_is_said_in_the_heading():
    results, baselines = bench.run(["TopK(0.05)", "ErrorFeedback(AllGather(SIDCo(ratio=0.05)))"], X, 2)
    assert "topk/ at 5 %" in bench.show(results, baselines, X.numel())


def test_a_schedule_is_measured_past_its_beginning():
    (result,), _ = bench.run(["topk4"], X, 1)
    assert result.ratio == 0.03
    assert result.density == pytest.approx(0.03, rel=0.01)


def test_a_residual_has_built_up_where_the_spec_remembers():
    specs = [parse("topk"), parse("TopK(0.01)")]
    with_memory, without = (bench._Contestant(spec, parse("TopK(0.01)"), X) for spec in specs)
    assert float(with_memory.residual.norm()) > 2 * float(X.norm()), "as much as some steps have not sent"
    assert not bool(without.residual.any())
    assert 0.8 < with_memory.error() < 1


@pytest.mark.parametrize(
    "text", ["AllGather(FFT())", "fft", "ErrorFeedback(AllGather(FFT()))", "qsgd", "int8", "dgc", "efsignsgd"]
)
def test_every_kind_of_compressor_is_timed(text):
    (result,), baselines = bench.run([text], X, 1)
    assert result.encode.median > 0
    assert result.accumulate.median > 0
    assert 0 < result.error < 1
    assert text in bench.show([result], baselines, X.numel())
