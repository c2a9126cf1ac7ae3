"""How convolutions are split into slices; torch's own modules give the shapes, torch's own permute the order."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from support.cases import cases
from tersegrad.reducers.gradiveq.slices import SHARED, published_slicing, slicing

MODULES = {
    "conv1d": nn.Conv1d(6, 8, 5),
    "conv2d": nn.Conv2d(16, 16, 3),
    "conv3d": nn.Conv3d(4, 10, (3, 2, 5)),
    "rectangular": nn.Conv2d(12, 20, (1, 7)),
    "1x1": nn.Conv2d(24, 40, 1),
    "grouped": nn.Conv2d(32, 48, 3, groups=4),
    "depthwise": nn.Conv2d(36, 36, 3, groups=36),
    "transposed": nn.ConvTranspose2d(12, 20, 4),
    "large": nn.Conv2d(96, 80, 3),
}
every_module = cases(module=MODULES.values())
orders = cases(order=["position", "channel", "filter"])


def random(shape):
    return torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(0))


@orders
@cases(size=[40, 300, 4096])
@every_module
def test_split_and_joined_again_is_the_same(module, size, order):
    shape = tuple(module.weight.shape)
    pieces = slicing(shape, size, order)
    if pieces is None:
        assert order != "filter"
        assert shape[0] > min(size, math.prod(shape) // SHARED)  # filters alone are too many
        return
    x = random(shape)
    slices = pieces.split(x, torch.empty_like(x))
    assert slices.shape == (pieces.count, pieces.length)
    assert pieces.length <= size
    back = torch.empty_like(x)
    pieces.join(slices.reshape(-1), torch.zeros_like(x), back)
    assert torch.equal(back, x)


@every_module
def test_the_order_is_the_papers(module):
    shape = tuple(module.weight.shape)
    pieces, x = slicing(shape, 4096), random(shape)
    flat = x.view(shape[0], shape[1], -1).permute(2, 1, 0).reshape(-1)
    assert torch.equal(pieces.split(x, torch.empty_like(x)).reshape(-1), flat)


def test_the_papers_example():
    x = random((16, 16, 3, 3))
    pieces = slicing((16, 16, 3, 3), 768)
    assert (pieces.length, pieces.count) == (768, 3)
    paper = x.view(16, 16, 3, 3).permute(2, 3, 1, 0).reshape(3, 768)  # height, width, depth, filters
    assert torch.equal(pieces.split(x, torch.empty_like(x)), paper)


def test_a_slice_of_filters_times_depth_is_one_position_of_the_kernel():
    x = random((20, 6, 3, 5))
    pieces = slicing((20, 6, 3, 5), 20 * 6)
    slices = pieces.split(x, torch.empty_like(x))
    assert pieces.count == 15
    for h in range(3):
        for w in range(5):
            at = x.view(20, 6, 3, 5)[:, :, h, w].t().reshape(-1)
            assert torch.equal(slices[5 * h + w], at)


def test_a_slice_of_channels_has_all_their_positions_and_filters():
    x = random((8, 10, 3, 3))
    pieces = slicing((8, 10, 3, 3), 200, order="channel")
    assert (pieces.length, pieces.count) == (2 * 9 * 8, 5)
    slices = pieces.split(x, torch.empty_like(x))
    for m in range(5):
        expected = x.view(8, 10, 9)[:, 2 * m : 2 * m + 2].reshape(-1)
        assert torch.equal(slices[m], expected)


def test_a_slice_of_a_filter_lies_in_memory_as_it_is():
    x = random((8, 10, 3, 3))
    pieces = slicing((8, 10, 3, 3), 89, order="filter")
    assert (pieces.length, pieces.count) == (5 * 9, 16)
    slices = pieces.split(x, x[:0])
    assert slices.data_ptr() == x.data_ptr()
    assert torch.equal(slices.view(-1), x)
    assert torch.equal(pieces.split(x, x[:0], 3, 5).view(-1), x[3 * 45 : 5 * 45])
    assert slicing((8, 10, 3, 3), 90, order="filter").count == 8
    assert slicing((8, 10, 3, 3), 8, order="filter").length == 3


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    st.integers(1, 5000),
    st.sampled_from(["position", "channel"]),
    st.booleans(),
)
def test_the_rule(shape, size, order, linear):
    pieces = slicing(shape, size, order, linear)
    convolution = 3 <= len(shape) <= 5 or (linear and len(shape) == 2)
    longest = min(size, math.prod(shape) // SHARED)
    if not convolution or shape[0] > longest:
        assert pieces is None
        return
    filters, depth, positions = shape[0], shape[1], math.prod(shape[2:])
    assert pieces.length * pieces.count == math.prod(shape)
    assert pieces.count >= SHARED
    assert pieces.length <= size
    middle, outer = (depth, positions) if order == "position" else (positions, depth)
    fits = [filters * middle * j for j in range(1, outer + 1) if outer % j == 0 and filters * middle * j <= longest]
    fits = fits or [filters * i for i in range(1, middle + 1) if middle % i == 0 and filters * i <= longest]
    assert pieces.length == max(fits)


def test_matrices_only_if_asked_for():
    assert slicing((64, 128), 4096) is None
    assert slicing((64, 128), 4096, linear=True).length == 64 * 32
    assert slicing((64,), 4096, linear=True) is None
    assert slicing((0, 3, 3, 3), 4096) is None


@every_module
def test_published_slices_are_whole_positions(module):
    shape = tuple(module.weight.shape)
    filters, depth, positions = shape[0], shape[1], math.prod(shape[2:])
    pieces = published_slicing(shape, 4096)
    if filters * depth > 4096:
        assert pieces is None
        return
    assert pieces.length % (filters * depth) == 0
    assert pieces.length * pieces.count == math.prod(shape)
    x = random(shape)
    flat = x.view(filters, depth, positions).permute(2, 1, 0).reshape(pieces.count, pieces.length)
    assert torch.equal(pieces.split(x, torch.empty_like(x)), flat)


def test_published_slices_of_known_layers():
    assert published_slicing((16, 16, 3, 3), 4096).length == 768
    assert published_slicing((16, 16, 3, 3), 767).length == 256
    assert published_slicing((64, 64, 3, 3), 4096).count == 9
    assert published_slicing((16, 3, 3, 3), 4096).length == 144
    assert published_slicing((512, 512, 3, 3), 4096) is None
    assert published_slicing((100, 64), 4096) is None
