"""What a plan says beside what a step then does: bytes, memory, collectives."""

from __future__ import annotations

import copy
import re
import sys
import typing

import pytest
import torch
from torch import nn

from models import CASES, MLP, Block, Tiny, frozen_mlp
from parity import in_turns
from recording import recording_mesh
from shardkit import (
    CPUOffloadPolicy,
    MeshError,
    MixedPrecisionPolicy,
    Replicate,
    ShardedTensor,
    ShardPlan,
    WrapError,
    auto_shard,
    checkpoint_module,
    fully_shard,
)
from shardkit._wrapping import auto_shard as entry
from shardkit._wrapping.plan import mesh_of_shape
from step_traffic import counted, total
from wrapped_models import Stack, TiedBlocks

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence


pytestmark = pytest.mark.helpers

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


MODELS: dict[str, tuple[Callable[[], nn.Module], typing.Any]] = {
    "mlp": (MLP, nn.Linear),
    "tiny": (Tiny, nn.Linear),
    "stack": (Stack, Block),
    "whole": (Stack, "no_wrap"),
    "nested": (Stack, {Block, nn.Linear}),
    "lists": (Stack, {("blocks.0", "blocks.2"): {}, ("norm", "head"): {}, "tokens": {}}),
    "tied": (TiedBlocks, nn.Linear),
    "frozen": (frozen_mlp, nn.Linear),
    "frozen first": (frozen_mlp, {("layers.0",): {}, "layers.1": {}}),
}


def take_step(model: nn.Module, micro_batches: int = 1) -> None:
    is_stack = isinstance(getattr(model, "tokens", None), nn.Embedding)
    for _ in range(micro_batches):
        x = torch.randint(61, (2, 5)) if is_stack else torch.randn(3, 7)
        model(x).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1)


def check_against_steps(model: nn.Module, plan: ShardPlan, micro_batches: int = 1) -> None:
    assert plan.is_applied
    for _ in range(2):
        take_step(model, micro_batches)
    with counted(model) as found:
        take_step(model, micro_batches)
    assert total(found) == plan.traffic(micro_batches)
    stats, memory = model.memory_stats(), plan.memory
    assert stats["shard_nbytes"] == memory.shard_nbytes
    assert stats["peak_unsharded_nbytes"] == memory.peak_unsharded_nbytes
    assert stats["unsharded_nbytes"] == 0


@pytest.mark.parametrize("mesh_shape", [(1,), (4,), (2, 3), (3, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_as_planned(name: str, mesh_shape: Sequence[int]) -> None:
    make, policy = MODELS[name]
    model, (mesh, _) = make(), recording_mesh(mesh_shape)
    check_against_steps(model, auto_shard(model, mesh, policy))


@pytest.mark.parametrize(
    ("name", "reshard", "micro_batches"),
    in_turns(["mlp", "nested", "lists", "tied", "frozen"], [True, False, None, 2], [1, 3]),
)
def test_a_step_is_as_planned_however_it_is_resharded(
    name: str, reshard: bool | int | None, micro_batches: int
) -> None:
    make, policy = MODELS[name]
    model, (mesh, _) = make(), recording_mesh((4,))
    plan = auto_shard(model, mesh, policy, reshard_after_forward=reshard)
    check_against_steps(model, plan, micro_batches)


@pytest.mark.parametrize("mp_policy", [BF16, MixedPrecisionPolicy(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(1,), (4,), (2, 2)])
def test_a_step_in_mixed_precision_is_as_planned(
    mp_policy: MixedPrecisionPolicy, mesh_shape: Sequence[int]
) -> None:
    model, (mesh, _) = Stack(), recording_mesh(mesh_shape)
    check_against_steps(model, auto_shard(model, mesh, Block, mp_policy=mp_policy))


def test_several_dtypes_are_several_buckets() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    model[0].bias.requires_grad_(requires_grad=False)
    model[1].weight.data = model[1].weight.data.bfloat16()
    mesh, _ = recording_mesh((4,))
    plan = auto_shard(model, mesh, nn.Linear)
    first, second = plan.groups
    shard = sum(p.to_local().nbytes for p in model.parameters())
    assert first.nbytes == 4 * (63 + 9)
    assert second.nbytes == 2 * 45 + 4 * 5
    assert plan.traffic().reduce_scatters == 3
    assert plan.memory.shard_nbytes >= shard
    assert plan.memory.shard_nbytes == model.memory_stats()["shard_nbytes"]


@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_for_a_shape_is_what_ranks_do(case: str) -> None:
    with torch.device("meta"):
        meta = CASES[case].make()
    mesh, _ = recording_mesh((2, 3))
    policy = {nn.Linear, nn.Conv2d}
    here = auto_shard(CASES[case].make(), mesh, policy, apply=False)
    there = auto_shard(meta, (2, 3), policy, apply=False)
    assert here.traffic(2) == there.traffic(2)
    assert here.memory == there.memory


# --- nothing is changed before it is applied ----------------------------------------------------


def test_a_plan_changes_nothing() -> None:
    model, (mesh, log) = Stack(), recording_mesh((4,))
    before = copy.deepcopy(model.state_dict())
    plan = auto_shard(model, mesh, Block, apply=False, before=checkpoint_module)
    str(plan)
    assert not plan.is_applied
    assert log == []
    assert not any(isinstance(p, ShardedTensor) for p in model.parameters())
    assert type(model) is Stack
    assert "forward" not in model.blocks[0].__dict__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert plan.apply() is model
    assert plan.is_applied
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())


def test_a_plan_is_applied_once() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))
    plan = auto_shard(model, mesh, Block)
    with pytest.raises(WrapError, match="was applied before"):
        plan.apply()


def test_a_plan_of_another_model_is_not_applied() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))
    plan = auto_shard(model, mesh, Block, apply=False)
    model.head.weight = model.tokens.weight
    with pytest.raises(WrapError, match="has other parameters than when it was planned"):
        plan.apply()


