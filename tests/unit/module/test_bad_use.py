"""What cannot work ends in an error that says what to do, and leaves the model usable."""

from __future__ import annotations

import inspect
import threading
import typing
import weakref
from functools import partial

import pytest
import torch
from recorded import Recorded
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh

from recording import recording_mesh
from shardkit import (
    CPUOffloadPolicy,
    MeshError,
    MixedPrecisionPolicy,
    ShardedTensor,
    ShardedTensorError,
    StateError,
    WrapError,
    apply_full,
    auto_shard,
    checkpoint_activations,
    fully_shard,
    materialize,
    register_fsdp_forward_method,
    share_comm_ctx,
    strategy,
    summon_full_params,
)
from shardkit._compat.torch_tensors import HAS_GRAD_DTYPE

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def make_model() -> tuple[typing.Any, typing.Any]:
    """Return a model of three plain layers and a mesh."""
    mesh, _ = recording_mesh((4,))
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), mesh


def sharded_model() -> tuple[typing.Any, typing.Any]:
    model, mesh = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh)
    return fully_shard(model, mesh), mesh


def trains(model: nn.Module) -> bool:
    """Whether a step runs and every parameter gets a gradient."""
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


# --- which modules ------------------------------------------------------------------------------


class Weights(nn.ParameterDict):
    def forward(self, x: Tensor) -> Tensor:
        return x * self["scale"]


