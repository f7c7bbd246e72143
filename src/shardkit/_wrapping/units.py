"""Units in the order in which they are sharded, and which of them holds which parameter."""

from __future__ import annotations

import graphlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._errors import WrapError
from shardkit._module.checks import find_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardkit._params.sites import ParamEntry
    from shardkit._wrapping.policies import Choice
    from shardkit._wrapping.tree import ModuleTree


@dataclass(slots=True, eq=False)
class Unit:
    """What one call of `fully_shard` is to take.

    Attributes:
        names: The names of its modules; an empty name is the root's.
        modules: One, or those of a list.
        arguments: The arguments of the call.
        entries: The parameters that it takes, by their names in the root.
        left_out: Parameters in it that belong to a unit around it: they are tied or shared.
        shared: Names of modules in it that units inside have in common, so that it takes their
            parameters.
    """

    names: tuple[str, ...]
    modules: list[nn.Module]
    arguments: dict[str, Any]
    entries: list[ParamEntry] = field(default_factory=list)
    left_out: set[nn.Parameter] = field(default_factory=set)
    shared: tuple[str, ...] = ()

    @property
    def is_root(self) -> bool:
        """Whether it is the root's."""
        return self.names == ("",)


def units_in_order(tree: ModuleTree, choice: Choice) -> list[Unit]:
    """Return the units of a choice, inner ones before outer ones, and the root's last.

    Raises:
        WrapError: Two of them overlap, so that neither is inside the other.
    """
    _check_overlaps(tree, choice)
    # Children come before parents, and neighbours in their order.
    positions = {name: i for i, name in enumerate(tree.modules)}
    units = [
        Unit(names, [tree.modules[name] for name in names], arguments)
        for names, arguments in sorted(choice.items(), key=lambda item: positions[item[0][0]])
    ]
    holders: dict[int, list[Unit]] = {}
    for unit in units:
        for module in unit.modules:
            for inner in module.modules():
                if inner is not module:
                    holders.setdefault(id(inner), []).append(unit)
    inside: dict[Unit, dict[Unit, None]] = {unit: {} for unit in units}
    for unit in units:
        for module in unit.modules:
            for outer in holders.get(id(module), ()):
                inside[outer][unit] = None
    try:
        order = [*graphlib.TopologicalSorter(inside).static_order()]
    except graphlib.CycleError as error:
        first, second = (", ".join(unit.names) for unit in error.args[1][:2])
        msg = (
            f"the groups ({first}) and ({second}) overlap: each has a module inside a module of "
            f"the other. Let one of them hold all of these modules, or take one of them away."
        )
        raise WrapError(msg) from None
    return [*order, Unit(("",), [tree.model], {})]


def _check_overlaps(tree: ModuleTree, choice: Choice) -> None:
    """Raise if a module is in two groups, or inside of another one of its own group."""
    seen: dict[str, tuple[str, ...]] = {}
    for names in choice:
        for name in names:
            if name in seen:
                msg = (
                    f"{name!r} is in two groups, ({', '.join(seen[name])}) and "
                    f"({', '.join(names)}). Name it once."
                )
                raise WrapError(msg)
            seen[name] = names
        for name in names if len(names) > 1 else ():
            inner = {id(module) for module in tree.modules[name].modules()}
            for other in names:
                if other != name and id(tree.modules[other]) in inner:
                    msg = (
                        f"the group ({', '.join(names)}) overlaps itself: {other!r} is inside "
                        f"{name!r}, which holds its parameters. Name one of them."
                    )
                    raise WrapError(msg)


def assign_params(tree: ModuleTree, units: Sequence[Unit], ignored: set[nn.Parameter]) -> None:
    """Give each unit its parameters: those in it that no unit inside of it has.

    A parameter may be reached by several paths: modules share a weight (tied), or parents share a
    module. It belongs to the innermost unit that every path goes through, so that it is gathered
    wherever it is used.
    """
    numbers = {id(m): number for number, unit in enumerate(units) for m in unit.modules}
    # Inner units come before outer ones.
    owner = {key: min(around) for key, around in tree.around_params(numbers).items()}
    left_out: set[nn.Parameter] = set()
    taken = set(ignored)
    names = {id(param): name for name, param in tree.model.named_parameters()}
    for number, unit in enumerate(units):
        held = {param for module in unit.modules for param in module.parameters()}
        unit.left_out = {
            param for param in held if param not in taken and owner[id(param)] > number
        }
        unit.entries = [*find_params(unit.modules, taken | unit.left_out)]
        for entry in unit.entries:
            entry.name = names[id(entry.param)]
        left = [entry.name for entry in unit.entries if entry.param in left_out]
        unit.shared = tuple(filter(None, dict.fromkeys(map(tree.shared_module, left))))
        left_out |= unit.left_out
        taken.update(entry.param for entry in unit.entries)
