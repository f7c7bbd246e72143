"""Policies: from the user's choice to the chosen modules, their order and arguments."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardkit import _schedule
from shardkit._compat import torch_modules
from shardkit._errors import WrapError
from shardkit._module.checks import MODULE_CONTAINERS, PARAMETER_CONTAINERS, why_never_gathered
from shardkit._module.fsdp_module import own_class
from shardkit._params.packing import numel_and_dtype
from shardkit._text import nearest

if TYPE_CHECKING:
    from shardkit._settings import MixedPrecisionPolicy


# --- modules by name ------------------------------------------------------------------------------

_CLOSED = (nn.MultiheadAttention, ParametrizationList)
"""Classes whose forward reads the weights of their children without calling them."""

_Label = TypeVar("_Label")


class ModuleTree:
    """The modules of a model, each once, under the first of its names."""

    def __init__(self, model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> None:
        self.model = model  # The root.
        # Modules by name, parents before their children; the root's name is empty.
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._names = {id(module): name for name, module in self.modules.items()}
        self._param_names = {id(param): name for name, param in model.named_parameters()}
        self._ignored = {id(param) for param in ignored}
        self.class_name = own_class(model).__name__  # Name of the root's class.
        # Ids of modules inside of others that use their weights without calling them.
        self.closed: set[int] = set()
        for module in self.modules.values():
            if isinstance(module, _CLOSED):
                self.closed.update(id(inner) for inner in module.modules() if inner is not module)
            if isinstance(module, ParametrizationList):
                self.closed.add(id(module))
        self._num_parents = collections.Counter(
            id(child) for module in self.modules.values() for child in module.children()
        )

    def name_of(self, module: nn.Module) -> str:
        """Return the name of a module."""
        return self._names[id(module)]

    def around_params(self, labels: Mapping[int, _Label]) -> dict[int, set[_Label]]:
        """Return, by the id of each parameter, the labels that are on every path to it.

        A path goes from the root through modules down to one that holds the parameter. There are
        several paths if modules share a weight (tied), or if parents share a module.

        Args:
            labels: Labels of modules, by their ids; the root has one. Several modules may have the
                same label.
        """
        own = {key: {label} for key, label in labels.items()}
        around = {id(self.model): own[id(self.model)]}
        is_settled = False
        while not is_settled:  # Repeat after each change: a parent may come after its child.
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
        """Return the outermost module with several parents on the way to a parameter, or ``""``."""
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
        """Return the bytes of parameters in the dtype in which they are gathered."""
        cut = (numel_and_dtype(self._param_names[id(param)], param) for param in params)
        return sum(numel * policy.dtypes_for(dtype, dtype)[0].itemsize for numel, dtype in cut)

    def may_be_unit(self, module: nn.Module) -> bool:
        """Whether a policy may choose a module: it is called, and holds parameters."""
        return (
            module is not self.model
            and id(module) not in self.closed
            and why_never_gathered(module) is None
            and next(self.params(module), None) is not None
        )

    def candidates(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that a policy may choose, by name."""
        return ((name, m) for name, m in self.modules.items() if self.may_be_unit(m))

    def matching(self, pattern: str) -> list[str]:
        """Return the names that a pattern matches; `*` matches one part of a name between dots."""
        parts = map(re.escape, pattern.split("*"))
        expression = re.compile("[^.]+".join(parts))
        found = [name for name in self.modules if name and expression.fullmatch(name)]
        if not found:
            names = [name for name in self.modules if name]
            msg = (
                f"no module of this {self.class_name} has the name {pattern!r}. "
                f"{nearest(pattern, names)} Names are those of model.named_modules(); a * stands "
                f"for one part of a name, as in 'layers.*'."
            )
            raise WrapError(msg)
        return found


# --- torch_xla's and FSDP1's policies -------------------------------------------------------------
#
# A policy is called twice for a module: with ``recurse=True``, whether to visit its children, then
# with ``recurse=False``, whether to wrap it, given the number of parameters that its children left.

