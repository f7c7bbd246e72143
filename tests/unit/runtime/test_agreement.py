"""What ranks compare: their models at first, their collectives of every step; and what they say."""

from __future__ import annotations

import types
import typing
import warnings

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, RankMismatchError, fully_shard
from shardkit._module.hooks import get_state
from shardkit._runtime import agreement
from shardkit._runtime.agreement import GATHER, REDUCE, StepCheck, check_same_model

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# --- the model ------------------------------------------------------------------------------------


def groups_of(
    change: Callable[[nn.Sequential], object] = lambda _: None,
    *,
    together: bool = False,
    **options: typing.Any,
) -> list[typing.Any]:
    """Return the groups of two layers, changed before they are sharded."""
    mesh, _ = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    change(model)
    if not together:
        fully_shard(model[0], mesh, **options)
    fully_shard(model, mesh, **options)
    modules = [model] if together else [model, model[0]]
    return [get_state(module).group for module in modules]


class Ranks:
    """An axis on which this rank is the first one; the others have models of their own."""

    rank = 0

    def __init__(self, *others: list[typing.Any], size: int | None = None) -> None:
        self.others = others
        self.size = size or 1 + len(others)
        self.compared: list[tuple[torch.dtype, int, str]] = []
        self.exchanged = 0

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self.compared.append((tensor.dtype, tensor.numel(), op))
        for groups in self.others:
            other = _Sent()
            check_same_model(groups, [typing.cast("typing.Any", other)])
            assert other.tensor is not None
            torch.maximum(tensor, other.tensor, out=tensor)

    def exchange(self, item: typing.Any) -> list[typing.Any]:
        self.exchanged += 1
        described = [[(g.name, *g.describe()) for g in groups] for groups in self.others]
        return [item, *described]


