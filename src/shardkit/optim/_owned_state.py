"""The state of whole matrices as all ranks see it: sharded tensors that one rank has all of.

An owner keeps what its optimizer made: tensors of any shape, numbers, lists of them. The others
know the form of it, and show tensors of which they have nothing. So state dicts look alike on all
ranks, and a checkpoint gets each tensor from its owner.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._state.full import map_leaves
from shardkit._tensor.sharded import ShardedTensor
from shardkit.optim._packing import Gathering

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.optim._team import Team

Entries = dict[str, Any]


class _Form(NamedTuple):
    """What others know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OwnedState:
    """The state of a team's parameters.

    Args:
        team: The ranks of a mesh and their parameters.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._forms: dict[int, Entries] = {}
        self._copies: list[tuple[Tensor, int]] = []

    def exchange_forms(self, own: Mapping[int, Entries]) -> None:
        """Tell the others the form of what this rank has. Collective.

        Args:
            own: State by parameter. Numbers, also in tensors without dimensions, go as they are.

        Cost: one exchange of some hundred bytes for each parameter.
        """
        forms = {index: map_leaves(entries, _form_of) for index, entries in own.items()}
        self._forms = {}
        for each in self._team.axis.exchange(forms):
            self._forms.update(each)

    def show(self, own: Mapping[int, Entries]) -> dict[int, Entries]:
        """Return the state by parameter; views of what this rank has, where they can be."""
        self._copies = []
        result = {}
        for index, form in self._forms.items():
            entries = own.get(index) if self._team.owners[index] == self._team.me else form
            if entries:
                result[index] = self._shown(index, entries)
        return result

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote into copies that `show` returned."""
        return any(_compat.version_of(copied) != version for copied, version in self._copies)

    def put(self, state: Mapping[int, Entries]) -> dict[int, Entries]:
        """Return what belongs to this rank of a state by parameter. Collective.

        Args:
            state: State that `show` returned, or sharded as the parameters are, or whole.

        Cost: one all-to-all for each tensor that is sharded as its parameter; a gather for each
        that is sharded otherwise.
        """
        found = {}
        for index in sorted(state):
            entries = map_leaves(state[index], functools.partial(self._whole, index))
            if self._team.owners[index] == self._team.me:
                found[index] = entries
        return found

    def _shown(self, index: int, entries: Entries) -> Any:
        spec, team = self._team.spec_of(index), self._team

        def show(leaf: Any) -> Any:
            if isinstance(leaf, _Form):
                nothing = torch.empty(0, dtype=leaf.dtype, device=spec.device)
                return ShardedTensor(nothing, team.owned_spec(index, leaf.shape))
            if not isinstance(leaf, Tensor) or leaf.ndim == 0:
                return leaf
            flat = leaf.detach().reshape(-1)
            if not leaf.is_contiguous():
                self._copies.append((flat, _compat.version_of(flat)))
            return ShardedTensor(flat, team.owned_spec(index, leaf.shape))

        return map_leaves(entries, show)

    def _whole(self, index: int, leaf: Any) -> Any:
        """Return what an owner keeps of a leaf; others get something of no use."""
        if not isinstance(leaf, Tensor):
            return leaf
        team, spec = self._team, self._team.spec_of(index)
        if not isinstance(leaf, ShardedTensor):
            return leaf.detach().clone() if leaf.ndim == 0 else leaf.detach().to(spec.device)
        leaf = leaf.detach()
        assert isinstance(leaf, ShardedTensor)
        if leaf.spec.same_cut(spec):
            gathered = Gathering(team, [index], {index: leaf.local_piece}, "state").finish()
            return gathered.get(index)
        if leaf.spec.same_cut(team.owned_spec(index, leaf.shape)):
            is_mine = team.owners[index] == team.me
            return leaf.local_piece.view(tuple(leaf.shape)) if is_mine else None
        return leaf.full_tensor()


def _form_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().cpu() if leaf.ndim == 0 else _Form(tuple(leaf.shape), leaf.dtype)
