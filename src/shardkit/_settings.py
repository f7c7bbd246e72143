"""What users choose: dtypes, offloading, their own collectives, settings of groups, the watch."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import reprlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from shardkit._errors import ShardkitError, StateError, WrapError
from shardkit._text import flag, read_as, release_of, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


# --- dtypes, where shards are, when backward gathers ahead ----------------------------------------


_MIXED_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")

REDUCES_AS_STORED = release_of(torch.__version__) >= (2, 15)
"""Whether FSDP2 reduces gradients in the dtype of the shard if there is no `reduce_dtype`.

Up to torch 2.14 it reduces them in `param_dtype` then.
"""

KEEPS_WIDE_GRADIENTS = REDUCES_AS_STORED
"""Whether FSDP2 reduces what autograd computes in a wider dtype than `param_dtype` as it is.

An example is the gradient of `weight` in ``x.float() * weight``. Up to torch 2.14 it is rounded to
`param_dtype` before it is cast to `reduce_dtype`.
"""


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards are on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state are on the host; unsharded parameters on the device.

    On a mesh of CPU ranks nothing changes.

    Args:
        pin_memory: Whether to keep shards and gradients in page-locked memory, so that copies from
            and to the device overlap with compute.

    Raises:
        WrapError: `pin_memory` is a text.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        """Refuse a text, such as one from a command line."""
        refuse_texts(WrapError, pin_memory=self.pin_memory)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one group; the names mean the same as in FSDP2.

    The sharded parameters keep the dtype they were made in (`orig_dtype`), and the optimizer
    steps in it. Their gradients have this dtype, or the one that was set as ``param.grad_dtype``.
    If all dtypes are ``None``, nothing is cast.

    Args:
        param_dtype: Dtype of the unsharded parameters, hence of compute and of the all-gather.
            ``None``: the parameter's own.
        reduce_dtype: Dtype of gradients on the wire. Where shardkit itself adds them (gloo),
            numbers of a dtype narrower than fp32 are added in fp32. ``None``: the dtype that was
            set as ``param.grad_dtype``; else as in the FSDP2 of the installed torch, `param_dtype`
            up to torch 2.14, and the parameter's own dtype from 2.15 on.
        output_dtype: Dtype that floating-point outputs of the module's forward are cast to.
        cast_forward_inputs: Whether to cast floating-point inputs of the module's forward to
            `param_dtype`.
        buffer_dtype: Dtype that floating-point buffers are cast to once, in `fully_shard`.
        param_dtype_override_fn: Function of a parameter, called when the parameter is sharded. If
            it returns the parameter's own dtype, the parameter is gathered and computed in it.
            ``None`` or `param_dtype`: in `param_dtype`. It must answer alike on all ranks.

    Raises:
        WrapError: A dtype is not a real floating-point one; shardkit casts to no other. Or
            `cast_forward_inputs` is a text, or `param_dtype_override_fn` no function.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        """Refuse dtypes that would round gradients or parameters to integers."""
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                continue
            msg = (
                f"MixedPrecisionPolicy: {name} must be a floating-point dtype such as "
                f"torch.bfloat16, or None for no cast, got {dtype!r}."
            )
            raise WrapError(msg)
        refuse_texts(WrapError, cast_forward_inputs=self.cast_forward_inputs)
        refuse_non_functions(WrapError, param_dtype_override_fn=self.param_dtype_override_fn)

    def dtypes_for(
        self, orig_dtype: torch.dtype, grad_dtype: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Return the dtypes (compute, reduce, sharded gradient) of a parameter.

        Only floating-point parameters are cast: complex ones would lose their imaginary part.

        Args:
            orig_dtype: Dtype in which the parameter is stored.
            grad_dtype: Dtype that torch wants of its gradient; None: any.
        """
        if not orig_dtype.is_floating_point:
            return orig_dtype, orig_dtype, orig_dtype
        param_dtype = self.param_dtype or orig_dtype
        is_chosen = grad_dtype not in (None, orig_dtype)
        unset = grad_dtype if is_chosen or REDUCES_AS_STORED else param_dtype
        reduce_dtype = self.reduce_dtype or unset or param_dtype
        return param_dtype, reduce_dtype, grad_dtype or reduce_dtype

    def for_param(self, param: nn.Parameter | None) -> MixedPrecisionPolicy:
        """Return the policy without its function: for one parameter, or (None) for the others.

        Raises:
            WrapError: The function returns another dtype, or something else.
        """
        if self.param_dtype_override_fn is None:
            return self
        dtype = None if param is None else self.param_dtype_override_fn(param)
        if param is not None and dtype not in (None, self.param_dtype, param.dtype):
            msg = (
                f"param_dtype_override_fn returned {dtype!r} for a parameter of shape "
                f"{tuple(param.shape)} in {param.dtype}: a parameter is computed in its own dtype, "
                f"or in param_dtype ({self.param_dtype}). Return one of them, or None."
            )
            raise WrapError(msg)
        if dtype is None or not dtype.is_floating_point:  # Numbers of other kinds are never cast.
            dtype = self.param_dtype
        return replace(self, param_dtype=dtype, param_dtype_override_fn=None)


