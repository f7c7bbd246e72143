"""`load_state_dict` of sharded models: from pieces, from whole tensors, also with assign."""

from __future__ import annotations

import typing

import pytest
import torch
from recorded import MLP, Recorded, fail
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator


StateDict = dict[str, Tensor]
SHARDED_NAME = "layers.0.linear.weight"


@pytest.fixture(params=[False, True], ids=["torch's default", "swap_tensors"], autouse=True)
def _conversion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways in which torch may set parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def other_values(dtype: torch.dtype = torch.float32) -> tuple[StateDict, Recorded]:
    """Return whole tensors that differ from a new model's, and a model that holds them sharded."""
    whole: StateDict = {}

    def change(model: MLP) -> None:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.randn(param.shape))
                whole[name] = param.detach().to(dtype, copy=True)

    torch.manual_seed(7)
    return whole, Recorded(rank=1, prepare=change)


def from_whole(whole: StateDict, sharded: StateDict) -> StateDict:
    del sharded
    return whole


def from_pieces(whole: StateDict, sharded: StateDict) -> StateDict:
    return {name: value.to(whole[name].dtype) for name, value in sharded.items()}


def from_both(whole: StateDict, sharded: StateDict) -> StateDict:
    pieces = from_pieces(whole, sharded)
    return {name: (whole if i % 2 else pieces)[name] for i, name in enumerate(whole)}


def from_parameters(whole: StateDict, sharded: StateDict) -> StateDict:
    """As a state dict made with ``keep_vars=True`` holds them."""
    return {name: nn.Parameter(value) for name, value in from_both(whole, sharded).items()}


