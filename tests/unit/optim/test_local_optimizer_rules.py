"""What `LocalOptimizer` refuses, also with `MatrixOptimizer`; its ways where nothing is sharded."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from models import Parameters
from recording import recording_mesh
from shardkit import OptimizerError, checkpoint, fully_shard
from shardkit._compat.torch_tensors import version_of
from shardkit._tensor.spec import ShardSpec
from shardkit.optim import LocalOptimizer, MatrixOptimizer

if typing.TYPE_CHECKING:
    import pathlib

Options = dict[str, typing.Any]


def a_class(name: str) -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.SGD,), {})


@pytest.mark.parametrize("master_dtype", ["fp32", torch.int32])
def test_masters_have_a_floating_dtype(master_dtype: typing.Any) -> None:
    params = nn.Linear(2, 2).parameters()
    with pytest.raises(OptimizerError, match=r"master_dtype must be .* got "):
        LocalOptimizer(params, torch.optim.AdamW, master_dtype=master_dtype)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Muon", "matrices"),
        ("Adafactor", "rows and columns"),
        ("LBFGS", "all parameters"),
        ("SparseAdam", "sparse"),
    ],
)
def test_classes_of_torch_that_are_not_elementwise(name: str, reason: str) -> None:
    params = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(OptimizerError, match=reason):
        LocalOptimizer(params, getattr(torch.optim, name))


@pytest.mark.parametrize(
    "name", ["Lamb", "LAMB32bit", "LARS8bit", "DistributedShampoo", "SOAP", "Prodigy", "Lars",
             "DAdaptAdam", "GaLoreAdamW8bit", "Adam_mini", "CAME", "AdamP", "FusedLAMB",
             "StableAdamW", "SM3", "Nero", "SPlus", "Scion", "ScionLight", "Fromage", "Amos",
             "Adalite", "Adai", "AvaGrad", "AdaGC", "ProdigyPlusScheduleFree", "Conda", "Ranger",
             "Ranger21", "ROSE", "Aida", "ApolloDQN", "MARS", "SGDSaI", "StableSPAM", "TAM",
             "AdaTAM", "AdamS", "NvNovoGrad", "AdafactorBigVision"]
)  # fmt: skip
def test_other_classes_by_name(name: str) -> None:
    with pytest.raises(OptimizerError, match=f"{name} cannot run on shards"):
        LocalOptimizer([nn.Parameter(torch.ones(4))], a_class(name))
    with pytest.raises(OptimizerError, match="Mine cannot run on shards"):
        LocalOptimizer([nn.Parameter(torch.ones(4))], type("Mine", (a_class(name),), {}))


@pytest.mark.parametrize("name", ["Lion", "Adan", "Tiger", "Camel", "AdamWFp8"])
def test_elementwise_classes_by_name(name: str) -> None:
    LocalOptimizer([nn.Parameter(torch.ones(4))], a_class(name))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("caution", "means of whole parameters"),
        ("cautious", "means of whole parameters"),
        ("adanorm", "norms or means"),
        ("stable_adamw", "norms or means"),
        ("use_gc", "by rows"),
        ("max_grad_norm", "over all parameters"),
    ],
)
def test_options_with_which_a_class_is_not_elementwise(option: str, reason: str) -> None:
    class Optional(torch.optim.SGD):
        def __init__(self, params: typing.Any, **options: float) -> None:
            super().__init__(params)
            self.defaults |= options

    params = [nn.Parameter(torch.ones(4))]
    LocalOptimizer(params, Optional, **{option: 0.0})
    with pytest.raises(OptimizerError, match=rf"Optional with {option} cannot run .*{reason}"):
        LocalOptimizer(params, Optional, **{option: 1.0})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "over all parameters") for name in ("LBFGS", "Prodigy", "DAdaptAdam", "dadapt_sgd",
                                                     "Adai", "AdamS", "Ranger21")),
        *((name, "the loss of each step") for name in ("EmoNavi", "EmoLynx", "EmoFact")),
        ("Gravity", "random numbers"),
    ],
)  # fmt: skip
def test_classes_that_take_sharded_parameters_directly(name: str, reason: str) -> None:
    for delegating in (LocalOptimizer, MatrixOptimizer):
        with pytest.raises(OptimizerError, match=rf"{reason}\. Pass the sharded"):
            delegating([nn.Parameter(torch.ones(4))], a_class(name))


class AdamWScheduleFree(torch.optim.SGD):
    """Swaps its weights for those of training, and back."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def test_classes_that_swap_weights_take_sharded_parameters_directly() -> None:
    for delegating in (LocalOptimizer, MatrixOptimizer):
        with pytest.raises(OptimizerError, match=r"call its train\(\) and eval\(\)\. Pass the sh"):
            delegating([nn.Parameter(torch.ones(4))], AdamWScheduleFree)


