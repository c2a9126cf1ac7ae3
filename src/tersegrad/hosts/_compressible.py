"""Whether a spec compresses a parameter at all, in any of its phases: what it sends dense it does not."""

from functools import singledispatch

from tersegrad.auto import Auto
from tersegrad.core import Composite, Layout, Reducer, Wrapper
from tersegrad.reducers import Dense, GradiVeQ, PowerSGD
from tersegrad.wrappers import Every
from tersegrad.wrappers._split import Split

Shape = tuple[int, ...]


def means_to_compress(spec: Reducer) -> bool:
    """Whether there is anything in a spec that is not uncompressed by its nature.

    >>> from tersegrad import parse
    >>> means_to_compress(parse("ErrorFeedback(Dense())")), means_to_compress(parse("topk"))
    (False, True)
    """
    sends = [part for part in spec.walk() if isinstance(part, Reducer) and not isinstance(part, Composite)]
    return any(not isinstance(part, Dense) for part in sends)


@singledispatch
def compresses(spec: Reducer, name: str, shape: Shape) -> bool:
    """Whether a parameter of this name and shape ever travels in less than its own bytes."""
    return True


@compresses.register
def _dense(spec: Dense, name: str, shape: Shape) -> bool:
    return False


@compresses.register
def _wrapper(spec: Wrapper, name: str, shape: Shape) -> bool:
    inner: Reducer = spec.inner
    return compresses(inner, name, shape)


@compresses.register
def _auto(spec: Auto, name: str, shape: Shape) -> bool:
    return any(compresses(candidate, name, shape) for candidate in spec.candidates.values())


@compresses.register
def _every(spec: Every, name: str, shape: Shape) -> bool:
    return spec.n > 1 or compresses(spec.inner, name, shape)


@compresses.register
def _split(spec: Split, name: str, shape: Shape) -> bool:
    part = spec.parts()[spec.part_of(name, shape, Layout((name,), (shape,)).numel)]
    return compresses(part, name, shape)


@compresses.register
def _powersgd(spec: PowerSGD, name: str, shape: Shape) -> bool:
    return spec.compresses(shape)


@compresses.register
def _gradiveq(spec: GradiVeQ, name: str, shape: Shape) -> bool:
    return spec.slicing(shape) is not None
