"""Without torch_xla everything else works, and who asks for it is told what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shardkit
from shardkit import MeshError, init_device_mesh


def test_a_mesh_of_xla_devices_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("shardkit.backends.xla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MeshError, match=r"pip install torch==2\.9\.0 torch_xla==2\.9\.0"):
        init_device_mesh("xla", (1,))


def test_importing_the_library_does_not_import_torch_xla() -> None:
    code = "import sys, shardkit; sys.exit('torch_xla' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tests_without_xla_do_not_import_it(pytestconfig: pytest.Config) -> None:
    """It replaces functions of torch, also for tensors that are on no XLA device."""
    assert "torch_xla" not in sys.modules or "not xla" not in pytestconfig.option.markexpr


def test_shared_inputs_are_marked_only() -> None:
    tensor = torch.ones(3)
    assert shardkit.shared_input(tensor) is tensor
