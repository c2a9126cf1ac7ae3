"""Compressor: a codec for one flat float32 vector; and what others do with one."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import singledispatch
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core.layout import Layout
from tersegrad.core.pausing import Paused, done, run
from tersegrad.core.payload import Payload, padded
from tersegrad.core.spec import Spec
from tersegrad.core.state import State, scratch


@dataclass(frozen=True)
class Traits:
    """What a compressor promises beyond the law; the conformance kit holds it to that.

    Args:
        unbiased: The mean over its random draws is the vector itself.
        contracts: |x - decoded| <= |x| for every x, which is what error feedback needs.
        error: No element is off by more than this share of the largest magnitude; None if no such bound is known.
    """

    unbiased: bool = False
    contracts: bool = True
    error: float | None = None


@dataclass(frozen=True)
class Sum:
    """A vector that is still to be added up: ``total = a + b``. A method may do that in the pass that encodes it."""

    a: Tensor
    b: Tensor
    total: Tensor

    def add(self) -> Tensor:
        """Makes the sum, and returns it."""
        kernels.on(self.total).add_scaled(self.a, self.b, 1.0, self.total)
        return self.total

    def split(self, sizes: list[int]) -> "list[Sum]":
        """The sum in slices of these lengths."""
        parts = zip(self.a.split(sizes), self.b.split(sizes), self.total.split(sizes), strict=True)
        return [Sum(*part) for part in parts]


Vector = Tensor | Sum


def added(x: Vector) -> Tensor:
    """The vector, added up if it was not yet."""
    return x.add() if isinstance(x, Sum) else x


class Compressor(Spec, ABC):
    """A codec for one flat float32 vector; it sends nothing and owns no memory. See ``tersegrad.core``."""

    contract: ClassVar[frozenset[str]] = Spec.contract | {"init", "encode", "decode_add", "traits"}

    def init(self, layout: Layout, seed: int) -> State:
        """A fresh state for vectors of this layout; all randomness comes from ``seed``."""
        return {}

    @abstractmethod
    def encode(self, x: Tensor, state: State) -> Payload:
        """The payload of ``x``, valid until the next ``encode`` with this state. Does not change ``x``."""

    @abstractmethod
    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * decoded(payload)``, from the payload alone. It is finite, and ``acc`` has its length.

        Raises:
            ValueError: ``encode`` cannot have made this payload. ``acc`` is unchanged then.
        """

    def traits(self) -> Traits:
        """What it promises beyond the law."""
        return Traits()


class Pausing(Compressor):
    """A compressor that needs numbers from the device to encode: a count, or whether all elements are finite.

    Its ``encoding`` pauses for them, and ``encode`` follows: several encodings are then answered by one read.
    """

    contract: ClassVar[frozenset[str]] = Compressor.contract | {"encoding", "encoding_sum"}

    @abstractmethod
    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        """``encode``, which pauses for numbers."""

    def encoding_sum(self, x: Sum, state: State) -> Paused[Payload]:
        """The same of a sum; by default one after the other."""
        return self.encoding(x.add(), state)

    def encode(self, x: Tensor, state: State) -> Payload:
        return run(self.encoding(x, state))


class Summable(Compressor):
    """A compressor whose bodies are vectors of ``dtype``, and the sum of bodies is the body of the sum.

    That holds between workers that were given the same seed: their payloads have the same ``meta``.
    """

    contract: ClassVar[frozenset[str]] = Compressor.contract | {"dtype"}
    dtype: ClassVar[torch.dtype]


class Transformed(Compressor):
    """A compressor whose payloads are summed in another domain, e.g. as spectra, and brought back once.

    ``decode_add`` adds to an accumulator of ``domain(numel)`` elements.
    """

    contract: ClassVar[frozenset[str]] = Compressor.contract | {"domain", "inverse"}

    @abstractmethod
    def domain(self, numel: int) -> int:
        """The length of an accumulator for vectors of ``numel`` elements."""

    @abstractmethod
    def inverse(self, acc: Tensor, out: Tensor, state: State, subtract: bool = False) -> None:
        """``out`` becomes the vector of ``acc``, or loses it. Unless it is subtracted, the two may share memory."""


