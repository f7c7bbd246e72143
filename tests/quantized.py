"""Stand-ins for quantized weights of other packages, and a model that has adapters beside them.

- `Nibbles`: a wrapper subclass over several tensors, as torchao's: codes of four bits, scales that
  are themselves a wrapper subclass, and a table that all weights share.
- `Registered`: a class of parameters with its scales in an attribute, made known by
  `shardkit.register_parts`.
- `FourBit` and `EightBit`: with the attributes of bitsandbytes' parameters, in layers that keep
  what its layers keep.
"""

from __future__ import annotations

import gc
import types
import typing

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardkit
from models import Batch, Case
from waiting import until

BLOCK = 8  # Neighbouring elements with one scale.
TABLE = torch.linspace(-1, 1, 16)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two codes in each byte, uint8 (numel / 2), and one scale for each block."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    codes = (blocks / scales[:, None]).reshape(-1, 1).sub(TABLE).abs().argmin(dim=1)
    pairs = codes.view(-1, 2).to(torch.uint8)
    return pairs[:, 0] * 16 + pairs[:, 1], scales


def decode(codes: Tensor, scales: Tensor, table: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the weight that is meant."""
    numbers = torch.stack([codes // 16, codes % 16], dim=1).long()
    return (table[numbers].view(-1, BLOCK) * scales[:, None]).view(shape)


class Wrapper(Tensor):
    """A wrapper subclass: operators work on what it means, but those that make another one."""

    names: typing.ClassVar[list[str]] = []

    def __init__(self, parts: dict[str, Tensor], *meant: object) -> None:
        del parts, meant

    @staticmethod
    def __new__(
        cls: type, parts: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> typing.Any:
        device = next(iter(parts.values())).device
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        self.__dict__.update(parts)
        return self

    def meaning(self) -> Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[typing.Any, ...]]:
        return self.names, (tuple(self.shape), self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: typing.Any, size: object, stride: object
    ) -> typing.Any:
        del size, stride
        return cls(parts, *context)

    @classmethod
    def __torch_dispatch__(
        cls, func: typing.Any, types: object, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        whole = args[0] if args else None
        if func is aten.view.default and tuple(args[1]) == tuple(whole.shape):  # DTensor does so.
            return whole.detach()
        if func.overloadpacket in (aten.detach, aten.clone, aten._to_copy):  # noqa: SLF001
            parts = {name: func(getattr(whole, name), **kwargs) for name in whole.names}
            return type(whole)(parts, tuple(whole.shape), whole.dtype)
        args, kwargs = pytree.tree_map_only(Wrapper, lambda w: w.meaning(), (args, kwargs))
        return func(*args, **kwargs)


class Scales(Wrapper):
    """Numbers of 8 bits, and what they are multiplied by, without dims."""

    names: typing.ClassVar[list[str]] = ["numbers", "step"]
    numbers: Tensor
    step: Tensor

    def meaning(self) -> Tensor:
        return self.numbers * self.step

    @classmethod
    def of(cls, scales: Tensor) -> Scales:
        step = scales.max() / 255
        parts = {"numbers": (scales / step).round().to(torch.uint8), "step": step}
        return cls(parts, tuple(scales.shape), torch.float32)


class Nibbles(Wrapper):
    """A weight in 4 bits."""

    names: typing.ClassVar[list[str]] = ["codes", "scales", "table"]
    codes: Tensor
    scales: Scales
    table: Tensor

    def meaning(self) -> Tensor:
        return decode(self.codes, self.scales.meaning(), self.table, tuple(self.shape))

    @classmethod
    def of(cls, weight: Tensor) -> Nibbles:
        codes, scales = encode(weight)
        parts = {"codes": codes, "scales": Scales.of(scales), "table": TABLE}
        return cls(parts, tuple(weight.shape), torch.float32)


class NibblesLinear(nn.Module):
    """Asks for the class of its weight, as layers of such packages do."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(Nibbles.of(weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Nibbles
        assert type(self.weight.scales) is Scales
        return F.linear(x, self.weight)


class Registered(nn.Parameter):
    """Codes of a byte for each element, and one scale for each row in an attribute."""

    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Registered:
        scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self = (weight.detach() / scale).round().to(torch.int8).as_subclass(cls)
        self.scale = scale
        return self

    def __deepcopy__(self, memo: object) -> Registered:
        del memo
        return join(*take_apart(self))

    def meaning(self) -> Tensor:
        return self.as_subclass(Tensor) * self.scale


def take_apart(param: Registered) -> tuple[dict[str, Tensor], None]:
    return {"codes": param.detach().as_subclass(Tensor), "scale": param.scale}, None


def join(parts: dict[str, Tensor], context: None) -> Registered:
    del context
    self = parts["codes"].as_subclass(Registered)
    self.scale = parts["scale"]
    return self


shardkit.register_parts(Registered, take_apart, join)


class RegisteredLinear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Registered.of(weight)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is Registered
        return F.linear(x, self.weight.meaning())


class FourBit(nn.Parameter):
    """With the attributes of bitsandbytes' Params4bit; its scales are quantized once more."""

    quant_state: typing.Any
    bnb_quantized: bool
    module: nn.Module | None

    @classmethod
    def of(cls, weight: Tensor, module: nn.Module, *, quantized: bool = True) -> FourBit:
        state = None
        values = weight.detach()
        if quantized:
            values, scales = encode(weight)
            inner = Scales.of(scales)
            state = types.SimpleNamespace(
                absmax=inner.numbers,
                code=TABLE,
                shape=weight.shape,
                offset=torch.zeros(()),
                state2=types.SimpleNamespace(absmax=inner.step.view(1), code=TABLE, offset=None),
            )
        self = values.as_subclass(cls)
        self.__dict__.update(quant_state=state, bnb_quantized=quantized, module=module)
        self.requires_grad_(requires_grad=False)
        return self

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> FourBit:
        raise NotImplementedError  # Copies are made by the layer.

    def meaning(self) -> Tensor:
        state = self.quant_state
        scales = state.absmax * state.state2.absmax + state.offset
        return decode(self.as_subclass(Tensor), scales, state.code, state.shape)


class FourBitLinear(nn.Module):
    """Keeps the state of its weight, too."""

    def __init__(self, weight: Tensor, *, quantized: bool = True) -> None:
        super().__init__()
        self.weight = FourBit.of(weight, self, quantized=quantized)
        self.quant_state = self.weight.quant_state

    def _save_to_state_dict(self, destination: typing.Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            destination[f"{prefix}weight.absmax"] = state.absmax

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is FourBit
        return F.linear(x, self.weight.meaning())


class EightBit(nn.Parameter):
    """With the attributes of bitsandbytes' Int8Params."""

    CB: Tensor | None
    SCB: Tensor | None
    has_fp16_weights: bool

    @classmethod
    def of(cls, weight: Tensor) -> EightBit:
        scale = weight.detach().abs().amax(dim=1) / 127
        codes = (weight.detach() / scale[:, None]).round().to(torch.int8)
        self = codes.as_subclass(cls)
        self.__dict__.update(CB=codes, SCB=scale, has_fp16_weights=False)
        return self


class EightBitLinear(nn.Module):
    """Takes codes and scales from the parameter in its first forward, and keeps them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = EightBit.of(weight)
        self.state = types.SimpleNamespace(CB=None, SCB=None)

    def _save_to_state_dict(self, destination: typing.Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scale = getattr(self.weight, "SCB", None)
        destination[f"{prefix}SCB"] = self.state.SCB if scale is None else scale

    def _load_from_state_dict(self, state_dict: typing.Any, prefix: str, *args: typing.Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        scale = self.weight.SCB if self.weight.SCB is not None else self.state.SCB
        scale.copy_(state_dict[f"{prefix}SCB"])
        args[3].remove(f"{prefix}SCB")

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is EightBit
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        return F.linear(x, self.state.CB * self.state.SCB[:, None])


LAYERS: dict[str, typing.Any] = {
    "wrapper": NibblesLinear,
    "registered": RegisteredLinear,
    "4 bit": FourBitLinear,
    "8 bit": EightBitLinear,
}


class Adapted(nn.Module):
    """A frozen quantized layer, and a trained adapter of low rank beside it."""

    def __init__(self, layer: typing.Any, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = layer(torch.randn(fan_out, fan_in) / fan_in**0.5)
        self.down = nn.Linear(fan_in, 2, bias=False)
        self.up = nn.Linear(2, fan_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    """Two such layers between plain ones."""

    def __init__(self, kind: str, width: int = 24) -> None:
        super().__init__()
        layer = LAYERS[kind]
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Adapted(layer, 16, width), Adapted(layer, width, 16)])
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def quantized_case(kind: str, width: int = 24) -> Case:
    """Return the case of a model whose weights are quantized in one of the ways."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Model(kind, width)

    def batch(generator: torch.Generator, rows: int = 4) -> Batch:
        return (
            torch.randn(rows, 6, generator=generator),
            torch.randn(rows, 3, generator=generator),
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Case(make, lambda model: list(model.blocks), batch, loss)


def live_nbytes() -> int:
    """Return the bytes of all tensors of this process, each memory once."""
    gc.collect()
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - freed ones are asked as well
        for each in gc.get_objects():
            # `isinstance` asks some objects for their class, which warn then.
            cls = type(each)
            if issubclass(cls, Tensor) and not hasattr(cls, "__tensor_flatten__"):
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def nbytes_at_rest(expected: int) -> int:
    """Return the bytes of all tensors once they are no more than `expected`, or will not be.

    A thread of gloo lets go of a collective's buffers a moment after the wait for it has ended.
    """
    found = 0

    def at_rest() -> bool:
        nonlocal found
        found = live_nbytes()
        return found <= expected

    until(at_rest)
    return found
