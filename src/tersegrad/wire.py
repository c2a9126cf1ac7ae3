"""The frame: a payload with a header that decodes with no other knowledge, and their exchange.

    offset  size  field
         0     4  magic "TGRD"
         4     2  version of this layout and of every codec's bytes
         6     2  flags: bit 0 = the vector was not finite
         8     8  fingerprint of the spec
        16     8  step
        24     8  bucket id
        32     8  elements of the vector
        40     8  bytes of the body
        48     8  XXH64 of the body, seeded with the XXH64 of the 48 bytes above
        56        body

All numbers are little-endian. Every worker checks the headers of all, so that all of them refuse a wrong frame.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import HEADER_NBYTES, Bucket, Comm, Payload, Pending, State, scratch

MAGIC = b"TGRD"
VERSION = 1
NONFINITE = 1

_FIELDS = struct.Struct("<4sHHQQQQQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_NBYTES


class FrameError(ValueError):
    """A frame that cannot be decoded: it names the rank, what was expected and what came."""


@dataclass(frozen=True)
class Header:
    """The parsed fields of a frame's first bytes."""

    flags: int
    spec: int
    step: int
    bucket: int
    numel: int
    length: int
    checksum: int


def seal(payload: Payload, spec: int, bucket: Bucket) -> Tensor:
    """Writes the header in front of the payload's body, and returns the whole frame."""
    flags = 0 if payload.finite else NONFINITE
    body = payload.body
    head = _FIELDS.pack(MAGIC, VERSION, flags, spec, bucket.step, bucket.id, payload.numel, body.numel())
    header = bytearray(head + _CHECKSUM.pack(_checksum(head, body)))
    payload.frame[:HEADER_NBYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
    return payload.frame


def open_frame(frame: Tensor, spec: int, bucket: Bucket, rank: int = 0) -> Payload:
    """The payload in a frame, or a ``FrameError``. Reads nothing outside the tensor."""
    if frame.numel() < HEADER_NBYTES:
        raise FrameError(f"rank {rank} sent {frame.numel()} bytes; a frame has at least {HEADER_NBYTES}.")
    header = read_header(frame[:HEADER_NBYTES], rank)
    check_header(header, spec, bucket, rank)
    if frame.numel() != HEADER_NBYTES + header.length:
        raise FrameError(
            f"rank {rank} sent a frame of {frame.numel()} bytes; its header says {HEADER_NBYTES + header.length}."
        )
    check_body(frame[:HEADER_NBYTES], frame[HEADER_NBYTES:], header, rank)
    return Payload(frame[HEADER_NBYTES:], header.numel, not header.flags & NONFINITE, frame)


def start_gather(payload: Payload, spec: int, bucket: Bucket, comm: Comm, state: State) -> "Gathering":
    """Begins to bring every worker's payload to all; what does not need them can be done meanwhile.

    One round: everybody sends its frame straight to all others. Nobody needs to know a length before, and nothing is
    filled up to the longest: a message may be shorter than the room for it, and memory that none reaches is never
    touched.
    """
    frame = seal(payload, spec, bucket)
    room = HEADER_NBYTES + max_body_nbytes(bucket)
    if frame.numel() > room:
        raise ValueError(
            f"a payload of {frame.numel()} bytes for {payload.numel} elements; at most {room} can be needed."
        )
    under_way = [
        comm.start_shift(frame, receiving(state, f"from {by}", room, frame.device), by) for by in range(1, comm.size)
    ]
    return Gathering(frame, under_way, spec, bucket, comm.rank)


@dataclass(frozen=True)
class Gathering:
    """Frames on their way; the own one must stay as it is until ``wait``."""

    frame: Tensor
    under_way: list[Pending]
    spec: int
    bucket: Bucket
    rank: int

    def wait(self) -> list[Payload]:
        """Every worker's payload in rank order. To be called once.

        All headers are checked before any body, so that a stray worker is named on all others alike.
        """
        blocks = [self.frame] + [pending.wait() for pending in self.under_way]  # of this rank, the previous one, ...
        ranks = [(self.rank - by) % len(blocks) for by in range(len(blocks))]
        in_order = dict(sorted(zip(ranks, blocks, strict=True)))
        headers = {rank: read_header(block, rank) for rank, block in in_order.items()}
        for rank, header in headers.items():
            check_header(header, self.spec, self.bucket, rank)
        return [_open(in_order[rank], header, rank) for rank, header in headers.items()]


def receiving(state: State, key: str, room: int, device: torch.device) -> Tensor:
    """Where a frame can arrive; memory that no frame reaches is never touched."""
    into = scratch(state, key, room, torch.uint8, device)
    into[:HEADER_NBYTES].zero_()  # so that nothing of an earlier frame can be taken for a header
    return into


def _open(block: Tensor, header: Header, rank: int) -> Payload:
    body = block[HEADER_NBYTES : HEADER_NBYTES + header.length]
    check_body(block[:HEADER_NBYTES], body, header, rank)
    return Payload(body, header.numel, not header.flags & NONFINITE)


def read_header(head: Tensor, rank: int) -> Header:
    """The fields of a header, if it is one of ours and of our version."""
    raw = bytes(head[:HEADER_NBYTES].tolist())
    magic, version, flags, spec, step, bucket, numel, length = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(
            f"rank {rank} sent {magic!r} where a frame begins with {MAGIC!r}: these are not tersegrad's bytes."
        )
    if version != VERSION:
        raise FrameError(
            f"rank {rank} sent a frame of version {version}, this worker speaks version {VERSION}. "
            "Install the same tersegrad on every worker."
        )
    (checksum,) = _CHECKSUM.unpack_from(raw, _FIELDS.size)
    return Header(flags, spec, step, bucket, numel, length, checksum)


def check_header(header: Header, spec: int, bucket: Bucket, rank: int) -> None:
    """Refuses a frame that is not for this spec, step, bucket and length."""
    expected = {"spec": spec, "bucket": bucket.id, "step": bucket.step, "numel": bucket.numel}
    came = {"spec": header.spec, "bucket": header.bucket, "step": header.step, "numel": header.numel}
    for name, want in expected.items():
        if came[name] != want:
            show = hex if name in ("spec", "bucket") else str
            raise FrameError(
                f"rank {rank} sent a frame for {name} {show(came[name])}, expected {name} {show(want)} "
                f"(step {bucket.step}, bucket of {len(bucket.names)} tensors from {bucket.names[:1]}). "
                "Every worker must run the same script with the same spec."
            )
    if header.flags & ~NONFINITE:
        raise FrameError(f"rank {rank} sent a frame with unknown flags {header.flags:#06x}.")
    if header.length > (limit := max_body_nbytes(bucket)):
        raise FrameError(f"rank {rank} announced a body of {header.length} bytes; at most {limit} can be needed here.")


def check_body(head: Tensor, body: Tensor, header: Header, rank: int) -> None:
    """Refuses a body that is not what its sender sealed."""
    checksum = _checksum(bytes(head[: _FIELDS.size].tolist()), body)
    if checksum != header.checksum:
        raise FrameError(
            f"rank {rank}'s frame is corrupt: checksum {checksum:#018x}, expected {header.checksum:#018x} "
            f"(step {header.step}, {header.length} bytes)."
        )


def max_body_nbytes(bucket: Bucket) -> int:
    """No codec needs more: two words an element, and a little per tensor. A larger length is never allocated for."""
    return 8 * bucket.numel + 128 * len(bucket.names) + 128


def _checksum(head: bytes, body: Tensor) -> int:
    seed = kernels.on(body).xxh64(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    return int(kernels.on(body).xxh64(body, seed))
