"""`checkpoint_activations`: which modules are chosen, what is kept, what is issued."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import wrap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from models import GPT, SEQUENCE, VOCABULARY
from recording import recording_mesh
from shardkit import (
    StateError,
    checkpoint_activations,
    checkpoint_module,
    fully_shard,
    transformer_auto_wrap_policy,
)

if typing.TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.helpers

DIM = 8
INNER = ("", ".experts.0", ".experts.1")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """Experts in a list of their own, statistics, random numbers, four products with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        self.norm = nn.BatchNorm1d(DIM)
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        for expert in self.experts:
            x = x + F.dropout(expert(x), 0.25, self.training)
        return self.norm(x)


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- what is chosen -----------------------------------------------------------------------------


def test_the_outermost_blocks_that_repeat() -> None:
    model = Model()
    assert checkpoint_activations(model) == [f"blocks.{i}" for i in range(4)]
    model(torch.randn(3, DIM)).sum().backward()
    assert [block.num_forwards for block in model.blocks] == [2] * 4


@pytest.mark.parametrize(
    ("every", "expected"), [(2, ["blocks.1", "blocks.3"]), (3, ["blocks.2"]), (4, ["blocks.3"])]
)
def test_every_kth(every: int, expected: list[str]) -> None:
    model = Model()
    assert checkpoint_activations(model, every=every) == expected
    model(torch.randn(3, DIM)).sum().backward()
    again = [f"blocks.{i}" for i, block in enumerate(model.blocks) if block.num_forwards == 2]
    assert again == expected


def test_blocks_in_dicts_and_sequences() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({"a": Block(), "b": Block()})
    model.stages = nn.Sequential(Mlp(), nn.ReLU(), Mlp(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model.single = nn.ModuleList([Block(), Other()])
    chosen = checkpoint_activations(model)
    # Blocks of `single` are of two classes, so what repeats in these is chosen.
    within = [f"single.{i}.experts.{j}" for i in range(2) for j in range(2)]
    assert chosen == ["layers.a", "layers.b", "stages.0", "stages.2", *within]


def test_dicts_that_have_a_forward_are_blocks() -> None:
    class Parts(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self["second"](self["first"](x))

    model = nn.Sequential(*(Parts({"first": Mlp(), "second": Mlp()}) for _ in range(2)))
    assert checkpoint_activations(model) == ["0", "1"]


@pytest.mark.parametrize(
    "classes", [Block, [Block], "Block", ("Block",), f"{__name__}.Block", (Block, "Block")]
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_classes_by_type_and_by_name(classes: typing.Any, first: bool) -> None:
    model = Model()
    mesh, _ = recording_mesh((1,))
    if not first:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert checkpoint_activations(model, classes=classes) == [f"blocks.{i}" for i in range(4)]


def test_subclasses_count() -> None:
    model = nn.Sequential(Block(), Other())
    for classes in (Block, "Block"):
        assert checkpoint_activations(copy.deepcopy(model), classes=classes) == ["0", "1"]
    assert checkpoint_activations(model, classes="Other") == ["1"]


def test_a_policy_sees_names_and_modules() -> None:
    model = Model()
    chosen = checkpoint_activations(model, policy=lambda name, _: name.endswith("experts.1"))
    assert chosen == [f"blocks.{i}.experts.1" for i in range(4)]
    assert checkpoint_activations(Block(), policy=lambda name, _: not name) == [""]


LAST_EXPERTS = [f"blocks.{i}.experts.1" for i in range(4)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"blocks.*.experts.1": {"reshard_after_forward": False}}, LAST_EXPERTS),
        ({("blocks.0", "blocks.2"): {}}, ["blocks.0", "blocks.2"]),
        ({Mlp, "Block"}, [f"blocks.{i}{inner}" for i in range(4) for inner in INNER]),
        (lambda module: isinstance(module, nn.ReLU), ["head.1"]),
        (wrap.ModuleWrapPolicy({Block}), [f"blocks.{i}" for i in range(4)]),
        (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            [f"blocks.{i}" for i in range(4)],
        ),
    ],
    ids=["pattern", "list", "classes", "module", "torch's", "torch_xla's"],
)
def test_a_policy_is_one_of_auto_shard(policy: typing.Any, expected: list[str]) -> None:
    assert checkpoint_activations(Model(), policy=policy) == expected


def test_names_of_parameters_stay() -> None:
    model = Model()
    names = list(model.state_dict())
    checkpoint_activations(model)
    assert list(model.state_dict()) == names


# --- errors -------------------------------------------------------------------------------------


def never(*_: object) -> bool:
    return False


def untouched(model: nn.Module) -> bool:
    return all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": "Blok"}, r"no module of this Model is of a class 'Blok'\. .* are 'Block'"),
        (
            {"classes": ("Block", nn.GRU)},
            r"policy GRU chooses no module of this Model\. Classes in",
        ),
        ({"policy": never}, r"policy never\(\) chooses no module of this .*: .*Block \(4\), "),
        ({"policy": {"block.*": {}}}, r"no module of this Model has the name 'block\.\*'"),
        ({"policy": "balanced"}, r"'balanced' chooses groups to shard.* Leave policy out"),
        ({"policy": "NO_WRAP"}, r"'NO_WRAP' chooses groups to shard.* Leave policy out"),
        ({"classes": []}, r"policy \(\) chooses no module of this Model\. Classes in"),
        ({"every": 5}, r"of 4 modules found in this Model none is chosen by every=5"),
        ({"every": 0}, r"every must be an int of at least 1, got 0"),
        ({"every": True}, r"every must be an int of at least 1, got True"),
        ({"every": 0.5}, r"every must be an int of at least 1, got 0\.5"),
        ({"classes": [3]}, r"a policy is a class or its name, .* got 3"),
        ({"classes": Block, "policy": lambda *_: True}, r"give classes or policy, not both"),
        ({"classes": nn.ModuleList}, r"'blocks', a ModuleList, has no forward"),
        ({"operators": "matmul"}, r"operators must be 'matmuls', .* got 'matmul'"),
        ({"operators": [torch.mm]}, r"which is a builtin_function_or_method and no operator"),
    ],
)
def test_mistakes_are_named_and_change_nothing(
    options: dict[str, typing.Any], message: str
) -> None:
    model = Model()
    with pytest.raises(StateError, match=message):
        checkpoint_activations(model, **options)
    assert untouched(model)


