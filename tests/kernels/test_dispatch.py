"""Operations are looked up one by one: a backend's own, or the reference's with a warning."""

import inspect
import math
import subprocess
import sys
import warnings

import pytest
import torch

from support.backends import Runner, reference, runners
from support.cases import cases
from tersegrad import kernels
from tersegrad.kernels import cpu, ops
from tersegrad.kernels.ops import OPS

META = torch.zeros(1, device="meta")


@pytest.fixture
def partial():
    """A backend for another device that has one operation."""
    backend = kernels.register("meta", {"all_finite": lambda x: "its own"}, name="partial")
    yield backend
    kernels.unregister(backend)


def test_names_stand_once_and_in_order():
    assert list(OPS) == sorted(set(OPS))


def test_reference_and_cpu_are_complete():
    for backend in kernels.backends("cpu"):
        assert set(backend.ops) == set(OPS), backend.name
    assert [backend.name for backend in kernels.backends("cpu")] == ["reference", "cpu"]


def test_cpu_tensors_get_the_fast_ones_without_a_warning():
    on = kernels.on(torch.zeros(1))
    assert on is kernels.on(torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(on, name) is getattr(cpu, name) for name in OPS)


def test_what_was_found_is_kept(partial):
    on = kernels.on(META)
    assert on.all_finite is partial.ops["all_finite"]
    assert vars(on)["all_finite"] is on.all_finite


def test_a_partial_backend_is_filled_in_with_one_warning_for_each_operation(partial):
    on = kernels.on(META)
    assert on.all_finite(META) == "its own"
    for name in ("above", "moments"):
        with pytest.warns(UserWarning, match=f"no kernel '{name}' for meta yet: the plain torch reference runs there"):
            assert getattr(on, name) is reference.backend.ops[name]
        assert getattr(kernels.on(META), name) is reference.backend.ops[name]  # said once


def test_the_warning_points_to_the_caller(partial):
    with pytest.warns(UserWarning, match="count_above") as caught:
        kernels.on(META).count_above  # noqa: B018
    assert caught[0].filename == __file__


def test_sizes_are_the_same_everywhere_and_need_no_warning(partial):
    assert kernels.on(META).top_k_capacity is ops.top_k_capacity
    assert kernels.on(META).packed_nbytes is ops.packed_nbytes


def test_the_newest_backend_comes_first_and_may_go_again(partial):
    newer = kernels.register("meta", {"all_finite": lambda x: "newer"})
    assert kernels.on(META).all_finite(META) == "newer"
    kernels.unregister(newer)
    assert kernels.on(META).all_finite(META) == "its own"


def test_a_module_may_be_registered():
    backend = kernels.register("meta", cpu)
    try:
        assert (backend.name, backend.device) == ("cpu", "meta")
        assert kernels.on(META).moments is cpu.moments
    finally:
        kernels.unregister(backend)


def test_backends_are_told(partial):
    assert [backend.name for backend in kernels.backends()] == ["reference", "cpu", "partial"]
    assert [backend.name for backend in kernels.backends("meta")] == ["reference", "partial"]
    assert [repr(runner) for runner in runners("all_finite")] == ["reference", "cpu", "partial"]
    assert [repr(runner) for runner in runners("above")] == ["reference", "cpu"]
    assert runners("all_finite", "above")[2].above(torch.tensor([2.0]), 1.0, torch.empty(1, dtype=torch.int32)) == 1


def test_what_is_no_kernel_is_refused():
    with pytest.raises(AttributeError, match="no kernel called 'top_kk'"):
        kernels.on(torch.zeros(1)).top_kk  # noqa: B018
    with pytest.raises(ValueError, match="'top_kk'"):
        kernels.register("meta", {"top_kk": print})
    with pytest.raises(ValueError, match="no kernel in"):
        kernels.register("meta", {})


def test_numba_is_imported_when_it_is_wanted():
    """From a folder of kernels alone: the rest of the library may import what it likes."""
    look = "import sys, tersegrad.kernels.ops; assert 'numba' not in sys.modules, 'too early'"
    paths = "import sys, types, pathlib; package = types.ModuleType('tersegrad'); "
    paths += f"package.__path__ = [{str(next(iter(kernels.__path__)))!r} + '/..']; sys.modules['tersegrad'] = package; "
    subprocess.run([sys.executable, "-c", paths + look], check=True)


# --- answers


