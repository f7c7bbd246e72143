"""Each option of torch's functions for state dicts, beside FSDP2: the same keys and values.

Under `install` with torch's functions, and with the functions of `shardkit.checkpoint`.
"""

from __future__ import annotations

import copy
import itertools
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch

import shardkit
from checkpoints import assert_same, leaves, whole
from reference import AXES, make_mesh
from shardkit import CheckpointError, checkpoint, fully_shard
from workers import Spawn, on_ranks

pytestmark = [
    pytest.mark.helpers,
    pytest.mark.filterwarnings("ignore:Getting submodules only:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Passing model_state_dict as a:FutureWarning"),
]

Made = tuple[nn.Module, torch.optim.Optimizer]
MESHES = [(4,), (2, 2)]  # Of the first some ranks have no row, the second has shards of two.


class Renamed(nn.Module):
    """Saves its inner weight as its own, and says so in torch's way, as layers of torchtune do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5, bias=False)
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(_: nn.Module, state: typing.Any, prefix: str, _meta: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}inner.weight")

    @staticmethod
    def _rename_back(_: nn.Module, state: typing.Any, prefix: str, *_args: object) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner"}

    own_names = _fqn_modifiers

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Net(nn.Module):
    """Odd rows, fewer rows than ranks, tied and frozen parameters, buffers, a wrapper."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.body = checkpoint_wrapper(nn.Linear(5, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.middle = middle
        self.norm = nn.BatchNorm1d(5)
        self.few = nn.Linear(5, 3, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(torch.relu(self.body(self.words(tokens))))
        x = self.norm(self.middle(x))
        return self.head(x).sum() + self.few(x).square().sum()


def make(whose: str, mesh_shape: tuple[int, ...], seed: int, *, renamed: bool = False) -> Made:
    """Make the model, its optimizer of two groups, and train a little."""
    torch.manual_seed(seed)
    model = Net(Renamed() if renamed else nn.Linear(6, 5, bias=False))
    if whose == "FSDP2":
        mesh: typing.Any = init_torch_mesh(
            "cpu", mesh_shape, mesh_dim_names=AXES[-len(mesh_shape) :]
        )
        shard: typing.Any = fully_shard_by_torch
    else:
        mesh, shard = make_mesh(mesh_shape), fully_shard
    for module in (model.body, model.middle, model):
        shard(module, mesh=mesh)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 1e-2}]
    )
    for step in range(2):
        tokens = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


FUNCTIONS = {"torch's, under install": of_torch, "shardkit's": checkpoint}
FLAGS = (
    "full_state_dict",
    "cpu_offload",
    "ignore_frozen_params",
    "flatten_optimizer_state_dict",
)


Values = tuple[dict[str, typing.Any], dict[str, typing.Any]]


def values_of(source: Made) -> Values:
    """Return the whole states of a model and its optimizer, whoever has sharded them."""
    return of_torch.get_state_dict(*source, options=StateDictOptions(full_state_dict=True))


def set_values(target: Made, values: Values) -> None:
    model, optim = copy.deepcopy(values)  # Optimizers keep what they are given.
    options = StateDictOptions(full_state_dict=True)
    of_torch.set_state_dict(
        *target, model_state_dict=model, optim_state_dict=optim, options=options
    )


def twins(mesh_shape: tuple[int, ...], seed: int) -> tuple[Made, Made]:
    """Return what FSDP2 has sharded and what shardkit has, of equal values."""
    theirs, ours = make("FSDP2", mesh_shape, seed), make("shardkit", mesh_shape, seed + 1)
    set_values(ours, values_of(theirs))
    return theirs, ours


def plain_ones(state: object) -> list[str]:
    """Return the paths to what is a tensor and not sharded."""
    return [path for path, leaf in leaves(state).items() if type(leaf) is Tensor]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@on_ranks("mesh_shape")
def test_each_option_gets_the_same(mesh_shape: tuple[int, ...]) -> None:
    theirs, ours = twins(mesh_shape, 0)
    for chosen in itertools.product([False, True], repeat=len(FLAGS)):
        options = StateDictOptions(**dict(zip(FLAGS, chosen, strict=True)))
        wanted = of_torch.get_state_dict(*theirs, options=options)
        with shardkit.install():
            for functions in FUNCTIONS.values():
                found = functions.get_state_dict(*ours, options=options)
                assert plain_ones(found) == plain_ones(wanted)
                assert_same(whole(found), whole(wanted))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@on_ranks("mesh_shape")
