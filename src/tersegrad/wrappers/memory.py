"""One memory per chain: what all wrappers with a memory refuse at construction."""

from tersegrad.core import Reducer


def refuse_memory(outer: Reducer, inner: Reducer) -> None:
    """Refuses a memory inside the memory of ``outer``."""
    for spec in inner.walk():
        if isinstance(spec, Reducer) and spec.remembers:
            raise ValueError(
                f"{type(outer).__name__}({inner!r}): {type(spec).__name__} inside has a memory of its own, and a "
                f"gradient remembered twice is applied twice. Write {inner!r} alone, or put inside only what sends, "
                "e.g. AllGather(TopK(0.01))."
            )
