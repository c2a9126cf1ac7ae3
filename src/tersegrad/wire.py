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
from tersegrad.core import HEADER_NBYTES, Bucket, Comm, Payload, State, scratch

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


def gather(payload: Payload, spec: int, bucket: Bucket, comm: Comm, state: State) -> list[Payload]:
    """Every worker's payload in rank order, all checked.

    On a slow link a round costs more than a few bytes. So the first round carries ``room`` bytes of every frame,
    which all workers learn from the lengths of the step before, and in most steps that is all of it. What does not
    fit follows in a second round. Nothing is known in the first step: then the first round carries headers only.
    """
    frame = seal(payload, spec, bucket)
    room: int = state.get("_room", HEADER_NBYTES)
    begun = comm.all_gather(_exactly(frame, room, state), [room] * comm.size)
    headers = [read_header(block, rank) for rank, block in enumerate(begun)]
    for rank, header in enumerate(headers):
        check_header(header, spec, bucket, rank)
    lengths = [HEADER_NBYTES + header.length for header in headers]
    state["_room"] = _next_room(room, max(lengths))
    if max(lengths) > room:
        begun = [block.clone() for block in begun]  # the second round reuses the Comm's buffers
        rest = comm.all_gather(frame[room:], [max(0, length - room) for length in lengths])
        begun = [torch.cat([block, more]) for block, more in zip(begun, rest, strict=True)]
    payloads = []
    for rank, (header, block, length) in enumerate(zip(headers, begun, lengths, strict=True)):
        body = block[HEADER_NBYTES:length]
        check_body(block[:HEADER_NBYTES], body, header, rank)
        payloads.append(Payload(body, header.numel, not header.flags & NONFINITE))
    return payloads


def _next_room(room: int, longest: int) -> int:
    """Up at once, with some slack, when a frame did not fit; down by an eighth of what was too much."""
    needed = -(-longest // 8) * 8
    if needed > room:
        return needed if room == HEADER_NBYTES else needed + needed // 128 * 8
    return room - (room - needed) // 64 * 8


def _exactly(frame: Tensor, nbytes: int, state: State) -> Tensor:
    """The first ``nbytes`` of a frame, filled up with zeros if it is shorter."""
    if frame.numel() >= nbytes:
        return frame[:nbytes]
    padded = scratch(state, "frame", nbytes, torch.uint8, frame.device)
    padded[frame.numel() :].zero_()
    padded[: frame.numel()].copy_(frame)
    return padded


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
