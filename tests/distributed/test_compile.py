"""`torch.compile` of the layers of a sharded model: the same numbers, and one graph for all."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
import typing

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import shardkit
from models import Batch, Case, regression_batch, squared_error
from parity import compare_training, in_turns
from reference import (
    SGD_TOLERANCE,
    TRAINED,
    Differences,
    assert_within,
    full_parameters,
    global_batch,
    my_batch,
    shard,
)
from shardkit import MixedPrecisionPolicy, StateError, checkpoint_activations, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers

# Compilation of one graph takes seconds, more where other processes compile.
TIMEOUT_S = 240


class Block(nn.Module):
    """Equal layers, so that one graph fits all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.fc1 = nn.Linear(7, 14)
        self.fc2 = nn.Linear(14, 7)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.fc2(torch.tanh(self.fc1(self.norm(x)))))


class Model(nn.Module):
    """Four such layers between two that the root keeps: their inputs all require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CASE = Case(Model, lambda model: list(model.blocks), regression_batch, squared_error)


def compile_blocks(model: nn.Module, backend: str, how: str) -> None:
    """Compile each layer: as a module, hooks included, or its forward alone, in one graph."""
    for block in model.blocks:
        if how == "module":
            block.compile(backend=backend)
        else:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def compiled_model(
    plain: nn.Module, backend: str, order: str, how: str, **options: typing.Any
) -> nn.Module:
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    counters.clear()
    model = copy.deepcopy(plain)
    if order == "compiled first":
        compile_blocks(model, backend, how)
    shard(CASE, model, **options)
    if order == "sharded first":
        compile_blocks(model, backend, how)
    return model


def train_compiled(
    backend: str, order: str, how: str, reshard_after_forward: bool | None
) -> tuple[Differences, dict[str, int]]:
    """Return differences to plain training, and what was compiled in all steps."""
    plain = CASE.make()
    model = compiled_model(plain, backend, order, how, reshard_after_forward=reshard_after_forward)
    differences = compare_training(CASE, model, plain, steps=2)
    with torch._dynamo.config.patch(error_on_recompile=True):  # noqa: SLF001 - torch's documented way
        later = compare_training(CASE, model, plain, steps=4)
    for kind, value in later.items():
        differences[kind] = max(differences[kind], value)
    return differences, {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def assert_one_graph(found: list[tuple[Differences, dict[str, int]]]) -> None:
    for differences, compiled in found:
        assert compiled == {"graphs": 1, "breaks": 0}
        assert_within([differences], **TRAINED)


@pytest.mark.parametrize(
    ("reshard_after_forward", "order", "how"),
    in_turns([True, False, None], ["compiled first", "sharded first"], ["module", "forward"]),
)
def test_compiled_layers_train_as_plain_ones_in_one_graph(
    spawn: Spawn, order: str, how: str, reshard_after_forward: bool | None
) -> None:
    """Hooks are not traced; parameters are inputs of the graph, so all layers share it."""
    assert_one_graph(
        spawn(
            train_compiled, 2, "aot_eager", order, how, reshard_after_forward, timeout_s=TIMEOUT_S
        )
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_layers_compiled_by_inductor_train_as_plain_ones(spawn: Spawn) -> None:
    """Generated code reads the memory that is gathered anew for backward."""
    assert_one_graph(
        spawn(train_compiled, 2, "inductor", "sharded first", "module", True, timeout_s=TIMEOUT_S)
    )


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_root_trains_as_a_plain_one() -> None:
    """The graph breaks where a layer begins and ends."""
    plain = CASE.make()
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    model = shard(CASE, copy.deepcopy(plain))
    model.compile(backend="aot_eager")
    assert_within([compare_training(CASE, model, plain, steps=4)], **TRAINED)


def evaluate_compiled() -> tuple[bool, bool, int]:
    """Switch between training, with dropout, and evaluation, in which there is none."""
    plain = CASE.make()
    for block in plain.blocks:
        block.dropout.p = 0.5
    model = compiled_model(plain, "aot_eager", "sharded first", "module")
    batch = my_batch(CASE, 0)
    results = []
    for _ in range(2):
        model.train()
        with torch.no_grad():
            model(batch[0])
        CASE.loss(model, batch).backward()
        model.zero_grad()
        model.eval()
        plain.eval()
        with torch.no_grad():
            results.append(torch.equal(model(batch[0]), plain(batch[0])))
    return results[0], results[1], counters["stats"]["unique_graphs"]


def test_compiled_layers_see_train_and_eval(spawn: Spawn) -> None:
    """One graph for each of: training without gradients, with them, evaluation."""
    assert spawn(evaluate_compiled, 2, timeout_s=TIMEOUT_S) == [(True, True, 3)] * 2


def train_compiled_in_bf16() -> tuple[bool, dict[str, int]]:
    """Return whether compiled and eager training in mixed precision end in equal parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = CASE.make()
    results = []
    for backend in ("aot_eager", None):
        model = copy.deepcopy(plain)
        if backend is None:
            shard(CASE, model, mp_policy=policy)
        else:
            model = compiled_model(plain, backend, "sharded first", "module", mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            CASE.loss(model, my_batch(CASE, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_parameters(model))
    same = all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    return same, {"graphs": counters["stats"]["unique_graphs"]}


def test_compiled_layers_in_mixed_precision_are_exact(spawn: Spawn) -> None:
    found = spawn(train_compiled_in_bf16, 2, timeout_s=TIMEOUT_S)
    assert found == [(True, {"graphs": 1})] * 2


@pytest.mark.parametrize("order", ["checkpointed first", "compiled first"])
@pytest.mark.parametrize("operators", [None, "matmuls", "every_second_matmul"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compiled_layers_that_are_checkpointed(operators: typing.Any, order: str) -> None:
    """One graph for all, and the numbers of plain training; the graph repeats the forward."""
    plain = CASE.make()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    counters.clear()
    if order == "checkpointed first":
        checkpoint_activations(model, operators=operators)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    if order == "compiled first":
        checkpoint_activations(model, operators=operators)
    shard(CASE, model)
    differences = compare_training(CASE, model, plain, steps=3)
    assert counters["stats"]["unique_graphs"] == 1
    assert_within([differences], **TRAINED)


class Counting(Block):
    """A layer whose forward writes and reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.mul_(0.5).add_(1)
        return super().forward(x * self.calls)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_layer_with_buffers_that_is_checkpointed() -> None:
    """It runs uncompiled: a graph of torch would write the buffer in the repetition, too."""
    torch.manual_seed(0)
    plain = Model()
    plain.blocks[2] = Counting()
    model = copy.deepcopy(plain)
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    checkpoint_activations(model, classes=(Block,))
    compile_blocks(model, "aot_eager", "module")
    shard(CASE, model)
    differences = compare_training(CASE, model, plain, steps=3)
    assert torch.equal(model.blocks[2].calls, plain.blocks[2].calls)
    assert_within([differences], **TRAINED)


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # noqa: SLF001 - torch's documented way
        return super().forward(x)


def test_a_compiled_layer_is_checkpointed_in_functional_call() -> None:
    """In a graph the values are inputs; where the graph breaks, an error says so."""
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    torch.manual_seed(0)
    for block in (Block(), Breaking()):
        values = {name: (2 * p).detach().requires_grad_() for name, p in block.named_parameters()}
        x = torch.randn(3, 7)
        loss = torch.func.functional_call(block, values, (x,)).square().sum()
        wanted = torch.autograd.grad(loss, [*values.values()])
        shardkit.checkpoint_module(block).compile(backend="aot_eager")
        if isinstance(block, Breaking):
            with pytest.raises(StateError, match="a checkpointed Breaking is compiled, its graph"):
                torch.func.functional_call(block, values, (x,))
            continue
        loss = torch.func.functional_call(block, values, (x,)).square().sum()
        torch.testing.assert_close(torch.autograd.grad(loss, [*values.values()]), wanted)


def copy_compiled() -> tuple[Differences, bool]:
    """A copy computes with its own weights, not by what was compiled for the original."""
    plain = CASE.make()
    model = compiled_model(plain, "aot_eager", "sharded first", "module")
    CASE.loss(model, my_batch(CASE, 0)).backward()
    model.zero_grad()
    before = copy.deepcopy(plain)
    duplicate = copy.deepcopy(model)
    differences = compare_training(CASE, duplicate, plain, steps=3)
    differences.note_parameters(model, before)
    return differences, all(param.grad is None for param in model.parameters())


def test_a_copy_of_compiled_layers_trains_by_itself(spawn: Spawn) -> None:
    found = spawn(copy_compiled, 2, timeout_s=TIMEOUT_S)
    assert all(has_no_grads for _, has_no_grads in found)
    assert_within([differences for differences, _ in found], **TRAINED)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_root_of_one_group() -> None:
    """A compiled root that is one group, whose inputs require gradients."""
    plain = Block()
    case = Case(
        Block,
        lambda _: [],
        lambda generator: (torch.randn(6, 7, generator=generator),) * 2,
        lambda model, batch: (model(batch[0].clone().requires_grad_()) - 1).square().mean(),
    )
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    model = fully_shard(copy.deepcopy(plain))
    model.compile(backend="aot_eager")
    assert_within([compare_training(case, model, plain, steps=3)], **TRAINED)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compiled_layers_frozen_and_thawed() -> None:
    """Freeze and thaw a part of compiled layers: the graph is not that of before."""
    plain = CASE.make()
    model = compiled_model(plain, "aot_eager", "sharded first", "module")
    differences = Differences()
    for frozen in (False, True, False):
        for each in (model, plain):
            for block in each.blocks:
                block.fc1.requires_grad_(requires_grad=not frozen)
        differences |= compare_training(CASE, model, plain, steps=2)
    assert_within([differences], **TRAINED)


def take_step(model: nn.Module, batch: Batch) -> Tensor:
    """Forward and backward in one function, which is compiled."""
    loss = CASE.loss(model, batch)
    loss.backward()
    return loss


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_function_that_calls_backward() -> None:
    """What the engine calls is not compiled: shardkit's hooks and the end of the backward."""
    plain = CASE.make()
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    model = shard(CASE, copy.deepcopy(plain))
    compiled_step = torch.compile(take_step, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        compiled_step(model, my_batch(CASE, step))
        CASE.loss(plain, global_batch(CASE, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    differences = Differences()
    differences.note_parameters(model, plain)
    assert_within([differences], parameter=SGD_TOLERANCE)


def call_methods(model: typing.Any) -> None:
    model[0].unshard(async_op=True).wait()
    model.unshard()
    model.reshard()
    copy.deepcopy(model)
    with shardkit.summon_full_params(model):
        assert model[1].weight.shape == (5, 7)
    model.reset_iter_state()


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_function_that_calls_methods() -> None:
    """The graph breaks at those that gather, free or copy parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 5))
    model = copy.deepcopy(plain)
    for module in (model[0], model):
        fully_shard(module)
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way

    @torch.compile(backend="eager")
    def step(batch: Batch) -> None:
        call_methods(model)
        squared_error(model, batch).backward()

    step(my_batch(CASE, 0))
    squared_error(plain, global_batch(CASE, 0)).backward()
    differences = Differences()
    differences.note_grads(model, plain)
    assert_within([differences], grad=SGD_TOLERANCE)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compiled_autograd_is_refused_by_its_setting() -> None:
    """It is right beside sharded modules, and outside of the compiled function."""
    plain, sharded = CASE.make(), shard(CASE, CASE.make())
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    with torch._dynamo.config.patch(compiled_autograd=True):  # noqa: SLF001
        compiled_step = torch.compile(take_step, backend="eager")
        with pytest.raises(StateError, match=r"sharded 'head.*config.compiled_autograd at False"):
            compiled_step(sharded, my_batch(CASE, 0))
        compiled_step(plain, my_batch(CASE, 0))
        assert all(param.grad is not None for param in plain.parameters())
        torch.compile(CASE.loss, backend="eager")(sharded, my_batch(CASE, 0)).backward()
        assert all(param.grad is not None for param in sharded.parameters())


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_gradients_pass_from_a_compiled_layer_to_a_tensor_parallel_one() -> None:
    """The layer's input is the result of a collective of which autograd has not seen the wait."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 4))
    model = copy.deepcopy(plain)
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model[0], mesh["tp"], style)
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    model[1] = torch.compile(model[1], backend="aot_eager")
    for module in (model[1], model):
        fully_shard(module, mesh=mesh["dp"])
    batches = torch.arange(8).view(2, 4)
    model(batches[mesh.get_local_rank("dp")]).square().sum().backward()
    plain(batches).square().sum().div(2).backward()
    for name, expected in plain.named_parameters():
        found = model.get_parameter(name.replace("1.", "1._orig_mod.")).grad
        torch.testing.assert_close(found.full_tensor(), expected.grad)


# --- functions that get sharded tensors -----------------------------------------------------------


def scaled(x: Tensor) -> Tensor:
    return x * 2 + 1


def averaged(x: Tensor) -> Tensor:
    return torch.zeros_like(x).lerp_(x, 0.5)


def normalized(x: Tensor) -> Tensor:
    return x / (x.norm() + 1e-7)


def newton_schulz(x: Tensor) -> Tensor:
    """One step of Muon's iteration."""
    x = normalized(x)
    product = x @ x.T
    return product @ x


def contracted(x: Tensor) -> Tensor:
    return torch.einsum("ij,kj->ik", x, x)


def gathered(x: Tensor) -> Tensor:
    return x.full_tensor() * 2 if hasattr(x, "full_tensor") else x * 2


def first_row(x: Tensor) -> Tensor:
    return x[0] + 1


FUNCTIONS = (scaled, averaged, normalized, newton_schulz, contracted, gathered, first_row)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.parametrize("is_installed", [False, True])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compiled_functions_of_sharded_tensors(is_installed: bool) -> None:
    """They run as they are, on parameters and gradients, for pieces of 20 and 15 elements."""
    with shardkit.install() if is_installed else contextlib.nullcontext():
        torch.manual_seed(0)
        layer = fully_shard(nn.Linear(7, 5).double())
        layer(torch.ones(2, 7).double()).square().mean().backward()
        with torch.no_grad():
            for x in (layer.weight, layer.weight.grad):
                for function in FUNCTIONS:
                    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
                    compiled = torch.compile(function, backend="aot_eager")
                    for _ in range(2):
                        found = whole(compiled(x))
                        torch.testing.assert_close(found, function(x.full_tensor()))


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_function_in_another_thread() -> None:
    """Settings of the compiler may hold for one thread."""
    layer = fully_shard(nn.Linear(7, 5))
    results = []

    @torch.no_grad()
    def run() -> None:
        results.append(torch.compile(scaled, backend="aot_eager")(layer.weight))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (found,) = results
    torch.testing.assert_close(found.full_tensor(), scaled(layer.weight.detach().full_tensor()))


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, typing.Any]], ...] = (
    (torch.optim.AdamW, {"foreach": True, "lr": 0.1}),
    (torch.optim.AdamW, {"foreach": False, "lr": 0.1}),
    (torch.optim.Adamax, {"foreach": True, "lr": torch.tensor(0.1)}),
    (torch.optim.NAdam, {"foreach": True, "lr": 0.1}),
)


def slopes_into(models: tuple[nn.Module, ...]) -> None:
    for model in models:
        model(torch.ones(2, 7).double()).square().mean().backward()


def train_by_compiled_step(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, typing.Any]
) -> None:
    """Raise unless parameters are those of a plain step, bit for bit; compiled ones round more."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double()
    sharded = fully_shard(copy.deepcopy(plain))
    steps = [optimizer_class(model.parameters(), **options).step for model in (plain, sharded)]
    steps[1] = torch.compile(steps[1], backend="aot_eager")
    for _ in range(3):
        slopes_into((plain, sharded))
        for step in steps:
            step()
    for expected, param in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(whole(param), expected)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_a_compiled_step_trains_as_one_that_is_not() -> None:
    for optimizer_class, options in OPTIMIZERS:
        train_by_compiled_step(optimizer_class, options)


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_other_code_is_compiled_beside_a_step() -> None:
    """After the step in the same function, after a step that raised, and other optimizers."""
    graphs = []

    def note(graph: torch.fx.GraphModule, _: object) -> typing.Any:
        graphs.append(graph)
        return graph

    sharded, plain = fully_shard(nn.Linear(7, 5).double()), nn.Linear(7, 5).double()
    same = copy.deepcopy(plain)
    models = (sharded, plain, same)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]

    @torch.compile(backend=note)
    def step(x: Tensor) -> Tensor:
        optimizers[0].step()
        return x.sin() + 1

    def refuse(*_: object) -> None:
        raise ValueError

    slopes_into(models)
    step(torch.ones(2))
    assert len(graphs) == 1
    hook = optimizers[0].register_step_pre_hook(refuse)
    with pytest.raises(ValueError, match=r"^$"):
        step(torch.ones(2))
    hook.remove()
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    step(torch.ones(2))
    assert len(graphs) == 2
    torch.compile(optimizers[1].step, backend=note)()
    optimizers[2].step()
    assert len(graphs) > 2
    torch.testing.assert_close(list(plain.parameters()), list(same.parameters()))