def test_classes_of_single_parameters_run_on_owners() -> None:
    for name in ("Lamb", "SM3", "CAME"):
        MatrixOptimizer([nn.Parameter(torch.ones(4))], a_class(name))


def test_what_is_no_class_of_optimizers() -> None:
    made: typing.Any = torch.optim.SGD([nn.Parameter(torch.ones(4))])
    for wrong in (made, nn.Linear, "adamw"):
        with pytest.raises(OptimizerError, match="must be a class of optimizers"):
            LocalOptimizer([nn.Parameter(torch.ones(4))], wrong)


class NeedsKeys(torch.optim.SGD):
    """A class that looks for a key in each group of its parameters."""

    def __init__(self, params: typing.Any, **options: typing.Any) -> None:
        params = list(params)
        assert all("use_muon" in group for group in params)  # Raises for a tensor.
        super().__init__(params, **options)


def test_a_class_that_needs_keys_in_each_group_is_explained() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4))], "use_muon": False}]
    with pytest.raises(RuntimeError) as caught:
        MatrixOptimizer(groups, NeedsKeys, lr=0.1)
    (note,) = caught.value.__notes__
    assert "pass the sharded parameters to the class itself" in note


def test_wrong_options_raise_at_once() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        LocalOptimizer([nn.Parameter(torch.ones(4))], torch.optim.AdamW, lr=-1.0)


