"""Streaming stores: long results go past the caches.

An ordinary store first brings the line that it will overwrite into the cache: a sum then moves four vectors through
memory instead of three, and evicts what others want there. A streaming store does neither. It is worth a third of the
time on an idle core, and more where several workers share the memory. A short result is better left in the cache for
whoever reads it next.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from tersegrad.kernels.cpu._intrinsics import intrinsic

LINE = 16  # floats in a cache line
LINE_NBYTES = 4 * LINE
LONG = 1 << 20  # elements from which on results are streamed


def stream(builder: Any, vector: Any, address: Any) -> None:
    """Store a vector of whole lines; ``address`` begins with a line. A ``fence`` must follow the last one."""
    store = builder.store(vector, address, align=LINE_NBYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def fence(typing: Any) -> Any:
    """Streaming stores are seen by other threads before anything that comes after this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