def test_a_shape_can_only_be_planned_for() -> None:
    with pytest.raises(MeshError, match=r"Pass apply=False, or a mesh: .*\(512,\)"):
        auto_shard(Stack(), 512, Block)
    plan = auto_shard(Stack(), (8, 64), Block, apply=False)
    with pytest.raises(WrapError, match=r"made for a mesh shape, \(8, 64\)"):
        plan.apply()
    with pytest.raises(MeshError, match=r"mesh must be a .*, got bool"):
        auto_shard(Stack(), mesh=True, apply=False)
    with pytest.raises(MeshError, match="positive numbers"):
        mesh_of_shape((0,))


def whole_vectors(param: nn.Parameter) -> Replicate | None:
    return Replicate() if param.ndim == 1 else None


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_whole_parameters_are_planned_for_a_shape(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    plan = auto_shard(model, shape, policy="no_wrap", apply=False, shard_placement_fn=whole_vectors)
    traffic = plan.traffic(1)
    assert traffic.all_gathers == 1  # That of the matrices; vectors are whole.
    assert traffic.all_reduces == len(shape)
    assert traffic.reduce_scatters == 1


def test_a_shape_has_no_other_mesh() -> None:
    mesh, _ = recording_mesh((2,))
    with pytest.raises(MeshError, match="the mesh of the call is a shape, which has no ranks"):
        auto_shard(nn.Linear(4, 4), (2,), apply=False, shard_placement_fn=lambda _: mesh)


def test_what_fully_shard_refuses_is_refused_when_it_is_planned() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))
    for change, message in (
        ({"reshard_after_forward": 3}, "that divides the shard axis of 4"),
        ({"ignored_params": {"norm"}}, "ignored_params takes Parameter objects"),
        ({"shard_placement_fn": lambda _: "rows"}, "shard_placement_fn returned 'rows'"),
    ):
        with pytest.raises(WrapError, match=message):
            auto_shard(model, mesh, Block, **change)
    model.tokens.sparse = True
    with pytest.raises(WrapError, match=r"'tokens.weight' of Embedding gets sparse gradients"):
        auto_shard(model, mesh, Block)
    assert not any(isinstance(p, ShardedTensor) for p in model.parameters())


