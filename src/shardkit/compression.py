"""Compression of gradients that are sent over the replicate axis of a 2-D mesh.

`bf16_compress` and `fp16_compress` send 16 bits of each gradient. `PowerSGD` sends gradients at low
rank, and adds the approximation error to the next gradient.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError, StateError
from shardkit._module.fsdp_module import FSDPModule, settings_of_root
from shardkit._module.hooks import groups_in, state_of
from shardkit._settings import AllReduce, GradientPiece, SumAxis, as_number, refuse_texts
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from shardkit._params.bucket import Bucket
    from shardkit._params.sites import ParamEntry
    from shardkit._runtime.group import ParamGroup

__all__ = ["PowerSGD", "bf16_compress", "compress_gradients", "fp16_compress"]


# --- whose gradients are compressed ---------------------------------------------------------------


def compress_gradients(model: nn.Module, hook: AllReduce | None) -> None:
    """Let `hook` sum the gradients of a model over the replicate axis.

    Call it on the root, after `fully_shard`, on all ranks with the same hook. It replaces FSDP1's
    ``register_comm_hook`` and DDP's. Groups on a mesh of one axis do not change.

    Args:
        model: A sharded root.
        hook: `bf16_compress`, `fp16_compress`, a `PowerSGD` of this model alone, or any
            `AllReduce`. None: gradients are sent uncompressed again.

    Raises:
        StateError: `model` is not sharded, is inside of another root, or has no group with a
            replicate axis; or the mesh is of XLA devices.
    """
    if not isinstance(model, FSDPModule):
        msg = (
            f"compress_gradients takes a sharded module, got {type(model).__name__}. Call "
            f"fully_shard on it first."
        )
        raise StateError(msg)
    sharded: Any = model
    settings_of_root(sharded)
    replicated = {
        module: group
        for module in sharded.modules()
        for group in groups_in(module, recurse=False)
        if group.replicates
    }
    if not replicated and hook is not None:
        msg = (
            f"compress_gradients: no group of this {type(model).__name__} has a replicate axis. "
            f"Pass fully_shard a 2-D mesh; (n, 1) replicates without sharding. For fewer bytes in "
            f"the reduce-scatter choose MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
        )
        raise StateError(msg)
    if isinstance(hook, PowerSGD):
        groups = [*replicated.values()]
        state_of(sharded).name_params(groups, [model])
        hook.bind(groups)
    for module in replicated:
        module.set_custom_all_reduce(hook)


# --- 16 bits --------------------------------------------------------------------------------------


def bf16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in bf16: an `AllReduce`.

    It is like torch's ``bf16_compress_hook``. The engine also adds in bf16: each of its additions
    rounds to 8 bits. The reduce-scatter stays in `reduce_dtype`, for example fp32. To have both in
    bf16, choose bf16 as `reduce_dtype` instead.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; ignored.
        axis: The replicas.
        unit: Factor that makes the gradient from the sum; it is applied before the tensor is sent.

    Cost: one all-reduce of 2 bytes per element, and memory of that size.
    """
    _all_reduce_as(tensor, torch.bfloat16, axis, unit)


