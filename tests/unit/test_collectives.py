"""Exactly which collectives a step issues, in which order, and beside which computation.

In the lists ``gather``, ``reduce``, ``all-reduce`` and ``check`` start something, ``wait``,
``reduced`` and ``wait check`` wait for it.
"""

from __future__ import annotations

import typing

import pytest
import torch
from recorded import Recorded, listed
from torch import nn
from torch.utils.checkpoint import checkpoint

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, ShardedTensor, fully_shard
from shardkit._schedule import unshard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from recorded import MLP

# A forward that knows what comes next: layer i+1 is gathered before layer i computes.
FORWARD = listed("""
    gather root, wait root, gather 0,
    wait 0, gather 1, forward 0,
    wait 1, gather 2, forward 1,
    wait 2, forward 2,
""")
FIRST_FORWARD = listed("""
    all_reduce_max,
    gather root, wait root,
    gather 0, wait 0, forward 0,
    gather 1, wait 1, forward 1,
    gather 2, wait 2, forward 2,
""")
# Layer 2 is still there from forward. Reductions and gathers run beside the next layer's backward.
BACKWARD = listed("""
    backward 2, gather 1, reduce 2,
    wait 1, backward 1, reduced 2, gather 0, reduce 1,
    wait 0, backward 0, reduced 1, reduce 0,
    reduced 0, reduce root,
    start check, reduced root, wait check,
""")
REGATHERED_BACKWARD = ["gather root", "wait root", *BACKWARD]
GATHERS = {"gather 0", "wait 0", "gather 1", "wait 1"}
KEPT_BACKWARD = [entry for entry in BACKWARD if entry not in GATHERS]

RESHARDING = pytest.mark.parametrize(
    ("reshard_after_forward", "backward"),
    [(True, REGATHERED_BACKWARD), (False, KEPT_BACKWARD), (None, BACKWARD)],
    ids=["resharded", "kept", "default"],
)


@pytest.fixture(autouse=True)
def _each_group_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups would share collectives, and these are small."""
    monkeypatch.setattr(unshard, "BATCH_NBYTES", 0)


@pytest.fixture
def batch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``batch_of(nbytes)``: models made from now on send groups of fewer bytes together."""
    return lambda nbytes: monkeypatch.setattr(unshard, "BATCH_NBYTES", nbytes)


# --- a step -------------------------------------------------------------------------------------


@RESHARDING
def test_first_step(*, reshard_after_forward: bool | None, backward: list[str]) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    assert recorded.step() == FIRST_FORWARD + backward


@RESHARDING
def test_later_steps(*, reshard_after_forward: bool | None, backward: list[str]) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    recorded.step()
    for seed in range(3):
        assert recorded.step(seed=seed) == FORWARD + backward


def test_elements_on_the_wire() -> None:
    """The whole padded bucket in each gather and reduction; 7 flags and 2 numbers in the check."""
    recorded = Recorded()
    recorded.step()
    recorded.run().backward()
    log = recorded.log
    gathers = [16, 80, 144, 416, 144, 80]
    assert [numel for what, numel in log if what == "start all_gather"] == gathers
    assert [numel for what, numel in log if what == "wait all_gather"] == gathers
    reductions = [416, 144, 80, 16]
    assert [numel for what, numel in log if what == "start reduce_scatter"] == reductions
    assert [numel for what, numel in log if what == "wait reduce_scatter"] == reductions
    assert ("start check", 7 + 2) in log


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4)])
def test_all_ranks_issue_the_same(mesh_shape: tuple[int, ...]) -> None:
    logs = []
    for rank in (0, 1, 3):
        recorded = Recorded(mesh_shape, rank=rank)
        logs.append([recorded.step() for _ in range(2)])
    assert logs[0] == logs[1] == logs[2]


def test_set_reshard_after_forward_holds_from_the_next_forward() -> None:
    recorded = Recorded()
    recorded.step()
    recorded.model.set_reshard_after_forward(False)
    assert recorded.step() == FORWARD + KEPT_BACKWARD
    recorded.model.set_reshard_after_forward(True)
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


