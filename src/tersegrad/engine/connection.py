"""The process group of an engine: made at attach, checked to be of one mind, freed at close."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tersegrad.comm.metered import Metered
from tersegrad.comm.torch import NetworkError, TorchComm
from tersegrad.core import Comm
from tersegrad.engine.options import Options


class Connection:
    """A gloo group for our use alone, and the Comms over it.

    Raises:
        NetworkError: Not all ranks came.
    """

    def __init__(self, options: Options):
        self._owned = options.group is None
        self._group: dist.ProcessGroup | None = options.group or _new_group(options.timeout)
        self._torch_comm = TorchComm(self._group)
        self.unmetered: Comm = self._torch_comm if options.network is None else options.network(self._torch_comm)
        self.comm = Metered(self.unmetered)

    def agree(self, mine: str) -> None:
        """All ranks say what they are about to do; who differs is named on every rank."""
        said = self.unmetered.all_gather(torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8))
        texts = [bytes(text.tolist()).decode(errors="replace") for text in said]
        if len(set(texts)) > 1:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the workers do not agree:\n{lines}\nCall attach() with the same spec on every worker.")

    def close(self) -> None:
        """Frees the group, if it was made here."""
        if self._owned and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # gloo's thread spins on sockets that another rank has closed, until nobody holds the group here either.
            self._group = None
            self._torch_comm.release()


def _new_group(timeout: float) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    except RuntimeError as error:
        raise NetworkError(str(error)) from error
    return group
