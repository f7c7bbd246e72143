"""Random numbers that differ between ranks, inside a region.

XLA's own generator has one state for all devices of a region: each device would drop the same
elements of its part of the batch. Here numbers come from a counter-based generator with a key per
rank: a hash of (key, number of the operator, index of the element). That costs no communication.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit._compat import torch_tensors
from shardkit._errors import StateError
from shardkit._host_values import HostValues
from shardkit._tree import iter_tensors, map_tensors
from shardkit.backends.xla import host_reads, operators

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# --- the order of a graph -------------------------------------------------------------------------


class GraphOrder:
    """The part of `Region` that both modes share."""

    device: torch.device
    gathers_wait = True

    def __init__(self) -> None:
        operators.install()
        self._progress: Tensor | None = None
        self.drawing: Any = None

    def progress(self, tensor: Tensor | None) -> None:
        """See `Region`."""
        self._progress = None if tensor is None else tensor.detach()

    def after_progress(self, parts: list[Tensor]) -> list[Tensor]:
        """See `Region`."""
        if self._progress is None:
            return parts
        copies = [part.clone() for part in parts]
        xm.optimization_barrier_([*copies, self._progress.clone()])
        return copies

    def forget_collectives(self) -> None:
        """See `Region`."""
        torch_xla._XLAC._set_all_reduce_token(str(self.device), None)


# --- random numbers -------------------------------------------------------------------------------

_aten = torch.ops.aten
_FRACTION_BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Random bits that a dtype holds. With more bits rounding could give 1.0, which no draw returns."""
_MOST_BITS = 24
_FACTOR, _SUMMAND, _MAX_STATE = 6364136223846793005, 1442695040888963407, 2**63 - 1
"""Constants of the generator of states: Knuth's (MMIX)."""


def draw_seeds(num: int) -> Tensor:
    """Return 1-D int32 on the host, drawn from the device's generator, whose state moves on.

    The host draws. XLA's own draws would be chained in the graph until the next sync, and each
    evaluation without a sync would be another graph.
    """
    state = xm.get_rng_state()
    xm.set_rng_state((state * _FACTOR + _SUMMAND) & _MAX_STATE)
    generator = torch.Generator().manual_seed(state)
    return torch.randint(2**31 - 1, (num,), dtype=torch.int32, generator=generator)


