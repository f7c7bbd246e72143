"""What an accelerator's backend decides on the host: devices, process groups, which operators run.

No card and no other process: devices are named but not used, torch's functions are recorded.
"""

from __future__ import annotations

import types
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import CPUOffloadPolicy, MeshError, OffloadPolicy, WrapError
from shardkit._api import _check_current_device, _check_params, _device_type
from shardkit._group import move_buffers
from shardkit._layout import FlatLayout
from shardkit._places import FoundParam
from shardkit._sharded import ShardedTensor, ShardSpec
from shardkit.backends import accelerator, process_group
from shardkit.backends.accelerator import AcceleratorAxis, Sums
from shardkit.backends.base import Reduction
from shardkit.backends.device import AcceleratorDevice, device_module

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Stub = types.SimpleNamespace


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        del types
        self.names.append(func._schema.name)  # noqa: SLF001 - no public way to the name
        return func(*args, **(kwargs or {}))


# --- which device -------------------------------------------------------------------------------


def mesh_on(device: str, *, has_own_memory: bool = True) -> typing.Any:
    backend = Stub(device=torch.device(device), has_own_memory=has_own_memory)
    return Stub(device_type=torch.device(device).type, backend=backend)


def found_on(*devices: str) -> list[typing.Any]:
    params = [Stub(device=torch.device(device), requires_grad=True) for device in devices]
    return [FoundParam(f"layer.{i}", param, []) for i, param in enumerate(params)]  # type: ignore[arg-type]


def test_a_parameter_on_a_card_that_is_not_the_current_one_is_refused() -> None:
    with pytest.raises(WrapError, match=r"'layer\.1' is on cuda:1.*cuda:0.*cuda\.set_device\(1\)"):
        _check_params(found_on("cuda:0", "cuda:1"), mesh_on("cuda:0"), OffloadPolicy())


@pytest.mark.parametrize("device", ["cuda:1", "cpu", "meta"])
def test_parameters_of_the_current_card_or_to_be_moved_to_it_pass(device: str) -> None:
    _check_params(found_on(device), mesh_on("cuda:1"), OffloadPolicy())


def test_only_the_same_index_is_the_current_device() -> None:
    param: typing.Any = Stub(device=torch.device("xpu", 3))
    _check_current_device("w", param, mesh_on("xpu:3"))
    with pytest.raises(WrapError, match=r"torch\.xpu\.set_device\(3\)"):
        _check_current_device("w", param, mesh_on("xpu:0"))


OFFLOADS = {"kept": OffloadPolicy(), "offloaded": CPUOffloadPolicy()}


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
    if not is_there and expected == "xpu":
        expected = "cpu"
    assert _device_type(found_on(*devices), OFFLOADS[offload]) == expected


def spec_at(home: str | None, device: str) -> ShardSpec:
    layout = FlatLayout.plan([(5, 3)], world_size=2, itemsize=4)
    axis = Stub(rank=0, size=2)
    place = None if home is None else torch.device(home)
    mesh = mesh_on(device)
    return ShardSpec(layout, 0, mesh=mesh, axis=axis, name="w", home=place)


def test_pieces_are_at_home_or_else_on_the_device_of_the_mesh() -> None:
    assert spec_at(None, "cuda:1").device == torch.device("cuda", 1)
    assert spec_at("cpu", "cuda:1").device == torch.device("cpu")


@pytest.mark.parametrize("home", ["cpu", None])
def test_values_for_a_parameter_on_meta_go_to_its_home(home: str | None) -> None:
    """Meta plays the accelerator of the mesh as well."""
    spec = spec_at(home, "meta")
    param = nn.Parameter(ShardedTensor(torch.empty(spec.piece_numel, device="meta"), spec))
    values = torch.arange(15.0).view(5, 3)
    param.take_over(values)  # type: ignore[attr-defined]
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
    module, table = module_with_buffers()
    module.to("meta")
    before = list(module.buffers())
    move_buffers(module, mesh_on("cpu").backend)
    assert all(now is then for now, then in zip(module.buffers(), before, strict=True))
    module, table = module_with_buffers()
    move_buffers(module, mesh_on("meta", has_own_memory=False).backend)
    assert typing.cast("typing.Any", module[1]).table is table  # type: ignore[index]


# --- the device's module ------------------------------------------------------------------------


def test_an_unknown_device_type_is_explained() -> None:
    with pytest.raises(MeshError, match=r"'nonsense'; .*'cpu', 'xla'.*'cuda', 'xpu'"):
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
    assert device.current_stream() == ("current", torch.device("cuda", 2))
    assert device.on("s") == ("on", "s")


# --- process groups of some ranks ---------------------------------------------------------------


