"""The conformance kit's parts under one name, for tests that try one law on something special."""

from tersegrad.core import Bucket, Compressor, Reducer
from tersegrad.testing import check_repr
from tersegrad.testing.compressors import check_codec, check_hostile_bytes, check_unbiased, mutate
from tersegrad.testing.inputs import BUCKET, DEGENERATE, GRADIENT, NONFINITE, Gradient, laplace
from tersegrad.testing.reducers import (
    assert_conserved,
    assert_identical,
    check_degenerate,
    check_in_place,
    check_nonfinite,
    check_state,
    check_stays_inside,
    check_step,
    check_telescoping,
    tolerance,
)
from tersegrad.testing.runs import Trace, assert_close, largest, mean, run, same

__all__ = [
    "BUCKET",
    "DEGENERATE",
    "GRADIENT",
    "NONFINITE",
    "Bucket",
    "Compressor",
    "Gradient",
    "Trace",
    "assert_close",
    "assert_conserved",
    "assert_identical",
    "check_codec",
    "check_conservation",
    "check_degenerate",
    "check_hostile_bytes",
    "check_in_place",
    "check_nonfinite",
    "check_replicas_identical",
    "check_repr",
    "check_state",
    "check_stays_inside",
    "check_step",
    "check_telescoping",
    "check_unbiased",
    "laplace",
    "largest",
    "mean",
    "mutate",
    "run",
    "same",
    "tolerance",
]


def check_conservation(
    reducer: Reducer, size: int, gradient: Gradient, bucket: Bucket = BUCKET, lost: float = 0.25
) -> None:
    assert_conserved(run(reducer, size, gradient, bucket), reducer, lost)


def check_replicas_identical(reducer: Reducer, size: int, gradient: Gradient, bucket: Bucket = BUCKET) -> None:
    assert_identical(run(reducer, size, gradient, bucket))
