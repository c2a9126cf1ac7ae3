"""The index codec of all sparse methods: which of n elements were sent, in few bytes.

There are three forms. The form and the number of indices are not in these bytes but in the payload's meta.

======  ========  ==================================================================================
form    name      bytes
======  ========  ==================================================================================
0       implied   none: no element was sent, or every one
1       bitmap    ceil(n / 8): bit i is set if i was sent; the smallest form from a third of all on
2       gaps      the distances between neighbours, in a variable number of bits
======  ========  ==================================================================================

``kernels.reference.indices`` defines the bits of bitmaps and gaps. ``encode`` counts the bits of each form
and writes the smallest. Uniformly random indices of any density take 1.01 to 1.03 times their entropy n * H(k / n);
those of real gradients take far less, as large elements are neighbours.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.kernels.ops import indices as bits

__all__ = ["Plan", "decode", "encode", "encode_bitmap", "max_nbytes", "plan"]

IMPLIED, BITMAP, GAPS = range(3)
MAX_UNIVERSE = 2**31 - 1  # so that every index, and n itself, is an int32


def max_nbytes(count: int, universe: int) -> int:
    """The largest number of bytes that ``encode`` writes for ``count`` indices out of ``universe`` elements.

    A gap takes 32 bits at most: with steps of 2**b, where b = floor(log2(mean gap)), a code has b + 2 bits and one for
    each step, there are fewer than 2 steps per gap, and the more gaps share the universe the smaller is b. The first
    block's header adds a byte; the headers of later blocks fit into bits that this bound leaves unused.

    >>> max_nbytes(1, 10**9), max_nbytes(250_000, 25_000_000), max_nbytes(5, 8)
    (5, 1000001, 1)
    """
    _check_numbers(count, universe)
    return min(_bytes(universe), 4 * count + 1)


@dataclass(frozen=True)
class Plan:
    """What ``plan`` has found out."""

    headers: Tensor
    bits: kernels.Answer  # of the form of gaps; negative if the indices do not increase

    def read(self) -> "Plan":
        """The same with a number."""
        return replace(self, bits=kernels.read(self.bits)[0])


def plan(indices: Tensor, universe: int) -> Plan:
    """Counts bits before anything is written, so that the answer can be read together with others."""
    _check_tensor("indices", indices, torch.int32)
    headers = torch.empty(-(-indices.numel() // bits.BLOCK), dtype=torch.uint8, device=indices.device)
    return Plan(headers, kernels.on(indices).gap_plan(indices, universe, headers))


def encode(indices: Tensor, universe: int, out: Tensor, planned: Plan | None = None) -> tuple[int, int]:
    """Write ``indices`` (int32, strictly increasing) to the front of ``out``; return the form and the bytes written.

    ``out`` is uint8 and has at least ``max_nbytes`` elements. Only the bytes that are written change. A ``plan`` whose
    answer is a number is not made again.

    >>> out = torch.empty(max_nbytes(3, 1000), dtype=torch.uint8)
    >>> form, nbytes = encode(torch.tensor([3, 500, 501], dtype=torch.int32), 1000, out)
    >>> indices = torch.empty(3, dtype=torch.int32)
    >>> decode(form, out[:nbytes], 3, 1000, indices)
    >>> nbytes, indices.tolist()
    (4, [3, 500, 501])
    """
    _check_tensor("indices", indices, torch.int32)
    _check_tensor("out", out, torch.uint8)
    count, capacity = indices.numel(), max_nbytes(indices.numel(), universe)
    if out.numel() < capacity:
        raise ValueError(f"out has {out.numel()} bytes; {count} of {universe} need {capacity}. Use max_nbytes.")
    if planned is None:
        planned = plan(indices, universe).read()
    needed = int(planned.bits)
    if needed < 0:
        raise ValueError(
            f"indices must increase strictly and lie in [0, {universe}); the first is {int(indices[0])}, "
            f"the last {int(indices[-1])}. Sort them, and remove duplicates."
        )
    if count in (0, universe):
        return IMPLIED, 0
    body = out[: min(_bytes(universe), _bytes(needed))]
    if _bytes(universe) <= _bytes(needed):
        kernels.on(indices).bitmap_encode(indices, body)
        return BITMAP, body.numel()
    kernels.on(indices).gap_encode(indices, planned.headers, body)
    return GAPS, body.numel()


def encode_bitmap(indices: Tensor, universe: int, out: Tensor) -> tuple[int, int]:
    """The same as a bitmap, whether that is the smallest form or not. The indices are not checked.

    >>> out = torch.empty(125, dtype=torch.uint8)
    >>> encode_bitmap(torch.tensor([3, 500, 501], dtype=torch.int32), 1000, out)
    (1, 125)
    """
    body = out[: _bytes(universe)]
    kernels.on(indices).bitmap_encode(indices, body)
    return BITMAP, body.numel()


def decode(form: int, body: Tensor, count: int, universe: int, out: Tensor) -> None:
    """Read ``count`` indices into ``out[:count]``, from exactly the bytes that ``encode`` wrote.

    For any bytes, either the result is strictly increasing and within the universe, or a ValueError says what is wrong;
    then ``out[:count]`` is unspecified. Takes O(len(body) + count) time.
    """
    _check_tensor("body", body, torch.uint8)
    _check_tensor("out", out, torch.int32)
    _check_numbers(count, universe)
    if out.numel() < count:
        raise ValueError(f"out has {out.numel()} elements, {count} indices were asked for.")
    out = out[:count]
    if form == IMPLIED:
        _decode_implied(body, count, universe, out)
    elif form == BITMAP:
        _check_length(body, _bytes(universe), f"a bitmap of {universe} elements")
        _raise_if(kernels.on(body).bitmap_decode(body, universe, out), body, count, universe)
    elif form == GAPS:
        _raise_if(kernels.on(body).gap_decode(body, universe, out), body, count, universe)
    else:
        known = f"{IMPLIED} (implied), {BITMAP} (bitmap) or {GAPS} (gaps)"
        raise ValueError(f"indices are of form {known}, got form {form}.")


def _decode_implied(body: Tensor, count: int, universe: int, out: Tensor) -> None:
    if count not in (0, universe):
        raise ValueError(f"implied indices are none or all of {universe}; {count} were expected.")
    _check_length(body, 0, "implied indices")
    torch.arange(count, out=out)


def _raise_if(result: tuple[int, int], body: Tensor, count: int, universe: int) -> None:
    """Turn a kernel's result code into an error that says what was expected and what was found."""
    found, where = result
    if found == bits.FINE:
        return
    nbytes, block = body.numel(), f"in the {bits.BLOCK} indices from number {where} on"
    reason = {
        bits.CUT: f"they end after {nbytes} bytes, {block}",
        bits.EXPONENT: f"a block has exponent {where}, the largest is {bits.MAX_EXPONENT}",
        bits.GAP: f"the gap before index number {where} has more than 31 bits",
        bits.OUTSIDE: f"an index is beyond the last element, {block}",
        bits.TRAILING: f"the indices end after {where} bytes, got {nbytes}",
        bits.PADDING: f"a bit is set after bit {where}, the last one that is used",
        bits.COUNT: f"the bitmap has {where} bits set",
    }[found]
    expected = f"index data for {count} indices of {universe}"
    raise ValueError(f"{expected}: {reason}. They are damaged, or belong to other numbers.")


def _bytes(nbits: int) -> int:
    return -(-nbits // 8)


def _check_numbers(count: int, universe: int) -> None:
    if not 0 <= universe <= MAX_UNIVERSE:
        raise ValueError(f"a universe has 0 to {MAX_UNIVERSE} elements, not {universe}. Split the tensor.")
    if not 0 <= count <= universe:
        raise ValueError(f"{count} different indices of {universe} elements: there are 0 to {universe}.")


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        came = f"{layout}, {tensor.dtype} and of shape {tuple(tensor.shape)}"
        raise TypeError(f"{name} must be contiguous, {dtype} and of one dimension; it is {came}.")


def _check_length(body: Tensor, nbytes: int, what: str) -> None:
    if body.numel() != nbytes:
        raise ValueError(f"{what} take {nbytes} bytes, got {body.numel()}.")
