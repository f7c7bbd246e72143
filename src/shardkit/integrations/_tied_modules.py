"""Modules that hold tied weights come into one group, in packages that group only some of them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shardkit._install import Installed
from shardkit._module.fully_shard import fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

__all__: list[str] = []


@contextlib.contextmanager
def tied_modules_together(models: Sequence[nn.Module], module_of_package: Any) -> Iterator[None]:
    """Add all modules that hold a tied weight to the modules that form a group.

    Packages put the embedding into a group, and leave the head to the root.

    Args:
        models: Models that the package is about to shard.
        module_of_package: Module in which the package finds ``fully_shard``.
    """
    holders = defaultdict(list)
    for model in models:
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders[param].append(module)

    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        modules = module if isinstance(module, list) else [module]
        held = {param for each in modules for param in each.parameters(recurse=False)}
        inside = {inner for each in modules for inner in each.modules()}
        tied = [holder for param in held for holder in holders[param] if holder not in inside]
        together = [*modules, *dict.fromkeys(tied)] if tied else module
        return fully_shard(together, *args, **kwargs)

    with Installed() as used:
        used.replace(module_of_package, "fully_shard", shard)
        yield