class BackwardPrefetch(enum.Enum):
    """When backward gathers the group that it needs next.

    PRE: Before the gradients of the current group are computed, on CPU ranks when half of them are.
        Full overlap; two groups in memory.
    POST: After they are computed. Less overlap; one group less in memory.
    NONE: When backward enters the group.
    """

    PRE = "pre"
    POST = "post"
    NONE = "none"


def as_mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """Return a policy of FSDP2 as one of shardkit; one of shardkit is returned as it is."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if all(hasattr(policy, name) for name in _MIXED_PRECISION):
        _refuse_unknown(policy, MixedPrecisionPolicy)
        return MixedPrecisionPolicy(
            **{name: getattr(policy, name) for name in _MIXED_PRECISION},
            param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),
        )
    msg = (
        f"mp_policy takes a MixedPrecisionPolicy of shardkit or of FSDP2, got {policy!r}. Leave it "
        f"out to cast nothing."
    )
    raise WrapError(msg)


def _refuse_unknown(policy: Any, known: type[Any]) -> None:
    """Refuse what a policy of a newer FSDP2 asks for, and shardkit's does not have."""
    kind: Any = type(policy)
    if not kind.__module__.startswith("torch."):  # Users may add fields for themselves.
        return
    default = kind()
    ours = {each.name for each in dataclasses.fields(known)}
    for name in (each.name for each in dataclasses.fields(policy) if each.name not in ours):
        value = getattr(policy, name)
        if value != getattr(default, name):
            msg = (
                f"FSDP2's {kind.__name__} has {name}={value!r}, which this version of "
                f"shardkit does not have. Leave it out."
            )
            raise WrapError(msg)


def as_offload(policy: Any) -> OffloadPolicy:
    """Return a policy of shardkit for one of FSDP2 or shardkit.

    A class means its defaults, and None no offloading, as with FSDP2.
    """
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, type) and policy.__name__ in ("OffloadPolicy", "CPUOffloadPolicy"):
        policy = policy()
    if isinstance(policy, OffloadPolicy):
        return policy
    kinds = {each.__name__ for each in type(policy).__mro__}
    if "CPUOffloadPolicy" in kinds:
        _refuse_unknown(policy, CPUOffloadPolicy)
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)
    if "OffloadPolicy" in kinds:
        return OffloadPolicy()
    msg = (
        f"offload_policy takes an OffloadPolicy or a CPUOffloadPolicy of shardkit or of FSDP2, got "
        f"{policy!r}."
    )
    raise WrapError(msg)


# --- a user's own collectives ---------------------------------------------------------------------


class Comm(Protocol):
    """Interface of your own collectives: it allocates their buffers, like FSDP2's ``Comm``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer that is sent or received."""


class AllGather(Comm, Protocol):
    """Interface of your own all-gather, like FSDP2's ``AllGather``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather the 1-D `input_tensor` of all ranks of a group; return the work, or None."""


class ReduceScatter(Comm, Protocol):
    """Interface of your own reduce-scatter, like FSDP2's ``ReduceScatter``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum `input_tensor` over a process group and scatter it; return the work, or None."""


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """Where the gradient of one parameter lies in this rank's range of a bucket.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter; with tensor parallelism, of this rank's part of it.
        start: First element of the flattened parameter in this range.
        stop: End of these elements; equal to `start` if the range has none.
        offset: Position in the range of the first element.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


class SumAxis(Protocol):
    """The ranks that an `AllReduce` sums over."""

    size: int  # Number of ranks.
    rank: int  # Position of this rank.

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce `tensor` in place; `op` is ``"sum"``, ``"max"``, ``"min"`` or ``"product"``."""


