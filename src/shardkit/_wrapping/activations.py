"""`checkpoint_activations`: modules that a policy chooses rerun their forward in backward."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit._errors import StateError, WrapError
from shardkit._module.activation_checkpoint import (
    Operators,
    SavedOperators,
    checkpoint_module,
    complaint_of,
)
from shardkit._module.checks import why_never_gathered
from shardkit._module.fsdp_module import own_class
from shardkit._text import listed
from shardkit._wrapping.policies import ModuleTree, chosen_by, described, word_of

if TYPE_CHECKING:
    from collections.abc import Collection


def checkpoint_activations(
    model: nn.Module,
    *,
    every: int = 1,
    classes: Collection[type[nn.Module] | str] | type[nn.Module] | str | None = None,
    policy: Any = None,
    operators: Operators = None,
) -> list[str]:
    """Let chosen modules of a model compute their activations again in backward, to save memory.

    Without `classes` and `policy` these are the model's repeated blocks: the members of each
    `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` of which at least two are of the same class,
    with parameters and child modules; only the outermost ones count. It changes the model in place,
    before or after `fully_shard`, on every backend; names of parameters stay. For results and
    collectives, see `checkpoint_module`:

        checkpoint_activations(model, every=2)  # Half of the blocks.
        checkpoint_activations(model, classes="TransformerBlock", operators="matmuls")

    Args:
        model: Model that holds the modules, or is itself one of them (with the name ``""``).
        every: Interval of the choice: of the modules found, in the order of `named_modules`, the
            `every`-th, the 2 * `every`-th and so on are chosen. Selective ``"2"`` of torchtitan is
            2.
        classes: Classes, including their subclasses, or names of classes, as they were before
            `fully_shard`; a name may include the module. All modules of these classes are found.
        policy: Policy of `auto_shard`, in place of `classes`: for example the same one, a mapping
            from names such as ``"layers.*"``, or a function of a module, or of its name and the
            module. Arguments of `fully_shard` in it are ignored.
        operators: Operators whose outputs are also kept, so that they are not recomputed.
            ``"matmuls"``: products with weights, convolutions and fused attention;
            ``"every_second_matmul"``: attention, and the first, third, ... of the others in each
            module; operators such as ``[torch.ops.aten.mm]``, with all their overloads; or a
            function for `torch.utils.checkpoint.create_selective_checkpoint_contexts`. A module
            must not write to such an output in place, and its backward cannot run twice. None: only
            inputs are kept.

    Returns:
        Names of the modules chosen, as in `model.named_modules()`.

    Raises:
        StateError: Nothing is chosen; or a chosen module has no forward or is checkpointed already;
            or an argument is wrong. No module is changed then.

    Cost: see `checkpoint_module`.
    Source: Chen et al., arXiv:1604.06174; by operators: Korthikanti et al., arXiv:2205.05198.
    """
    saved = SavedOperators.of(operators)
    _check_arguments(model, every, classes, policy)
    if classes is None:
        wanted = [] if policy is None else [policy]
    else:
        wanted = [classes] if isinstance(classes, (str, type)) else [*classes] or [()]
    tree = _CalledModules(model)
    found = _named(tree, wanted) if wanted else _repeated_blocks(model)
    kind = own_class(model).__name__
    if not found:
        msg = (
            f"no blocks that repeat were found in the containers of this {kind}. Name their "
            f"classes. {_classes_in(model)}"
        )
        raise StateError(msg)
    chosen = found[every - 1 :: every]
    if not chosen:
        msg = (
            f"of {len(found)} modules found in this {kind} none is chosen by every={every}. Pass a "
            f"smaller number."
        )
        raise StateError(msg)
    for name in chosen:
        complaint = complaint_of(tree.modules[name])
        if complaint is not None:
            msg = (
                f"{name!r}, a {own_class(tree.modules[name]).__name__}, {complaint} Call "
                f"checkpoint_activations once per model, before others replace forwards, and "
                f"choose modules that are called. Nothing was changed."
            )
            raise StateError(msg)
    for name in chosen:
        checkpoint_module(tree.modules[name], operators=saved)
    return chosen


def _check_arguments(model: Any, every: Any, classes: Any, policy: Any) -> None:
    if not isinstance(model, nn.Module):
        msg = (
            f"checkpoint_activations takes a module first, got {model!r}. Names of classes follow "
            f"it: checkpoint_activations(model, classes=...)."
        )
        raise StateError(msg)
    if type(every) is not int or every < 1:
        msg = f"every must be an int of at least 1, got {every!r}. 2 chooses half of the modules."
        raise StateError(msg)
    if classes is not None and policy is not None:
        msg = "give classes or policy, not both: a policy may look at the classes itself."
        raise StateError(msg)
    if policy is not None and word_of(policy) in ("balanced", "no_wrap"):
        msg = (
            f"policy={policy!r} chooses groups to shard, not modules to run again. Leave policy "
            f"out to choose the repeated blocks."
        )
        raise StateError(msg)


class _CalledModules(ModuleTree):
    """A model whose root and whose modules without parameters may also be chosen."""

    def may_be_unit(self, module: nn.Module) -> bool:
        """Whether a policy may choose a module."""
        return id(module) not in self.closed


def _named(tree: ModuleTree, wanted: Collection[Any]) -> list[str]:
    """Return the names of the modules that policies choose; each must choose at least one."""
    found: set[str] = set()
    for policy in wanted:
        try:
            chosen = chosen_by(tree, policy)
        except WrapError as error:
            raise StateError(str(error)) from error
        if not chosen:
            msg = (
                f"the policy {described(policy)} chooses no module of this {tree.class_name}. "
                f"{_classes_in(tree.model)}"
            )
            raise StateError(msg)
        found.update(name for names in chosen for name in names)
    return [name for name in tree.modules if name in found]


def _classes_in(model: nn.Module) -> str:
    """Return a sentence about the classes of a model."""
    counts = Counter(
        own_class(module).__name__
        for module in model.modules()
        if next(module.parameters(), None) is not None
    )
    names = [name for name, _ in counts.most_common()]
    return f"Classes in it: {listed(names, lambda name: f'{name} ({counts[name]})')}."


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Return the members of containers that repeat a class, the outermost ones only."""
    found: list[str] = []
    blocks: set[nn.Module] = set()
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if module in blocks:
            inside = f"{name}."
            found.append(name)
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = [child for child in module.children() if _is_composite(child)]
            counts = Counter(map(own_class, children))
            blocks |= {child for child in children if counts[own_class(child)] > 1}
    return found


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module has parameters and is more than a single layer of torch."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and why_never_gathered(module):
        return False
    is_layer = own_class(module).__module__.startswith("torch.nn.")
    has_parameters = next(module.parameters(), None) is not None
    has_modules = next(module.children(), None) is not None
    return has_parameters and (has_modules or not is_layer)
