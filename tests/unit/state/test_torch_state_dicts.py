"""How torch's functions for state dicts are made to know sharded tensors, and when they are not."""

from __future__ import annotations

import subprocess
import sys
import types
import typing

import pytest
import torch
from recorded import Recorded
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_functions

import shardkit.checkpoint
from shardkit import ShardedTensor, StateError
from shardkit._compat import torch_checkpoints
from shardkit._compat.torch_checkpoints import AfterImport
from shardkit._params.state_dicts import distribute_state_dict, gather_state_dict

if typing.TYPE_CHECKING:
    from pathlib import Path

_IMPORTED_LATER = """
import sys
import shardkit
assert "torch.distributed.checkpoint" not in sys.modules, "slow to import"
from torch.distributed.checkpoint import state_dict
from torch.distributed import _state_dict_utils
for module in (state_dict, _state_dict_utils):
    for name in ("_gather_state_dict", "_distribute_state_dict", "_broadcast_state_dict"):
        assert hasattr(getattr(module, name), "wraps_torch"), (module, name)
assert hasattr(_state_dict_utils._broadcast_tensors, "wraps_torch")
import torch.distributed.checkpoint.format_utils
import torch._dynamo.config
assert not any(type(finder).__name__ == "AfterImport" for finder in sys.meta_path)
"""


def test_helpers_are_wrapped_when_they_are_imported_after_shardkit() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTED_LATER], check=True)


def test_helpers_are_wrapped_that_were_imported_before() -> None:
    for name in ("_gather_state_dict", "_distribute_state_dict", "_broadcast_state_dict"):
        helper = getattr(torch_functions, name)
        assert hasattr(helper, "wraps_torch")
        assert not hasattr(helper.__wrapped__, "wraps_torch"), "wrapped twice"


def test_a_module_is_handed_over_after_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[types.ModuleType] = []
    finder = AfterImport("imported_later", seen.append)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import imported_later

    assert [module.value for module in seen] == [imported_later.value] == [1]
    assert finder not in sys.meta_path


def test_without_torch_s_helpers_full_states_are_refused() -> None:
    """As by a torch that has other helpers: pieces must not pass for whole tensors."""
    module = types.ModuleType("state_dict")
    names = torch_checkpoints._PUBLIC_STATE_DICT_FUNCTIONS  # noqa: SLF001
    for name in names:

        def function(model: nn.Module, *args: object, **kwargs: object) -> object:
            del args, kwargs
            return model

        function.__name__ = name
        setattr(module, name, function)
    torch_checkpoints._refuse_full_state_dicts(module)  # noqa: SLF001
    model = Recorded().model
    full = torch_functions.StateDictOptions(full_state_dict=True)
    for name in names:
        function = getattr(module, name)
        with pytest.raises(StateError, match=rf"{name} of torch .* shardkit\.checkpoint"):
            function(model, options=full)
        assert function(model, options=torch_functions.StateDictOptions()) is model
        assert function(model) is model
        plain = nn.Linear(2, 2)
        assert function(plain, options=full) is plain
        assert hasattr(shardkit.checkpoint, name)


def test_what_holds_nothing_sharded_goes_to_torch_as_it_is() -> None:
    given = {"x": torch.ones(2), "y": [1, (2, "z")]}
    calls = []

    def original(*args: object, **kwargs: object) -> str:
        calls.append((args, kwargs))
        return "result"

    assert gather_state_dict(original, given, cpu_offload=True) == "result"
    assert calls == [((given,), {"cpu_offload": True})]


def gather_identity(state: dict[str, typing.Any], **_: object) -> dict[str, typing.Any]:
    return state


def test_nested_states_keep_their_form() -> None:
    model = Recorded(rank=1).model
    given = {"a": [model.scale, {"b": (model.scale, 3)}], "c": torch.ones(2), "d": "text"}
    result = gather_state_dict(gather_identity, given)
    whole, inner = result["a"]
    assert type(whole) is Tensor
    assert whole.shape == model.scale.shape
    assert isinstance(inner["b"], tuple)
    assert inner["b"][1] == 3
    assert result["c"] is given["c"]
    assert result["d"] == "text"


def test_a_rank_that_keeps_nothing_takes_part_all_the_same() -> None:
    recorded = Recorded(rank=1)
    recorded.log.clear()
    assert gather_state_dict(gather_identity, recorded.model.state_dict(), ranks_only=(1,)) == {}
    gathers = [entry for entry in recorded.log if entry[0] in ("all_gather", "broadcast")]
    assert len(gathers) >= len(list(recorded.model.parameters()))


def test_state_of_another_shape_is_refused_by_name() -> None:
    model = Recorded(rank=1).model
    local = {"state.scale.exp_avg": torch.zeros_like(model.scale.detach())}
    assert isinstance(local["state.scale.exp_avg"], ShardedTensor)
    with pytest.raises(shardkit.ShardkitError, match=r"'state.scale.exp_avg' has shape \(9,\)"):
        distribute_state_dict(gather_identity, {"state.scale.exp_avg": torch.ones(9)}, local)
