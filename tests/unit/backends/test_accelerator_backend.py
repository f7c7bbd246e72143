"""What an accelerator's backend decides on the host: devices, process groups, when it waits.

No card and no other process: devices are named but not used, torch's functions are recorded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import types
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from shardkit import (
    CPUOffloadPolicy,
    MeshError,
    OffloadPolicy,
    WrapError,
)
from shardkit._layout import FlatLayout
from shardkit._module.checks import _check_current_device, check_params
from shardkit._module.fully_shard import device_type_of
from shardkit._params.sites import ParamEntry
from shardkit._runtime.group import move_buffers
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import ShardSpec
from shardkit.backends import groups as process_groups
from shardkit.backends import groups as world_module
from shardkit.backends.accelerator import DeviceCheckHandle
from shardkit.backends.device import AcceleratorDevice, device_module, use_own_device
from shardkit.backends.process_group import WorkHandle

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

Stub = types.SimpleNamespace


# --- which device -------------------------------------------------------------------------------


def mesh_on(device: str, *, has_own_memory: bool = True) -> typing.Any:
    backend = Stub(device=torch.device(device), has_own_memory=has_own_memory)
    return Stub(device_type=torch.device(device).type, backend=backend)


def found_on(*devices: str) -> list[typing.Any]:
    facts = {"requires_grad": True, "_backward_hooks": None}
    facts |= dict.fromkeys(("dtype", "grad_dtype"), torch.float32)
    params = [Stub(device=torch.device(device), **facts) for device in devices]
    return [ParamEntry(f"layer.{i}", param, []) for i, param in enumerate(params)]  # type: ignore[arg-type]


def test_a_parameter_on_a_card_that_is_not_the_current_one_is_refused() -> None:
    with pytest.raises(WrapError, match=r"'layer\.1' is on cuda:1.*cuda:0.*cuda\.set_device\(1\)"):
        check_params(found_on("cuda:0", "cuda:1"), mesh_on("cuda:0"), OffloadPolicy())


@pytest.mark.parametrize("device", ["cuda:1", "cpu", "meta"])
def test_parameters_of_the_current_card_or_to_be_moved_to_it_pass(device: str) -> None:
    check_params(found_on(device), mesh_on("cuda:1"), OffloadPolicy())


def test_only_the_same_index_is_the_current_device() -> None:
    param: typing.Any = Stub(device=torch.device("xpu", 3))
    _check_current_device("w", param, mesh_on("xpu:3"))
    with pytest.raises(WrapError, match=r"torch\.xpu\.set_device\(3\)"):
        _check_current_device("w", param, mesh_on("xpu:0"))


@pytest.mark.parametrize(
    ("offload", "devices", "expected"),
    [
        ("kept", ["cpu"], "cpu"),
        ("kept", ["meta"], "xpu"),
        ("kept", ["meta", "cpu"], "cpu"),
        ("kept", ["meta", "cuda:1"], "cuda"),
        ("kept", [], "cpu"),
        ("offloaded", ["cpu"], "xpu"),
        ("offloaded", ["meta"], "xpu"),
        ("offloaded", ["meta", "cpu"], "xpu"),
        ("offloaded", ["cuda:1"], "cuda"),
        ("offloaded", [], "cpu"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_the_default_mesh_is_where_parameters_will_compute(
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
    devices: list[str],
    expected: str,
    *,
    is_there: bool,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    policy = CPUOffloadPolicy() if offload == "offloaded" else OffloadPolicy()
    if not is_there and expected == "xpu":
        expected = "cpu"
    assert device_type_of(found_on(*devices), policy) == expected


def test_the_default_mesh_of_a_module_without_parameters_is_that_of_the_groups_in_it() -> None:
    """On the device of its layers its buffers are needed."""
    layer: typing.Any = Stub(mesh=mesh_on("cuda:1"))
    assert device_type_of([], OffloadPolicy(), [layer]) == "cuda"
    assert device_type_of(found_on("cpu"), OffloadPolicy(), [layer]) == "cpu"


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,xpu:gloo", "cpu"),
        ("xpu:xccl", "xpu"),
        ("cpu:gloo,xpu:xccl", "xpu"),
    ],
)
def test_the_default_mesh_is_of_the_accelerator_that_has_an_engine(
    monkeypatch: pytest.MonkeyPatch, engines: str, expected: str
) -> None:
    """A model on the host is sharded over it, as FSDP2 does."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: engines)
    monkeypatch.setattr(world_module, "_started_for_host", None)
    assert device_type_of(found_on("cpu"), OffloadPolicy()) == expected
    assert device_type_of(found_on("cuda:1"), OffloadPolicy()) == "cuda"


