"""State by parameter names: wrappers, ties, groups, several optimizers, what is missing."""

from __future__ import annotations

import copy
import typing
from collections import UserDict

import pytest
import torch
from recorded import MLP, Recorded
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from models import TiedMLP
from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard
from shardkit._errors import CheckpointError
from shardkit.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._state.model_and_optimizer import (
    flatten,
    optimizer_template,
    put_optimizer_state,
)
from shardkit.checkpoint._state.names import names_of_parameters, plain_name

State = dict[str, typing.Any]


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Give each parameter state of its own values."""
    for i, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, i + 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def local(value: object) -> object:
    return value.to_local() if isinstance(value, ShardedTensor) else value


def assert_same_state(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, entries in expected.items():
        assert actual[name].keys() == entries.keys()
        for key, value in entries.items():
            assert torch.equal(local(actual[name][key]), local(value)), (name, key)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # The compiler's own.
def test_names_know_nothing_of_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    expected = list(model.state_dict())
    model[0] = torch.compile(model[0])
    model[1][0] = checkpoint_wrapper(model[1][0])
    compiled = torch.compile(model)
    assert [plain_name(compiled, name) for name in compiled.state_dict()] == expected
    flat = [name for names in names_of_parameters(compiled).values() for name in names]
    assert flat == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # The compiler's own.
def test_a_compiled_model_saves_and_loads_plain_names() -> None:
    recorded = Recorded(rank=1)
    recorded.model.layers[0] = torch.compile(recorded.model.layers[0])
    state = {k: v.detach().clone() for k, v in get_model_state_dict(recorded.model).items()}
    assert not any("_orig_mod" in name for name in state)
    before = recorded.model.scale.to_local().clone()
    with torch.no_grad():
        for param in recorded.model.parameters():
            param.zero_()
    result = set_model_state_dict(recorded.model, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(recorded.model.scale.to_local(), before)


def test_a_user_s_module_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert list(get_model_state_dict(model)) == ["module.weight", "module.bias"]


def test_parameters_have_names_while_unsharded_ones_are_shown() -> None:
    recorded = Recorded(rank=1, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(recorded.model.parameters())
    stepped(recorded.model, optimizer)
    expected = get_optimizer_state_dict(recorded.model, optimizer)
    recorded.run()  # Waits for its backward: all groups are kept.
    assert not isinstance(recorded.model.layers[0].linear.weight, ShardedTensor)
    found = get_optimizer_state_dict(recorded.model, optimizer)
    assert_same_state(found["state"], expected["state"])
    set_optimizer_state_dict(recorded.model, optimizer, found)


def test_nothing_is_stepped_to_save_or_load() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"] == {}
    set_optimizer_state_dict(model, optimizer, state)
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())


def in_two_groups(model: MLP, *, swapped: bool) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.3, "lr": 1e-2},
        {"params": others, "weight_decay": 0.0, "lr": 1e-4},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups, lr=1.0)


@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
def test_groups_are_found_by_their_parameters(is_flat: bool) -> None:
    model = Recorded(rank=1).model
    first, second = in_two_groups(model, swapped=False), in_two_groups(model, swapped=True)
    stepped(model, first)
    first.param_groups[0]["lr"] = 0.5
    for group in second.param_groups:
        group.update(lr=7.0, weight_decay=7.0)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first, options=options))
    assert [(g["lr"], g["weight_decay"]) for g in second.param_groups] == [(1e-4, 0), (0.5, 0.3)]
    assert first.state.keys() == second.state.keys()
    for param, entries in first.state.items():
        for key, value in entries.items():
            assert torch.equal(local(second.state[param][key]), local(value))


def test_a_parameter_s_state_may_be_any_mapping() -> None:
    kept = UserDict(b=1)
    state = {"state": {"w": UserDict(a=1, n={"c": 2}, kept=kept)}, "param_groups": []}
    assert flatten(state) == {"state.w.a": 1, "state.w.n.c": 2, "state.w.kept": kept}


def test_several_optimizers_with_one_parameter_are_refused() -> None:
    model = Recorded(rank=1).model
    adam = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(list(model.parameters())[1:], momentum=0.9)
    name = list(get_model_state_dict(model))[1]
    expected = f"'{name}' is a parameter of optimizers 0 and 1 of the list"
    with pytest.raises(CheckpointError, match=expected):
        get_optimizer_state_dict(model, [adam, sgd])
    state = get_optimizer_state_dict(model, adam)
    with pytest.raises(CheckpointError, match=expected):
        set_optimizer_state_dict(model, [adam, sgd], state)


def test_each_optimizer_gets_its_own_options_of_groups_without_parameters() -> None:
    model = Recorded(rank=1).model
    params = list(model.parameters())

    def make(first_lr: float, second_lr: float) -> list[torch.optim.Optimizer]:
        first = [{"params": params[:3]}, {"params": [], "lr": first_lr}]
        second = [{"params": params[3:]}, {"params": [], "lr": second_lr}]
        return [torch.optim.AdamW(first), torch.optim.SGD(second)]

    state = get_optimizer_state_dict(model, make(5.0, 7.0))
    optimizers = make(1.0, 1.0)
    set_optimizer_state_dict(model, optimizers, state)
    assert [optimizer.param_groups[1]["lr"] for optimizer in optimizers] == [5.0, 7.0]


def test_several_optimizers_share_one_state() -> None:
    model = Recorded(rank=1).model
    params = list(model.parameters())
    adam, sgd = torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)
    stepped(model, adam, sgd)
    state = get_optimizer_state_dict(model, [adam, sgd])
    assert len(state["state"]) == len(params)
    assert len(state["param_groups"]) == 2
    one = torch.optim.AdamW(params[:3])
    other = torch.optim.SGD(params[3:], lr=0.9, momentum=0.9)
    set_optimizer_state_dict(model, [other, one], state)  # Their order does not matter.
    assert_same_state(get_optimizer_state_dict(model, [adam, sgd])["state"], state["state"])
    assert other.param_groups[0]["lr"] == 0.1
    assert_same_state(get_optimizer_state_dict(model, [one, other])["state"], state["state"])


def test_tied_parameters_are_found_by_either_name() -> None:
    mesh, _ = recording_mesh((2,), rank=1)
    model = fully_shard(TiedMLP(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    assert "decoder.weight" not in state["state"]
    renamed = {
        "state": dict(state["state"]),
        "param_groups": copy.copy(state["param_groups"]),
    }
    renamed["state"]["decoder.weight"] = renamed["state"].pop("encoder.weight")
    other = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, other, renamed)
    assert_same_state(get_optimizer_state_dict(model, other)["state"], state["state"])


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3, 1))])
    with pytest.raises(CheckpointError, match=r"parameter 0 of group 0 .*\(3, 1\).*not in the mod"):
        get_optimizer_state_dict(model, optimizer)


def test_state_of_no_parameter_is_refused() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["k"] = torch.tensor(3)  # type: ignore[index]
    with pytest.raises(CheckpointError, match="AdamW keeps 'k' in its state beside"):
        get_optimizer_state_dict(model, optimizer)


class Counting(torch.optim.SGD):
    """Saves more than its state and its groups, as Ranger21 does."""

    def state_dict(self) -> State:
        return {**super().state_dict(), "lookahead_step": 3}


class Wrapping(torch.optim.SGD):
    """Saves the state of another optimizer by a name of its own, as Lookahead does."""

    def state_dict(self) -> State:
        return {"base": super().state_dict()}


def test_entries_beside_state_and_groups_are_named() -> None:
    model = Recorded(rank=1).model
    with pytest.warns(UserWarning, match=r"Counting has \['lookahead_step'\] beside"):
        state = get_optimizer_state_dict(model, Counting(model.parameters(), lr=0.1))
    assert state.keys() == {"state", "param_groups"}
    with pytest.raises(CheckpointError, match=r"Wrapping has \['base'\], but .* pass that one"):
        get_optimizer_state_dict(model, Wrapping(model.parameters(), lr=0.1))


def test_parameters_of_which_nothing_was_saved() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    never_stepped = {**state, "state": {k: v for k, v in state["state"].items() if k != "scale"}}
    set_optimizer_state_dict(model, optimizer, never_stepped)
    assert model.scale not in optimizer.state
    group = state["param_groups"][0]
    others = [name for name in group["params"] if name != "scale"]
    unknown = {**never_stepped, "param_groups": [{**group, "params": others}]}
    with pytest.raises(CheckpointError, match=r"1 of the optimizer's parameters: 'scale'"):
        set_optimizer_state_dict(model, optimizer, unknown)
    set_optimizer_state_dict(model, optimizer, unknown, options=StateDictOptions(strict=False))


def test_options_that_contradict_each_other_are_refused() -> None:
    model = Recorded(rank=1).model
    two, one = in_two_groups(model, swapped=False), torch.optim.AdamW(model.parameters())
    stepped(model, two)
    with pytest.raises(CheckpointError, match=r"group 0 .* different 'weight_decay': 0.3 and 0.0"):
        set_optimizer_state_dict(model, one, get_optimizer_state_dict(model, two))
    assert not one.state


def test_state_sharded_otherwise_is_refused() -> None:
    models = [Recorded(mesh_shape=(size,), rank=1).model for size in (2, 4)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    stepped(models[0], optimizers[0])
    state = get_optimizer_state_dict(models[0], optimizers[0])
    with pytest.raises(CheckpointError, match=r"'exp_avg' of 'scale'.*sharded otherwise"):
        set_optimizer_state_dict(models[1], optimizers[1], state)
    assert not optimizers[1].state


def test_a_loaded_state_is_nobody_else_s() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    others = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    for other in others:
        set_optimizer_state_dict(model, other, state)
    steps = [other.state[model.scale]["step"] for other in others]
    steps[0] += 1
    assert [step.item() for step in steps] == [2, 1]
    assert optimizer.state[model.scale]["step"] == 1


# --- templates ------------------------------------------------------------------------------------


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.rows = nn.Parameter(torch.ones(5, 3))

    def forward(self) -> None:
        """Never run."""


@pytest.mark.parametrize(
    ("key", "of_rows", "is_sharded"),
    [
        ("step", (), False),
        ("exp_avg", (5, 3), True),
        ("counted", (), False),  # Also of a parameter with dimensions: one number for each.
        ("mu_product", None, False),
    ],
)
def test_what_a_parameter_without_dimensions_has(
    key: str, of_rows: tuple[int, ...] | None, is_sharded: bool
) -> None:
    mesh, _ = recording_mesh((2,), rank=0)
    model = fully_shard(Scalars(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {
        "scale": {key: TensorInfo((), torch.float32), "exp_avg": TensorInfo((), torch.float32)},
        "rows": {"exp_avg": TensorInfo((5, 3), torch.float32)},
    }
    if of_rows is not None:
        saved["rows"][key] = TensorInfo(of_rows, torch.float32)
    template = optimizer_template(model, optimizer, saved)
    assert isinstance(template["state"]["scale"][key], ShardedTensor) == is_sharded
    assert isinstance(template["state"]["scale"]["exp_avg"], ShardedTensor)
    assert isinstance(template["state"]["rows"]["exp_avg"], ShardedTensor)


def test_a_template_has_room_for_anything() -> None:
    model = Recorded(rank=1).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    saved: dict[str, dict[str, TensorInfo | None]] = {
        "layers.1.linear.weight": {
            "half": TensorInfo((16, 8), torch.bfloat16),
            "rows": TensorInfo((16, 1), torch.float32),
            "note": None,
        },
        "not in the model": {"x": None},
    }
    template = optimizer_template(model, optimizer, saved)
    (entries,) = template["state"].values()
    assert isinstance(entries["half"], ShardedTensor)
    assert entries["half"].dtype == torch.bfloat16
    assert type(entries["rows"]) is Tensor
    assert entries["rows"].shape == (16, 1)
    assert entries["note"] is None
    assert template["param_groups"][0]["lr"] == 0.25
    entries["note"] = 3.5
    put_optimizer_state(model, optimizer, template)
    assert optimizer.state[model.layers[1].linear.weight]["note"] == 3.5
