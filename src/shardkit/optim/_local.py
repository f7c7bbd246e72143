"""`LocalOptimizer`: any elementwise optimizer, on this rank's pieces."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._errors import OptimizerError
from shardkit._params.state_dicts import STATE_NUMBERS, leaves_of, map_leaves, zip_leaves
from shardkit._tensor.ops.dispatch import common_flat
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import memory_of, writing_only
from shardkit.backends.device import own_random_numbers
from shardkit.optim._codecs import Codec, codec_of, fresh_state, is_number
from shardkit.optim._delegating import DelegatingOptimizer, State
from shardkit.optim._refusals import check_class, check_options

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from torch.optim import Optimizer


# --- random numbers alike on replicas -------------------------------------------------------------
#
# Ranks that hold the same elements must round them in the same way. Otherwise they drift apart
# without an error. Each rank draws from its own generator, which dropout has already advanced.


def check_copies(params: Iterable[Any]) -> None:
    """Refuse parameters whose elements several ranks hold, cut in different ways.

    Raises:
        OptimizerError: A bf16 parameter is not sharded while others are, or several ranks of a
            tensor-parallel axis hold it.
    """
    rounded = [param for param in params if param.dtype == torch.bfloat16]
    sharded = [param for param in rounded if type(param) is ShardedTensor]
    has_ranks = any(param.device_mesh.size() > 1 for param in sharded)
    for param in rounded:
        if type(param) is not ShardedTensor:
            if has_ranks:
                msg = (
                    f"a bf16 parameter of shape {tuple(param.shape)} is on every rank, and "
                    f"bf16_stochastic_round would round it otherwise on each. Shard it, keep it in "
                    f"fp32, or give it to another optimizer."
                )
                raise OptimizerError(msg)
            continue
        outer: Any = param.spec.tensor_parallel
        if outer is not None and any(a not in outer.axes and a.size > 1 for a in outer.mesh_axes):
            msg = (
                f"{param.spec.name!r} is not split over an axis of tensor parallelism, and "
                f"bf16_stochastic_round would round its copies otherwise on each rank of it. Use "
                f"LocalOptimizer(..., master_dtype=torch.float32) without bf16_stochastic_round."
            )
            raise OptimizerError(msg)


# --- runs of neighbouring pieces ------------------------------------------------------------------
#
# [Note: tensors of a local optimizer]
# - run: 1-D. A tensor that the inner optimizer steps as one parameter. It is a view of the shard,
#   so it is the pieces themselves, with the few elements of padding between them.
# - master: 1-D, laid out as a run, in a wider dtype and in memory of its own. Where there are
#   masters, the inner optimizer steps these, and the pieces are their rounded values.
# - stand-in: one element, always zero. It is stepped for parameters of which this rank has nothing,
#   so that their state has the same names and numbers as on other ranks.
# - A parameter that is not sharded is stepped itself.
#
# Pieces are in one run if their bucket, settings and history are the same: an optimizer has one
# ``step`` for each tensor, and skips tensors without gradient. Where gradients are not contiguous
# (on a single rank, which reduces nothing) each piece is a run: copying the gradients would cost
# more than another kernel.

MASTER = "master"  # Name of masters in the state of parameters.


@dataclass(slots=True, eq=False)
class RunPart:
    """Elements [start, stop) of this rank's piece of a parameter, at position `at` of a run."""

    param: Any
    start: int
    stop: int
    at: int

    @property
    def place(self) -> slice:
        """The range of the run."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(slots=True, eq=False)
class SteppedRun:
    """A tensor that the inner optimizer steps as one parameter; see the note above."""

    parts: list[RunPart]  # The parameters' elements, in order.
    start: int  # Position in the shard where the run begins.
    numel: int  # Number of elements, padding between parts included.
    # Whether it is a parameter that was not sharded when the run was made.
    is_plain: bool = False
    is_stand_in: bool = False  # Whether this rank has no element of its parameters.
    values: Tensor = field(init=False)  # The pieces, a view of the shard; a plain parameter itself.
    # The tensor that is stepped: `values`, a master or a stand-in.
    tensor: nn.Parameter = field(init=False)
    has_master: bool = field(init=False, default=False)  # Whether `tensor` is a master.
    # Whether it was stepped since the run was made.
    has_stepped: bool = field(init=False, default=False)
    # Whether a master must be made as soon as there is a gradient.
    awaits_gradient: bool = field(init=False, default=False)
    # Version of `values` when `tensor` was last written to it.
    version: int = field(init=False, default=-1)

    @property
    def grads(self) -> list[Any]:
        """The gradients of the parts' parameters, None where there is none."""
        return [part.param.grad for part in self.parts]

    def join(self, tensors: Sequence[Any], dtype: torch.dtype | None) -> Tensor:
        """Return one tensor laid out as the run: a view if possible, otherwise a copy.

        `tensors` has one tensor for each part, which is whole or is cut like the parameter.
        """
        if self.is_plain:
            plain: Tensor = tensors[0]
            return plain.to(self.parts[0].param.device, dtype or plain.dtype)
        first = tensors[0]
        dtype, device = dtype or first.dtype, self.parts[0].param.device
        if len(tensors) == 1 and type(first) is ShardedTensor:
            return _part_of(first, self.parts[0]).to(device, dtype)
        flat = common_flat(tensors)
        specs = ((part.param.spec, t.spec) for part, t in zip(self.parts, tensors, strict=True))
        if flat is not None and all(  # It is that of the pieces, or is cut alike.
            own is other or (own.piece_range == other.piece_range and own.same_cut(other))
            for own, other in specs
        ):
            begin = self.start - first.flat_start
            return flat[begin : begin + self.numel].to(device, dtype)
        result = torch.zeros(self.numel, dtype=dtype, device=device)
        places = [result[part.place] for part in self.parts]
        pieces = [_part_of(t, p) for t, p in zip(tensors, self.parts, strict=True)]
        torch_tensors.foreach_copy(places, pieces)
        return result

    def refresh_master(self) -> None:
        """Take over what others wrote to the parameters; elsewhere the master stays."""
        if self.version != torch_tensors.version_of(self.values):
            same = self.tensor.to(self.values.dtype) == self.values
            self.tensor.copy_(torch.where(same, self.tensor, self.values.to(self.tensor.dtype)))
            self.version = torch_tensors.version_of(self.values)