def test_no_blocks() -> None:
    with pytest.raises(StateError, match=r"no blocks that repeat .* this Mlp\. .*Linear \(2\)"):
        checkpoint_activations(Mlp())


def test_not_twice() -> None:
    model = Model()
    checkpoint_module(model.blocks[2])
    with pytest.raises(StateError, match=r"'blocks\.2', a Block, is checkpointed already"):
        checkpoint_activations(model)
    assert "forward" not in model.blocks[0].__dict__
    with pytest.raises(StateError, match="this ModuleList has no forward"):
        checkpoint_module(model.blocks)


# --- operators ----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: typing.Any, types: object, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        del types
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], collections.Counter[str]]:
    """Go forward and backward; return gradients and buffers, and what backward called."""
    torch.manual_seed(4)
    loss = model(x).square().sum()
    with Calls() as calls:
        loss.backward()
    values = [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return values, calls.counts


def keep_tanh(
    context: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    del context, args, kwargs
    is_tanh = operator is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if is_tanh else CheckpointPolicy.PREFER_RECOMPUTE


NUM_PRODUCTS = 4
"""Of a block; its last one is not needed for gradients, but a dropout follows it, which is."""


@pytest.mark.parametrize(
    ("operators", "products", "tanhs"),
    [
        (None, NUM_PRODUCTS, 2),
        ("matmuls", 0, 2),
        ("every_second_matmul", NUM_PRODUCTS // 2, 2),
        ([torch.ops.aten.addmm], 0, 2),
        ([torch.ops.aten.addmm.default, torch.ops.aten.tanh], 0, 0),
        (keep_tanh, NUM_PRODUCTS, 0),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "copied", "pickled"])
def test_operators_that_are_kept_are_not_called_again(
    operators: typing.Any, products: int, tanhs: int, kind: str
) -> None:
    plain = Model(2)
    model = copy.deepcopy(plain)
    assert checkpoint_activations(model, operators=operators) == ["blocks.0", "blocks.1"]
    if kind == "copied":
        model = copy.deepcopy(model)
    if kind == "pickled":
        model = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        x = torch.randn(3, DIM)
        expected, _ = run(plain, x)
        found, counts = run(model, x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        # Gradients of products are `mm`.
        assert (counts["addmm"], counts["tanh"]) == (2 * products, 2 * tanhs)
    assert model.blocks[0].norm.num_batches_tracked == 2


def test_operators_may_be_an_iterator() -> None:
    model = copy.deepcopy(plain := Mlp())
    checkpoint_module(model, operators=iter([torch.ops.aten.addmm]))
    x = torch.randn(3, DIM, requires_grad=True)
    assert run(model, x)[1]["addmm"] == run(plain, x)[1]["addmm"] == 0


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sinh(x * self.weight)
        return x.sin(), x.cos()


@pytest.mark.parametrize("operators", [None, "matmuls", "every_second_matmul", keep_tanh])
def test_outputs_may_go_backward_one_after_the_other(operators: typing.Any) -> None:
    plain = TwoOutputs()
    model = checkpoint_module(copy.deepcopy(plain), operators=operators)
    x = torch.randn(3, DIM)
    for each in (model, plain):
        first, second = each(x)
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    assert torch.allclose(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("operators", ["matmuls", [torch.ops.aten.tanh], keep_tanh])
def test_what_traces_finds_modes_of_torch(operators: typing.Any) -> None:
    """It refuses other contexts."""
    model = checkpoint_module(Mlp(), operators=operators)
    weights = [*model.parameters()]
    trace = make_fx(lambda x: torch.autograd.grad(model(x).sum(), weights))
    with preserve_node_meta():  # Torch's selective checkpointing leaves notes for later traces.
        graph = trace(torch.randn(3, DIM))
    assert "aten.tanh.default" in graph.code


def test_attention_is_kept_with_the_products() -> None:
    counts = {}
    for operators in (None, "matmuls", "every_second_matmul"):
        model = GPT()
        checkpoint_activations(model, operators=operators)
        loss = model(torch.randint(VOCABULARY, (2, SEQUENCE))).sum()
        with Calls() as calls:
            loss.backward()
        name = "_scaled_dot_product_flash_attention_for_cpu"
        counts[operators] = (calls.counts[name], calls.counts["addmm"])
    assert counts[None][0] == 2
    assert (counts["matmuls"][0], counts["every_second_matmul"][0]) == (0, 0)
    assert counts["matmuls"][1] == 0 < counts["every_second_matmul"][1] < counts[None][1]


def kept_nbytes(model: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that a forward keeps for backward, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(x)
    del loss
    return sum(kept.values())


def test_each_choice_keeps_less() -> None:
    found = []
    for options in (None, {"every": 2}, {}):
        model = Model()
        if options is not None:
            checkpoint_activations(model, **options)
        found.append(kept_nbytes(model, torch.randn(64, DIM)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 3


# --- under sharding -----------------------------------------------------------------------------


def sharded(
    options: dict[str, typing.Any] | None,
    groups: Callable[[nn.Module], list[nn.Module]],
    order: str,
) -> tuple[nn.Module, list[tuple[str, int]]]:
    torch.manual_seed(0)
    model = Model()
    mesh, log = recording_mesh((1, 2), mesh_dim_names=("replicate", "shard"))
    if options is not None and order == "before":
        checkpoint_activations(model, **options)
    for module in groups(model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    if options is not None and order == "after":
        checkpoint_activations(model, **options)
    return model, log


def collectives(model: nn.Module, log: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Return what each of three steps starts, in order."""
    found = []
    for step in range(3):
        log.clear()
        torch.manual_seed(step)
        model(torch.randn(3, DIM)).square().sum().backward()
        found.append([entry for entry in log if entry[0].startswith("start")])
    return found


EVERY_WAY = [
    {},
    {"every": 2},
    {"operators": "matmuls"},
    {"every": 2, "operators": "every_second_matmul"},
    {"operators": [torch.ops.aten.copy_, torch.ops.aten.addmm, torch.ops.aten.zero_]},
]


@pytest.mark.parametrize("options", EVERY_WAY)
@pytest.mark.parametrize("order", ["before", "after"])
def test_blocks_are_gathered_as_often_as_before(options: dict[str, typing.Any], order: str) -> None:
    expected = collectives(*sharded(None, lambda model: list(model.blocks), order))
    assert collectives(*sharded(options, lambda model: list(model.blocks), order)) == expected


@pytest.mark.parametrize("options", EVERY_WAY)
@pytest.mark.parametrize("order", ["before", "after"])
def test_modules_inside_are_gathered_once_more(options: dict[str, typing.Any], order: str) -> None:
    """The repetition of a block gathers what is in it; what comes last there stays for backward."""

    def experts(model: nn.Module) -> list[nn.Module]:
        return [expert for block in model.blocks for expert in block.experts]

    def num_gathers(steps: list[list[tuple[str, int]]]) -> list[int]:
        return [sum(what == "start all_gather" for what, _ in step) for step in steps]

    expected = num_gathers(collectives(*sharded(None, experts, order)))
    found = num_gathers(collectives(*sharded(options, experts, order)))
    assert all(have >= want for have, want in zip(found, expected, strict=True))
    num_inside = 2 * len(checkpoint_activations(Model(), **{**options, "operators": None}))
    assert all(have <= want + num_inside for have, want in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"operators": "matmuls"}])
def test_without_gradients_forward_runs_once(options: dict[str, typing.Any]) -> None:
    model, _ = sharded(options, lambda model: list(model.blocks), "before")
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, DIM))
    with torch.inference_mode():
        model(torch.randn(3, DIM))
    assert [block.num_forwards for block in model.blocks] == [2] * 4


class Shown(nn.Module):
    """Takes keywords that torch's checkpoint has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, debug: bool = False, context_fn: int = 1) -> torch.Tensor:
        return self.linear(x) * (10 if debug else 1) * context_fn


@pytest.mark.parametrize("operators", [None, "matmuls"])
def test_keywords_are_those_of_the_module(operators: typing.Any) -> None:
    plain = Shown()
    module = checkpoint_module(copy.deepcopy(plain), operators=operators)
    x = torch.randn(2, 3)
    results = [each(x, debug=True, context_fn=3) for each in (plain, module)]
    assert results[0].equal(results[1])
    for result in results:
        result.sum().backward()
    assert plain.linear.weight.grad.equal(module.linear.weight.grad)
