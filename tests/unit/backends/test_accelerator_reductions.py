"""Reductions on accelerators: which operators run, what is on the wire, where gradients add up.

On tensors of the host; collectives are those of a recording mesh, or noted here.
"""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recording import RecordingBackend, RecordingStreams, recording_mesh
from shardkit import fully_shard
from shardkit._layout import FlatLayout
from shardkit._module.hooks import get_state
from shardkit._params.flat_store import gaps_of
from shardkit._params.gradients import GroupGradients, start_reduce
from shardkit._params.memory import SlotPool
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import accelerator
from shardkit.backends.accelerator import AcceleratorAxis, Sums
from shardkit.backends.base import Reduction

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        "room": lambda: pytest.fail("nothing is received"),
        "out_numel": 4,
        "out_dtype": torch.promote_types(dtype, torch.float32),
        "scale": 0.5,
        "shard_axis": axis,
        "replicate_axis": None,
        "carry": None,
    }
    return Reduction(**(defaults | options))


def reduced(reduction: Reduction) -> tuple[Tensor, list[str], bool]:
    """Return the result, the operators of `finish`, and whether the sum was there already."""
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
    assert (operators, is_result) == ([], True)
    assert result.tolist() == [1, 2, 3, 4]


def test_both_axes_average(wire: Wire) -> None:
    axis = wire.axis()
    reduction = reduction_over(axis, replicate_axis=wire.axis(size=4), scale=1 / 8)
    result, operators, is_result = reduced(reduction)
    assert wire.ops == [dist.ReduceOp.AVG] * 2
    assert (operators, is_result) == ([], True)
    assert result.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("lone", [0, 1])
def test_an_axis_of_one_rank_does_not_count(wire: Wire, lone: int) -> None:
    axes = [wire.axis(averages=i != lone, size=1 if i == lone else 2) for i in range(2)]
    result, operators, _ = reduced(reduction_over(axes[0], replicate_axis=axes[1]))
    assert wire.ops == [dist.ReduceOp.AVG], "nothing is sent over it"
    assert operators == (["aten::copy_"] if lone == 0 else [])
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
    "sums from before": lambda wire: reduction_over(wire.axis(), carry=torch.full((4,), 10.0)),
    "a collective of the user's": lambda wire: reduction_over(wire.axis(), comm=wire),
    "fp16": lambda wire: reduction_over(wire.axis(), send=torch.full((8,), 4e4).half()),
}


@pytest.mark.parametrize("why", SUMMED)
def test_otherwise_it_is_summed_and_multiplied(wire: Wire, why: str) -> None:
    reduction = SUMMED[why](wire)
    sent, result = reduction.send[:4].tolist(), reduced(reduction)[0]
    num_axes = 1 if reduction.replicate_axis is None else 2
    assert wire.ops == [dist.ReduceOp.SUM] * num_axes
    before = 10 * (why == "sums from before")
    expected = [(n * 2**num_axes + before) * reduction.scale for n in sent]
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
    result, _, is_result = reduced(reduction)
    assert is_result
    out, send = wire.tensors
    assert (send.shape, send.dtype) == ((8, 2), torch.float32)
    assert send.data_ptr() == reduction.send.data_ptr(), "a view, not a copy"
    assert out.data_ptr() == result.data_ptr()
    assert result.tolist() == numbers[:4].tolist()


# --- the send buffer ----------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


@given(shapes=SHAPES, world_size=st.integers(1, 9), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_parameters_and_gaps_tile_the_flat_space(
    shapes: list[list[int]], world_size: int, itemsize: int
) -> None:
    gaps = gaps_of(layout := FlatLayout.plan(shapes, world_size=world_size, itemsize=itemsize))
    taken = [(at, at + n) for at, n in zip(layout.offsets, layout.numels, strict=True) if n]
    assert all(start < stop for start, stop in gaps)
    assert sum(stop - start for start, stop in gaps) == layout.padding_numel
    ranges = sorted(gaps + taken)
    ends = [0, *(stop for _, stop in ranges)]
    assert [start for start, _ in ranges] == ends[:-1], "no hole, no overlap"
    assert ends[-1] == layout.padded_numel


class Holder(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self) -> None:
        """Make it a module to shard."""


class DirtyStreams(RecordingStreams):
    """Memory comes with what was left in it."""

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        storage = super().new_storage(nbytes)
        storage.fill_(0xFF)  # NaN in every dtype.
        return storage

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().resize_storage(storage, nbytes)
        storage.fill_(0xFF)


class Reducing:
    """The gradients of one group on four ranks, as an accelerator collects them."""

    shapes = ((3, 5), (2,), (7, 3), ())

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecordingBackend, "copies_gradients_together", True)
        self.module = Holder(self.shapes)
        mesh, log = recording_mesh((4,), rank=1)
        fully_shard(self.module, mesh)
        state = get_state(self.module)
        assert state is not None
        assert state.group is not None
        self.gradients: GroupGradients = state.group.gradients
        self.streams = DirtyStreams(log)
        self.pool = SlotPool(self.streams)
        self.params = list(self.module.parameters())

    def take(self, value: float, *indices: int) -> None:
        """Let gradients of parameters come: all, unless some are named."""
        for index in indices or range(len(self.shapes)):
            grad = torch.full(self.shapes[index], value)
            self.gradients.buckets[0].collect(index, grad, self.streams, self.pool, hold=True)

    def reduce(self) -> list[str]:
        """Reduce and assign; return the operators of the assignment, without views."""
        start_reduce([(self.gradients, True)], self.streams, self.pool, "group")
        with Operators() as operators:
            self.gradients.finish_reduce(self.pool)
        self.gradients.forget_fired()
        return [name for name in operators.names if name == "aten::add_"]

    def values(self) -> list[set[float]]:
        """Return the numbers in this rank's piece of each gradient."""
        return [
            set(p.grad.to_local().tolist()) if p.grad is not None else {0.0} for p in self.params
        ]


