"""Packed codes against Python's own long integers: code i is bits i * N to i * N + N - 1 of one number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases, noted
from tersegrad.kernels import cpu
from tersegrad.kernels.ops import packed_nbytes

OPS = "pack_bits", "unpack_bits"
BLOCK = 512  # codes that the CPU kernel packs at a time
LONG = (1 << 20) + 13
every_width = cases(bits=range(1, 17))
SIZES = [0, 1, 2, 7, 8, 9, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8, 3001]
GUARD = 77


def random_codes(n, bits, dtype=torch.int32):
    return torch.randint(0, 1 << bits, (n,), generator=torch.Generator().manual_seed(n)).to(dtype)


def as_number(codes, bits):
    return sum(code << bits * i for i, code in enumerate(codes.tolist()))


def pack(kernel, codes, bits):
    """The bytes, after a check that nothing behind them was touched."""
    nbytes = packed_nbytes(codes.numel(), bits)
    out = torch.full((nbytes + 40,), GUARD, dtype=torch.uint8)
    kernel.pack_bits(codes, bits, out[:nbytes])
    assert bool((out[nbytes:] == GUARD).all())
    return out[:nbytes].clone()


def unpack(kernel, data, bits, n, dtype=torch.int32):
    codes = torch.full((n + 40,), GUARD, dtype=dtype)
    kernel.unpack_bits(data, bits, codes[:n])
    assert bool((codes[n:] == GUARD).all())
    return codes[:n]


@every(*OPS)
@every_width
def test_layout_and_round_trip(kernel, bits):
    for n in SIZES:
        with noted(n=n):
            codes = random_codes(n, bits)
            data = pack(kernel, codes, bits)
            assert data.numel() == -(-n * bits // 8)
            assert int.from_bytes(data.numpy().tobytes(), "little") == as_number(codes, bits)
            assert torch.equal(unpack(kernel, data, bits, n), codes)


@others(*OPS)
def test_long_vectors(kernel):
    for bits in (1, 7, 11):
        codes = random_codes(LONG, bits)
        data = pack(kernel, codes, bits)
        assert torch.equal(data, pack(reference, codes, bits)), bits
        assert torch.equal(unpack(kernel, data, bits, LONG), codes), bits


@every(*OPS)
@cases(bits=range(1, 9))
def test_bytes_hold_short_codes(kernel, bits):
    for n in SIZES:
        codes = random_codes(n, bits, torch.uint8)
        data = pack(kernel, codes, bits)
        assert torch.equal(data, pack(kernel, codes.int(), bits))
        assert torch.equal(unpack(kernel, data, bits, n, torch.uint8), codes)


@every(*OPS)
def test_one_bit_is_numpys_packbits(kernel):
    codes = random_codes(12_345, 1, torch.uint8)
    assert torch.equal(pack(kernel, codes, 1), torch.from_numpy(np.packbits(codes.numpy(), bitorder="little")))


@every(*OPS)
@every_width
def test_only_the_lowest_bits_count(kernel, bits):
    codes = torch.tensor([-1, -2, 2**31 - 1, 1 << bits, 5], dtype=torch.int32)
    assert torch.equal(pack(kernel, codes, bits), pack(kernel, codes & (1 << bits) - 1, bits))


@every(*OPS)
@cases(bits=[3, 10, 13])
def test_bits_behind_the_last_code_mean_nothing(kernel, bits):
    codes = random_codes(5, bits)
    data = pack(kernel, codes, bits)
    data[-1] |= 0x80
    assert torch.equal(unpack(kernel, data, bits, 5), codes)


@others(*OPS)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(0, 2000), st.integers(0, 7), st.integers(0, 2**32))
def test_any_bytes_at_any_address_unpack_alike(kernel, bits, n, offset, seed):
    nbytes = packed_nbytes(n, bits)
    noise = np.random.default_rng(seed).integers(0, 256, nbytes + offset, dtype=np.uint8)
    data = torch.from_numpy(noise)[offset:]
    codes = unpack(kernel, data, bits, n)
    assert torch.equal(codes, unpack(reference, data, bits, n))
    assert torch.equal(pack(kernel, codes, bits), pack(reference, codes, bits))


@every(*OPS)
def test_refusals(kernel):
    codes, out = torch.zeros(8, dtype=torch.int32), torch.zeros(3, dtype=torch.uint8)
    for bits in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 bits, not {bits}"):
            kernel.pack_bits(codes, bits, out)
    with pytest.raises(ValueError, match="8 codes of 4 bits take 4 bytes, not 3"):
        kernel.pack_bits(codes, 4, out)
    with pytest.raises(ValueError, match="8 codes of 2 bits take 2 bytes, not 3"):
        kernel.unpack_bits(out, 2, codes)
    with pytest.raises(TypeError, match=r"codes of 9 bits are int32, not torch\.uint8"):
        kernel.pack_bits(codes.to(torch.uint8), 9, torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"int32 or uint8, not torch\.int64"):
        kernel.pack_bits(codes.long(), 3, out)


def test_the_cpu_kernel_takes_only_contiguous_vectors():
    with pytest.raises(TypeError, match="contiguous"):
        cpu.pack_bits(torch.zeros(6, dtype=torch.int32)[::2], 8, torch.zeros(3, dtype=torch.uint8))