class Groups:
    """Records how `sub_group` makes groups; this process plays a rank of the parent 4, 5, 6, 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda parent: parent.ranks)
        monkeypatch.setattr(dist, "new_group", self._new_group)
        monkeypatch.setattr(dist, "split_group", self._split_group)
        monkeypatch.setattr(process_group, "_num_made", {})
        monkeypatch.setattr(process_group, "_made_in", None)

    def play(self, rank: int, *, bound: bool) -> typing.Any:
        """Become a fresh process that is this rank; return its parent group."""
        device = torch.device("cuda", 0) if bound else None
        world = Stub(bound_device_id=device)
        self._monkeypatch.setattr(
            process_group, "dist", Stub(**vars(dist), group=Stub(WORLD=world))
        )
        return Stub(rank=lambda: rank, ranks=[4, 5, 6, 7])

    def _name(self) -> str:
        return str(c10d._hash_ranks_to_str([0]))  # type: ignore[attr-defined]  # noqa: SLF001 - what torch asks

    def _new_group(self, ranks: Sequence[int], **options: object) -> str:
        self.calls.append(("new", ranks, options))
        return self._name()

    def _split_group(self, **options: object) -> str:
        self.calls.append(("split", options))
        return self._name()


SPLITS = [range(2), range(2, 4)]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(monkeypatch)


@pytest.mark.parametrize("rank", range(4))
def test_a_world_bound_to_devices_is_split_from_the_parent(groups: Groups, rank: int) -> None:
    parent = groups.play(rank, bound=True)
    process_group.sub_group(parent, SPLITS)
    expected = {"parent_pg": parent, "split_ranks": [[0, 1], [2, 3]]}
    assert groups.calls == [("split", expected)], "all ranks of the parent say the same"


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("bound", "engine"), [(False, None), (False, "gloo"), (True, "gloo")])
def test_other_groups_take_only_their_own_ranks(
    groups: Groups, rank: int, engine: str | None, *, bound: bool
) -> None:
    process_group.sub_group(groups.play(rank, bound=bound), SPLITS, engine)
    ranks = [4, 5] if rank < 2 else [6, 7]
    options = {"backend": engine, "use_local_synchronization": True}
    assert groups.calls == [("new", ranks, options)]


@pytest.mark.parametrize("bound", [False, True])
def test_the_ranks_of_a_split_give_its_group_one_name(groups: Groups, *, bound: bool) -> None:
    names: dict[int, list[str]] = {}
    for rank in range(4):
        parent = groups.play(rank, bound=bound)
        for _ in range(rank):  # Other groups of some ranks change nothing.
            process_group.sub_group(parent, [[each] for each in range(4)])
        made: typing.Any = [process_group.sub_group(parent, SPLITS) for _ in range(2)]
        names[rank] = made
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({*names[0], *names[2]}) == 4, "and every group another one"
    assert not any(name.startswith("shardkit") for name in [groups._name()])  # noqa: SLF001


# --- the arithmetic of reductions ---------------------------------------------------------------


class Wire:
    """Collectives as if every rank had sent what this one does; notes their operators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.ops: list[object] = []
        self.tensors: list[Tensor] = []
        monkeypatch.setattr(accelerator, "reduce_scatter_single", self._reduce_scatter)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def axis(self, *, averages: bool = True, size: int | None = None) -> AcceleratorAxis:
        axis = AcceleratorAxis.__new__(AcceleratorAxis)
        axis.size, axis.rank, axis.averages = size or self.size, 0, averages
        axis.group = axis.reduce_group = typing.cast("typing.Any", axis)
        return axis

    def _reduce_scatter(self, out: Tensor, send: Tensor, *, op: object, group: object) -> None:
        assert isinstance(group, AcceleratorAxis)
        self.tensors += [out, send]
        assert not out.is_complex()
        assert not send.is_complex()
        out.copy_(send.view(group.size, *out.shape)[group.rank])
        self._all_reduce(out, op, group)

    def _all_reduce(self, tensor: Tensor, op: object, group: typing.Any) -> None:
        self.ops.append(op)
        assert not tensor.is_complex()
        if op == dist.ReduceOp.SUM:
            tensor.mul_(group.size)
        else:
            assert op == dist.ReduceOp.AVG

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: typing.Any,
        op: object,
        **_: object,
    ) -> None:
        """Be a user's own reduce-scatter."""
        self._reduce_scatter(output_tensor, input_tensor, op=op, group=group)

    def allocate(self, size: Sequence[int], **options: typing.Any) -> Tensor:
        return torch.empty(*size, **options)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch, 2)


def reduction_over(axis: AcceleratorAxis, **options: typing.Any) -> Reduction:
    """Return a reduction of 1, 2, 3, ...; its mean unless told otherwise."""
    dtype = options.pop("dtype", torch.float32)
    send = (torch.arange(4 * axis.size) + 1).to(dtype)
    defaults = {
        "send": send,
        "receive": None,
        "out_numel": 4,
        "out_dtype": torch.promote_types(dtype, torch.float32),
        "scale": 0.5,
        "shard_axis": axis,
        "replicate_axis": None,
        "carry": None,
    }
    return Reduction(**(defaults | options))


