"""How to show an optimizer's state of a 1-D tensor: one number for each element, by names.

Most optimizers keep their state in this form. Some keep codes, with a scale for each block:
torchao's in a tensor subclass, bitsandbytes' in three plain tensors. Such state is shown decoded to
fp32, and encoded again when it is put back. If the blocks are the same, so are the codes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from shardkit._compat import torch_autograd
from shardkit._errors import OptimizerError
from shardkit._params.state_dicts import leaves_of, map_leaves
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.device import own_random_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer


# --- numbers coded in blocks ----------------------------------------------------------------------
#
# The packages that keep such state have their own functions. If the largest number of a block is
# negative, they use it as the scale, although the tables end before -1. Encoded twice, the block
# shrinks, by a ninth with 4 bits. Here the scale is the least one that keeps all numbers within the
# table, so that decoded numbers are encoded to the same codes.

_SMALLEST_SCALE = 1e-12


def encode(values: Tensor, table: Tensor, block_numel: int) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, one for each value; and scales, fp32, one for each block.

    Args:
        values: A tensor of any shape; the last block may be short.
        table: Numbers from -1 to 1, ascending, at most 256.
        block_numel: Number of elements of a block.
    """
    flat = values.float().reshape(-1)
    padding = -flat.numel() % block_numel
    blocks = F.pad(flat, (0, padding)).view(-1, block_numel)
    below = blocks.amin(1) / table[0].clamp(max=-_SMALLEST_SCALE)  # Tables of squares are positive.
    scales = torch.maximum(blocks.amax(1) / table[-1], below).clip(_SMALLEST_SCALE)
    codes, changed = _encode_blocks(blocks, table, scales)
    inexact = changed.nonzero()[:, 0]
    for end in (math.inf, 0.0):  # Division rounds, so the first scale may be the next number.
        other = torch.nextafter(scales[inexact], torch.full_like(scales[inexact], end))
        other_codes, other_changed = _encode_blocks(blocks[inexact], table, other)
        is_better = other_changed < changed[inexact]
        better = inexact[is_better]
        scales[better], changed[better] = other[is_better], other_changed[is_better]
        codes[better] = other_codes[is_better]
    return codes.view(-1)[: flat.numel()], scales


