"""Recurrent layers of torch, which keep their weights in a list of their own."""

from __future__ import annotations

import copy
import operator
import typing
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from models import Batch, Case
from parity import compare_training, in_turns
from reference import (
    LOSS_TOLERANCE,
    SGD_TOLERANCE,
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    shard,
)
from shardkit import ShardedTensor, WrapError, checkpoint, fully_shard, init_device_mesh
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.helpers

LENGTHS = torch.tensor([5, 2, 4])
KINDS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Recurrent(nn.Module):
    """A recurrent layer that is given, and returns, a packed sequence or an ordinary tensor."""

    def __init__(self, kind: str, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.first = nn.Linear(4, 6)
        self.rnn = KINDS[kind](6, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.packed:
            lengths = LENGTHS.repeat(x.shape[0] // len(LENGTHS))
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, state = self.rnn(x)
        if self.packed:
            assert isinstance(outputs, PackedSequence)
            outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs).mean(1) + last.mean((0, 2))[:, None]


def sequence_batch(generator: torch.Generator) -> Batch:
    return torch.randn(3, 5, 4, generator=generator), torch.randn(3, 5, generator=generator)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


GROUPS: dict[str, typing.Callable[[nn.Module], list[nn.Module]]] = {
    "alone": lambda model: [model.rnn],
    "in the root": lambda model: [model.head],
}


def assert_weights_agree(rnn: nn.RNNBase, *, sharded: bool) -> None:
    """Check that the list that forward reads holds the parameters that the module shows."""
    assert len(rnn.__dict__["_flat_weights"]) == len(list(rnn.parameters()))
    for name, weight in zip(
        rnn.__dict__["_flat_weights_names"], rnn.__dict__["_flat_weights"], strict=True
    ):
        assert getattr(rnn, name) is weight, name
        assert isinstance(weight, ShardedTensor) == sharded, name


def train_recurrent(kind: str, choice: tuple[bool, str, bool | None]) -> Differences:
    packed, where, reshard_after_forward = choice
    case = Case(
        lambda: Recurrent(kind, packed=packed), GROUPS[where], sequence_batch, squared_error
    )
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    assert_weights_agree(model.rnn, sharded=True)
    differences = compare_training(case, model, plain, "sgd", steps=5)
    assert_weights_agree(model.rnn, sharded=True)
    model.rnn.flatten_parameters()
    return differences


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_train_as_plain_ones(spawn: Spawn, kind: str) -> None:
    turns = in_turns(KINDS, [True, False, None], list(GROUPS))
    choices = {
        f"{packed=}, {where}, reshard_after_forward={mode}": (packed, where, mode)
        for packed in (False, True)
        for each, mode, where in turns
        if each == kind
    }
    found = spawn_each(spawn, choices, train_recurrent, 2, kind)
    assert_each_within(found, **TRAINED)


@pytest.mark.parametrize("where", GROUPS)
@on_ranks(2)
def test_functional_call_computes_with_the_given_weights(where: str) -> None:
    """Whether modules show unsharded parameters before, or not, and only some are given."""
    torch.manual_seed(0)
    plain, other = (Recurrent("lstm", packed=False) for _ in range(2))
    case = Case(lambda: plain, GROUPS[where], sequence_batch, squared_error)
    model = shard(case, copy.deepcopy(plain))
    x, _ = sequence_batch(torch.Generator().manual_seed(0))
    given = {name: param.detach() for name, param in other.named_parameters()}
    some = {name: value for name, value in given.items() if "weight_hh" in name}
    partly = copy.deepcopy(plain)
    partly.load_state_dict(some, strict=False)
    for show in (lambda: None, model.unshard, lambda: model(x)):
        for values, expected in ((given, other), (some, partly)):
            show()
            found = torch.func.functional_call(model, values, (x,))
            torch.testing.assert_close(found, expected(x), rtol=0, atol=1e-6)
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-6)


@on_ranks(2)
def test_weights_on_meta_that_are_not_sharded_are_loaded(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    plain = Recurrent("lstm", packed=False)
    whole = fully_shard(copy.deepcopy(plain))
    checkpoint.save(tmp_path / "saved", whole)
    x, _ = sequence_batch(torch.Generator().manual_seed(0))
    for load in (
        lambda model: checkpoint.load(tmp_path / "saved", model),
        lambda model: checkpoint.load_full(plain.state_dict(), model, progress=False),
    ):
        with torch.device("meta"):
            model = Recurrent("lstm", packed=False)
        ignored = set(model.rnn.parameters())
        load(fully_shard(model, ignored_params=ignored, mesh=init_device_mesh("cpu", (2,))))
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-6)
        assert all(map(weakref.getweakrefs, ignored))  # As torch leaves them.


class RecurrentRoot(nn.LSTM):
    """An LSTM that is the root itself, with a packed sequence as input and as output."""


def packed_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    lengths = LENGTHS.repeat(x.shape[0] // len(LENGTHS))
    outputs, (hidden, cell) = model(
        pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    )
    return (outputs.data.square().sum() + hidden.square().sum() + cell.sum()) / x.shape[0]


ROOT = Case(
    lambda: RecurrentRoot(4, 3, num_layers=2, bidirectional=True, proj_size=2, batch_first=True),
    lambda _: [],
    sequence_batch,
    packed_loss,
)


@on_ranks(2)
def test_a_recurrent_root() -> None:
    plain = ROOT.make()
    assert_within(
        [compare_training(ROOT, fully_shard(copy.deepcopy(plain)), plain, steps=5)],
        loss=LOSS_TOLERANCE,
        grad=10 * SGD_TOLERANCE,
        parameter=SGD_TOLERANCE,
    )


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("where", GROUPS)
@on_ranks(2)
def test_a_copy_of_a_recurrent_model_trains_by_itself(where: str, trained_before: bool) -> None:
    case = Case(
        lambda: Recurrent("lstm", packed=True), GROUPS[where], sequence_batch, squared_error
    )
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), reshard_after_forward=False)
    if trained_before:
        compare_training(case, model, plain, steps=2)
        case.loss(model, sequence_batch(torch.Generator()))  # Leaves its parameters unsharded.
    before = copy.deepcopy(plain)
    duplicate = copy.deepcopy(model)
    assert_weights_agree(duplicate.rnn, sharded=True)
    assert not {id(weight) for weight in duplicate.rnn.__dict__["_flat_weights"]} & {
        id(weight) for weight in model.rnn.__dict__["_flat_weights"]
    }
    differences = compare_training(case, duplicate, plain, steps=3)
    assert_weights_agree(duplicate.rnn, sharded=True)
    differences.note_parameters(model, before)  # Training the copy did not change the original.
    assert_within(
        [differences], loss=LOSS_TOLERANCE, grad=10 * SGD_TOLERANCE, parameter=SGD_TOLERANCE
    )


