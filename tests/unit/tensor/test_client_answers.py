"""What packages that know FSDP2 ask of a sharded parameter: one test for each question."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import typing

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit
from recording import recording_mesh
from shardkit import ShardedTensor, ShardedTensorError, fully_shard
from shardkit.backends import tensor_parallel_of

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


class Layers(nn.Module):
    """Of 4 ranks some have nothing of the small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(3)
        self.last = nn.Linear(5, 6)
        self.tied = nn.Linear(5, 6, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.first(x)) + self.last(self.first(x))


def sharded_layers(size: int, rank: int) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Layers(), mesh=recording_mesh((size,), rank=rank)[0])


RANKS = [(size, rank) for size in (1, 2, 4) for rank in range(size)]


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_local_tensor_is_the_piece(size: int, rank: int) -> None:
    """`hasattr(p, "_local_tensor")` is how some packages know that they must gather."""
    whole = dict(Layers().named_parameters())
    for name, param in sharded_layers(size, rank).named_parameters():
        local = param._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001
        assert type(local) is Tensor
        assert local.ndim == 1
        assert local.data_ptr() == param.to_local().data_ptr()  # type: ignore[attr-defined]
        assert not hasattr(whole[name], "_local_tensor")


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_storages_tell_parameters_apart(size: int, rank: int) -> None:
    """Also those of one bucket, which lie in one storage, and those of which a rank has nothing."""
    model = sharded_layers(size, rank)
    addresses = {}
    for name, param in model.named_parameters():
        storage = param.untyped_storage()
        addresses[name] = storage.data_ptr()
        local = param.to_local()  # type: ignore[attr-defined]
        if local.numel():
            assert storage.data_ptr() == local.data_ptr()
            assert storage.nbytes() == local.nbytes
    assert 0 not in addresses.values()
    assert len(set(addresses.values())) == len(addresses)


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_storages_show_what_is_one(size: int, rank: int) -> None:
    """In a state dict each name has an object of its own."""
    model = sharded_layers(size, rank)
    state, again = model.state_dict(), model.state_dict()

    def address(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    assert address(state["tied.weight"]) == address(state["last.weight"])
    for name, value in state.items():
        assert address(value) == address(again[name]) == address(value.data)
        if value.to_local().numel():
            assert address(value) != address(value.clone())


def test_the_storage_is_the_memory_of_the_piece() -> None:
    param = next(sharded_layers(2, 0).parameters())
    local = param.to_local()  # type: ignore[attr-defined]
    view = torch.empty(0).set_(param.untyped_storage())
    local.fill_(3.0)
    assert view.tolist() == [3.0] * local.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_storages_of_other_dtypes(dtype: torch.dtype) -> None:
    model = fully_shard(
        nn.Linear(3, 3, bias=False, dtype=dtype), mesh=recording_mesh((2,), rank=1)[0]
    )
    storage = model.weight.untyped_storage()
    assert storage.nbytes() == model.weight.to_local().nbytes  # type: ignore[operator]


def test_a_piece_can_be_put_elsewhere() -> None:
    """Staging in pinned or shared memory, and offloading, put `_local_tensor` there."""
    model = sharded_layers(2, 0)
    state: typing.Any = model.first.weight.detach().clone()  # type: ignore[operator, union-attr]
    elsewhere = torch.full_like(state.to_local(), 2.0)
    state._local_tensor = elsewhere  # noqa: SLF001
    assert type(state) is ShardedTensor
    assert state._local_tensor is elsewhere  # noqa: SLF001
    assert state.to_local().data_ptr() == elsewhere.data_ptr()
    match = r"_local_tensor of sharded 'first\.weight' must be .* \(\d+,\), got \(5, 6\)"
    with pytest.raises(ShardedTensorError, match=match):
        state._local_tensor = torch.ones(5, 6)  # noqa: SLF001


def test_on_meta_there_is_no_address() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    weight = fully_shard(layer, mesh=recording_mesh((2,), rank=1)[0]).weight
    assert weight.is_meta
    assert weight.untyped_storage().data_ptr() == 0
    assert weight.data_ptr() == 0  # type: ignore[operator, union-attr]
    assert weight._local_tensor.is_meta  # type: ignore[operator, union-attr]  # noqa: SLF001


def test_there_is_no_address_of_the_whole() -> None:
    """As of a DTensor: who reads memory there fails, and gets no neighbors of a piece."""
    weight: typing.Any = sharded_layers(1, 0).first.weight
    asked_by_torch = {"__name__": "torch.nn.modules.rnn", "tensors": (weight, weight[1:])}
    assert eval("[t.data_ptr() for t in tensors]", asked_by_torch) == [0, 0]
    last_of_users, last = 2**56 - 1, 2**64 - 1  # On the host, with five levels of pages.
    assert last_of_users < weight.data_ptr() <= weight[-1:].data_ptr() < last
    with pytest.raises(ShardedTensorError, match=r"no storage of the whole.*save_full"):
        weight.storage()


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_addresses_tell_parameters_and_their_views_apart(size: int, rank: int) -> None:
    """Packages find state by them, or tied parameters, or that one tensor is a part of another."""
    model = sharded_layers(size, rank)
    ends = {}
    for name, param in model.named_parameters():
        begin = param.data_ptr()
        ends[begin] = begin + param.nbytes
        assert begin == param.detach().data_ptr() == param.data.data_ptr()
        assert begin == model.state_dict()[name].data_ptr() == param.view(-1).data_ptr()
        assert param.view(-1)[-1].data_ptr() + param.itemsize == ends[begin]
        assert {param.clone().data_ptr(), torch.zeros_like(param).data_ptr()}.isdisjoint([begin])
    begins = sorted(ends)
    assert len(begins) == len(list(model.parameters()))
    assert all(ends[begin] <= after for begin, after in itertools.pairwise(begins))
    state = model.state_dict()
    assert state["tied.weight"].data_ptr() == state["last.weight"].data_ptr()


@pytest.mark.parametrize("write", [safetensors.torch.save_file, safetensors.torch.save])
@pytest.mark.parametrize("is_tied", [False, True])
def test_safetensors_cannot_write_pieces(
    write: Callable[..., object], tmp_path: pathlib.Path, *, is_tied: bool
) -> None:
    """diffusers' `save_pretrained` and huggingface_hub's functions write by it."""
    names = ["last.weight", "tied.weight"] if is_tied else ["first.bias", "norm.weight"]
    state = sharded_layers(4, 3).state_dict()
    target = [tmp_path / "model.safetensors"] if write is safetensors.torch.save_file else []
    with pytest.raises(ShardedTensorError, match=r"no storage of the whole.*save_full"):
        write({name: state[name] for name in names}, *target)
    assert not list(tmp_path.iterdir())


def test_safetensors_cannot_write_a_sharded_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ShardedTensorError, match=r"no storage of the whole.*save_full"):
        safetensors.torch.save_model(sharded_layers(2, 0), str(tmp_path / "model.safetensors"))


