"""Puts shardkit in the place of FSDP2, for scripts that import it from torch."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardkit._module.forward_methods import register_fsdp_forward_method
from shardkit._module.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from shardkit._module.fully_shard import fully_shard
from shardkit._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator

_logger = logging.getLogger("shardkit")

_OURS = {
    each.__name__: each
    for each in (
        fully_shard,
        FSDPModule,
        UnshardHandle,
        MixedPrecisionPolicy,
        OffloadPolicy,
        CPUOffloadPolicy,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
}
_PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""Those that users import from. Other parts of torch keep what they have."""

_installed: list[Installed] = []


class Installed:
    """What `install` has done. As a context manager it is undone at the end."""

    def __init__(self) -> None:
        self._replaced: list[tuple[types.ModuleType, str, Any]] = []

    def replace(self, module: types.ModuleType, name: str, value: object) -> None:
        """Replace a name of a module, and remember what it was."""
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def undo(self) -> None:
        """Give torch's names back. Models that are sharded stay as they are."""
        while self._replaced:
            module, name, value = self._replaced.pop()
            setattr(module, name, value)
        if self in _installed:
            _installed.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def install() -> Installed:
    """Let ``from torch.distributed.fsdp import fully_shard`` give shardkit's, in this process.

    The same for `FSDPModule`, `UnshardHandle`, the policies, `register_fsdp_forward_method` and
    `share_comm_ctx`. So an unchanged FSDP2 script trains with shardkit, if this is called before
    the script imports them:

        import shardkit

        shardkit.install()
        import train  # The script.

    Rank 0 says so once, through the logger ``shardkit``. Modules outside of torch that have
    imported the names before keep torch's; a warning names them. A second call changes nothing.

    Returns:
        Its `undo()` gives torch's names back, as does the end of ``with install():``. That of a
        second call has nothing to undo.
    """
    import torch.distributed.fsdp as torch_fsdp  # noqa: TID251 - to replace its names

    # It asks FSDP2's modules for more than they offer in public, so it must import torch's.
    importlib.import_module("torch.distributed.pipelining")
    installed = Installed()
    if _installed:
        return installed
    theirs = {name: getattr(torch_fsdp, name) for name in _OURS if hasattr(torch_fsdp, name)}
    late = set()
    for module, name in _places_of(theirs):
        if module.__name__.startswith(_PACKAGES):
            installed.replace(module, name, _OURS[name])
        elif not module.__name__.startswith("torch."):
            late.add(f"{module.__name__}.{name}")
    _installed.append(installed)
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(
            "shardkit is in the place of FSDP2: torch.distributed.fsdp gives shardkit's %s.",
            ", ".join(theirs),
        )
        if late:
            _logger.warning(
                "imported before, and still torch's: %s. Call shardkit.install() first.",
                ", ".join(sorted(late)),
            )
    return installed


def _places_of(theirs: dict[str, Any]) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield every loaded module that has imported one of torch's names.

    Not the files of FSDP2 itself, which go on to use their own.
    """
    home = Path(inspect.getfile(inspect.unwrap(theirs["fully_shard"]))).parent
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        file = Path(names.get("__file__") or "")
        if file.parent == home and file.stem != "__init__":
            continue
        for name, value in theirs.items():
            if names.get(name) is value:
                yield module, name
