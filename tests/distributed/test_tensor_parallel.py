"""Parameters that are DTensors on another mesh axis, sharded over the data-parallel ones."""

from __future__ import annotations

import copy
import typing
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from models import WIDTHS, cross_entropy
from parallel_models import (
    CASES,
    MLP,
    OPTIMIZERS,
    batches_of,
    make,
    make_meshes,
    mlp_plan,
    parallelize,
)
from reference import (
    Differences,
    assert_each_within,
    assert_within,
    full_grads,
)
from shardkit import (
    MixedPrecisionPolicy,
    ShardedTensor,
    ShardedTensorError,
    WrapError,
    fully_shard,
    init_device_mesh,
)
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence


pytestmark = pytest.mark.helpers

RANKS = 4
NAMES = {name: name for name in CASES}
# The last axis is tensor-parallel; the first of three replicates.
MESHES = ((2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2))

# The sums over the batch, the ranks and the split dimensions are taken in another order than in
# the plain model; fp32 units in the last place (6e-8 at 1) of six steps, and Adam divides by small
# gradients.
TOLERANCE = 1e-5


def compare_training(
    name: str,
    mesh_shape: tuple[int, ...],
    models: tuple[nn.Module, nn.Module],
    optimizer: str = "sgd",
    steps: int = 6,
) -> Differences:
    both = models[::-1]
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in both]
    batches = zip(*batches_of(name, mesh_shape, steps), strict=True)
    differences = Differences()
    differences.note_training(CASES[name].case, both, optimizers, batches, max_norm=0.5)
    differences.note_parameters(*both)
    return differences


CLOSE = {"loss": TOLERANCE, "grad": TOLERANCE, "norm": TOLERANCE, "parameter": TOLERANCE}


def assert_close(by_rank: Sequence[Differences]) -> None:
    assert_within(by_rank, **CLOSE)


# --- training -----------------------------------------------------------------------------------


def train_both(mesh_shape: tuple[int, ...], optimizer: str, name: str) -> Differences:
    return compare_training(name, mesh_shape, make(name, mesh_shape), optimizer)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_training_with_clipping_equals_plain_training(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    found = spawn_each(spawn, NAMES, train_both, RANKS, mesh_shape, "sgd")
    assert_each_within(found, **CLOSE)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
def test_adamw_equals_plain_adamw(spawn: Spawn, optimizer: str) -> None:
    found = spawn_each(spawn, NAMES, train_both, RANKS, (2, 2), optimizer)
    assert_each_within(found, **CLOSE)


def train_with(
    name: str, mesh_shape: tuple[int, ...], options: dict[str, typing.Any]
) -> Differences:
    return compare_training(name, mesh_shape, make(name, mesh_shape, **options))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_resharding_makes_no_difference(spawn: Spawn, reshard_after_forward: bool) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    assert_close(spawn(train_with, RANKS, "gpt", (2, 2), options))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 1, 2)], ids=str)
@on_ranks(RANKS)
def test_gradients_accumulate(mesh_shape: tuple[int, ...]) -> None:
    plain, model = make("gpt", mesh_shape)
    case = CASES["gpt"].case
    mine, whole = batches_of("gpt", mesh_shape, 3)
    for i, (own, every) in enumerate(zip(mine, whole, strict=True)):
        model.set_requires_gradient_sync(i == len(mine) - 1)
        case.loss(model, own).backward()
        case.loss(plain, every).backward()
    differences = Differences()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


@on_ranks(RANKS)
def test_frozen_parameters_stay_as_they_are() -> None:
    plain = CASES["gpt"].case.make()
    model, dp = parallelize("gpt", plain, (2, 2))
    for m in (plain, model):  # Not before: SequenceParallel makes parameters that want gradients.
        for module in (m.tokens, m.blocks[0].attention.q, m.blocks[1].norm1):
            module.requires_grad_(requires_grad=False)
    for module in (*model.blocks, model):
        fully_shard(module, dp)
    assert_close([compare_training("gpt", (2, 2), (plain, model))])


@on_ranks(RANKS)
def test_tied_parameters_stay_tied() -> None:
    plain = CASES["gpt"].case.make()
    model, dp = parallelize("gpt", plain, (2, 2))
    for m in (plain, model):
        m.head.weight = m.tokens.weight
    for module in (*model.blocks, model):
        fully_shard(module, dp)
    assert model.head.weight is model.tokens.weight
    assert_close([compare_training("gpt", (2, 2), (plain, model))])


@on_ranks(RANKS)
def test_groups_take_and_return_dtensors() -> None:
    """What goes into most groups and comes out of some is a DTensor."""
    plain = CASES["gpt"].case.make()
    model, dp = parallelize("gpt", plain, (2, 2))
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm, nn.Embedding))]
    for module in (*layers, model):
        fully_shard(module, dp)
    assert_close([compare_training("gpt", (2, 2), (plain, model))])


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(RANKS)
def test_activation_checkpointing_makes_no_difference(use_reentrant: bool) -> None:
    plain, model = make("gpt", (2, 2))
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(
            forward, x, use_reentrant=use_reentrant
        )
    assert_close([compare_training("gpt", (2, 2), (plain, model))])


