"""Tensor subclasses that say themselves how they are gathered: 8-bit weights, and two tensors."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from parity import in_turns
from recording import recording_mesh
from reference import Differences, assert_within, full_grads, full_parameters, make_mesh, step_all
from shardkit import WrapError, fully_shard

if typing.TYPE_CHECKING:
    from pathlib import Path

    from workers import Spawn


class Wrapped(Tensor):
    """A weight over a plain tensor; operators work on that."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> typing.Any:
        self = Tensor._make_wrapper_subclass(  # noqa: SLF001 - how subclasses are made
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        self.inner = inner
        return self

    def __init__(self, inner: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: None, size: object, stride: object
    ) -> typing.Any:
        del context, size, stride
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(
        cls, func: typing.Any, types: object, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        def unwrap(value: object) -> object:
            return value.inner if isinstance(value, Wrapped) else value

        args = torch.utils._pytree.tree_map(unwrap, args)  # noqa: SLF001
        kwargs = torch.utils._pytree.tree_map(unwrap, kwargs or {})  # noqa: SLF001
        out = func(*args, **kwargs)
        keeps = (torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy)  # noqa: SLF001
        return cls(out) if func.overloadpacket in keeps else out


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8 bits, with one scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8Gather(Wrapped):
    """Is gathered as 8-bit numbers and one scale per row; computes with what came."""

    calls: typing.ClassVar[list[str]] = []

    def fsdp_pre_all_gather(
        self,
        mesh: typing.Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: typing.Any,
    ) -> tuple[tuple[Tensor, ...], typing.Any]:
        assert mesh.ndim == 1
        if dist.is_initialized():
            assert mesh.size() == dist.get_world_size(mesh.get_group())
        assert len(outer_stride) == len(outer_size) == 2
        assert isinstance(module, nn.Linear)
        assert mp_policy.param_dtype is None
        type(self).calls.append("pre")
        return quantized(self.inner), "metadata"

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: typing.Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> typing.Any:
        assert metadata == "metadata"
        assert param_dtype == torch.float32
        numbers, scale = all_gather_outputs
        type(self).calls.append("post")
        whole = numbers * scale
        if out is None:
            return whole, (whole,)
        out.copy_(whole[: len(out)])
        return None


class PlainGather(Wrapped):
    """Is gathered as it is: old signature, the output is the parameter itself."""

    def fsdp_pre_all_gather(self, mesh: typing.Any) -> tuple[tuple[Tensor, ...], typing.Any]:
        del mesh
        return (self.inner,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: typing.Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> typing.Any:
        del metadata, param_dtype
        (whole,) = all_gather_outputs
        if out is None:
            return whole, (whole,)
        assert out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return None


class StraightThrough(torch.autograd.Function):
    """What the 8-bit gather does to a weight, with the gradient passed through."""

    @staticmethod
    def forward(_: object, weight: Tensor) -> Tensor:
        numbers, scale = quantized(weight)
        return numbers * scale

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        return grad


class Reference(nn.Module):
    """The unsharded model; its second layer's weight is rounded as the gather rounds it."""

    def __init__(self, rows: int, *, rounds: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, rows)
        self.second = nn.Linear(rows, 3)
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        if self.rounds:
            weight = StraightThrough.apply(weight)
        hidden = torch.tanh(nn.functional.linear(x, weight, self.first.bias))
        return self.second(hidden)


class Model(nn.Module):
    """The model that is sharded."""

    def __init__(self, reference: Reference, cls: typing.Any) -> None:
        super().__init__()
        self.first = copy.deepcopy(reference.first)
        self.second = copy.deepcopy(reference.second)
        self.first.weight = nn.Parameter(cls(self.first.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


CLASSES = {"int8": Int8Gather, "plain": PlainGather}


def train(kind: str, rows: int, mesh_shape: tuple[int, ...], optimizer: str) -> Differences:
    torch.manual_seed(0)
    reference = Reference(rows, rounds=kind == "int8")
    model = Model(reference, CLASSES[kind])
    mesh = make_mesh(mesh_shape)
    fully_shard(model.first, mesh)
    fully_shard(model, mesh)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    optimizers = [make(m.parameters(), lr=0.05) for m in (model, reference)]
    differences = Differences()
    for step in range(5):
        parts = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(dist.get_world_size())
        ]
        model(parts[dist.get_rank()]).square().mean().backward()
        reference(torch.cat(parts)).square().mean().backward()
        differences.note_all("grad", full_grads(model), full_grads(reference))
        step_all(optimizers)
    differences.note_all("parameter", full_parameters(model), full_parameters(reference))
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize(
    ("rows", "mesh_shape", "optimizer"),
    # 5: padding rows, and with 4 ranks one that has none.
    in_turns([8, 5], [(1,), (2,), (4,), (2, 2)], ["sgd", "adamw"]),
    ids=str,
)
@pytest.mark.parametrize("kind", CLASSES)
def test_training_equals_training_with_what_the_gather_does(
    spawn: Spawn, kind: str, rows: int, mesh_shape: tuple[int, ...], optimizer: str
) -> None:
    world_size = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    found = spawn(train, world_size, kind, rows, mesh_shape, optimizer)
    tolerance = 2e-6 if optimizer == "sgd" else 2e-5
    assert_within(found, grad=tolerance, parameter=tolerance)


def sharded(cls: typing.Any = Int8Gather) -> tuple[typing.Any, typing.Any]:
    mesh, log = recording_mesh((2,))
    model = Model(Reference(8, rounds=False), cls)
    fully_shard(model.first, mesh)
    return fully_shard(model, mesh), log


def test_eight_bits_travel() -> None:
    model, log = sharded()
    log.clear()
    model(torch.ones(1, 6)).sum().backward()
    # 8 rows of 6 numbers of one byte, 8 scales of four, in bytes; beside them the bias of 8.
    assert ("start all_gather", 8 * 6 + 8 * 4 + 8) in log


def test_the_hooks_are_called_once_for_each_gather() -> None:
    model, log = sharded()
    log.clear()
    Int8Gather.calls.clear()
    for _ in range(3):
        model(torch.ones(1, 6)).sum().backward()
        with torch.no_grad():
            model.first.weight.add_(1)
    gathers = sum(what == "start all_gather" and numel > 8 * 6 for what, numel in log)
    assert gathers >= 3
    assert Int8Gather.calls == ["pre", "post"] * gathers


def test_a_copy_gathers_itself() -> None:
    model, _ = sharded()
    twin = copy.deepcopy(model)
    Int8Gather.calls.clear()
    twin(torch.ones(1, 6)).sum().backward()
    assert Int8Gather.calls
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


class Two(Wrapped):
    """Lies over a tensor of another dtype."""

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> typing.Any:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # noqa: SLF001
        self.inner = inner.to(torch.int8)
        return self

    fsdp_pre_all_gather = fsdp_post_all_gather = lambda *_: None


def test_a_subclass_that_stores_something_else_is_refused_by_name() -> None:
    mesh, _ = recording_mesh((2,))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Two(layer.weight.detach()))
    with pytest.raises(WrapError, match=r"'weight' of shape \(4, 4\).*Two over.*int8"):
        fully_shard(layer, mesh)
    assert type(layer) is nn.Linear


class Unwrapping(Int8Gather):
    """Is lost when it is made again over other tensors."""

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: None, size: object, stride: object
    ) -> typing.Any:
        del context, size, stride
        return inner["inner"]


def test_a_subclass_that_cannot_be_made_again_is_refused_by_name() -> None:
    mesh, _ = recording_mesh((2,))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Unwrapping(layer.weight.detach()))
    with pytest.raises(WrapError, match="of Unwrapping, the class of parameter 'weight'"):
        fully_shard(layer, mesh)


def save_subclass(folder: str) -> dict[str, Tensor]:
    model = make_subclass_model(seed=0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return full_parameters(model)


def load_subclass(folder: str) -> dict[str, Tensor]:
    """Load also where another cut is: its rows are padded otherwise."""
    model = make_subclass_model(seed=7)
    x = torch.ones(2, 6)
    with torch.no_grad():
        before = model(x)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        assert not torch.equal(model(x), before)
    return full_parameters(model)


def make_subclass_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(6, 7)
    model.weight = nn.Parameter(Int8Gather(model.weight.detach()))
    return fully_shard(model, make_mesh((dist.get_world_size(),)), reshard_after_forward=False)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (4, 2)])
