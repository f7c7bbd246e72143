"""Groups chosen from sizes and order alone, where users choose none.

[Note: balance] Two groups are unsharded at a time, so the largest group bounds the memory. A
collective of N ranks sends pieces of 1/N of a group, and a piece below latency times bandwidth
costs the latency, whatever its size; so the smallest group bounds the efficiency. In numbers:

- *smallest*: 128 KiB for each rank of the shard axis, but no more than an eighth of the model, and
  no less than 1 MiB, below which groups travel together anyway;
- *largest*: an eighth of the model, but no less than eight times the smallest.

Going down from the root, the children of a ``ModuleList`` or ``Sequential`` are what is grouped:
they are the repeated blocks of a model, and run one after another. One above *largest* is looked
into for blocks of its own. Neighbours below *smallest* form groups above it, as equal as can be.
What is left is the root's. As long as that is more than the largest group, its largest module (the
embedding, the head) is split off, unless it is below *smallest* or its weight is tied.

All ranks must gather the same groups. The children of the outermost ``ModuleList`` or
``ModuleDict`` are taken to run on all ranks. Inside a block code may choose among children (the
experts of a mixture), and each rank may choose others. So those of a ``ModuleList`` or
``ModuleDict`` in a block stay with the block; if the block is a list itself, they are one group.

Only names, shapes and dtypes count: the choice is the same on all ranks, and on the meta device.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit._schedule import unshard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit._policy import MixedPrecisionPolicy
    from shardkit._wrapping.tree import ModuleTree

_PIECE_NBYTES = 128 << 10
"""Latency times bandwidth of one link: 5 us at 25 GB/s."""

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""Code chooses which of their children run."""

_CHAINS = (*_LISTS, nn.Sequential)

_FRACTION = 8
"""A group is at most one part in so many of the model, if it can be divided."""


