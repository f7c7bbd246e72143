"""Which modules each kind of policy chooses, and what it refuses."""

from __future__ import annotations

import functools
import itertools
import typing
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap

from models import GPT, Block, ConvNet
from recording import recording_mesh
from shardkit import (
    MixedPrecisionPolicy,
    WrapError,
    always_wrap_policy,
    auto_shard,
    fully_shard,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from wrapped_models import Attention, Stack, TiedBlocks

if typing.TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.helpers

BLOCKS = [("blocks.0",), ("blocks.1",), ("blocks.2",), ("",)]


def names(
    model: nn.Module, policy: typing.Any = None, **options: typing.Any
) -> list[tuple[str, ...]]:
    """Return the groups, in the order of sharding, the root last."""
    plan = auto_shard(model, 4, policy, apply=False, **options)
    return [group.names for group in plan.groups]


# --- classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [Block, {Block}, [Block], "Block", {"Block"}, "models.Block", (Block, "Block")],
    ids=str,
)
def test_layers_are_chosen_by_class_or_by_its_name(policy: typing.Any) -> None:
    assert names(Stack(), policy) == BLOCKS


def test_subclasses_are_chosen_as_well() -> None:
    class Larger(Block):
        pass

    model = Stack(num_blocks=2)
    model.blocks[1] = Larger(32, 4)
    assert names(model, Block) == [("blocks.0",), ("blocks.1",), ("",)]
    assert names(model, "Block") == [("blocks.0",), ("blocks.1",), ("",)]  # As Accelerate.
    assert names(model, {Larger}) == names(model, "Larger") == [("blocks.1",), ("",)]
    model._no_split_modules = ["Block"]  # noqa: SLF001 - their name
    assert names(model, "no_split_modules") == names(model, Block)


def test_layers_inside_of_layers_come_first() -> None:
    found = names(Stack(num_blocks=1), ["Block", nn.Linear])
    inner = [(f"blocks.0.{name}",) for name in ("qkv", "proj", "fc1", "fc2")]
    assert set(found) == {*inner, ("blocks.0",), ("head",), ("",)}
    assert found.index(("blocks.0",)) > max(map(found.index, inner))


def test_models_of_transformers_name_their_layers() -> None:
    model = Stack()
    model._no_split_modules = ["Block", "OfAnotherModel"]  # noqa: SLF001 - their name
    assert names(model, "no_split_modules") == BLOCKS
    assert names(model, "TRANSFORMER_BASED_WRAP") == BLOCKS


def test_a_class_that_no_module_has_names_the_nearest() -> None:
    with pytest.raises(WrapError, match=r"is of a class 'Blok'. The nearest ones are 'Block'"):
        names(Stack(), "Blok")


def test_a_class_of_which_there_is_none_is_an_error() -> None:
    with pytest.raises(WrapError, match="chooses no module of this Stack"):
        names(Stack(), nn.Conv2d)


def test_a_model_that_names_no_layers_is_told_what_to_pass() -> None:
    with pytest.raises(WrapError, match="this Stack has no _no_split_modules"):
        names(Stack(), "no_split_modules")


@pytest.mark.parametrize("policy", [{3}, [int], 3.5])
def test_what_is_no_policy_is_refused(policy: typing.Any) -> None:
    with pytest.raises(WrapError, match="a policy"):
        names(Stack(), policy)


def test_a_class_may_be_called_as_a_policy_is() -> None:
    class Size(nn.Linear):
        pass

    assert names(nn.Sequential(Size(2, 2), nn.Linear(2, 2)), "Size") == [("0",), ("",)]


def test_no_wrap_is_one_group() -> None:
    assert names(Stack(), "NO_WRAP") == [("",)]


# --- names --------------------------------------------------------------------------------------


def test_names_and_patterns_with_arguments() -> None:
    policy = {
        "tokens": "free_full_weight",
        "blocks.*": {},
        "blocks.2": {"reshard_after_forward": False},
        ("norm", "head"): "keep_full_weight",
    }
    plan = auto_shard(Stack(), 4, policy, apply=False)
    found = {group.names: group.is_resharded for group in plan.groups}
    assert found == {
        ("tokens",): True,
        ("blocks.0",): True,
        ("blocks.1",): True,
        ("blocks.2",): False,
        ("norm", "head"): False,
    }


def test_a_star_is_one_part_of_a_name() -> None:
    assert names(Stack(), {"blocks.*": {}}) == BLOCKS
    assert len(names(Stack(), {"blocks.*.qkv": {}})) == 4


def test_the_root_has_arguments_by_the_empty_name() -> None:
    plan = auto_shard(
        Stack(), 4, {"blocks.*": {}, "": {"reshard_after_forward": True}}, apply=False
    )
    assert plan.groups[-1].names == ("",)
    assert plan.groups[-1].is_resharded


def test_units_are_taken_out_of_the_groups_of_a_policy() -> None:
    found = names(Stack(), Block, units=["tokens", ("blocks.0", "blocks.1"), ("norm", "head")])
    assert found == [("tokens",), ("blocks.0", "blocks.1"), ("blocks.2",), ("norm", "head")]