MIN_NUM_PARAMS = 100_000_000  # Accelerate's default, too.
_NUMBER_NAMES = ("unwrapped_params", "nonwrapped_numel")


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Choose every module that has a forward and parameters.

    Source: torch_xla's and torch's function of this name.
    """
    del args, kwargs
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]
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
    recurse: bool,
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
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Choose modules bottom-up once they hold enough parameters that no inner group has taken.

    Use it as ``functools.partial(size_based_auto_wrap_policy, min_num_params=20_000_000)``.

    Args:
        module: Module to decide about.
        recurse: Whether the call asks to visit its children; otherwise whether it is a unit.
        unwrapped_params: Number of elements of its parameters that no inner unit holds.
        min_num_params: Number of elements that make a unit.
        force_leaf_modules: Classes that are not visited inside; None: ``{nn.MultiheadAttention}``.
        exclude_wrap_modules: Classes that are no units; None: no classes. Modules that no call
            gathers, such as an ``nn.ModuleList`` without a forward, are never units.

    Source: torch_xla's and torch's function of this name.
    """
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else force_leaf_modules
    if unwrapped_params < min_num_params:
        return False
    if recurse:
        return not isinstance(module, tuple(leaves))
    is_excluded = isinstance(module, tuple(exclude_wrap_modules or ()))
    return not is_excluded and why_never_gathered(module) is None


