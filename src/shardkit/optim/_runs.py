"""Runs: 1-D tensors that stand for neighbouring pieces of parameters.

[Note: tensors of a local optimizer]
- run: 1-D. What the inner optimizer steps as one parameter. It is a view of the shard, hence the
  pieces themselves, and covers the few elements of padding between them.
- master: 1-D, laid out as a run, in a wider dtype and in memory of its own. Where there are
  masters, the inner optimizer steps these, and the pieces are their rounded values.
- stand-in: one element, always zero. It is stepped for parameters of which this rank has nothing,
  so that their state has the same names and numbers as on other ranks.
- A parameter that nobody sharded is stepped as it is.

Pieces are in one run if their bucket, settings and history are the same: an optimizer has one
``step`` for each tensor, and skips those without gradient. Where gradients do not lie end to end
(one rank, which reduces nothing) each piece is a run: to copy them would cost more than a kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import OptimizerError
from shardkit._tensor.ops.contiguous import common_flat
from shardkit._tensor.sharded import ShardedTensor
from shardkit.optim._codecs import is_number

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from shardkit.optim._codecs import Codec

MASTER = "master"
"""What masters are called in the state of parameters."""


@dataclass(slots=True, eq=False)
class RunPart:
    """Elements [start, stop) of this rank's piece of a parameter, from `at` on in a run."""

    param: Any
    start: int
    stop: int
    at: int


@dataclass(slots=True, eq=False)
class SteppedRun:
    """What the inner optimizer steps as one parameter; see the note above.

    Attributes:
        parts: The parameters' elements, in order.
        start: Position in the shard where the run begins.
        numel: Number of elements, padding between parts included.
        is_plain: True for a parameter that nobody had sharded when the run was made.
        is_stand_in: True where this rank has no element of its parameters.
        values: The pieces, a view of the shard; a plain parameter itself.
        tensor: The tensor that is stepped: `values`, a master or a stand-in.
        has_master: True if `tensor` is a master.
        has_stepped: True if it was stepped since the run was made.
        awaits_gradient: True if a master is to be made when there is a gradient.
        version: Version of `values` when `tensor` was last written to it.
    """

    parts: list[RunPart]
    start: int
    numel: int
    is_plain: bool = False
    is_stand_in: bool = False
    values: Tensor = field(init=False)
    tensor: nn.Parameter = field(init=False)
    has_master: bool = field(init=False, default=False)
    has_stepped: bool = field(init=False, default=False)
    awaits_gradient: bool = field(init=False, default=False)
    version: int = field(init=False, default=-1)

    @property
    def grads(self) -> list[Any]:
        """The gradients of the parts' parameters, None where there is none."""
        return [part.param.grad for part in self.parts]

    def lie_together(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors of the parts' parameters lie as the pieces do."""
        if len(tensors) == 1:
            return True
        return common_flat(tensors) is not None

    def join(self, tensors: Sequence[Any], dtype: torch.dtype | None) -> Tensor:
        """Return one tensor laid out as the run: a view where that can be, else a copy.

        Args:
            tensors: One for each part, cut as its parameter is, or whole.
            dtype: Dtype of the result; None: as it is.
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
        if flat is not None and all(  # Of the pieces, or of other buckets that are cut alike.
            own is other or (own.piece_range == other.piece_range and own.same_cut(other))
            for own, other in specs
        ):
            begin = self.start - first.flat_start
            return flat[begin : begin + self.numel].to(device, dtype)
        result = torch.zeros(self.numel, dtype=dtype, device=device)
        places = [result[p.at : p.at + p.stop - p.start] for p in self.parts]
        pieces = [_part_of(t, p) for t, p in zip(tensors, self.parts, strict=True)]
        _compat.foreach_copy(places, pieces)
        return result

    def use_master(self, saved: Sequence[Any], dtype: torch.dtype) -> None:
        """Step a master: one that was saved, or a new one."""
        self.has_master = True
        if saved:
            self.tensor = nn.Parameter(self.join(saved, dtype))
        else:
            self.tensor = nn.Parameter(self.values.to(dtype, copy=True))
            self.version = _compat.version_of(self.values)

    def refresh_master(self) -> None:
        """Follow what others wrote to the parameters; where they did not, the master stays."""
        if self.version != _compat.version_of(self.values):
            same = self.tensor.to(self.values.dtype) == self.values
            self.tensor.copy_(torch.where(same, self.tensor, self.values.to(self.tensor.dtype)))
            self.version = _compat.version_of(self.values)


def _part_of(tensor: Any, part: RunPart) -> Tensor:
    """Return a part's elements of a tensor that is cut as its parameter is, or whole."""
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
    """Return what stands for the parameters of one group.

    Args:
        params: Parameters of the group.
        state: State of these, as users see it.
        codec: The form in which their state is kept.
        master_dtype: Dtype of masters; None: there are none.

    Raises:
        OptimizerError: A parameter is on meta, or its operators are traced (XLA).
    """
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
            if last is not None and _continues(last, param, histories, codec, master_dtype):
                at = begin + start - last.start
                last.parts.append(RunPart(param, start, stop, at))
                last.numel = at + stop - start
            else:
                runs.append(
                    SteppedRun([RunPart(param, start, stop, 0)], begin + start, stop - start)
                )
    everything = [*runs, *stand_ins.values()]
    for run in everything:
        _make_tensor(run, state, master_dtype)
    return everything


def _in_order_of_buckets(params: Iterable[Any]) -> list[Any]:
    """Return parameters so that those of one bucket are side by side, in its order."""
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
            f"{spec.name!r} is on an XLA device, where operators are traced and pieces have no "
            f"address. Give the optimizer's class the parameters themselves, without "
            f"LocalOptimizer: there its operators are traced all the same."
        )
        raise OptimizerError(msg)
    if param.is_meta:
        msg = (
            f"{spec.name!r} is on the meta device. Call shardkit.materialize(model), or load a "
            f"checkpoint, before the first step."
        )
        raise OptimizerError(msg)