def test_a_model_on_meta_gets_its_values_when_the_plan_is_applied() -> None:
    with torch.device("meta"):
        model = Stack()
    seen = []

    def init_fn(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    mesh, _ = recording_mesh((2,))
    plan = auto_shard(model, mesh, Block, param_init_fn=init_fn, apply=False)
    assert all(param.is_meta for param in model.parameters())
    assert not seen
    plan.apply()
    assert seen
    for param in model.parameters():
        assert param.to_local().eq(0.5).all()  # type: ignore[operator]


# --- groups -------------------------------------------------------------------------------------


def test_groups_are_those_that_fully_shard_makes() -> None:
    by_hand, by_policy = Stack(), Stack()
    mesh, _ = recording_mesh((4,))
    for block in by_hand.blocks:
        fully_shard(block, mesh)
    fully_shard(by_hand, mesh)
    auto_shard(by_policy, mesh, Block)
    pairs = zip(by_hand.named_parameters(), by_policy.named_parameters(), strict=True)
    for (name, mine), (other_name, other) in pairs:
        assert name == other_name
        assert mine.spec.layout.cut(mine.spec.index) == other.spec.layout.cut(other.spec.index)


def test_tied_weights_belong_to_what_is_around_all_of_their_modules() -> None:
    model = TiedBlocks()
    plan = auto_shard(model, 4, [nn.Linear, nn.Embedding, nn.Sequential], apply=False)
    tied = {group.names: group.tied for group in plan.groups if group.tied}
    assert tied == {("layers",): ("layers.0.weight",), ("",): ("tokens.weight",)}
    assert set(plan.without_group) == {"tokens", "head"}


def test_a_list_of_both_modules_holds_a_tied_weight() -> None:
    plan = auto_shard(TiedBlocks(), 4, {("tokens", "head"): {}, "layers.*": {}}, apply=False)
    assert plan.groups[0].names == ("tokens", "head")
    assert plan.groups[0].tied == ("tokens.weight",)


def test_ignored_parameters_are_in_no_group() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))
    ignored = {model.head.weight, model.blocks[0].fc1.bias}
    plan = auto_shard(model, mesh, Block, ignored_params=ignored)
    plain = {p for p in model.parameters() if not isinstance(p, ShardedTensor)}
    assert plain == ignored
    assert sum(group.num_params for group in plan.groups) == len(list(model.parameters())) - 2


# --- offloading ---------------------------------------------------------------------------------


def test_groups_are_offloaded_until_the_rest_fits() -> None:
    model = Stack(num_blocks=4)
    whole = auto_shard(model, 4, Block, apply=False)
    block = whole.groups[0].state_nbytes
    assert whole.memory.state_nbytes == 4 * whole.memory.shard_nbytes
    for number in range(4):
        budget = whole.memory.state_nbytes - number * block
        plan = auto_shard(model, 4, Block, offload_budget_nbytes=budget, apply=False)
        offloaded = [group.names for group in plan.groups if group.is_offloaded]
        assert offloaded == [(f"blocks.{i}",) for i in range(number)]
        assert plan.memory.state_nbytes <= budget
    none = auto_shard(model, 4, Block, offload_budget_nbytes=0, apply=False)
    assert none.memory.state_nbytes == 0
    assert none.memory.host_nbytes == none.memory.shard_nbytes


def test_the_largest_saving_comes_first() -> None:
    model, units = Stack(dim=32, num_blocks=2, vocabulary=5_000), ["tokens", "head"]
    whole = auto_shard(model, 4, Block, units=units, apply=False).memory.state_nbytes
    head = 4 * 4 * 32 * 5_000 // 4
    for budget, names in ((whole - 1, ["tokens"]), (whole - head - 1, ["tokens", "head"])):
        plan = auto_shard(model, 4, Block, units=units, offload_budget_nbytes=budget, apply=False)
        assert [group.name for group in plan.groups if group.is_offloaded] == names


def test_frozen_groups_save_their_parameters_only() -> None:
    model = Stack(num_blocks=2)
    model.blocks[0].requires_grad_(requires_grad=False)
    frozen, trained = auto_shard(model, 4, Block, apply=False).groups[:2]
    assert frozen.state_nbytes == frozen.shard_nbytes
    assert trained.state_nbytes == 4 * trained.shard_nbytes


