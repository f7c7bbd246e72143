"""Which modules of a model compute their activations again: every k-th block, classes, a policy."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from shardkit._errors import StateError, listed
from shardkit._module.activation_checkpoint import checkpoint_module, complaint_of
from shardkit._module.fsdp_module import own_class
from shardkit._module.saved_operators import SavedOperators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit._module.saved_operators import Operators


def checkpoint_activations(
    model: nn.Module,
    *,
    every: int = 1,
    classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str | None = None,
    policy: Callable[[str, nn.Module], bool] | None = None,
    operators: Operators = None,
) -> list[str]:
    """Have chosen modules of a model compute their activations again in backward.

    Without `classes` and `policy` these are the model's repeated blocks: the members of each
    `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` of which at least two, with parameters and
    modules of their own, are of one class; the outermost ones count. In place, before or after
    `fully_shard`, on every backend; names of parameters stay. What of numbers and of collectives
    is said of `checkpoint_module` holds:

        checkpoint_activations(model, every=2)  # Half of the blocks.
        checkpoint_activations(model, classes="TransformerBlock", operators="matmuls")

    Args:
        model: The model that holds the modules, or is one of them (its name is ``""`` then).
        every: Choose the `every`-th, the 2 * `every`-th and so on of the modules found, in the
            order of `named_modules`. What torchtitan calls selective ``"2"`` is 2.
        classes: Classes, subclasses of these included, or names of classes, as they were before
            `fully_shard`; bare or with their module. All modules of these are found.
        policy: A function that is called with a module's name and itself, in the place of
            `classes`.
        operators: Operators whose outputs are kept as well, so that they are not computed again.
            ``"matmuls"``: products with weights, convolutions and fused attention;
            ``"every_second_matmul"``: attention, and of the others the first, third, ... of each
            module; operators such as ``[torch.ops.aten.mm]``, all overloads of each; or a function
            as of `torch.utils.checkpoint.create_selective_checkpoint_contexts`. A module must not
            write to such an output in place, and its backward cannot run twice. None: nothing is
            kept but inputs.

    Returns:
        Names of the modules chosen, as in `model.named_modules()`.

    Raises:
        StateError: Nothing is chosen (the message has the classes with the nearest names), a chosen
            one has no forward, or is checkpointed already, or an argument is none of these. No
            module is changed then.

    Cost: see `checkpoint_module`.
    Source: Chen et al., arXiv:1604.06174; by operators: Korthikanti et al., arXiv:2205.05198.
    """
    saved = SavedOperators.of(operators)
    if type(every) is not int or every < 1:
        msg = f"every must be an int of at least 1, got {every!r}. 2 chooses half of the modules."
        raise StateError(msg)
    if classes is not None and policy is not None:
        msg = "give classes or policy, not both: a policy may look at the classes itself."
        raise StateError(msg)
    if policy is not None:
        found = [(name, m) for name, m in model.named_modules() if policy(name, m)]
    elif classes is not None:
        found = _of_classes(model, classes)
    else:
        found = list(_repeated_blocks(model))
    chosen = found[every - 1 :: every]
    if not chosen:
        raise StateError(_nothing_chosen(model, classes, policy, every=every, num_found=len(found)))
    for name, module in chosen:
        complaint = complaint_of(module)
        if complaint is not None:
            msg = f"{name!r}, a {own_class(module).__name__}, {complaint} {_REMEDY}"
            raise StateError(msg)
    for _, module in chosen:
        checkpoint_module(module, operators=saved)
    return [name for name, _ in chosen]


_REMEDY = (
    "Call checkpoint_activations once per model, before others replace forwards, and choose "
    "modules that are called. Nothing was changed."
)


# --- what is found --------------------------------------------------------------------------------


def _of_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str
) -> list[tuple[str, nn.Module]]:
    wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
    for item in wanted:
        if not isinstance(item, (str, type)):
            msg = (
                f"classes has {item!r}, which is a {type(item).__name__}: expected classes or "
                f"names of classes. Choose single modules by policy."
            )
            raise StateError(msg)
    types = tuple(item for item in wanted if isinstance(item, type))
    names = {item for item in wanted if isinstance(item, str)}
    found = []
    matched: set[str | type] = set()
    for name, module in model.named_modules():
        own = own_class(module)
        mine = {own.__name__, f"{own.__module__}.{own.__qualname__}"} & names
        mine_types = {cls for cls in types if isinstance(module, cls)}
        if mine or mine_types:
            found.append((name, module))
            matched |= mine | mine_types
    missing = [item for item in wanted if item not in matched]
    if found and missing:
        shown = ", ".join(_shown(item) for item in missing)
        msg = f"no module of the model is a {shown}. {_classes_in(model, missing)}"
        raise StateError(msg)
    return found


def _repeated_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of containers that repeat a class, the outermost ones only."""
    blocks: set[nn.Module] = set()
    inside = ""
    for name, module in model.named_modules(prefix=prefix):
        if inside and name.startswith(inside):
            continue
        if module in blocks:
            inside = f"{name}."
            yield name, module
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = [child for child in module.children() if _is_composite(child)]
            counts = Counter(map(own_class, children))
            blocks |= {child for child in children if counts[own_class(child)] > 1}


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module has parameters, and is more than one of torch's layers."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    is_layer = own_class(module).__module__.startswith("torch.nn.")
    has_parameters = next(module.parameters(), None) is not None
    has_modules = next(module.children(), None) is not None
    return has_parameters and (has_modules or not is_layer)


# --- errors ---------------------------------------------------------------------------------------


def _shown(item: type | str) -> str:
    return item if isinstance(item, str) else item.__name__


def _classes_in(model: nn.Module, wanted: Sequence[type | str]) -> str:
    """Return a sentence on the classes of a model, the ones with the nearest names first."""
    counts = Counter(
        own_class(module).__name__
        for module in model.modules()
        if next(module.parameters(), None) is not None
    )
    names = [name for name, _ in counts.most_common()]
    near = [
        match
        for item in wanted
        for match in difflib.get_close_matches(_shown(item).rpartition(".")[2], names, 3, 0.4)
    ]
    ordered = list(dict.fromkeys((*near, *names)))
    return f"Classes in it: {listed(ordered, lambda name: f'{name} ({counts[name]})')}."


def _nothing_chosen(
    model: nn.Module,
    classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str | None,
    policy: object,
    *,
    every: int,
    num_found: int,
) -> str:
    model_class = own_class(model).__name__
    if num_found:
        return (
            f"of {num_found} modules found in this {model_class} none is chosen by every={every}. "
            f"Pass a smaller number."
        )
    wanted: list[type | str] = []
    if policy is not None:
        why = f"the policy chose no module of this {model_class}."
    elif classes is not None:
        wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
        why = f"no module of this {model_class} is a {' or '.join(map(_shown, wanted)) or '?'}."
    else:
        why = (
            f"no blocks that repeat were found in the containers of this {model_class}. Name their "
            f"classes."
        )
    return f"{why} {_classes_in(model, wanted)}"
