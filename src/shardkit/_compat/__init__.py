"""Every private name of torch that shardkit uses: why, and until which torch a branch is needed.

Nothing else in shardkit imports a private name of torch. Tried on torch 2.9.0 and 2.13.0 (CPU).
Each module begins with a table of its branches on torch's version.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Find a name in the modules of this package."""
    sections = ("tensors", "autograd", "groups", "devices", "modules", "fsdp2", "checkpoints")
    for section in sections:
        module = importlib.import_module(f"shardkit._compat.torch_{section}")
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(name)
