"""Models made on the meta device: sharded there, given memory and values afterwards."""

from __future__ import annotations

import copy
import typing
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recording import recording_mesh
from shardkit import ShardedTensor, StateError, fully_shard
from shardkit._settings import watch_settings

if typing.TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, DEPTH, RANKS = 32, 6, 4


def make_model() -> nn.Sequential:
    """Make an embedding with padding, layers and a head."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(nn.Embedding(7, WIDTH, padding_idx=3), *layers, nn.Linear(WIDTH, 5))


def shard(model: nn.Sequential, rank: int = 0, world_size: int = RANKS) -> nn.Sequential:
    mesh, _ = recording_mesh((world_size,), rank=rank)
    for layer in model[1:-1]:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def sharded_on_meta(rank: int = 0, world_size: int = RANKS) -> nn.Sequential:
    with torch.device("meta"):
        model = make_model()
    return shard(model, rank, world_size)


def reset_parameters(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def assert_equal_pieces(model: nn.Module, whole: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert param.device.type == "cpu"
        assert torch.equal(param.to_local(), param.spec.slice_full(expected.detach())), name


def step(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.arange(6)).square().mean()
    loss.backward()
    return loss


def test_parameters_are_sharded_on_meta() -> None:
    model = sharded_on_meta()
    for param in model.parameters():
        assert isinstance(param, ShardedTensor)
        assert param.is_meta
        assert param.to_local().is_meta
    assert [tuple(p.shape) for p in model.parameters()] == [
        tuple(p.shape) for p in make_model().parameters()
    ]


@pytest.mark.parametrize(
    "use", [lambda model: model(torch.ones(1)), lambda model: model[1].unshard()]
)
def test_use_before_materialization_names_the_parameter_and_the_remedy(
    use: Callable[[nn.Module], object],
) -> None:
    model = sharded_on_meta()
    for _ in range(2):
        with pytest.raises(StateError, match=r"weight' of .* on the meta device.*to_empty\(.*cpu"):
            use(model)


def test_one_left_on_meta_is_named() -> None:
    model = sharded_on_meta()
    for name, module in model.named_modules():
        if name != "2.1":
            module.to_empty(device="cpu", recurse=False)
    with pytest.raises(StateError, match=r"'2\.1\.weight' of '2' is on the meta device"):
        step(model)
    model[2][1].to_empty(device="cpu")
    reset_parameters(model)
    step(model)


def test_one_that_was_replaced_is_told_apart_from_one_without_values() -> None:
    model = sharded_on_meta()
    model[2][1].weight = nn.Parameter(torch.ones(model[2][1].weight.shape))
    init_at_once(model)
    expected = r"'weight' of .* is no longer the parameter '1\.weight'.* by copy_\(\)"
    with pytest.raises(StateError, match=expected):
        step(model)


def init_at_once(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    reset_parameters(model)


def init_module_by_module(model: nn.Module) -> None:
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def init_by_apply(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


@pytest.mark.parametrize("init", [init_at_once, init_module_by_module, init_by_apply])
@pytest.mark.parametrize("rank", range(RANKS))
def test_values_are_those_of_the_plain_model(init: Callable[[nn.Module], None], rank: int) -> None:
    """Of the same seed, initialized in the same order."""
    whole = make_model()
    torch.manual_seed(3)
    reset_parameters(whole)
    model = sharded_on_meta(rank)
    torch.manual_seed(3)
    init(model)
    assert_equal_pieces(model, whole)
    step(model)
    assert_equal_pieces(model, whole)


def test_an_optimizer_made_on_meta_trains() -> None:
    model = sharded_on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    init_at_once(model)
    before = [param.to_local().clone() for param in model.parameters()]
    step(model)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.grad is not None
        assert param.to_local().numel() == 0 or not torch.equal(param.to_local(), old)


def test_pieces_lie_end_to_end_after_materialization() -> None:
    """List operators of optimizers run on whole shards then; no second copy is left."""
    model = sharded_on_meta()
    model.to_empty(device="cpu")
    for param in model.parameters():
        assert param.flat is not None
        assert param.to_local().untyped_storage().data_ptr() == param.flat.data_ptr()


def test_deep_copies_on_meta_are_independent() -> None:
    model = sharded_on_meta()
    twin = copy.deepcopy(model)
    init_at_once(twin)
    step(twin)
    assert all(param.is_meta for param in model.parameters())


def test_a_group_may_be_on_meta_in_part() -> None:
    mesh, _ = recording_mesh((2,))
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    kept = layer[0].weight.detach().clone()
    fully_shard(layer, mesh)
    layer[1].to_empty(device="cpu")
    layer[1].reset_parameters()
    assert torch.equal(layer[0].weight.to_local(), layer[0].weight.spec.slice_full(kept))
    layer(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in layer.parameters())


def test_back_to_meta_is_refused_at_the_next_forward() -> None:
    model = sharded_on_meta()
    init_at_once(model)
    step(model)
    model.to("meta")
    with pytest.raises(StateError, match="on the meta device"):
        step(model)


# --- memory -------------------------------------------------------------------------------------


SAMPLES_NBYTES = 1024 * 4 * 2 * 8
"""Of fp32 values of a parameter that ranks compare: two numbers for each byte."""


class PeakMemory(TorchDispatchMode):
    """Counts bytes of storages off the meta device while they live, but for those of `known`."""

    def __init__(self, known: typing.Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}  # noqa: SLF001
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: typing.Any,
        types: object,
        args: tuple[typing.Any, ...] = (),
        kwargs: typing.Any = None,
    ) -> typing.Any:
        kwargs = kwargs or {}
        if any(isinstance(arg, ShardedTensor) for arg in (*args, *kwargs.values())):
            with self:  # What it does with pieces is what counts.
                return ShardedTensor.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        if type(result) is Tensor and not result.is_meta:
            storage = result.untyped_storage()
            if storage._cdata not in self._known:  # noqa: SLF001
                self._storages[storage._cdata] = weakref.ref(storage)  # noqa: SLF001
            self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        """Bytes now; storages of buffers are resized."""
        living = [storage for reference in self._storages.values() if (storage := reference())]
        return sum(storage.nbytes() for storage in living)


def group_nbytes(model: nn.Sequential) -> int:
    """Return the size of one whole layer, padded."""
    return model[1]._shardkit_state.group.unsharded_nbytes  # noqa: SLF001


def test_the_memory_for_the_values_is_the_shards_and_one_layer() -> None:
    """Whose buffer is made, and a second time its pieces."""
    model = sharded_on_meta()
    with PeakMemory() as memory:
        model.to_empty(device="cpu")
    shards = model.memory_stats()["shard_nbytes"]
    assert memory.now == shards
    assert shards < memory.peak <= shards + group_nbytes(model) * (1 + 1 / RANKS)


def test_initialization_needs_one_parameter_besides() -> None:
    sizes = [param.nbytes for param in make_model().parameters()]
    model = sharded_on_meta()
    model.to_empty(device="cpu")
    shards = model.memory_stats()["shard_nbytes"]
    with PeakMemory() as memory:
        reset_parameters(model)
    assert max(sizes) <= memory.peak <= shards + 2 * max(sizes) + SAMPLES_NBYTES
    assert shards + 2 * max(sizes) < sum(sizes) / 1.5


@pytest.mark.parametrize("compare_values", [False, True])
def test_loading_makes_no_copy_but_the_shards(
    monkeypatch: pytest.MonkeyPatch, *, compare_values: bool
) -> None:
    monkeypatch.setattr(watch_settings, "compare_values", compare_values)
    state_dict = {name: value.clone() for name, value in make_model().state_dict().items()}
    model = sharded_on_meta()
    with PeakMemory(state_dict.values()) as memory:
        model.load_state_dict(state_dict, assign=True)
        before_first_forward = memory.now
    shards = sum(param.to_local().nbytes for param in model.parameters())
    if not compare_values:
        assert before_first_forward == memory.peak == shards
    else:
        shards += 8 * len([*model.parameters()])  # What ranks compare at the next forward.
        assert before_first_forward <= shards
        assert memory.peak <= shards + SAMPLES_NBYTES
