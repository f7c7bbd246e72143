"""What ranks tell each other: their models at first, and what they used in every step."""

from __future__ import annotations

import types
import typing

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, RankMismatchError, fully_shard
from shardkit._module.hooks import get_state
from shardkit._runtime.agreement import (
    ComparedMesh,
    UsedParameters,
    _describe,
    _difference_over,
    _software,
    check_same_model,
)
from shardkit._settings import watch_settings

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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    change(model)
    if not together:
        fully_shard(model[0], mesh, **options)
    fully_shard(model, mesh, **options)
    modules = [model] if together else [model, model[0]]
    return [get_state(module).group for module in modules]


def over(*axes: typing.Any) -> list[ComparedMesh]:
    """Return one mesh of these axes on which everything lies."""
    return [ComparedMesh([axis for axis in axes if axis.size > 1])]


class Ranks:
    """An axis on which this rank is the first one; the others have models of their own."""

    rank = 0

    def __init__(self, *others: list[typing.Any], size: int | None = None) -> None:
        self.others = others
        self.described = [
            (_software(), [(g.name, *_describe(g, ComparedMesh(()))) for g in groups])
            for groups in others
        ]
        self.size = size or 1 + len(others)
        self.compared: list[tuple[torch.dtype, int, str]] = []
        self.exchanged = 0

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self.compared.append((tensor.dtype, tensor.numel(), op))
        for groups in self.others:
            other = _Sent()
            check_same_model(groups, over(other))
            assert other.tensor is not None
            torch.maximum(tensor, other.tensor, out=tensor)

    def exchange(self, item: typing.Any) -> list[typing.Any]:
        self.exchanged += 1
        if item is None or isinstance(item, str):  # What was found over other axes.
            return [item] * self.size
        return [item, *self.described]


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
    check_same_model(mine, over(axis))
    return axis


def test_equal_models_cost_sixteen_bytes() -> None:
    axis = compare(groups_of(), groups_of(), groups_of())
    assert axis.compared == [(torch.int64, 2, "max")]
    assert axis.exchanged == 0


def test_every_axis_of_several_ranks_is_asked() -> None:
    alone, first, second = Ranks(size=1), Ranks(groups_of()), Ranks(groups_of())
    check_same_model(groups_of(), over(alone, first, second))
    assert [len(axis.compared) for axis in (alone, first, second)] == [0, 1, 1]


def test_what_differs_in_one_row_is_told_in_all() -> None:
    """Else other rows wait for ranks that have raised."""
    rows, columns = Ranks(groups_of(wider)), Ranks(groups_of())
    with pytest.raises(RankMismatchError, match=r"1\.weight"):
        check_same_model(groups_of(), over(rows, columns))
    assert (rows.exchanged, columns.exchanged) == (2, 1)


def test_all_axes_are_compared_if_the_first_one_differs() -> None:
    """Ranks of the second one may have found nothing on theirs, and wait there."""
    rows, columns = Ranks(groups_of(wider)), Ranks(groups_of(wider))
    with pytest.raises(RankMismatchError, match=r"1\.weight"):
        check_same_model(groups_of(), over(rows, columns))
    assert (rows.exchanged, columns.exchanged) == (2, 2)


def with_software(axis: Ranks, software: str, change: Callable[..., typing.Any] = list) -> Ranks:
    """Let the other ranks of an axis run other software."""
    axis.described = [(software, change(described)) for _, described in axis.described]
    return axis


def test_ranks_with_other_software_are_warned_of() -> None:
    """All else is equal, so they may go on."""
    axis = with_software(Ranks(groups_of(wider)), "shardkit 0.0.9")
    with pytest.warns(UserWarning, match=r"position 1 has shardkit 0\.0\.9\. Install the same"):
        assert _difference_over(axis, (_software(), axis.described[0][1]), [0, 1, 2, 3]) is None
    with pytest.raises(RankMismatchError, match=r"'1\.weight'.* And ranks run different software"):
        check_same_model(groups_of(), over(axis))


def test_a_description_of_other_software_may_be_of_another_kind() -> None:
    axis = with_software(
        Ranks(groups_of(wider)),
        "shardkit 0.2.0",
        lambda groups: [(name, *(param[1:] for param in params)) for name, *params in groups],
    )
    with pytest.raises(RankMismatchError, match=r"position 1 has shardkit 0\.2\.0"):
        check_same_model(groups_of(), over(axis))


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


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
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


def other_values(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].bias[-1] += 1


def test_a_parameter_with_other_values_is_named() -> None:
    with pytest.raises(RankMismatchError, match=r"parameter '1\.bias' was not the same on posi"):
        compare(groups_of(), groups_of(other_values))


def test_pieces_that_were_written_since_are_not_compared() -> None:
    """As those of checkpoints."""
    groups = groups_of(other_values)
    with torch.no_grad():
        groups[0].buckets[0].entries[0].param.to_local().zero_()
    compare(groups_of(), groups)