def test_units_may_have_arguments() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16)
    plan = auto_shard(Stack(), 4, Block, units={"head": {"mp_policy": policy}}, apply=False)
    head = next(group for group in plan.groups if group.names == ("head",))
    assert head.arguments["mp_policy"] == policy
    assert head.unsharded_nbytes * 2 == head.nbytes + head.padding_nbytes


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"bloks.*": {}}, r"has the name 'bloks.\*'. The nearest ones are 'blocks"),
        ({"blocks": {}}, r"'blocks', a ModuleList, has no forward.*'blocks.\*'"),
        ({"blocks.*": {"reshard": True}}, "argument 'reshard', which fully_shard does not have"),
        ({"blocks.*": 3}, "the policy says 3 of"),
        ({3: {}}, "groups are named by strings"),
        ({("blocks.0", "head"): {}, "head": {}}, "'head' is in two groups"),
        ({("blocks.0", "blocks.0.fc1"): {}}, "overlaps itself: 'blocks.0.fc1' is inside"),
        (
            {("blocks.0", "blocks.1.fc1"): {}, ("blocks.1", "blocks.0.fc1"): {}},
            "overlap: each has a module inside a module of the other",
        ),
    ],
    ids=str,
)
def test_what_names_cannot_be(policy: typing.Any, message: str) -> None:
    with pytest.raises(WrapError, match=message):
        names(Stack(), policy)


class Chain(nn.ModuleList):
    """A list that calls its modules itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


@pytest.mark.parametrize("policy", [Chain, "Chain", {"chain": {}}, lambda m: isinstance(m, Chain)])
def test_a_list_with_a_forward_is_chosen_as_other_modules_are(policy: typing.Any) -> None:
    model = nn.Sequential(OrderedDict(chain=Chain([nn.Linear(4, 4)]), head=nn.Linear(4, 4)))
    assert names(model, policy) == [("chain",), ("",)]


def test_a_list_with_a_forward_is_chosen_by_size() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for kind, expected in ((Chain, [("chain",), ("",)]), (nn.ModuleList, [("",)])):
        model = nn.Sequential(OrderedDict(chain=kind(layers), head=nn.Linear(4, 4)))
        assert names(model, fsdp_min_num_params=30) == expected


class Weights(nn.ParameterList):
    def forward(self) -> torch.Tensor:
        return torch.stack(list(self)).sum(0)


@pytest.mark.parametrize("container", [nn.ParameterList, Weights])
def test_a_list_of_parameters_is_no_unit(container: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(OrderedDict(weights=container([torch.ones(4)]), head=nn.Linear(4, 4)))
    with pytest.raises(
        WrapError, match=r"'weights', a .*, so its .* Name the module that holds it\."
    ):
        names(model, {"weights": {}})
    assert names(model, always_wrap_policy) == [("head",), ("",)]


# --- callables ----------------------------------------------------------------------------------


def test_a_callable_may_return_arguments() -> None:
    """As in Composer."""

    def policy(module: nn.Module) -> typing.Any:
        if isinstance(module, nn.Embedding):
            return {"reshard_after_forward": False}
        return isinstance(module, Block)

    plan = auto_shard(Stack(), 4, policy, apply=False)
    found = {group.names: group.is_resharded for group in plan.groups}
    assert found[("tokens",)] is False
    assert found[("blocks.1",)] is True


def test_a_callable_that_returns_something_else_is_refused() -> None:
    def policy(module: nn.Module) -> int:
        return len(type(module).__name__)

    with pytest.raises(WrapError, match=r"policy\(\) returned 9 for 'tokens'"):
        names(Stack(), policy)


def test_a_callable_of_other_arguments_is_refused() -> None:
    def policy(name: str, module: nn.Module, depth: int, numel: int) -> bool:
        return bool(name) and isinstance(module, nn.Linear) and numel > depth

    with pytest.raises(WrapError, match=r"policy\(\) takes .*, but it is called with \(module\)"):
        names(Stack(), policy)


def test_custom_policies_of_fsdp1_are_asked() -> None:
    def choose(module: nn.Module) -> typing.Any:
        return {"reshard_after_forward": False} if isinstance(module, Block) else False

    plan = auto_shard(Stack(), 4, wrap.CustomPolicy(choose), apply=False)
    assert [group.names for group in plan.groups] == BLOCKS
    assert not any(group.is_resharded for group in plan.groups)


def test_nothing_in_attention_is_a_group_by_itself() -> None:
    assert names(Attention(), always_wrap_policy) == [("tokens",), ("attention",), ("head",)]
    assert names(Attention(), lambda module: True) == [("tokens",), ("attention",), ("head",)]  # noqa: ARG005


# --- torch_xla's and FSDP1's protocol -----------------------------------------------------------


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def by_third(module: nn.Module, recurse: bool, n: int) -> bool:
    return recurse or (isinstance(module, Block) and n > 0)


IN_PROTOCOL: dict[str, typing.Any] = {
    "ours": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "torch's": functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
    "torch's lambda": functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=is_block),
    "ModuleWrapPolicy": wrap.ModuleWrapPolicy({Block}),
    "by position": by_third,
    "by keywords": lambda module, recurse, **kw: (
        recurse
        or (isinstance(module, Block) and kw["nonwrapped_numel"] == kw["unwrapped_params"] > 0)
    ),
    "the rest by position": lambda m, recurse, *_: recurse or isinstance(m, Block),
    "torch_xla's name": lambda module, recurse, unwrapped_params: (
        recurse or (isinstance(module, Block) and unwrapped_params > 0)
    ),
}


@pytest.mark.parametrize("name", IN_PROTOCOL)
def test_policies_in_the_protocol_choose_blocks(name: str) -> None:
    assert names(Stack(), IN_PROTOCOL[name]) == BLOCKS
    assert names(Stack(), auto_wrap_policy=IN_PROTOCOL[name]) == BLOCKS


class _Wrapped(nn.Module):
    """What torch's `_recursive_wrap` puts around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


