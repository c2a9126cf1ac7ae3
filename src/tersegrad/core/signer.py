"""Signer: what the workers of a run share to know each other's frames: a keyed hash (BLAKE2b) in a checksum's place."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

VARIABLE = "TERSEGRAD_KEY"
LEAST = 16  # characters


@dataclass(frozen=True)
class Signer:
    """A key of one run, and the rank that signs with it. Without a key frames have checksums, which anybody can make.

    Args:
        key: Of this run, 32 bytes; empty: nothing is signed.
        sender: What people call this worker.
    """

    key: bytes = field(default=b"", repr=False)
    sender: int = 0

    def __bool__(self) -> bool:
        return bool(self.key)

    def sign(self, sender: int, *parts: "bytes | memoryview") -> int:
        """64 bits that only a worker with the key can make of these bytes, for a frame of this sender."""
        signature = hashlib.blake2b(sender.to_bytes(8, "little"), digest_size=8, key=self.key)
        for part in parts:
            signature.update(part)
        return int.from_bytes(signature.digest(), "little")


UNSIGNED = Signer()


def shared_key() -> bytes:
    """What the environment variable TERSEGRAD_KEY holds; empty if it is not set.

    Raises:
        ValueError: It is too short to keep anybody out.
    """
    text = os.environ.get(VARIABLE, "")
    if text and len(text) < LEAST:
        raise ValueError(
            f"{VARIABLE} has {len(text)} characters, and fewer than {LEAST} can be guessed. Set it to the same random "
            'text on every rank, e.g. of: python -c "import secrets; print(secrets.token_hex(32))".'
        )
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"tersegrad").digest() if text else b""


def proof(key: bytes, tokens: Sequence[str], rank: int) -> str:
    """Shows that a rank has the key, without telling it; all ranks have drawn a part of ``tokens``."""
    text = f"proof {rank} {' '.join(tokens)}".encode()
    return hashlib.blake2b(text, digest_size=16, key=key).hexdigest()


def run_key(key: bytes, tokens: Sequence[str]) -> bytes:
    """The key of this run alone: frames of another run, with the same key and step, are not taken."""
    return hashlib.blake2b(f"run {' '.join(tokens)}".encode(), digest_size=32, key=key).digest()