class AllReduce(Protocol):
    """Interface of your own all-reduce over the replicate axis, such as one that compresses.

    It is called outside of autocast. It may have a method ``settle_unused(pieces, unused)``. That
    method is called at the end of a synced backward, once for each bucket that was summed in it.
    ``pieces`` are as in the call. ``unused`` are the names, equal on all ranks, of parameters that
    no rank used in the backward: their sums became no gradient. A function around a `PowerSGD` does
    not pass that call on: then the errors of such parameters are lost.
    """

    def __call__(
        self, tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
    ) -> object:
        """Replace `tensor` by its sum over the axis, with equal bits on all ranks of the axis.

        Args:
            tensor: Gradients of this rank's range of a bucket, 1-D, summed over the shard axis.
            pieces: Pieces in the range, and where they lie; between pieces there may be padding,
                which is zero.
            axis: Ranks to sum over. Their ranges hold the same parameters.
            unit: Factor that turns the sum into the gradient.
        """


# --- settings of a group and of a root ------------------------------------------------------------


@dataclass(slots=True)
class CommSettings:
    """How a group communicates."""

    divide_factor: float | None = None  # Divisor of gradient sums; None: the number of ranks.
    # Part of the division that comes before the sum; "auto": about the square root of the number of
    # ranks; None: the backend decides.
    predivide_factor: float | Literal["auto"] | None = None
    force_sum: bool = False  # Whether the engine may only sum, and not average.
    # Function called with every reduced and divided gradient buffer, which it may change.
    all_reduce_hook: Callable[[Tensor], object] | None = None
    # Stream where an accelerator runs the hook; None: the stream of the reduction, after it.
    all_reduce_hook_stream: Any = None
    all_gather: AllGather | None = None  # Replacement of the all-gather.
    reduce_scatter: ReduceScatter | None = None  # Replacement of the reduce-scatter.
    all_reduce: AllReduce | None = None  # Replacement of the all-reduce over the replicate axis.


@dataclass(slots=True)
class GroupSettings:
    """What users choose for one group."""

    # True, False, None (False for the root, True for other groups), or the number of neighbouring
    # ranks over which the parameters stay sharded until backward.
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True  # Whether to give the memory back after backward.
    sync: bool = True  # Whether to average gradients over the ranks (`set_requires_gradient_sync`).
    # Whether to average over the replicate axis, too (`set_requires_all_reduce`).
    all_reduce: bool = True
    is_last_backward: bool = True  # Whether to wait for all reductions at the end of backward.
    # Whether to take part in the reduction even if no parameter was used.
    reduce_unused: bool = True
    unshard_in_backward: bool = True  # Whether backward needs the parameters.
    # Whether the memory of unsharded parameters stays behind them while they are resharded.
    keep_unsharded_storage: bool = False
    # Whether to take buffers from the allocator of the communication engine.
    comm_memory: bool = False
    separate_reduce: bool = False  # Whether to reduce on a separate process group.
    # Number of reductions in flight at once, on devices where a wait frees their memory.
    max_send_buffers: int = 1
    # Groups (`ParamGroup`) to gather when forward enters; None: what came next last time.
    next_in_forward: Sequence[Any] | None = None
    next_in_backward: Sequence[Any] | None = None  # Groups to gather when backward enters.
    comm: CommSettings = field(default_factory=CommSettings)  # Communication settings of the group.

    def copy(self) -> GroupSettings:
        """Return independent settings for a copy of the group.

        The copy prefetches none of our groups. Its gradients do not go through our all-reduce,
        which may have state of this group.
        """
        comm = replace(self.comm, all_reduce=None)
        return replace(self, next_in_forward=None, next_in_backward=None, comm=comm)

    def stop_prefetching(self, gone: Sequence[Any]) -> None:
        """Leave out groups whose modules were taken out of the model."""
        for name in ("next_in_forward", "next_in_backward"):
            if (chosen := getattr(self, name)) is not None:
                setattr(self, name, [group for group in chosen if group not in gone])


@dataclass(slots=True)
class RootSettings:
    """What users choose for a root."""

    prefetch_in_forward: bool = True  # Whether to gather ahead in forward.
    # Moment when to gather ahead in backward.
    prefetch_in_backward: BackwardPrefetch = BackwardPrefetch.PRE
    # Whether to tie gathers to the inputs of the module entered last, where operators are traced,
    # so that the compiler does not hoist them.
    barrier_in_forward: bool = True
    # Whether to do the same in backward; without it the compiler may merge a gather with that of
    # forward.
    barrier_in_backward: bool = True
    # Whether to run the graph at the end of backward, where operators are traced.
    sync_on_finalization: bool = False
    # Whether only `finalize_backward` waits for reductions, and no backward does.
    finalizes_by_hand: bool = False
    dummy_gathers: bool = False  # Whether gathers move nothing between ranks (`set_debug`).
    dummy_reductions: bool = False  # Whether reductions move nothing between ranks.
    # Text in front of the memory figures printed at each gather, free and reduction; None: print
    # nothing.
    memory_message: str | None = None