def reduced(reduction: Reduction) -> tuple[Tensor, list[str], bool]:
    """Return the result, the operators of `finish`, and whether the sum was where it belongs."""
    result = torch.full((4,), float("nan"), dtype=reduction.out_dtype)
    sums = Sums(reduction)
    total = sums.reduce_scatter(result if sums.can_be_result else None)
    if sums.replicate_axis is not None:
        sums.all_reduce(total)
    before = total.clone()
    with Operators() as operators:
        sums.finish(total, result)
    if not operators.names:
        assert torch.equal(before, result)
    return result, operators.names, total is result


def test_an_engine_that_averages_leaves_nothing_to_do(wire: Wire) -> None:
    result, operators, is_result = reduced(reduction_over(wire.axis()))
    assert wire.ops == [dist.ReduceOp.AVG]
    assert is_result
    assert operators == []
    assert result.tolist() == [1, 2, 3, 4]


def test_both_axes_average(wire: Wire) -> None:
    axis = wire.axis()
    reduction = reduction_over(axis, replicate_axis=wire.axis(size=4), scale=1 / 8)
    result, operators, is_result = reduced(reduction)
    assert wire.ops == [dist.ReduceOp.AVG] * 2
    assert (operators, is_result) == ([], True)
    assert result.tolist() == [1, 2, 3, 4]


def test_an_axis_of_one_rank_does_not_count(wire: Wire) -> None:
    lone = wire.axis(averages=False, size=1)
    result, operators, _ = reduced(reduction_over(wire.axis(), replicate_axis=lone))
    assert wire.ops == [dist.ReduceOp.AVG], "nothing is sent over it"
    assert operators == []
    assert result.tolist() == [1, 2, 3, 4]


def test_an_average_in_another_dtype_is_copied_once(wire: Wire) -> None:
    result, operators, is_result = reduced(reduction_over(wire.axis(), dtype=torch.bfloat16))
    assert wire.ops == [dist.ReduceOp.AVG]
    assert not is_result
    assert operators == ["aten::copy_"]
    assert result.dtype == torch.float32
    assert result.tolist() == [1, 2, 3, 4]


SUMMED: dict[str, Callable[[Wire], Reduction]] = {
    "the engine does not average": lambda wire: reduction_over(wire.axis(averages=False)),
    "one of two engines does not": lambda wire: reduction_over(
        wire.axis(), replicate_axis=wire.axis(averages=False), scale=1 / 4
    ),
    "not the mean": lambda wire: reduction_over(wire.axis(), scale=0.25),
    "the sum": lambda wire: reduction_over(wire.axis(), scale=1.0),
    "mean over all, sums over one axis": lambda wire: reduction_over(wire.axis(), scale=1 / 4),
    "sums from before": lambda wire: reduction_over(wire.axis(), carry=torch.full((4,), 10.0)),
    "a collective of the user's": lambda wire: reduction_over(wire.axis(), comm=wire),
    "fp16": lambda wire: reduction_over(wire.axis(), dtype=torch.float16),
}


@pytest.mark.parametrize("why", SUMMED)
def test_otherwise_it_is_summed_and_multiplied(wire: Wire, why: str) -> None:
    reduction = SUMMED[why](wire)
    result, _, _ = reduced(reduction)
    num_axes = 1 if reduction.replicate_axis is None else 2
    assert wire.ops == [dist.ReduceOp.SUM] * num_axes
    before = 10 if why == "sums from before" else 0
    expected = [(n * 2**num_axes + before) * reduction.scale for n in (1, 2, 3, 4)]
    # fp16 is multiplied by a root of the scale before it is sent.
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize("averages", [True, False])
def test_engines_get_complex_numbers_as_pairs(wire: Wire, num_axes: int, *, averages: bool) -> None:
    axis = wire.axis(averages=averages)
    numbers = torch.arange(8) * (1 + 2j)
    reduction = reduction_over(
        axis,
        dtype=torch.complex64,
        send=numbers.to(torch.complex64),
        out_dtype=torch.complex64,
        scale=0.5**num_axes,
        replicate_axis=axis if num_axes == 2 else None,
    )
    sent_from = reduction.send.data_ptr()
    result, _, is_result = reduced(reduction)
    assert is_result
    out, send = wire.tensors
    assert (send.shape, send.dtype) == ((8, 2), torch.float32)
    assert send.data_ptr() == sent_from, "a view, not a copy"
    assert out.data_ptr() == result.data_ptr()
    assert result.tolist() == numbers[:4].tolist()