class Rows(torch.optim.SGD):
    """Keeps state of another shape."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(3, 2)


def test_state_of_another_shape_is_refused() -> None:
    model = Parameters()
    optimizer = LocalOptimizer(model.parameters(), Rows)
    model(model.draw_slopes(torch.Generator())).backward()
    with pytest.raises(OptimizerError, match=r"'rows' of shape \(3, 2\)"):
        optimizer.step()


def test_parameters_on_meta_are_refused() -> None:
    mesh, _ = recording_mesh((2,))
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = LocalOptimizer(fully_shard(model, mesh).parameters(), torch.optim.SGD)
    with pytest.raises(OptimizerError, match="'weight' is on the meta device"):
        optimizer.step(lambda: None)  # Other tests' models may have gradients: no warning.


def test_plain_parameters() -> None:
    """Where nothing is sharded it is the class itself, masters aside."""
    model = Parameters()
    other = copy.deepcopy(model)
    optimizers = [
        torch.optim.NAdam(model.parameters(), lr=0.1),
        LocalOptimizer(other.named_parameters(), torch.optim.NAdam, lr=0.1),
    ]
    generator = torch.Generator()
    for _ in range(3):
        slopes = model.draw_slopes(generator)
        for m, optimizer in zip((model, other), optimizers, strict=True):
            m(slopes).backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, mine)
    assert "LocalOptimizer of NAdam (" in repr(optimizers[1])


def test_masters_follow_what_others_write() -> None:
    mesh, _ = recording_mesh((1,))
    model = fully_shard(Parameters({"weight": (4,)}, torch.bfloat16), mesh)
    optimizer = LocalOptimizer(
        model.parameters(), torch.optim.SGD, lr=1e-4, momentum=0.9, master_dtype=torch.float32
    )
    slopes = {"weight": torch.ones(4, dtype=torch.bfloat16)}

    def step() -> torch.Tensor:
        model(slopes).backward()
        optimizer.step()
        optimizer.zero_grad()
        master: torch.Tensor = optimizer.state[model.weight]["master"].to_local().clone()
        return master

    with torch.no_grad():
        model.weight.fill_(1.0)
    one = step()
    assert torch.equal(one, torch.full((4,), 1 - 1e-4))
    assert torch.equal(model.weight.to_local(), torch.ones(4).bfloat16())  # Rounded.
    assert (step() < one).all()
    with torch.no_grad():
        model.weight.to_local()[1:2].fill_(3.0)
    third = step()
    assert third[1] == pytest.approx(3.0, abs=1e-3)
    assert third[0] == pytest.approx(1.0, abs=1e-3)
    assert third[0] != 1.0


class CallsItsBase(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)


class HasAHook(torch.optim.SGD):
    def __init__(self, *args: typing.Any, **options: typing.Any) -> None:
        super().__init__(*args, **options)
        self.num_steps = 0
        self.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num_steps += 1


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, CallsItsBase, HasAHook])
def test_hooks_of_all_optimizers_are_called_once(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = LocalOptimizer([param], optimizer_class)
    optimizer_class([param])  # Torch patches the step of a class when it makes the first one.
    called = []
    register = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [each(lambda optimizer, *_: called.append(optimizer)) for each in register]
    try:
        param.grad = torch.ones(3)
        for _ in range(2):
            assert optimizer.step(lambda: 5.0) == 5.0
        assert called == [optimizer] * 4
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(optimizer.inner, HasAHook):
        assert optimizer.inner.num_steps == 2


def test_settings_that_a_class_counts_are_shown() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    param = nn.Parameter(torch.ones(3))
    optimizer = LocalOptimizer([param], Counting)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.param_groups[0]["count"] == 3
    other = LocalOptimizer([param], Counting)
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert other.param_groups[0]["count"] == 4


def test_a_number_in_the_place_of_a_shared_tensor_is_of_its_group_only() -> None:
    lr = torch.tensor(0.5)  # Both groups have it.
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = LocalOptimizer([{"params": [each]} for each in params], torch.optim.SGD, lr=lr)
    for of_first in (lr, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = of_first
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
    assert [param[0].item() for param in params] == [-0.875, -1.5]
    assert lr.item() == 0.5


def test_gradients_are_not_kept() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(Parameters(), mesh)
    optimizer = LocalOptimizer(model.parameters(), torch.optim.SGD)
    model(model.draw_slopes(torch.Generator())).backward()
    optimizer.step()
    assert optimizer.inner is not None
    assert all(p.grad is None for group in optimizer.inner.param_groups for p in group["params"])


def test_traced_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(Parameters(), mesh)
    optimizer = LocalOptimizer(model.parameters(), torch.optim.SGD)
    monkeypatch.setattr(ShardSpec, "is_traced", True)
    with pytest.raises(OptimizerError, match="'matrix' is on an XLA device"):
        optimizer.step(lambda: None)  # Other tests' models may have gradients: no warning.


class Unseen(torch.optim.SGD):
    """Writes as kernels of other packages do: torch does not notice."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.detach().numpy()[:] = 7.0


def test_writes_that_torch_does_not_notice_make_gathered_values_stale() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(Parameters({"weight": (4, 4), "bias": (8,)}), mesh)
    optimizer = LocalOptimizer(model.parameters(), Unseen)
    model(model.draw_slopes(torch.Generator())).backward()
    shard = model.weight.flat
    before = version_of(shard)
    optimizer.step()
    assert (model.weight.to_local() == 7.0).all()
    assert version_of(shard) > before


class RandomSGD(torch.optim.SGD):
    """Adds random numbers, as classes do that round by them."""

    bf16_stochastic_round = True

    def step(self, closure: typing.Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(torch.randn_like(param))


@pytest.mark.parametrize("how", ["state dict", "checkpoint", "copy"])
def test_random_numbers_go_on_where_they_were_saved(how: str, tmp_path: pathlib.Path) -> None:
    def make() -> tuple[nn.Module, LocalOptimizer]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(5)) for _ in range(2)])
        groups = [{"params": [param], "lr": 0.1 * (i + 1)} for i, param in enumerate(model)]
        return model, LocalOptimizer(groups, RandomSGD, momentum=0.9)

    def step(model: nn.Module, optimizer: LocalOptimizer) -> None:
        for param in model.parameters():
            param.grad = torch.ones(5)
        optimizer.step()

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    other, resumed = make()
    if how == "checkpoint":
        checkpoint.save(tmp_path / "x", model, optimizer)
        checkpoint.load(tmp_path / "x", other, resumed)
    elif how == "copy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other, resumed)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
