"""The index codec: what goes in comes out, in few bytes, and no bytes whatsoever can break it."""

import math
from contextlib import suppress
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.cases import cases
from tersegrad.compressors import _indices as codec
from tersegrad.kernels.cpu import indices as cpu
from tersegrad.kernels.ops import indices as bits
from tersegrad.kernels.reference import indices as reference

LARGEST = 2**31 - 1
GUARD = 16  # bytes before and after every buffer, which nobody may touch


def int32(numbers: object) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, dtype=np.int32).reshape(-1).copy())


def uint8(numbers: object) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, dtype=np.uint8).reshape(-1).copy())


def guarded(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A whole tensor full of 77, and its middle."""
    whole = torch.full((GUARD + length + GUARD,), 77, dtype=dtype)
    return whole, whole[GUARD : GUARD + length]


def encode(indices: Tensor, universe: int) -> Tensor:
    """The form, and the bytes, which were encoded into a guarded buffer; nothing after them may change."""
    whole, out = guarded(codec.max_nbytes(indices.numel(), universe), torch.uint8)
    form, nbytes = codec.encode(indices, universe, out)
    assert nbytes <= out.numel()
    assert (whole[:GUARD] == 77).all()
    assert (whole[GUARD + nbytes :] == 77).all()
    return torch.cat([uint8([form]), out[:nbytes]])


def decode(data: Tensor, count: int, universe: int) -> Tensor:
    """Decode a form and bytes from and into guarded buffers; whatever comes back must be a valid support."""
    form, body = int(data[0]), data[1:]
    around, middle = guarded(body.numel(), torch.uint8)
    middle.copy_(body)
    whole, out = guarded(count, torch.int32)
    try:
        codec.decode(form, middle, count, universe, out)
    finally:
        assert (whole[:GUARD] == 77).all()
        assert (whole[GUARD + count :] == 77).all()
        assert torch.equal(middle, body)
        assert (around[:GUARD] == 77).all()
    check_support(out, universe)
    return out


def check_support(indices: Tensor, universe: int) -> None:
    if indices.numel():
        assert int(indices[0]) >= 0
        assert int(indices[-1]) < universe
        assert (indices[1:] > indices[:-1]).all()


def check_round_trip(indices: Tensor, universe: int) -> Tensor:
    data = encode(indices, universe)
    assert torch.equal(decode(data, indices.numel(), universe), indices)
    assert data.numel() - 1 <= codec.max_nbytes(indices.numel(), universe)
    assert data.numel() - 1 <= min(-(-universe // 8), 4 * indices.numel() + 1)
    return data


def entropy_bytes(count: int, universe: int) -> float:
    p = count / universe
    return -universe * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8


def uniform(universe: int, count: int, seed: int = 0) -> Tensor:
    return int32(np.sort(np.random.default_rng(seed).choice(universe, count, replace=False)))


def clustered(universe: int, clusters: int, length: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    starts = rng.choice(universe - length, clusters)
    return int32(np.unique(starts[:, None] + rng.integers(0, length, (clusters, length // 4))))


@st.composite
def supports(draw: st.DrawFn, longest: int = 60, repeats: int = 40) -> tuple[Tensor, int]:
    """Sorted indices and their universe: dense, sparse, clustered, all sizes of gaps, one block or more."""
    gap = st.sampled_from((0, 3, 200, 2**16, LARGEST - 1)).flatmap(lambda largest: st.integers(0, largest))
    gaps = draw(st.lists(gap, max_size=longest)) * draw(st.sampled_from((1, 1, 7, repeats)))
    indices = np.cumsum(np.asarray(gaps, dtype=np.int64) + 1) - 1
    indices = indices[indices < LARGEST]
    least = int(indices[-1]) + 1 if len(indices) else 0
    return int32(indices), min(least + draw(st.sampled_from((0, 0, 1, 7, 10**6, LARGEST))), LARGEST)


# Round trips and sizes


@settings(max_examples=300, deadline=None)
@given(supports())
def test_round_trip(support: tuple[Tensor, int]) -> None:
    check_round_trip(*support)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_round_trip_at_every_density(universe: int, density: float, seed: int) -> None:
    check_round_trip(uniform(universe, round(density * universe), seed), universe)


@cases(universe=range(9))
def test_every_subset_of_a_tiny_universe(universe: int) -> None:
    for subset in range(2**universe):
        check_round_trip(int32([i for i in range(universe) if subset >> i & 1]), universe)


N = 100_000


@cases(
    "name indices universe",
    [
        ("all at the front", np.arange(N // 10), N),
        ("all at the back", np.arange(N - N // 10, N), N),
        ("every second", np.arange(0, N, 2), N),
        ("all but the first", np.arange(1, N), N),
        ("all but the last", np.arange(N - 1), N),
        ("both ends of the largest universe", np.r_[:300, LARGEST - 300 : LARGEST], LARGEST),
        ("last of the largest universe", [LARGEST - 1], LARGEST),
        ("few and far apart", np.arange(0, LARGEST, 2**21), LARGEST),
        ("gaps of every size", np.cumsum(2 ** (np.arange(900) % 21)), LARGEST),
        ("half of the gaps huge", np.cumsum(np.where(np.arange(2000) % 2, 1, 2**20)), LARGEST),
        ("one huge in a block", np.cumsum(np.where(np.arange(5000) % 512, 1, 2**27)), LARGEST),
        ("gaps just beyond the knee", np.cumsum(np.where(np.arange(2000) % 2, 7, 9)), N),
    ],
)
def test_adversarial_supports(name: str, indices: object, universe: int) -> None:
    check_round_trip(int32(indices), universe)


@cases("density factor", [(0.001, 1.02), (0.01, 1.01), (0.1, 1.02), (0.25, 1.02), (0.4, 1.04), (0.5, 1.001)])
def test_uniform_supports_come_near_the_entropy(density: float, factor: float) -> None:
    universe = 2_000_000
    count = round(density * universe)
    data = check_round_trip(uniform(universe, count), universe)
    assert data.numel() <= factor * entropy_bytes(count, universe)


def test_clustered_supports_take_half_the_entropy() -> None:
    universe = 2_000_000
    indices = clustered(universe, clusters=100, length=1000)
    assert check_round_trip(indices, universe).numel() <= 0.5 * entropy_bytes(indices.numel(), universe)


def test_mixed_densities_take_less_than_the_entropy() -> None:
    """As the layers in one bucket: each block has its own exponent."""
    counts = (60_000, 200, 10_000, 40, 2_000, 20_000)
    indices = torch.cat([i * 200_000 + uniform(200_000, count, seed=i) for i, count in enumerate(counts)]).int()
    assert check_round_trip(indices, 1_200_000).numel() <= 0.8 * entropy_bytes(indices.numel(), 1_200_000)


def test_nothing_and_everything_take_no_bytes() -> None:
    for indices, universe in (([], 0), ([], 5), ([0], 1), (np.arange(N), N), ([], LARGEST)):
        assert check_round_trip(int32(indices), universe).tolist() == [codec.IMPLIED]


@cases(
    "indices universe golden",
    [
        ([0, 5, 6, 9], 10, "016102"),
        ([3, 500, 501], 1000, "02c281f401"),  # 010000 111 000000100101111 100: exponent 2, steps double
        (
            np.arange(40) ** 2 % 97 + 97 * np.arange(40),  # exponent 6, steps do not double
            10**6,
            "0266c0d0d1d2d3d4d5d6d7b864ed6d5eb3f7675064d164c225cb27cc29dd665667d717e028a121c25506",
        ),
    ],
)
def test_the_format_stays(indices: list[int], universe: int, golden: str) -> None:
    """Form and bytes that were written once can be read for ever; another format needs another form."""
    assert bytes(encode(int32(indices), universe).tolist()).hex() == golden
    assert torch.equal(decode(uint8(list(bytes.fromhex(golden))), len(indices), universe), int32(indices))


# Fast kernels against their definition


def encode_gaps(kernel: ModuleType, indices: Tensor) -> tuple[Tensor, Tensor]:
    headers = torch.empty(-(-indices.numel() // bits.BLOCK), dtype=torch.uint8)
    planned = kernel.gap_plan(indices, LARGEST, headers)
    data = torch.empty(-(-planned // 8), dtype=torch.uint8)
    kernel.gap_encode(indices, headers, data)
    return headers, data


def check_same_gaps(data: Tensor, count: int, universe: int) -> tuple[int, int]:
    results, outs = [], []
    for kernel in (cpu, reference):
        whole, out = guarded(count, torch.int32)
        results.append(kernel.gap_decode(data, universe, out))
        outs.append(out)
        assert (whole[GUARD + count :] == 77).all()
    assert results[0] == results[1]
    if results[0][0] == bits.FINE:
        assert torch.equal(*outs)
        check_support(outs[0], universe)
    return results[0]


@settings(max_examples=100, deadline=None)
@given(supports(repeats=20))
def test_gaps_agree(support: tuple[Tensor, int]) -> None:
    indices, universe = support
    headers, data = encode_gaps(cpu, indices)
    for ours, theirs in zip((headers, data), encode_gaps(reference, indices), strict=True):
        assert torch.equal(ours, theirs)
    assert check_same_gaps(data, indices.numel(), universe) == (bits.FINE, 0)


@cases(knee=[0, 1])
@cases(exponent=range(bits.MAX_EXPONENT + 1))
def test_every_header_writes_every_gap(exponent: int, knee: int) -> None:
    """Also those that no plan would choose: a tiny exponent and a huge gap make the longest codes."""
    headers = uint8([exponent | knee << 5])
    for indices in ([0, 1, 5, 15, 1000, LARGEST - 1], [LARGEST - 1], np.cumsum(2 ** np.arange(30))):
        splits = [reference._split(gap, exponent, bits.KNEES[knee]) for gap in reference._gaps(int32(indices))]
        nbits = bits.HEADER_BITS + sum(zeros + 1 + width for zeros, width, _ in splits)
        ours, theirs = torch.full((2, -(-nbits // 8)), 77, dtype=torch.uint8)
        cpu.gap_encode(int32(indices), headers, ours)
        reference.gap_encode(int32(indices), headers, theirs)
        assert torch.equal(ours, theirs)
        assert check_same_gaps(ours, len(indices), LARGEST) == (bits.FINE, 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_bitmaps_agree(universe: int, count: int, seed: int) -> None:
    indices = uniform(universe, min(count, universe), seed)
    ours, theirs = torch.empty(2, -(-universe // 8), dtype=torch.uint8)
    cpu.bitmap_encode(indices, ours)
    reference.bitmap_encode(indices, theirs)
    assert torch.equal(ours, theirs)
    check_same_bitmap(ours, indices.numel(), universe)
    check_same_bitmap(ours, indices.numel() + 1, universe)
    ours[-1] = 255
    check_same_bitmap(ours, indices.numel(), universe)


def check_same_bitmap(data: Tensor, count: int, universe: int) -> None:
    ours, theirs = torch.empty(2, count, dtype=torch.int32)
    result = cpu.bitmap_decode(data, universe, ours)
    assert result == reference.bitmap_decode(data, universe, theirs)
    assert result[0] != bits.FINE or torch.equal(ours, theirs)


@cases(indices=[[1, 1], [2, 1], [-1, 3], [-5], [5, -5], [*range(600), 0], [*range(512), 511], [600]])
def test_plans_refuse_what_is_not_a_support(indices: list[int]) -> None:
    headers = torch.empty(-(-len(indices) // bits.BLOCK), dtype=torch.uint8)
    assert cpu.gap_plan(int32(indices), 600, headers) == -1
    assert reference.gap_plan(int32(indices), 600, headers) == -1


# Damaged bytes


def decode_anything(data: Tensor, count: int, universe: int) -> None:
    """Bytes of any origin give a valid support (checked in ``decode``) or a ValueError."""
    if not data.numel():
        return  # without a form there is nothing to decode
    with suppress(ValueError):
        decode(data, count, universe)
    if universe < N:
        check_same_gaps(data[1:], count, universe)


@settings(max_examples=300, deadline=None)
@given(st.data(), supports(longest=30, repeats=20))
def test_mutated_bytes(draws: st.DataObject, support: tuple[Tensor, int]) -> None:
    indices, universe = support
    data = encode(indices, universe).tolist()
    for _ in range(draws.draw(st.integers(1, 3))):
        at = draws.draw(st.integers(0, len(data)))
        data[at : at + draws.draw(st.integers(0, 2))] = draws.draw(st.lists(st.integers(0, 255), max_size=2))
    count = min(max(indices.numel() + draws.draw(st.sampled_from((-1, 0, 0, 0, 1))), 0), universe)
    decode_anything(uint8(data), count, universe)


def test_single_flipped_bits() -> None:
    rng = np.random.default_rng(0)
    for seed, (universe, size) in enumerate([(10**6, 300), (10**9, 0), (200, 80), (50, 2)]):
        indices = uniform(universe, size, seed) if universe < 10**7 else clustered(universe, 5, 600)
        data, count = encode(indices, universe), indices.numel()
        for bit in rng.choice(8 * data.numel(), min(400, 8 * data.numel()), replace=False).tolist():
            damaged = data.clone()
            damaged[bit >> 3] ^= 1 << (bit & 7)
            decode_anything(damaged, count, universe)


def test_random_bytes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(3000):
        data = rng.integers(0, 256, rng.integers(0, 60), dtype=np.uint8)
        data[rng.random(data.size) < rng.choice([0, 0.5, 0.9])] = 0  # runs of zeros are hardest to read
        if data.size and rng.random() < 0.8:
            data[0] = rng.integers(0, 3)
        universe = int(rng.choice([0, 1, 8, 100, 400, 10**6, LARGEST]))
        decode_anything(uint8(data), int(rng.integers(0, min(universe, 700) + 1)), universe)


def test_every_truncation_and_every_extension_is_noticed() -> None:
    for indices, universe in ((uniform(N, 1100), N), (uniform(200, 90), 200), (int32(np.arange(9)), 9)):
        data = encode(indices, universe)
        for nbytes in range(1, data.numel()):
            with pytest.raises(ValueError, match=r"bytes"):
                decode(data[:nbytes], indices.numel(), universe)
        for extra in (0, 1, 255):
            with pytest.raises(ValueError, match=rf"got {data.numel()}"):  # the form is in front
                decode(torch.cat([data, uint8([extra])]), indices.numel(), universe)


GAPS, BITMAP, IMPLIED = codec.GAPS, codec.BITMAP, codec.IMPLIED


@cases(
    "data count universe message",
    [
        ([3], 1, 9, "got form 3"),
        ([IMPLIED], 4, 9, "none or all of 9; 4 were expected"),
        ([IMPLIED, 0], 9, 9, "implied indices take 0 bytes, got 1"),
        ([BITMAP, 1], 1, 9, "a bitmap of 9 elements take 2 bytes, got 1"),
        ([BITMAP, 1, 2], 1, 9, "a bit is set after bit 9"),
        ([BITMAP, 3, 0], 1, 9, "the bitmap has 2 bits set"),
        ([BITMAP, 0, 0], 1, 9, "the bitmap has 0 bits set"),
        ([GAPS], 1, 9, "end after 0 bytes"),
        ([GAPS, 0b01_011111], 1, 9, "exponent 31, the largest is 30"),
        ([GAPS, 0, 0, 0, 0, 0, 0, 0], 1, 9, "the gap before index number 0 has more than 31 bits"),
        ([GAPS, 0, 0, 0], 1, 9, "end after 3 bytes"),
        ([GAPS, 0b11_000000, 0, 0], 2, 9, "end after 1 bytes, got 3"),
        ([GAPS, 0b11_000000, 1], 2, 9, "end after 1 bytes, got 2"),
        ([GAPS, 0b11_000000], 1, 9, "a bit is set after bit 7"),
        ([GAPS, 0b01_000011, 0b00000010], 1, 4, "beyond the last element"),
    ],
)
def test_errors_say_what_is_wrong(data: list[int], count: int, universe: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(uint8(data), count, universe)


def test_misuse_is_explained() -> None:
    out = torch.empty(100, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"increase strictly and lie in \[0, 9\); the first is 3, the last 3"):
        codec.encode(int32([3, 3]), 9, out)
    with pytest.raises(ValueError, match="the first is 3, the last 9"):
        codec.encode(int32([3, 9]), 9, out)
    with pytest.raises(ValueError, match="out has 3 bytes; 3 of 1000 need 13"):
        codec.encode(int32([1, 2, 3]), 1000, out[:3])
    with pytest.raises(ValueError, match="3 different indices of 2 elements"):
        codec.encode(int32([0, 1, 2]), 2, out)
    with pytest.raises(ValueError, match="0 to 2147483647 elements, not 2147483648"):
        codec.max_nbytes(1, 2**31)
    with pytest.raises(TypeError, match=r"indices must be contiguous, torch\.int32"):
        codec.encode(torch.arange(3), 9, out)
    with pytest.raises(TypeError, match="strided"):
        codec.encode(int32(np.arange(6))[::2], 9, out)
    with pytest.raises(ValueError, match="out has 2 elements, 3 indices"):
        codec.decode(codec.GAPS, out[:1], 3, 9, int32([0, 0]))
