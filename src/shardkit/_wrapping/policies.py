"""From what users pass as a policy to the modules that it chooses, and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit import _compat_modules
from shardkit._errors import WrapError, nearest
from shardkit._wrapping.balance import choose_balanced
from shardkit._wrapping.protocol import (
    choose_by_protocol,
    follows_protocol,
    is_by_size,
    size_based_auto_wrap_policy,
)

if TYPE_CHECKING:
    from shardkit._policy import MixedPrecisionPolicy
    from shardkit._wrapping.tree import ModuleTree

Choice = dict[tuple[str, ...], dict[str, Any]]
"""Names of the modules of a group, and arguments of its `fully_shard` call."""

ARGUMENTS = (
    "mesh",
    "mp_policy",
    "reshard_after_forward",
    "shard_placement_fn",
    "offload_policy",
    "ignored_params",
)
"""What a policy may choose for one group."""

BALANCED, NO_SPLIT, SIZE, NO_WRAP = "balanced", "no_split_modules", "size", "no_wrap"
_NAMED = {
    "balanced": BALANCED,
    "no_split_modules": NO_SPLIT,
    "transformer_based_wrap": NO_SPLIT,
    "size": SIZE,
    "size_based_wrap": SIZE,
    "no_wrap": NO_WRAP,
}
"""Policies by name; the longer names are Accelerate's."""

_WEIGHTS = {"free_full_weight": True, "keep_full_weight": False}
"""What transformers' `_fsdp_plan` says of a module: whether to reshard after forward."""


def choose(
    tree: ModuleTree, policy: Any, *, mp_policy: MixedPrecisionPolicy, num_ranks: int
) -> Choice:
    """Return the groups that a policy chooses, without the root's, in any order.

    Args:
        tree: The model.
        policy: A policy as `auto_shard` takes it.
        mp_policy: The dtypes: in how many bytes a parameter is gathered.
        num_ranks: The size of the shard axis.

    Raises:
        WrapError: It chooses nothing, though not by size; names what is not there; or is no policy.
    """
    policy = _by_word(policy)
    if is_balanced(policy):
        return choose_balanced(tree, mp_policy, num_ranks)
    if policy == NO_WRAP:
        return {}
    chosen = _choose(tree, policy)
    if not chosen and policy != SIZE and not is_by_size(policy):
        msg = (
            f"the policy {_described(policy)} chooses no module of this "
            f"{type(tree.model).__name__}, so all would be one group. Choose others, or pass "
            f"policy='no_wrap' if one group is meant."
        )
        raise WrapError(msg)
    return chosen


def is_balanced(policy: Any) -> bool:
    """Whether groups are chosen by size: nothing was said, or ``"balanced"``."""
    return policy is None or _by_word(policy) == BALANCED


def _by_word(policy: Any) -> Any:
    """Return the policy, or its own name where it has several."""
    if isinstance(policy, str) and (policy.islower() or policy.isupper()):
        return _NAMED.get(policy.lower(), policy)  # A class may have the name Size.
    return policy


def _choose(tree: ModuleTree, policy: Any) -> Choice:
    if policy == NO_SPLIT:
        return _by_class(tree, _no_split_modules(tree.model))
    if policy == SIZE:
        policy = size_based_auto_wrap_policy
    lambda_fn = _compat_modules.lambda_of_custom_policy(policy)
    if lambda_fn is not None:
        policy = lambda_fn
    if isinstance(policy, Mapping):
        return choose_by_name(tree, policy)
    if isinstance(policy, (str, type)):
        return _by_class(tree, [policy])
    if isinstance(policy, Collection):
        return _by_class(tree, policy)
    if not callable(policy):
        msg = (
            f"a policy is a class or its name, a collection of these, a mapping from names of "
            f"modules to arguments, or a callable; got {policy!r}."
        )
        raise WrapError(msg)
    if follows_protocol(policy):
        return {(name,): {} for name in choose_by_protocol(tree, policy)}
    return _by_callable(tree, policy)


def _described(policy: Any) -> str:
    if isinstance(policy, type):
        return policy.__name__
    if inspect.isfunction(policy):
        return f"{policy.__name__}()"
    return repr(policy)


# --- by classes -----------------------------------------------------------------------------------


def _no_split_modules(model: nn.Module) -> Collection[str]:
    """Return the names of classes that a model of transformers says must stay whole."""
    found: list[str] = []
    for module in model.modules():
        found += getattr(module, "_no_split_modules", None) or ()
    if not found:
        msg = (
            f"this {type(model).__name__} has no _no_split_modules, which models of the "
            f"transformers package have. Name the classes of its layers: policy={{'Block'}}."
        )
        raise WrapError(msg)
    present = {type(module).__name__ for module in model.modules()}
    # What a composite model may hold, and this one does not, is no mistake of the user's.
    return [name for name in dict.fromkeys(found) if name in present] or found