@pytest.mark.parametrize(
    ("container", "message"),
    [
        (nn.ModuleList([nn.Linear(4, 4)]), r"ModuleList has no forward.*on each module in it"),
        (nn.ModuleDict({"a": nn.Linear(4, 4)}), r"ModuleDict has no forward.*each module in it"),
        (nn.ParameterList([torch.ones(4)]), r"List has no forward.* on the module that holds it\."),
        (
            Weights({"scale": torch.ones(4)}),
            r"Weights is a container, whose parameters may be used",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_containers_that_are_not_called(container: nn.Module, message: str) -> None:
    mesh, _ = recording_mesh((2,))
    before = type(container)
    with pytest.raises(WrapError, match=message):
        fully_shard(container, mesh)
    assert type(container) is before


@pytest.mark.parametrize("by", ["root", "layer", "auto_shard"])
def test_lazy_modules_before_their_first_forward(by: str) -> None:
    mesh, _ = recording_mesh((4,))
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    calls = {
        "root": lambda: fully_shard(model, mesh),
        "layer": lambda: fully_shard(model[0], mesh),
        "auto_shard": lambda: auto_shard(model, 4, apply=False),
    }
    name = "weight" if by == "layer" else "0.weight"
    with pytest.raises(WrapError, match=f"'{name}' has no shape yet: LazyLinear .* Run the model"):
        calls[by]()
    assert type(model) is nn.Sequential
    model(torch.ones(2, 4))
    assert trains(fully_shard(model, mesh))


class OnSphere(nn.Parameter):
    """As geoopt's, whose optimizers ask for the class."""


def test_a_trained_parameter_loses_its_class() -> None:
    mesh, _ = recording_mesh((4,))
    model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = OnSphere(model[0].weight.detach())
    model[1].weight = OnSphere(model[1].weight.detach(), requires_grad=False)
    with pytest.warns(UserWarning, match=r"'0\.weight' is a OnSphere: .* not its class") as found:
        fully_shard(model, mesh)
    assert len(found) == 1


@pytest.mark.parametrize("of", [set, list, iter])
def test_ignored_parameters_may_come_one_by_one(of: Callable[[object], typing.Any]) -> None:
    """`parameters()` of a module yields each of them only once."""
    mesh, _ = recording_mesh((4,))
    for by in ("fully_shard", "auto_shard", "units"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ignored = of(model[1].parameters())
        if by == "fully_shard":
            fully_shard(model, mesh, ignored_params=ignored)
        elif by == "auto_shard":
            auto_shard(model, mesh, {"0": {}}, ignored_params=ignored)
        else:
            auto_shard(model, mesh, {"0": {}, "": {"ignored_params": ignored}})
        assert not any(isinstance(param, ShardedTensor) for param in model[1].parameters())
        assert isinstance(model[0].weight, ShardedTensor)


def test_ignored_parameters_of_lazy_modules() -> None:
    mesh, _ = recording_mesh((4,))
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    assert trains(fully_shard(model, mesh, ignored_params=set(model[1].parameters())))


@pytest.mark.filterwarnings("ignore:.torch.jit.* is (deprecated|not supported):DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 4))])
def test_modules_of_torch_jit(make: Callable[[nn.Module], nn.Module]) -> None:
    """Their parameters cannot be exchanged; ignored ones train."""
    mesh, _ = recording_mesh((4,))
    model = nn.Sequential(nn.Linear(4, 4), make(nn.Linear(4, 4)))
    with pytest.raises(WrapError, match=r"^the module is scripted or traced by torch.jit"):
        fully_shard(model[1], mesh)
    with pytest.raises(WrapError, match=r"parameter '1.weight' is scripted .* ignored_params"):
        fully_shard(model, mesh)
    with pytest.raises(WrapError, match=r"parameter '1.weight' is scripted"):
        auto_shard(model, 4, apply=False)
    assert type(model) is nn.Sequential
    assert trains(fully_shard(model, mesh, ignored_params=set(model[1].parameters())))


# --- arguments of other kinds -------------------------------------------------------------------


def test_ignored_parameters_are_no_modules() -> None:
    model, mesh = make_model()
    for given in (model[0], model, [model[0]], 3, "0.weight"):
        wrong: typing.Any = given
        with pytest.raises(WrapError, match=r"takes Parameter objects, .* not names or modules"):
            fully_shard(model, mesh, ignored_params=wrong)
    assert trains(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_placement_fn": 0}, r"shard_placement_fn must be a function of a parameter, got 0"),
        ({"before": 3}, r"before must be a function or None, got 3"),
        ({"param_init_fn": "normal"}, r"param_init_fn must be a function or None, got 'normal'"),
        ({"apply": "no"}, r"apply must be True or False, got 'no'"),
        ({"policy": nn.Linear(4, 4)}, r"a policy is a class or its name, .* got Linear"),
        ({"offload_budget_nbytes": "80GiB"}, r"must be 0 or more bytes, got '80GiB'"),
        ({"offload_budget_nbytes": float("nan")}, r"must be 0 or more bytes, got nan"),
    ],
)
def test_options_of_auto_shard(options: dict[str, typing.Any], message: str) -> None:
    model, mesh = make_model()
    with pytest.raises(WrapError, match=message):
        auto_shard(model, mesh, **options)
    assert trains(model)


def test_the_module_comes_before_the_function() -> None:
    model, _ = sharded_model()
    function: typing.Any = print
    with pytest.raises(StateError, match=r"expected a module, .* apply_full\(module, fn\)"):
        apply_full(function, model)


@pytest.mark.parametrize(
    ("setter", "flag"),
    [
        ("set_allocate_memory_from_process_group_for_comm", "enable"),
        ("set_debug", "dummy_gathers"),
        ("set_debug", "dummy_reductions"),
        ("set_force_sum_reduction_for_comms", "enable"),
        ("set_is_last_backward", "is_last_backward"),
        ("set_keep_unsharded_storage", "keep"),
        ("set_manual_backward_finalization", "enabled"),
        ("set_optimization_barriers", "forward"),
        ("set_optimization_barriers", "backward"),
        ("set_prefetch_policy", "forward"),
        ("set_reduce_scatter_unused_params", "reduce_scatter_unused_params"),
        ("set_requires_all_reduce", "requires_all_reduce"),
        ("set_requires_gradient_sync", "requires_gradient_sync"),
        ("set_reshard_after_backward", "reshard_after_backward"),
        ("set_reshard_after_forward", "reshard_after_forward"),
        ("set_separate_reduce_scatter_group", "enable"),
        ("set_sync_on_finalization", "enable"),
        ("set_unshard_in_backward", "unshard_in_backward"),
    ],
)
def test_a_flag_is_no_text(setter: str, flag: str) -> None:
    """Python takes it for True."""
    model, _ = sharded_model()
    with pytest.raises(StateError, match=rf"{flag} must be True or False, got 'no'"):
        getattr(model, setter)(**{flag: "no"})
    assert trains(model)


def test_a_flag_of_a_policy_is_no_text() -> None:
    wrong: typing.Any = "false"
    with pytest.raises(WrapError, match="pin_memory must be True or False, got 'false'"):
        CPUOffloadPolicy(pin_memory=wrong)
    with pytest.raises(WrapError, match="cast_forward_inputs must be True or False"):
        MixedPrecisionPolicy(cast_forward_inputs=wrong)
    with pytest.raises(WrapError, match="param_dtype_override_fn must be a function or None"):
        MixedPrecisionPolicy(param_dtype_override_fn=wrong)


def test_units_are_names() -> None:
    """A module has a length, but it is no collection of names."""
    model, mesh = make_model()
    for wrong, shown in ((model, "a Sequential"), (model[0], "a Linear"), (3, "3")):
        given: typing.Any = wrong
        with pytest.raises(WrapError, match=rf"units must be names of modules .* got {shown}"):
            auto_shard(model, mesh, units=given)
    assert trains(model)


def test_activations_are_of_a_module() -> None:
    wrong: typing.Any = "Block"
    with pytest.raises(StateError, match="takes a module first, got 'Block'"):
        checkpoint_activations(wrong)


def test_a_strategy_wants_the_sharded_root() -> None:
    model, _ = make_model()
    for use in (strategy("zero1").prepare, partial(strategy("zero1").begin_micro_batch, is_last=1)):
        with pytest.raises(StateError, match="got a Sequential that is not sharded"):
            use(model)


# --- in which order -----------------------------------------------------------------------------


@pytest.mark.parametrize("has_run", [False, True])
def test_a_child_after_its_parent_took_its_parameters(*, has_run: bool) -> None:
    model, mesh = make_model()
    fully_shard(model, mesh)
    if has_run:
        model(torch.ones(2, 4))
    with pytest.raises(WrapError, match=r"'weight' of this Linear is sharded already.*inner"):
        fully_shard(model[0], mesh)
    assert type(model[0]) is nn.Linear
    assert trains(model)


def test_a_child_that_was_put_in_after_the_first_forward() -> None:
    model, mesh = sharded_model()
    assert trains(model)
    model[1] = fully_shard(nn.Linear(4, 4), mesh)
    assert trains(model)
    model[1] = nn.Tanh()
    assert trains(model)


def test_hooks_that_are_set_on_a_piece() -> None:
    """FSDP2 calls them; here they would be left out without a word."""
    model, _ = sharded_model()
    piece = model[0].weight._local_tensor  # noqa: SLF001 - DTensor's name
    piece.fsdp_pre_all_gather = lambda *_: None
    with pytest.raises(StateError, match=r"'0.weight' has fsdp_pre_all_gather, which no gather"):
        trains(model)
    del piece.fsdp_pre_all_gather
    assert trains(model)


def test_a_mode_that_copies_saved_tensors() -> None:
    model, _ = sharded_model()
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(StateError, match=r"allow_mutation_on_saved_tensors.* has been given back"),
    ):
        model(torch.ones(2, 4))
    assert trains(model)


def test_another_model_sharded_later_is_no_newcomer() -> None:
    model, mesh = sharded_model()
    assert trains(model)
    fully_shard(nn.Linear(4, 4), mesh)
    assert trains(model)


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_weak_reference_to_a_parameter() -> None:
    model, mesh = make_model()
    reference = weakref.ref(model[0].weight)
    with pytest.raises(WrapError, match=r"'0.weight' cannot be sharded in place: [^.]*\. Call"):
        fully_shard(model, mesh)
    assert reference() is model[0].weight


@pytest.mark.parametrize("goes", [False, True])
def test_a_graph_that_uses_a_parameter(*, goes: bool) -> None:
    """A thread may drop it soon, as that of a process group drops a parameter after a broadcast."""
    model, mesh = make_model()
    graphs = [model[0].weight.square()]
    if goes:
        threading.Timer(0.1, graphs.clear).start()
    else:
        with pytest.raises(WrapError, match=r"'0.weight' cannot be sharded in place.*old outputs"):
            fully_shard(model, mesh)
        assert type(model) is nn.Sequential
        graphs.clear()
    fully_shard(model, mesh)
    assert trains(model)


@pytest.mark.usefixtures("_process_group")
def test_wrapping_in_ddp() -> None:
    model, _ = sharded_model()
    with pytest.raises(StateError, match=r"DistributedDataParallel cannot wrap this Sequential"):
        nn.parallel.DistributedDataParallel(model)
    assert dict(inspect.getmembers(model))["training"]
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert trains(model)


@pytest.mark.usefixtures("_process_group")
def test_sharding_what_ddp_has_wrapped() -> None:
    model, mesh = make_model()
    replica = nn.parallel.DistributedDataParallel(model)
    holder = nn.Sequential(replica)
    for module, name in ((replica, "the module"), (holder, "0")):
        with pytest.raises(WrapError, match=f"{name} is wrapped in DistributedDataParallel"):
            fully_shard(module, mesh)
    assert type(model) is nn.Sequential


@pytest.mark.usefixtures("_process_group")
def test_sharding_what_torch_has_sharded() -> None:
    model, mesh = make_model()
    torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for module, name in ((model, "the module"), (nn.Sequential(model), "0")):
        with pytest.raises(WrapError, match=f"own fully_shard was called on {name} before"):
            fully_shard(module, mesh)


# --- lists --------------------------------------------------------------------------------------


def test_an_empty_list() -> None:
    with pytest.raises(WrapError, match="empty list"):
        fully_shard([], make_model()[1])


def test_a_list_that_holds_something_else() -> None:
    model, mesh = make_model()
    with pytest.raises(WrapError, match="got str"):
        fully_shard([model[0], "2"], mesh)
    assert type(model[0]) is nn.Linear


def test_a_module_inside_another_of_the_list_belongs_to_that() -> None:
    model, mesh = make_model()
    inner = nn.Sequential(model[0])
    fully_shard([inner, model[0]], mesh)
    assert type(model[0]) is nn.Linear
    assert type(inner).__name__ == "FSDPSequential"


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Torch 2.9 has no grad_dtype.")
def test_gradients_of_a_dtype_that_cannot_hold_them() -> None:
    model, mesh = make_model()
    weight = model[0].weight
    weight.grad_dtype = torch.int32
    with pytest.raises(WrapError, match=r"'0.weight' has grad_dtype=torch.int32: .* averaged"):
        fully_shard(model, mesh)
    weight.grad_dtype = weight.dtype
    fully_shard(model, mesh)
    with pytest.raises(ShardedTensorError, match=r"'0.weight' cannot take grad_dtype=torch.int32"):
        weight.grad_dtype = torch.int32
    assert trains(model)


class Gather:
    """Never called."""

    def allocate(self, *_: object, **__: object) -> Tensor:
        raise AssertionError

    __call__ = allocate


def set_twice(model: typing.Any) -> None:
    model[0].set_all_reduce_hook(lambda grad: None)  # noqa: ARG005
    model[0].set_all_reduce_hook(print)


def memory_then_symmetric(model: typing.Any) -> None:
    model[0].set_allocate_memory_from_process_group_for_comm(True)
    model[0].set_symm_mem_for_comm()


def scatter_then_memory(model: typing.Any) -> None:
    model[0].set_custom_reduce_scatter(Gather())
    model[0].set_allocate_memory_from_process_group_for_comm(True)


BAD_SETTINGS: dict[str, tuple[Callable[[typing.Any], object], str]] = {
    "factor 0": (lambda m: m.set_gradient_divide_factor(0), "cannot be divided by 0"),
    "factor nan": (lambda m: m.set_gradient_divide_factor(float("nan")), "divided by nan"),
    "factor -1": (lambda m: m.set_gradient_divide_factor(-1), "factor: .* divided by -1"),
    "factor text": (lambda m: m.set_gradient_divide_factor("two"), "divided by 'two'"),
    "max_norm -1": (lambda m: m.clip_grad_norm_(-1), "max_norm must be .* at least 0, got -1"),
    "max_norm nan": (lambda m: m.clip_grad_norm_(float("nan")), "max_norm .* got nan"),
    "max_norm None": (lambda m: m.clip_grad_norm_(None), "max_norm .* got None"),
    "norm_type -1": (lambda m: m.clip_grad_norm_(1.0, -1), "norm_type .* got -1"),
    "hook twice": (set_twice, r"has an all-reduce hook already. Remove it first"),
    "memory twice": (memory_then_symmetric, "takes its buffers from the process group"),
    "scatter and memory": (scatter_then_memory, "communicates by functions of yours"),
    "prefetch plain": (
        lambda m: m[0].set_modules_to_forward_prefetch([m[1]]),
        "Tanh cannot be prefetched: it is not sharded",
    ),
    "prefetch backward": (
        lambda m: m[0].set_modules_to_backward_prefetch(["2"]),
        "str cannot be prefetched",
    ),
    "prefetch no list": (
        lambda m: m[0].set_modules_to_forward_prefetch(m[2]),
        r"a list of modules, got Linear. Write \[module\]",
    ),
    "prefetch None": (
        lambda m: m[0].set_modules_to_forward_prefetch(None),
        r"a list of modules, got NoneType. Write \[module\]",
    ),
    "prefetch no list without a group": (
        lambda m: m.set_modules_to_backward_prefetch(m[2]),
        r"a list of modules, got Linear. Write \[module\]",
    ),
    "hook": (
        lambda m: m.set_all_reduce_hook("mean"),
        "hook must be a function or None, got 'mean'",
    ),
    "all-gather": (lambda m: m.set_custom_all_gather(3), "comm must be a function or None, got 3"),
    "reduce-scatter": (lambda m: m.set_custom_reduce_scatter([]), "comm must be a function .* got"),
    "clip flag": (
        lambda m: m.clip_grad_norm_(1.0, error_if_nonfinite="no"),
        "error_if_nonfinite must be True or False, got 'no'",
    ),
    "policy": (lambda m: m.set_prefetch_policy(backward="before"), "'pre', 'post' or 'none'"),
    "reshard int": (lambda m: m.set_reshard_after_forward(2), "must be True or False, got 2"),
    "buffers 0": (lambda m: m.set_reduce_scatter_max_input_buffers(0), "at least 1, got 0"),
    "buffers True": (lambda m: m.set_reduce_scatter_max_input_buffers(True), "got bool"),
    "method": (lambda m: register_fsdp_forward_method(m, "encode"), "no method 'encode'"),
    "method None": (lambda m: register_fsdp_forward_method(m, None), "no method None"),
    "method of none": (
        lambda _: register_fsdp_forward_method(None, "encode"),
        "model: expected a module, not NoneType",
    ),
    "share": (lambda m: share_comm_ctx([m, m[1]]), "takes sharded modules, got Tanh"),
    "share no list": (share_comm_ctx, r"a list of modules, got Sequential"),
    "materialize": (lambda _: materialize(None), "model: expected a module, not NoneType"),
    "apply_full": (lambda m: apply_full(m, None), "fn must be a function of a module, got None"),
    "summon": (
        lambda m: summon_full_params(m, writeback="no").__enter__(),
        "writeback must be True or False, got 'no'",
    ),
    "prepare": (lambda m: strategy("hybrid").prepare(m[1]), "got a Tanh that is not sharded"),
    "micro-batch": (
        lambda m: strategy("hybrid").begin_micro_batch(m, is_last="no"),
        "is_last must be True or False, got 'no'",
    ),
}


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("bad", BAD_SETTINGS)
def test_settings_that_cannot_be_right(bad: str, *, has_run: bool) -> None:
    model, _ = sharded_model()
    if has_run:
        assert trains(model)
    choose, message = BAD_SETTINGS[bad]
    with pytest.raises(StateError, match=message):
        choose(model)
    assert trains(model)


def test_a_stream_for_the_hook_of_a_hybrid_mesh() -> None:
    recorded = Recorded((2, 2))
    with pytest.raises(StateError, match="a stream of its own"):
        recorded.model.layers[0].set_all_reduce_hook(print, stream=object())


def test_prefetching_a_module_of_another_root() -> None:
    model, _ = sharded_model()
    other, _ = sharded_model()
    model[0].set_modules_to_forward_prefetch([other[0]])
    with pytest.raises(StateError, match="not in the same root"):
        model(torch.ones(2, 4))


def test_sharing_streams_after_the_first_forward() -> None:
    model, _ = sharded_model()
    other, _ = sharded_model()
    assert trains(other)
    with pytest.raises(StateError, match="has run with streams of its own"):
        share_comm_ctx([model, other])


def test_sharing_streams_with_a_root_that_has_run() -> None:
    model, _ = sharded_model()
    other, _ = sharded_model()
    assert trains(model)
    share_comm_ctx([model, model, other, other])
    assert trains(other)
    assert trains(model)


@pytest.mark.parametrize("value", [0, 3, -4, 8, "2"])
def test_partial_resharding_over_a_number_that_does_not_divide(value: typing.Any) -> None:
    model, mesh = make_model()
    with pytest.raises(WrapError, match=f"divides the shard axis of 4, got {value!r}"):
        fully_shard(model, mesh, reshard_after_forward=value)
    assert type(model) is nn.Sequential


@pytest.mark.parametrize(("returned", "message"), [("rows", "may return None"), (7, "may return")])
def test_placements_that_are_none(returned: object, message: str) -> None:
    model, mesh = make_model()
    with pytest.raises(WrapError, match=message):
        fully_shard(model, mesh, shard_placement_fn=lambda _: returned)


@pytest.mark.parametrize("dims", ["dp", ("dp",), {"shard": "dp"}])
def test_data_parallel_dims_that_are_none(dims: object) -> None:
    model, mesh = make_model()
    with pytest.raises(MeshError, match="must be FSDP2's DataParallelMeshDims, got"):
        fully_shard(model, mesh, dp_mesh_dims=dims)


def test_a_placement_of_a_dim_that_is_not_there() -> None:
    from torch.distributed.tensor import Shard

    model, mesh = make_model()
    with pytest.raises(WrapError, match=r"Shard\(dim=1\) for '0.bias'.*has no dim 1"):
        fully_shard(model, mesh, shard_placement_fn=lambda _: Shard(1))


# --- hooks --------------------------------------------------------------------------------------


def test_a_hook_that_awaits_the_gradients_of_several_parameters() -> None:
    """Torch would call it for the sharded parameters themselves, which no forward uses."""
    model, mesh = make_model()
    handle = register_multi_grad_hook(list(model.parameters()), lambda _: None)
    why = "weight' cannot have a hook of register_multi_grad_hook.*on each parameter"
    with pytest.raises(WrapError, match=f"'0.{why}"):
        fully_shard(model, mesh)
    handle.remove()
    fully_shard(model, mesh)
    with pytest.raises(ShardedTensorError, match=f"'0.{why}"):
        register_multi_grad_hook(list(model.parameters()), lambda _: None)
    seen: list[Tensor] = []
    register_multi_grad_hook(list(model.parameters()), seen.append, mode="any")
    assert trains(model)
    assert len(seen) == 1


# --- exports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_unsharded", [False, True])
@pytest.mark.parametrize(
    "by", [torch.export.export, torch.jit.trace, lambda model, _: torch.jit.script(model)]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_sharded_model_is_not_exported(
    by: Callable[..., typing.Any], *, is_unsharded: bool
) -> None:
    model, _ = sharded_model()
    if is_unsharded:
        for module in (model, model[0], model[2]):
            module.unshard()
    with pytest.raises(StateError, match=r"cannot be exported.*save_full\(path, model\)"):
        by(model, (torch.ones(2, 4),))
    assert trains(model)


# --- inside a forward ---------------------------------------------------------------------------


class Freezer(nn.Linear):
    """Freezes its own bias while it runs, once."""

    armed = True

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if type(self).armed:
            type(self).armed = False
            self.bias.requires_grad_(False)
        return out


def test_requires_grad_changed_inside_forward() -> None:
    mesh, _ = recording_mesh((4,))
    Freezer.armed = True
    model = fully_shard(nn.Sequential(fully_shard(Freezer(4, 4), mesh)), mesh)
    with pytest.raises(StateError, match=r"requires_grad of '0.bias' was changed inside"):
        model(torch.ones(2, 4))
    assert trains(model)
