"""XXH64 against the PyPI package of the original code, at every length and alignment treated apart."""

import pytest
import torch
import xxhash

from support.backends import every, others
from support.cases import cases
from tersegrad.kernels import cpu

both = every("xxh64")


def random_bytes(n):
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


@both
@cases(seed=[0, 1, 2**64 - 1])
def test_every_short_length(kernel, seed):
    data = random_bytes(100)
    for n in range(101):
        assert kernel.xxh64(data[:n], seed) == xxhash.xxh64_intdigest(data[:n].numpy(), seed), n


@both
@cases(n=[1_023, 65_537, 100_003])
def test_every_alignment(kernel, n):
    data = random_bytes(n + 8)
    for offset in range(8):
        view = data[offset : offset + n]
        assert kernel.xxh64(view) == xxhash.xxh64_intdigest(view.numpy()), offset


@others("xxh64")
def test_large(kernel):
    data = random_bytes(10_000_019)
    assert kernel.xxh64(data) == xxhash.xxh64_intdigest(data.numpy())


@both
def test_one_flipped_bit_is_seen(kernel):
    data = random_bytes(257)
    before = kernel.xxh64(data)
    for position in (0, 31, 32, 255, 256):
        data[position] ^= 1
        assert kernel.xxh64(data) != before
        data[position] ^= 1
    assert kernel.xxh64(data) == before


@both
def test_only_a_vector_of_bytes_and_a_seed_of_64_bits(kernel):
    with pytest.raises(TypeError, match=r"float32.*view"):
        kernel.xxh64(torch.zeros(3))
    with pytest.raises(TypeError, match=r"shape \(2, 2\)"):
        kernel.xxh64(torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="seed"):
        kernel.xxh64(torch.zeros(3, dtype=torch.uint8), seed=-1)


def test_the_cpu_kernel_takes_only_contiguous_bytes():
    with pytest.raises(TypeError, match="contiguous"):
        cpu.xxh64(torch.zeros(6, dtype=torch.uint8)[::2])
