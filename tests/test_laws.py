"""Every law over every registered class: a new method is tested by being there."""

import pytest

from support.registered import COMPRESSORS, REDUCERS
from tersegrad import testing
from tersegrad.reducers import AllReduce
from tersegrad.specs.parse import registry
from tersegrad.testing import compressors, inputs, reducers

GRADIENT = inputs.GRADIENT

every_reducer = pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


def test_every_class_has_a_working_example():
    for cls in registry().values():
        assert any(type(spec) is cls for spec in [*COMPRESSORS, *REDUCERS]), f"{cls.__name__} has no example"
        assert cls.__doc__
        assert "\n" not in cls.__doc__.splitlines()[0]


@pytest.mark.parametrize("spec", [*REDUCERS, *COMPRESSORS], ids=repr)
def test_repr_is_the_expression(spec):
    testing.check_repr(spec)


@every_size
@every_reducer
def test_step(reducer, size):
    traces = reducers.check_step(reducer, size)
    if isinstance(reducer, AllReduce):
        reducers.assert_conserved(traces, reducer, lost=2.0**-6)  # a sum made on the way loses only rounding


@every_reducer
def test_in_place(reducer):
    reducers.check_in_place(reducer, 3)


@every_reducer
def test_overlap(reducer):
    reducers.check_overlap(reducer)


@every_reducer
def test_sum(reducer):
    reducers.check_sum(reducer)


@pytest.mark.parametrize("reducer", [r for r in REDUCERS if r.remembers], ids=repr)
def test_telescoping(reducer):
    reducers.check_telescoping(reducer, 3)


@every_reducer
def test_stays_inside(reducer):
    reducers.check_stays_inside(reducer)


@every_reducer
def test_state(reducer):
    reducers.check_state(reducer)


@every_reducer
def test_bytes_are_counted(reducer):
    reducers.check_counted(reducer)


@pytest.mark.parametrize("reducer", [r for r in REDUCERS if r.any_dtype], ids=repr)
def test_dtypes(reducer):
    reducers.check_dtypes(reducer)


@every_reducer
def test_degenerate(reducer):
    for name, x in inputs.DEGENERATE.items():
        try:
            reducers.check_degenerate(reducer, x)
        except Exception as error:
            error.add_note(f"gradient: {name}")
            raise


@pytest.mark.parametrize(("bad", "where"), [("nan", 0), ("inf", 700), ("-inf", -1)])
@every_reducer
def test_nonfinite(reducer, bad, where):
    reducers.check_nonfinite(reducer, inputs.NONFINITE[bad], where)


@every_compressor
def test_codec(compressor):
    for x in [GRADIENT(0, 0), *inputs.DEGENERATE.values()]:
        compressors.check_codec(compressor, x.clone())
        compressors.check_payload_is_all(compressor, x)


@every_compressor
def test_sum_decoded(compressor):
    for x in [GRADIENT(0, 0), *inputs.DEGENERATE.values()]:
        compressors.check_sum_decoded(compressor, x)


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c.contracts], ids=repr)
def test_contracts(compressor):
    for x in [GRADIENT(0, 0), *inputs.DEGENERATE.values()]:
        compressors.check_contracts(compressor, x)


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c.unbiased], ids=repr)
def test_unbiased(compressor):
    compressors.check_unbiased(compressor, GRADIENT(0, 0))


@every_compressor
def test_hostile_bytes(compressor):
    compressors.check_hostile_bytes(compressor, GRADIENT(0, 0))


@every_compressor
def test_wrong_length_is_refused(compressor):
    compressors.check_wrong_length(compressor)
