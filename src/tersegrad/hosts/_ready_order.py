"""The buckets that DDP will make after its first step: a state saved before is resumed in them, to the bit.

DDP begins with one bucket, and cuts its final ones in the second forward, in the order in which gradients came in the
first backward. That order is noted here.
"""

import weakref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tersegrad.hosts._buckets import FIRST_NBYTES, rebuilt_buckets


class ReadyOrder:
    """Notes the order of gradients until DDP has made its final buckets."""

    def __init__(self, model: DistributedDataParallel, parameters: dict[str, Tensor]):
        self._model = weakref.ref(model)
        self._parameters = parameters
        self._ready: list[str] = []
        self._handles: list[RemovableHandle] = []
        if self._will_rebuild():
            trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
            self._handles = [p.register_post_accumulate_grad_hook(self._noting(name)) for name, p in trained]

    def _will_rebuild(self) -> bool:
        model = self._model()
        if model is None or model.find_unused_parameters or model.static_graph:
            return False
        return not getattr(model, "_has_rebuilt_buckets", True)

    def stop_in_time(self) -> None:
        """Called in every step: nothing is noted once DDP has made its final buckets."""
        if self._handles and not self._will_rebuild():
            self.close()

    def _noting(self, name: str):  # type: ignore[no-untyped-def]  # torch's stubs and its documentation differ
        def note(_: Tensor) -> None:
            if name in self._ready:  # another backward has begun
                self._ready.clear()
            self._ready.append(name)

        return note

    def final_buckets(self) -> list[list[str]] | None:
        """What the second step will be reduced in; None if DDP has made its final buckets, or nothing is known."""
        self.stop_in_time()
        if not self._handles or len(self._ready) != len(self._handles):
            return None
        ready = [(name, self._parameters[name]) for name in self._ready]
        return [list(names) for names in rebuilt_buckets(ready, self._limits())]

    def _limits(self) -> list[int]:
        model = self._model()
        assert model is not None
        config = getattr(model, "_bucket_config", None)
        first = getattr(config, "first_bucket_bytes_cap", FIRST_NBYTES)
        return [int(first), int(model.bucket_bytes_cap)]

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