def _takes(policy: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a policy can be called with these arguments."""
    try:
        inspect.signature(policy).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _has_signature(policy: Callable[..., Any]) -> bool:
    """Whether a policy says which arguments it takes; classes of extension modules do not."""
    try:
        inspect.signature(policy)
    except (TypeError, ValueError):
        return False
    return True


def _asker(policy: Callable[..., Any]) -> Callable[[nn.Module, bool, int], Any] | None:
    """Return a caller for a policy in the protocol; None: it takes the module alone.

    Arguments are passed by the policy's own names for them, else by position. The number is
    `unwrapped_params` in torch_xla, and `nonwrapped_numel` in torch.
    """
    if not _has_signature(policy):
        return None
    names = inspect.signature(policy).parameters
    if "recurse" not in names and (_takes(policy, None) or not _takes(policy, None, True, 0)):
        return None
    by_name = [n for n in _NUMBER_NAMES if _takes(policy, module=None, recurse=True, **{n: 0})]
    if by_name:
        return lambda module, recurse, numel: policy(
            module=module, recurse=recurse, **dict.fromkeys(by_name, numel)
        )
    mixed = [n for n in _NUMBER_NAMES if _takes(policy, None, True, **{n: 0})]
    if mixed:
        return lambda module, recurse, numel: policy(module, recurse, **dict.fromkeys(mixed, numel))
    return policy


def choose_by_protocol(tree: ModuleTree, ask: Callable[[nn.Module, bool, int], Any]) -> Choice:
    """Return the modules that a policy chooses, children before parents.

    Modules without a forward or without parameters are never units, whatever the policy says. A
    module that several parents share counts for the first of them.
    """
    chosen: Choice = {}
    seen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Choose in a module; return the number of elements that units in it hold."""
        if id(module) in seen:
            return tree.numel(module)
        seen.add(id(module))
        numel = tree.numel(module)
        if not ask(module, True, numel):
            return 0
        taken = sum(visit(child) for child in module.children())
        if tree.may_be_unit(module) and ask(module, False, numel - taken):
            chosen[tree.name_of(module),] = {}
            return numel
        return taken

    visit(tree.model)
    return chosen


def _is_by_size(policy: Any) -> bool:
    """Whether a policy is by size, of any package; such a policy may choose nothing."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    return getattr(policy, "__name__", None) == size_based_auto_wrap_policy.__name__


def size_policy(min_num_params: int) -> Callable[..., bool]:
    """Return the policy by size with another number, like Accelerate's `fsdp_min_num_params`."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


# --- balance --------------------------------------------------------------------------------------
#
# docs/design/wrapping.md describes the choice and its reasons. Only names, shapes and dtypes count:
# the choice is the same on all ranks, and on the meta device.

_PIECE_NBYTES = 128 << 10  # Latency times bandwidth of one link: 5 us at 25 GB/s.

_CHAINS = (*MODULE_CONTAINERS, nn.Sequential)

_FRACTION = 8  # A divisible group is at most one part of this many of the model.


def bounds(model_nbytes: int, num_ranks: int) -> tuple[int, int]:
    """Return the intended bytes of the smallest and of the largest group."""
    smallest = min(_PIECE_NBYTES * num_ranks, model_nbytes // _FRACTION)
    smallest = max(smallest, _schedule.BATCH_NBYTES, 1)
    return smallest, max(model_nbytes // _FRACTION, _FRACTION * smallest)


def group_neighbours(sizes: Sequence[int], smallest: int) -> list[list[int]]:
    """Divide adjacent items into groups of at least `smallest`, as many and as equal as possible.

    Args:
        sizes: Sizes of the items, in their order.
        smallest: Least size of a group. An item of this size or more is a group by itself. Smaller
            items before the first such item, or too few after one, join that item.

    Returns:
        Positions by group, in order; empty if all items together are below `smallest`.
    """
    groups: list[list[int]] = []
    rest: list[int] = []  # Before the first group, and too few for one.
    for is_small, run in itertools.groupby(range(len(sizes)), lambda i: sizes[i] < smallest):
        found = [*run]
        if not is_small:
            groups += [[position] for position in found]
            groups[0][:0] = rest
            rest = []
            continue
        parts = _equal_parts(found, sizes, smallest)
        groups += parts
        if not parts and groups:
            groups[-1] += found
        elif not parts:
            rest = found
    return groups


def _equal_parts(positions: list[int], sizes: Sequence[int], smallest: int) -> list[list[int]]:
    """Divide small adjacent items; empty if all together are below `smallest`."""
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
    """The balanced choice."""

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

    def choose(self) -> Choice:
        """Return the groups, without the root's; empty if the model is small."""
        self._divide(self._tree.model)
        self._split_remainder()
        return {
            tuple(self._tree.name_of(module) for module in modules): {}
            for modules, _ in self._groups
        }

    def _free(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that a group of a module would take, also out of the root.

        No group has them yet, and every path to them goes through this module.
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
            is_list = is_chain and isinstance(child, MODULE_CONTAINERS) and not is_block
            is_small = is_block and nbytes <= self._largest
            # Groups that hold a shared module and others could lie inside of each other.
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
                self._add([child])  # The remainder of it.
        self._add_run(run)

    def _called(self, block: nn.Module) -> Iterator[nn.Module]:
        """Yield a block; for a list without a forward, yield the modules in it."""
        if self._tree.may_be_unit(block):
            yield block
        elif isinstance(block, MODULE_CONTAINERS):
            for child in block.children():
                yield from self._called(child)

    def _add_run(self, run: list[list[nn.Module]]) -> None:
        """Make groups of blocks that run one after another."""
        sizes = [sum(map(self._nbytes, block)) for block in run]
        for group in group_neighbours(sizes, self._smallest):
            self._add([module for i in group for module in run[i]])

    def _split_remainder(self) -> None:
        """Split large modules off the root's remainder."""
        root = self._tree.model
        largest = max((nbytes for _, nbytes in self._groups), default=0)
        leaves = [
            module
            for _, module in self._tree.candidates()
            if next(module.children(), None) is None and id(module) not in self._chosen_among
        ]
        sized = [(self._nbytes(module), module) for module in leaves]
        # Of equal modules the first one, since `sorted` is stable.
        for nbytes, module in sorted(sized, key=lambda item: -item[0]):
            if nbytes < self._smallest or self._nbytes(root) <= largest:
                return
            if self._nbytes(module) != nbytes:
                continue  # Another module holds its parameters.
            self._add([module])
            largest = max(largest, nbytes)


def _chosen_among(root: nn.Module) -> set[int]:
    """Return the lists inside of blocks, with all their modules: a rank may run only some.

    A block is a child of a `ModuleList`, or one of several children of one class in a `Sequential`.
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


# --- policies -------------------------------------------------------------------------------------

Choice = dict[tuple[str, ...], dict[str, Any]]
"""Names of the modules of each group, and arguments of its `fully_shard` call."""

ARGUMENTS = (
    "mesh",
    "mp_policy",
    "reshard_after_forward",
    "shard_placement_fn",
    "offload_policy",
    "ignored_params",
)
"""Arguments that a policy may choose for one group."""

_WORDS = {
    "balanced": "balanced",
    "no_split_modules": "no_split_modules",
    "transformer_based_wrap": "no_split_modules",
    "size": "size",
    "size_based_wrap": "size",
    "no_wrap": "no_wrap",
}
"""Policies by name; the longer names are Accelerate's."""

_WEIGHTS = {"free_full_weight": True, "keep_full_weight": False}
"""Words of transformers' `_fsdp_plan`, and whether each means to reshard after forward."""


def choose(
    tree: ModuleTree, policy: Any, *, mp_policy: MixedPrecisionPolicy, num_ranks: int
) -> Choice:
    """Return the groups that a policy chooses, without the root's, in any order."""
    word = word_of(policy)
    if word == "balanced":
        return _Balance(tree, mp_policy, num_ranks).choose()
    if word == "no_wrap":
        return {}
    chosen = chosen_by(tree, policy)
    if not chosen and word != "size" and not _is_by_size(policy):
        msg = (
            f"the policy {described(policy)} chooses no module of this {tree.class_name}, so all "
            f"would be one group. Choose others, or pass policy='no_wrap' if one group is meant."
        )
        raise WrapError(msg)
    return chosen


def word_of(policy: Any) -> str | None:
    """Return the standard name of a policy that is a word or None; None for other policies."""
    if isinstance(policy, str) and (policy.islower() or policy.isupper()):
        return _WORDS.get(policy.lower())  # A class may have the name Size.
    return "balanced" if policy is None else None


def chosen_by(tree: ModuleTree, policy: Any) -> Choice:
    """Return the groups that a policy chooses; there may be none."""
    word = word_of(policy)
    if word == "no_split_modules":
        return _by_class(tree, _no_split_modules(tree.model))
    if word == "size":
        policy = size_based_auto_wrap_policy
    lambda_fn = torch_modules.lambda_of_custom_policy(policy)
    if lambda_fn is not None:
        policy = lambda_fn
    if isinstance(policy, Mapping):
        return choose_by_name(tree, policy)
    if isinstance(policy, (str, type)):
        return _by_class(tree, [policy])
    if isinstance(policy, Collection):
        return _by_class(tree, policy)
    if isinstance(policy, nn.Module) or not callable(policy):
        msg = (
            f"a policy is a class or its name, a collection of these, a mapping from names of "
            f"modules to arguments, or a callable; got {policy!r}."
        )
        raise WrapError(msg)
    ask = _asker(policy)
    return _by_callable(tree, policy) if ask is None else choose_by_protocol(tree, ask)


def described(policy: Any) -> str:
    """Return a policy for a message."""
    if isinstance(policy, type):
        return policy.__name__
    if inspect.isfunction(policy):
        return f"{policy.__name__}()"
    return repr(policy)


# --- by classes -----------------------------------------------------------------------------------


def _no_split_modules(model: nn.Module) -> Collection[str]:
    """Return the names of classes that a model of transformers declares as indivisible."""
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
    # Classes that a composite model may hold, but this one does not, are no error of the user.
    return [name for name in dict.fromkeys(found) if name in present] or found


def _by_class(tree: ModuleTree, classes: Collection[Any]) -> Choice:
    """Choose modules of classes, given as classes or names, and of their subclasses."""
    candidates = [*tree.candidates()]
    present = {own_class(module) for module in tree.modules.values()}
    kinds: set[type] = set()
    for each in sorted(classes, key=lambda each: isinstance(each, str)):
        if isinstance(each, type) and issubclass(each, nn.Module):
            kinds.add(each)
            continue
        if not isinstance(each, str):
            msg = f"a policy of classes holds classes of modules or their names, got {each!r}."
            raise WrapError(msg)
        called = {c for c in present if each in (c.__name__, f"{c.__module__}.{c.__qualname__}")}
        kinds |= called
        if not called:
            known = {own_class(module).__name__: None for _, module in candidates}
            msg = (
                f"no module of this {tree.class_name} is of a class {each!r}. "
                f"{nearest(each, known)} To choose a module by its own name, pass a mapping: "
                f"policy={{'layers.*': {{}}}}."
            )
            raise WrapError(msg)
    return {(path,): {} for path, module in candidates if isinstance(module, tuple(kinds))}


# --- by callables and by names --------------------------------------------------------------------


def _by_callable(tree: ModuleTree, policy: Callable[..., Any]) -> Choice:
    chosen: Choice = {}
    takes_module = _takes(policy, None)
    wants_name = not takes_module and _takes(policy, "", None)
    if not (takes_module or wants_name) and _has_signature(policy):
        msg = (
            f"the policy {described(policy)} takes {inspect.signature(policy)}, but it is called "
            f"with (module), with (name, module), or with (module, recurse, unwrapped_params). "
            f"Bind other arguments by functools.partial."
        )
        raise WrapError(msg)
    for name, module in tree.candidates():
        answer = policy(name, module) if wants_name else policy(module)
        if answer is None or answer is False:
            continue
        if answer is True or isinstance(answer, Mapping):
            chosen[name,] = checked_arguments(answer, name)
        else:
            msg = (
                f"the policy {described(policy)} returned {answer!r} for {name!r}. It may return "
                f"True, False, or a dict of arguments of fully_shard for this module."
            )
            raise WrapError(msg)
    return chosen


def choose_by_name(tree: ModuleTree, wanted: Mapping[Any, Any] | Collection[Any]) -> Choice:
    """Choose modules by names or patterns; a tuple of names is one group.

    A name that matches several patterns takes the arguments of the last one.
    """
    given: Any = wanted
    if isinstance(given, nn.Module) or not isinstance(given, Collection):
        shown = f"a {type(given).__name__}" if isinstance(given, nn.Module) else repr(given)
        msg = (
            f"units must be names of modules in a list, such as ['head'], or a mapping from them "
            f"to arguments of fully_shard, got {shown}. Classes of modules are a policy."
        )
        raise WrapError(msg)
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
        why = why_never_gathered(tree.modules[name]) if name else None
        if why is not None:
            remedy = (
                f"the modules in it: '{name}.*'; or all in a tuple, as one group: ('{name}.*',)"
            )
            if isinstance(tree.modules[name], PARAMETER_CONTAINERS):
                remedy = "the module that holds it"
            msg = (
                f"{name!r}, a {type(tree.modules[name]).__name__}, {why}, so its parameters would "
                f"never be gathered. Name {remedy}."
            )
            raise WrapError(msg)
    return {
        names: arguments
        for names, arguments in chosen.items()
        if any(next(tree.params(tree.modules[name]), None) is not None for name in names)
    }


def checked_arguments(value: Any, where: Any) -> dict[str, Any]:
    """Return a policy's entry for one group as arguments of `fully_shard`."""
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