def test_a_process_group_that_was_started_for_the_cpu_leaves_models_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch gives it an engine for each accelerator of the machine."""
    world = object()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(dist, "init_process_group", lambda engines, timeout: None)  # noqa: ARG005
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,xpu:xccl")
    monkeypatch.setattr(dist, "group", Stub(WORLD=world))
    monkeypatch.setattr(world_module, "_started_for_host", None)
    world_module._start("cpu")  # noqa: SLF001 - the whole needs other ranks
    assert device_type_of(found_on("cpu"), OffloadPolicy()) == "cpu"
    world_module._start("xpu")  # noqa: SLF001 - the same
    assert device_type_of(found_on("cpu"), OffloadPolicy()) == "xpu"


def spec_at(home: str | None, device: str) -> ShardSpec:
    layout = FlatLayout.plan([(5, 3)], world_size=2, itemsize=4)
    axis = Stub(rank=0, size=2)
    place = None if home is None else torch.device(home)
    mesh = mesh_on(device)
    return ShardSpec(layout, 0, mesh=mesh, axis=axis, name="w", shard_device=place)


def test_pieces_are_at_home_or_else_on_the_device_of_the_mesh() -> None:
    assert spec_at(None, "cuda:1").device == torch.device("cuda", 1)
    assert spec_at("cpu", "cuda:1").device == torch.device("cpu")


@pytest.mark.parametrize("home", ["cpu", None])
def test_values_for_a_parameter_on_meta_go_to_its_home(home: str | None) -> None:
    """Meta plays the accelerator of the mesh as well."""
    spec = spec_at(home, "meta")
    param = nn.Parameter(ShardedTensor(torch.empty(spec.piece_numel, device="meta"), spec))
    values = torch.arange(15.0).view(5, 3)
    param.copy_values(values)  # type: ignore[attr-defined]
    piece = param.to_local().detach()  # type: ignore[attr-defined]
    assert piece.device.type == (home or "meta")
    if home is not None:
        assert torch.equal(piece, values.flatten()[spec.start : spec.stop])


def module_with_buffers() -> tuple[nn.Module, Tensor]:
    inner = nn.BatchNorm1d(3)
    inner.register_buffer("absent", None)
    inner.register_buffer("table", torch.ones(2), persistent=False)
    table = inner.table
    assert isinstance(table, Tensor)
    return nn.Sequential(nn.Linear(3, 3), inner), table


def test_host_buffers_are_moved_to_a_device_with_its_own_memory() -> None:
    module, table = module_with_buffers()
    move_buffers(module, mesh_on("meta").backend)
    assert [buffer.device.type for buffer in module.buffers()] == ["meta"] * 4
    assert all(param.device.type == "cpu" for param in module.parameters())
    assert typing.cast("typing.Any", module[1]).absent is None  # type: ignore[index]
    assert table.device.type == "cpu", "is somebody else's"
    assert "1.table" not in module.state_dict(), "still not persistent"


def test_buffers_that_are_elsewhere_or_have_no_other_place_stay() -> None:
    module = module_with_buffers()[0].to("meta")
    before = list(module.buffers())
    move_buffers(module, mesh_on("cpu").backend)
    assert all(now is then for now, then in zip(module.buffers(), before, strict=True))
    module, table = module_with_buffers()
    move_buffers(module, mesh_on("meta", has_own_memory=False).backend)
    assert typing.cast("typing.Any", module[1]).table is table  # type: ignore[index]


# --- the device's module ------------------------------------------------------------------------


def test_what_is_spelled_alike_is_named() -> None:
    for wrong, named in (("gpu", "Write 'cuda'"), ("cudda", "The nearest ones are 'cuda'")):
        with pytest.raises(MeshError, match=named) as found:
            device_module(wrong)
        assert found.value.__cause__ is None
        assert found.value.__suppress_context__


def test_an_unknown_device_type_is_explained() -> None:
    with pytest.raises(MeshError, match=r"'nonsense'\. .*'cpu', 'xla'.*'cuda', 'xpu'"):
        device_module("nonsense")


@pytest.mark.parametrize("missing", ["Stream", "current_device", "set_device"])
def test_a_device_without_streams_is_explained(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    names = ("Stream", "Event", "stream", "current_stream", "current_device", "set_device")
    full = Stub(**dict.fromkeys(names))
    monkeypatch.setattr(torch, "get_device_module", lambda _: full)
    assert device_module("cuda") is full
    delattr(full, missing)
    with pytest.raises(MeshError, match=rf"torch\.cuda has no '{missing}'.*'cpu', 'xla'"):
        device_module("cuda")


def test_the_device_is_the_current_one_and_streams_have_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    module = Stub(
        Stream=lambda device, priority=0: asked.append(("stream", device, priority)),
        Event=None,
        stream=lambda stream: ("on", stream),
        current_stream=lambda device: ("current", device),
        current_device=lambda: 2,
        set_device=None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda type_: {"cuda": module}[type_])
    device = AcceleratorDevice.current("cuda")
    assert device.device == torch.device("cuda", 2)
    device.new_stream()
    assert asked == [("stream", torch.device("cuda", 2), -1)]
    assert device.current_stream() == ("current", 2)
    assert device.on("s") == ("on", "s")


@pytest.mark.parametrize(
    ("local_rank", "chosen"), [("1", [1]), ("2", []), (None, []), ("first", [])]
)
def test_a_rank_uses_the_device_with_its_number_if_it_sees_so_many(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, chosen: list[int]
) -> None:
    used: list[int] = []
    names = ("Stream", "Event", "stream", "current_stream", "current_device")
    two = Stub(**dict.fromkeys(names), device_count=lambda: 2, set_device=used.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: two)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for device_type in ("cuda", "cpu", "xla"):
        use_own_device(device_type)
    assert used == chosen
    use_own_device("cuda", "0")
    assert used == [*chosen, 0]


# --- process groups of some ranks ---------------------------------------------------------------


class Groups:
    """Records how `sub_group` makes groups; this process plays a rank of the parent 4, 5, 6, 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda parent: parent.ranks)
        monkeypatch.setattr(c10d, "new_group", self._new_group)
        monkeypatch.setattr(dist, "split_group", self._split_group)
        monkeypatch.setattr(process_groups, "_num_made", process_groups.OfWorld())

    def play(self, rank: int, *, bound: bool, splits: bool = True) -> typing.Any:
        """Become a fresh process that is this rank; return its parent group."""
        device = torch.device("cuda", 0) if bound else None
        group = Stub(WORLD=Stub(bound_device_id=device))
        self._monkeypatch.setattr(process_groups, "dist", Stub(**(vars(dist) | {"group": group})))
        engine = Stub(supports_splitting=splits)
        own = {"ranks": [4, 5, 6, 7], "group_name": "parent"}
        return Stub(rank=lambda: rank, _get_backend=lambda _: engine, **own)

    def _name(self) -> str:
        return str(c10d._hash_ranks_to_str([0]))  # type: ignore[attr-defined]  # noqa: SLF001 - what torch asks

    def _new_group(self, ranks: Sequence[int], **options: object) -> str:
        assert options.pop("timeout") == dt.timedelta(minutes=30)
        self.calls.append(("new", ranks, options))
        return self._name()

    def _split_group(self, **options: object) -> str:
        assert options.pop("timeout") == dt.timedelta(minutes=30)
        self.calls.append(("split", options))
        return self._name()


