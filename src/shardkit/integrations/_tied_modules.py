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

    Packages put the embedding into a group, and leave the head to the root, or make it a group of
    its own. A module that another one brought along is not sharded again.

    Args:
        models: Models that the package is about to shard.
        module_of_package: Module in which the package finds ``fully_shard``.
    """
    holders = defaultdict(list)
    for model in models:
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders[param].append(module)

    brought: set[nn.Module] = set()

    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = module if isinstance(module, list) else [module]
        modules = [each for each in given if each not in brought]
        if not modules:
            return module
        inside = {inner for each in modules for inner in each.modules()}
        together = list(modules)
        for each in together:  # It grows: a head that is brought along may share its bias.
            for param in each.parameters(recurse=False):
                tied = [holder for holder in holders[param] if holder not in inside]
                together += tied
                inside.update(tied)
        brought.update(together[len(modules) :])
        is_list = isinstance(module, list) or len(together) > 1
        return fully_shard(together if is_list else module, *args, **kwargs)

    with Installed() as used:
        used.replace(module_of_package, "fully_shard", shard)
        yield