def bounds(model_nbytes: int, num_ranks: int) -> tuple[int, int]:
    """Return the bytes of the smallest and of the largest group that are aimed at."""
    smallest = min(_PIECE_NBYTES * num_ranks, model_nbytes // _FRACTION)
    smallest = max(smallest, unshard.BATCH_NBYTES, 1)
    return smallest, max(model_nbytes // _FRACTION, _FRACTION * smallest)


def choose_balanced(
    tree: ModuleTree, policy: MixedPrecisionPolicy, num_ranks: int
) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the groups of a model, without the root's; see the module's note.

    Args:
        tree: The model.
        policy: The dtypes: in how many bytes a parameter is gathered.
        num_ranks: The size of the shard axis.

    Returns:
        Names of modules by group; empty if the model is small.
    """
    return _Balance(tree, policy, num_ranks).choose()


def group_neighbours(sizes: Sequence[int], smallest: int) -> list[list[int]]:
    """Divide neighbours into groups of at least `smallest`, as many and as equal as can be.

    Args:
        sizes: The size of each, in their order.
        smallest: One of this size or more is a group by itself; smaller ones in front of the first
            such one, or too few behind one, join it.

    Returns:
        Positions by group, in order; none if all together are below `smallest`.
    """
    groups: list[list[int]] = []
    small: list[int] = []
    for position, size in enumerate(sizes):
        if size < smallest:
            small.append(position)
            continue
        parts = _equal_parts(small, sizes, smallest)
        groups += parts
        if small and not parts and groups:
            groups[-1] += small
        is_first = bool(small) and not groups
        groups.append([*small, position] if is_first else [position])
        small = []
    parts = _equal_parts(small, sizes, smallest)
    if small and not parts and groups:
        groups[-1] += small
    return groups + parts


def _equal_parts(positions: list[int], sizes: Sequence[int], smallest: int) -> list[list[int]]:
    """Divide small neighbours; no parts if all together are below `smallest`."""
    total = sum(sizes[position] for position in positions)
    for count in range(total // smallest, 0, -1):
        parts: list[list[int]] = [[]]
        reached = 0
        for position in positions:
            if reached * count >= total * len(parts):
                parts.append([])
            parts[-1].append(position)
            reached += sizes[position]
        if all(sum(sizes[position] for position in part) >= smallest for part in parts):
            return parts
    return []


class _Balance:
    """See `choose_balanced`."""

    def __init__(self, tree: ModuleTree, policy: MixedPrecisionPolicy, num_ranks: int) -> None:
        self._tree = tree
        self._policy = policy
        total = tree.nbytes(tree.params(tree.model), policy)
        self._smallest, self._largest = bounds(total, num_ranks)
        self._taken: set[int] = set()
        self._around = tree.around_params({id(m): id(m) for m in tree.modules.values()})
        own = {id(param) for param in tree.model.parameters(recurse=False)}
        root = {id(tree.model)}
        self._tied = {key for key, around in self._around.items() if around == root} - own
        self._chosen_among = _chosen_among(tree.model)
        self._seen: set[int] = set()
        self._groups: list[tuple[list[nn.Module], int]] = []

    def choose(self) -> dict[tuple[str, ...], dict[str, Any]]:
        self._divide(self._tree.model)
        self._split_remainder()
        return {
            tuple(self._tree.name_of(module) for module in modules): {}
            for modules, _ in self._groups
        }

    def _free(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that a group of a module would take, or that may leave the root.

        No group has them, and they are reached through this module alone.
        """
        return [
            param
            for param in self._tree.params(module)
            if id(param) not in self._taken
            and id(param) not in self._tied
            and id(module) in self._around[id(param)]
        ]

    def _nbytes(self, module: nn.Module) -> int:
        return self._tree.nbytes(self._free(module), self._policy)

    def _add(self, modules: list[nn.Module]) -> None:
        nbytes = 0
        for module in modules:
            nbytes += self._nbytes(module)
            self._taken.update(map(id, self._free(module)))
        self._groups.append((modules, nbytes))

    def _divide(self, module: nn.Module) -> None:
        """Choose groups in a module."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        is_chain = isinstance(module, (nn.ModuleList, nn.Sequential))
        run: list[list[nn.Module]] = []
        for child in module.children():
            nbytes = self._nbytes(child)
            if not nbytes or id(child) in self._seen:
                continue
            is_block = is_chain and self._tree.may_be_unit(child)
            is_list = is_chain and isinstance(child, _LISTS)
            is_small = is_block and nbytes <= self._largest
            # Groups that hold a shared module beside others could be inside of each other.
            if (is_small or is_list) and not self._tree.is_shared(child):
                self._seen.add(id(child))
                run.append([*self._called(child)])
                continue
            self._add_run(run)
            run = []
            is_chosen = isinstance(child, _CHAINS) and id(child) in self._chosen_among
            if not is_chosen and not is_small:
                self._divide(child)
            if is_block and self._nbytes(child) >= self._smallest:
                self._add([child])  # What is left of it.
        self._add_run(run)

    def _called(self, block: nn.Module) -> Iterator[nn.Module]:
        """Yield a block, or the modules in it if it is a list, and has no forward."""
        if self._tree.may_be_unit(block):
            yield block
        elif isinstance(block, _LISTS):
            for child in block.children():
                yield from self._called(child)

    def _add_run(self, run: list[list[nn.Module]]) -> None:
        """Make groups of blocks that run one after another."""
        sizes = [sum(map(self._nbytes, block)) for block in run]
        for group in group_neighbours(sizes, self._smallest):
            self._add([module for i in group for module in run[i]])

    def _split_remainder(self) -> None:
        """Split large modules off what is left to the root."""
        root = self._tree.model
        largest = max((nbytes for _, nbytes in self._groups), default=0)
        leaves = [
            module
            for _, module in self._tree.candidates()
            if next(module.children(), None) is None and id(module) not in self._chosen_among
        ]
        sized = [(self._nbytes(module), module) for module in leaves]
        # Of equal ones the first: `sorted` is stable.
        for nbytes, module in sorted(sized, key=lambda item: -item[0]):
            if nbytes < self._smallest or self._nbytes(root) <= largest:
                return
            if self._nbytes(module) != nbytes:
                continue  # Another one holds its parameters.
            self._add([module])
            largest = max(largest, nbytes)


def _chosen_among(root: nn.Module) -> set[int]:
    """Return the lists inside of blocks, and all modules in them: a rank may run some of them.

    A block is a child of a `ModuleList`, or one of several children of a class of a `Sequential`.
    """
    found: set[int] = set()
    seen: set[tuple[int, bool]] = set()

    def visit(module: nn.Module, *, in_block: bool) -> None:
        if (id(module), in_block) in seen:
            return
        seen.add((id(module), in_block))
        is_chain = type(module).forward is nn.Sequential.forward
        if in_block and isinstance(module, _CHAINS) and not is_chain:
            found.update(map(id, module.modules()))
            return
        kinds = collections.Counter(type(child) for child in module.children())
        for child in module.children():
            is_repeated = isinstance(module, nn.Sequential) and kinds[type(child)] > 1
            is_block = is_repeated or isinstance(module, nn.ModuleList)
            visit(child, in_block=in_block or is_block)

    visit(root, in_block=False)
    return found