def wrapped_by_torch(model: nn.Module, policy: Callable[..., bool]) -> set[str]:
    before = {id(module): name for name, module in model.named_modules()}
    wrap._recursive_wrap(  # noqa: SLF001 - what FSDP1 calls
        model, policy, _Wrapped, set(), set(), only_wrap_children=True
    )
    return {before[id(m.inner)] for m in model.modules() if isinstance(m, _Wrapped)}


@pytest.mark.parametrize("make", [Stack, GPT, ConvNet, Attention, TiedBlocks])
@pytest.mark.parametrize("min_num_params", [1, 100, 500, 2_000, 4_000, 20_000])
def test_by_size_as_torch_chooses(make: Callable[[], nn.Module], min_num_params: int) -> None:
    ours = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    theirs = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=min_num_params)
    expected = wrapped_by_torch(make(), theirs)
    for policy in (ours, theirs):
        plan = auto_shard(make(), 4, policy, apply=False)
        mine = {*itertools.chain(*(group.names for group in plan.groups)), *plan.without_group}
        assert mine - {""} == expected


def test_by_size_with_accelerates_argument() -> None:
    assert names(Stack(), fsdp_min_num_params=4_000) == BLOCKS


def test_by_size_leaves_classes_whole_or_out() -> None:
    leaves = functools.partial(
        size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules={Block}
    )
    assert not any("." in name[9:] for (name,) in names(Stack(), leaves))
    without = functools.partial(
        size_based_auto_wrap_policy, min_num_params=1, exclude_wrap_modules={Block, nn.ModuleList}
    )
    assert ("blocks.0",) not in names(Stack(), without)
    assert ("blocks.0.fc1",) in names(Stack(), without)


# --- what cannot be ------------------------------------------------------------------------------


def test_two_ways_to_choose_are_one_too_many() -> None:
    with pytest.raises(WrapError, match=r"all choose modules. Pass one"):
        names(Stack(), Block, fsdp_min_num_params=10)
    with pytest.raises(WrapError, match="both prepare modules"):
        names(Stack(), Block, before=is_block, auto_wrapper_callable=is_block)


def test_what_is_sharded_already_is_refused() -> None:
    model, (mesh, _) = Stack(), recording_mesh((2,))
    fully_shard(model.blocks[1], mesh)
    with pytest.raises(WrapError, match=r"'blocks.1' of this Stack is sharded already, as Block"):
        auto_shard(model, mesh, Block)
    whole = Stack()
    auto_shard(whole, mesh, Block)
    with pytest.raises(WrapError, match="fully_shard was called on this Stack before"):
        auto_shard(whole, mesh, Block)


def test_ddp_is_refused() -> None:
    ddp = nn.parallel.DistributedDataParallel
    model = Stack()
    model.extra = nn.Module.__new__(ddp)  # To make one takes ranks.
    nn.Module.__init__(model.extra)
    with pytest.raises(WrapError, match="extra is wrapped in DistributedDataParallel"):
        names(model, Block)


def test_a_list_is_no_model() -> None:
    with pytest.raises(WrapError, match="takes one model"):
        names([Stack()], Block)


def test_a_module_without_forward_is_no_root() -> None:
    with pytest.raises(WrapError, match="ModuleList has no forward"):
        names(nn.ModuleList([Stack()]), Block)


@pytest.mark.parametrize(
    "policy",
    [
        "size",
        "SIZE_BASED_WRAP",
        functools.partial(size_based_auto_wrap_policy, min_num_params=10**6),
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=10**6),
    ],
)
def test_where_nothing_is_large_enough_there_is_one_group(policy: typing.Any) -> None:
    assert names(Stack(), policy) == [("",)]


class TwoParents(nn.Module):
    """A module of 100 elements that two others have, each with 10 elements of its own."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(10, 10, bias=False)
        self.first = nn.Sequential(shared, nn.Linear(10, 1, bias=False))
        self.second = nn.Sequential(shared, nn.Linear(10, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


@pytest.mark.parametrize(
    ("min_num_params", "chosen"), [(100, [("first.0",), ("",)]), (105, [("first",), ("",)])]
)
def test_a_module_of_two_parents_counts_once(
    min_num_params: int, chosen: list[tuple[str, ...]]
) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    assert names(TwoParents(), policy) == chosen