def test_submodules_give_the_same(mesh_shape: tuple[int, ...]) -> None:
    """Of the model alone: torch returns the optimizer's state as a whole.

    With ``ignore_frozen_params`` torch raises a KeyError for frozen ones outside of the submodules.
    """
    theirs, ours = twins(mesh_shape, 0)
    for full, prefixes in itertools.product([False, True], repeat=2):
        options = StateDictOptions(full_state_dict=full, keep_submodule_prefixes=prefixes)
        # Without prefixes two would have the same names.
        names = ["body", "norm"] if prefixes else ["body"]
        (their_modules, our_modules) = (
            {model.get_submodule(name) for name in names} for model, _ in (theirs, ours)
        )
        wanted = of_torch.get_state_dict(*theirs, submodules=their_modules, options=options)
        assert 2 <= len(wanted[0]) < len(theirs[0].state_dict())
        with shardkit.install():
            for functions in FUNCTIONS.values():
                found = functions.get_state_dict(*ours, submodules=our_modules, options=options)
                assert_same(whole(found), whole(wanted))


WHOLE = {"full_state_dict": True}
SENT = {**WHOLE, "broadcast_from_rank0": True}
CASES: dict[str, dict[str, typing.Any]] = {
    "pieces": {},
    "pieces, on the host": {"cpu_offload": True},
    "pieces, flat": {"flatten_optimizer_state_dict": True},
    "whole": WHOLE,
    "sent": SENT,
    "sent from the host": {**SENT, "cpu_offload": True},
    "pieces, others": {"strict": False},
    "whole, others": {**WHOLE, "strict": False},
    "sent, others": {**SENT, "strict": False},
    "pieces, trainable ones": {"ignore_frozen_params": True, "strict": False},
    "whole, trainable ones": {**WHOLE, "ignore_frozen_params": True, "strict": False},
    "pieces, modules": {"strict": False},
    "whole, modules": {**WHOLE, "strict": False},
    "sent, modules": {**SENT, "strict": False},
}
"""Whole flat states of optimizers torch cannot set, whoever has sharded the model: a KeyError."""


def changed(case: str, model: nn.Module, state: dict[str, typing.Any]) -> dict[typing.Any, object]:
    """Return a model's state dict as the case wants it."""
    if not state:  # What others than rank 0 have.
        return {}
    if case.endswith("others"):
        kept = {name: value for name, value in state.items() if name != "few.weight"}
        return {**kept, "unknown.weight": torch.ones(3)}
    if case.endswith("modules"):
        names = ("body", "norm")
        return {
            model.get_submodule(name): {
                key.removeprefix(f"{name}."): value
                for key, value in state.items()
                if key.startswith(f"{name}.")
            }
            for name in names
        }
    return state


def told_of(case: str, names: list[str]) -> list[list[str]]:
    """Return the names that a case leaves out, and those that it adds."""
    if case.endswith("others"):
        return [["few.weight"], ["unknown.weight"]]
    if case.endswith("trainable ones"):
        return [["frozen.weight", "frozen.bias"], []]
    if case.endswith("modules"):
        return [[name for name in names if not name.startswith(("body.", "norm."))], []]
    return [[], []]


def set_and_look(
    functions: typing.Any, case: str, source: Made, target: Made
) -> tuple[typing.Any, list[list[str]]]:
    """Set the state of one into the other; return what that has then, and the names told of."""
    options = StateDictOptions(**CASES[case])
    state, optim = functions.get_state_dict(*source, options=options)
    state, optim = changed(case, target[0], state), copy.deepcopy(optim)  # Optimizers keep pieces.
    told = functions.set_model_state_dict(target[0], state, options=options)
    functions.set_optimizer_state_dict(*target, optim, options=options)
    now = whole([target[0].state_dict(), target[1].state_dict()])
    return now, [list(told.missing_keys), list(told.unexpected_keys)]


@on_ranks(2)
def test_options_of_a_scheduler_are_sent_to_all_ranks() -> None:
    """FSDP2's ranks other than the first get none that the optimizer has not."""

    def make() -> Made:
        model = fully_shard(nn.Linear(6, 5))
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
        return model, torch.optim.AdamW(groups, lr=0.25)

    for functions in FUNCTIONS.values():
        source, target = make(), make()
        scheduler = torch.optim.lr_scheduler.StepLR(source[1], 1, gamma=0.1)
        source[0](torch.ones(2, 6)).sum().backward()
        source[1].step()
        scheduler.step()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = functions.get_optimizer_state_dict(*source, options=options)
        options.broadcast_from_rank0 = True
        functions.set_optimizer_state_dict(*target, state, options=options)
        assert [group["lr"] for group in target[1].param_groups] == [0.025, 0.05]
        made = torch.optim.lr_scheduler.StepLR(target[1], 1, gamma=0.1)
        assert made.base_lrs == [0.25, 0.5]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@on_ranks("mesh_shape")