@pytest.mark.parametrize("fired", [(), (0,), (1, 3)])
def test_nothing_that_was_left_in_memory_is_sent(
    monkeypatch: pytest.MonkeyPatch, fired: tuple[int, ...]
) -> None:
    reducing = Reducing(monkeypatch)
    for times in range(1, 3):  # Memory is taken anew for every backward.
        reducing.take(times, *fired)
        (reduction,) = reducing.gradients.prepare(reducing.streams, reducing.pool, all_reduce=True)
        send = reduction.send
        layout = FlatLayout.plan(reducing.shapes, world_size=4, itemsize=4)
        assert send.numel() == layout.padded_numel > sum(layout.numels)
        expected = torch.zeros(layout.padded_numel)
        for index in fired or range(4):
            at = layout.offsets[index]
            expected[at : at + layout.numels[index]] = times
        assert torch.equal(send, expected)
        reducing.gradients.reset(reducing.pool)
        reducing.pool.trim()


def test_unsynced_gradients_add_up_and_the_gaps_stay_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    reducing = Reducing(monkeypatch)
    for indices in ((0, 1), (1, 2), (0, 1, 2)):
        reducing.take(1.0, *indices)
        reducing.gradients.write_held(reducing.streams, reducing.pool)
    (reduction,) = reducing.gradients.prepare(reducing.streams, reducing.pool, all_reduce=True)
    # 15, 2 and 21 elements, 2, 3 and 2 times each; the scalar got none.
    assert reduction.send.sum() == 15 * 2 + 2 * 3 + 21 * 2
    assert not reduction.send.isnan().any()


# --- where reduced gradients go -----------------------------------------------------------------


def test_gradients_that_are_one_tensor_are_added_to_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reducing = Reducing(monkeypatch)
    called: list[tuple[int, set[float]]] = []
    for index, param in enumerate(reducing.params):
        param.register_post_accumulate_grad_hook(
            lambda param, index=index: called.append((index, set(param.grad.to_local().tolist())))
        )
    reducing.take(1.0)
    assert reducing.reduce() == [], "the first are what was reduced"
    pieces = [param.grad for param in reducing.params]
    first = reducing.values()
    assert set().union(*first) == {1.0}
    assert called == list(enumerate(first))
    called.clear()
    reducing.take(2.0)
    assert reducing.reduce() == ["aten::add_"]
    assert all(param.grad is piece for param, piece in zip(reducing.params, pieces, strict=True))
    second = [{3.0} if values else set() for values in first]
    assert reducing.values() == second
    assert called == list(enumerate(second))


def own_grad(params: list[nn.Parameter]) -> None:
    grad = params[1].grad
    assert isinstance(grad, ShardedTensor)
    params[1].grad = ShardedTensor(grad.to_local().clone(), grad.spec)


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "own": own_grad,
    "no first": lambda params: setattr(params[0], "grad", None),
    "no third": lambda params: setattr(params[2], "grad", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_the_users_own_are_added_to_one_by_one(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    reducing = Reducing(monkeypatch)
    reducing.take(1.0)
    reducing.reduce()
    first = reducing.values()
    CHANGES[change](reducing.params)
    was_dropped = [param.grad is None for param in reducing.params]
    reducing.take(2.0)
    adds = reducing.reduce()
    assert adds == ["aten::add_"] * was_dropped.count(False)
    expected = [
        {2.0 if dropped else 3.0} if values else set()
        for values, dropped in zip(first, was_dropped, strict=True)
    ]
    assert reducing.values() == expected


def test_only_gradients_that_came_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    reducing = Reducing(monkeypatch)
    reducing.take(1.0)
    reducing.reduce()
    first = reducing.values()
    reducing.take(2.0, 0, 1)
    assert reducing.reduce() == ["aten::add_"] * 2
    expected = [{3.0} if v and i < 2 else v for i, v in enumerate(first)]
    assert reducing.values() == expected
