"""Shared fixtures."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import gloo

settings.register_profile("tersegrad", deadline=None, derandomize=True)  # the first call of a kernel compiles it
settings.load_profile("tersegrad")


def _avoid_broken_matrix_units() -> None:
    """Some virtual machines announce AMX and do not let it run: a bfloat16 product of torch's then ends the process.

    oneDNN is told not to use it, in this process and in those that tests start.
    """
    cpuinfo, setting = Path("/proc/cpuinfo"), "ONEDNN_MAX_CPU_ISA"
    if setting in os.environ or not cpuinfo.exists() or "amx_bf16" not in cpuinfo.read_text():
        return
    product = "import torch; torch.nn.Linear(288, 120).bfloat16()(torch.ones(8, 288).bfloat16())"
    if subprocess.run([sys.executable, "-c", product], check=False, capture_output=True).returncode == -signal.SIGILL:
        os.environ[setting] = "AVX512_CORE_BF16"


_avoid_broken_matrix_units()


FIRST = (
    "test_laws",
    "test_simulate",
    "test_train",
    "test_ddp",
    "test_matrix",
    "test_trust",
    "test_restart",
    "test_failure_report",
    "test_reliability",
    "test_warm",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that two processes end at nearly the same time."""
    place = {f"{name}.py": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))


@pytest.fixture(scope="session")
def gloo4():
    """Four gloo processes."""
    pool = gloo.Pool(4)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def one_thread():
    """Tests share two cores with their own worker processes."""
    torch.set_num_threads(1)
