"""One or more working examples of every registered class, and every compressor in a reducer."""

from tersegrad.core import Compressor, Reducer, Spec, Summable
from tersegrad.reducers import AllGather, AllReduce, Ring, TwoShot
from tersegrad.specs import PRESETS, parse, registry


def _examples(kind: type) -> list[Spec]:
    classes = [cls for cls in registry().values() if issubclass(cls, kind) and cls.__module__.startswith("tersegrad.")]
    return [parse(text) for cls in classes for text in cls.examples or (f"{cls.__name__}()",)]


COMPRESSORS = _examples(Compressor)
ONE_OF_EACH = list({type(c): c for c in reversed(COMPRESSORS)}.values())  # the first example of every class
EXCHANGES: list[Reducer] = [exchange(c) for c in ONE_OF_EACH for exchange in (Ring, TwoShot)]
REDUCERS = list(
    {
        repr(r): r
        for r in [
            *_examples(Reducer),
            *(AllGather(c) for c in COMPRESSORS),
            *(AllReduce(c) for c in COMPRESSORS if isinstance(c, Summable)),
            *EXCHANGES,
            *(parse(p.spec) for p in PRESETS.values()),
        ]
    }.values()
)
# In real processes a method takes a second. What a compressor does it does in any process, so there one of each reducer
# and every preset will do.
ONE_OF_EACH_REDUCER: list[Reducer] = list({type(r): r for r in reversed(_examples(Reducer))}.values())
IN_PROCESSES = list({repr(r): r for r in [*ONE_OF_EACH_REDUCER, *(parse(p.spec) for p in PRESETS.values())]}.values())
# At the size of real buckets every preset, every reducer, and every compressor that is in none of them will do.
_IN_THEM = {type(part) for reducer in IN_PROCESSES for part in reducer.walk()}
LARGE_REDUCERS: list[Reducer] = [*IN_PROCESSES, *(AllGather(c) for c in ONE_OF_EACH if type(c) not in _IN_THEM)]