@on_ranks(RANKS)
def test_mixed_precision_computes_and_reduces_in_the_asked_dtypes() -> None:
    """Parameters are fp32, all else is fp64: sums differ in the last place of fp64 only."""
    # One rounding to fp32, of gradients below 1.
    mesh_shape = (2, 2)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float64, reduce_dtype=torch.float64, cast_forward_inputs=False
    )
    plain, model = make("gpt", mesh_shape, mp_policy=policy)
    plain.double()
    mine, whole = batches_of("gpt", mesh_shape, 1)
    differences = Differences()
    for m, batch in ((model, mine[0]), (plain, whole[0])):
        loss = cross_entropy(m, batch)
        assert loss.dtype == torch.float64
        loss.backward()
    grads, expected = full_grads(model), full_grads(plain)
    differences.note_all("grad", grads, {name: g.float() for name, g in expected.items()})
    assert_within([differences], grad=6e-8)


# --- what modules see ---------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@on_ranks(RANKS)
def test_modules_see_dtensors_and_users_see_sharded_tensors(mesh_shape: tuple[int, ...]) -> None:
    model, dp = parallelize("mlp", MLP(), mesh_shape)
    tp = model.up.weight.device_mesh
    before = dict(model.named_parameters())
    placements = {
        name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)
    }
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    fully_shard(model, dp)
    seen: dict[str, Tensor] = {}
    model.up.register_forward_pre_hook(lambda *_: seen.update(model.named_parameters()))
    model(torch.randn(3, WIDTHS[0])).sum().backward()
    assert seen.keys() == before.keys()
    model.unshard()
    for name, param in model.named_parameters():
        assert param is seen[name]
        assert isinstance(param, nn.Parameter)
        if name in placements:
            assert type(param) is DTensor
            assert param.placements == placements[name]
            assert param.device_mesh == tp
            assert torch.equal(param.full_tensor(), whole[name])
        else:
            assert type(param) is nn.Parameter
            assert torch.equal(param, whole[name])
    model.reshard()
    for name, param in model.named_parameters():
        assert type(param) is ShardedTensor
        assert param.shape == whole[name].shape
        assert torch.equal(param.detach().full_tensor(), whole[name])
    freed = seen["up.weight"]
    if mesh_shape[-2] > 1:
        for use in (lambda: freed * 2, freed.to_local, freed.full_tensor, lambda: freed.data):
            with pytest.raises(
                Exception, match=r"'up.weight' is used outside its module's forward"
            ):
                use()
        assert repr(freed) == "FreedDTensor('up.weight', shape=(12, 7))"


# --- state dicts and copies ---------------------------------------------------------------------


@on_ranks(RANKS)
def test_a_deep_copy_trains_by_itself() -> None:
    plain, model = make("gpt", (2, 2))
    twin = copy.deepcopy(model)
    differences = compare_training("gpt", (2, 2), (copy.deepcopy(plain), twin))
    differences.note_parameters(model, plain)  # The original has not moved.
    assert_close([differences])


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4)], ids=str)
@on_ranks(RANKS)
def test_a_converted_model_trains_on(mesh_shape: tuple[int, ...]) -> None:
    # Not "gpt": torch 2.9 mixes up the masks of one split embedding in two dtypes.
    plain, model = make("mlp", mesh_shape)
    mine, _ = batches_of("mlp", mesh_shape, 1)
    CASES["mlp"].case.loss(model, mine[0]).backward()
    model.zero_grad()
    model.double()
    torch.set_default_dtype(torch.float64)  # Of the batches.
    # In fp64 rounding errors are nine digits smaller; Adam's division leaves some of that.
    assert_within(
        [compare_training("mlp", mesh_shape, (plain.double(), model), "adamw")],
        loss=1e-12,
        grad=1e-12,
        norm=1e-12,
        parameter=1e-11,
    )


@on_ranks(RANKS)
def test_gradients_from_before_are_kept() -> None:
    """Gradients that were there before fully_shard are sharded with their parameters."""
    mesh_shape = (2, 2)
    plain = MLP()
    model, dp = parallelize("mlp", plain, mesh_shape)
    x = torch.randn(4, WIDTHS[0])
    for m in (plain, model):
        m(x).square().sum().backward()
    fully_shard(model, dp)
    differences = Differences()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


# --- errors -------------------------------------------------------------------------------------


def shard_on_the_same_axis() -> None:
    _, tp = make_meshes((2, 2))
    fully_shard(parallelize_module(MLP(), tp, mlp_plan()), tp)


def shard_on_the_world() -> None:
    _, tp = make_meshes((2, 2))
    fully_shard(parallelize_module(MLP(), tp, mlp_plan()))