def test_each_option_sets_the_same(mesh_shape: tuple[int, ...]) -> None:
    theirs, ours = twins(mesh_shape, 0)
    before = values_of(make("FSDP2", mesh_shape, 7))
    their_target, our_target = twins(mesh_shape, 3)
    for case in CASES:
        set_values(their_target, before)
        wanted, told = set_and_look(of_torch, case, theirs, their_target)
        for functions in FUNCTIONS.values():
            set_values(our_target, before)
            with shardkit.install():
                found, told_here = set_and_look(functions, case, ours, our_target)
            assert_same([case, found], [case, wanted])
            # Torch fills in the model's own values, and then misses nothing, for some.
            ours_told = told_of(case, list(our_target[0].state_dict()))
            assert told_here == (told if functions is of_torch else ours_told), case


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@on_ranks("mesh_shape")
def test_names_that_modules_modify(mesh_shape: tuple[int, ...]) -> None:
    """Of models alone: torch itself misses the optimizer's state under the modified name."""
    theirs, ours = (make(each, mesh_shape, 0, renamed=True) for each in ("FSDP2", "shardkit"))
    targets = [make(each, mesh_shape, 7, renamed=True) for each in ("FSDP2", "shardkit")]
    whole_options = StateDictOptions(**WHOLE)
    wanted = of_torch.get_model_state_dict(theirs[0], options=whole_options)
    assert "middle.weight" in wanted
    assert "middle.inner.weight" not in wanted
    of_torch.set_model_state_dict(ours[0], dict(wanted), options=whole_options)
    for flags, names in itertools.product(({}, WHOLE, SENT), ("_fqn_modifiers", "own_names")):
        options = StateDictOptions(**flags, dsd_fqn_modifiers=names)
        for target, functions in ((targets[1], of_torch), (targets[1], checkpoint)):
            with torch.no_grad():
                for param in target[0].parameters():
                    param.zero_()
            with shardkit.install():
                state = functions.get_model_state_dict(ours[0], options=options)
                assert_same(whole(state), wanted)
                functions.set_model_state_dict(target[0], dict(state), options=options)
            assert_same(whole(target[0].state_dict()), wanted)
        state = of_torch.get_model_state_dict(theirs[0], options=options)
        of_torch.set_model_state_dict(targets[0][0], dict(state), options=options)
        assert_same(whole(targets[0][0].state_dict()), wanted)


def set_changed(functions: str, flags: dict[str, bool], change: str) -> None:
    model, _ = make("FSDP2" if functions == "FSDP2" else "shardkit", (2,), 0)
    module = FUNCTIONS.get(functions, of_torch)
    options = StateDictOptions(**flags)
    with shardkit.install():
        state = module.get_model_state_dict(model, options=options)
        if change == "missing":
            del state["few.weight"]
        else:
            state["unknown.weight"] = torch.ones(3)
        module.set_model_state_dict(model, state, options=options)


@pytest.mark.parametrize("change", ["missing", "unknown"])
@pytest.mark.parametrize("functions", ["FSDP2", *FUNCTIONS])
@pytest.mark.parametrize("flags", [{}, SENT], ids=["pieces", "sent"])
def test_strict_ones_refuse_the_same_names(
    spawn_errors: Spawn, flags: dict[str, bool], functions: str, change: str
) -> None:
    for error in spawn_errors(set_changed, 2, functions, flags, change):
        assert error.type_name == "RuntimeError"
        assert {"missing": "few.weight", "unknown": "unknown.weight"}[change] in error.message


def test_torch_accepts_a_whole_state_that_lacks_names(spawn: Spawn, spawn_errors: Spawn) -> None:
    for functions in ("FSDP2", "torch's, under install"):
        spawn(set_changed, 2, functions, WHOLE, "missing")
    for error in spawn_errors(set_changed, 2, "shardkit's", WHOLE, "missing"):
        assert error.type_name == "RuntimeError"
        assert "few.weight" in error.message


def linears() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fully_shard(layers, mesh=make_mesh((2,)))


