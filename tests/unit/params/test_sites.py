"""Where modules hold a bucket's parameters: exchanged everywhere, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit import StateError
from shardkit._params.sites import ParamEntry, ParamSites


class Tied(nn.Module):
    """Holds one parameter twice, in modules of its own, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def places_of(model: Tied) -> tuple[ParamSites, list[ParamEntry], list[nn.Parameter]]:
    found = [
        ParamEntry(
            "first.weight",
            model.first.weight,
            [(model.first, "weight"), (model.second, "weight")],
        ),
        ParamEntry("first.bias", model.first.bias, [(model.first, "bias")]),
    ]
    whole = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    return ParamSites(found, whole), found, whole


def shown(model: Tied) -> list[nn.Parameter]:
    return [model.first.weight, model.second.weight, model.first.bias]


def are(actual: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    return all(one is other for one, other in zip(actual, expected, strict=True))


def test_every_module_that_holds_a_parameter_shows_the_other_one() -> None:
    model = Tied()
    sharded = shown(model)
    places, _, (weight, bias) = places_of(model)
    for _ in range(2):
        for _ in range(2):  # To show what is shown changes nothing.
            places.show(unsharded=True)
            assert are(shown(model), [weight, weight, bias])
        for _ in range(2):
            places.show(unsharded=False)
            assert are(shown(model), sharded)


def test_parameters_exchanged_before_the_first_use_are_those_that_are_shown() -> None:
    model = Tied()
    places, found, _ = places_of(model)
    other = nn.Parameter(torch.zeros(2))
    found[1].param = model.first.bias = other
    places.show(unsharded=True)
    places.show(unsharded=False)
    assert model.first.bias is other


def test_a_parameter_frozen_meanwhile_is_used_frozen() -> None:
    model = Tied()
    places, _, (weight, bias) = places_of(model)
    model.first.weight.requires_grad_(requires_grad=False)
    places.show(unsharded=True)
    assert [weight.requires_grad, bias.requires_grad] == [False, True]
    places.show(unsharded=False)
    model.first.weight.requires_grad_(requires_grad=True)
    places.show(unsharded=True)
    assert weight.requires_grad


@pytest.mark.parametrize("change", ["replaced", "removed"])
@pytest.mark.parametrize("holder", ["first", "second"])
def test_a_parameter_put_in_its_place_is_refused_by_name(holder: str, change: str) -> None:
    model = Tied()
    places, _, _ = places_of(model)
    places.show(unsharded=True)
    places.show(unsharded=False)
    module = getattr(model, holder)
    del module.weight
    if change == "replaced":
        module.weight = nn.Parameter(torch.zeros(2, 2))
    before = dict(module._parameters)  # noqa: SLF001 - one may be gone
    with pytest.raises(
        StateError,
        match=r"'weight' of a Linear is no longer the parameter 'first\.weight' that fully_shard",
    ):
        places.show(unsharded=True)
    assert dict(module._parameters) == before, "the module is as it was"  # noqa: SLF001
    assert model.first._parameters["bias"] is not None  # noqa: SLF001


def test_a_sharded_parameter_that_is_put_back_while_another_is_shown() -> None:
    """As by code that swaps parameters for a forward, and then restores them."""
    model = Tied()
    sharded = shown(model)
    places, _, (weight, bias) = places_of(model)
    places.show(unsharded=True)
    model.first.weight = sharded[0]
    places.show(unsharded=True)
    assert are(shown(model), [weight, weight, bias])
    model.second.weight = sharded[0]
    places.show(unsharded=False)
    assert are(shown(model), sharded)
    assert places.was_visible is None, "no functional_call"


def test_a_recurrent_module_computes_with_what_it_shows() -> None:
    """It keeps a list of its weights as well."""
    module = nn.RNN(2, 2)
    found = [ParamEntry(name, param, [(module, name)]) for name, param in module.named_parameters()]
    whole = [nn.Parameter(torch.full_like(item.param, 0.25)) for item in found]
    places = ParamSites(found, whole)
    x = torch.ones(3, 2)
    before = module(x)[0]
    places.show(unsharded=True)
    assert are(list(module._flat_weights), whole)  # noqa: SLF001 - what its forward reads
    assert not torch.equal(module(x)[0], before)
    places.show(unsharded=False)
    assert torch.equal(module(x)[0], before)
