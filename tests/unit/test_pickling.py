"""Pickles of sharded tensors, state dicts, optimizers and modules."""

from __future__ import annotations

import collections
import copy
import copyreg
import gc
import io
import math
import pickle
import typing
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

from recording import recording_mesh
from shardkit import (
    DeviceMesh,
    FSDPModule,
    MeshError,
    MixedPrecisionPolicy,
    ShardedTensor,
    ShardedTensorError,
    StateError,
    _pickling,
    fully_shard,
)
from shardkit._pickling import SavedPiece, reduce_for_process

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Tied(nn.Module):
    """Layers with a group each, an RNN and a tied weight in the root's, a reference upwards."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.rnn = nn.GRU(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.layers[0].owner = (self,)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.rnn(x)[0]) + self.offset


def make(mesh: DeviceMesh, **options: typing.Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.arange(6).view(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(item: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return file


def assert_same_pieces(tensors: typing.Any, expected: typing.Any) -> None:
    for tensor, other in zip(tensors, expected, strict=True):
        assert isinstance(tensor, ShardedTensor)
        assert torch.equal(tensor.to_local(), other.to_local())
        assert tensor.to_local().untyped_storage()._cdata != (  # noqa: SLF001
            other.to_local().untyped_storage()._cdata  # noqa: SLF001
        )


@pytest.mark.parametrize("rank", range(3))
def test_a_state_dict_is_loaded_with_weights_only(rank: int) -> None:
    mesh, log = recording_mesh((3,), rank=rank)
    model = make(mesh)
    optimizer = make_optimizer(model)
    train(model, optimizer)
    log.clear()
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    loaded = torch.load(file, weights_only=True)
    assert log == []
    names = list(model.state_dict())
    assert list(loaded["model"]) == names
    for name, value in loaded["model"].items():
        if name != "offset":
            assert value.device_mesh is mesh
            assert value.shape == model.state_dict()[name].shape
            assert not value.requires_grad
    names.remove("offset")
    expected = [model.state_dict()[name] for name in names]
    assert_same_pieces([loaded["model"][name] for name in names], expected)
    twin = make(mesh)
    twin.load_state_dict(loaded["model"])
    others = make_optimizer(twin)
    others.load_state_dict(loaded["optimizer"])
    assert train(twin, others) == train(model, optimizer)
    assert_same_pieces(twin.parameters(), model.parameters())


def test_a_file_is_as_large_as_the_pieces() -> None:
    """Pieces of one shard are written together, not the shard once for each."""
    mesh, _ = recording_mesh((4,))
    model = fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)]), mesh)
    nbytes = sum(param.to_local().nbytes for param in model.parameters())
    assert nbytes < len(saved(model.state_dict()).getvalue()) < 1.5 * nbytes


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16, "reshard_after_forward": False}])
@pytest.mark.parametrize("shape", [(2,), (2, 2), (1,)], ids=str)
def test_a_module_comes_back_sharded_and_trains_on(
    shape: tuple[int, ...], options: dict[str, typing.Any]
) -> None:
    mesh, log = recording_mesh(shape, rank=math.prod(shape) - 1)
    model = make(mesh, **options)
    model.tokens.weight.decay = False
    optimizer = make_optimizer(model)
    train(model, optimizer)
    model.unshard()
    log.clear()
    twin, others = torch.load(saved((model, optimizer)), weights_only=False)
    assert not [entry for entry in log if "gather" in entry[0]]
    assert isinstance(twin, FSDPModule)
    assert [type(module) for module in twin.modules()] == [type(m) for m in model.modules()]
    assert twin.head.weight is twin.tokens.weight
    assert twin.tokens.weight.decay is False
    assert twin.layers[0].owner[0] is twin
    assert others.param_groups[0]["params"][0] is next(iter(twin.parameters()))
    assert_same_pieces(twin.parameters(), model.parameters())
    assert train(twin, others) == train(model, optimizer)
    logs = []
    for module, its_optimizer in ((model, optimizer), (twin, others)):
        log.clear()
        train(module, its_optimizer)
        logs.append(list(log))
    assert logs[0] == logs[1]
    assert_same_pieces(twin.parameters(), model.parameters())
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks)  # noqa: SLF001
    assert len(twin._forward_hooks) == len(model._forward_hooks)  # noqa: SLF001


def test_options_and_hooks_come_back() -> None:
    mesh, _ = recording_mesh((2,))
    model = make(mesh, reshard_after_forward=False)
    model.layers[1].set_requires_gradient_sync(False)
    model.layers[0].register_forward_hook(note_call)
    twin = pickle.loads(pickle.dumps(model))
    calls.clear()
    train(twin, make_optimizer(twin), steps=1)
    assert len(calls) == 1
    assert twin.memory_stats()["unsynced_grad_nbytes"] > 0
    assert all(isinstance(value, (ShardedTensor, Tensor)) for value in twin.state_dict().values())
    twin.layers[0].unshard()
    assert isinstance(twin.layers[0].state_dict()["weight"], ShardedTensor)


calls: list[nn.Module] = []


def note_call(module: nn.Module, *_: object) -> None:
    calls.append(module)


def test_hooks_made_after_loading_take_no_ones_place() -> None:
    mesh, _ = recording_mesh((2,))
    model = make(mesh)
    handles = [model.layers[0].register_forward_hook(note_call) for _ in range(3)]
    data = pickle.dumps(model)
    before = torch.utils.hooks.RemovableHandle.next_id
    try:
        torch.utils.hooks.RemovableHandle.next_id = 0  # As in a new process.
        twin = pickle.loads(data)
        for _ in range(before):
            twin.layers[0].register_forward_hook(note_call)
        assert len(twin.layers[0]._forward_hooks) == len(handles) + before + 1  # noqa: SLF001
    finally:
        torch.utils.hooks.RemovableHandle.next_id = before


def test_dicts_of_users_keep_their_entries() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, recording_mesh((2,))[0])
    model.labels = dict.fromkeys(model._forward_hooks, "a number of a hook")  # noqa: SLF001
    model.words = collections.defaultdict(list, model.labels)
    model.own_hooks = {"first": 1}
    for copied in (copy.deepcopy(model), torch.load(saved(model), weights_only=False)):
        assert copied.labels == model.labels
        assert copied.words == model.words
        assert copied.own_hooks == model.own_hooks
        assert len(copied._forward_hooks) == 1  # noqa: SLF001


def test_modules_that_share_a_group_share_it_after_loading() -> None:
    mesh, log = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4))
    fully_shard(list(model), mesh, reshard_after_forward=True)
    holder = Chain(model)
    fully_shard(holder, mesh)
    twin = pickle.loads(pickle.dumps(holder))
    logs = []
    for each in (holder, twin):
        log.clear()
        each(torch.ones(2, 3, 4)).sum().backward()
        logs.append(list(log))
    assert logs[0] == logs[1]
    assert len([entry for entry in logs[0] if entry[0] == "start all_gather"]) == 1
    grads = [[param.grad.to_local() for param in each.parameters()] for each in (holder, twin)]
    assert all(torch.equal(grad, other) for grad, other in zip(*grads, strict=True))


class Chain(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))[0]


def test_a_part_is_pickled_by_itself() -> None:
    mesh, _ = recording_mesh((2,))
    model = make(mesh)
    layer = pickle.loads(pickle.dumps(model.layers[1]))
    layer(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in layer.parameters())


def test_a_module_on_meta_comes_back_on_meta() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(nn.Linear(4, 4, device="meta"), mesh)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.weight.is_meta
    twin.to_empty(device="cpu")
    twin(torch.ones(2, 4))


# --- what cannot be loaded ----------------------------------------------------------------------


def test_the_piece_of_another_rank_is_refused() -> None:
    mesh, _ = recording_mesh((2,), rank=1)
    file = saved(make(mesh).state_dict())
    del mesh
    gc.collect()
    other, _ = recording_mesh((2,), rank=0)
    with pytest.raises(
        ShardedTensorError, match=r"shard 1 of .*'tokens.weight'.*position 0.*send fu"
    ):
        torch.load(file, weights_only=True)
    assert other.rank == 0


def test_a_load_without_values_is_refused() -> None:
    """A reader of torch loads so, and then reads the bytes of a whole at the place of a piece."""
    mesh, _ = recording_mesh((2,))
    file = saved(make(mesh).state_dict())
    with FakeTensorMode(), pytest.raises(ShardedTensorError, match=r"'tokens.weight' is loaded un"):
        torch.load(file)


def test_without_such_a_mesh_the_error_says_how_to_make_it() -> None:
    mesh, _ = recording_mesh((2, 9), mesh_dim_names=("replicate", "shard"))
    file = saved(fully_shard(nn.Linear(5, 5), mesh).state_dict())
    del mesh
    gc.collect()
    kept, _ = recording_mesh((3,))
    message = r"'weight' was saved on a mesh of 'cpu' devices of shape \(2, 9\).*init_device_mesh"
    with pytest.raises(MeshError, match=message):
        torch.load(file, weights_only=True)
    assert kept.shape == (3,)


def test_of_several_meshes_the_one_that_is_equal_is_taken() -> None:
    mesh, _ = recording_mesh((4,), mesh_dim_names=("shard",))
    file = saved(fully_shard(nn.Linear(5, 5), mesh).state_dict())
    newer, _ = recording_mesh((4,), mesh_dim_names=("other",))
    assert torch.load(file)["weight"].device_mesh is mesh
    assert newer.mesh_dim_names == ("other",)


def test_parametrized_modules_say_that_torch_does_not_pickle_them() -> None:
    mesh, _ = recording_mesh((2,))
    layer = fully_shard(parametrizations.weight_norm(nn.Linear(4, 4)), mesh)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(layer)
    saved_one = torch.load(saved(layer.state_dict()))
    assert_same_pieces(saved_one.values(), layer.state_dict().values())


def test_shallow_copies_are_refused() -> None:
    mesh, _ = recording_mesh((2,))
    with pytest.raises(StateError, match="deepcopy"):
        copy.copy(fully_shard(nn.Linear(4, 4), mesh))


def test_requires_grad_is_written() -> None:
    mesh, _ = recording_mesh((2,))
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    fully_shard(layer, mesh)
    twin = pickle.loads(pickle.dumps(layer))
    assert (twin.weight.requires_grad, twin.bias.requires_grad) == (True, False)
    assert isinstance(twin.weight, nn.Parameter)
    moment = pickle.loads(pickle.dumps(torch.zeros_like(layer.weight)))
    assert not isinstance(moment, nn.Parameter)


def test_modules_may_hold_the_mesh() -> None:
    mesh, _ = recording_mesh((2, 2))
    layer = nn.Linear(4, 4)
    layer.mesh = mesh
    fully_shard(layer, mesh)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.mesh is mesh
    pickled = pickle.dumps(mesh)
    del mesh, layer, twin
    gc.collect()
    with pytest.raises(MeshError, match="an object that holds a DeviceMesh was saved on a mesh of"):
        pickle.loads(pickled)


# --- to another process of this machine -----------------------------------------------------------


def sent(mesh_shape: tuple[int, ...], rank: int) -> dict[str, typing.Any]:
    """Return how to rebuild what a model's state dict becomes in another process."""
    mesh, _ = recording_mesh(mesh_shape, rank=rank)
    state = {k: v for k, v in make(mesh).state_dict().items() if isinstance(v, ShardedTensor)}
    return {name: reduce_for_process(value) for name, value in state.items()}


