"""What one rank keeps and does of a team's parameters: whole ones, and batches on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import OptimizerError, RankMismatchError
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.write_log import Mark, writing_only
from shardkit.optim._owned_state import OwnedState
from shardkit.optim._packing import Gathering, Scattering

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from shardkit.optim._team import Team


class Share:
    """A rank's share of a team's parameters.

    Args:
        team: The ranks of a mesh and their parameters.

    Attributes:
        team: The team.
        wholes: The parameters that belong to this rank, whole, by index; the inner optimizer's.
        state: State of the whole ones.
        stepped: Parameters that have been stepped, on any rank: those have state.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.state = OwnedState(team)
        self.stepped: set[int] = set()
        # Memory of its own, with a version counter of its own, until values are brought.
        self.wholes = {
            index: nn.Parameter(team.piece_of(index).new_empty(tuple(team.params[index].shape)))
            for index, owner in enumerate(team.owners)
            if owner == team.me
        }
        # When the whole was made of the piece; None: never.
        self._marks: list[Mark | None] = [None] * len(team.params)

    def doubt(self) -> None:
        """Have all wholes made anew: a step that raised may have left them ahead of the pieces."""
        self._marks = [None] * len(self.team.params)

    def is_anywhere(self, here: bool) -> bool:  # noqa: FBT001 - the only argument
        """Whether something is so on any rank. Collective: an all-reduce of one byte."""
        flag = torch.tensor([here], dtype=torch.uint8)
        self.team.axis.all_reduce_flags(flag)
        return bool(flag.item())

    def agree(self, batch_nbytes: int) -> list[int]:
        """Return the parameters that have gradients; bring their wholes up to date. Collective.

        Raises:
            RankMismatchError: A parameter has a gradient on some ranks only.

        Cost: one all-reduce of 3 bytes for each parameter; and the exchange of values that others
        have written.
        """
        params, number = self.team.params, len(self.team.params)
        has_grad = [param.grad is not None for param in params]
        stale = [self._is_stale(index) for index in range(number)]
        flags = torch.tensor([*has_grad, *(not has for has in has_grad), *stale]).to(torch.uint8)
        self.team.axis.all_reduce_flags(flags)
        somewhere, missing, is_stale = flags.view(3, number).tolist()
        mixed = [i for i in range(number) if somewhere[i] and missing[i]]
        if mixed:
            self._raise_mixed(mixed[0], len(mixed))
        active = [index for index in range(number) if somewhere[index]]
        # Make wholes of the pieces as they are now, where others have written them.
        for batch in self.team.batches([i for i in active if is_stale[i]], batch_nbytes):
            pieces = {index: self.team.piece_of(index) for index in batch}
            for index, whole in Gathering(self.team, batch, pieces, "values").finish().items():
                if self.team.is_whole_here(index):
                    self.wholes[index].data = whole
                else:
                    self.wholes[index].data.copy_(whole)
        return active

    def _is_stale(self, index: int) -> bool:
        """Whether this rank's piece was written by others since the whole was made of it."""
        mark, param = self._marks[index], self.team.params[index]
        assert isinstance(param, ShardedTensor)
        return mark is None or (param.local_piece.numel() > 0 and mark.is_past(param))

    def note_written(self, batch: Sequence[int]) -> None:
        """Note that the parameters' pieces are those of the wholes."""
        for index in batch:
            param: Any = self.team.params[index]
            self._marks[index] = Mark(param)

    def state_in(self, inner: Optimizer) -> dict[int, dict[str, Any]]:
        """Return an optimizer's state of what belongs to this rank."""
        state: Mapping[Any, Any] = inner.state
        return {i: state[whole] for i, whole in self.wholes.items() if state.get(whole)}

    def _raise_mixed(self, index: int, number: int) -> None:
        """Name the ranks on which a parameter has no gradient, though others have one."""
        team = self.team
        has = team.axis.exchange(team.params[index].grad is not None)
        ranks = [rank for rank, there in zip(team.axis.members, has, strict=True) if not there]
        more = f" (and {number - 1} more parameters)" if number > 1 else ""
        msg = (
            f"parameter {team.spec_of(index).name!r}{more} has no gradient on ranks {ranks}, and "
            f"one on the others. Set gradients to None, or call zero_grad(), on all ranks or none."
        )
        raise RankMismatchError(msg)


class Batch:
    """Parameters that travel together: gradients to their owners, new values back.

    Args:
        share: This rank's share of a team.
        indices: Parameters of the team.
    """

    def __init__(self, share: Share, indices: list[int]) -> None:
        self._share = share
        self._indices = indices
        self._gradients: Gathering | None = None
        self._values: Scattering | None = None

    def start_gradients(self) -> None:
        """Send pieces of gradients to the owners.

        Raises:
            OptimizerError: A gradient is not sharded as its parameter.
        """
        pieces = {index: self._piece_of_gradient(index) for index in self._indices}
        self._gradients = Gathering(self._share.team, self._indices, pieces, "gradients")

    def finish_gradients(self) -> list[nn.Parameter]:
        """Return the whole parameters of this rank, with their gradients."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        mine = []
        for index, gradient in gradients.finish().items():
            whole = self._share.wholes[index]
            whole.grad = gradient
            mine.append(whole)
        return mine

    def start_values(self) -> None:
        """Send whole parameters, as they are now, to those who hold pieces of them."""
        wholes = self._share.wholes
        mine = {i: wholes[i].detach().contiguous() for i in self._indices if i in wholes}
        self._values = Scattering(self._share.team, self._indices, mine, "values")

    def finish_values(self) -> None:
        """Write what has come to the parameters' pieces."""
        values, self._values = self._values, None
        assert values is not None
        team = self._share.team
        params: list[Any] = [team.params[index] for index in self._indices]
        with writing_only(params):
            values.finish({index: team.piece_of(index) for index in self._indices})
            # Where the whole is the piece, nobody has raised its version counter.
            here = [team.piece_of(i) for i in self._indices if team.is_whole_here(i)]
            torch.autograd.graph.increment_version(here)
        self._share.note_written(self._indices)

    def _piece_of_gradient(self, index: int) -> Tensor:
        team = self._share.team
        spec, grad = team.spec_of(index), team.params[index].grad
        if not isinstance(grad, ShardedTensor) or not grad.spec.same_cut(spec):
            msg = (
                f"the gradient of {spec.name!r}, shape {tuple(spec.shape)}, is a "
                f"{type(grad).__name__} that is not sharded as the parameter is. Let fully_shard "
                f"make gradients, or assign a filled zeros_like(parameter)."
            )
            raise OptimizerError(msg)
        return grad.local_piece
