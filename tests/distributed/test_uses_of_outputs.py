"""What callers do with inputs and outputs of sharded modules, and which of them they run."""

from __future__ import annotations

import copy
import pickle
import typing
import warnings

import pytest
import torch
from one_backward import MODES
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from models import MLP, Batch, Case, regression_batch
from parity import compare_training, in_turns
from reference import (
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    shard,
)
from shardkit import fully_shard
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable


class Layers(nn.Module):
    """Four square layers, to be run in whatever way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, depth: int = 4) -> Tensor:
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        return self.head(x)


class Twins(nn.Module):
    """Layers of two outputs, of which the second is for nothing and the first is used twice."""

    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(7, 7)
            self.right = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.left(x)), torch.tanh(self.right(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Twin() for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            used, _ = layer(x)
            x = x + used * used.detach().abs() + used.flip(1)
        return self.head(x)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


# --- which modules run ----------------------------------------------------------------------------


def whole(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return loss_of(model(x), y)


def depths_in_turn(model: nn.Module, batch: Batch) -> Tensor:
    """Another depth in every step, as layer drop and early exits have it; the same on all ranks."""
    x, y = batch
    model.steps = getattr(model, "steps", 0) + 1
    return loss_of(model(x, 1 + model.steps % 4), y)


def layer_before_root(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return loss_of(model(model.layers[2](x)), y)


def layer_after_root(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    output = model(x)
    return loss_of(output, y) + model.layers[1](output.repeat(1, 2)[:, :7]).square().mean()


def layer_alone_between_roots(model: nn.Module, batch: Batch) -> Tensor:
    """A whole step of one layer alone, then one of the root."""
    x, y = batch
    model.layers[3](x).square().mean().backward()
    return loss_of(model(x), y)


def layer_under_no_grad(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.no_grad():
        x = x + model.layers[0](x)
    return loss_of(model(x), y)


def auxiliary_loss(model: nn.Module, batch: Batch) -> Tensor:
    """An output of a layer in the middle is a loss too, and goes backward by itself first."""
    x, y = batch
    middle = model.layers[0](x)
    middle.square().mean().backward(retain_graph=True)
    return loss_of(model(middle), y)


def detached_halves(model: nn.Module, batch: Batch) -> Tensor:
    """Backward in two parts, cut in the middle as by a pipeline."""
    x, y = batch
    first = torch.tanh(model.layers[0](x))
    cut = first.detach().requires_grad_()
    loss = loss_of(model(cut), y)
    loss.backward()
    first.backward(cut.grad)
    return loss.detach().requires_grad_()


def inference_and_eval_around(model: nn.Module, batch: Batch) -> Tensor:
    """Every kind of forward without gradients, before and after the one that trains."""
    x, y = batch
    model.eval()
    with torch.inference_mode():
        seen = model(x).clone()
    with torch.no_grad():
        assert torch.equal(model(x), seen)
    model.train()
    loss = loss_of(model(x), y)
    with torch.inference_mode():
        assert torch.equal(model(x), seen)
    return loss


RUNS = {
    run.__name__: (make, run)
    for make, run in (
        (Layers, depths_in_turn),
        (Layers, layer_before_root),
        (Layers, layer_after_root),
        (Layers, layer_alone_between_roots),
        (Layers, layer_under_no_grad),
        (Layers, auxiliary_loss),
        (Layers, detached_halves),
        (Layers, inference_and_eval_around),
        (Twins, whole),
    )
}


def train_run(name: str, reshard_after_forward: bool | None) -> Differences:
    make, run = RUNS[name]
    case = Case(make, lambda model: list(model.layers), regression_batch, run)
    plain = make()
    model = shard(case, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    return compare_training(case, model, plain, steps=6)


@pytest.mark.parametrize("name", RUNS)
def test_modules_run_in_any_way(spawn: Spawn, name: str) -> None:
    found = spawn_each(spawn, MODES, train_run, 2, name)
    assert_each_within(found, **TRAINED)


# --- parameters that are returned -----------------------------------------------------------------


class ReturnsBias(Layers):
    """Returns a parameter as it is, as contrastive models do with the bias of their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, depth: int = 4) -> typing.Any:
        return super().forward(x, depth), self.bias