def test_a_step_after_an_exception_is_a_usual_one() -> None:
    recorded = Recorded()
    recorded.step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recorded.model(torch.ones(2, 5))
    assert recorded.read() == [*FORWARD[: FORWARD.index("forward 0")], "forward 0"]
    # The order is learnt anew; the models have been compared before.
    assert recorded.step() == ["wait 1", *FIRST_FORWARD[1:], *BACKWARD]
    assert recorded.step() == FORWARD + BACKWARD


def fail(*_: object) -> None:
    """Raise, as a hook."""
    msg = "from a hook"
    raise ValueError(msg)


@pytest.mark.parametrize("batch_nbytes", [0, 2048, 1 << 20])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_exception_in_backward_leaves_nothing_behind(
    batch_of: Callable[[int], None], batch_nbytes: int, layer: int
) -> None:
    """Neither memory, nor a gradient, nor a collective that was put off."""
    batch_of(batch_nbytes)
    recorded, untouched = Recorded(), Recorded()
    untouched.step()
    expected = untouched.grads()
    usual = untouched.step()
    recorded.step()
    optimizer = torch.optim.SGD(recorded.model.parameters())
    hook = recorded.model.layers[layer].linear.register_full_backward_pre_hook(fail)
    loss = recorded.run()
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()
    hook.remove()
    optimizer.zero_grad()
    recorded.step()
    for mine, other in zip(recorded.grads(), expected, strict=True):
        assert torch.equal(mine, other)
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert recorded.step() == usual


# --- passes without backward --------------------------------------------------------------------


def test_a_pass_without_grad_gathers_once_and_keeps_nothing() -> None:
    recorded = Recorded(reshard_after_forward=True)
    recorded.step()
    for _ in range(2):
        with torch.no_grad():
            recorded.run()
        assert recorded.read() == FORWARD
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


def test_a_kept_root_is_gathered_once_for_several_passes_without_grad() -> None:
    """Until the optimizer changes it."""
    recorded = Recorded()
    recorded.step()
    without_root = FORWARD[2:]
    with torch.no_grad():
        recorded.run()
        assert recorded.read() == FORWARD
        recorded.run()
        assert recorded.read() == without_root
        recorded.model.scale.mul_(2)
        recorded.run()
        assert recorded.read() == FORWARD
    assert recorded.step() == without_root + BACKWARD


def test_inference_mode_is_a_pass_without_grad() -> None:
    recorded = Recorded(reshard_after_forward=True)
    with torch.inference_mode():
        recorded.run()
    assert recorded.read() == FIRST_FORWARD
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


# --- gradient accumulation ----------------------------------------------------------------------


def unreduced(backward: list[str]) -> list[str]:
    """Return a backward without its reductions and its check."""
    words = ("reduce", "start check", "wait check")
    return [entry for entry in backward if not entry.startswith(words)]