def _by_class(tree: ModuleTree, classes: Collection[Any]) -> Choice:
    """Choose modules of classes or their names, and of their subclasses."""
    kinds = {each for each in classes if isinstance(each, type)}
    names = [each for each in classes if isinstance(each, str)]
    for each in classes:
        if not isinstance(each, str) and not (
            isinstance(each, type) and issubclass(each, nn.Module)
        ):
            msg = f"a policy of classes holds classes of modules or their names, got {each!r}."
            raise WrapError(msg)
    candidates = [*tree.candidates()]
    for name in names:
        called = {type(module) for module in tree.modules.values() if _is_called(module, name)}
        kinds |= called
        if not called:
            known = {type(module).__name__: None for _, module in candidates}
            msg = (
                f"no module of this {type(tree.model).__name__} is of a class {name!r}. "
                f"{nearest(name, known)} To choose a module by its own name, pass a mapping: "
                f"policy={{'layers.*': {{}}}}."
            )
            raise WrapError(msg)
    return {(path,): {} for path, module in candidates if isinstance(module, tuple(kinds))}


def _is_called(module: nn.Module, name: str) -> bool:
    cls = type(module)
    return name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


# --- by callables and by names --------------------------------------------------------------------


def _by_callable(tree: ModuleTree, policy: Callable[[nn.Module], Any]) -> Choice:
    chosen: Choice = {}
    for name, module in tree.candidates():
        answer = policy(module)
        if isinstance(answer, Mapping):
            chosen[name,] = checked_arguments(answer, name)
        elif isinstance(answer, (bool, type(None))):
            if answer:
                chosen[name,] = {}
        else:
            msg = (
                f"the policy {_described(policy)} returned {answer!r} for {name!r}. It may return "
                f"True, False, or a dict of arguments of fully_shard for this module."
            )
            raise WrapError(msg)
    return chosen


def choose_by_name(tree: ModuleTree, wanted: Mapping[Any, Any] | Collection[Any]) -> Choice:
    """Choose modules by names or patterns; a tuple of names is one group.

    Args:
        tree: The model.
        wanted: Names, or a mapping from them to arguments. A name that is in several patterns takes
            the arguments of the last one.

    Raises:
        WrapError: No module has such a name, or it cannot be a group.
    """
    chosen: Choice = {}
    pairs = wanted.items() if isinstance(wanted, Mapping) else ((key, {}) for key in wanted)
    for key, value in pairs:
        arguments = checked_arguments(value, key)
        if key == "":
            chosen[("",)] = arguments
        elif isinstance(key, str):
            for name in tree.matching(key):
                chosen[name,] = arguments
        elif isinstance(key, tuple) and key and all(isinstance(name, str) for name in key):
            found = [name for part in key for name in tree.matching(part)]
            chosen[tuple(dict.fromkeys(found))] = arguments
        else:
            msg = f"groups are named by strings, or by tuples of them for one group, got {key!r}."
            raise WrapError(msg)
    for name in dict.fromkeys(name for names in chosen for name in names):
        _check_named(tree, name)
    return {
        names: arguments
        for names, arguments in chosen.items()
        if any(next(tree.params(tree.modules[name]), None) is not None for name in names)
    }


def _check_named(tree: ModuleTree, name: str) -> None:
    module = tree.modules[name]
    if name and tree.is_container(module):
        msg = (
            f"{name!r} is a {type(module).__name__} and has no forward, so its parameters would "
            f"never be gathered. Name the modules in it: '{name}.*'; or all of them in a tuple, as "
            f"one group: ('{name}.*',)."
        )
        raise WrapError(msg)


def checked_arguments(value: Any, where: Any) -> dict[str, Any]:
    """Return what a policy says of one group as arguments of `fully_shard`.

    Raises:
        WrapError: It has no such argument.
    """
    if isinstance(value, str) and value in _WEIGHTS:
        return {"reshard_after_forward": _WEIGHTS[value]}
    if value is None or value is True:
        return {}
    if not isinstance(value, Mapping):
        msg = (
            f"the policy says {value!r} of {where!r}. Pass a dict of arguments of fully_shard, "
            f"e.g. {{'reshard_after_forward': False}}."
        )
        raise WrapError(msg)
    for name in value:
        if name not in ARGUMENTS:
            msg = (
                f"the policy gives {where!r} an argument {name!r}, which fully_shard does not "
                f"have. {nearest(str(name), ARGUMENTS)}"
            )
            raise WrapError(msg)
    return dict(value)