@on_ranks(2)
def test_what_other_ranks_pass_is_not_looked_at() -> None:
    model, options = linears(), StateDictOptions(**SENT)
    wanted: typing.Any = {
        module: {"weight": torch.full((4, 4), 1.0 + i), "bias": torch.zeros(4)}
        for i, module in enumerate(typing.cast("nn.Sequential", model))
    }
    state = wanted if dist.get_rank() == 0 else object()
    checkpoint.set_model_state_dict(model, state, options=options)
    for i, module in enumerate(wanted):
        assert module.weight.full_tensor().eq(1 + i).all()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"state": {}, "param_groups": []} if dist.get_rank() == 0 else object()
    options = StateDictOptions(**SENT, strict=False)
    checkpoint.set_optimizer_state_dict(model, optimizer, state, options=options)


def set_wrong(options: dict[str, bool]) -> None:
    model = linears()
    state: typing.Any = {nn.Linear(4, 4): {"weight": torch.ones(4, 4)}}
    if options == SENT and dist.get_rank() != 0:
        state = {}
    checkpoint.set_model_state_dict(model, state, options=StateDictOptions(**options))


@pytest.mark.parametrize("options", [WHOLE, SENT], ids=["whole", "sent"])
def test_a_module_that_is_not_in_the_model_is_told_on_all_ranks(
    spawn_errors: Spawn, options: dict[str, bool]
) -> None:
    for error in spawn_errors(set_wrong, 2, options):
        assert error.type_name == "CheckpointError"
        assert "a module that is not in the model, a Linear" in error.message


@on_ranks(2)
def test_submodules_that_cannot_be_told_apart_are_refused() -> None:
    model = linears()
    with pytest.raises(CheckpointError, match=r"not in the model, a Linear"):
        checkpoint.get_model_state_dict(model, submodules={nn.Linear(4, 4)})
    options = StateDictOptions(keep_submodule_prefixes=False)
    with pytest.raises(CheckpointError, match=r"several of submodules have an entry 'weight'"):
        checkpoint.get_model_state_dict(model, submodules=set(model.children()), options=options)


@on_ranks(2)
def test_tensors_that_are_not_contiguous_are_sent_right() -> None:
    """Such as a weight that a script has transposed for this model, or one in channels_last."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(6, 5), nn.BatchNorm1d(4))
    plain[2].running_mean = torch.arange(12.0).view(4, 3)[:, 1]
    model = fully_shard(copy.deepcopy(plain))
    wanted = {name: value + 1 for name, value in plain.state_dict().items()}
    for functions in FUNCTIONS.values():
        state = {}
        if dist.get_rank() == 0:
            state = {name: value.clone() for name, value in wanted.items()}
            state["0.weight"] = state["0.weight"].to(memory_format=torch.channels_last)
            state["1.weight"] = state["1.weight"].t().contiguous().t()
            state["2.running_mean"] = state["2.running_mean"].repeat(2, 1).t().contiguous()[:, 0]
            assert sum(not value.is_contiguous() for value in state.values()) == 3
        functions.set_model_state_dict(model, state, options=StateDictOptions(**SENT))
        assert_same(whole(model.state_dict()), wanted)
        model.load_state_dict(plain.state_dict())


@on_ranks(2)
def test_what_a_state_lacks_stays_on_meta() -> None:
    """As under FSDP2, so that a script finds what it has to initialize itself."""
    for flags, functions in itertools.product((WHOLE, SENT), FUNCTIONS.values()):
        with torch.device("meta"):
            model = fully_shard(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        state = {"0.weight": plain[0].weight, "0.bias": plain[0].bias}
        options = StateDictOptions(**flags, strict=False)
        with shardkit.install():
            functions.set_model_state_dict(model, state, options=options)
        assert [param.is_meta for param in model.parameters()] == [False, False, True, True]
        model[1].to_empty(device="cpu")
        model[1].load_state_dict(plain[1].state_dict())
        assert_same(whole(model.state_dict()), plain.state_dict())
        x = torch.ones(2, 6)
        torch.testing.assert_close(model(x), plain(x))


@on_ranks(2)
def test_a_value_on_meta_leaves_a_parameter_there() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(6, 5))
        state = nn.Linear(6, 5, dtype=torch.bfloat16).state_dict()
    model.load_state_dict(state, assign=True)
    for param in model.parameters():
        assert param.is_meta
        assert param.dtype == torch.bfloat16


@on_ranks(2)
def test_pieces_cannot_be_sent_as_whole_tensors() -> None:
    """A model's own state dict has pieces; all ranks get the error, and may go on."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 6))
    options = of_torch.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(CheckpointError, match="state dict of rank 0 has sharded tensors"):
        of_torch.set_model_state_dict(model, model.state_dict(), options=options)
    pieces = of_torch.StateDictOptions()
    of_torch.set_model_state_dict(model, model.state_dict(), options=pieces)
    model(torch.ones(2, 6)).sum().backward()