def refuse_texts(error: type[ShardkitError], **flags: Any) -> None:
    """Raise an error if a flag is a text, such as ``"no"``, which Python takes for True."""
    for name, value in flags.items():
        if isinstance(value, str):
            msg = f"{name} must be True or False, got {value!r}."
            raise error(msg)


def refuse_non_functions(error: type[ShardkitError], **functions: Any) -> None:
    """Raise an error if an argument that takes a function or None is something else."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            msg = f"{name} must be a function or None, got {reprlib.repr(value)}."
            raise error(msg)


def refuse_non_module(error: type[ShardkitError], model: Any, hint: str = "") -> None:
    """Raise an error if a model is no module, as where arguments were swapped."""
    if not isinstance(model, nn.Module):
        msg = f"model: expected a module, not {type(model).__name__}. {hint}".rstrip()
        raise error(msg)


def as_number(value: Any) -> float:
    """Return a user's value as a number; NaN if it is none, so that every comparison fails."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


# --- the watch over ranks -------------------------------------------------------------------------


@dataclass(slots=True)
class WatchSettings:
    """Settings of this process; `set_watch` says what they mean."""

    ask_after_s: float = 10.0
    ask_unexpected_after_s: float = 2.0
    answer_s: float = 4.0
    silent_after_s: float = 60.0
    timeout_s: float = 1800.0
    compare_values: bool = True
    check_gradients: bool = False

    def update(self, changes: dict[str, Any], names: dict[str, str]) -> None:
        """Take over settings, or none of them if one is invalid.

        Args:
            changes: Values by field. Texts are read as in environment variables.
            names: Names that users know the fields by, for errors.
        """
        found = {
            field.name: read_as(
                flag if field.type == "bool" else seconds,
                names.get(field.name, field.name),
                changes[field.name],
                StateError,
            )
            for field in dataclasses.fields(self)
            if field.name in changes
        }
        for name, value in found.items():
            setattr(self, name, value)

    @classmethod
    def of_environment(cls) -> WatchSettings:
        """Return the settings of the environment: ``SHARDKIT_ASK_AFTER_S``, and so on."""
        names = {field.name: f"SHARDKIT_{field.name.upper()}" for field in dataclasses.fields(cls)}
        settings = cls()
        given = {field: os.environ[name] for field, name in names.items() if name in os.environ}
        settings.update(given, names)
        return settings


watch_settings = WatchSettings.of_environment()


_SHARED_MEMORY = "SHARDKIT_SHARED_MEMORY"


def shares_memory() -> bool:
    """Whether CPU ranks of one host may share memory, as the environment says.

    Raises:
        StateError: The variable says neither yes nor no.
    """
    given = os.environ.get(_SHARED_MEMORY, "1")
    return bool(read_as(flag, _SHARED_MEMORY, given, StateError))


def set_watch(  # noqa: PLR0913 - a setting each
    *,
    ask_after_s: float | None = None,
    ask_unexpected_after_s: float | None = None,
    answer_s: float | None = None,
    silent_after_s: float | None = None,
    timeout_s: float | None = None,
    compare_values: bool | None = None,
    check_gradients: bool | None = None,
) -> None:
    """Choose how the ranks watch each other; the same on every rank.

    A rank that has waited long asks the other ranks where they are, and one of them logs which rank
    they wait for. A run ends in a `RankMismatchError` only if it provably cannot go on. Each
    setting has an environment variable: ``SHARDKIT_ASK_AFTER_S`` for `ask_after_s`, and so on.

    Args:
        ask_after_s: Seconds of a wait after which a rank asks. 10 by default. Choose more with many
            ranks, because all of them answer.
        ask_unexpected_after_s: Seconds of a wait after which a rank asks if earlier steps did not
            predict the collective, or if the rank got an exception. 2 by default.
        answer_s: Seconds that a rank which asks waits for answers. 4 by default.
        silent_after_s: Seconds of one wait after which a rank that has not answered counts as lost,
            if no rank of its host answers either. 60 by default; ``math.inf``: never.
        timeout_s: Seconds after which torch itself ends a collective, for process groups that
            shardkit makes from now on. 1800 by default.
        compare_values: Whether ranks compare samples of parameters: of their values when they were
            sharded, and of values that are loaded or filled later. True by default.
        check_gradients: Whether each backward notes which of this rank's own gradients are not
            finite, for `FSDPModule.check_gradients`. It reads each gradient once more. False by
            default.

    Raises:
        StateError: A value is invalid. Then no setting has changed.
    """
    given = dict(locals())
    watch_settings.update({name: v for name, v in given.items() if v is not None}, {})