@pytest.mark.parametrize("call", [shard_on_the_same_axis, shard_on_the_world])
def test_meshes_that_overlap_are_refused(spawn_errors: Spawn, call: Callable[[], None]) -> None:
    for error in spawn_errors(call, RANKS):
        assert error.type_name == "MeshError"
        assert "parameter 'up.weight' is a DTensor on the mesh of ranks" in error.message
        assert "Pass another axis of the same mesh" in error.message


def parallelize_on_a_mesh_of_shardkit() -> None:
    mesh: typing.Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fully_shard(parallelize_module(MLP(), mesh["tp"], mlp_plan()), mesh["dp"])


@on_ranks(2)
def test_a_sharded_module_is_not_split_for_tensor_parallelism_afterwards() -> None:
    dp, tp = make_meshes((1, 2))
    layer = fully_shard(nn.Linear(4, 6), mesh=dp)
    with pytest.raises(ShardedTensorError, match="Call parallelize_module first"):
        parallelize_module(layer, tp, ColwiseParallel())


def test_a_dtensor_on_a_mesh_of_shardkit_is_refused(spawn_errors: Spawn) -> None:
    """From torch 2.14 on, torch itself refuses the mesh."""
    for error in spawn_errors(parallelize_on_a_mesh_of_shardkit, RANKS):
        if error.type_name == "RuntimeError":
            assert error.message.startswith("Expected to find a valid mesh")
        else:
            assert error.type_name == "MeshError"
            assert "Make the mesh by torch's init_device_mesh" in error.message


def shard_partial() -> None:
    dp, tp = make_meshes((2, 2))
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tp, [Partial()]))
    fully_shard(module, dp)


def shard_ragged() -> None:
    """Parts that torch.chunk would not make: 3 rows and 1."""
    dp, tp = make_meshes((2, 2))
    rows = (3, 1)[tp.get_local_rank()]
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(
        DTensor.from_local(torch.ones(rows, 4), tp, [Shard(0)], shape=(4, 4), stride=(4, 1))
    )
    fully_shard(module, dp)


def shard_uneven_groups() -> None:
    """Groups of 3 rows over two ranks."""
    dp, tp = make_meshes((2, 2))
    module = nn.Linear(4, 6)
    rows = 4 - 2 * tp.get_local_rank()
    placements = [_StridedShard(0, split_factor=2)]
    module.weight = nn.Parameter(
        DTensor.from_local(torch.ones(rows, 4), tp, placements, shape=(6, 4), stride=(4, 1))
    )
    fully_shard(module, dp)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (shard_uneven_groups, "and groups that all ranks divide evenly"),
        (shard_partial, "takes Shard(dim) and Replicate() only"),
        (shard_ragged, "this rank's part should have shape (2, 4)"),
    ],
)
def test_placements_that_cannot_be_sharded_are_refused(
    spawn_errors: Spawn,
    call: Callable[[], None],
    message: str,
) -> None:
    for error in spawn_errors(call, RANKS):
        assert error.type_name == "WrapError"
        assert "parameter 'weight' is a DTensor" in error.message
        assert message in error.message


def step_with_an_early_optimizer() -> None:
    model, dp = parallelize("mlp", MLP(), (2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, dp)
    model(torch.randn(2, WIDTHS[0])).sum().backward()
    optimizer.step()


def test_an_optimizer_made_before_is_told_that_dtensors_were_replaced(
    spawn_errors: Spawn,
) -> None:
    for error in spawn_errors(step_with_an_early_optimizer, RANKS):
        assert error.type_name == "StateError"
        assert "parameter 'up.weight' was a DTensor" in error.message
        assert "Make the optimizer" in error.message


@on_ranks(RANKS)
def test_a_refusal_leaves_dtensors_in_place() -> None:
    """The second parameter cannot be exchanged: the first is put back."""
    dp, tp = make_meshes((2, 2))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    parallelize_module(model, tp, {"0": ColwiseParallel()})
    before = list(model.parameters())
    reference = weakref.ref(model[1].weight)
    with pytest.raises(WrapError, match=r"parameter '1\.weight' cannot be sharded"):
        fully_shard(model, dp)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert type(model[0].weight) is DTensor
    assert model[0](torch.randn(2, 4)).isfinite().all()
    del reference


def compare_different_models() -> None:
    plain = MLP()
    if dist.get_rank() >= 2:
        plain.up = nn.Linear(WIDTHS[0], 12, bias=False)
    model, dp = parallelize("mlp", plain, (2, 2))
    fully_shard(model, dp)
    model(torch.randn(2, WIDTHS[0]))


def test_data_parallel_ranks_compare_their_models(
    spawn_errors: Spawn,
) -> None:
    for error in spawn_errors(compare_different_models, RANKS):
        assert error.type_name == "RankMismatchError"
        assert "ranks have different models" in error.message
