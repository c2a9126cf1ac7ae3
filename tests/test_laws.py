"""Every law over every registered class: a new method is tested by being there."""

import pytest

from support.registered import COMPRESSORS, LARGE_REDUCERS, REDUCERS
from tersegrad import testing
from tersegrad.core import Wrapper, needs_of
from tersegrad.specs import registry
from tersegrad.testing import compressors, inputs, reducers

GRADIENT = inputs.GRADIENT

every_reducer = pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def test_every_class_has_a_working_example_and_a_line_of_documentation():
    for cls in registry().values():
        assert any(type(spec) is cls for spec in [*COMPRESSORS, *REDUCERS]), f"{cls.__name__} has no example"
        first = (cls.__doc__ or "").split("\n")[0]
        assert first.endswith((".", ":")), (
            f"{cls.__name__}: the first line of its documentation is a sentence: {first!r}"
        )
        assert len(first) <= 116, f"{cls.__name__}: the first line of its documentation fits into one line of a list"


def test_the_repr_is_the_expression():
    for spec in [*REDUCERS, *COMPRESSORS]:
        testing.check_repr(spec)


@every_reducer
def test_the_law(reducer):
    for size in (1, 2, 3, 4):
        reducers.check_step(reducer, size)
    if reducers.remembers_all(reducer):
        reducers.check_telescoping(reducer, 3)
        reducers.check_idle(reducer)


@every_reducer
def test_starts_and_finishes(reducer):
    reducers.check_in_place(reducer, 3)
    reducers.check_overlap(reducer)
    reducers.check_sum(reducer)
    reducers.check_wrapper(reducer)
    reducers.check_stays_inside(reducer)


@every_reducer
def test_state(reducer):
    reducers.check_state(reducer)


@every_reducer
def test_bytes_are_those_that_cross(reducer):
    reducers.check_counted(reducer)


@pytest.mark.parametrize("reducer", [r for r in REDUCERS if not needs_of(r).float32], ids=repr)
def test_dtypes(reducer):
    reducers.check_dtypes(reducer)


@every_reducer
def test_degenerate_and_nonfinite_gradients(reducer):
    for name, x in inputs.DEGENERATE.items():
        try:
            reducers.check_degenerate(reducer, x)
        except Exception as error:
            error.add_note(f"gradient: {name}")
            raise
    for where, bad in zip((0, 700, -1), inputs.NONFINITE.values(), strict=True):
        reducers.check_nonfinite(reducer, bad, where)


@pytest.mark.parametrize("reducer", LARGE_REDUCERS, ids=repr)
def test_the_law_at_the_size_of_real_buckets(reducer):
    reducers.check_large(reducer)


def test_the_wrappers_are_among_what_is_checked():
    checked = {type(reducer).__name__ for reducer in REDUCERS if isinstance(reducer, Wrapper)}
    assert checked >= {"Auto", "ErrorFeedback", "Every", "LowMemory", "MomentumCorrection", "Schedule", "Warmup"}


@every_compressor
def test_codec(compressor):
    traits = compressor.traits()
    for x in [GRADIENT(0, 0), *inputs.DEGENERATE.values()]:
        compressors.check_codec(compressor, x.clone())
        compressors.check_payload_is_all(compressor, x)
        compressors.check_decode_sum(compressor, x)
        compressors.check_error(compressor, x)
        if traits.contracts:
            compressors.check_contracts(compressor, x)
    if traits.unbiased:
        compressors.check_unbiased(compressor, GRADIENT(0, 0))


@every_compressor
def test_hostile_bytes_and_wrong_lengths(compressor):
    compressors.check_hostile_bytes(compressor, GRADIENT(0, 0))
    compressors.check_wrong_length(compressor)
