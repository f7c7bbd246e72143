"""The compiled program: how many collectives, over whom, what they wait for, how much memory."""

from __future__ import annotations

import json
import pathlib
import typing

import hlo
import pytest
from processes import run_python
from xla_graphs import adamw, num_compiles, own_graph, sharding_of
from xla_ranks import XlaRanks

import models
from parity import Pair

if typing.TYPE_CHECKING:
    from shardkit import DeviceMesh

HERE = pathlib.Path(__file__).parent


def graph_of_third_step(pair: Pair) -> hlo.Program:
    """Return forward and backward as traced when the order of groups is known."""
    for _ in range(2):
        pair.step()
    x, _ = pair.draw()
    pair.sharded(x).float().square().sum().backward()
    grads = [p.grad.local_piece for p in pair.sharded.parameters() if p.grad is not None]
    return hlo.Program(own_graph(grads))


DEEP = models.Case(
    lambda: models.MLP([7, 16, 16, 16, 16, 5]),
    lambda model: list(model.layers),
    models.regression_batch,
    models.squared_error,
)


@pytest.mark.parametrize(("reshard", "gathers"), [(None, 9), (False, 5)])
def test_one_gather_and_one_reduction_per_group_and_pass(
    reshard: bool | None, gathers: int, mesh: DeviceMesh
) -> None:
    """Five layers: the last one is still there when backward begins."""
    count = graph_of_third_step(Pair(XlaRanks(mesh), DEEP, reshard_after_forward=reshard)).count()
    assert count["all-gather"] == gathers
    assert count["reduce-scatter"] == 5
    assert count["all-reduce"] == count["all-to-all"] == count["collective-permute"] == 0


def test_hybrid_sharding_gathers_in_rows_and_sums_in_columns(mesh_2d: DeviceMesh) -> None:
    program = graph_of_third_step(Pair(XlaRanks(mesh_2d), "mlp"))
    count = program.count()
    assert (count["all-gather"], count["reduce-scatter"], count["all-reduce"]) == (5, 3, 3)
    over = {
        opcode: {program.instructions[name].groups for name in program.of(opcode)}
        for opcode in ("all-gather", "reduce-scatter", "all-reduce")
    }
    assert over["all-gather"] == over["reduce-scatter"] == {"{{0,1},{2,3}}"}
    assert over["all-reduce"] == {"{{0,2},{1,3}}"}


def test_gathers_run_beside_the_compute_before_them(mesh: DeviceMesh) -> None:
    """Layer i + 1 is gathered when layer i begins, whose product it does not wait for."""
    program = graph_of_third_step(Pair(XlaRanks(mesh), DEEP))
    waits = [program.num_before(name, "dot") for name in program.of("all-gather")]
    # Forward: the first two at once, then each after the input of the layer before.
    assert waits[:5] == [0, 0, 1, 2, 3]
    # A layer's backward is two products. In backward a gather comes after the gradient of the next
    # layer's output, hence also after the layers behind that one (torch_xla puts collectives into
    # one chain), but not after the two of the layer itself.
    done = [program.num_before(name, "dot") for name in program.of("reduce-scatter")]
    assert done == [6, 8, 10, 12, 14]
    assert waits[5:] == [5, 7, 9, 11]


def test_a_model_of_the_users_makes_no_other_collectives(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "gpt")
    program = graph_of_third_step(pair)
    count = program.count()
    assert (count["all-gather"], count["reduce-scatter"]) == (4, 3)
    assert count["all-reduce"] == 0


def dumped(folder: pathlib.Path, *, reshard: bool) -> dict[str, typing.Any]:
    # The default scheduler of XLA's CPU compiler starts all gathers at once.
    flags = (
        f"--xla_dump_to={folder} --xla_dump_hlo_as_text "
        f"--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    script = str(HERE / "dumped_step.py")
    done = run_python([script, str(folder), str(reshard)], {"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, typing.Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_resharding_takes_less_memory_in_the_compiled_program(tmp_path: pathlib.Path) -> None:
    found = {reshard: dumped(tmp_path / str(reshard), reshard=reshard) for reshard in (True, False)}
    ratio = found[True]["temp"] / found[False]["temp"]
    print(f"temporary memory, resharded / kept: {ratio:.2f}")
    whole_layer = (64 * 64 + 64) * 4
    assert found[True]["count"]["all-gather"] == 11
    assert found[False]["count"]["all-gather"] == 6
    for each in found.values():
        assert each["count"]["reduce-scatter"] == 6
    assert found[True]["temp"] <= found[False]["temp"] - 2 * whole_layer


def test_gathers_are_padded_to_whole_lanes(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    pair.backward(pair.draw())
    text = own_graph([p.grad.local_piece for p in pair.sharded.parameters()])
    sizes = [
        int(line.split("= f32[")[1].split("]")[0])
        for line in text.splitlines()
        if " all-gather(" in line
    ]
    assert sizes
    assert all(size % (128 * mesh.size()) == 0 for size in sizes)


def test_steps_after_the_second_compile_nothing(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "gpt", adamw)
    for _ in range(2):
        pair.step()
    before = num_compiles()
    for _ in range(3):
        pair.step()
    assert num_compiles() == before


def test_steps_leave_parameters_spread_over_the_devices(
    mesh: DeviceMesh, mesh_2d: DeviceMesh
) -> None:
    spread = {
        mesh: "{devices=[4]0,1,2,3}",
        mesh_2d: "{devices=[2,2]0,2,1,3 last_tile_dim_replicate}",
    }
    for each, expected in spread.items():
        pair = Pair(XlaRanks(each), "tiny", adamw)
        for _ in range(2):
            pair.step()
        for param in pair.sharded.parameters():
            assert sharding_of(param.local_piece) == expected