def adds_in_place(compressor: Compressor) -> bool:
    """Whether payloads may be added straight to a vector: nothing in the compressor sums in another domain."""
    return not any(isinstance(part, Transformed) for part in compressor.walk())


def accumulate(compressor: Compressor, payload: Payload, acc: Tensor, scale: float = 1.0) -> None:
    """``acc += scale * decoded(payload)``; a payload of a non-finite vector makes ``acc`` NaN throughout."""
    require_length(compressor, payload, acc)
    if payload.finite:
        compressor.decode_add(payload, acc, scale)
    else:
        acc.fill_(math.nan)


def require_length(compressor: Compressor, payload: Payload, acc: Tensor) -> None:
    """Refuses an accumulator of the wrong length for this payload."""
    numel = payload.numel
    needed = compressor.domain(numel) if isinstance(compressor, Transformed) else numel
    if acc.numel() != needed:
        raise ValueError(
            f"a payload of {numel} elements needs an accumulator of {needed}, and this one has {acc.numel()}."
        )


# ---- the same bits, faster: a class may register a function of its own ---------------------------


def encode(compressor: Compressor, x: Vector, state: State) -> Payload:
    """The payload of ``x``, which may still have to be added up."""
    return encode_sum(compressor, x, state) if isinstance(x, Sum) else compressor.encode(x, state)


@singledispatch
def encode_sum(compressor: Compressor, x: Sum, state: State) -> Payload:
    """The payload of a sum; ``x.total`` is unspecified if it is not finite. By default one after the other."""
    return compressor.encode(x.add(), state)


@encode_sum.register
def _encode_sum_pausing(compressor: Pausing, x: Sum, state: State) -> Payload:
    return run(compressor.encoding_sum(x, state))


def encoding(compressor: Compressor, x: Vector, state: State) -> Paused[Payload]:
    """``encode`` as work that pauses, if the compressor does."""
    if not isinstance(compressor, Pausing):
        return done(encode(compressor, x, state))
    return compressor.encoding_sum(x, state) if isinstance(x, Sum) else compressor.encoding(x, state)


@singledispatch
def decode_sum(compressor: Compressor, payloads: list[Payload], scale: float, out: Tensor, state: State) -> bool | None:
    """``out = scale * (sum of decoded payloads)``, in their order. By default one after the other.

    Returns:
        Whether ``out`` is finite; None if that was not looked at.
    """
    out.zero_()
    for payload in payloads:
        accumulate(compressor, payload, out, scale)
    return None


@decode_sum.register
def _decode_sum_transformed(
    compressor: Transformed, payloads: list[Payload], scale: float, out: Tensor, state: State
) -> bool | None:
    length = compressor.domain(out.numel())
    acc = out if length == out.numel() else scratch(state, "domain", length, torch.float32, out.device)
    acc.zero_()
    for payload in payloads:
        accumulate(compressor, payload, acc, scale)
    compressor.inverse(acc, out, state)
    return None


@singledispatch
def subtract(compressor: Compressor, payload: Payload, x: Tensor, state: State) -> None:
    """``x -= decoded(payload)``, for a payload that was just made of ``x``: leaves what it does not carry."""
    accumulate(compressor, payload, x, -1.0)


@subtract.register
def _subtract_transformed(compressor: Transformed, payload: Payload, x: Tensor, state: State) -> None:
    acc = scratch(state, "domain", compressor.domain(x.numel()), torch.float32, x.device).zero_()
    accumulate(compressor, payload, acc)
    compressor.inverse(acc, x, state, subtract=True)


@singledispatch
def sections(compressor: Compressor, payload: Payload) -> dict[str, int]:
    """Where a payload's bytes go, for people: section -> bytes. By default meta and values."""
    meta = {"meta": padded(len(payload.meta))} if payload.meta else {}
    return {**meta, "values": payload.body.numel()}
