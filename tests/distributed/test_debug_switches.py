"""`set_debug`: steps without collectives, which nothing may save, and lines about memory."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import typing
import warnings

import pytest
import torch

from allocated import past_shared_memory
from models import CASES
from parity import Ranks, Run, on_meshes
from reference import OPTIMIZERS, make_mesh, my_batch, shard
from shardkit import MixedPrecisionPolicy, ShardedTensorError, checkpoint

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.helpers

BOTH = {"dummy_gathers": True, "dummy_reductions": True}


def run_steps(ranks: Ranks, options: dict[str, bool]) -> dict[str, typing.Any]:
    """Take steps with dummies and then without; say what was warned of and what came out."""
    case = CASES["mlp"]
    plain = case.make()
    model = ranks.shard(case, plain, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.set_debug(**options)
    found: dict[str, typing.Any] = {"warnings": [], "grads": [], "refusals": []}
    for step in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case.loss(model, ranks.batch(case, step)).backward()
        found["warnings"].append([str(w.message) for w in caught if "set_debug" in str(w.message)])
        found["grads"].append([tuple(p.grad.shape) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        ranks.end_step()
    model.set_debug()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.loss(model, ranks.batch(case, 3)).backward()
    found["after"] = [str(w.message) for w in caught if "set_debug" in str(w.message)]
    return found


@pytest.mark.parametrize("options", [{"dummy_gathers": True}, {"dummy_reductions": True}, BOTH])
@on_meshes((2,), (2, 2))
def test_dummies_warn_at_the_first_step_only(run: Run, options: dict[str, bool]) -> None:
    for found in run(run_steps, options):
        first, *later = found["warnings"]
        assert len(first) == len(options)
        assert all("are WRONG from this step on" in text for text in first)
        assert later == [[], []]
        assert found["after"] == []
        shapes = [tuple(p.shape) for p in CASES["mlp"].make().parameters()]
        assert found["grads"] == [shapes] * 3


@past_shared_memory()
def count_bytes(mesh_shape: tuple[int, ...], options: dict[str, bool]) -> dict[str, int]:
    """Return how many collectives of each kind a step issues."""
    case = CASES["gpt"]
    model: typing.Any = shard(case, case.make(), make_mesh(mesh_shape))
    model.set_debug(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        case.loss(model, my_batch(case, 0)).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            case.loss(model, my_batch(case, 1)).backward()
    counts: dict[str, int] = {}
    for event in profile.events():
        if event.name.startswith("gloo:"):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def test_dummies_issue_nothing(spawn: Spawn) -> None:
    kinds = {}
    for name, options in (
        ("usual", {}),
        ("gathers", {"dummy_gathers": True}),
        ("reductions", {"dummy_reductions": True}),
        ("both", BOTH),
    ):
        [kinds[name], _] = spawn(count_bytes, 2, (2,), options)
    total = {name: sum(counts.values()) for name, counts in kinds.items()}
    assert total["both"] < total["gathers"] < total["usual"]
    assert total["both"] < total["reductions"] < total["usual"]
    # What is left compares which parameters ranks used.
    assert set(kinds["both"]) <= {"gloo:all_reduce"}, kinds


def try_to_save(folder: str, turn_off: bool) -> list[str]:
    case = CASES["mlp"]
    model: typing.Any = shard(case, case.make(), make_mesh((2,)))
    model.set_debug(dummy_reductions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        case.loss(model, my_batch(case, 0)).backward()
    if turn_off:
        model.set_debug()
    refusals = []
    attempts = (
        lambda: checkpoint.save(f"{folder}/dcp", model),
        lambda: checkpoint.save_full(f"{folder}/full.pt", model),
        lambda: checkpoint.local_state_dict(model),
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(copy.deepcopy(model)),
    )
    for attempt in attempts:
        try:
            attempt()
        except (ShardedTensorError, checkpoint.CheckpointError) as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize("turn_off", [False, True])
def test_nothing_is_saved_after_dummies(
    spawn: Spawn, tmp_path: pathlib.Path, turn_off: bool
) -> None:
    for refusals in spawn(try_to_save, 2, str(tmp_path), turn_off):
        assert len(refusals) == 5
        assert all("has run steps with dummy collectives (set_debug)" in text for text in refusals)


def print_memory() -> list[str]:
    case = CASES["mlp"]
    model: typing.Any = shard(case, case.make(), make_mesh((2,)))
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        case.loss(model, my_batch(case, 0)).backward()
        assert not text.getvalue()
        model.set_debug(print_memory="mine")
        case.loss(model, my_batch(case, 1)).backward()
        lines = text.getvalue().splitlines()
        model.set_debug()
        case.loss(model, my_batch(case, 2)).backward()
    assert text.getvalue().splitlines() == lines
    return lines


def test_memory_is_printed_with_names_while_it_is_on(spawn: Spawn) -> None:
    for rank, lines in enumerate(spawn(print_memory, 2)):
        assert all(line.startswith(f"[mine rank {rank}] ") for line in lines)
        assert all("unsharded" in line and "MiB (peak" in line for line in lines)
        text = "\n".join(lines)
        for what in ("gather layers.0", "free layers.0", "reduce"):
            assert what in text