def test_a_description_has_no_rows() -> None:
    weight: typing.Any = sharded_layers(2, 0).first.weight
    spec: typing.Any = weight._spec  # noqa: SLF001
    assert (spec.device_mesh, spec.placements) == (weight.device_mesh, weight.placements)
    assert (spec.mesh, spec.shape) == (weight.device_mesh, weight.shape)
    assert not hasattr(spec, "tensor_meta")
    with pytest.raises(AttributeError, match=r"'first\.weight' has no num_shards.*to_local\(\)"):
        _ = spec.num_shards
    with pytest.raises(ShardedTensorError, match=r"'first\.weight' cannot be pickled"):
        pickle.dumps(spec)


# --- isinstance(param, DTensor) -------------------------------------------------------------------


def everything_of(param: Tensor) -> list[Tensor]:
    return [param, param.data, param.detach(), torch.zeros_like(param), param.detach().clone()]


def test_it_is_a_dtensor_while_shardkit_is_installed() -> None:
    weight = typing.cast("Tensor", sharded_layers(2, 0).first.weight)
    assert not any(isinstance(each, DTensor) for each in everything_of(weight))
    with shardkit.install():
        for each in everything_of(weight):
            assert isinstance(each, DTensor)
            assert isinstance(each, ShardedTensor)
            assert type(each) is ShardedTensor
        assert isinstance(weight, nn.Parameter)
        assert not isinstance(nn.Parameter(torch.ones(2)), DTensor)
    assert not any(isinstance(each, DTensor) for each in everything_of(weight))