SPLITS = [range(2), range(2, 4)]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


@pytest.mark.parametrize("rank", range(4))
def test_a_world_bound_to_devices_is_split_from_the_parent(groups: Groups, rank: int) -> None:
    parent = groups.play(rank, bound=True)
    process_groups.sub_group(parent, SPLITS)
    expected = {"parent_pg": parent, "split_ranks": [[0, 1], [2, 3]]}
    assert groups.calls == [("split", expected)], "all ranks of the parent say the same"


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("bound", "engine"), [(False, None), (False, "gloo"), (True, "gloo")])
def test_other_groups_take_only_their_own_ranks(
    groups: Groups, rank: int, engine: str | None, *, bound: bool
) -> None:
    process_groups.sub_group(groups.play(rank, bound=bound), SPLITS, engine)
    ranks = [4, 5] if rank < 2 else [6, 7]
    options = {"backend": engine, "use_local_synchronization": True}
    assert groups.calls == [("new", ranks, options)]


def test_a_group_whose_engine_cannot_split_is_not_split(groups: Groups) -> None:
    """As that of a mesh of the CPU beside a world bound to devices."""
    process_groups.sub_group(groups.play(0, bound=True, splits=False), SPLITS)
    assert [call[0] for call in groups.calls] == ["new"]


@pytest.mark.parametrize("bound", [False, True])
def test_the_ranks_of_a_split_give_its_group_one_name(groups: Groups, *, bound: bool) -> None:
    names: dict[int, list[str]] = {}
    for rank in range(4):
        parent = groups.play(rank, bound=bound)
        for _ in range(rank):  # Other groups of some ranks change nothing.
            process_groups.sub_group(parent, [[each] for each in range(4)])
        made: typing.Any = [process_groups.sub_group(parent, SPLITS) for _ in range(2)]
        names[rank] = made
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({*names[0], *names[2]}) == 4, "and every group another one"


# --- small numbers that the host reads ------------------------------------------------------------


def test_numbers_from_the_device_are_there_after_the_wait() -> None:
    events: list[object] = []
    event: typing.Any = Stub(synchronize=lambda: events.append("event"))
    target, pinned = torch.zeros(3), torch.ones(3)
    handle = DeviceCheckHandle(target, pinned, event)
    assert not handle.is_of_host
    assert target.tolist() == [0, 0, 0]
    handle.wait()
    assert events == ["event"]
    assert target.tolist() == [1, 1, 1]


def test_a_collective_of_hosts_is_waited_for_once() -> None:
    waited: list[str] = []
    work = Stub(wait=lambda: waited.append("work"))
    issued: typing.Any = Stub(watched=contextlib.nullcontext)
    handle = WorkHandle([work], issued)
    assert handle.is_of_host
    handle.wait()
    handle.wait()
    assert waited == ["work"]