def _part_of(tensor: Any, part: RunPart) -> Tensor:
    """Return a part's elements of a tensor that is whole or is cut like its parameter."""
    spec = part.param.spec
    if type(tensor) is not ShardedTensor:
        piece = spec.slice_full(tensor)
    elif tensor.spec is spec or tensor.spec.same_cut(spec):
        piece = tensor.local_piece
    else:
        msg = (
            f"a gradient or state of {spec.name!r}, shape {tuple(tensor.shape)}, is sharded "
            f"otherwise than the parameter, shape {tuple(part.param.shape)}. Load a state dict of "
            f"a model sharded alike, or one of whole tensors; or use shardkit.checkpoint."
        )
        raise OptimizerError(msg)
    result: Tensor = piece
    return result if part.stop - part.start == result.numel() else result[part.start : part.stop]


def plan_runs(
    params: Iterable[Any],
    state: Mapping[Any, Mapping[str, Any]],
    codec: Codec,
    master_dtype: torch.dtype | None,
) -> list[SteppedRun]:
    """Return the runs that represent the parameters of one group."""
    runs: list[SteppedRun] = []
    stand_ins: dict[Hashable, SteppedRun] = {}
    histories = {param: _history(state.get(param, {})) for param in params}
    for param in _in_order_of_buckets(histories):
        if type(param) is not ShardedTensor:
            part = RunPart(param, 0, param.numel(), 0)
            runs.append(SteppedRun([part], 0, param.numel(), is_plain=True))
            continue
        _check(param)
        if param.spec.piece_numel == 0:
            kind = (param.dtype, param.device, param.grad is None, histories[param])
            run = stand_ins.setdefault(kind, SteppedRun([], 0, 1, is_stand_in=True))
            run.parts.append(RunPart(param, 0, 0, 0))
            continue
        begin = param.spec.piece_range[0]
        for start, stop in _ranges(param, codec):
            last = runs[-1] if runs else None
            is_coded = codec.block_numel is not None  # Then ranges of one parameter are apart.
            if last and not is_coded and _continues(last, param, histories, master_dtype):
                part = RunPart(param, start, stop, begin + start - last.start)
                last.parts.append(part)
                last.numel = part.place.stop
            else:
                runs.append(
                    SteppedRun([RunPart(param, start, stop, 0)], begin + start, stop - start)
                )
    everything = [*runs, *stand_ins.values()]
    for run in everything:
        _make_tensor(run, state, master_dtype)
    return everything


