"""Every worker's payload to all others, in one round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad.comm import frame as frames
from tersegrad.core import HEADER_NBYTES, Comm, Payload, Pending, State, Step, scratch


def start_gather(payload: Payload, spec: int, step: Step, comm: Comm, state: State) -> "Gathering":
    """Begins to bring every worker's payload to all; what does not need them can be done meanwhile.

    Everybody sends its frame straight to all others. Nobody needs to know a length before, and nothing is filled up to
    the longest: a message may be shorter than its buffer, and memory that none reaches is never touched.
    """
    frame = frames.seal(payload, spec, step, comm.signer)
    capacity = frames.max_frame_nbytes(step.layout)
    if frame.numel() > capacity:
        raise ValueError(
            f"a payload of {frame.numel()} bytes for {payload.numel} elements; at most {capacity} can be needed."
        )
    under_way = [
        comm.start_shift(frame, receive_buffer(state, f"from {by}", capacity), by) for by in range(1, comm.size)
    ]
    return Gathering(payload, frame, under_way, spec, step, comm)


@dataclass(frozen=True)
class Gathering:
    """Frames on their way; the own one must stay as it is until ``wait``."""

    payload: Payload
    frame: Tensor
    under_way: list[Pending]
    spec: int
    step: Step
    comm: Comm

    def wait(self) -> dict[int, Tensor]:
        """Every other worker's frame, by rank. To be called once."""
        rank, size = self.comm.rank, self.comm.size
        return {(rank - by) % size: pending.wait() for by, pending in enumerate(self.under_way, start=1)}

    def open(self, messages: dict[int, Tensor]) -> list[Payload]:
        """Every worker's payload in rank order.

        All headers are checked before any body, so that a stray worker is named on all others alike.
        """
        name, signer = self.comm.name, self.comm.signer
        headers = {rank: frames.read_header(message, name(rank)) for rank, message in sorted(messages.items())}
        for rank, header in headers.items():
            frames.check_header(header, self.spec, self.step, name(rank))
        opened = {rank: frames.open_checked(messages[rank], h, name(rank), signer) for rank, h in headers.items()}
        return [self.payload if rank == self.comm.rank else opened[rank] for rank in range(self.comm.size)]


def receive_buffer(state: State, key: str, capacity: int) -> Tensor:
    """Host memory in which a frame can arrive; what no frame reaches is never touched."""
    into = scratch(state, key, capacity, torch.uint8, torch.device("cpu"))
    into[:HEADER_NBYTES].zero_()  # so that nothing of an earlier frame can be taken for a header
    return into