def test_checkpoints_hold_the_plain_tensor(
    spawn: Spawn, tmp_path: Path, saved: int, loaded: int
) -> None:
    expected, *_ = spawn(save_subclass, saved, str(tmp_path))
    for parameters in spawn(load_subclass, loaded, str(tmp_path)):
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), name


def write_in_forward(kind: str, fails: bool) -> None:
    """The whole that a forward sees is made of what was gathered, and never goes back."""
    model = Model(Reference(5, rounds=False), CLASSES[kind])

    def write(module: nn.Linear, _: object) -> None:
        with torch.no_grad():
            module.weight.mul_(2)
        if fails:
            raise ValueError

    fully_shard(model)
    handle = model.first.register_forward_pre_hook(write)
    if fails:
        with pytest.raises(ValueError):  # noqa: PT011 - what it says does not matter
            model(torch.ones(1, 6))
        handle.remove()
    model(torch.ones(1, 6))


@pytest.mark.helpers
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_forward_that_writes_is_refused(spawn_errors: Spawn, kind: str, *, fails: bool) -> None:
    for error in spawn_errors(write_in_forward, 2, kind, fails):
        assert error.type_name == "StateError"
        assert "wrote to its parameter 'first.weight', which says itself how" in error.message
        assert "register_buffer" in error.message
