"""How long a step takes: profiles, what they are asked, and what a plan makes of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import tomllib
import typing

import pytest
import torch

from planned_runs import Mlp
from shardkit import ConfigError, CPUOffloadPolicy, MixedPrecisionPolicy, RunPlan, plan
from shardkit.planning import _advice, _calibrate
from shardkit.planning._profile import (
    HardwareProfile,
    Route,
    profile_names,
    profile_text,
    rate_at,
    read_profile,
)
from shardkit.planning._run import Run, batch_on_meta, dry_run

if typing.TYPE_CHECKING:
    import pathlib

    from shardkit.planning._meter import MemoryMeter

WIDTH, DEPTH, NUM_ROWS = 1024, 4, 2048
IDEAL = HardwareProfile(
    name="ideal",
    device="cuda",
    memory_nbytes=1e12,
    overlap=1.0,
    operator_s=0.0,
    sharded_operator_s=0.0,
    group_s=0.0,
    kernel_s=0.0,
    host_bytes_per_s=1e15,
    peak={"float32": 1e12},
    products={"float32": ((1.0, 1e12),)},
    memory={"new": ((1.0, 1e18),)},
    links=(Route(8, 0.0, ((1.0, 1e18),)), Route(1e9, 0.0, ((1.0, 1e18),))),
)


@pytest.fixture
def planned(tmp_path: pathlib.Path) -> typing.Callable[..., RunPlan]:
    def make(
        profile: HardwareProfile = IDEAL, width: int = WIDTH, **options: typing.Any
    ) -> RunPlan:
        path = tmp_path / "here.toml"
        path.write_text(profile_text(profile, "Of a test."))
        given = {"mesh": 8, "policy": {"blocks.*": {}}, "optimizer": "none", **options}
        rows = torch.empty(NUM_ROWS, width, device="meta")
        with torch.device("meta"):
            model = Mlp(width, DEPTH)
        return plan(model, rows, hardware=str(path), **given)

    return make


def _changed(**changes: typing.Any) -> HardwareProfile:
    return dataclasses.replace(IDEAL, **changes)


def _flops(*, recompute: bool = False) -> int:
    forward = 2 * NUM_ROWS * (8 * WIDTH * WIDTH * DEPTH + 7 * WIDTH)
    first_input = 2 * NUM_ROWS * 4 * WIDTH * WIDTH  # Nobody wants the gradient of the rows.
    again = 2 * NUM_ROWS * 8 * WIDTH * WIDTH * DEPTH if recompute else 0
    return 3 * forward - first_input + again


def test_products_alone_are_what_can_be_reckoned(planned: typing.Any) -> None:
    time = planned().time
    assert time.flops == _flops()
    assert time.seconds == pytest.approx(_flops() / 1e12, rel=1e-3)
    assert time.utilization == pytest.approx(1.0, rel=1e-3)
    assert time.exposed_s == pytest.approx(0.0, abs=1e-6)


def test_a_recompute_takes_time_and_is_no_use(planned: typing.Any) -> None:
    time = planned(recompute=True).time
    assert time.flops == _flops()
    # The last product of a block is not computed again: nobody asks for its result.
    assert _flops() < time.seconds * 1e12 <= _flops(recompute=True) * 1.001
    assert time.utilization < 0.9


def test_a_slow_link_is_exposed_and_a_faster_one_hidden(planned: typing.Any) -> None:
    def exposed(rate: float, **options: typing.Any) -> float:
        profile = _changed(links=(Route(1e9, 0.0, ((1.0, rate),)),))
        found: float = planned(profile, **options).time.exposed_s
        return found

    model_nbytes = 4 * 8 * WIDTH * WIDTH * DEPTH
    sent = 3 * model_nbytes * 7 / 8  # Two gathers, but that of the last block, and a reduction.
    slow_s = sent / 1e8 - _flops() / 1e12
    assert exposed(1e8) == pytest.approx(slow_s, rel=0.25)
    assert exposed(1e8, reshard_after_forward=False) < 0.8 * exposed(1e8)
    assert exposed(1e11) < 0.05 * _flops() / 1e12


@pytest.mark.parametrize("width", [1024, 64])  # Small collectives travel together.
@pytest.mark.parametrize("mesh", [8, (2, 4)])
def test_what_is_offloaded_is_copied_with_its_own_collectives(
    planned: typing.Any, width: int, mesh: typing.Any
) -> None:
    profile = _changed(host_bytes_per_s=1e9, links=(Route(1e9, 0.0, ((1.0, 1e15),)),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    options = {"mesh": mesh, "width": width, "mp_policy": policy}
    time = planned(profile, offload_policy=CPUOffloadPolicy(), **options).time
    num_shards = mesh if isinstance(mesh, int) else mesh[1]
    block, head = (8 * width + 5) * width, 7 * width + 7
    sent = [span for span in time.spans if span.lane != "compute"]
    edges = sorted({edge for span in sent for edge in (span.begin, span.end)})
    copied_s: dict[str, float] = collections.defaultdict(float)
    reduced_s: dict[str, float] = collections.defaultdict(float)
    for begin, end in itertools.pairwise(edges):  # Collectives at the same time share the link.
        running = [s for s in sent if s.begin <= begin and end <= s.end]
        for span in running:
            copied_s[span.lane] += (end - begin) / len(running)
            if span.lane == "reduce":
                reduced_s[span.name] += (end - begin) / len(running)
    # Shards are copied as they are, in float32; sums as they were sent, in bfloat16.
    # The root's parameters stay, and those of the last block between forward and backward.
    gathered = (2 * DEPTH - 1) * block + head
    assert copied_s["gather"] == pytest.approx(4 * gathered / num_shards / 1e9, rel=0.02)
    reduced = DEPTH * block + head
    assert copied_s["reduce"] == pytest.approx(2 * reduced / num_shards / 1e9, rel=0.02)
    assert time.exposed_s < 1e-3 * time.seconds  # Copies take time, collectives take none.
    if width == WIDTH:  # Blocks travel alone. Sums over replicas are not copied.
        copied = {name: seconds for name, seconds in reduced_s.items() if seconds > 1e-6}
        expected = {f"blocks.{i}": 2 * block / num_shards / 1e9 for i in range(DEPTH)}
        assert copied == pytest.approx(
            {"the root": 2 * head / num_shards / 1e9, **expected}, rel=0.02
        )


def test_where_the_processor_sends_nothing_is_hidden(planned: typing.Any) -> None:
    links = (Route(1e9, 0.0, ((1.0, 2e10),)),)
    beside = planned(_changed(links=links, device="cpu"), device="cpu").time
    instead = planned(_changed(links=links, device="cpu", overlap=0.0), device="cpu").time
    assert instead.exposed_s > 1.5 * beside.exposed_s
    assert instead.seconds - instead.exposed_s == pytest.approx(beside.seconds - beside.exposed_s)


def test_a_host_that_is_slow_decides(planned: typing.Any) -> None:
    one, two = (planned(_changed(operator_s=each)).time.seconds for each in (1e-2, 2e-2))
    assert two > 1.8 * one > 1.8 * planned().time.seconds


def test_ranks_of_a_host_send_to_others_together() -> None:
    profile = _changed(links=(Route(8, 0.0, ((1.0, 4e11),)), Route(1e9, 0.0, ((1.0, 5e10),))))
    within = profile.collective_s("all_gather", 8e9, 8, 8)
    assert within == pytest.approx(7e9 / 4e11)
    # Eight devices of a host send on eight links, so NVLink's rate remains.
    assert profile.collective_s("all_gather", 16e9, 16, 16) == pytest.approx(15e9 / 4e11)
    # Of a replicate axis over 8 hosts each device has its own link.
    assert profile.collective_s("all_reduce", 8e9, 8, 64) == pytest.approx(2 * 7e9 / 5e10)
    assert profile.collective_s("all_gather", 8e9, 1, 1) == 0
    # Beyond the span of all links the one below the last is that of a group of hosts.
    three = _changed(
        links=(*profile.links[:1], Route(32, 0.0, ((1.0, 4e10),)), Route(64, 0.0, ((1.0, 1e9),)))
    )
    assert three.collective_s("all_gather", 128e9, 128, 128) == pytest.approx(127e9 / 32e9)


def test_a_measured_link_is_that_of_the_same_collective_and_size() -> None:
    two, four = (Route(n, n / 1e3, ((1.0, 1e9),), "all_gather", n) for n in (2, 4))
    profile = _changed(links=(two, four))
    assert profile.collective_s("all_gather", 4e9, 4, 4) == pytest.approx(0.004 + 3)
    assert profile.collective_s("all_gather", 4e9, 2, 2) == pytest.approx(0.002 + 2)


def test_rates_between_sizes_are_interpolated() -> None:
    curve = ((10.0, 1.0), (1000.0, 100.0))
    assert [rate_at(curve, size) for size in (1, 10, 100, 1000, 1e6)] == pytest.approx(
        [1, 1, 10, 100, 100]
    )


@pytest.mark.parametrize("name", profile_names())
def test_profiles_that_come_with_the_package_are_read(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert profile.links[-1].span >= 2
    assert all(
        rate <= profile.peak[dtype]
        for dtype, curve in profile.products.items()
        for _, rate in curve
    )


def test_a_profile_is_read_as_it_is_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(profile_text(IDEAL, "Two\nlines."))
    assert read_profile(str(path)) == IDEAL


_LINK = {"span": 8, "latency_s": 0.0, "bytes_per_s": 1e9}


@pytest.mark.parametrize(
    ("field", "found", "expected"),
    [
        ("peak.float32", None, "a finite number, more than 0, got nothing"),
        ("peak.float32", 0, "a finite number, more than 0, got 0"),
        ("peak", 1e12, "a table with float32"),
        ("products", 1e12, "a table with float32"),
        ("products.float32", [], "a rate, or a list of [size, rate] that is not empty, got []"),
        ("products.float32", [1.0, 2.0], "a rate, or a list of [size, rate]"),
        ("products.float32", [[8.0, 1e9], [4.0, 1e9]], "a list of [size, rate] whose sizes rise"),
        ("products.float32", [[8.0, 0.0]], "more than 0, got 0.0"),
        ("memory.new", -1e9, "more than 0, got -1000000000.0"),
        ("memory.new", None, "a rate, or a list of [size, rate] that is not empty, got nothing"),
        ("operator_s", "6us", "a finite number, 0 or more, got '6us'"),
        ("operator_s", -1e-6, "a finite number, 0 or more, got -1e-06"),
        ("kernel_s", True, "a finite number, 0 or more, got True"),
        ("group_s", float("nan"), "a finite number, 0 or more, got nan"),
        ("overlap", 2.0, "a finite number, at most 1, got 2.0"),
        ("memory_nbytes", "25GB", "a finite number, more than 0, got '25GB'"),
        ("memory_nbytes", float("inf"), "a finite number, more than 0, got inf"),
        ("host_bytes_per_s", 0, "a finite number, more than 0, got 0"),
        ("device", None, "a text that is not empty, got nothing"),
        ("links", {"span": 8}, "tables, each under [[links]], got {'span': 8}"),
        ("links", [3], "a table, got 3"),
        ("links", [{**_LINK, "op": "allgather"}], "one of all_gather, reduce_scatter, all_reduce"),
        ("links", [{**_LINK, "op": "all_gather"}], "a finite number, 2 or more, got 0"),
        ("links", [{**_LINK, "span": 1}], "a finite number, 2 or more, got 1"),
        ("links", [{**_LINK, "latency_s": "3us"}], "a finite number, 0 or more, got '3us'"),
        ("links", [{**_LINK, "rate": 1e9}], "one of span, latency_s, bytes_per_s"),
    ],
)
def test_a_wrong_field_of_a_profile_is_named(
    tmp_path: pathlib.Path, field: str, found: typing.Any, expected: str
) -> None:
    given = tomllib.loads(profile_text(IDEAL, "Of a test."))
    *within, last = field.split(".")
    table = given[within[0]] if within else given
    table[last] = found
    if found is None:
        del table[last]
    path = tmp_path / "wrong.toml"
    path.write_text(_as_toml(given))
    with pytest.raises(ConfigError) as refused:
        read_profile(str(path))
    for part in ("wrong.toml", field, expected, "measure one by"):
        assert part in str(refused.value)


def _as_toml(given: typing.Any) -> str:
    """Return TOML on one line for each field: tables inline, strings as JSON has them."""

    def shown(value: typing.Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {shown(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value))}]"
        return str(value) if isinstance(value, float) else json.dumps(value)

    return "".join(f"{key} = {shown(value)}\n" for key, value in given.items())


def test_a_file_that_is_no_toml_is_no_profile(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "wrong.toml"
    for content in (b'name = "caf\xe9"\n', b"name = \n", b"speed = 3\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"wrong\.toml' is no profile of hardware"):
            read_profile(str(path))


def test_a_profile_is_of_the_devices_of_the_run(planned: typing.Any) -> None:
    with pytest.raises(ConfigError, match="hardware must be a profile of device 'cpu'"):
        planned(device="cpu")
    with pytest.raises(ConfigError, match="of device 'cuda', the run's device, got 'cpu'"):
        plan(Mlp(8, 1), torch.empty(2, 8), mesh=2, hardware="cpu")
    assert planned(device="xpu").time.seconds > 0


def test_ranks_need_a_profile_with_links(planned: typing.Any) -> None:
    alone = _changed(links=())
    assert planned(alone, mesh=1).time.exposed_s == 0
    for mesh in (2, (2, 1)):
        with pytest.raises(ConfigError, match="with links for a mesh of 2 ranks"):
            planned(alone, mesh=mesh)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total = _calibrate.memory_nbytes("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _calibrate.memory_nbytes("cpu") == total / 4


@pytest.mark.parametrize("mesh", [(4,), (1, 4)])
def test_a_mesh_with_one_replica_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...]
) -> None:
    tried = []

    def seen(run: Run, **options: typing.Any) -> MemoryMeter:
        tried.append(run.mesh)
        return dry_run(run, **options)

    monkeypatch.setattr(_advice, "dry_run", seen)
    run = Run(Mlp(8, 1), batch_on_meta(torch.empty(2, 8)), mesh)
    _advice.choose_among(run, 10**9, IDEAL)
    assert set(tried) == {mesh, (2, 2)}
    tried.clear()
    _advice.advise(run, 10**9, 1)
    assert set(tried) == {mesh}


def test_a_choice_is_compared_with_what_was_asked_for() -> None:
    run = Run(Mlp(8, 1), batch_on_meta(torch.empty(2, 8)), (4,))
    first, *_ = _advice.choose_among(run, 10**9, IDEAL)
    assert "; compared with what was asked for: collectives " in first.why
    assert not re.search(r"-0\.0 ms|-0%", first.why)


def test_what_is_no_profile_is_refused(planned: typing.Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"hardware must be one of a100, cpu, .*'abacus'\.$"):
        read_profile("abacus")
    with pytest.raises(ConfigError, match=r"abacus\.toml': No such file or directory\.$"):
        plan(Mlp(8, 1), torch.empty(2, 8), mesh=2, hardware=tmp_path / "abacus.toml")
    with pytest.raises(ConfigError, match="choose needs hardware"):
        plan(Mlp(8, 1), torch.empty(2, 8), mesh=2, choose=True)
    assert planned().choices == ()


def test_choices_fit_and_the_fastest_comes_first(planned: typing.Any) -> None:
    links = (Route(8, 0.0, ((1.0, 1e10),)), Route(1e9, 0.0, ((1.0, 1e9),)))
    profile = _changed(links=links, memory={"new": ((1.0, 1e12),), "host": ((1.0, 1e9),)})
    asked = planned(profile, mesh=16, optimizer="adamw")
    found = planned(profile, mesh=16, optimizer="adamw", choose=True)
    assert 1 <= len(found.choices) <= 3
    assert [c.seconds for c in found.choices] == sorted(c.seconds for c in found.choices)
    assert found.choices[0].seconds <= asked.time.seconds
    assert "choice 1: " in str(found)
    tight = planned(
        profile, mesh=16, optimizer="adamw", choose=True, budget=asked.peak_nbytes - 2**20
    )
    assert all(choice.peak_nbytes < asked.peak_nbytes for choice in tight.choices)
    assert tight.choices