def fp16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in fp16: an `AllReduce`.

    It is like torch's ``fp16_compress_hook``. The gradients are divided by the number of ranks
    before they are sent, so that averages up to 65504 do not overflow. Parts below 6e-8 become 0,
    so scale the loss. The engine adds in fp16.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; ignored.
        axis: The replicas.
        unit: Factor that makes the gradient from the sum; it is applied before the tensor is sent.

    Cost: one all-reduce of 2 bytes per element, and memory of that size.
    """
    _all_reduce_as(tensor, torch.float16, axis, unit)


def _all_reduce_as(tensor: Tensor, dtype: torch.dtype, axis: SumAxis, unit: float) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype.itemsize <= dtype.itemsize:
        axis.all_reduce(real, "sum")
        return
    wire = (real * unit).to(dtype)
    axis.all_reduce(wire, "sum")
    real.copy_(wire)
    real.div_(unit)


# --- scaled losses --------------------------------------------------------------------------------


class LossScale:
    """A number, or a GradScaler that is read in every backward."""

    def __init__(self, source: Any) -> None:
        is_number = isinstance(source, int | float)
        if not (0.0 < source < math.inf if is_number else hasattr(source, "is_enabled")):
            msg = (
                f"set_loss_scale takes a GradScaler, or a finite number above 0, got {source!r}. "
                f"Where the loss is not scaled, pass 1.0."
            )
            raise StateError(msg)
        self._scaler = None if is_number else source
        self._growth = 0
        self.value = float(source) if is_number else 1.0  # The scale at the last read.
        # Whether steps are skipped when gradients overflow.
        self.may_skip = self._scaler is not None and self._scaler.is_enabled()
        self.read()

    def read(self) -> str:
        """Read the scale.

        Returns:
            ``"same"``: the optimizer step of the last read is still under way; ``"stepped"``: it
            has ended; ``"skipped"``: the scale became smaller.

        Cost: waits for the device if the scale is on one.
        """
        if self._scaler is None:
            return "same"
        before = self.value, self._growth
        state = self._scaler.state_dict()  # Empty if it is not enabled.
        value, self._growth = state.get("scale", 1.0), state.get("_growth_tracker", 0)
        if (value, self._growth) == before:
            return "same"
        self.value = value or self.value  # Never 0, since errors are divided by it.
        return "skipped" if value < before[0] else "stepped"


# --- sums at low rank -----------------------------------------------------------------------------
#
# Pure functions, except for the sums that are passed to them. One tensor of all first factors is
# sent, and one of all second factors.


@dataclass(frozen=True, slots=True)
class Matrix:
    """Whole rows of one parameter in a rank's range, which are sent at low rank."""

    name: str  # Name of the parameter.
    start: int  # Position of the first element in the range.
    rows: int  # Number of rows.
    columns: int  # Elements of a row: all dims but the first.
    rank: int  # Rank of the approximation.

    @property
    def stop(self) -> int:
        """Position after the last element."""
        return self.start + self.rows * self.columns

    def view(self, flat: Tensor) -> Tensor:
        """Return the matrix in a range."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


def find_matrices(
    pieces: Sequence[GradientPiece],
    rank_of: int | Callable[[str, tuple[int, int]], int],
    min_rate: float,
) -> list[Matrix]:
    """Return the matrices for which low rank sends at least `min_rate` times fewer numbers.

    A cut may fall inside of a row; the incomplete rows at either end are in no matrix.
    """
    result = []
    for piece in pieces:
        if len(piece.shape) < 2 or piece.start == piece.stop:  # noqa: PLR2004 - a matrix
            continue
        columns = math.prod(piece.shape[1:])
        first = -(-piece.start // columns)
        rows = piece.stop // columns - first
        if rows < 1:
            continue
        wanted = rank_of(piece.name, (rows, columns)) if callable(rank_of) else rank_of
        if not isinstance(wanted, int):
            msg = (
                f"the rank of {piece.name!r} must be an int, or 0 to send it uncompressed; the "
                f"function of PowerSGD returned {wanted!r} for {rows} rows and {columns} columns."
            )
            raise StateError(msg)
        rank = min(wanted, rows, columns)
        if rank > 0 and (rows + columns) * rank * min_rate <= rows * columns:
            start = piece.offset + first * columns - piece.start
            result.append(Matrix(piece.name, start, rows, columns, rank))
    return result


def rest_of(matrices: Sequence[Matrix], flat: Tensor) -> list[Tensor]:
    """Return the parts of a range that are in no matrix."""
    starts = [0, *sorted(matrix.stop for matrix in matrices)]
    stops = [*sorted(matrix.start for matrix in matrices), flat.numel()]
    return [flat[a:b] for a, b in zip(starts, stops, strict=True) if a < b]


def random_factor(matrix: Matrix, seed: int, iteration: int, like: Tensor) -> Tensor:
    """Return a random second factor, equal on all ranks that have the same matrix."""
    text = f"{seed}/{iteration}/{matrix.name}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    generator = torch.Generator().manual_seed(number)
    shape = (matrix.columns, matrix.rank)
    factor = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return like.new_empty(factor.shape).copy_(factor)


def sum_at_low_rank(
    values: Sequence[Tensor], seconds: Sequence[Tensor], sum_up: Callable[[Tensor], object]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return factors of the sums of matrices over ranks, by one step of the power iteration.

    Args:
        values: Matrices of this rank.
        seconds: Initial second factors, (columns, rank) each, equal on all ranks.
        sum_up: Function that sums a 1-D tensor over the ranks, in place, with equal bits on all
            ranks.

    Returns:
        First factors (rows, rank) with orthonormal columns; second factors (columns, rank), where
        first times the transpose of second approximates the sum; and whether all values are finite,
        as a 0-dim tensor.

    Cost: two sums, of rank * rows and rank * columns numbers for each matrix.
    Source: Vogels et al. 2019, arXiv:1905.13727, algorithm 1.
    """
    starts = [torch.linalg.qr(second)[0] for second in seconds]
    firsts = [value @ start for value, start in zip(values, starts, strict=True)]
    firsts = [torch.linalg.qr(first)[0] for first in _summed(firsts, sum_up)]
    products = [value.T @ first for value, first in zip(values, firsts, strict=True)]
    results = _summed(products, sum_up)
    is_finite = torch.stack([result.isfinite().all() for result in (*firsts, *results)]).all()
    return firsts, results, is_finite


