"""Every law over every registered class: a new method is tested by being there."""

import pytest
import torch

import laws
from registered import COMPRESSORS, REDUCERS
from tersegrad.reducers import AllReduce
from tersegrad.spec import registry

GRADIENT = laws.laplace(laws.BUCKET.numel)

every_reducer = pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


def test_every_class_has_a_working_example():
    for cls in registry().values():
        assert any(type(spec) is cls for spec in [*COMPRESSORS, *REDUCERS]), f"{cls.__name__} has no example"
        assert cls.__doc__
        assert "\n" not in cls.__doc__.splitlines()[0]


@every_size
@every_reducer
def test_conservation(reducer, size):
    laws.check_conservation(reducer, size, GRADIENT)


@every_size
@pytest.mark.parametrize("reducer", [r for r in REDUCERS if isinstance(r, AllReduce)], ids=repr)
def test_a_sum_made_on_the_way_loses_only_rounding(reducer, size):
    laws.check_conservation(reducer, size, GRADIENT, lost=2.0**-6)


@every_size
@every_reducer
def test_replicas_identical(reducer, size):
    laws.check_replicas_identical(reducer, size, GRADIENT)


@pytest.mark.parametrize("size", [1, 3])
@every_reducer
def test_in_place(reducer, size):
    laws.check_in_place(reducer, size, GRADIENT)


@every_size
@pytest.mark.parametrize("reducer", [r for r in REDUCERS if r.remembers], ids=repr)
def test_telescoping(reducer, size):
    laws.check_telescoping(reducer, size, GRADIENT)


@every_reducer
def test_stays_inside(reducer):
    laws.check_stays_inside(reducer, 2, GRADIENT)


@pytest.mark.parametrize("spec", [*REDUCERS, *COMPRESSORS], ids=repr)
def test_repr_is_the_expression(spec):
    laws.check_repr(spec)


@every_reducer
def test_checkpoint(reducer):
    laws.check_checkpoint(reducer, 2, GRADIENT)


@every_reducer
def test_scratch_is_scratch(reducer):
    laws.check_scratch_is_scratch(reducer, 2, GRADIENT)


@pytest.mark.parametrize("name", laws.DEGENERATE)
@every_reducer
def test_degenerate(reducer, name):
    laws.check_degenerate(reducer, 2, laws.DEGENERATE[name])


@pytest.mark.parametrize("where", [0, 700, -1])
@pytest.mark.parametrize("bad", laws.NONFINITE)
@every_reducer
def test_nonfinite(reducer, bad, where):
    laws.check_nonfinite(reducer, 3, GRADIENT, laws.NONFINITE[bad], where)


@every_reducer
def test_rng_untouched(reducer):
    laws.check_rng_untouched(reducer, GRADIENT)


@every_reducer
def test_deterministic(reducer):
    laws.check_deterministic(reducer, 2, GRADIENT)


@every_reducer
def test_state_rules(reducer):
    laws.check_state_rules(reducer, GRADIENT)


@every_compressor
def test_codec_leaves_input(compressor):
    for x in [GRADIENT(0, 0), *laws.DEGENERATE.values()]:
        laws.check_codec_leaves_input(compressor, x.clone())


@every_compressor
def test_hostile_bytes(compressor):
    laws.check_hostile_bytes(compressor, GRADIENT(0, 0), cases=300, seed=11)


@every_compressor
def test_wrong_length_is_refused(compressor):
    x = torch.linspace(-1, 1, 100)
    payload = compressor.encode(x, compressor.init(laws.Bucket.flat(100), 0))
    with pytest.raises(ValueError, match=r"101|100"):
        compressor.accumulate(type(payload)(payload.body, 100), torch.zeros(101))
