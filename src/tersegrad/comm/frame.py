"""The frame: a payload with a header that decodes with no other knowledge.

    offset  size  field
         0     4  magic "TGRD"
         4     2  version of this layout and of every codec's bytes
         6     2  flags: bit 0 = the vector was not finite
         8     4  bytes of meta
        12     4  0
        16     8  fingerprint of the spec
        24     8  step
        32     8  id of the bucket's layout
        40     8  elements of the vector
        48     8  bytes of the body
        56     8  XXH64 of the body, seeded with the XXH64 of the 56 bytes above and of meta; where the workers share a
                  key, 8 bytes of keyed BLAKE2b of the sender, the 56 bytes above, meta and body
        64        meta, filled up with zeros to whole words of 8 bytes
         .        body

All numbers are little-endian. Every worker checks the headers of all, so that all of them refuse a wrong frame.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import HEADER_NBYTES, UNSIGNED, Layout, Payload, Signer, Step, padded

MAGIC = b"TGRD"
VERSION = 2
NONFINITE = 1

_FIELDS = struct.Struct("<4sHHIIQQQQQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_NBYTES


class FrameError(ValueError):
    """A frame that cannot be decoded: it names the rank, what was expected and what came."""


@contextmanager
def blaming(*ranks: int) -> Iterator[None]:
    """Names the rank that sent a payload which cannot be decoded."""
    try:
        yield
    except FrameError:
        raise
    except ValueError as error:
        who = ", ".join(map(str, ranks))
        raise FrameError(f"rank {who} sent a frame that cannot be decoded: {error}") from error


@dataclass(frozen=True)
class Header:
    """The parsed fields of a frame's first bytes."""

    flags: int
    meta: int
    spec: int
    step: int
    bucket: int
    numel: int
    body: int
    checksum: int

    @property
    def length(self) -> int:
        """Bytes of the whole frame."""
        return HEADER_NBYTES + padded(self.meta) + self.body


def seal(payload: Payload, spec: int, step: Step, signer: Signer = UNSIGNED) -> Tensor:
    """The frame of a payload, in host memory."""
    flags = 0 if payload.finite else NONFINITE
    layout, frame = step.layout, payload.frame()
    head = _FIELDS.pack(
        MAGIC,
        VERSION,
        flags,
        len(payload.meta),
        0,
        spec,
        step.number,
        layout.id,
        payload.numel,
        payload.body.numel(),
    )
    checksum = _checksum(head, frame, signer, signer.sender)
    header = bytearray(head + _CHECKSUM.pack(checksum))
    frame[:HEADER_NBYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))
    return frame


def open_frame(frame: Tensor, spec: int, step: Step, rank: int = 0, signer: Signer = UNSIGNED) -> Payload:
    """The payload in a frame. Reads nothing outside the tensor.

    Raises:
        FrameError: This is not what a worker with the same spec, step and bucket has sealed.
    """
    if frame.numel() < HEADER_NBYTES:
        raise FrameError(f"rank {rank} sent {frame.numel()} bytes; a frame has at least {HEADER_NBYTES}.")
    header = read_header(frame, rank)
    check_header(header, spec, step, rank)
    if frame.numel() != header.length:
        raise FrameError(f"rank {rank} sent a frame of {frame.numel()} bytes; its header says {header.length}.")
    return open_checked(frame, header, rank, signer)


def open_checked(message: Tensor, header: Header, rank: int, signer: Signer = UNSIGNED) -> Payload:
    """The payload in a message that begins with a frame whose header was checked."""
    frame = message[: header.length]
    check_body(frame, header, rank, signer)
    meta = frame[HEADER_NBYTES : HEADER_NBYTES + header.meta].numpy().tobytes()
    body = frame[HEADER_NBYTES + padded(header.meta) :]
    return Payload(body, header.numel, meta, not header.flags & NONFINITE, frame)


def read_header(head: Tensor, rank: int) -> Header:
    """The fields of a header, if it is one of ours and of our version."""
    raw = head[:HEADER_NBYTES].numpy().tobytes()
    magic, version, flags, meta, zero, spec, step, bucket, numel, body = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError(
            f"rank {rank} sent {magic!r} where a frame begins with {MAGIC!r}: these are not tersegrad's bytes."
        )
    if version != VERSION:
        raise FrameError(
            f"rank {rank} sent a frame of version {version}, this worker speaks version {VERSION}. "
            "Install the same tersegrad on every worker."
        )
    if zero:
        raise FrameError(f"rank {rank} sent a frame with {zero:#x} where zeros belong.")
    (checksum,) = _CHECKSUM.unpack_from(raw, _FIELDS.size)
    return Header(flags, meta, spec, step, bucket, numel, body, checksum)


def check_header(header: Header, spec: int, step: Step, rank: int) -> None:
    """Refuses a frame that is not for this spec, step, bucket and length."""
    layout = step.layout
    expected = {"spec": spec, "bucket": layout.id, "step": step.number, "numel": layout.numel}
    came = {"spec": header.spec, "bucket": header.bucket, "step": header.step, "numel": header.numel}
    for name, want in expected.items():
        if came[name] != want:
            show = hex if name in ("spec", "bucket") else str
            raise FrameError(
                f"rank {rank} sent a frame for {name} {show(came[name])}, expected {name} {show(want)} "
                f"(step {step.number}, bucket of {len(layout.names)} tensors from {layout.names[:1]}). "
                "Every worker must run the same script with the same spec."
            )
    if header.flags & ~NONFINITE:
        raise FrameError(f"rank {rank} sent a frame with unknown flags {header.flags:#06x}.")
    if header.length > (limit := max_frame_nbytes(layout)):
        raise FrameError(f"rank {rank} announced a frame of {header.length} bytes; at most {limit} can be needed here.")


def check_body(frame: Tensor, header: Header, rank: int, signer: Signer = UNSIGNED) -> None:
    """Refuses a body that is not what its sender sealed."""
    checksum = _checksum(frame[: _FIELDS.size].numpy().tobytes(), frame, signer, rank)
    if checksum != header.checksum and signer:
        raise FrameError(
            f"a frame that rank {rank} should have sent is not signed with this run's key (step {header.step}, "
            f"{header.body} bytes): it was changed, or made by somebody else."
        )
    if checksum != header.checksum:
        raise FrameError(
            f"rank {rank}'s frame is corrupt: checksum {checksum:#018x}, expected {header.checksum:#018x} "
            f"(step {header.step}, {header.body} bytes)."
        )


def max_frame_nbytes(layout: Layout) -> int:
    """No codec needs more: two words an element, and a little per tensor. A larger length is never allocated for."""
    return HEADER_NBYTES + 8 * layout.numel + 160 * len(layout.names) + 160


def _checksum(head: bytes, frame: Tensor, signer: Signer = UNSIGNED, sender: int = 0) -> int:
    """Of head, meta and body; ``frame`` has meta and body in place."""
    if signer:
        return signer.sign(sender, head, frame[HEADER_NBYTES:].numpy().data)
    (meta,) = struct.unpack_from("<I", head, 8)
    start = HEADER_NBYTES + padded(meta)
    front = head + frame[HEADER_NBYTES:start].numpy().tobytes()
    kernel = kernels.on(frame)
    seed = kernel.xxh64(torch.frombuffer(bytearray(front), dtype=torch.uint8))
    return int(kernel.xxh64(frame[start:], seed))