class _Sent:
    """An axis that keeps what a rank would send."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        assert op == "max"
        self.tensor = tensor.clone()


def compare(mine: list[typing.Any], *others: list[typing.Any]) -> Ranks:
    axis = Ranks(*others)
    check_same_model(mine, [typing.cast("typing.Any", axis)])
    return axis


def test_equal_models_cost_sixteen_bytes() -> None:
    axis = compare(groups_of(), groups_of(), groups_of())
    assert axis.compared == [(torch.int64, 2, "max")]
    assert axis.exchanged == 0


def test_every_axis_of_several_ranks_is_asked() -> None:
    alone, first, second = Ranks(size=1), Ranks(groups_of()), Ranks(groups_of())
    check_same_model(groups_of(), typing.cast("typing.Any", [alone, first, second]))
    assert [len(axis.compared) for axis in (alone, first, second)] == [0, 1, 1]


def wider(model: nn.Sequential) -> None:
    model[1] = nn.Linear(4, 5)


def in_float64(model: nn.Sequential) -> None:
    model[1].to(torch.float64)


def frozen(model: nn.Sequential) -> None:
    model[1].weight.requires_grad_(requires_grad=False)


def without_bias(model: nn.Sequential) -> None:
    model[1].bias = None


def with_another_name(model: nn.Sequential) -> None:
    weight = model[1].weight
    del model[1].weight
    model[1].register_parameter("kernel", weight)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
DIFFERENCES: dict[str, tuple[Callable[[], list[typing.Any]], str]] = {
    "shape": (lambda: groups_of(wider), r"'1.weight' is \(2, 4\) .* but '1.weight' is \(5, 4\)"),
    "dtype": (
        lambda: groups_of(in_float64),
        r"is \(2, 4\) torch.float32 on cpu .* is \(2, 4\) torch.float64 on cpu",
    ),
    "trainable": (lambda: groups_of(frozen), r"trainable\) .* frozen\) on position 1"),
    "compute dtype": (
        lambda: groups_of(mp_policy=BF16),
        (
            r"computed in torch.float32, reduced in torch.float32.*computed in torch.bfloat16, "
            r"reduced in torch.bfloat16"
        ),
    ),
    "name": (lambda: groups_of(with_another_name), r"'1.weight' is .* but '1.bias' is"),
    "number of parameters": (
        lambda: groups_of(without_bias),
        (
            r"group 'Sequential' has 2 parameters on position 0 of the process group; on position "
            r"1 there is 'Sequential' with 1"
        ),
    ),
    "number of groups": (
        lambda: groups_of(together=True),
        r"position 0 of the process group has 2 groups, position 1 has 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_first_difference_is_named(what: str) -> None:
    make, message = DIFFERENCES[what]
    with pytest.raises(RankMismatchError, match=message) as caught:
        compare(groups_of(), make())
    assert str(caught.value).endswith(
        "Build the same model and call fully_shard in the same way on every rank."
    )


def test_the_rank_that_differs_is_named() -> None:
    with pytest.raises(RankMismatchError, match="on position 2"):
        compare(groups_of(), groups_of(), groups_of(wider))


# --- the collectives of a step --------------------------------------------------------------------


class Wire:
    """Ranks' checks and the all-reduce between them."""

    def __init__(self, num_ranks: int, groups: Sequence[str] = ("root", "a", "b")) -> None:
        self.vectors: list[Tensor] = []
        self.is_done = True
        self.is_of_host = True
        self.size = num_ranks
        self.numels: list[int] = []
        self.checks = [StepCheck(self._groups(groups), [self._axis()]) for _ in range(num_ranks)]

    @staticmethod
    def _groups(names: Sequence[str]) -> typing.Any:
        """Make groups of one bucket of two parameters each."""
        return [
            types.SimpleNamespace(
                name=name,
                gradients=types.SimpleNamespace(
                    buckets=[types.SimpleNamespace(fired=bytearray(2))]
                ),
            )
            for name in names
        ]

    def _axis(self) -> typing.Any:
        return types.SimpleNamespace(size=self.size, exchange=self._exchange)

    def _exchange(self, logs: typing.Any) -> typing.Any:
        """Return every rank's logs; one that has not finished its own comparison shows them."""
        self.exchanged = logs
        return [[each] for each in self.sent]

    def start_all_reduce_max(self, vector: Tensor, axes: Sequence[object]) -> typing.Any:
        assert len(axes) == 1
        self.vectors.append(vector)
        self.numels.append(vector.numel())
        return types.SimpleNamespace(
            wait=self._wait, is_done=lambda: self.is_done, is_of_host=self.is_of_host
        )

    def _wait(self) -> None:
        largest = torch.stack(self.vectors).amax(0)
        for vector in self.vectors:
            vector.copy_(largest)

    def note(self, *by_rank: Sequence[tuple[int, int]]) -> None:
        for check, collectives in zip(self.checks, by_rank, strict=True):
            for kind, group in collectives:
                check.note(kind, group)

    def start(self) -> None:
        self.vectors.clear()
        for check in self.checks:
            check.start(typing.cast("typing.Any", self))
        self.sent = [check.snapshot() for check in self.checks]

    def compare(self, *by_rank: Sequence[tuple[int, int]]) -> None:
        """Note collectives of every rank, and compare them."""
        self.note(*by_rank)
        self.start()
        for check in self.checks:
            check.finish()


STEP = [(GATHER, 0), (GATHER, 1), (GATHER, 2), (REDUCE, 2), (REDUCE, 1), (REDUCE, 0)]


def test_equal_steps_are_passed_and_forgotten() -> None:
    wire = Wire(2)
    wire.compare(STEP, STEP)
    assert wire.numels == [2 + 3 * 2] * 2, "16 bytes, and 8 per parameter"
    assert [check.snapshot() for check in wire.checks] == [[[], []]] * 2
    wire.compare(STEP[:2], STEP[:2])


def test_gathers_and_reductions_may_come_between_each_other() -> None:
    """Where a rank does not use a module, its reductions come later."""
    wire = Wire(2)
    others = [(GATHER, 0), (REDUCE, 2), (GATHER, 1), (GATHER, 2), (REDUCE, 1), (REDUCE, 0)]
    wire.compare(STEP, others)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            [(GATHER, 0), (GATHER, 2)],
            (
                "after 1 all-gathers of this step, rank 0 of the mesh all-gathers 'a', rank 1 "
                "all-gathers 'b'"
            ),
        ),
        ([(GATHER, 0)], "all-gathers 'a', rank 1 has no more, 'root' was its last"),
        ([], "after 0 all-gathers of this step, rank 0 of the mesh all-gathers 'root', rank 1 has"),
        (
            [(GATHER, 0), (GATHER, 1), (REDUCE, 1)],
            (
                "after 0 reduce-scatters of this step, rank 0 of the mesh has none, rank 1 "
                "reduce-scatters 'a'"
            ),
        ),
    ],
    ids=["another", "no more", "none", "reduction"],
)
def test_every_rank_hears_where_the_steps_part(other: list[tuple[int, int]], message: str) -> None:
    wire = Wire(2)
    wire.note([(GATHER, 0), (GATHER, 1)], other)
    wire.start()
    for check in wire.checks:
        with pytest.raises(RankMismatchError) as caught:
            check.finish()
        assert message in str(caught.value)
        assert "do not use this step's gradients" in str(caught.value)
    for check in wire.checks:
        check.finish()  # It is told once.


