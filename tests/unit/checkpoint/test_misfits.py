"""Messages say in which way a saved entry does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit import CheckpointError
from shardkit.checkpoint import load_full


class Counter(nn.Linear):
    """Has a buffer of whole numbers, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"calls": 1}


NO_TENSOR = "something that is no tensor"
CASES = {
    "shape": ({"bias": torch.ones(3)}, "another shape", "shape (2,) of float32", "(3,) of float32"),
    "dtype": ({"count": torch.ones(4)}, "another dtype", "(4,) of int64", "(4,) of float32"),
    "both": (
        {"count": torch.ones(5)},
        "another shape and another dtype",
        "shape (4,) of int64",
        "shape (5,) of float32",
    ),
}


@pytest.mark.parametrize(("changed", "what", "wanted", "found"), CASES.values(), ids=CASES)
def test_what_differs_is_said(
    changed: dict[str, torch.Tensor], what: str, wanted: str, found: str
) -> None:
    model = Counter()
    [name] = changed
    with pytest.raises(CheckpointError) as caught:
        load_full({**model.state_dict(), **changed}, model)
    [line] = [line for line in str(caught.value).splitlines() if name in line]
    assert line.startswith(f"  expected {what}: {name!r}: expected ")
    assert wanted in line.split("found")[0]
    assert line.endswith(found)


def test_what_is_no_tensor_has_words() -> None:
    model = Counter()
    state = model.state_dict()
    del state["_extra_state"]
    with pytest.raises(CheckpointError) as caught:
        load_full({**state, "note": "text"}, model)
    lines = str(caught.value).splitlines()
    assert f"  missing in the file: '_extra_state': expected {NO_TENSOR}" in lines
    assert f"  unexpected in the file: 'note': found {NO_TENSOR}" in lines


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.model."])
def test_names_behind_a_prefix_are_recognized(prefix: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    state = {prefix + name: torch.ones_like(value) for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_full(state, model)
    remedy = str(caught.value).splitlines()[-1]
    assert f"load_full({{name.removeprefix({prefix!r}): value" in remedy
    load_full({name.removeprefix(prefix): value for name, value in state.items()}, model)
    assert all(param.eq(1).all() for param in model.parameters())


def test_other_names_are_no_prefix() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    state = {f"a.{name}": value for name, value in model.state_dict().items()}
    state["b.1.bias"] = state.pop("a.1.bias")
    with pytest.raises(CheckpointError, match="Give the file of this model") as caught:
        load_full(state, model)
    assert "removeprefix" not in str(caught.value)
