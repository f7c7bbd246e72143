"""`MatrixOptimizer`: whole matrices belong to ranks, each of which updates its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import OptimizerError
from shardkit._layout.owned import matrix_cost
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.watch.watchdog import current_watchdog
from shardkit.optim._delegating import DelegatingOptimizer, State
from shardkit.optim._share import Batch, Share
from shardkit.optim._team import make_teams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

BATCH_BYTES = 16 << 20
"""Of gradients that one rank gets at once: some ms of traffic, and much more of computation."""


class MatrixOptimizer(DelegatingOptimizer):
    """Steps whole parameters, each on the one rank that owns it, by any class of optimizers.

    For classes that need more of a parameter than a range of its elements: ``torch.optim.Muon``,
    ``torch.optim.Adafactor``, Shampoo, SOAP. In each step gradients go straight to the owners, and
    new values come back. Nothing is computed twice, and the result is that of `optimizer_class` on
    whole parameters.

    Parameters belong to ranks of all axes of their mesh, spread by `cost`. An owner keeps a whole
    copy of its own. If somebody else writes a parameter (`load_state_dict`, weights of an EMA), its
    whole is made anew at the next step. Writes that torch does not count in a tensor's version
    (``to_local().data``, NumPy) are not noticed. Parameters that are not sharded are stepped on
    every rank.

    Gradients of other batches travel while one batch is computed. The inner optimizer's ``step`` is
    called for each batch. What it counts in parameter groups counts once; what it counts in
    attributes of its own, once for each batch.

    `state` and `state_dict` show the state as `ShardedTensor`, of which owners have all. Call
    `state_dict` and `load_state_dict` on all ranks. Between steps, `state` on ranks that do not own
    a parameter shows numbers of the last `state_dict`, or of the first step.

    Cost, for each step, N ranks and P elements: an all-to-all for each batch there, and one back.
    A rank sends ``P/N`` elements of gradients times ``(N-1)/N``, and as many values. With R
    replicas of S ranks it sends ``P/(RS) (S-1)/S`` and ``P/S (RS-1)/(RS)``. Besides, one all-reduce
    of 3 bytes for each parameter, and one of 1 byte. Memory: ``P/N`` elements for the wholes, the
    state of ``P/N``, and about three times `batch_bytes` in a step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        cost: Callable[[tuple[int, ...]], float] | None = None,
        batch_bytes: int = BATCH_BYTES,
        **defaults: Any,
    ) -> None:
        """Take parameters of a model that is sharded, or will be before the first step.

        Args:
            params: Parameters, named ones, or groups, as for any optimizer. The same, in the same
                order, on all ranks.
            optimizer_class: The class that steps whole parameters, of any shape and dtype that it
                takes.
            cost: Function that returns the cost of a parameter by its global shape, in any unit;
                equal on all ranks. None: the multiplications of its Gram matrix.
            batch_bytes: Bytes of gradients that a rank gets at once, about.
            **defaults: Options of `optimizer_class`.

        Raises:
            OptimizerError: It is no class of optimizers, or `batch_bytes` is below 1. At the first
                step: parameters on XLA devices, or ranks with different parameters.
            Exception: What `optimizer_class` raises of parameters of these shapes.
        """
        if batch_bytes < 1:
            msg = (
                f"batch_bytes must be at least 1, got {batch_bytes}. The default is {BATCH_BYTES}."
            )
            raise OptimizerError(msg)
        self._cost = cost
        self._batch_nbytes = batch_bytes
        super().__init__(params, optimizer_class, defaults)

    _kept = (*DelegatingOptimizer._kept, "_cost", "_batch_nbytes")  # noqa: SLF001 - base

    def _forget(self) -> None:
        super()._forget()
        self._shares: list[Share] = []
        self._loads: dict[int, float] = {}
        self._known: list[list[tuple[Any, ...]]] = []
        self._plain: list[nn.Parameter] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            Exception: What the class raises of parameters of these shapes.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        like = [
            nn.Parameter(torch.empty(tuple(p.shape), dtype=p.dtype, device="meta"))
            for p in group["params"]
        ]
        if like:
            try:
                self.optimizer_class(
                    [{**self._settings_of(group), "params": like}], **self._options
                )
            except BaseException:
                self.param_groups.pop()
                raise

    # --- who owns what --------------------------------------------------------------------------

    @property
    def loads(self) -> dict[int, float]:
        """What each rank has to do in a step, in units of `cost`; empty before the first step."""
        return dict(self._loads)

    def owner_of(self, param: nn.Parameter) -> int | None:
        """Return the global rank that a parameter belongs to; None: each rank steps it.

        Raises:
            OptimizerError: It is not one of this optimizer's, or there was no step yet.
        """
        for share in self._shares:
            for index, own in enumerate(share.team.params):
                if own is param:
                    return share.team.axis.members[share.team.owners[index]]
        if any(own is param for own in self._plain):
            return None
        msg = (
            "owner_of() knows the parameters of the optimizer's groups, from its first step on. "
            "Ask after a step, or after load_state_dict() and a step."
        )
        raise OptimizerError(msg)

    def _probe(self) -> Optimizer:
        return self.optimizer_class([nn.Parameter(torch.zeros(1, 1))], **self._options)

    def _is_outdated(self) -> bool:
        return self._known != self._describe()

    def _describe(self) -> list[list[tuple[Any, ...]]]:
        return [
            [(id(p), id(getattr(p, "spec", None)), p.dtype) for p in group["params"]]
            for group in self.param_groups
        ]

    def _new_tensors(self) -> list[list[nn.Parameter]]:
        if self._is_outdated():
            self._give_out()
        inner: dict[int, nn.Parameter] = {id(param): param for param in self._plain}
        for share in self._shares:
            inner |= {id(share.team.params[index]): whole for index, whole in share.wholes.items()}
        return [
            [inner[id(param)] for param in group["params"] if id(param) in inner]
            for group in self.param_groups
        ]

    def _give_out(self) -> None:
        """Give each parameter to a rank. Collective."""
        params = [param for group in self.param_groups for param in group["params"]]
        sharded: list[Any] = [param for param in params if isinstance(param, ShardedTensor)]
        self._plain = [param for param in params if not isinstance(param, ShardedTensor)]
        about = f"{self.optimizer_class.__qualname__}, batch_bytes={self._batch_nbytes}"
        teams, loads = make_teams(sharded, self._cost or matrix_cost, about)
        self._shares = [Share(team) for team in teams]
        self._known = self._describe()
        ranks = teams[0].axis.members if teams else ()
        self._loads = dict(zip(ranks, loads, strict=True))

    # --- steps ----------------------------------------------------------------------------------

    def _prepare(self) -> Optimizer:
        if self.inner is not None and self._is_outdated() and not self._is_state_written():
            self._learn_numbers()  # Who owns a parameter from now on must not begin with old ones.
        return super()._prepare()

    def _run(self, inner: Optimizer) -> None:
        try:
            self._step_all(inner)
        except BaseException as error:
            current_watchdog().note_error(error)  # Others wait for what this rank does not send.
            for share in self._shares:
                share.doubt()
            raise

    def _step_all(self, inner: Optimizer) -> None:
        active = [(share, share.agree(self._batch_nbytes)) for share in self._shares]
        batches = [
            Batch(share, batch)
            for share, indices in active
            for batch in share.team.batches(indices, self._batch_nbytes)
        ]
        settings = (value for group in inner.param_groups for value in group.values())
        before = [(value, value.clone()) for value in settings if isinstance(value, Tensor)]
        if not batches:
            _step_some(inner, self._plain)
        for number, batch in enumerate(batches):
            if number == 0:
                batch.start_gradients()
            if number + 1 < len(batches):
                batches[number + 1].start_gradients()  # They travel while this one is computed.
            mine = batch.finish_gradients()
            if number == 0:
                _step_some(inner, [*self._plain, *mine])
            elif mine:  # Begin with the same settings: what a class counts there counts once.
                self._send_settings(inner)
                _step_some(inner, mine, before)
            for whole in mine:
                whole.grad = None
            if number > 0:
                batches[number - 1].finish_values()
            batch.start_values()
        if batches:
            batches[-1].finish_values()
        self._note_stepped(inner, active)

    def _note_stepped(self, inner: Optimizer, active: Sequence[tuple[Share, list[int]]]) -> None:
        """Tell the others the form of state that the step has made."""
        for share, indices in active:
            if not share.stepped.issuperset(indices):
                share.stepped.update(indices)
                share.state.exchange_forms(share.state_in(inner))

    def _drop(self) -> None:
        for share in self._shares:
            for whole in share.wholes.values():
                whole.grad = None

    # --- state ----------------------------------------------------------------------------------

    def _show_state(self) -> State:
        assert self.inner is not None
        inner, shown = self.inner, {}
        for share in self._shares:
            for index, entries in share.state.show(share.state_in(inner)).items():
                shown[share.team.params[index]] = entries
        for param in self._plain:
            if inner.state.get(param):
                shown[param] = inner.state[param]
        order = [param for group in self.param_groups for param in group["params"]]
        return {param: shown[param] for param in order if param in shown}

    def _put_state(self, state: State) -> None:
        assert self.inner is not None
        inner = self.inner
        inner.state.clear()
        for param in self._plain:
            if state.get(param):
                inner.state[param] = state[param]
        for share in self._shares:
            params = share.team.params
            given = {i: state[param] for i, param in enumerate(params) if state.get(param)}
            found = share.state.put(given)
            for index, entries in found.items():
                inner.state[share.wholes[index]] = entries
            share.stepped = set(given)
            share.state.exchange_forms(found)

    def _is_written(self) -> bool:
        return any(share.state.is_written for share in self._shares)

    def _is_state_written(self) -> bool:
        """Whether somebody wrote to `state` on any rank: copies are the owner's alone."""
        is_written = super()._is_state_written()
        for share in self._shares:
            is_written = share.is_anywhere(is_written)
        return is_written

    def _learn_numbers(self) -> None:
        """Make what this rank shows of others' state that of the last step. Collective."""
        assert self.inner is not None
        for share in self._shares:
            share.state.exchange_forms(share.state_in(self.inner))
        self._shown = self._as_shown = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state, each tensor sharded so that its owner has all. Call it on all ranks.

        Cost: one exchange of some hundred bytes for each parameter.
        """
        if self.inner is not None and not self._is_state_written():
            self._learn_numbers()
        return super().state_dict()


def _step_some(
    inner: Optimizer,
    tensors: Sequence[nn.Parameter],
    settings: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Have an optimizer step some of its tensors, maybe none, with (setting, its value)."""
    for setting, value in settings:
        setting.copy_(value)
    chosen = {id(tensor) for tensor in tensors}
    whole = [group["params"] for group in inner.param_groups]
    try:
        for group, params in zip(inner.param_groups, whole, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        _compat.step_without_global_hooks(inner)
    finally:
        for group, params in zip(inner.param_groups, whole, strict=True):
            group["params"] = params
