"""How a module's own parameters and buffers get values: which of its methods do it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OWN = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods of a module that give values to its own parameters; the first of them is called."""

_OF_BUFFERS = ("reset_buffers", "rope_init")
"""Methods of a module that compute its buffers, as torchtune's do; called after the first kind."""

_OF_MODEL = "_init_weights"
"""A model's method that initializes a module inside it, as in transformers and timm."""

_OF_ROTARY = "rope_init_fn"
"""What makes a table of rotary positions of a config, in modules of transformers before 5.0."""

_TABLE, _FIRST_TABLE = "inv_freq", "original_inv_freq"
"""Where such a module keeps the table, and the one that it began with."""

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True, eq=False)
class InitializedModule:
    """A module with the tensors that it holds itself.

    Attributes:
        name: The name of the module.
        module: A `nn.ParameterList` or `nn.ParameterDict` is no unit, but belongs to its holder.
        holders: The module, and containers of parameters that belong to it.
        initializers: The functions that give it values: the first that writes all of them is
            enough.
    """

    name: str
    module: nn.Module
    holders: list[nn.Module]
    initializers: list[Callable[[], object]] = field(default_factory=list)


def units_of(
    model: nn.Module, init_fn: Callable[[nn.Module], object] | None = None
) -> Iterator[InitializedModule]:
    """Yield the modules in the order of `nn.Module.apply`, each once: those inside come first."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, owner: nn.Module | None) -> Iterator[InitializedModule]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if _takes(module, _OF_MODEL, 1):
            owner = module
        for child_name, child in module.named_children():
            if not isinstance(child, _CONTAINERS):
                yield from visit(f"{name}.{child_name}".removeprefix("."), child, owner)
        unit = InitializedModule(name, module, list(_with_containers(module)))
        if init_fn is not None:
            unit.initializers = [lambda: init_fn(module)]
        else:
            unit.initializers = list(_defaults(module, owner))
        yield unit

    yield from visit("", model, None)


def _with_containers(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _with_containers(child)


def _defaults(module: nn.Module, owner: nn.Module | None) -> Iterator[Callable[[], object]]:
    """Yield what to try.

    A model's own way comes first. Modules that it says nothing about have the values of their
    constructors, as in the plain model. Last come tables of rotary positions.
    """
    own = _own_methods(module, is_model=module is owner)

    def run_own() -> None:
        for method in own:
            method()

    if owner is not None:
        init: Any = getattr(owner, _OF_MODEL)
        yield lambda: init(module)

        def run_both() -> None:
            run_own()
            init(module)

        if own:
            yield run_both
    elif own:
        yield run_own
    if callable(module.__dict__.get(_OF_ROTARY)) and _TABLE in module._buffers:  # noqa: SLF001
        yield lambda: _compute_rotary_table(module)


def _compute_rotary_table(module: Any) -> None:
    """Have a module of transformers compute the frequencies of rotary positions again."""
    table = getattr(module, _OF_ROTARY)(module.config)[0]
    for name in (_TABLE, _FIRST_TABLE):
        if name in module._buffers:  # noqa: SLF001
            getattr(module, name).copy_(table)


def _own_methods(module: nn.Module, *, is_model: bool) -> list[Callable[[], object]]:
    # `init_weights` of a model with `_init_weights` initializes all modules in it.
    names = [name for name in _OWN if _takes(module, name, 0)]
    if is_model:
        names = [name for name in names if name != "init_weights"]
    names = names[:1] + [name for name in _OF_BUFFERS if _takes(module, name, 0)]
    return [getattr(module, name) for name in names]


def _takes(module: nn.Module, name: str, num_args: int) -> bool:
    """Whether a module has a method that can be called with so many arguments, and needs them."""
    method = getattr(type(module), name, None) and getattr(module, name)
    if not callable(method):
        return False
    needed = 0
    for parameter in inspect.signature(method).parameters.values():
        is_named = parameter.kind is not parameter.VAR_POSITIONAL
        if parameter.default is parameter.empty and is_named:
            needed += parameter.kind is not parameter.VAR_KEYWORD
    return needed == num_args