def test_what_one_rank_alone_has_written_is_named() -> None:
    groups = groups_of()
    with torch.no_grad():
        groups[0].buckets[0].entries[0].param.fill_(7)
    with pytest.raises(RankMismatchError, match=r"'1\.weight' was not the same.*filled or loaded"):
        compare(groups_of(), groups)


def test_values_are_not_compared_where_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_settings, "compare_values", False)
    compare(groups_of(), groups_of(other_values))


# --- what was used -------------------------------------------------------------------------------


class Wire:
    """What several ranks used, and the all-reduce between them."""

    def __init__(self, num_ranks: int, groups: Sequence[str] = ("root", "a", "b")) -> None:
        self.vectors: list[Tensor] = []
        self.events: list[str] = []
        self.said: list[str] = []
        self.is_of_host = True
        axis = typing.cast("typing.Any", types.SimpleNamespace(size=num_ranks))
        self.used = [UsedParameters(groups_of_two(groups), over(axis)) for _ in range(num_ranks)]

    def start_all_reduce_max(self, vector: Tensor, axes: Sequence[object], of: str) -> typing.Any:
        assert len(axes) == 1
        self.said.append(of)
        self.vectors.append(vector)
        number = len(self.vectors)
        self.events.append(f"start {number}")

        def wait() -> None:
            self.events.append(f"wait {number}")
            largest = torch.stack(self.vectors).amax(0)
            for each in self.vectors:
                each.copy_(largest)

        return types.SimpleNamespace(wait=wait, is_of_host=self.is_of_host)

    def start(self, used: UsedParameters) -> None:
        used.start(typing.cast("typing.Any", self))


def bucket_of_two(name: str) -> typing.Any:
    """Make the gradients of a bucket of two parameters."""
    entries = [
        types.SimpleNamespace(name=f"{name}.{i}", param=nn.Parameter(torch.ones(1)))
        for i in range(2)
    ]
    bucket = types.SimpleNamespace(entries=entries)
    return types.SimpleNamespace(fired=bytearray(2), bucket=bucket)


def groups_of_two(names: Sequence[str]) -> typing.Any:
    """Make groups of one bucket of two parameters each."""
    return [
        types.SimpleNamespace(
            name=name,
            buckets=[],
            shard_versions=(),
            gradients=types.SimpleNamespace(buckets=[bucket_of_two(name)]),
        )
        for name in names
    ]


def test_what_fired_anywhere_is_told_by_group_and_bucket() -> None:
    wire = Wire(2)
    wire.used[0]._groups[1].gradients.buckets[0].fired[0] = 1  # noqa: SLF001
    wire.used[1]._groups[2].gradients.buckets[0].fired[1] = 1  # noqa: SLF001
    for used in wire.used:
        wire.start(used)
    assert [vector.nbytes for vector in wire.vectors] == [8 * (3 * 2 + 4)] * 2, "8 per parameter"
    for used in wire.used:
        assert used.by_group() == [[[0, 0]], [[1, 0]], [[0, 1]]]


def test_a_rank_that_froze_a_parameter_says_so() -> None:
    """It is another text, so that ranks which differ talk before they go on."""
    wire = Wire(2)
    wire.start(wire.used[0])
    bucket = wire.used[1]._groups[1].gradients.buckets[0].bucket  # noqa: SLF001
    bucket.entries[0].param.requires_grad_(False)
    wire.start(wire.used[1])
    assert wire.said == [
        "which of 6 trained parameters were used",
        "which of 5 trained parameters were used, without the frozen a.0",
    ]


def test_alone_nothing_is_sent() -> None:
    used = UsedParameters(groups_of_two(["root"]), [])
    used._groups[0].gradients.buckets[0].fired[1] = 1  # noqa: SLF001
    used.start(typing.cast("typing.Any", None))
    assert used.by_group() == [[[0, 1]]]


def test_without_trainable_parameters_nothing_is_sent() -> None:
    wire = Wire(2, groups=())
    wire.start(wire.used[0])
    assert wire.used[0].by_group() == []
    assert wire.events == []


@pytest.mark.parametrize("is_of_host", [True, False])
def test_a_forward_waits_for_hosts_only(is_of_host: bool) -> None:
    wire = Wire(2)
    wire.is_of_host = is_of_host
    wire.used[0].finish_on_host()
    wire.start(wire.used[0])
    wire.used[0].finish_on_host()
    assert wire.events == ["start 1", "wait 1"][: 2 if is_of_host else 1]
    wire.used[0].finish()
    assert wire.events == ["start 1", "wait 1"]


def test_the_next_one_waits_for_the_last_one() -> None:
    wire = Wire(2)
    for _ in range(3):
        wire.start(wire.used[0])
    assert wire.events == ["start 1", "wait 1", "start 2", "wait 2", "start 3"]


def test_after_an_exception_the_step_is_forgotten() -> None:
    wire = Wire(2)
    wire.start(wire.used[0])
    wire.used[0].reset()
    wire.used[0].finish()
    assert wire.events == ["start 1"]