def test_without_the_mesh_pieces_can_be_written_to_a_checkpoint() -> None:
    mesh_shape, rank = (2, 3), 4
    reduced = sent(mesh_shape, rank)
    gc.collect()  # The mesh is gone, as it is in another process.
    received = {name: rebuild(*args) for name, (rebuild, args) in reduced.items()}
    mesh, _ = recording_mesh(mesh_shape, rank=rank)
    expected = make(mesh).state_dict()
    num_items = 0
    for name, piece in received.items():
        assert isinstance(piece, SavedPiece)
        items = piece.__create_write_items__("name", piece)
        assert items == expected[name].__create_write_items__("name", expected[name])
        for item in items:
            data = piece.__get_tensor_shard__(item.index)
            assert torch.equal(data, expected[name].__get_tensor_shard__(item.index))
            num_items += 1
        with pytest.raises(ShardedTensorError, match=r"'.+' in a process that has no mesh"):
            piece + 1
    assert num_items > 0


def test_without_the_mesh_a_model_is_refused() -> None:
    """As in a loader's worker that is not forked, whose dataset holds the model."""
    mesh, _ = recording_mesh((3,), rank=1)
    bytes_of_model = bytes(ForkingPickler.dumps([make(mesh)]))
    assert isinstance(pickle.loads(bytes_of_model)[0], FSDPModule)
    mesh, _ = recording_mesh((3,), rank=1)
    bytes_of_model = bytes(ForkingPickler.dumps([make(mesh)]))
    del mesh
    gc.collect()  # The mesh is gone, as it is in another process.
    with pytest.raises(MeshError, match=r"sharded 'weight' was sent to a process that has no mesh"):
        pickle.loads(bytes_of_model)


def test_where_the_mesh_is_pieces_are_sharded_tensors() -> None:
    mesh, _ = recording_mesh((2, 3), rank=4)
    for name, value in make(mesh).state_dict().items():
        if not isinstance(value, ShardedTensor):
            continue
        rebuild, args = reduce_for_process(value)
        received = rebuild(*args)
        assert type(received) is ShardedTensor, name
        assert torch.equal(received.to_local(), value.to_local())
        assert received.spec.mesh == mesh


def test_sending_goes_this_way() -> None:
    assert dispatch_table(ForkingPickler)[ShardedTensor] is reduce_for_process
    assert dispatch_table(pickle.Pickler)[ShardedTensor] is _pickling._reduce_and_note  # noqa: SLF001


def dispatch_table(cls: typing.Any) -> typing.Any:
    return getattr(cls(io.BytesIO()), "dispatch_table", copyreg.dispatch_table)
