"""Random numbers that differ between ranks, inside a region.

XLA's own generator has one state for all devices of a region: each would drop the same elements of
its part of the batch. Here they come from a counter-based generator with a key per rank: a hash of
(key, number of the operator, index of the element), which costs no communication.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, Self

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import _compat
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tree import iter_tensors, map_tensors
from shardkit.backends.xla import host_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten
_FRACTION_BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Random bits that a dtype holds. With more, rounding could give 1.0, which no draw returns."""
_MOST_BITS = 24
_FACTOR, _SUMMAND, _MAX_STATE = 6364136223846793005, 1442695040888963407, 2**63 - 1
"""Of the generator of states: Knuth's (MMIX)."""


def draw_seeds(num: int) -> Tensor:
    """Return 1-D int32 on the host, drawn from the device's generator, which moves on.

    The host draws. XLA's own draws would follow each other in the graph until the next sync: each
    evaluation without a sync would be another graph.
    """
    state = xm.get_rng_state()
    xm.set_rng_state((state * _FACTOR + _SUMMAND) & _MAX_STATE)
    generator = torch.Generator().manual_seed(state)
    return torch.randint(2**31 - 1, (num,), dtype=torch.int32, generator=generator)


class DrawApart(TorchDispatchMode):
    """A context in which random operators on XLA tensors draw with this rank's key.

    Bernoulli (dropout, attention's as well), uniform, normal, exponential and integer draws.
    Others (permutations, multinomial), and those with a generator of the user's, are the same on
    all ranks.

    Args:
        key: One int32, another one on each rank; also for each forward.
        count: Number of the first operator.
        may_read: The host may read tensors, as a replica's; else see `host_reads`.

    Attributes:
        key: As given.
        count: Number of the next operator.
    """

    def __init__(self, key: Tensor, count: int = 0, *, may_read: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._may_read = may_read
        self.key = key
        self.count = count
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Enter, also the context of printing, which takes dispatch modes away."""
        if not self._may_read:
            self._contexts.enter_context(host_reads.described())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave both."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def again(self) -> DrawApart:
        """Return a context that repeats what is drawn in this one from now on."""
        return DrawApart(self.key, self.count, may_read=self._may_read)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Draw, or run `func` as it is."""
        kwargs = kwargs or {}
        if _is_plain(func) and "device" not in kwargs and ShardedTensor not in types:
            return func(*args, **kwargs)  # By far the most.
        if not self._may_read:
            host_reads.check(func, args, kwargs)
        on_xla = any(arg.device.type == "xla" for arg in iter_tensors((args, kwargs), depth=0))
        draw = _DRAWS.get(func)
        wants_xla = on_xla or torch.device(kwargs.get("device") or "cpu").type == "xla"
        if draw is not None and wants_xla and kwargs.get("generator") is None:
            result = draw(self, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        # What has no XLA tensor among its arguments comes here before views are tracked.
        return result if on_xla else map_tensors(_compat.track_views, result)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1), as fine as `dtype` holds, in fp32 or wider."""
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


def _shift(words: Tensor, places: int) -> Tensor:
    """Shift int32 to the right, zeros in."""
    return (words >> places) & ((1 << (32 - places)) - 1)


def _mix(words: Tensor) -> Tensor:
    """Mix the bits of int32: the finalizer of MurmurHash3."""
    words = (words ^ _shift(words, 16)) * -0x7A143595
    words = (words ^ _shift(words, 13)) * -0x3D4D51CB
    return words ^ _shift(words, 16)


# --- operators ----------------------------------------------------------------------------------


def _new(numbers: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a draw of a new tensor, of a size or like another."""

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
    numbers = (self.uniform(size, torch.float64) * (high - low)).floor() + low
    result: Tensor = numbers.to(kwargs.get("dtype") or torch.int64)
    return result


def _in_place(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(self: DrawApart, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target.copy_(draw(self, target, *args, **kwargs))
        return target

    return write


_DRAWS: dict[Any, Callable[..., Tensor]] = {
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.default: _bernoulli_of,
    _aten.bernoulli_.float: _in_place(_bernoulli),
    _aten.rand.default: _new(DrawApart.uniform),
    _aten.rand_like.default: _new(DrawApart.uniform),
    _aten.uniform.default: _uniform,
    _aten.uniform_.default: _in_place(_uniform),
    _aten.randn.default: _new(DrawApart.normal),
    _aten.randn_like.default: _new(DrawApart.normal),
    _aten.normal_functional.default: _normal,
    _aten.normal_.default: _in_place(_normal),
    _aten.exponential.default: _exponential,
    _aten.exponential_.default: _in_place(_exponential),
    _aten.randint.default: _randint,
    _aten.randint.low: _randint,
}


@functools.cache
def _is_plain(func: Any) -> bool:
    """Whether an operator does not draw, and the host needs no values for it."""
    return func not in _DRAWS and not host_reads.may_read(func)