def assert_holds(model: nn.Module, whole: StateDict, dtype: torch.dtype) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, ShardedTensor), name
        assert param.dtype == param.to_local().dtype == dtype
        expected = param.spec.slice_full(whole[name]).to(dtype)
        assert torch.equal(param.to_local(), expected), name


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", [from_whole, from_pieces, from_both, from_parameters])
def test_values_are_loaded_into_the_same_parameter_objects(
    source: Callable[[StateDict, StateDict], StateDict], dtype: torch.dtype, *, assign: bool
) -> None:
    whole, other = other_values(dtype)
    recorded = Recorded(rank=1)
    optimizer = torch.optim.SGD(recorded.model.parameters(), lr=0.1)
    before = list(recorded.model.parameters())
    before[0].decay = False
    recorded.step()
    recorded.log.clear()
    state_dict = source(whole, other.model.state_dict())
    result = recorded.model.load_state_dict(state_dict, assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert recorded.log == [], "nothing is sent"
    dtype = dtype if assign else torch.float32
    assert_holds(recorded.model, whole, dtype)
    assert list(map(id, recorded.model.parameters())) == list(map(id, before))
    assert before[0].decay is False
    # Nothing is shared with what was loaded, and training goes on.
    whole = {name: value.clone() for name, value in whole.items()}
    for value in state_dict.values():
        value.data.zero_()
    assert_holds(recorded.model, whole, dtype)
    optimizer.zero_grad()
    recorded.model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    for param in before:
        assert param.grad.dtype == dtype
        assert torch.equal(
            param.to_local(),
            param.spec.slice_full(whole[param.spec.name]).to(dtype) - 0.1 * param.grad.to_local(),
        )


def test_an_own_state_dict_shares_memory_and_loads_into_itself() -> None:
    recorded = Recorded()
    state_dict = recorded.model.state_dict()
    before = {name: value.to_local().clone() for name, value in state_dict.items()}
    for name, param in recorded.model.named_parameters():
        assert state_dict[name].to_local().data_ptr() == param.to_local().data_ptr()
        assert not state_dict[name].requires_grad
    recorded.model.load_state_dict(state_dict)
    recorded.model.load_state_dict(state_dict, assign=True)
    for name, param in recorded.model.named_parameters():
        assert torch.equal(param.to_local(), before[name])
    recorded.step()
    assert recorded.model.state_dict(keep_vars=True)["scale"] is recorded.model.scale


@pytest.mark.parametrize("assign", [False, True])
def test_missing_and_unexpected_names(*, assign: bool) -> None:
    whole, _ = other_values()
    recorded = Recorded(rank=1)
    kept = recorded.model.scale.to_local().clone()
    given = {name: value for name, value in whole.items() if name != "scale"}
    given["nobody"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*scale.*Unexpected|Unexpected.*scale"):
        recorded.model.load_state_dict(given, assign=assign)
    result = recorded.model.load_state_dict(given, strict=False, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == (["scale"], ["nobody"])
    assert torch.equal(recorded.model.scale.to_local(), kept)
    assert_holds(recorded.model, {**whole, "scale": recorded_scale(kept)}, torch.float32)


def recorded_scale(piece: Tensor) -> Tensor:
    """Return the whole of `Recorded`'s scale, of which rank 1 of 4 holds nothing or a part."""
    whole = torch.ones(4)
    assert piece.numel() == 0 or torch.equal(piece, whole[: piece.numel()])
    return whole


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_a_wrong_shape_is_named_and_changes_nothing_of_it(*, assign: bool, strict: bool) -> None:
    whole, _ = other_values()
    recorded = Recorded(rank=1)
    param = recorded.model.layers[0].linear.weight
    kept = param.to_local().clone()
    whole[SHARDED_NAME] = torch.ones(4, 16)
    message = rf"size mismatch for {SHARDED_NAME}: .*\[4, 16\].*\[8, 8\]"
    with pytest.raises(RuntimeError, match=message):
        recorded.model.load_state_dict(whole, assign=assign, strict=strict)
    assert recorded.model.layers[0].linear.weight is param
    assert torch.equal(param.to_local(), kept)


def test_parts_of_one_bucket_must_keep_one_dtype() -> None:
    recorded = Recorded()
    linear = recorded.model.layers[0].linear
    linear.load_state_dict({"weight": torch.ones(8, 8).bfloat16()}, strict=False, assign=True)
    with pytest.raises(Exception, match=r"'layers.0.linear.bias' is now torch.float32"):
        recorded.run()


@pytest.mark.parametrize("assign", [False, True])
def test_a_part_is_loaded_while_its_parameters_are_unsharded(*, assign: bool) -> None:
    recorded = Recorded(reshard_after_forward=False)
    recorded.step()
    layer = recorded.model.layers[1]
    layer.unshard()
    layer.linear.load_state_dict(
        {"weight": torch.full((16, 8), 2.0), "bias": torch.zeros(16)}, assign=assign
    )
    assert isinstance(layer.linear.weight, ShardedTensor)
    assert (layer.linear.weight.to_local() == 2).all()
    layer.unshard()
    own = layer.linear.weight.detach().view(-1)[: 16 * 8 // 4]
    assert (own == 2).all(), "the gathered copy was stale"


def test_loading_into_meta_without_assign_is_said_by_torch() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(nn.Linear(4, 4, device="meta"), mesh)
    with pytest.warns(UserWarning, match=r"meta parameter.*assign=True"):
        model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert model.weight.is_meta


@pytest.mark.parametrize("source", [from_whole, from_pieces, from_both])
def test_assign_materializes_what_is_on_meta(
    source: Callable[[StateDict, StateDict], StateDict],
) -> None:
    whole, other = other_values()
    recorded = Recorded(rank=1, prepare=lambda model: model.to("meta"))
    assert all(param.is_meta for param in recorded.model.parameters())
    recorded.model.load_state_dict(source(whole, other.model.state_dict()), assign=True)
    assert_holds(recorded.model, whole, torch.float32)
    recorded.step()
    assert_holds(recorded.model, whole, torch.float32)


def test_a_state_dict_in_a_forward_leaves_the_forward_alone() -> None:
    recorded = Recorded()
    seen = []

    def save(module: nn.Module, *_: object) -> None:
        seen.append(recorded.model.state_dict())
        seen.append(module.state_dict())

    for layer in recorded.model.layers:
        layer.linear.register_forward_pre_hook(save)
    recorded.step()
    assert len(seen) == 6
    assert all(isinstance(value, ShardedTensor) for saved in seen for value in saved.values())


def test_a_failed_forward_leaves_nothing_behind_in_a_parts_state_dict() -> None:
    recorded = Recorded(reshard_after_forward=False)
    hook = recorded.model.layers[2].linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        recorded.run()
    hook.remove()
    part = recorded.model.layers[2].linear.state_dict()
    assert all(isinstance(value, ShardedTensor) for value in part.values())
