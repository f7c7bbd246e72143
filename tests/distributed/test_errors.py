"""Bad uses raise the same error on every rank, by name, and leave the model as it was."""

from __future__ import annotations

import copy
import functools
import typing
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit
from models import CASES, GPT, MLP
from reference import global_batch, my_batch, shard
from shardkit import MixedPrecisionPolicy, ShardedTensor, StateError, fully_shard, init_device_mesh
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    import workers

Errors = typing.Callable[..., "list[workers.Raised | None]"]


def assert_all_raise(errors: list[workers.Raised | None], type_name: str, *texts: str) -> None:
    """Check that every rank raised this class of shardkit's with these texts in the message."""
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} raised nothing"
        assert error.type_name == type_name, f"rank {rank}: {error}"
        assert "ShardkitError" in error.bases
        for text in texts:
            assert text in error.message, f"rank {rank}: no {text!r} in {error.message!r}"


# --- what fully_shard refuses -------------------------------------------------------------------


def module_without_forward() -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def dict_without_forward() -> None:
    fully_shard(nn.ModuleDict({"only": nn.Linear(2, 2)}))


def wrapped_twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def no_module() -> None:
    fully_shard(torch.ones(3))


def mesh_of_three_axes() -> None:
    fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))


def no_mesh() -> None:
    fully_shard(nn.Linear(2, 2), "shard")


def mesh_of_wrong_size() -> None:
    init_device_mesh("cpu", (3,), mesh_dim_names=("shard",))


def mesh_with_wrong_names() -> None:
    init_device_mesh("cpu", (2,), mesh_dim_names=("replicate", "shard"))


def mesh_with_one_name_twice() -> None:
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "shard"))


def mesh_of_a_quotient() -> None:
    init_device_mesh("cpu", (dist.get_world_size() / 2, 2))


def mesh_of_an_inferred_size() -> None:
    init_device_mesh("cpu", (-1, 2))


def unknown_reshard() -> None:
    fully_shard(nn.Linear(2, 2), reshard_after_forward="later")


def ignored_name_instead_of_parameter() -> None:
    fully_shard(nn.Linear(2, 2), ignored_params={"weight"})


@pytest.mark.parametrize(
    ("bad_use", "type_name", "texts"),
    [
        (module_without_forward, "WrapError", ["ModuleList", "forward"]),
        (dict_without_forward, "WrapError", ["ModuleDict", "forward"]),
        (wrapped_twice, "WrapError", ["Linear", "before"]),
        (no_module, "WrapError", ["Tensor"]),
        (mesh_of_three_axes, "MeshError", ["3"]),
        (no_mesh, "MeshError", ["str"]),
        (mesh_of_wrong_size, "MeshError", ["3", "2"]),
        (mesh_with_wrong_names, "MeshError", ["mesh_dim_names"]),
        (mesh_with_one_name_twice, "MeshError", ["each by another name", "('shard', 'shard')"]),
        (mesh_of_a_quotient, "MeshError", ["(1.0, 2)", "Divide by //"]),
        (mesh_of_an_inferred_size, "MeshError", ["(-1, 2)", "none is inferred"]),
        (unknown_reshard, "WrapError", ["reshard_after_forward", "later"]),
        (ignored_name_instead_of_parameter, "WrapError", ["ignored_params"]),
    ],
)
def test_bad_arguments_are_refused_on_every_rank(
    spawn_errors: Errors, bad_use: Callable[[], None], type_name: str, texts: list[str]
) -> None:
    assert_all_raise(spawn_errors(bad_use, 2), type_name, *texts)


def mesh_of_the_first_ranks() -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))
    model = fully_shard(MLP(), mesh)
    model(torch.ones(2, 7)).sum().backward()