def _summed(parts: Sequence[Tensor], sum_up: Callable[[Tensor], object]) -> list[Tensor]:
    """Return the sums of several tensors over the ranks, which are sent as one tensor."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    sum_up(flat)
    sizes = [part.numel() for part in parts]
    return [chunk.view(part.shape) for chunk, part in zip(flat.split(sizes), parts, strict=True)]


# --- state of a bucket ----------------------------------------------------------------------------


class Sent(NamedTuple):
    """The sent part of one matrix: the error lacks `share` times `first` times `second`.T."""

    matrix: Matrix
    start: Tensor  # Second factor at the start of the step.
    first: Tensor
    second: Tensor
    share: float


@dataclass(slots=True)
class BucketState:
    """The state of one bucket."""

    iteration: int = 0  # Number of reductions so far.
    # 1-D, as long as the shard: the approximation error, in units of the unscaled gradient.
    error: Tensor | None = None
    # Second factors of the last step, by parameter name; never written in place.
    seconds: dict[str, Tensor] = field(default_factory=dict)
    # Parts that this backward sent, until it is known which parameters were used.
    sent: list[Sent] = field(default_factory=list)
    # Copies of `error` and `seconds` from the start of the optimizer step, if it may be skipped;
    # None: it has not started.
    before: tuple[Tensor, dict[str, Tensor]] | None = None

    def begin_step(self) -> None:
        """Copy the error and the factors, once in an optimizer step."""
        if self.error is not None and self.before is None:
            self.before = self.error.clone(), dict(self.seconds)

    def end_step(self, *, is_skipped: bool) -> None:
        """Drop the copies of the optimizer step's start, or restore them if it was skipped."""
        if is_skipped and self.before is not None:
            self.error, self.seconds = self.before
        self.before = None

    def settle(self, unused: Collection[str]) -> None:
        """Take back what was sent for parameters whose gradients no rank gets."""
        sent, self.sent = self.sent, []
        for matrix, start, first, second, share in reversed(sent):
            if matrix.name not in unused:
                continue
            if self.error is not None:
                matrix.view(self.error).add_(first @ second.T, alpha=share)
            if matrix.name in self.seconds:
                self.seconds[matrix.name] = start


# --- PowerSGD -------------------------------------------------------------------------------------


