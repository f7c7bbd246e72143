"""`LocalOptimizer`: any elementwise optimizer, on the pieces that this rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._state.full import STATE_NUMBERS
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.write_log import writing_only
from shardkit.optim._codecs import codec_of, fresh_state, is_number
from shardkit.optim._delegating import DelegatingOptimizer, State
from shardkit.optim._refusals import refuse_class, refuse_norms
from shardkit.optim._rounding import check_copies, same_random_numbers
from shardkit.optim._runs import MASTER, RunPart, SteppedRun, plan_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim import Optimizer

_REMEDY = "Use shardkit.optim.MatrixOptimizer for optimizers of matrices, or another class."


class LocalOptimizer(DelegatingOptimizer):
    """Runs an elementwise optimizer of any package on plain 1-D tensors: what this rank holds.

    The parameter groups hold the sharded parameters, and `state` shows sharded state, so that
    learning rate schedulers, gradient clipping, gradient scaling, and checkpoints work as with the
    class itself; a checkpoint of one loads into the other. But the class sees neither sharded
    tensors nor single parameters: neighbouring pieces of a bucket are one 1-D tensor where their
    settings are the same. So it needs no operator of `ShardedTensor`, any fused or compiled kernel
    runs, and there are few of them.

    **What is elementwise.** The update of an element may depend on that element of the parameter,
    of its gradient and of its state, and on settings. Nothing tells it of a class. Those of torch
    and other packages that are known to be otherwise are refused (Muon, Adafactor, LAMB, LARS,
    LBFGS, ...); a class that is not known, and looks at shapes, rows or norms, trains wrongly.

    **Coded state** (8-bit and 4-bit AdamW of torchao, 8-bit optimizers of bitsandbytes). Parameters
    of at least 4096 elements are coded in blocks that lie as in the whole parameter, wherever the
    mesh cuts it. At a cut less than a block stays in the parameter's dtype. `state` and files show
    the numbers that the codes stand for, in fp32, so that they load on any number of ranks and into
    other optimizers.

    Args:
        params: Parameters, named ones or groups, as for any optimizer; they may be sharded later.
            Plain parameters are stepped as they are.
        optimizer_class: The class that steps.
        master_dtype: Parameters of a narrower floating dtype get copies of this dtype at their
            first gradient. These are stepped and then rounded. They are saved as
            ``state[param]["master"]``, and follow what others write to the parameters.
        **defaults: Options of `optimizer_class`.

    Raises:
        OptimizerError: The class is known not to be elementwise. In the first step: a parameter is
            on meta or on an XLA device, or the class keeps state of another shape.

    Cost: no collective. Memory: the class's state of this rank's pieces; with masters theirs, and a
    copy of the gradients during the step. Looking at coded state takes its size in fp32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        self.master_dtype = master_dtype
        super().__init__(params, optimizer_class, defaults)

    _kept = (*DelegatingOptimizer._kept, "master_dtype", "_codec", "_is_random")  # noqa: SLF001 - base

    def _forget(self) -> None:
        super()._forget()
        self._runs: list[SteppedRun] = []
        self._known: list[list[tuple[Any, Any]]] = []
        self._copies: list[tuple[Tensor, int]] = []

    def _probe(self) -> Optimizer:
        refuse_class(self.optimizer_class, _REMEDY)
        probe = super()._probe()
        refuse_norms(probe, _REMEDY)
        self._codec = codec_of(probe)
        self._is_random = bool(getattr(probe, "bf16_stochastic_round", False))
        return probe

    # --- runs -----------------------------------------------------------------------------------

    def _new_tensors(self) -> list[list[torch.nn.Parameter]]:
        state, result = self.state, []
        self._runs, self._known = [], []
        if self._is_random:
            check_copies(param for group in self.param_groups for param in group["params"])
        for group in self.param_groups:
            params = group["params"]
            runs = plan_runs(params, state, self._codec, self.master_dtype)
            self._runs += runs
            self._known.append([(param, _piece_of(param)) for param in params])
            result.append([run.tensor for run in runs])
        return result

    def _is_outdated(self) -> bool:
        """Whether parameters were added or have other pieces, or gradients part a run."""
        if len(self._known) != len(self.param_groups):
            return True
        for group, known in zip(self.param_groups, self._known, strict=True):
            params = group["params"]
            if len(params) != len(known):
                return True
            for param, (before, piece) in zip(params, known, strict=True):
                if param is not before or _piece_of(param) is not piece:
                    return True
        return any(map(_is_parted, self._runs))

    def _run(self, inner: Optimizer) -> None:
        params = (param for group in self.param_groups for param in group["params"])
        with writing_only([param for param in params if isinstance(param, ShardedTensor)]):
            self._bring()
            if self._is_random:
                # In the groups, so that it is in state dicts and checkpoints.
                counts = [group.get("num_steps", 0) for group in self.param_groups]
                for group in self.param_groups:
                    group["num_steps"] = 1 + max(counts)
                with same_random_numbers([run.tensor for run in self._runs], 1 + max(counts)):
                    _compat.step_without_global_hooks(inner)
            else:
                _compat.step_without_global_hooks(inner)
            self._take()

    def _bring(self) -> None:
        """Set the gradients of the inner tensors, and bring masters up to date."""
        for run in self._runs:
            if run.has_master:
                run.refresh_master()
            grads = run.grads
            if grads[0] is None:
                run.tensor.grad = None
            elif run.is_stand_in:
                run.tensor.grad = torch.zeros_like(run.tensor)
            elif not run.is_plain or run.has_master:
                run.tensor.grad = run.join(grads, run.tensor.dtype)

    def _take(self) -> None:
        """Write results back to the parameters."""
        stepped = [run for run in self._runs if run.tensor.grad is not None]
        masters = [run for run in stepped if run.has_master]
        if masters:
            _compat.foreach_copy([run.values for run in masters], [run.tensor for run in masters])
        # Kernels of other packages do not raise the counters, by which gathered values are stale.
        params = (r.parts[0].param for r in stepped if not (r.is_stand_in or r.is_plain))
        shards = [param.local_piece if param.flat is None else param.flat for param in params]
        torch.autograd.graph.increment_version([*{id(shard): shard for shard in shards}.values()])
        for run in self._runs:
            if run.has_master:
                run.version = _compat.version_of(run.values)
        for run in stepped:
            if not run.has_stepped:
                run.has_stepped = True
                self._codec.check(self._entries_of(run), run.tensor)

    def _drop(self) -> None:
        self._copies = []
        for run in self._runs:
            if not run.is_plain or run.has_master:
                run.tensor.grad = None

    # --- state ----------------------------------------------------------------------------------

    def _entries_of(self, run: SteppedRun) -> dict[str, Any]:
        assert self.inner is not None
        return self.inner.state.get(run.tensor) or {}

    @torch.no_grad()
    def _show_state(self) -> State:
        assert self.inner is not None
        found: dict[Any, list[dict[str, Any]]] = {}
        self._copies = []
        for run in self._runs:
            entries = self._entries_of(run)
            if not entries and not run.has_master:
                continue
            shown = self._codec.show(entries, run.tensor)
            if run.has_master:
                shown[MASTER] = run.tensor.detach()
            for part in run.parts:
                views = {name: _view(value, run, part) for name, value in shown.items()}
                found.setdefault(part.param, []).append(views)
                self._note_copies(value for value in views.values() if is_number(value))
            self._note_copies(
                value for name, value in shown.items() if value is not entries.get(name, value)
            )
        state: State = {
            param: self._joined(param, found[param])
            for group in self.param_groups
            for param in group["params"]
            if param in found
        }
        everything: State = self.inner.state
        rest = {key: v for key, v in everything.items() if not isinstance(key, Tensor)}
        return {**state, **rest}

    def _joined(self, param: Any, shown: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of a parameter out of that of its parts in several runs."""
        if len(shown) == 1:
            return shown[0]
        result = dict(shown[0])
        for name, value in result.items():
            if isinstance(value, ShardedTensor):
                piece = torch.cat([entries[name].local_piece for entries in shown])
                self._note_copies([piece])
                result[name] = ShardedTensor(piece, param.spec)
        return result

    def _note_copies(self, values: Iterable[Any]) -> None:
        self._copies += [(v, _compat.version_of(v)) for v in values if isinstance(v, Tensor)]

    def _is_written(self) -> bool:
        return any(_compat.version_of(tensor) != version for tensor, version in self._copies)

    @torch.no_grad()
    def _put_state(self, state: Mapping[Any, dict[str, Any]]) -> None:
        assert self.inner is not None
        self._copies = []
        settings = {
            id(tensor): group for group in self.inner.param_groups for tensor in group["params"]
        }
        for run in self._runs:
            saved = [state.get(part.param) for part in run.parts]
            if saved[0]:
                put = self._put_run(run, saved, settings[id(run.tensor)])
                if put:
                    self.inner.state[run.tensor] = put
        self.inner.state.update({k: v for k, v in state.items() if not isinstance(k, Tensor)})

    def _put_run(
        self, run: SteppedRun, saved: list[Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state of what is stepped; `saved` is that of its parts, of one history."""
        shown: dict[str, Any] = {}
        for name, value in saved[0].items():
            if name == MASTER:
                continue
            if is_number(value):
                shown[name] = self._number(name, value, run, settings)
            elif run.is_stand_in:
                shown[name] = torch.zeros(1, dtype=value.dtype, device=run.tensor.device)
            else:
                shown[name] = run.join([entries[name] for entries in saved], None)
        if not shown:
            return {}  # There was a master only, as of SGD without momentum.
        fresh = None
        if not self._codec.is_known:
            options = {key: v for key, v in settings.items() if key != "params"}
            fresh = fresh_state(self.optimizer_class, self._options, options, run.tensor)
        return self._codec.put(shown, fresh, run.tensor)

    def _number(self, name: str, value: Any, run: SteppedRun, settings: Mapping[str, Any]) -> Any:
        """Return a number as torch's optimizers want it; others say themselves."""
        if not self._codec.is_known or name not in STATE_NUMBERS:
            return value
        value = torch.as_tensor(value)
        if settings.get("capturable") or settings.get("fused"):
            return value.to(run.tensor.device)
        return value


def _piece_of(param: Any) -> Any:
    return param.local_piece if type(param) is ShardedTensor else None


def _is_parted(run: SteppedRun) -> bool:
    """Whether some of a run's parameters have no gradient, or theirs lie apart from the start.

    Or whether its first gradient is there, and a master is to be made.
    """
    if run.awaits_gradient and run.parts[0].param.grad is not None:
        return True
    if len(run.parts) == 1:
        return False
    grads = run.grads
    has_none = grads[0] is None
    if any((grad is None) != has_none for grad in grads):
        return True
    may_part = not (has_none or run.has_stepped or run.has_master or run.is_stand_in)
    return may_part and not run.lie_together(grads)


def _view(value: Any, run: SteppedRun, part: RunPart) -> Any:
    """Return a part of what is shown of a run, as its parameter is cut; numbers are copies."""
    if is_number(value):  # Of all parts: what is written to one's must not reach the others.
        return value.clone() if isinstance(value, Tensor) else value
    if run.is_plain:
        return value
    if run.is_stand_in:
        return ShardedTensor(value[:0], part.param.spec)
    piece = value[part.at : part.at + part.stop - part.start]
    return ShardedTensor(piece, part.param.spec, value, run.start)