def test_a_mesh_without_this_rank_is_refused_there(spawn_errors: Errors) -> None:
    """The ranks in the mesh train, the two others are told."""
    errors = spawn_errors(mesh_of_the_first_ranks, 4)
    assert errors[:2] == [None, None]
    assert_all_raise(errors[2:], "MeshError", "not in the mesh")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look as if nothing had launched it."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_without_a_process_group_the_error_names_torchrun() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(shardkit.ShardkitError, match="torchrun"):
        fully_shard(model)
    with pytest.raises(shardkit.ShardkitError, match="torchrun"):
        init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    assert type(model) is nn.Linear


def model_facts(model: nn.Module) -> list[object]:
    """Return what a failing call must not change: identities, classes, hooks, values."""
    return [
        [
            (name, id(p), type(p), p.data_ptr(), p.requires_grad)
            for name, p in model.named_parameters()
        ],
        [(name, type(module)) for name, module in model.named_modules()],
        [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],  # noqa: SLF001
        model.head.weight is model.tokens.weight,
    ]


@on_ranks(2)
def test_a_failing_call_leaves_the_module_unchanged() -> None:
    """Fail at the last of the parameters, after shared ones and an optimizer that knows them."""
    model = GPT()
    model.late = nn.Parameter(torch.ones(3))
    reference = weakref.ref(model.late)
    before = model_facts(model)
    optimizer = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
    for _ in range(2):
        try:
            fully_shard(model)
        except shardkit.ShardkitError:
            pass
        else:
            msg = "a parameter that cannot be exchanged was accepted"
            raise AssertionError(msg)
    assert model_facts(model) == before
    assert reference() is model.late
    del model.late
    loss = CASES["gpt"].loss(model, global_batch(CASES["gpt"], 0))
    loss.backward()
    optimizer.step()
    # Nothing of the failed calls is in the way of a good one.
    shard(CASES["gpt"], model)
    CASES["gpt"].loss(model, my_batch(CASES["gpt"], 0)).backward()
    assert all(isinstance(parameter.grad, ShardedTensor) for parameter in model.parameters())


# --- ranks that disagree ------------------------------------------------------------------------


def first_forward_of_different_models(difference: str) -> None:
    """Build a model that differs on rank 1, and run it."""
    odd = dist.get_rank() == 1
    model = MLP((7, 13, 5))
    if difference == "shape" and odd:
        model.layers[1] = nn.Linear(13, 6)
    if difference == "name":
        setattr(model, "extra" if odd else "other", nn.Parameter(torch.ones(2)))
    if difference == "groups" and odd:
        model.extra = nn.Parameter(torch.ones(2))
    if difference == "dtype" and odd:
        model.layers[1].to(torch.float64)
    if difference == "frozen" and odd:
        model.layers[1].weight.requires_grad_(requires_grad=False)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if difference == "policy" and odd else None
    )
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(torch.ones(2, 7))


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        ("shape", "layers.1.weight"),
        ("name", "extra"),
        ("groups", "3"),
        ("dtype", "layers.1.weight"),
        ("frozen", "layers.1"),
        ("policy", "bfloat16"),
    ],
)
def test_ranks_with_different_models_are_told_at_the_first_forward(
    spawn_errors: Errors, difference: str, text: str
) -> None:
    assert_all_raise(
        spawn_errors(first_forward_of_different_models, 2, difference), "RankMismatchError", text
    )


class Routed(nn.Module):
    """Two experts of equal shape, in groups of their own, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](self.gate(x))


def enter_different_groups(warm: bool) -> None:
    """Take a step in which each rank uses its own expert.

    Args:
        warm: After a step on which all agree, from which groups are prefetched in the order they
            were used.
    """
    model = Routed()
    for module in (*model.experts, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if warm:
        model(torch.ones(2, 4), 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 4), dist.get_rank()).sum().backward()


@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_enter_different_groups_are_told_before_the_optimizer_steps(
    spawn_errors: Errors, warm: bool
) -> None:
    """Collectives of equal size pair: without a check, ranks train on each other's weights."""
    errors = spawn_errors(enter_different_groups, 2, warm, timeout_s=20)
    assert_all_raise(errors, "RankMismatchError", "experts.0", "experts.1")


