"""Wrapping policies of torch_xla and of torch's FSDP1, and the protocol in which they are called.

A policy is asked twice about a module: ``recurse=True``, whether to look at its children, then
``recurse=False``, whether to wrap it, given the number of parameters that its children left.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardkit._wrapping.tree import ModuleTree

MIN_NUM_PARAMS = 100_000_000
_NUMBER_NAMES = ("unwrapped_params", "nonwrapped_numel")


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Choose every module that has a forward and parameters.

    Source: torch_xla's and torch's function of this name.
    """
    del args, kwargs
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 - the protocol
    unwrapped_params: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Choose the modules for which a function returns True.

    Use it as ``functools.partial(lambda_auto_wrap_policy, lambda_fn=...)``, or pass the function
    itself to `auto_shard`.

    Source: torch_xla's and torch's function of this name.
    """
    del unwrapped_params
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 - the protocol
    unwrapped_params: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Choose the modules of some classes.

    Use it as ``functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})``, or
    pass the classes themselves to `auto_shard`.

    Source: torch_xla's and torch's function of this name.
    """
    del unwrapped_params
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,  # noqa: FBT001 - the protocol
    unwrapped_params: int,
    min_num_params: int = MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Choose modules bottom-up as soon as they hold enough parameters that none inside has taken.

    Use it as ``functools.partial(size_based_auto_wrap_policy, min_num_params=20_000_000)``.

    Args:
        module: The module that is asked about.
        recurse: Whether to look at its children; otherwise whether it is a unit.
        unwrapped_params: Elements of its parameters that no unit inside of it holds.
        min_num_params: The number of elements that make a unit.
        force_leaf_modules: Classes into which nobody looks; None: ``{nn.MultiheadAttention}``.
        exclude_wrap_modules: Classes that are no units; None: ``{nn.ModuleList, nn.ModuleDict}``.

    Source: torch_xla's and torch's function of this name.
    """
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else force_leaf_modules
    excluded = (
        (nn.ModuleList, nn.ModuleDict) if exclude_wrap_modules is None else exclude_wrap_modules
    )
    is_large = unwrapped_params >= min_num_params
    return is_large and not isinstance(module, tuple(leaves if recurse else excluded))


def follows_protocol(policy: Callable[..., Any]) -> bool:
    """Whether a callable is to be asked in the protocol, and not with the module alone."""
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):
        return False
    if "recurse" in signature.parameters:
        return True
    return not _binds(signature, None) and _binds(signature, None, True, 0)


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _asker(policy: Callable[..., Any]) -> Callable[[nn.Module, bool, int], bool]:
    """Return how to call a policy: by the names that its arguments have, else by position.

    The number is `unwrapped_params` in torch_xla, and `nonwrapped_numel` in torch.
    """
    signature = inspect.signature(policy)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [name for name in _NUMBER_NAMES if takes_any or name in signature.parameters]
    given = dict.fromkeys(names, 0)
    by_name = bool(names) and _binds(signature, module=None, recurse=True, **given)
    mixed = bool(names) and _binds(signature, None, True, **given)

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:  # noqa: FBT001 - the protocol
        numbers = dict.fromkeys(names, numel)
        if by_name:
            return bool(policy(module=module, recurse=recurse, **numbers))
        if mixed:
            return bool(policy(module, recurse, **numbers))
        return bool(policy(module, recurse, numel))

    return ask


def choose_by_protocol(tree: ModuleTree, policy: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return the names of the modules that a policy chooses, children before parents.

    Modules without a forward, or without parameters, are no units whatever the policy says. A
    module that several have in common counts for the first of them.
    """
    ask = _asker(policy)
    chosen: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Choose in a module; return the elements that units in it have."""
        if id(module) in seen:
            return tree.numel(module)
        seen.add(id(module))
        numel = tree.numel(module)
        if not ask(module, True, numel):
            return 0
        taken = sum(visit(child) for child in module.children())
        if tree.may_be_unit(module) and ask(module, False, numel - taken):
            chosen[tree.name_of(module)] = {}
            return numel
        return taken

    visit(tree.model)
    return chosen


def is_by_size(policy: Any) -> bool:
    """Whether a policy is that by size, of whichever package: it may well choose nothing."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    return getattr(policy, "__name__", None) == size_based_auto_wrap_policy.__name__


def size_policy(min_num_params: int) -> Callable[..., bool]:
    """Return the policy by size with another number, as Accelerate's `fsdp_min_num_params`."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