def load_and_convert() -> list[bool]:
    """Weights are loaded and converted where they are, so the list sees the new ones."""
    case = Case(
        lambda: Recurrent("gru", packed=False), GROUPS["alone"], sequence_batch, squared_error
    )
    plain, other = case.make(), case.make()
    model = shard(case, copy.deepcopy(plain))
    batch = sequence_batch(torch.Generator())
    model.load_state_dict(other.state_dict())
    results = [torch.equal(model(batch[0]), other(batch[0]))]
    model.double()
    other.double()
    results.append(torch.equal(model(batch[0].double()), other(batch[0].double())))
    return results


def test_a_recurrent_layer_sees_weights_loaded_and_converted(spawn: Spawn) -> None:
    assert spawn(load_and_convert, 2) == [[True, True]] * 2


def refused_with_an_lstm() -> bool:
    """A weak reference forbids the head to be exchanged: the LSTM before it is as it was."""
    model = Recurrent("lstm", packed=False)
    reference = weakref.ref(model.head.weight)
    with pytest.raises(WrapError, match=r"head\.weight"):
        fully_shard(model)
    assert reference() is model.head.weight
    assert_weights_agree(model.rnn, sharded=False)
    refs = [ref() for ref in model.rnn.__dict__["_flat_weight_refs"]]
    return all(map(operator.is_, refs, model.rnn.__dict__["_flat_weights"]))


def test_a_refusal_leaves_a_recurrent_layer_as_it_was(spawn: Spawn) -> None:
    assert spawn(refused_with_an_lstm, 2) == [True, True]
