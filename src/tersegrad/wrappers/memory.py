"""What wrappers with a memory share: there is one in a chain, and the gradient is added to it."""

from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Reducer, State, spare


def refuse_memory(outer: Reducer, inner: Reducer) -> None:
    """Refuses a memory inside the memory of ``outer``."""
    for spec in inner.walk():
        if isinstance(spec, Reducer) and spec.remembers:
            raise ValueError(
                f"{type(outer).__name__}({inner!r}): {type(spec).__name__} inside has a memory of its own, and a "
                f"gradient remembered twice is applied twice. Write {inner!r} alone, or put inside only what sends, "
                "e.g. AllGather(TopK(0.01))."
            )


def with_residual(x: Tensor, state: State) -> Tensor:
    """residual + x, where the next residual shall be: the present one is needed again if the step is undone."""
    total = spare(state, "residual")
    kernels.on(x).add_scaled(state["residual"], x, 1.0, total)
    return total