def _in_order_of_buckets(params: Iterable[Any]) -> list[Any]:
    """Return parameters sorted so that those of one bucket are adjacent, in its order."""
    buckets: dict[int, list[Any]] = {}
    for param in params:
        flat = param.flat if type(param) is ShardedTensor else None
        buckets.setdefault(id(param if flat is None else flat), []).append(param)
    return [
        param
        for members in buckets.values()
        for param in (sorted(members, key=lambda p: p.spec.index) if members[1:] else members)
    ]


def _check(param: Any) -> None:
    spec = param.spec
    if spec.is_traced:
        msg = (
            f"{spec.name!r} is on an XLA device, where operators are traced and shards have no "
            f"address. Give the optimizer's class the parameters themselves, without "
            f"LocalOptimizer: there its operators are traced all the same."
        )
        raise OptimizerError(msg)
    if param.is_meta and not spec.mesh.backend.is_dry:
        msg = (
            f"{spec.name!r} is on the meta device. Call shardkit.materialize(model), or load a "
            f"checkpoint, before the first step."
        )
        raise OptimizerError(msg)


def _history(entries: Mapping[str, Any]) -> Hashable:
    """Return what parameters of one run share: the names in their state, and the numbers."""
    return tuple((name, _number(entries[name])) for name in sorted(entries, key=repr))


