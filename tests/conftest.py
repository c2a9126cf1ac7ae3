"""Shared fixtures."""

import pytest
import torch
from hypothesis import settings

import gloo

settings.register_profile("tersegrad", deadline=None, derandomize=True)  # the first call of a kernel compiles it
settings.load_profile("tersegrad")


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