@RESHARDING
def test_micro_batches_without_sync_reduce_nothing(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.set_requires_gradient_sync(False)
    for seed in range(2):
        assert recorded.step(seed=seed) == FORWARD + unreduced(backward)
        assert all(grad is None for grad in recorded.grads())
    recorded.model.set_requires_gradient_sync(True)
    assert recorded.step(seed=2) == FORWARD + backward


def test_unsynced_gradients_are_added_up() -> None:
    accumulated, synced = Recorded(), Recorded()
    for seed in range(3):
        accumulated.model.set_requires_gradient_sync(seed == 2)
        accumulated.step(seed=seed)
        synced.step(seed=seed)
    for mine, other in zip(accumulated.grads(), synced.grads(), strict=True):
        assert torch.equal(mine, other)


def test_unsynced_gradients_are_counted_in_the_memory() -> None:
    recorded = Recorded()
    recorded.model.set_requires_gradient_sync(False)
    for _ in range(2):
        recorded.step()
        nbytes = recorded.model.memory_stats()["unsynced_grad_nbytes"]
        assert nbytes == 4 * (16 + 80 + 144 + 416)
    recorded.model.set_requires_gradient_sync(True)
    recorded.step()
    assert recorded.model.memory_stats()["unsynced_grad_nbytes"] == 0


def test_sync_of_one_module_only() -> None:
    """``recurse=False``: the modules in it keep what they have."""
    recorded = Recorded()
    recorded.model.set_requires_gradient_sync(False)
    recorded.model.layers[1].set_requires_gradient_sync(True, recurse=False)
    words = recorded.step()
    assert [word for word in words if word.startswith("reduce ")] == ["reduce 1"]
    has_grad = [grad is not None for grad in recorded.grads()]
    assert has_grad == [False, False, False, True, True, False, False]
    recorded.model.set_requires_gradient_sync(True, recurse=False)
    words = recorded.step()
    assert [word for word in words if word.startswith("reduce ")] == ["reduce 1", "reduce root"]


# --- hybrid sharding ----------------------------------------------------------------------------


def with_all_reduce(backward: list[str]) -> list[str]:
    """Return a backward with an all-reduce after each reduce-scatter."""
    result = []
    for entry in backward:
        result.append(entry)
        if entry.startswith("reduce "):
            result.append(entry.replace("reduce", "all-reduce"))
    return result


@RESHARDING
def test_hybrid_sharding_adds_an_all_reduce_of_each_shard(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    recorded = Recorded((2, 4), reshard_after_forward=reshard_after_forward)
    first = recorded.step()
    assert first == ["all_reduce_max", *FIRST_FORWARD, *with_all_reduce(backward)]  # on both axes
    assert recorded.step() == FORWARD + with_all_reduce(backward)
    recorded.run().backward()
    shards = [numel for what, numel in recorded.log if what == "start all_reduce"]
    assert shards == [104, 36, 20, 4]


def test_hybrid_sharding_without_all_reduce_keeps_partial_sums() -> None:
    recorded = Recorded((2, 4))
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.set_requires_all_reduce(False)
    for _ in range(2):
        assert recorded.step() == FORWARD + BACKWARD
        assert all(grad is None for grad in recorded.grads())
        partial_nbytes = recorded.model.memory_stats()["unsynced_grad_nbytes"]
        assert partial_nbytes == recorded.model.memory_stats()["shard_nbytes"] == 4 * 164
    recorded.model.set_requires_all_reduce(True)
    assert recorded.step() == FORWARD + with_all_reduce(BACKWARD)
    assert not any(grad is None for grad in recorded.grads())
    assert recorded.model.memory_stats()["unsynced_grad_nbytes"] == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_hybrid_sharding_waits_for_reductions_in_the_order_of_their_start(*, is_last: bool) -> None:
    """Each wait is an all-reduce, of which ranks may have different numbers before them.

    The gradients of layer 0 come twice, a second time while three reductions are under way.
    """
    recorded = Recorded((2, 4))
    recorded.model.set_reduce_scatter_max_input_buffers(3)
    recorded.model.set_is_last_backward(is_last)
    layers = recorded.model.layers

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(layers[0], x, use_reentrant=True))
        return layers[2](layers[1](x)) * recorded.model.scale.sum()

    recorded.model.forward = forward
    for _ in range(2):
        words = recorded.step()
        if not is_last:
            recorded.model.set_is_last_backward(True)
            words += recorded.step()
        started = [word.removeprefix("reduce ") for word in words if word.startswith("reduce ")]
        finished = [word.removeprefix("reduced ") for word in words if word.startswith("reduced ")]
        assert started[:5] == ["2", "1", "root", "0", "0"]
        assert finished == started


def test_hybrid_sharding_without_sync_communicates_on_no_axis() -> None:
    recorded = Recorded((2, 4))
    recorded.step()
    recorded.model.set_requires_gradient_sync(False)
    assert recorded.step() == FORWARD + unreduced(BACKWARD)


def test_a_replicate_axis_of_one_rank_is_not_used() -> None:
    recorded = Recorded((1, 4))
    assert recorded.step() == FIRST_FORWARD + BACKWARD
    assert recorded.step() == FORWARD + BACKWARD


# --- frozen parameters --------------------------------------------------------------------------


def freeze(index: int) -> Callable[[MLP], object]:
    return lambda model: model.layers[index].requires_grad_(requires_grad=False)


def test_a_frozen_first_layer_is_out_of_backward() -> None:
    recorded = Recorded(prepare=freeze(0))
    recorded.step()
    assert recorded.step() == FORWARD + listed("""
        backward 2, gather 1, reduce 2,
        wait 1, backward 1, reduced 2, reduce 1,
        reduced 1, reduce root,
        start check, reduced root, wait check,
    """)


def test_a_frozen_layer_in_the_middle_is_gathered_for_backward_and_not_reduced() -> None:
    recorded = Recorded(prepare=freeze(1))
    recorded.step()
    assert recorded.step() == FORWARD + listed("""
        backward 2, gather 1, reduce 2,
        wait 1, gather 0, backward 1,
        wait 0, backward 0, reduced 2, reduce 0,
        reduced 0, reduce root,
        start check, reduced root, wait check,
    """)
    has_grad = [grad is not None for grad in recorded.grads()]
    assert has_grad == [True, True, True, False, False, True, True]


def test_freezing_between_steps_takes_effect() -> None:
    recorded = Recorded()
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.layers[1].requires_grad_(requires_grad=False)
    words = recorded.step()
    reductions = [word for word in words if word.startswith("reduce ")]
    assert reductions == ["reduce 2", "reduce 0", "reduce root"]
    recorded.model.layers[1].requires_grad_(requires_grad=True)
    assert recorded.step() == FORWARD + BACKWARD


def test_an_entirely_frozen_model_reduces_and_checks_nothing() -> None:
    recorded = Recorded(prepare=lambda model: model.requires_grad_(requires_grad=False))
    recorded.run()
    assert recorded.read() == FIRST_FORWARD
    recorded.run()
    assert recorded.read() == FORWARD[2:]  # the root is kept and has not changed


# --- unused parameters --------------------------------------------------------------------------


def add_unused(model: MLP) -> None:
    """Give every group parameters that no forward uses, without elements, so that sizes stay."""
    for module in (model, *model.layers):
        for index in range(3):
            module.register_parameter(f"unused{index}", nn.Parameter(torch.empty(0)))


@RESHARDING
def test_ranks_that_use_fewer_parameters_issue_the_same(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    """What a rank waits for before it prefetches or reduces must not change the order."""
    recorded = Recorded(prepare=add_unused, reshard_after_forward=reshard_after_forward)
    assert recorded.step() == FIRST_FORWARD + backward
    assert recorded.step() == FORWARD + backward
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    has_grad = {name: p.grad is not None for name, p in recorded.model.named_parameters()}
    assert has_grad == {name: "unused" not in name for name in has_grad}


# --- buckets ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer's worth of parameters of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(6, 6))
        self.narrow = nn.Parameter(torch.randn(10).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(21), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.single).sum() * self.narrow.sum() * self.frozen.sum()


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_other_storage_dtypes_or_frozen_are_buckets_of_their_own(
    param_dtype: torch.dtype,
) -> None:
    """Each is cut and padded by itself; the log adds them up. Frozen ones are not reduced."""
    mesh, log = recording_mesh((4,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = fully_shard(Mixed(), mesh, policy)
    single, half, frozen = (48, 32, 32) if param_dtype == torch.float32 else (64, 32, 32)
    for _ in range(2):
        log.clear()
        model(torch.ones(2, 6)).backward()
        assert [entry for entry in log if entry[0] != "all_reduce_max"] == [
            ("start all_gather", single + half + frozen),
            ("wait all_gather", single + half + frozen),
            ("start reduce_scatter", single + half),
            ("start check", 2 + 3),
            ("wait reduce_scatter", single + half),
            ("wait check", 2 + 3),
        ]
    assert model.single.grad.dtype == torch.float32
    assert model.narrow.grad.dtype == torch.bfloat16
    assert model.frozen.grad is None


# --- small groups travel together ---------------------------------------------------------------


def test_small_groups_share_gathers_and_reductions(batch_of: Callable[[int], None]) -> None:
    """All of this model is small: one gather a pass besides the root's, one reduction."""
    batch_of(1 << 20)
    recorded = Recorded()
    recorded.step()
    words = recorded.step()
    assert [word for word in words if word.split()[0] in ("gather", "reduce", "start")] == [
        "gather root",
        "gather 0+1+2",
        "gather 0+1",
        "reduce root+0+1+2",
        "start check",
    ]


def test_sharing_changes_no_gradient(batch_of: Callable[[int], None]) -> None:
    """Neither of several steps, nor of unsynced ones, nor on two axes."""
    for mesh_shape in ((4,), (2, 4)):
        grads = []
        for nbytes in (0, 2048, 1 << 20):
            batch_of(nbytes)
            recorded = Recorded(mesh_shape)
            for seed in range(4):
                recorded.model.set_requires_gradient_sync(seed != 2)
                recorded.step(seed=seed)
            grads.append(recorded.grads())
        for other in grads[1:]:
            for mine, theirs in zip(grads[0], other, strict=True):
                assert torch.equal(mine, theirs)


def test_sharing_leaves_nothing_unsharded(batch_of: Callable[[int], None]) -> None:
    batch_of(2048)  # layers 0 and 1 together, layer 2 alone
    recorded = Recorded()
    for seed in range(3):
        recorded.run(seed=seed).backward()
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0


# --- activation checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_communicates_nothing_more(*, use_reentrant: bool) -> None:
    """Each layer is gathered for its recomputation, and still there for its backward."""
    recorded = Recorded(reshard_after_forward=True)
    plain = [recorded.step() for _ in range(2)][-1]
    checkpointed = Recorded(reshard_after_forward=True)
    layers = checkpointed.model.layers

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # Without it reentrant checkpointing gives layer 0 no gradient.
        for layer in layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=use_reentrant))
        return x * checkpointed.model.scale.sum()

    checkpointed.model.forward = forward
    for _ in range(2):
        checkpointed.log.clear()
        checkpointed.run().backward()
        words = checkpointed.read()
    for verb in ("gather ", "reduce "):
        issued = sorted(word for word in words if word.startswith(verb))
        assert issued == sorted(word for word in plain if word.startswith(verb))
    for mine, other in zip(checkpointed.grads(), recorded.grads(), strict=True):
        assert torch.equal(mine, other)


# --- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_costs_one_small_collective(mesh_shape: tuple[int, ...], norm_type: float) -> None:
    recorded = Recorded(mesh_shape)
    recorded.step()
    torch.nn.utils.clip_grad_norm_(recorded.model.parameters(), 1.0, norm_type=norm_type)
    [(what, numel)] = recorded.log
    assert (what, numel) == (("all_reduce_sum", 7) if norm_type == 2.0 else ("all_reduce_max", 14))


def test_an_optimizer_step_communicates_nothing() -> None:
    recorded = Recorded()
    optimizer = torch.optim.AdamW(recorded.model.parameters(), lr=0.1)
    for _ in range(2):
        recorded.step()
        optimizer.step()
        optimizer.zero_grad()
        assert recorded.log == []


# --- by hand ------------------------------------------------------------------------------------


def test_unshard_gathers_ahead_of_the_forward() -> None:
    recorded = Recorded()
    recorded.step()
    layer = recorded.model.layers[1]
    handle = layer.unshard(async_op=True)
    assert recorded.read() == ["gather 1"]
    handle.wait()
    assert recorded.read() == ["wait 1"]
    layer.unshard()
    assert recorded.read() == []
    assert layer.linear.weight.shape == (16, 8)
    assert not isinstance(layer.linear.weight, ShardedTensor)
    without_1 = [entry for entry in FORWARD if entry not in ("gather 1", "wait 1")]
    recorded.run()
    assert recorded.read() == without_1


def test_reshard_gives_memory_and_parameters_back() -> None:
    recorded = Recorded()
    recorded.step()
    layer = recorded.model.layers[1]
    layer.unshard()
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 4 * 144
    layer.reshard()
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert isinstance(layer.linear.weight, ShardedTensor)
    recorded.read()
    assert recorded.step() == FORWARD + BACKWARD


# --- one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(1,), (1, 1)])
def test_one_rank_communicates_nothing(mesh_shape: tuple[int, ...]) -> None:
    recorded = Recorded(mesh_shape)
    compute = listed("forward 0, forward 1, forward 2, backward 2, backward 1, backward 0")
    for _ in range(2):
        assert recorded.step() == compute
    torch.nn.utils.clip_grad_norm_(recorded.model.parameters(), 1.0)
    assert recorded.log == []
    stats = recorded.model.memory_stats()
    assert {name: nbytes for name, nbytes in stats.items() if nbytes} == {
        "shard_nbytes": 4 * (4 + 72 + 144 + 408)
    }


def test_one_rank_computes_with_the_shard_itself() -> None:
    recorded = Recorded((1,))
    seen = {}

    def look(module: nn.Module, args: object) -> None:
        del args
        seen[module] = module.weight.data_ptr()

    linears = [layer.linear for layer in recorded.model.layers]
    for linear in linears:
        linear.register_forward_pre_hook(look)
    recorded.step()
    assert [seen[linear] for linear in linears] == [
        linear.weight.to_local().data_ptr() for linear in linears
    ]


def test_a_replicate_axis_alone_gathers_nothing() -> None:
    """Two replicas of one rank each: plain data parallelism."""
    recorded = Recorded((2, 1))
    recorded.step()
    verbs = {word.split()[0] for word in recorded.step()}
    assert "gather" not in verbs
    assert "all-reduce" in verbs


# --- memory -------------------------------------------------------------------------------------

EQUAL_WIDTHS = (16,) * 7
LAYER_NBYTES = 4 * 16 * 17
ROOT_NBYTES = 4 * 16  # 4 elements, padded to 16 bytes a rank


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_two_layers_and_the_root_are_the_most_that_is_unsharded(
    *, reshard_after_forward: bool | None
) -> None:
    """Prefetch depth 1, and the one in use; from the first step on, at any depth of the model."""
    for num_layers in (3, 6):
        recorded = Recorded(
            widths=EQUAL_WIDTHS[: num_layers + 1], reshard_after_forward=reshard_after_forward
        )
        for seed in range(4):
            recorded.run(seed=seed).backward()
            peak_nbytes = recorded.model.memory_stats()["peak_unsharded_nbytes"]
            assert peak_nbytes == 2 * LAYER_NBYTES + ROOT_NBYTES


def test_without_resharding_everything_is_unsharded_at_once() -> None:
    recorded = Recorded(widths=EQUAL_WIDTHS, reshard_after_forward=False)
    recorded.run().backward()
    peak_nbytes = recorded.model.memory_stats()["peak_unsharded_nbytes"]
    assert peak_nbytes == 6 * LAYER_NBYTES + ROOT_NBYTES


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_after_backward_nothing_is_unsharded(*, reshard_after_forward: bool | None) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    for seed in range(3):
        loss = recorded.run(seed=seed)
        assert recorded.model.memory_stats()["unsharded_nbytes"] > 0
        loss.backward()
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0


def test_buffers_of_gradients_are_those_of_one_layer_and_its_follower() -> None:
    """Send and receive buffer of one reduction: it is waited for before the next one starts."""
    recorded = Recorded(widths=EQUAL_WIDTHS)
    for seed in range(3):
        recorded.run(seed=seed).backward()
        nbytes = recorded.model.memory_stats()["reduce_buffer_nbytes"]
        assert nbytes == LAYER_NBYTES + 3 * LAYER_NBYTES // 4


def test_the_shard_is_a_rank_th_of_everything() -> None:
    recorded = Recorded(widths=EQUAL_WIDTHS)
    assert recorded.model.memory_stats()["shard_nbytes"] == (6 * LAYER_NBYTES + ROOT_NBYTES) // 4


# --- exceptions that the model catches ----------------------------------------------------------


class Careful(nn.Module):
    """Goes on without its layer where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.head(self.layer(x))
        except ValueError:
            return self.head(x)


@pytest.mark.parametrize("with_backward", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_layer_whose_error_the_root_caught_is_gathered_when_it_has_changed(
    *, reshard_after_forward: bool, with_backward: bool
) -> None:
    """It never left that forward; it is shown sharded, and gathered anew, all the same."""
    mesh, log = recording_mesh((4,))
    model = Careful()
    fully_shard(model.layer, mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh)

    def fail(*_: object) -> None:
        msg = "from a hook"
        raise ValueError(msg)

    hook = model.layer.register_forward_pre_hook(fail)
    with torch.set_grad_enabled(with_backward):
        loss = model(torch.ones(1, 8)).sum()
    if with_backward:
        loss.backward()
    hook.remove()
    assert isinstance(model.layer.weight, ShardedTensor)
    for _ in range(2):
        with torch.no_grad():
            model.layer.weight.add_(1.0)
            log.clear()
            model(torch.ones(1, 8))
        assert ("start all_gather", 80) in log  # 72 elements, padded to four times 16 bytes
