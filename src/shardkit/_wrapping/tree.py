"""The modules of a model by name: which could be units, how large they are, what names match."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardkit._errors import WrapError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardkit._policy import MixedPrecisionPolicy

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CLOSED = (nn.MultiheadAttention, ParametrizationList)
"""Classes whose forward reads the weights of their children without a call of these."""

_NUM_NEAREST = 3


class ModuleTree:
    """A model's modules, each once, under the first of its names.

    Args:
        model: The root.
        ignored: Parameters that no group takes.

    Attributes:
        model: The root.
        modules: By name, parents before their children; the root's name is empty.
    """

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._names = {id(module): name for name, module in self.modules.items()}
        self._ignored = {id(param) for param in ignored}
        self._closed = self._find_closed()

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

    def params(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters in a module that a group may take, each once."""
        return (param for param in module.parameters() if id(param) not in self._ignored)

    def numel(self, module: nn.Module) -> int:
        """Return the number of elements of these parameters."""
        return sum(param.numel() for param in self.params(module))

    def nbytes(self, params: Iterable[nn.Parameter], policy: MixedPrecisionPolicy) -> int:
        """Return the bytes of parameters as they are gathered."""
        return sum(p.numel() * policy.dtypes_for(p.dtype)[0].itemsize for p in params)

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


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Return a sentence that names what is spelled most alike."""
    known = list(dict.fromkeys(names))
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wanted.lower(), list(lowered), n=_NUM_NEAREST, cutoff=0.4)
    found = [lowered[name] for name in close] or known[:_NUM_NEAREST]
    return f"The nearest ones are {', '.join(map(repr, found))}." if found else "It has none."
