"""What a module shows of its parameters, and when: the sharded ones, but for its own forward."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest
import torch
from recorded import Recorded, fail

from shardkit import ShardedTensor

if typing.TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = ["layers.0.linear", "layers.1.linear", "layers.2.linear"]


def not_sharded(named: typing.Iterable[tuple[str, object]]) -> list[str]:
    """Return the names of those that are not sharded tensors."""
    return [name for name, tensor in named if not isinstance(tensor, ShardedTensor)]


def in_state_dict(recorded: Recorded) -> list[str]:
    return not_sharded(recorded.model.state_dict().items())


def in_parameters(recorded: Recorded) -> list[str]:
    return not_sharded(recorded.model.named_parameters())


def test_between_steps_all_are_sharded() -> None:
    recorded = Recorded()
    for _ in range(2):
        assert in_parameters(recorded) == in_state_dict(recorded) == []
        recorded.step()
    assert in_parameters(recorded) == in_state_dict(recorded) == []


def test_names_and_their_order_are_those_of_the_plain_model() -> None:
    names: list[str] = []
    recorded = Recorded(
        prepare=lambda model: names.extend(name for name, _ in model.named_parameters())
    )
    assert [name for name, _ in recorded.model.named_parameters()] == names
    recorded.step()
    assert [name for name, _ in recorded.model.named_parameters()] == names
    assert sorted(recorded.model.state_dict()) == sorted(names)


def test_a_forward_sees_its_own_and_the_roots() -> None:
    recorded = Recorded()
    seen: list[list[str]] = []

    def look(*_: object) -> None:
        shown = dict(recorded.model.named_parameters())
        seen.append(not_sharded(shown.items()))

    for layer in recorded.model.layers:
        layer.register_forward_pre_hook(look)
    recorded.run()
    assert seen == [["scale", f"{layer}.weight", f"{layer}.bias"] for layer in LAYERS]


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_a_pass_without_grad_ends_with_all_sharded(*, reshard_after_forward: bool | None) -> None:
    """Also where the root's memory is kept."""
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    with torch.no_grad():
        recorded.run()
    assert in_parameters(recorded) == in_state_dict(recorded) == []


# --- a checkpoint at any time -------------------------------------------------------------------


def between_forward_and_backward(recorded: Recorded) -> None:
    recorded.run()


def after_a_failed_forward(recorded: Recorded) -> None:
    recorded.model.layers[1].linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        recorded.run()


def after_a_failed_backward(recorded: Recorded) -> None:
    recorded.model.layers[1].linear.register_full_backward_hook(fail)
    loss = recorded.run()
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()


def after_unshard(recorded: Recorded) -> None:
    recorded.step()
    recorded.model.layers[1].unshard()


@pytest.mark.parametrize("reshard_after_forward", [False, None])
@pytest.mark.parametrize(
    "moment",
    [
        between_forward_and_backward,
        after_a_failed_forward,
        after_a_failed_backward,
        after_unshard,
    ],
)
def test_a_state_dict_is_sharded_at_any_time(
    moment: Callable[[Recorded], None], *, reshard_after_forward: bool | None
) -> None:
    """A plain tensor in it would lose its memory with the next reshard, and with it the process."""
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    moment(recorded)
    assert in_state_dict(recorded) == []


def test_a_state_dict_of_a_part_is_sharded_at_any_time() -> None:
    recorded = Recorded(reshard_after_forward=False)
    between_forward_and_backward(recorded)
    assert not_sharded(recorded.model.layers[1].linear.state_dict().items()) == []


def test_a_state_dict_of_a_part_survives_copies_and_pickles_of_the_part() -> None:
    """The hooks are on modules that `fully_shard` was not called on, and hold nothing."""
    recorded = Recorded(reshard_after_forward=False)
    linear = recorded.model.layers[1].linear
    for copied in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        between_forward_and_backward(recorded)
        assert not_sharded(copied.state_dict().items()) == []
        original = linear.state_dict()["weight"].to_local()
        assert torch.equal(copied.weight.to_local(), original)
        assert copied.weight.to_local().data_ptr() != original.data_ptr()
    model = copy.deepcopy(recorded.model)
    model(torch.ones(2, 8))
    assert not_sharded(model.layers[1].linear.state_dict().items()) == []
    assert len(linear._state_dict_hooks) == len(model.layers[1].linear._state_dict_hooks) == 1  # noqa: SLF001


def test_data_takes_over_values_and_dtype() -> None:
    """As the data of plain parameters do; the Parameter objects stay."""
    recorded = Recorded(rank=1)
    recorded.step()
    parameters = list(recorded.model.parameters())
    for parameter in parameters:
        parameter.mark = 1
        parameter.data = torch.full(parameter.shape, 3.0)
    recorded.step()
    for parameter in parameters:
        assert (parameter.to_local() == 3).all()
        parameter.data = parameter.data.double()
        assert parameter.dtype == parameter.to_local().dtype == torch.float64
        assert parameter.grad.dtype == torch.float64
    recorded.model(torch.ones(2, 8).double()).sum().backward()
    for parameter, same in zip(recorded.model.parameters(), parameters, strict=True):
        assert parameter is same
        assert parameter.mark == 1
        assert (parameter.to_local() == 3).all()


def test_shared_memory_is_that_of_the_pieces() -> None:
    recorded = Recorded()
    assert not recorded.model.scale.is_shared()
    recorded.model.share_memory()
    assert all(parameter.is_shared() for parameter in recorded.model.parameters())
    assert all(parameter.to_local().is_shared() for parameter in recorded.model.parameters())
    recorded.step()


@pytest.mark.parametrize("moment", [after_a_failed_forward, after_a_failed_backward, after_unshard])
def test_a_state_dict_can_be_loaded_at_any_time(moment: Callable[[Recorded], None]) -> None:
    """To go on from a checkpoint after an error."""
    recorded = Recorded(reshard_after_forward=False)
    saved = {name: value.clone() for name, value in recorded.model.state_dict().items()}
    with torch.no_grad():
        for parameter in recorded.model.parameters():
            parameter.zero_()
    moment(recorded)
    recorded.model.load_state_dict(saved)
    assert in_parameters(recorded) == []
    for name, parameter in recorded.model.named_parameters():
        assert torch.equal(parameter.to_local(), saved[name].to_local())