def _encode_blocks(blocks: Tensor, table: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, and the number of values per block that decode to another value."""
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales[:, None], between)
    return codes.to(torch.uint8), (table[codes] * scales[:, None] != blocks).sum(1)


def decode(codes: Tensor, table: Tensor, scales: Tensor, block_numel: int) -> Tensor:
    """Return the decoded numbers, fp32, in the shape of the codes."""
    flat = table[codes.reshape(-1).long()]
    of_each = scales.repeat_interleave(block_numel)[: flat.numel()]
    return (flat * of_each).view(codes.shape)


# --- codecs ---------------------------------------------------------------------------------------

_MIN_CODED_NUMEL = 4096  # Least size of a tensor that torchao and bitsandbytes encode.


class Codec:
    """The codec for optimizers that keep one number for each element."""

    # Number of elements that share a scale; None: nothing is encoded.
    block_numel: int | None = None
    min_numel = 0  # Least size of a parameter that is encoded.

    def __init__(self, probe: Optimizer) -> None:
        self._name = type(probe).__name__
        # Whether the entries of the state are known without a trial step.
        self.is_known = type(probe).__module__.startswith("torch.optim.")

    def show(self, entries: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """Return the state of `like` in shown form: tensors of its shape, and numbers."""
        self.check(entries, like)

        def decoded(leaf: Any) -> Any:
            return self._decoded(leaf) if _is_elementwise(leaf) else leaf

        return {name: map_leaves(value, decoded) for name, value in entries.items()}

    def check(self, entries: Mapping[str, Any], like: Tensor) -> None:
        """Raise if the state has an entry of another shape than the tensor's."""
        leaves = ((name, leaf) for name, value in entries.items() for leaf in leaves_of(value))
        for name, value in leaves:
            if _is_elementwise(value) and value.shape != like.shape:
                msg = (
                    f"{self._name} keeps {name!r} of shape {tuple(value.shape)} for {like.numel()} "
                    f"elements: not one number for each. It cannot run on shards of parameters. "
                    f"Give the optimizer the sharded parameters themselves."
                )
                raise OptimizerError(msg)

    def put(
        self, shown: Mapping[str, Any], fresh: Mapping[str, Any] | None, like: Tensor
    ) -> dict[str, Any]:
        """Return the optimizer's own state for a shown one.

        Args:
            shown: State that `show` returned, of any dtype; its tensors are used if possible.
            fresh: State of a first step, which is overwritten; None: it is not needed.
            like: The tensor that the state belongs to.
        """
        entries = {} if fresh is None else dict(fresh)
        for name, value in shown.items():
            target = entries.get(name)
            if _is_elementwise(value):
                entries[name] = self._coded(value, target, like)
            else:
                entries[name] = _number_like(value, target)
        return entries

    def _decoded(self, value: Tensor) -> Tensor:
        if type(value) is Tensor:
            return value if self.block_numel is None else value.float()
        return torch.empty(value.shape, dtype=torch.float32, device=value.device).copy_(value)

    def _coded(self, value: Tensor, target: Any, like: Tensor) -> Tensor:
        if not isinstance(target, Tensor):
            return value.to(like.dtype) if value.is_floating_point() else value
        return value.to(target.dtype)


class SubclassCodec(Codec):
    """The codec for torchao's optimizers, whose encoded state is a tensor subclass."""

    min_numel = _MIN_CODED_NUMEL

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self.block_numel = int(probe.block_size)

    def _coded(self, value: Tensor, target: Any, like: Tensor) -> Tensor:
        if type(target) is Tensor or not isinstance(target, Tensor):
            return super()._coded(value, target, like)
        table = getattr(target, "qmap", None)
        if table is None:  # fp8 needs no table; it is symmetric.
            return target.copy_(value)
        coded: Any = target
        codes, scales = encode(value, table, coded.block_size)
        if coded.codes.numel() < codes.numel():  # 4 bits: the first code is in the upper half.
            codes = (codes[::2] << 4) | codes[1::2]
        coded.codes.copy_(codes.view(coded.codes.shape))
        coded.scale.copy_(scales)
        return target


class BitsAndBytesCodec(Codec):
    """The codec for bitsandbytes' optimizers: ``state1``, and if encoded ``qmap1``, ``absmax1``.

    The entries are shown under the names that torch's optimizers use.
    """

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        names = _NAMES.get(getattr(probe, "optimizer_name", ""), ("state1", "state2"))
        self._names = dict(zip(names, ("state1", "state2"), strict=False))
        if probe.args.optim_bits == 8:  # noqa: PLR2004 - the only other one is 32
            self.block_numel = 256
            self.min_numel = probe.args.min_8bit_size

    def show(self, entries: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        plain = dict(entries)
        for number in (1, 2):
            qmap, absmax = plain.pop(f"qmap{number}", None), plain.pop(f"absmax{number}", None)
            if absmax is not None and self.block_numel is not None:
                codes = plain[f"state{number}"]
                plain[f"state{number}"] = decode(codes, qmap, absmax, self.block_numel)
        for name, own in self._names.items():
            if own in plain:
                plain[name] = plain.pop(own)
        return super().show(plain, like)

    def put(
        self, shown: Mapping[str, Any], fresh: Mapping[str, Any] | None, like: Tensor
    ) -> dict[str, Any]:
        assert fresh is not None
        plain: dict[str, Any] = {}
        for name, value in shown.items():
            own = self._names.get(name, name)
            number = own.removeprefix("state")
            if self.block_numel is None or f"absmax{number}" not in fresh:
                plain[own] = value
            else:
                codes, scales = encode(value, fresh[f"qmap{number}"], self.block_numel)
                fresh[own].copy_(codes.view(fresh[own].shape))
                fresh[f"absmax{number}"].copy_(scales)
        return super().put(plain, fresh, like)

    def check(self, entries: Mapping[str, Any], like: Tensor) -> None:
        of_blocks = ("qmap", "absmax")  # Tables and scales have other shapes.
        super().check({k: v for k, v in entries.items() if not k.startswith(of_blocks)}, like)


_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "momentum": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "rmsprop": ("square_avg",),
    "adagrad": ("sum",),
}


def codec_of(probe: Optimizer) -> Codec:
    """Return the codec for the state of an optimizer like `probe`."""
    packages = {base.__module__.partition(".")[0] for base in type(probe).__mro__}
    if "bitsandbytes" in packages:
        return BitsAndBytesCodec(probe)
    if "torchao" in packages and getattr(probe, "block_size", 0) not in (0, float("inf")):
        return SubclassCodec(probe)
    return Codec(probe)


def fresh_state(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    like: Tensor,
) -> dict[str, Any]:
    """Return the state that the class makes for a tensor in a step with zero gradients.

    The values of the tensor are zeros, too. Takes memory for two such tensors during the step.
    """
    scratch = torch.nn.Parameter(torch.zeros_like(like))
    scratch.grad = torch.zeros_like(like)
    made = optimizer_class([{**settings, "params": [scratch]}], **options)
    with own_random_numbers(like.device):
        torch_autograd.step_without_global_hooks(made)
    found: dict[str, Any] = made.state[scratch]
    return found


def is_number(value: object) -> bool:
    """Whether an entry of state is one number for all elements, as a tensor or not."""
    # A sharded tensor without dims is the state of a parameter without dims.
    return not isinstance(value, Tensor) or (value.ndim == 0 and type(value) is not ShardedTensor)


def _is_elementwise(value: object) -> TypeGuard[Tensor]:
    return not is_number(value)


def _number_like(value: Any, target: Any) -> Any:
    """Return a number in the form in which an optimizer keeps it."""
    if isinstance(target, Tensor):
        return torch.as_tensor(value, dtype=target.dtype).to(target.device, copy=True)
    if isinstance(value, Tensor):
        return type(target)(value.item()) if isinstance(target, (int, float)) else value.clone()
    return value