def test_groups_are_offloaded_by_name() -> None:
    policy = {"blocks.*": {}, "blocks.1": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
    plan = auto_shard(Stack(), 4, policy, apply=False)
    assert [group.names for group in plan.groups if group.is_offloaded] == [("blocks.1",)]
    assert "offload_policy=CPUOffloadPolicy(pin_memory=False)" in str(plan)


def test_a_budget_is_no_debt() -> None:
    with pytest.raises(WrapError, match="must be 0 or more bytes, got -1"):
        auto_shard(Stack(), 4, Block, offload_budget_nbytes=-1, apply=False)


# --- before -------------------------------------------------------------------------------------


def test_before_is_called_on_each_unit_but_the_root_and_may_replace_it() -> None:
    called = []

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def before(module: nn.Module) -> nn.Module | None:
        called.append(module)
        return Around(module) if isinstance(module, Block) else None

    model, (mesh, _) = Stack(), recording_mesh((4,))
    model.again = model.blocks[0]  # Another place of it.
    blocks = [*model.blocks]
    plan = auto_shard(model, mesh, Block, units=["tokens"], before=before)
    assert called == [model.tokens, *blocks]
    assert all(isinstance(block, Around) for block in model.blocks)
    assert model.again is model.blocks[0]
    assert type(model.blocks[0]).__name__ == "FSDPAround"
    check_against_steps(model, plan, micro_batches=2)
    check_against_steps(model, plan)


def test_before_must_return_a_module() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))
    with pytest.raises(WrapError, match=r"returned 3 for a Block. Return the module"):
        auto_shard(model, mesh, Block, before=lambda _: 3)


def test_torch_xlas_callable_may_shard_by_itself() -> None:
    model, (mesh, _) = Stack(), recording_mesh((4,))

    def wrap(module: nn.Module, *args: typing.Any, **kwargs: typing.Any) -> nn.Module:
        return fully_shard(checkpoint_module(module), *args, **kwargs)

    plan = auto_shard(model, mesh, auto_wrap_policy={Block}, auto_wrapper_callable=wrap)
    assert all("forward" in block.__dict__ for block in model.blocks)
    for _ in range(2):
        take_step(model)
    assert model.memory_stats()["shard_nbytes"] == plan.memory.shard_nbytes


# --- what is shown ------------------------------------------------------------------------------


def test_the_table_names_groups_bytes_and_totals() -> None:
    text = str(auto_shard(Stack(dim=64, num_blocks=6), 4, Block, mp_policy=BF16, apply=False))
    lines = text.splitlines()
    assert lines[0] == "7 groups on 4 ranks"
    assert lines[1] == "mp_policy=MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)"
    assert re.split(r"\s{2,}", lines[3]) == [
        *("group", "parameters", "bytes", "padding", "gathered", "reduced", "arguments")
    ]
    assert re.split(r"\s{2,}", lines[4]) == [
        *("5 x blocks.0 ... blocks.4", "33,280", "130.0 KiB", "0 B", "2 x 48.8 KiB", "97.5 KiB")
    ]
    assert lines[6].startswith("the root")
    assert lines[8].startswith("model: ")
    assert "kept from forward to backward" in lines[9]
    assert lines[11].startswith("a step of a rank: 12 all-gathers")
    assert len(lines) == 12


def test_it_is_printed_by_the_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        mesh, _ = recording_mesh((4,), rank=rank)
        plan = auto_shard(Stack(), mesh, Block, verbose=True)
        assert capsys.readouterr().out == ("" if rank else f"{plan}\n")
        assert repr(plan) == "<ShardPlan of 4 groups on (4,) ranks, applied>"


def test_it_needs_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none in a process that began without."""
    monkeypatch.setattr(sys, "stdout", None)
    mesh, _ = recording_mesh((4,), rank=0)
    auto_shard(Stack(), mesh, Block, verbose=True)


def test_all_ranks_plan_the_same() -> None:
    texts = set()
    for rank in range(4):
        mesh, _ = recording_mesh((2, 2), rank=rank)
        texts.add(str(auto_shard(TiedBlocks(), mesh, nn.Linear, apply=False)))
    assert len(texts) == 1


def test_the_docstring_names_what_there_is() -> None:
    text = entry.auto_shard.__doc__
    assert text is not None
    for word in ("balanced", "no_split_modules", "size", "no_wrap"):
        assert f'"{word}"' in text
