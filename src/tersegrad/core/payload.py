"""Payload: what one worker sends for one vector."""

import torch
from torch import Tensor

from tersegrad.core.state import State, scratch

HEADER_NBYTES = 64  # left free in front of every payload for the frame's header, so that framing copies nothing


class Payload:
    """The bytes that stand for one float32 vector of ``numel`` elements.

    ``meta`` holds what the receiver must know before it reads numbers: counts, lengths, keys. It is host memory.
    ``body`` holds the numbers, and lives where the vector lives. ``finite`` is False if the vector held a NaN or an
    infinity: such a payload has neither, and decodes to NaN.
    """

    __slots__ = ("_memory", "body", "finite", "meta", "numel")

    def __init__(self, body: Tensor, numel: int, meta: bytes = b"", finite: bool = True, memory: Tensor | None = None):
        self.body = body
        self.numel = numel
        self.meta = meta
        self.finite = finite
        self._memory = memory  # ends with the body, and has room for header and meta in front of it

    @staticmethod
    def empty(nbytes: int, numel: int, state: State, device: torch.device, meta: bytes = b"") -> "Payload":
        """A payload with an unwritten body, in the state's scratch: valid until the next one with the same state.

        Args:
            nbytes: Length of the body.
            numel: Length of the vector that it will stand for.
            state: The compressor's.
            device: Where the vector lives.
            meta: It may be replaced later by one that is not longer.
        """
        front = HEADER_NBYTES + padded(len(meta))
        memory = scratch(state, "payload", front + nbytes, torch.uint8, device)
        return Payload(memory[front:], numel, meta, memory=memory)

    @staticmethod
    def lend(memory: Tensor, state: State) -> None:
        """The next payload of this state is made in this memory, which ``frame`` returned, if it is large enough."""
        state["_payload"] = memory

    @staticmethod
    def nonfinite(numel: int, state: State, device: torch.device) -> "Payload":
        """The payload of a vector that holds a NaN or an infinity."""
        payload = Payload.empty(0, numel, state, device)
        payload.finite = False
        return payload

    def trim(self, nbytes: int) -> "Payload":
        """The same payload with only the first ``nbytes`` of its body."""
        memory = self._memory
        if memory is not None:
            memory = memory[: memory.numel() - self.body.numel() + nbytes]
        return Payload(self.body[:nbytes], self.numel, self.meta, self.finite, memory)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: header, meta (padded to whole words) and body."""
        return HEADER_NBYTES + padded(len(self.meta)) + self.body.numel()

    def frame(self) -> Tensor:
        """Host memory for header, meta and body in one piece, with meta and body in place (``comm/frame.py``)."""
        memory = self._memory
        if memory is None or memory.device.type != "cpu" or memory.numel() < self.nbytes:
            memory = torch.empty(self.nbytes, dtype=torch.uint8)
            memory[self.nbytes - self.body.numel() :].copy_(self.body)
        memory = memory[memory.numel() - self.nbytes :]
        if self.meta:
            meta = self.meta.ljust(padded(len(self.meta)), b"\0")
            memory[HEADER_NBYTES : HEADER_NBYTES + len(meta)].copy_(
                torch.frombuffer(bytearray(meta), dtype=torch.uint8)
            )
        return memory


def padded(nbytes: int) -> int:
    """The length in whole words of 8 bytes.

    >>> padded(0), padded(9)
    (0, 16)
    """
    return -(-nbytes // 8) * 8
