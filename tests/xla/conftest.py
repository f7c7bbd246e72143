"""Fixtures of the tests on XLA: four virtual devices of the CPU, one process for all tests.

torch_xla's SPMD mode cannot be turned off again, nor can the number of devices be changed.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import typing

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]

HERE = pathlib.Path(__file__).parent
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit import DeviceMesh


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xla)
            # torch_xla's own, of Python's and of XLA's coming sharding propagation.
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(scope="session")
def mesh() -> DeviceMesh:
    """A mesh of four ranks."""
    import shardkit

    return shardkit.init_device_mesh("xla", (4,))


@pytest.fixture(scope="session")
def mesh_2d(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of two replicas of two ranks."""
    import shardkit

    del mesh  # The first one turns SPMD mode on.
    return shardkit.init_device_mesh("xla", (2, 2), mesh_dim_names=("replicate", "shard"))


@pytest.fixture(autouse=True)
def _seeded(mesh: DeviceMesh) -> Iterator[None]:
    import torch
    import torch_xla

    del mesh  # Made first: it turns SPMD mode on, which comes before any use of a device.
    torch.manual_seed(0)
    yield
    torch_xla.sync()  # A test that failed may have left half a graph.