def _history(entries: Mapping[str, Any]) -> Hashable:
    """Return what parameters of one run have in common: names of their state, and its numbers."""
    return tuple((name, _number(entries[name])) for name in sorted(entries))


def _number(value: Any) -> Hashable:
    if not is_number(value):
        return None
    value = value.item() if isinstance(value, Tensor) else value
    return value if isinstance(value, (int, float, str)) else repr(value)


def _ranges(param: Any, codec: Codec) -> list[tuple[int, int]]:
    """Return the ranges of a piece that are stepped by themselves; as a rule there is one.

    Blocks of coded state lie as in the whole parameter, wherever that is cut. What is left of the
    first and the last block is apart, and not coded.
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
    run: SteppedRun,
    param: Any,
    histories: Mapping[Any, Hashable],
    codec: Codec,
    master_dtype: torch.dtype | None,
) -> bool:
    """Whether a parameter's piece belongs to the run that ends before it."""
    before = run.parts[-1].param
    if type(before) is not ShardedTensor or before is param or codec.block_numel is not None:
        return False
    grads = (before.grad, param.grad)
    return (
        before.flat is not None
        and before.flat is param.flat
        and param.spec.index == before.spec.index + 1
        and histories[before] == histories[param]
        and (grads[0] is None) == (grads[1] is None)
        and (
            grads[0] is None or _wants_master(param, master_dtype) or common_flat(grads) is not None
        )
    )


def _make_tensor(
    run: SteppedRun, state: Mapping[Any, Mapping[str, Any]], master_dtype: torch.dtype | None
) -> None:
    """Make what is stepped. Frozen parameters get no master: most never have a gradient."""
    params = [part.param for part in run.parts]
    first, saved = params[0], [None]
    wants_master = _wants_master(first, master_dtype)
    run.awaits_gradient = wants_master and first.grad is None and not state.get(first)
    if run.is_stand_in:
        run.values = torch.zeros(1, dtype=first.dtype, device=first.device)
    else:
        run.values = first if run.is_plain else run.join(params, None)
        saved = [state.get(param, {}).get(MASTER) for param in params]
    if wants_master and not run.awaits_gradient:
        assert master_dtype is not None
        run.use_master([] if any(value is None for value in saved) else saved, master_dtype)
    else:
        is_trainable = run.values.is_floating_point() or run.values.is_complex()
        run.tensor = first if run.is_plain else nn.Parameter(run.values, is_trainable)
