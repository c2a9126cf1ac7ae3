"""Names of version 0.1 work for one release, and say the new one."""

import importlib
import sys

import pytest

import tersegrad


def test_bucket_is_layout():
    with pytest.warns(FutureWarning, match=r"tersegrad\.Layout"):
        assert tersegrad.Bucket is tersegrad.Layout


def test_dcp_is_distributed_checkpoint():
    sys.modules.pop("tersegrad.dcp", None)
    with pytest.warns(FutureWarning, match=r"tersegrad\.hosts\.distributed_checkpoint"):
        old = importlib.import_module("tersegrad.dcp")
    from tersegrad.hosts.distributed_checkpoint import Shards

    assert old.Shards is Shards


def test_what_never_was_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tersegrad.Nothing  # noqa: B018