# --- parameters out of their forward ------------------------------------------------------------


class Leaky(nn.Linear):
    """Keeps the weight that its forward sees."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.weight]  # In a list: as an attribute it would be a parameter.
        return super().forward(x)


def keep_an_unsharded_weight(use: str) -> None:
    """Use the unsharded weight when its memory is gone."""
    model = nn.Sequential(Leaky(7, 7), nn.Linear(7, 5))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=True)
    model(torch.ones(2, 7))
    (weight,) = model[0].kept
    assert not isinstance(weight, ShardedTensor)
    {"sum": weight.sum, "clone": weight.clone, "matmul": lambda: torch.ones(2, 7) @ weight.t()}[
        use
    ]()


@pytest.mark.parametrize("use", ["sum", "clone", "matmul"])
def test_an_unsharded_weight_kept_after_its_forward_raises_by_name(
    spawn_errors: Errors, use: str
) -> None:
    """Reading freed memory ends the process otherwise."""
    assert_all_raise(
        spawn_errors(keep_an_unsharded_weight, 2, use), "FreedParameterError", "weight"
    )


def step_between_forward_and_backward(reshard_after_forward: bool | None) -> None:
    case = CASES["mlp"]
    model = shard(case, MLP(), reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case.loss(model, my_batch(case, 0)).backward()
    loss = case.loss(model, my_batch(case, 1))
    optimizer.step()
    loss.backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_a_step_between_forward_and_backward_is_an_error(
    spawn_errors: Errors, reshard_after_forward: bool | None
) -> None:
    """As in plain PyTorch: backward would use weights that forward did not."""
    errors = spawn_errors(step_between_forward_and_backward, 2, reshard_after_forward)
    assert_all_raise(errors, "StateError", "between a forward and its backward", "optimizer.step()")


# --- after an error -----------------------------------------------------------------------------


def train_after_errors() -> bool:
    """Train with errors between the steps and without: the result is the same."""
    case = CASES["mlp"]
    plain = case.make()
    results = []
    for with_errors in (False, True):
        model = shard(case, copy.deepcopy(plain))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if with_errors:
                with pytest.raises(shardkit.WrapError):
                    fully_shard(model)
                with pytest.raises(shardkit.ShardedTensorError):
                    model.layers[0].weight.data.resize_(2, 7)
            case.loss(model, my_batch(case, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor() for parameter in model.parameters()])
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_errors_do_not_disturb_training(spawn: Spawn) -> None:
    assert spawn(train_after_errors, 2) == [True, True]


def all_exceptions() -> list[type[BaseException]]:
    found: list[type[BaseException]] = [shardkit.ShardkitError]
    for error in found:
        found.extend(error.__subclasses__())
    return found


@on_ranks(2)
def test_models_of_a_process_group_that_has_ended(tmp_path: pathlib.Path) -> None:
    """They say so while there is none and when there is another one, in which new models train."""
    models = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    models[0](torch.ones(1, 4)).sum().backward()
    rank = dist.get_rank()
    uses = [functools.partial(model, torch.ones(1, 4)) for model in models]
    uses += [models[0].weight.full_tensor, models[0].weight.norm]
    for is_new in (False, True):
        if is_new:
            store = dist.FileStore(str(tmp_path / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        else:
            dist.barrier()
            dist.destroy_process_group()
        for use in uses:
            with pytest.raises(StateError, match=r"destroy_process_group\(\) has ended .* anew"):
                use()
    new = fully_shard(nn.Linear(4, 4))
    new(torch.ones(1, 4)).sum().backward()
    assert new.weight.grad is not None


def test_every_exception_is_public_and_derives_from_one() -> None:
    for error in all_exceptions():
        assert getattr(shardkit, error.__name__, None) is error, (
            f"shardkit.{error.__name__} is not exported"
        )
        assert error.__name__ in shardkit.__all__
