"""What `materialize` refuses, and forwards of what has no values."""

from __future__ import annotations

import typing

import pytest
import torch
from test_materialize import on_meta, sharded
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from recording import recording_mesh
from shardkit import ShardedTensor, StateError, fully_shard, materialize

pytestmark = pytest.mark.helpers


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.table


def test_modules_without_a_way_are_named_before_anything_is_changed() -> None:
    model = sharded(on_meta())
    model.append(on_meta(Bare))
    state = torch.get_rng_state()
    expected = r"no way to give values to '6.weight', '6.table': Bare has no reset_parameters\(\)"
    with pytest.raises(StateError, match=expected):
        materialize(model)
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_in_the_place_of_the_function_is_refused() -> None:
    with pytest.raises(StateError, match=r"got 'cpu'\. .* materialize\(model, device='cpu'\)"):
        materialize(sharded(on_meta()), "cpu")  # type: ignore[arg-type]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0]


def test_parameters_in_lists_have_their_names_and_sharded_modules_their_class() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(on_meta(Scaled), mesh)
    expected = "to 'scales.0', 'scales.1': Scaled has no reset_parameters"
    with pytest.raises(StateError, match=expected):
        materialize(model)


@pytest.mark.parametrize(
    "parametrized", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_parametrizations_need_an_init_fn(parametrized: typing.Any) -> None:
    def init(module: typing.Any) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # Computes the weight from what modules inside hold.
        else:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                nn.init.normal_(tensor)

    def make() -> nn.Module:
        return nn.Sequential(parametrized(nn.Linear(3, 4)))

    mesh, _ = recording_mesh((1,))
    model = fully_shard(on_meta(make), mesh)
    with pytest.raises(StateError, match="have init_fn write the parameters of each Parametriz"):
        materialize(model)
    materialize(model, init)
    assert model(torch.ones(2, 3)).isfinite().all()


@pytest.mark.parametrize("to_nan", [False, True])
def test_what_an_initialization_leaves_out_is_named(to_nan: bool) -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), mesh)

    def init(module: nn.Module) -> None:
        if module is model[0] or to_nan:
            nn.init.ones_(module.bias)
            module.weight.data[1:].fill_(2)
        else:
            module.reset_parameters()

    with pytest.raises(StateError, match=r"'0\.weight' of shape \(2, 2\) leaves elements"):
        materialize(model, init)
    assert isinstance(model[0].weight, ShardedTensor)


def test_buffers_that_stay_on_meta_are_named() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Bare()))
    with pytest.raises(StateError, match=r"still on the meta device .*'1\.table'.* reset_param"):
        materialize(model, lambda m: [p.data.fill_(1) for p in m.parameters(recurse=False)])
    assert not model[1].weight.is_meta


def test_a_buffer_that_stays_on_meta_may_be_held_by_several_modules() -> None:
    model = on_meta(lambda: nn.ModuleList([nn.Linear(2, 2), nn.Module()]))
    model[0].register_buffer("table", torch.empty(3, device="meta"))
    model[1].register_buffer("table", model[0].table)
    with pytest.raises(StateError, match=r"still on the meta device .*'0\.table'"):
        materialize(model)
    assert not model[0].weight.is_meta


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_buffers_of_any_dtype_that_stay_on_meta_are_named(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(3, dtype=dtype, device="meta"), persistent=False)
    with pytest.raises(StateError, match=r"still on the meta device .*'table'"):
        materialize(model)
    with pytest.raises(StateError, match=r"still on the meta device .*'table'"):
        materialize(model, lambda m: m.reset_parameters())


def test_another_shape_is_refused() -> None:
    def init(module: typing.Any) -> None:
        module.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(StateError, match=r"'weight' one of shape \(3,\).* of shape \(2, 2\)"):
        materialize(on_meta(lambda: nn.Linear(2, 2)), init)


def test_an_exception_of_init_fn_names_the_module_and_leaves_it_whole() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(on_meta(lambda: nn.Sequential(nn.Linear(2, 2))), mesh)

    def fail(module: nn.Module) -> None:
        raise KeyError(type(module).__name__)

    with pytest.raises(KeyError) as caught:
        materialize(model, fail)
    assert "initialized '0', a Linear" in caught.value.__notes__[0]
    assert isinstance(model[0].weight, ShardedTensor)


# --- forwards -------------------------------------------------------------------------------------


def test_a_forward_with_buffers_on_meta_names_them() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), Bare()), mesh)
    model[1].register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    for _ in range(2):
        with pytest.raises(StateError, match=r"buffers '1\.table'\. .*shardkit\.materialize"):
            model(torch.ones(1, 3))
    model[1].table = torch.ones(3)
    model(torch.ones(1, 3)).sum().backward()


def test_a_forward_with_ignored_parameters_on_meta_names_them() -> None:
    mesh, _ = recording_mesh((2,))
    layer = on_meta(lambda: nn.Linear(3, 3))
    model = fully_shard(
        nn.Sequential(nn.Linear(3, 3), layer), mesh, ignored_params=set(layer.parameters())
    )
    with pytest.raises(StateError, match=r"'1\.weight', '1\.bias', which no group"):
        model(torch.ones(1, 3))
    materialize(model)
    assert type(layer.weight) is nn.Parameter
    model(torch.ones(1, 3)).sum().backward()


def test_a_forward_names_all_parameters_on_meta() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(on_meta(lambda: nn.Linear(3, 3)), mesh)
    with pytest.raises(StateError, match=r"'weight' of .*materialize\(model\).* So are 'bias'"):
        model(torch.ones(1, 3))