def test_answers_keep_their_kind():
    answers = (True, 3, 0.5, torch.tensor(False), torch.tensor(7, dtype=torch.int32), torch.tensor(0.1))
    found = kernels.read(*answers)
    assert found == (True, 3, 0.5, False, 7, torch.tensor(0.1).item())
    assert [type(number) for number in found] == [bool, int, float, bool, int, float]
    assert kernels.read() == ()


@pytest.mark.parametrize("number", [0, -1, 2**62 + 1, 0.1, -math.inf, 5e-324, 1e-45, True, False])
def test_answers_of_a_device_are_gathered_exactly(number):
    """The gathering itself; on the CPU ``read`` needs none."""
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
        tensor = torch.tensor(number).to(dtype)
        (found,) = ops.answers._read_together([tensor])
        assert (found, type(found)) == (tensor.item(), type(tensor.item()))
    nan, one = ops.answers._read_together([torch.tensor(math.nan), torch.tensor(1)])
    assert math.isnan(nan)
    assert one == 1


def test_a_device_is_read_once(monkeypatch):
    """Meta tensors have no numbers: what would be read of them is counted, and made up."""
    reads = []
    monkeypatch.setattr(ops.answers, "_read_together", lambda answers: reads.append(answers) or [0] * len(answers))
    assert kernels.read(1, META[0], META[0], 2.0, META[0]) == (1, 0, 0, 2.0, 0)
    assert [len(answers) for answers in reads] == [3]


def test_the_reference_does_not_read_its_answers():
    """A meta tensor cannot be read, so nothing here waits for a device."""
    x, ints = torch.zeros(100, device="meta"), torch.zeros(400, dtype=torch.int32, device="meta")
    data, scales = torch.zeros(500, dtype=torch.uint8, device="meta"), torch.zeros(4, device="meta")
    plain = reference.backend.ops
    layout = ops.Layout(8, 3, 900, 100, 100)
    answers = [
        plain["all_finite"](x),
        plain["top_k"](x, 5, ints, ints),
        plain["add_top_k"](x, x, 5, x.clone(), ints, ints),
        plain["above"](x, 1.0, ints[:7]),
        plain["count_above"](x, 1.0),
        *plain["abs_sums"](x, 1.0),
        *plain["moments"](x),
        plain["abs_log_sum"](x),
        plain["abs_max"](x),
        plain["block_scales"](x, 25, scales),
        plain["bucket_scales"](x, 25, "max", scales),
        plain["ternary_scales"](x, 25, 2.5, scales),
        plain["natural_encode"](x, 3, data[:113]),
        plain["range_encode"](x, layout, True, data[:100]),
        plain["scaled_sign_encode"](x, 32, scales, data[:13]),
        plain["one_bit_encode"](x, 64, scales, data[:13]),
        plain["unambiguous"](x, x, x, 1.0, 0.9, 0.1, x.clone(), ints[:7]),
    ]
    for answer in answers:
        assert (answer.dim(), answer.device.type) == (0, "meta")


# --- the tests' own helpers


def test_a_backend_elsewhere_gets_copies_and_gives_them_back():
    runner = Runner(reference.backend, moves=True)
    x, buffer = torch.tensor([1.0, -3.0, 2.0]), torch.full((7,), -7, dtype=torch.int32)
    assert runner.above(x, 1.0, buffer[2:5]) == 2
    assert buffer.tolist() == [-7, -7, 1, 2, -7, -7, -7]
    half, bins, magnitudes = torch.fft.rfft(torch.ones(1, 4)), torch.empty(4), torch.empty(2)
    runner.fold(half, bins=bins, magnitudes=magnitudes)
    assert bins.tolist() == [4.0, 0.0, 0.0, 0.0]
    assert runner.moments(x) == ops.Moments(0.0, 6.0, 14.0)


def test_a_loop_over_cases_runs_all_and_says_which_one_failed():
    seen = []

    @cases(a=[1, 2])
    @cases("b c", [(3, 4), (5, 6)])
    def check(fixture, a, b, c):
        seen.append((fixture, a, b, c))
        assert (a, b) != (2, 5), "wrong"

    with pytest.raises(AssertionError, match="wrong") as caught:
        check("given")
    assert seen == [("given", 1, 3, 4), ("given", 1, 5, 6), ("given", 2, 3, 4), ("given", 2, 5, 6)]
    assert caught.value.__notes__ == ["case: b=5, c=6", "case: a=2"]
    assert list(inspect.signature(check).parameters) == ["fixture"]