class DrawApart(TorchDispatchMode):
    """A context in which random operators on XLA tensors draw with this rank's key.

    Draws with a user's generator are the same on all ranks. Operators that draw in unknown ways are
    refused.
    """

    def __init__(self, key: Tensor, count: int = 0, *, may_read: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Whether the host may read tensors, as in a replica; else such reads are refused.
        self._may_read = may_read
        self.key = key  # One int32, different on each rank and for each forward.
        self.count = count  # Number of the first operator.
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Enter this context and that of printing, which removes dispatch modes."""
        if not self._may_read:
            self._contexts.enter_context(host_reads.described())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave both contexts."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def again(self) -> DrawApart:
        """Return a context that repeats the numbers drawn in this one from now on."""
        return DrawApart(self.key, self.count, may_read=self._may_read)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Draw, or run `func` as it is."""
        kwargs = kwargs or {}
        is_sharded = types and any(issubclass(each, HostValues) for each in types)
        if _is_plain(func) and "device" not in kwargs and not is_sharded:
            return func(*args, **kwargs)  # By far the most operators.
        if not self._may_read:
            host_reads.check(func, args, kwargs)
        on_xla = any(arg.device.type == "xla" for arg in iter_tensors((args, kwargs), depth=0))
        wants_xla = on_xla or torch.device(kwargs.get("device") or "cpu").type == "xla"
        if _is_random(func) and wants_xla and not _has_generator(args, kwargs):
            draw = _DRAWS.get(func) or _refuse(func)
            result = draw(self, *args, **kwargs)
        else:
            result = operators.put_right(func, args, kwargs, is_spmd=not self._may_read)
        # Operators without XLA tensors among their arguments come here before views are tracked.
        return result if on_xla else map_tensors(torch_tensors.track_views, result)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1), with the precision of `dtype`, in fp32 or wider."""
        bits = _FRACTION_BITS.get(dtype, _MOST_BITS)
        wide = torch.promote_types(dtype, torch.float32)
        index = torch.arange(math.prod(shape), dtype=torch.int32, device=self.key.device)
        self.count += 1
        key = _mix(_mix(self.key) + self.count * 0x3243F6A9)
        words = _mix(_mix(index * 0x27D4EB2F + key) ^ key)
        numbers = _shift(words, 32 - bits).to(wide) / (1 << bits)
        return numbers.view(tuple(shape))

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return normal numbers (Box-Muller), in fp32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        radius = (-2.0 * (1.0 - self.uniform(shape, wide)).log()).sqrt()
        return radius * (2.0 * math.pi * self.uniform(shape, wide)).cos()

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Return numbers from `low` on and below `high`, in fp64."""
        numbers = self.uniform(shape, torch.float64)
        if high - low > 1 << (_MOST_BITS // 2):  # More bits: all numbers are equally likely.
            numbers = numbers + self.uniform(shape, torch.float64) / (1 << _MOST_BITS)
        return (numbers * (high - low)).floor() + low

    def gumbel(self, shape: Sequence[int]) -> Tensor:
        """Return Gumbel noise: the argmax of logarithms plus this is a draw by their weights."""
        numbers = self.uniform(shape, torch.float32) + 0.5 / (1 << _MOST_BITS)
        return -(-numbers.log()).log()


def _shift(words: Tensor, places: int) -> Tensor:
    """Shift int32 to the right, filling with zeros."""
    return (words >> places) & ((1 << (32 - places)) - 1)


def _mix(words: Tensor) -> Tensor:
    """Mix the bits of int32: the finalizer of MurmurHash3."""
    words = (words ^ _shift(words, 16)) * -0x7A143595
    words = (words ^ _shift(words, 13)) * -0x3D4D51CB
    return words ^ _shift(words, 16)


# --- operators ----------------------------------------------------------------------------------


def _new(numbers: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a draw of a new tensor, of a given size or like another tensor."""

    def draw(self: DrawApart, like: Tensor | Sequence[int], **kwargs: Any) -> Tensor:
        if isinstance(like, Tensor):
            shape, dtype = like.shape, like.dtype
        else:
            shape, dtype = torch.Size(like), torch.get_default_dtype()
        dtype = kwargs.get("dtype") or dtype
        return numbers(self, shape, dtype).to(dtype)

    return draw


def _bernoulli(self: DrawApart, like: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    return (self.uniform(like.shape, torch.float32) < p).to(like.dtype)


def _bernoulli_of(self: DrawApart, p: Tensor, **_: Any) -> Tensor:
    return (self.uniform(p.shape, torch.float32) < p).to(p.dtype)


def _uniform(
    self: DrawApart, like: Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> Tensor:
    return (self.uniform(like.shape, like.dtype) * (high - low) + low).to(like.dtype)


def _normal(self: DrawApart, like: Tensor, mean: float = 0, std: float = 1, **_: Any) -> Tensor:
    return (self.normal(like.shape, like.dtype) * std + mean).to(like.dtype)


def _exponential(self: DrawApart, like: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return (-(1.0 - self.uniform(like.shape, torch.float32)).log() / rate).to(like.dtype)


def _randint(self: DrawApart, *args: Any, **kwargs: Any) -> Tensor:
    *bounds, size = args
    low, high = (0, *bounds)[-2:]
    result: Tensor = self.integers(size, low, high).to(kwargs.get("dtype") or torch.int64)
    return result


def _randint_like(self: DrawApart, like: Tensor, *bounds: int, **kwargs: Any) -> Tensor:
    low, high = (0, *bounds)[-2:]
    return self.integers(like.shape, low, high).to(kwargs.get("dtype") or like.dtype)


def _random(self: DrawApart, like: Tensor, *bounds: int | None, **_: Any) -> Tensor:
    low, high = (0, *bounds)[-2:] if bounds else (0, None)
    if high is None:  # All integers that the dtype holds.
        is_float = like.dtype.is_floating_point
        bits = round(-math.log2(torch.finfo(like.dtype).eps)) + 1 if is_float else 0
        high = (1 << bits) + 1 if is_float else torch.iinfo(like.dtype).max
    return self.integers(like.shape, low or 0, high).to(like.dtype)


def _normal_of(
    self: DrawApart, mean: Any, std: Any = 1.0, size: Sequence[int] = (), **kwargs: Any
) -> Tensor:
    """Draw by means and deviations; each may be a tensor."""
    tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
    shape = torch.broadcast_shapes(*(each.shape for each in tensors)) if tensors else size
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    result: Tensor = (self.normal(shape, dtype) * std + mean).to(dtype)
    return result


def _log_normal(self: DrawApart, like: Tensor, mean: float = 1, std: float = 2, **_: Any) -> Tensor:
    return (self.normal(like.shape, like.dtype) * std + mean).exp().to(like.dtype)


def _cauchy(self: DrawApart, like: Tensor, median: float = 0, sigma: float = 1, **_: Any) -> Tensor:
    angles = math.pi * (self.uniform(like.shape, torch.float32) - 0.5)
    return (angles.tan() * sigma + median).to(like.dtype)


def _geometric(self: DrawApart, like: Tensor, p: float, **_: Any) -> Tensor:
    logs = (1.0 - self.uniform(like.shape, torch.float32)).log()
    return (logs / math.log1p(-p) if p < 1 else logs * 0).ceil().clamp(min=1).to(like.dtype)


def _randperm(self: DrawApart, n: int, **kwargs: Any) -> Tensor:
    return self.uniform((n,), torch.float32).argsort().to(kwargs.get("dtype") or torch.int64)


def _multinomial(
    self: DrawApart,
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    **_: Any,
) -> Tensor:
    logs = weights.float().log()
    if not replacement:
        return (logs + self.gumbel(logs.shape)).topk(num_samples).indices
    *batch, kinds = logs.shape
    return (logs[..., None, :] + self.gumbel((*batch, num_samples, kinds))).argmax(-1)


def _dropout(self: DrawApart, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = self.uniform(x.shape, torch.float32) >= p
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _rrelu(
    self: DrawApart,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    slopes = _uniform(self, x, lower, upper)
    drawn = torch.where(x <= 0, slopes, torch.ones_like(x))
    return x * drawn, drawn


def _rrelu_with_noise(self: DrawApart, x: Tensor, noise: Tensor, *args: Any, **_: Any) -> Tensor:
    result, drawn = _rrelu(self, x, noise, *args)
    noise.copy_(drawn)
    return result


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(self: DrawApart, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target.copy_(draw(self, target, *args, **kwargs))
        return target

    return write


_DRAWS: dict[Any, Callable[..., Any]] = {
    _aten.rand.default: _new(DrawApart.uniform),
    _aten.rand_like.default: _new(DrawApart.uniform),
    _aten.randn.default: _new(DrawApart.normal),
    _aten.randn_like.default: _new(DrawApart.normal),
    _aten.normal_functional.default: _normal,
    _aten.normal_.default: _in_place(_normal),
    _aten.randint.default: _randint,
    _aten.randint.low: _randint,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
    _aten.randperm.default: _randperm,
    _aten.multinomial.default: _multinomial,
    _aten.native_dropout.default: _dropout,
    _aten.rrelu_with_noise.default: _rrelu_with_noise,
    _aten.rrelu_with_noise_functional.default: _rrelu,
}
for _name, _draw in (
    ("bernoulli", _bernoulli),
    ("uniform", _uniform),
    ("exponential", _exponential),
    ("random", _random),
    ("log_normal", _log_normal),
    ("cauchy", _cauchy),
    ("geometric", _geometric),
):
    for _packet, _how in ((_name, _draw), (f"{_name}_", _in_place(_draw))):
        _found = getattr(_aten, _packet)
        _DRAWS |= {
            getattr(_found, overload): _how
            for overload in _found.overloads()
            if not overload.endswith("out")
        }
_DRAWS[_aten.bernoulli.default] = _bernoulli_of
for _overload in ("Tensor_float", "float_Tensor", "Tensor_Tensor", "float_float"):
    _DRAWS[getattr(_aten.normal, _overload)] = _normal_of


@functools.cache
def _is_random(func: Any) -> bool:
    """Whether an operator draws; composite operators arrive here as their parts."""
    takes_generator = "generator" in torch_tensors.argument_names(func)
    is_tagged = torch.Tag.nondeterministic_seeded in func.tags
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (takes_generator or is_tagged) and not func.has_kernel_for_dispatch_key(composite)


def _has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    return any(isinstance(value, torch.Generator) for value in values)


def _refuse(func: Any) -> NoReturn:
    msg = (
        f"{func} inside a forward draws random numbers, and would draw the same on all ranks' "
        f"parts of a batch. Compute them from uniform, normal or exponential numbers, or draw them "
        f"outside and pass them to the model."
    )
    raise StateError(msg)


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether an operator runs as it is, and the host needs no values for it."""
    is_changed = _is_random(func) or operators.is_put_right(func)
    return not is_changed and not host_reads.may_read(func)
