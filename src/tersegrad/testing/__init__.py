"""The conformance kit: whether a compressor or a reducer keeps the laws of ``tersegrad.core``, in one call.

    from tersegrad.testing import check
    check(MyCompressor(0.1))

``check`` raises AssertionError that names the law. Every method of tersegrad itself is tested by these functions. They
run workers as threads in this process; no network and no data are needed.
"""

from tersegrad.core import Compressor, Reducer, Spec, Summable
from tersegrad.reducers import AllGather, AllReduce
from tersegrad.specs import parse
from tersegrad.testing.compressors import check_compressor
from tersegrad.testing.reducers import check_reducer
from tersegrad.wrappers import ErrorFeedback

__all__ = ["check", "check_compressor", "check_reducer", "check_repr"]


def check(spec: str | Spec) -> None:
    """All laws that this spec must keep: a compressor's own, and those of an exchange with it, with error feedback.

    >>> check("TopK(ratio=0.1)")
    """
    parsed = parse(spec)
    check_repr(parsed)
    if isinstance(parsed, Compressor):
        check_compressor(parsed)
        check_reducer(AllGather(parsed))
        check_reducer(ErrorFeedback(AllGather(parsed)))
        if isinstance(parsed, Summable):
            check_reducer(AllReduce(parsed))
    else:
        assert isinstance(parsed, Reducer)
        check_reducer(parsed)


def check_repr(spec: Spec) -> None:
    """The repr is the expression that makes it."""
    again = parse(repr(spec))
    assert again == spec, f"parse({spec!r}) == {again!r}"
    assert again.fingerprint() == spec.fingerprint(), "the same spec, read from its text, has another fingerprint"