def _number(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((repr(key), _number(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_number, value))
    if not is_number(value):
        return None
    value = value.item() if isinstance(value, Tensor) else value
    return value if isinstance(value, (int, float, str)) else repr(value)


def _ranges(param: Any, codec: Codec) -> list[tuple[int, int]]:
    """Return the ranges of a piece that are stepped separately; usually there is one.

    Blocks of encoded state are those of the whole parameter, wherever it is cut. The incomplete
    first and last blocks of a piece are separate, and are not encoded.
    """
    start, stop = param.spec.start, param.spec.stop
    block = codec.block_numel
    if block is None or param.numel() < codec.min_numel:
        return [(0, stop - start)]
    first = min(-(-start // block) * block, stop)
    last = max(stop // block * block, first)
    cuts = [0, first - start, last - start, stop - start]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


def _wants_master(param: Any, master_dtype: torch.dtype | None) -> bool:
    return (
        master_dtype is not None
        and param.is_floating_point()
        and param.dtype.itemsize < master_dtype.itemsize
    )


def _continues(
    run: SteppedRun, param: Any, histories: Mapping[Any, Hashable], master_dtype: Any
) -> bool:
    """Whether a parameter's piece belongs to the run that ends before it."""
    before = run.parts[-1].param
    if type(before) is not ShardedTensor or before.flat is None or before.flat is not param.flat:
        return False
    grads = (before.grad, param.grad)
    return (
        param.spec.index == before.spec.index + 1
        and histories[before] == histories[param]
        and (grads[0] is None) == (grads[1] is None)
        and (
            grads[0] is None or _wants_master(param, master_dtype) or common_flat(grads) is not None
        )
    )


def _make_tensor(
    run: SteppedRun, state: Mapping[Any, Mapping[str, Any]], master_dtype: torch.dtype | None
) -> None:
    """Make the stepped tensor. Frozen parameters get no master: most never have a gradient."""
    params = [part.param for part in run.parts]
    first, saved = params[0], [None]
    wants_master = _wants_master(first, master_dtype)
    run.awaits_gradient = wants_master and first.grad is None and not state.get(first)
    if run.is_stand_in:
        run.values = torch.zeros(1, dtype=first.dtype, device=first.device)
    else:
        run.values = first if run.is_plain else run.join(params, None)
        saved = [state.get(param, {}).get(MASTER) for param in params]
    run.has_master = wants_master and not run.awaits_gradient
    if run.has_master and not any(value is None for value in saved):
        run.tensor = nn.Parameter(run.join(saved, master_dtype))
    elif run.has_master:
        run.tensor = nn.Parameter(run.values.to(master_dtype, copy=True))
        run.version = torch_tensors.version_of(run.values)
    else:
        is_trainable = run.values.is_floating_point() or run.values.is_complex()
        run.tensor = first if run.is_plain else nn.Parameter(run.values, is_trainable)


# --- the optimizer --------------------------------------------------------------------------------


class LocalOptimizer(DelegatingOptimizer):
    """Runs an elementwise optimizer of any package on plain 1-D tensors: this rank's shards.

    The parameter groups hold the sharded parameters, and `state` shows sharded state. So learning
    rate schedulers, gradient clipping, gradient scaling and checkpoints work as with the class
    itself, and a checkpoint of one loads into the other. But the class sees neither sharded tensors
    nor single parameters: adjacent shards in a bucket that have the same settings are one 1-D
    tensor. So the class needs no operator of `ShardedTensor`, any fused or compiled kernel runs,
    and there are few kernel calls.

    **Which classes are elementwise.** The update of an element may depend on that element of the
    parameter, its gradient and its state, and on settings. A class does not declare this. The
    classes of torch and other packages that are known to be otherwise are refused (Muon, Adafactor,
    LAMB, LARS, LBFGS, ...). An unknown class that looks at shapes, rows or norms trains wrongly.

    **Encoded state** (8-bit and 4-bit AdamW of torchao, 8-bit optimizers of bitsandbytes). The
    state of parameters of at least 4096 elements is encoded in the blocks of the whole parameter,
    wherever the mesh cuts it. At a cut, less than one block keeps its state in the parameter's
    dtype. `state` and files show the decoded numbers in fp32, so they load on any number of ranks
    and into other optimizers.

    Args:
        params: Parameters, named ones or groups, as for any optimizer; they may be sharded later.
            Plain parameters are stepped as they are.
        optimizer_class: Class of the optimizer that steps.
        master_dtype: Dtype of the copies that parameters of a narrower floating dtype get at their
            first gradient. The copies are stepped and then rounded to the parameters. They are
            saved as ``state[param]["master"]``, and take over what others write to the parameters.
        **defaults: Options of `optimizer_class`.

    Raises:
        OptimizerError: The class is known not to be elementwise, or `master_dtype` is no
            floating-point dtype. In the first step: a parameter is on meta or on an XLA device, or
            the class keeps state of another shape.

    Cost: no collective. Memory: the class's state of this rank's shards; with masters, the masters
    and a copy of the gradients during the step. Reading encoded state takes its size in fp32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        master_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        given: Any = master_dtype
        if given is not None and not getattr(given, "is_floating_point", False):
            msg = (
                f"master_dtype must be a floating-point dtype such as torch.float32, or None for "
                f"no masters, got {master_dtype!r}."
            )
            raise OptimizerError(msg)
        self.master_dtype = master_dtype
        super().__init__(params, optimizer_class, defaults)

    _kept = (*DelegatingOptimizer._kept, "master_dtype", "_codec", "_is_random")  # noqa: SLF001 - base

    def _forget(self) -> None:
        super()._forget()
        self._runs: list[SteppedRun] = []

    def _probe(self) -> Optimizer:
        check_class(self.optimizer_class, on_wholes=False)
        probe = super()._probe()
        check_options(probe)
        self._codec = codec_of(probe)
        self._is_random = bool(getattr(probe, "bf16_stochastic_round", False))
        return probe

    # --- runs -----------------------------------------------------------------------------------

    def _new_tensors(self) -> list[list[torch.nn.Parameter]]:
        state, result = self.state, []
        self._runs, self._known = [], self._described()
        if self._is_random:
            check_copies(param for group in self.param_groups for param in group["params"])
        for group in self.param_groups:
            runs = plan_runs(group["params"], state, self._codec, self.master_dtype)
            self._runs += runs
            result.append([run.tensor for run in runs])
        return result

    def _identity_of(self, param: Any) -> tuple[Any, ...]:
        return param, param.local_piece if type(param) is ShardedTensor else None

    def _is_outdated(self) -> bool:
        """Whether parameters were added or have other pieces, or gradients split a run."""
        return super()._is_outdated() or any(map(_is_parted, self._runs))

    def _run(self, inner: Optimizer) -> None:
        params = (param for group in self.param_groups for param in group["params"])
        with writing_only([param for param in params if isinstance(param, ShardedTensor)]):
            self._bring()
            if self._is_random:
                # Kept in the groups, so that it is in state dicts and checkpoints.
                number = 1 + max(group.get("num_steps", 0) for group in self.param_groups)
                for group in self.param_groups:
                    group["num_steps"] = number
                devices = [run.tensor.device for run in self._runs]
                device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
                with own_random_numbers(device, number):  # Equal on replicas of a shard.
                    torch_autograd.step_without_global_hooks(inner)
            else:
                torch_autograd.step_without_global_hooks(inner)
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
            torch_tensors.foreach_copy(
                [run.values for run in masters], [run.tensor for run in masters]
            )
        # Kernels of other packages do not raise the version counters that mark gathered values as
        # stale. They are raised on all ranks, also where this rank has nothing of the parameters.
        parts = (p for r in stepped for p in (r.parts if r.is_stand_in else r.parts[:1]))
        shards = [memory_of(p.param) for p in parts if type(p.param) is ShardedTensor]
        torch.autograd.graph.increment_version([*{id(shard): shard for shard in shards}.values()])
        for run in self._runs:
            if run.has_master:
                run.version = torch_tensors.version_of(run.values)
        for run in stepped:
            if not run.has_stepped:
                run.has_stepped = True
                self._codec.check(self._entries_of(run), run.tensor)

    def _drop(self) -> None:
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
        for run in self._runs:
            entries = self._entries_of(run)
            if run.awaits_gradient or not (entries or run.has_master):
                continue  # What a constructor made for a narrow parameter, its master gets anew.
            shown = self._codec.show(entries, run.tensor)
            if run.has_master:
                shown[MASTER] = run.tensor.detach()
            for part in run.parts:
                views = {name: _view(value, run, part) for name, value in shown.items()}
                found.setdefault(part.param, []).append(views)
                for value in filter(is_number, leaves_of(views)):
                    self._note_copy(value)
            for name, value in shown.items():
                if value is not entries.get(name, value):
                    self._note_copy(value)
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
        """Return the state of a parameter, joined from its parts in several runs."""
        if len(shown) == 1:
            return shown[0]
        result = dict(shown[0])
        for name, value in result.items():
            if isinstance(value, ShardedTensor):
                piece = torch.cat([entries[name].local_piece for entries in shown])
                self._note_copy(piece)
                result[name] = ShardedTensor(piece, param.spec)
        return result

    @torch.no_grad()
    def _put_state(self, state: Mapping[Any, dict[str, Any]]) -> None:
        assert self.inner is not None
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
        """Return the state of a stepped tensor; `saved` is that of its parts, of one history."""

        def joined(name: str, leaves: Sequence[Any]) -> Any:
            first = leaves[0]
            if is_number(first):
                return self._number(name, first, run, settings)
            if run.is_stand_in:
                return torch.zeros(1, dtype=first.dtype, device=run.tensor.device)
            return run.join(leaves, None)

        # Sorted, because runs begin with other parameters on other ranks. In the order of the first
        # one, ranks would show a parameter's entries in different orders, and gather them mixed.
        names = sorted((name for name in saved[0] if name != MASTER), key=repr)
        shown = {
            name: zip_leaves([entries[name] for entries in saved], functools.partial(joined, name))
            for name in names
        }
        if not shown:
            return {}  # Only a master, as with SGD without momentum.
        fresh = None
        if not self._codec.is_known:
            options = {key: v for key, v in settings.items() if key != "params"}
            fresh = fresh_state(self.optimizer_class, self._options, options, run.tensor)
        return self._codec.put(shown, fresh, run.tensor)

    def _number(self, name: str, value: Any, run: SteppedRun, settings: Mapping[str, Any]) -> Any:
        """Return a number in the form that torch's optimizers want; other classes convert it."""
        if not self._codec.is_known or name not in STATE_NUMBERS:
            return value
        value = torch.as_tensor(value)
        if settings.get("capturable") or settings.get("fused"):
            return value.to(run.tensor.device)
        return value


def _is_parted(run: SteppedRun) -> bool:
    """Whether only some of a run's parameters have gradients, or they are not contiguous at first.

    Also true if the run's first gradient is there, so that a master must be made.
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
    return may_part and common_flat(grads) is None


def _view(value: Any, run: SteppedRun, part: RunPart) -> Any:
    """Return a part of a run's shown state, cut like its parameter; numbers are copies."""
    if isinstance(value, (dict, list, tuple)):
        return map_leaves(value, lambda leaf: leaf if leaf is value else _view(leaf, run, part))
    if is_number(value):  # All parts have it; writes to one must not reach others.
        return value.clone() if isinstance(value, Tensor) else value
    if run.is_plain:
        return value
    if run.is_stand_in:
        return ShardedTensor(value[:0], part.param.spec)
    return ShardedTensor(value[part.place], part.param.spec, value, run.start)