def shard_more(_: nn.Module) -> None:
    other = fully_shard(nn.Linear(2, 2), mesh=recording_mesh((2,), rank=0)[0])
    assert type(other.weight) is ShardedTensor


CHANGES: list[Callable[[nn.Module], object]] = [
    shard_more,
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to_empty(device="cpu"),
    lambda model: model.load_state_dict(model.state_dict(), assign=True),
    lambda model: model.requires_grad_(requires_grad=False),
    lambda model: pickle.loads(pickle.dumps(model.state_dict())),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("swaps", [False, True])
def test_objects_are_still_swapped(change: Callable[[nn.Module], object], swaps: bool) -> None:
    """`torch.utils.swap_tensors` gives each object the class that the other one says it has."""
    with shardkit.install():
        model = sharded_layers(2, 0)
        before = list(model.parameters())
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            change(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        after = list(model.parameters())
    assert all(type(param) is ShardedTensor for param in after)
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_state_on_meta_gets_memory_of_pieces() -> None:
    """`dcp.load` would make DTensors of rows."""
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    state: typing.Any = fully_shard(layer, mesh=recording_mesh((2,), rank=1)[0]).state_dict()
    with shardkit.install():
        made: typing.Any = planner_helpers._iterate_state_dict(  # noqa: SLF001 - what it calls
            dict(state), pytest.fail, pytest.fail, torch.zeros_like
        )
    assert {type(value) for value in made.values()} == {ShardedTensor}


def test_torch_compiles_what_takes_sharded_tensors() -> None:
    with shardkit.install():
        weight = sharded_layers(2, 0).first.weight.detach()
        halved = torch.compile(lambda x: x * 0.5, backend="eager")(weight)
    assert type(halved) is ShardedTensor
    assert torch.equal(halved.to_local(), weight.to_local() * 0.5)


def test_torch_plans_names_of_sharded_tensors() -> None:
    with shardkit.install():
        state: typing.Any = sharded_layers(2, 0).state_dict()
        made = default_planner._create_default_metadata_only_plan(state)  # noqa: SLF001
    assert [item.index.fqn for item in made.items] == list(state)


def test_placements_are_pickled_without_a_process_group() -> None:
    placements = sharded_layers(2, 0).first.weight.placements
    assert pickle.loads(pickle.dumps(placements)) == placements
    assert copy.deepcopy(placements)[0].spec is placements[0].spec


def test_a_sharded_tensor_is_no_part_of_tensor_parallelism() -> None:
    with shardkit.install():
        assert tensor_parallel_of(sharded_layers(2, 0).first.weight) is None


def test_nothing_of_torch_is_changed_afterwards() -> None:
    before = torch.utils.swap_tensors, planner_helpers._iterate_state_dict  # noqa: SLF001
    from_local = inspect.getattr_static(DTensor, "from_local").__func__
    with shardkit.install():
        assert torch.utils.swap_tensors is not before[0]
        assert inspect.getattr_static(DTensor, "from_local").__func__ is not from_local
    assert before == (torch.utils.swap_tensors, planner_helpers._iterate_state_dict)  # noqa: SLF001
    assert inspect.getattr_static(DTensor, "from_local").__func__ is from_local


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_distribute_tensor_cuts_as_the_parameter_is_cut(size: int, rank: int) -> None:
    """Loaders of whole state dicts call it with what the parameter says of itself."""
    model = sharded_layers(size, rank)
    with shardkit.install():
        from torch.distributed.tensor import distribute_tensor

        for param in model.parameters():
            sharded: typing.Any = param
            whole = torch.arange(float(param.numel())).reshape(param.shape)
            made: typing.Any = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
            assert type(made) is ShardedTensor
            assert made.spec is sharded.spec
            begin, end = sharded.spec.start, sharded.spec.stop
            assert made.to_local().tolist() == [float(i) for i in range(begin, end)]
            assert made.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_distribute_tensor_refuses_placements_of_another() -> None:
    weight: typing.Any = sharded_layers(2, 0).first.weight
    with shardkit.install():
        from torch.distributed.tensor import distribute_tensor

        match = r"which are those of \(5, 6\), for a tensor of shape \(6, 5\)\. Pass the placements"
        with pytest.raises(ShardedTensorError, match=match):
            distribute_tensor(torch.ones(6, 5), weight.device_mesh, weight.placements)
        with pytest.raises(ShardedTensorError, match="which are no tensor's own"):
            distribute_tensor(torch.ones(5, 6), weight.device_mesh, [shardkit.FlatShard()])
    assert weight.placements == (shardkit.FlatShard(),)


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_from_local_joins_pieces(size: int, rank: int) -> None:
    """Optimizers call it with what they computed from the piece."""
    with shardkit.install():
        for param in sharded_layers(size, rank).parameters():
            sharded: typing.Any = param
            piece = sharded.to_local().detach().clone().requires_grad_()
            cut = sharded.device_mesh, sharded.placements
            made: typing.Any = DTensor.from_local(piece, *cut, shape=param.shape, run_check=False)
            assert type(made) is ShardedTensor
            assert made.spec is sharded.spec
            assert made.to_local().data_ptr() == piece.data_ptr()
            (made * 3).to_local().sum().backward()
            assert torch.equal(piece.grad, torch.full_like(piece, 3))


def test_from_local_refuses_what_is_no_piece() -> None:
    weight: typing.Any = sharded_layers(2, 0).first.weight
    cut = weight.device_mesh, weight.placements
    with shardkit.install():
        for other in (torch.ones(5, 6), weight):
            match = r"sharded 'first.weight', whose shard here is \(30,\), for a .* like to_local"
            with pytest.raises(ShardedTensorError, match=match):
                DTensor.from_local(other, *cut)
        with pytest.raises(ShardedTensorError, match="which are no tensor's own"):
            DTensor.from_local(torch.ones(30), cut[0], [shardkit.FlatShard()])
        with pytest.raises(ShardedTensorError, match=r"DTensor.from_local got device_mesh="):
            DTensor.from_local(weight.to_local(), recording_mesh((4,), rank=0)[0], cut[1])


def test_placements_say_that_no_dim_is_cut() -> None:
    """What takes a piece for rows reads `dim`; what asks whether to gather is told so."""
    mesh = recording_mesh((2, 2), rank=1)[0]
    weight = fully_shard(Layers(), mesh=mesh).first.weight
    assert isinstance(weight, ShardedTensor)
    copied, cut = weight.placements
    assert (copied.is_replicate(), copied.is_shard(), copied.is_shard(0)) == (True, False, False)
    # Norms are summed over all axes but those of torch's Replicate.
    assert isinstance(copied, torch.distributed.tensor.Replicate)
    assert len({copied, torch.distributed.tensor.Replicate()}) == 1
    assert type(pickle.loads(pickle.dumps(copied))) is type(copied) is shardkit.Replicate
    assert not isinstance(cut, torch.distributed.tensor.Replicate)
    # Scripts find placements by their class.
    assert isinstance(cut, torch.distributed.tensor.Placement)
    assert not isinstance(cut, torch.distributed.tensor.Shard)
    assert (cut, repr(cut), type(cut)) == (shardkit.FlatShard(), "FlatShard()", shardkit.FlatShard)
    assert (cut.is_replicate(), cut.is_shard(), cut.is_partial()) == (False, True, False)
    assert not hasattr(cut, "dim")
    with pytest.raises(AttributeError, match=r"dim is asked of FlatShard, .* Use full_tensor"):
        _ = cut.dim
    with pytest.raises(ShardedTensorError, match=r"is_shard\(0\) is asked of FlatShard"):
        cut.is_shard(0)


class Asking(TorchDispatchMode):
    """Asks what class a tensor is of, as torch 2.10 and 2.11 do before they call an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_dispatch__(
        self, func: typing.Any, types: object, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        del types
        self.answers.append(isinstance(args[0], DTensor))
        return func(*args, **(kwargs or {}))


def test_under_install_torchs_dispatcher_gets_the_class() -> None:
    with shardkit.install():
        param = sharded_layers(2, 0).get_parameter("last.weight")
        with Asking() as asking:
            torch.neg(param)
        assert isinstance(param, DTensor)
        with torch.inference_mode():
            assert isinstance(param, DTensor)
    assert asking.answers == [False]