def test_a_different_rank_is_named_by_its_place() -> None:
    wire = Wire(3)
    with pytest.raises(RankMismatchError, match="rank 2 all-gathers 'b'"):
        wire.compare([(GATHER, 1)], [(GATHER, 1)], [(GATHER, 2)])


def test_steps_that_never_compare_are_folded_and_still_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "_MAX_LOG", 4)
    wire = Wire(2)
    wire.note([(GATHER, 1)] * 5, [(GATHER, 1)] * 5)
    assert [check.snapshot() for check in wire.checks] == [[[1], []]] * 2
    wire.compare([], [])
    wire.note([(GATHER, 1)] * 4, [(GATHER, 2)] * 4)
    wire.start()
    for check in wire.checks:
        with pytest.raises(RankMismatchError, match="ranks issued different collectives in this"):
            check.finish()


def test_what_fired_anywhere_is_told_by_group_and_bucket() -> None:
    wire = Wire(2)
    wire.checks[0]._groups[1].gradients.buckets[0].fired[0] = 1  # noqa: SLF001
    wire.checks[1]._groups[2].gradients.buckets[0].fired[1] = 1  # noqa: SLF001
    wire.start()
    for check in wire.checks:
        assert check.used_anywhere() == [[[0, 0]], [[1, 0]], [[0, 1]]]


def test_alone_nothing_is_sent() -> None:
    check = StepCheck(Wire._groups(["root"]), [])  # noqa: SLF001
    check._groups[0].gradients.buckets[0].fired[1] = 1  # noqa: SLF001
    check.note(GATHER, 0)
    check.start(typing.cast("typing.Any", None))
    assert check.used_anywhere() == [[[0, 1]]]


@pytest.mark.parametrize("is_of_host", [True, False])
def test_only_what_the_host_waits_for_is_compared_early(is_of_host: bool) -> None:
    wire = Wire(2)
    wire.is_of_host = is_of_host
    wire.note([(GATHER, 0)], [(GATHER, 1)])
    wire.start()
    if is_of_host:
        with pytest.raises(RankMismatchError):
            wire.checks[0].finish_on_host()
    else:
        wire.checks[0].finish_on_host()
        with pytest.raises(RankMismatchError):
            wire.checks[0].finish()


def test_the_next_comparison_waits_for_the_last_one() -> None:
    wire = Wire(2)
    wire.note([(GATHER, 0)], [(GATHER, 1)])
    wire.start()
    with pytest.raises(RankMismatchError):
        wire.checks[0].start(typing.cast("typing.Any", wire))


def test_after_an_exception_the_step_is_forgotten() -> None:
    wire = Wire(2)
    wire.note([(GATHER, 0)], [(GATHER, 1)])
    wire.start()
    wire.note([(GATHER, 0)], [])
    for check in wire.checks:
        check.reset()
        assert check.snapshot() == [[], []]
        check.finish()
    wire.compare(STEP, STEP)


@pytest.mark.parametrize("is_done", [True, False])
def test_the_last_step_of_a_process_is_looked_at_if_it_is_there(is_done: bool) -> None:
    wire = Wire(2)
    wire.is_done = is_done
    wire.note([(GATHER, 0)], [(GATHER, 1)])
    wire.start()
    if is_done:
        with pytest.warns(RuntimeWarning, match="different collectives in the last backward"):
            wire.checks[0].warn_of_last()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wire.checks[0].warn_of_last()  # Once.
        wire.checks[1].reset()
        wire.checks[1].warn_of_last()


def test_snapshots_contradict_each_other_where_they_overlap() -> None:
    (check,) = Wire(1).checks
    ahead = [[0, 1, 2], [2]]
    assert not check.contradicts([ahead, [[0, 1], []]])
    assert not check.contradicts([[[0], []], ahead])
    assert check.contradicts([ahead, [[0, 2], []]])
    assert check.contradicts([ahead, [[0], [1]]])
    assert check.difference([ahead, ahead]) is None