class PowerSGD:
    """An `AllReduce` that sends matrices at low rank, like torch's ``powerSGD_hook``.

    Pass it to `compress_gradients`, for one model. A matrix is the part of a parameter of two or
    more dims on this rank: its whole rows, where all dims after the first are columns. Biases,
    scales, incomplete rows at the ends of a shard, and matrices that would not get small enough are
    sent uncompressed.

    Args:
        rank: Rank of the approximation; or a function of a parameter's name and its (rows, columns)
            on this rank, which returns 0 for a parameter to send uncompressed. It must be the same
            on all replicas.
        start_after: Number of first reductions that are not compressed (torch's
            ``start_powerSGD_iter``), because gradients change most at the start of training.
        min_compression_rate: Least rate: a matrix is compressed only if that sends at least this
            many times fewer numbers.
        use_error_feedback: Whether to add the approximation error to the next gradient.
        warm_start: Whether to begin with the last step's factors; otherwise random ones.
        seed: Seed of the random factors.

    Cost: each reduction takes three all-reduces instead of one: of the uncompressed part, in
    `reduce_dtype`; and of ``rank * rows`` and of ``rank * columns`` numbers, in fp32 or wider.
    Memory: one shard in fp32 with error feedback; one more with a GradScaler (`set_loss_scale`);
    one more during the reduction of 16-bit gradients; and two QR decompositions.
    Source: Vogels et al. 2019, arXiv:1905.13727.

    If no rank used a parameter in a backward, its error stays unchanged. A gradient that is not
    finite stays so, and the errors of its bucket stay unchanged. Pass a loss scale to
    `set_loss_scale`; without that call, the scale must be constant.
    """

    def __init__(
        self,
        rank: int | Callable[[str, tuple[int, int]], int] = 1,
        *,
        start_after: int = 1000,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        seed: int = 0,
    ) -> None:
        if not callable(rank) and (type(rank) is not int or rank < 1):
            msg = f"rank must be an int above 0, or a function, got {rank!r}."
            raise StateError(msg)
        limits: dict[str, Any] = {
            "start_after": start_after,
            "min_compression_rate": min_compression_rate,
        }
        for name, value in limits.items():
            if isinstance(value, str) or not as_number(value) >= 0:  # Also NaN.
                msg = f"{name} must be a number of at least 0, got {value!r}."
                raise StateError(msg)
        self._rank = rank
        self._start_after = start_after
        self._min_rate = min_compression_rate
        refuse_texts(StateError, use_error_feedback=use_error_feedback, warm_start=warm_start)
        self._use_error_feedback = use_error_feedback
        self._warm_start = warm_start
        self._seed = seed
        self._states: dict[str, BucketState] = {}
        self._groups: list[ParamGroup] = []
        self._wires: dict[str, torch.dtype] = {}
        self._scale = LossScale(1.0)
        self._has_begun = False

    def bind(self, groups: Sequence[ParamGroup]) -> None:
        """Bind this object to the groups of a model; `compress_gradients` calls it.

        Raises:
            StateError: It is bound to another model.
        """
        if self._groups and self._groups != list(groups):
            msg = (
                "this PowerSGD has the errors of another model's gradients. Make one for each "
                "model."
            )
            raise StateError(msg)
        self._groups = list(groups)

    # --- loss scale, skipped steps ---

    def set_loss_scale(self, scale: float | torch.amp.GradScaler) -> None:
        """Set the loss scale, on all ranks alike, before the first backward.

        Errors are kept in units of the unscaled gradient, so that the scale may change. When a
        GradScaler has skipped a step, the errors are restored to their values before that step,
        that is, before all backwards since the last ``scaler.update()``. A smaller scale shows that
        a step was skipped.

        Args:
            scale: The GradScaler, passed once: every backward reads it. Or a number, passed before
                the next backward each time that it changes. After a step that you skip yourself,
                call `drop_errors`.

        Raises:
            StateError: `scale` is neither a GradScaler nor a finite number above 0.

        Cost: with a GradScaler, the host waits once in each backward for the device, if the scale
        is on one; and one more shard in fp32.
        """
        self._scale = LossScale(scale)
        self._has_begun = False
        for state in self._states.values():
            state.before = None

    def drop_errors(self) -> None:
        """Drop the errors so far, on all ranks alike; factors and iterations stay."""
        for state in self._states.values():
            state.error = state.before = None
            state.sent.clear()

    def _read_scale(self) -> None:
        """Read the loss scale, and undo a step that was skipped since the last time."""
        event = self._scale.read()
        if event != "same":
            for state in self._states.values():
                state.end_step(is_skipped=event == "skipped")

    # --- sums ---

    @torch.no_grad()
    def __call__(
        self, tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
    ) -> None:
        """Sum gradients over the replicate axis; see `AllReduce`."""
        state = self._states.setdefault(pieces[0].name, BucketState())
        state.iteration += 1
        matrices: list[Matrix] = []
        if state.iteration > self._start_after and tensor.is_floating_point():
            matrices = find_matrices(pieces, self._rank, self._min_rate)
        if pieces[0].name not in self._wires:
            # The dtypes of gradients that cross the axis uncompressed.
            self._wires = {b.entries[0].name: b.plan.reduce_dtype for b in self._buckets()}
        dtype = self._wires.get(pieces[0].name, tensor.dtype)
        _sum_parts(rest_of(matrices, tensor), axis, dtype)
        if matrices:
            self._sum_matrices(state, matrices, tensor, axis, unit)

    @torch.no_grad()
    def settle_unused(self, pieces: Sequence[GradientPiece], unused: Collection[str]) -> None:
        """Take back what was sent for parameters that no rank used; see `AllReduce`."""
        self._has_begun = False  # The next backward reads the scale.
        state = self._states.get(pieces[0].name)
        if state is not None:
            state.settle(unused)

    def _sum_matrices(
        self,
        state: BucketState,
        matrices: Sequence[Matrix],
        tensor: Tensor,
        axis: SumAxis,
        unit: float,
    ) -> None:
        if not self._has_begun:  # Once in a backward; every time if nothing calls `settle_unused`.
            self._has_begun = any(g.settings.comm.all_reduce is self for g in self._groups)
            self._read_scale()
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        scale, error = self._scale.value, state.error
        if self._use_error_feedback and error is None:
            error = state.error = torch.zeros(tensor.numel(), dtype=dtype, device=tensor.device)
        if self._scale.may_skip:
            state.begin_step()
        values = [matrix.view(tensor).to(dtype) for matrix in matrices]
        if error is not None:
            for matrix, value in zip(matrices, values, strict=True):
                value.add_(matrix.view(error), alpha=scale / unit)
        starts = [self._start(state, *pair) for pair in zip(matrices, values, strict=True)]
        firsts, seconds, is_finite = sum_at_low_rank(
            values, starts, lambda flat: axis.all_reduce(flat, "sum")
        )
        for matrix, value, start, first, second in zip(
            matrices, values, starts, firsts, seconds, strict=True
        ):
            approximation = first @ second.T
            if error is not None:
                old = matrix.view(error)
                left_out = value.sub(approximation, alpha=1.0 / axis.size).mul_(unit / scale)
                old.copy_(torch.where(is_finite, left_out, old))
            if self._warm_start:
                state.seconds[matrix.name] = torch.where(is_finite, second, start)
            if self._has_begun:  # If not finite, the error did not change.
                share = unit / scale / axis.size
                finite = [part.masked_fill(~is_finite, 0.0) for part in (first, second)]
                state.sent.append(Sent(matrix, start, finite[0], finite[1], share))
            matrix.view(tensor).copy_(approximation)

    def _start(self, state: BucketState, matrix: Matrix, like: Tensor) -> Tensor:
        """Return the second factor with which a step begins."""
        known = state.seconds.get(matrix.name) if self._warm_start else None
        if known is not None and known.shape == (matrix.columns, matrix.rank):
            same = known.device == like.device and known.dtype == like.dtype
            return known if same else like.new_empty(known.shape).copy_(known)
        iteration = 0 if self._warm_start else state.iteration
        return random_factor(matrix, self._seed, iteration, like)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state to continue from, for `shardkit.checkpoint.save`. Collective.

        ``error`` is the sum over the replicas of the approximation errors, sharded like the
        parameters. Later steps depend only on this sum, since all sums are linear, so it loads on
        any mesh. It is in units of the unscaled gradient (`set_loss_scale`). ``second_factors`` are
        those of every rank of the shard axis.

        Raises:
            StateError: It is bound to no model.

        Cost: with error feedback, one all-reduce per bucket over the replicate axis; and for each
        shard axis, one exchange of the factors. Memory: one shard in fp32.
        """
        self._check_bound()
        if self._scale.may_skip:
            self._read_scale()
        buckets = self._buckets() if self._use_error_feedback else ()
        return {
            "iteration": max((state.iteration for state in self._states.values()), default=0),
            "error": {name: error for b in buckets for name, error in self._total_error(b)},
            "second_factors": self._all_seconds(),
        }

    @torch.no_grad()
    def _total_error(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        store, plan = bucket.store, bucket.plan
        state = self._states.get(bucket.entries[0].name)
        dtype = torch.promote_types(plan.reduce_dtype, torch.float32)
        if state is None or state.error is None:
            numel = store.layout.shard_numel
            total = torch.zeros(numel, dtype=dtype, device=plan.home_device)
        else:
            total = state.error.clone()
            assert plan.replicate_axis is not None
            plan.replicate_axis.all_reduce(total, "sum")
            total = total.to(plan.home_device)
        return [
            (entry.name, ShardedTensor(store.piece(total, index), store.specs[index]))
            for index, entry in _with_matrices(bucket)
        ]

    def _all_seconds(self) -> dict[str, dict[str, Tensor]]:
        """Return the second factors of all ranks of shard axes, by parameter and rank."""
        result: dict[str, dict[str, Tensor]] = {}
        axes = (bucket.plan.axis for group in self._groups for bucket in group.buckets)
        for axis in dict.fromkeys(axes):
            names = (b.entries[0].name for b in self._buckets() if b.plan.axis is axis)
            states = (self._states[name] for name in names if name in self._states)
            own = {name: second.cpu() for s in states for name, second in s.seconds.items()}
            for rank, seconds in enumerate(axis.exchange(own)):
                for name, second in seconds.items():
                    result.setdefault(name, {})[f"{rank} of {axis.size}"] = second
        return result

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the dict of `state_dict`, maybe on another mesh; on all ranks alike.

        Replicas share the error evenly. With another number of shards, steps begin with the factors
        of one of the saved shards: every start is valid.

        Raises:
            StateError: It is bound to no model.
            CheckpointError: Errors of parameters are missing or have other shapes, or belong to
                parameters that are not compressed here.
        """
        self._check_bound()
        states: dict[str, BucketState] = {}
        error, seconds = state["error"], state["second_factors"]
        has_error = self._use_error_feedback and bool(error)
        if has_error:
            entries = (e for bucket in self._buckets() for _, e in _with_matrices(bucket))
            _check_names(error, {entry.name: tuple(entry.param.shape) for entry in entries})
        for bucket in self._buckets():
            own = states[bucket.entries[0].name] = BucketState(int(state["iteration"]))
            if has_error:
                own.error = self._cut_error(bucket, error)
            key = f"{bucket.plan.axis.rank} of {bucket.plan.axis.size}"
            for entry in bucket.entries:
                saved = seconds.get(entry.name)
                if saved and self._warm_start:
                    own.seconds[entry.name] = saved.get(key, saved[min(saved)]).clone()
        self._states = states
        self._has_begun = False

    def _cut_error(self, bucket: Bucket, saved: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's part of the error, in the layout of the shard."""
        store, plan = bucket.store, bucket.plan
        assert plan.replicate_axis is not None
        dtype = torch.promote_types(plan.reduce_dtype, torch.float32)
        result = torch.zeros(store.layout.shard_numel, dtype=dtype, device=plan.device)
        for index, entry in _with_matrices(bucket):
            value, spec = saved[entry.name], store.specs[index]
            if isinstance(value, ShardedTensor):
                is_cut = value.spec.same_cut(spec)
                piece = value.to_local() if is_cut else spec.slice_full(value.full_tensor())
            else:
                piece = spec.slice_full(value)
            store.piece(result, index).copy_(piece)
        return result.div_(plan.replicate_axis.size)

    def _buckets(self) -> Iterator[Bucket]:
        """Yield the buckets whose gradients this object sums."""
        for group in self._groups:
            for gradients in group.gradients.buckets:
                bucket = gradients.bucket
                if bucket.is_trainable and bucket.plan.replicate_axis is not None:
                    yield bucket

    def _check_bound(self) -> None:
        if not self._groups:
            msg = (
                "this PowerSGD belongs to no model. Call "
                "shardkit.compression.compress_gradients(model, hook) first."
            )
            raise StateError(msg)


def _with_matrices(bucket: Bucket) -> Iterator[tuple[int, ParamEntry]]:
    """Yield the parameters that may be compressed, each with its position."""
    return ((i, entry) for i, entry in enumerate(bucket.entries) if entry.param.ndim > 1)


def _sum_parts(parts: Sequence[Tensor], axis: SumAxis, dtype: torch.dtype) -> None:
    """Sum the uncompressed parts, sent as one tensor, in `dtype` if that is narrower."""
    if not parts:
        return
    flat = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    is_narrower = dtype.itemsize < flat.dtype.itemsize and dtype.is_complex == flat.is_complex()
    wire = flat.to(dtype) if is_narrower else flat
    axis.all_reduce(torch.view_as_real(wire) if wire.is_complex() else wire, "sum")
    if wire is not parts[0]:
        for part, chunk in zip(parts, wire.split([each.numel() for each in parts]), strict=True):
            part.copy_(chunk)


def _check_names(saved: Mapping[str, Tensor], params: Mapping[str, tuple[int, ...]]) -> None:
    for what, names in (
        ("has nothing of", params.keys() - saved.keys()),
        ("is of a model with", saved.keys() - params.keys()),
    ):
        if names:
            msg = (
                f"the state of PowerSGD {what} {listed(sorted(names))}. Load it with "
                f"the model that it was saved with, or begin without errors: leave it out."
            )
            raise CheckpointError(msg)
    for name, shape in params.items():
        if tuple(saved[name].shape) != shape:
            msg = (
                f"the state of PowerSGD has {name!r} of shape {tuple(saved[name].shape)}, here it "
                f"has {shape}. Load it with the model that it was saved with."
            )
            raise CheckpointError(msg)
