"""Fixtures of the tests on XLA: four virtual devices of the CPU, one process for all tests.

torch_xla's SPMD mode cannot be turned off again, nor can the number of devices be changed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import typing

import pytest
import virtual_devices  # noqa: F401 - sets the environment, before torch_xla is imported

from parity import XLA_MARKS

HERE = pathlib.Path(__file__).parent

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit import DeviceMesh


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Import nothing where no test of this folder is to run, or can.

    torch_xla replaces `nn.GRU` and `clip_grad_norm_` of torch in a process that imports it.
    """
    is_wanted = "not xla" not in config.option.markexpr and importlib.util.find_spec("torch_xla")
    return True if collection_path.suffix == ".py" and not is_wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            for mark in XLA_MARKS:
                item.add_marker(mark)


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
