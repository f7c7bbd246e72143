"""The modules of a model by name: which could be units, how large they are, what names match."""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardkit._errors import WrapError, nearest
from shardkit._params.packing import numel_and_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardkit._policy import MixedPrecisionPolicy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CLOSED = (nn.MultiheadAttention, ParametrizationList)
"""Classes whose forward reads the weights of their children without a call of these."""

_Label = TypeVar("_Label")


class ModuleTree:
    """A model's modules, each once, under the first of its names.

    Args:
        model: The root.
        ignored: Parameters that no group takes.

    Attributes:
        model: The root.
        modules: The modules by name, parents before their children; the root's name is empty.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._names = {id(module): name for name, module in self.modules.items()}
        self._ignored = {id(param) for param in ignored}
        self._closed = self._find_closed()
        self._num_parents = collections.Counter(
            id(child) for module in self.modules.values() for child in module.children()
        )

    def _find_closed(self) -> set[int]:
        """Return modules in others that use their weights without calling them."""
        closed = set()
        for module in self.modules.values():
            if isinstance(module, _CLOSED):
                closed |= {id(inner) for inner in module.modules() if inner is not module}
            if isinstance(module, ParametrizationList):
                closed.add(id(module))
        return closed

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module."""
        return self._names[id(module)]

    def around_params(self, labels: Mapping[int, _Label]) -> dict[int, set[_Label]]:
        """Return, by the id of each parameter, the labels that every path to it goes through.

        A path goes from the root through modules down to one that holds the parameter. There are
        several where modules share a weight (tied), and where parents share a module.

        Args:
            labels: The labels of modules, by their ids; the root has one. Several modules may have
                the same.
        """
        own = {key: {label} for key, label in labels.items()}
        around = {id(self.model): own[id(self.model)]}
        is_settled = False
        while not is_settled:  # Once more after each change: a parent may come after its child.
            is_settled = True
            for module in self.modules.values():
                for child in module.children():
                    found = around[id(module)] | own.get(id(child), set())
                    before = around.get(id(child))
                    around[id(child)] = found if before is None else before & found
                    is_settled &= before == around[id(child)]
        result: dict[int, set[_Label]] = {}
        for module in self.modules.values():
            for param in module.parameters(recurse=False):
                found = around[id(module)]
                result[id(param)] = result.get(id(param), found) & found
        return result

    def shared_module(self, name: str) -> str:
        """Return the outermost module with several parents on the way to a parameter, or ``""``.

        Args:
            name: The name of the parameter, the first of its names.
        """
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((path for path in paths if self.is_shared(self.modules[path])), "")

    def is_shared(self, module: nn.Module) -> bool:
        """Whether a module has several parents."""
        return self._num_parents[id(module)] > 1

    def params(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters in a module that a group may take, each once."""
        return (param for param in module.parameters() if id(param) not in self._ignored)

    def numel(self, module: nn.Module) -> int:
        """Return the number of elements of these parameters."""
        return sum(param.numel() for param in self.params(module))

    def nbytes(self, params: Iterable[nn.Parameter], policy: MixedPrecisionPolicy) -> int:
        """Return the bytes of parameters as they are gathered."""
        cut = map(numel_and_dtype, params)
        return sum(numel * policy.dtypes_for(dtype)[0].itemsize for numel, dtype in cut)

    def is_container(self, module: nn.Module) -> bool:
        """Whether a module has no forward, so that it is never called."""
        return isinstance(module, _CONTAINERS) or type(module).forward is nn.Module.forward

    def may_be_unit(self, module: nn.Module) -> bool:
        """Whether a policy is asked about a module: it is called, and holds parameters."""
        return (
            module is not self.model
            and id(module) not in self._closed
            and not self.is_container(module)
            and next(self.params(module), None) is not None
        )

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that policies are asked about, by name."""
        return ((name, m) for name, m in self.modules.items() if self.may_be_unit(m))

    def matching(self, pattern: str) -> list[str]:
        """Return the names that a pattern matches: `*` stands for a part of a name between dots.

        Raises:
            WrapError: There is none.
        """
        parts = map(re.escape, pattern.split("*"))
        expression = re.compile("[^.]+".join(parts))
        found = [name for name in self.modules if name and expression.fullmatch(name)]
        if not found:
            names = [name for name in self.modules if name]
            msg = (
                f"no module of this {type(self.model).__name__} has the name {pattern!r}. "
                f"{nearest(pattern, names)} Names are those of model.named_modules(); a * stands "
                f"for one part of a name, as in 'layers.*'."
            )
            raise WrapError(msg)
        return found