def with_returned_bias(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    output, bias = model(x)
    return loss_of(output + bias, y)


def train_layers(
    make: Callable[[], typing.Any],
    loss: Callable[[nn.Module, Batch], Tensor],
    reshard_after_forward: bool,
) -> Differences:
    plain = make()
    case = Case(make, lambda model: list(model.layers), regression_batch, loss)
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    return compare_training(case, fully_shard(model), plain)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_parameter_may_be_returned(spawn: Spawn, reshard_after_forward: bool) -> None:
    found = spawn(train_layers, 2, ReturnsBias, with_returned_bias, reshard_after_forward)
    assert_within(found, **TRAINED)


class ShowsWeight(nn.Linear):
    def forward(self, x: Tensor) -> typing.Any:
        return torch.tanh(super().forward(x)), self.weight.t()[:2]


class PenalizesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ShowsWeight(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> typing.Any:
        views = []
        for layer in self.layers:
            x, view = layer(x)
            views.append(view)
        return self.head(x) + torch.stack([view.square().mean() for view in views]).sum()


def test_views_of_parameters_may_be_returned_where_these_stay(spawn: Spawn) -> None:
    found = spawn(train_layers, 2, PenalizesViews, whole, False)
    assert_within(found, **TRAINED)


def test_a_view_of_a_freed_parameter_raises(spawn_errors: Spawn) -> None:
    """To read freed memory would end the process."""
    for error in spawn_errors(train_layers, 2, PenalizesViews, whole, True):
        assert error is not None
        assert error.type_name == "FreedParameterError"
        assert "'layers.0.weight'" in error.message


class KeepsInside(nn.Module):
    """A layer whose inner features code outside reads, as losses of features do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.second(torch.tanh(self.first(x)))
        return torch.tanh(self.features)


@on_ranks(2)
def test_a_loss_of_features_inside_of_layers_needs_what_the_error_says() -> None:
    plain = nn.Sequential(*(KeepsInside() for _ in range(4)))
    model, advised = copy.deepcopy(plain), copy.deepcopy(plain)
    for layer in (*model, model, *advised, advised):
        fully_shard(layer)
    model(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0") as raised:
        model[2].features.square().sum().backward()
    (note,) = raised.value.__notes__
    assert "let its forward return" in note
    assert "set_reshard_after_forward(False) and set_reshard_after_backward(False)" in note
    advised.set_reshard_after_forward(False)
    advised.set_reshard_after_backward(False)
    for each in (advised, plain):
        each(torch.ones(2, 7))
        each[2].features.square().sum().backward()
    differences = Differences()
    differences.note_grads(advised, plain)
    assert_within([differences], grad=TRAINED["grad"])


@on_ranks(2)
def test_outputs_are_pickled_without_a_warning() -> None:
    """As `all_gather_object` does with a loss, and hooks that write saved tensors to a disk."""
    model = fully_shard(nn.Linear(7, 5))
    output = model(torch.ones(2, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again, output)
    output.sum().backward()
    assert model.bias.grad is not None


# --- written in place -----------------------------------------------------------------------------


def scale_a_selection(x: Tensor) -> Tensor:
    x.t()[0].mul_(2)
    return x


def add_to_a_view(x: Tensor) -> Tensor:
    x.view(-1).add_(1)
    return x


def clamp_whole(x: Tensor) -> Tensor:
    return torch.relu_(x)


def fill_by_mask(x: Tensor) -> Tensor:
    return x.masked_fill_(x > 0.5, 0.5)


def write_a_column(x: Tensor) -> Tensor:
    x[:, 2] = x[:, 3] * 2
    return x


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "selection": scale_a_selection,
    "view": add_to_a_view,
    "relu": clamp_whole,
    "mask": fill_by_mask,
    "column": write_a_column,
}


class Writer(MLP):
    """Writes on what its layers return, or on what they are given, inside of them."""

    class Inside(nn.Module):
        """Writes on its own input first."""

        def __init__(self, layer: nn.Module, write: str) -> None:
            super().__init__()
            self.layer = layer
            self.write = write

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(WRITES[self.write](x))

    def __init__(self, write: str, where: str) -> None:
        super().__init__((7, 7, 7, 5))
        self.write = write
        self.where = where
        if where == "input":
            for i in (1, 2):
                self.layers[i] = self.Inside(self.layers[i], write)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x) if self.where == "input" else WRITES[self.write](layer(x))
        x = self.layers[-1](x)
        return WRITES[self.write](x) if self.where == "root output" else x


@pytest.mark.parametrize(
    ("write", "reshard_after_forward", "where"),
    in_turns(WRITES, [True, False, None], ["output", "root output"]),
)
@on_ranks(2)
def test_outputs_written_in_place(
    write: str, where: str, reshard_after_forward: bool | None
) -> None:
    plain = Writer(write, where)
    case = Case(MLP, lambda model: list(model.layers), regression_batch, whole)
    model = shard(case, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    assert_within([compare_training(case, model, plain)], **TRAINED)


def write_on_inputs(wrap: str, write: str) -> None:
    model = Writer(write, "input")
    fully_shard_one = {"shardkit": fully_shard, "torch": torch_fully_shard}[wrap]
    for module in (*model.layers, model):
        fully_shard_one(module)
    model(torch.ones(2, 7))


@pytest.mark.parametrize("wrap", ["shardkit", "torch"])
@pytest.mark.parametrize("write", WRITES)
def test_inputs_written_in_place_are_refused_as_by_fsdp2(
    spawn_errors: Spawn, write: str, wrap: str
) -> None:
    """The caller's tensor would not know of the write: autograd refuses, no gradient is wrong."""
    for error in spawn_errors(write_on_inputs, 2, wrap, write):
        assert error is not None
        assert error.type_name == "RuntimeError"
        assert "is being modified inplace" in error.message


@on_ranks(2)
def test_a_layer_may_write_on_data() -> None:
    """A batch requires no gradient, so the first layer may write on it."""
    plain = Writer("relu", "input")
    plain.layers[0] = Writer.Inside(plain.layers[0], "relu")
    for i in (1, 2):
        plain.layers[i] = plain.layers[i].layer
    case = Case(MLP, lambda model: list(model.layers), regression_batch, whole)
    assert_within([compare_training(case, shard(case, copy.deepcopy(plain)), plain)], **TRAINED)
