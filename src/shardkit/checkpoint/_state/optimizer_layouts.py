"""Whole optimizer state: gathered, scattered, and keyed by names or by numbers.

- ``"names"``: by parameter names, as FSDP1's ``full_optim_state_dict`` and torch's
  ``get_optimizer_state_dict(full_state_dict=True)``.
- ``"ids"``: by the optimizer's own numbers, as the ``state_dict()`` of an optimizer of a plain
  model, FSDP1's ``rekey_optim_state_dict`` and fairscale's ``gather_full_optim_state_dict``.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._errors import CheckpointError
from shardkit.backends.groups import exchange
from shardkit.backends.world import current_world_size, group_rank
from shardkit.checkpoint._state.model_and_optimizer import (
    set_optimizer_state_dict,
    whole_state,
)
from shardkit.checkpoint._state.names import as_optimizers, names_in_groups, names_of_parameters
from shardkit.checkpoint._state.optimizer import named_state, numbered_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

Layout = Literal["names", "ids"]


def gather_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool = True,
    layout: Layout = "names",
    to_cpu: bool = True,
) -> dict[str, Any]:
    """Return the whole state of an optimizer: plain tensors of global shapes. Call it on all ranks.

    Args:
        model: Module that holds all of the optimizer's parameters.
        optimizer: Optimizer of the sharded parameters.
        rank0_only: The other ranks get an empty dict.
        layout: ``"names"``: by parameter names; a tied one's first. ``"ids"``: by numbers, in the
            order of the optimizer's parameter groups, which an optimizer of the plain model's
            parameters in the same groups loads.
        to_cpu: Whether it is kept in the memory of the host.

    Returns:
        ``state`` and ``param_groups``. Parameters that were never stepped have no state.

    Raises:
        CheckpointError: The optimizer holds a parameter that the model does not, or `layout` is
            unknown.

    Cost: an all-gather of at most twice its bytes for each tensor of the state
    (`ShardedTensor.full_tensor`). Memory: the whole state where it is kept, elsewhere one tensor.
    """
    _check_layout(layout)
    keep = not rank0_only or group_rank(None) == 0
    state = whole_state(named_state(model, optimizer), keep=keep, to_cpu=to_cpu)
    return rekey_optimizer_state(state, model, optimizer, layout=layout) if keep else {}


def scatter_optimizer_state(
    state: Mapping[str, Any] | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    from_rank0: bool = True,
    strict: bool = True,
) -> None:
    """Load whole optimizer state, of either layout, into the optimizer of a sharded model.

    Call it on all ranks.

    Args:
        state: ``state`` and ``param_groups``, by names or by numbers in the order of the
            optimizer's parameter groups; what else is in it is not looked at. It is not kept.
        model: Module that holds all of the optimizer's parameters.
        optimizer: Optimizer, which need not have been stepped.
        from_rank0: Rank 0 has the state and sends it, tensor by tensor; what other ranks pass is
            not looked at. Else each rank has it and cuts out its pieces.
        strict: Whether each parameter must be in the state or its groups; else parameters that are
            not begin anew.

    Raises:
        CheckpointError: On all ranks: groups have other sizes, or parameters are missing. Nothing
            has been changed then. State of another shape than the parameter's is the optimizer's
            own affair, and stays whole.

    Cost: with `from_rank0` one broadcast for each tensor; memory for the largest. Else none.
    """
    error, named = None, {}
    if not from_rank0 or group_rank(None) == 0:
        try:
            named = rekey_optimizer_state(state or {}, model, optimizer, layout="names")
        except CheckpointError as raised:
            error = str(raised)
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as raised:
            error = (
                f"the state has not the form of an optimizer's: {type(raised).__name__}: {raised}. "
                f"Pass what gather_optimizer_state, optimizer.state_dict() or FSDP1's "
                f"full_optim_state_dict() returned."
            )
    if from_rank0 and current_world_size() is not None:
        error = next((text for text in exchange(error, None) if text is not None), None)
    if error is not None:
        raise CheckpointError(error)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0, strict=strict)
    set_optimizer_state_dict(model, optimizer, named, options=options)


def rekey_optimizer_state(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    layout: Layout,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state in another layout; no tensor is copied, nothing is sent.

    As FSDP1's ``rekey_optim_state_dict``.

    Args:
        state: ``state`` and ``param_groups``, in either layout.
        model: Module, sharded or plain; its parameters have the names.
        optimizer: Optimizer, sharded or plain; its parameter groups have the order.
        layout: The wanted one, see `gather_optimizer_state`.
        names: The parameters' names by the numbers in `state`, if these are not the optimizer's:
            fairscale numbers the parameters of each wrapper one after the other.

    Returns:
        ``state`` and ``param_groups``. With ``"ids"`` the groups are the optimizer's.

    Raises:
        CheckpointError: Groups have other sizes than the optimizer's, a number has no name, or
            saved groups of one group's parameters have different options; or `layout` is unknown.
    """
    _check_layout(layout)
    if "state" not in state or "param_groups" not in state:
        msg = (
            f"an optimizer's state has 'state' and 'param_groups', this one has "
            f"{', '.join(map(repr, state)) or 'nothing'}. Pass what gather_optimizer_state, "
            f"optimizer.state_dict() or FSDP1's full_optim_state_dict() returned."
        )
        raise CheckpointError(msg)
    named = {"state": dict(state["state"]), "param_groups": list(state["param_groups"])}
    if _is_by_ids(state):
        named = _by_names(state, model, optimizer, names)
    if layout == "names":
        return named
    ((_, numbered),) = numbered_states(model, optimizer, named)
    return numbered


def _check_layout(layout: object) -> None:
    if layout not in ("names", "ids"):
        msg = f"layout must be 'names' or 'ids', got {layout!r}."
        raise CheckpointError(msg)


def _is_by_ids(state: Mapping[str, Any]) -> bool:
    keys = chain(state["state"], *(group["params"] for group in state["param_groups"]))
    return any(isinstance(key, int) for key in keys)


def _by_names(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str] | None,
) -> dict[str, Any]:
    """Return a state that was keyed by numbers."""
    by_id: dict[int, str] = dict(enumerate(names)) if names is not None else {}
    if names is None:
        own = names_in_groups(names_of_parameters(model), *as_optimizers(optimizer))
        saved = [list(group["params"]) for group in state["param_groups"]]
        if list(map(len, own)) != list(map(len, saved)):
            msg = (
                f"the state is of parameter groups of {list(map(len, saved))} parameters, those of "
                f"the optimizer have {list(map(len, own))}. Make the same groups, or pass "
                f"rekey_optimizer_state the names of the numbers and load what it returns."
            )
            raise CheckpointError(msg)
        pairs = zip(chain(*saved), chain(*own), strict=True)
        by_id = {number: aliases[0] for number, aliases in pairs}
    numbers = [*state["state"], *chain(*(group["params"] for group in state["param_groups"]))]
    unknown = [number for number in dict.fromkeys(numbers) if number not in by_id]
    if unknown:
        msg = (
            f"the state has parameters of numbers without a name: {unknown}. There are "
            f"{len(by_id)} names. Pass a name for each number."
        )
        raise CheckpointError(msg)
    return {
        "state": {by_id[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_id[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }
