"""Tensors are found and exchanged in whatever forwards take and return."""

from __future__ import annotations

import collections
import dataclasses
import types
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardkit._tree import iter_tensors, map_tensors


def plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


def same(tensor: Tensor) -> Tensor:
    return tensor


def number(value: float) -> Tensor:
    return torch.tensor(float(value))


def numbers(tree: typing.Any) -> list[float]:
    """Return the values of the tensors found, in order; each has one element."""
    return [tensor.item() for tensor in iter_tensors(tree)]


class Point(typing.NamedTuple):
    x: Tensor
    y: typing.Any


@dataclasses.dataclass
class Output:
    logits: Tensor
    note: str = "as it was"
    extra: typing.Any = None


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    logits: Tensor
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.logits * 2)


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    logits: Tensor
    extra: typing.Any = None


class AttributeDict(dict[str, typing.Any]):
    """Entries are attributes too, as in the outputs of Hugging Face models."""

    def __init__(self, *args: typing.Any, **kwargs: typing.Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__.update(self)

    def __setitem__(self, key: str, value: typing.Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class PlainObject:
    def __init__(self, **attributes: typing.Any) -> None:
        self.__dict__.update(attributes)


TREES: dict[str, typing.Any] = {
    "tensor": number(1),
    "list": [number(1), number(2), 3, "four"],
    "tuple": (number(1), (number(2), None)),
    "dict": {"b": number(1), "a": [number(2)]},
    "ordered dict": collections.OrderedDict(b=number(1), a=number(2)),
    "default dict": collections.defaultdict(list, {"x": [number(1)]}),
    "attribute dict": AttributeDict(logits=number(1), other=7),
    "named tuple": Point(number(1), {"inner": number(2)}),
    "dataclass": Output(number(1), extra=(number(2), 5)),
    "slotted dataclass": SlottedOutput(number(1), extra=[number(2)]),
    "nested": [{"a": (Output(number(1), extra=Point(number(2), number(3))),)}],
    "empty": ([], {}, ()),
}


# --- finding ------------------------------------------------------------------------------------

FINDABLE = [pytest.param(tree, id=name) for name, tree in TREES.items()]


@pytest.mark.parametrize("tree", FINDABLE)
def test_tensors_are_found_in_order(tree: typing.Any) -> None:
    changed = []

    def note(tensor: Tensor) -> Tensor:
        changed.append(tensor.item())
        return tensor

    map_tensors(note, tree)
    assert numbers(tree) == changed == sorted(changed)


def test_tensors_are_found_in_sets_and_plain_objects() -> None:
    assert numbers({number(1)}) == [1.0]
    assert numbers(frozenset([number(1)])) == [1.0]
    assert numbers(PlainObject(a=number(1), b=PlainObject(c=[number(2)]))) == [1.0, 2.0]
    assert numbers(types.SimpleNamespace(a=number(1))) == [1.0]


def test_tensors_are_found_in_objects_with_slots() -> None:
    class Slotted:
        __slots__ = ("x",)

    slotted = Slotted()
    slotted.x = number(1)
    assert numbers(slotted) == [1.0]


def test_tensors_are_found_in_objects_that_can_be_called() -> None:
    class Result(PlainObject):
        def __call__(self) -> None: ...

    assert numbers(Result(x=number(1))) == [1.0]


def test_objects_in_objects_are_searched_three_deep() -> None:
    tree: typing.Any = number(1)
    for _ in range(3):
        tree = PlainObject(inner=tree)
    assert numbers(tree) == [1.0]
    assert numbers(PlainObject(inner=tree)) == []


def test_an_object_that_holds_itself_is_no_trap() -> None:
    tree = PlainObject(x=number(1))
    tree.me = tree
    assert set(numbers(tree)) == {1.0}


def test_modules_classes_and_functions_are_not_searched() -> None:
    def function() -> None: ...

    function.tensor = number(1)  # type: ignore[attr-defined]
    assert numbers([nn.Linear(2, 2), PlainObject(module=nn.Linear(2, 2)), function]) == []
    assert numbers(type("Class", (), {"tensor": number(1)})) == []


def test_leaves_are_left_alone() -> None:
    leaves = ["text", b"bytes", 1, 2.5, True, 1j, None, torch.float32, torch.device("cpu")]
    assert numbers(leaves) == []
    assert map_tensors(plus_one, leaves) is leaves


# --- exchanging ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_what_does_not_change_is_the_same_object(tree: typing.Any) -> None:
    assert map_tensors(same, tree) is tree


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_all_tensors_are_exchanged_and_the_original_is_left(tree: typing.Any) -> None:
    def collect(tree: typing.Any) -> list[float]:
        values: list[float] = []

        def note(tensor: Tensor) -> Tensor:
            values.append(tensor.item())
            return tensor

        map_tensors(note, tree)
        return values

    before = collect(tree)
    changed = map_tensors(plus_one, tree)
    assert type(changed) is type(tree)
    assert collect(changed) == [value + 1 for value in before]
    assert collect(tree) == before


def test_what_does_not_change_beside_what_does_is_the_same_object() -> None:
    inner, other = {"x": number(1)}, [1, 2, 3]
    changed = map_tensors(lambda t: t + 1 if t.item() == 2 else t, [inner, other, number(2)])
    assert changed[0] is inner
    assert changed[1] is other


def test_a_dataclass_keeps_its_other_fields() -> None:
    changed = map_tensors(plus_one, Output(number(1), note="mine"))
    assert changed.note == "mine"
    assert changed.logits.item() == 2.0


def test_a_frozen_dataclass_is_not_made_anew() -> None:
    """Its ``__post_init__`` would compute what forward returned otherwise."""
    output = FrozenOutput(number(1))
    changed = map_tensors(plus_one, output)
    assert (changed.logits.item(), changed.twice.item()) == (2.0, 3.0)
    assert (output.logits.item(), output.twice.item()) == (1.0, 2.0)


def test_a_dict_with_attributes_keeps_both_alike() -> None:
    tree = AttributeDict(logits=number(1), other=7)
    changed = map_tensors(plus_one, tree)
    assert changed["logits"] is changed.logits
    assert changed.logits.item() == 2.0
    assert changed.other == 7
    assert tree.logits.item() == 1.0


def test_a_default_dict_keeps_its_factory() -> None:
    changed = map_tensors(plus_one, collections.defaultdict(list, x=number(1)))
    assert changed["new"] == []


def test_a_dict_keeps_its_order() -> None:
    changed = map_tensors(plus_one, {"b": 1, "a": number(1), "c": number(2)})
    assert list(changed) == ["b", "a", "c"]


def test_a_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert any(tensor is packed.data for tensor in iter_tensors(packed))
    changed = map_tensors(lambda t: t * 5 if t.is_floating_point() else t, packed)
    assert isinstance(changed, PackedSequence)
    assert torch.equal(changed.data, packed.data * 5)
    assert changed.batch_sizes is packed.batch_sizes


def test_the_result_of_a_torch_function_of_several_values() -> None:
    result = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    changed = map_tensors(lambda t: t * 2, result)
    assert type(changed) is type(result)
    assert (changed.values.item(), changed.indices.item()) == (6.0, 2)
    assert map_tensors(same, result) is result


class Images(list[typing.Any]):
    def __init__(self, images: list[Tensor], sizes: list[int]) -> None:
        super().__init__(images)
        self.sizes = sizes


class Pair(tuple[Tensor, Tensor]):  # noqa: SLOT001 - with attributes
    note: str

    def __new__(cls, first: Tensor, second: Tensor) -> typing.Self:
        return super().__new__(cls, (first, second))


class Shifted(Point):
    __slots__ = ()

    def __new__(cls, x: Tensor) -> typing.Self:
        return super().__new__(cls, x, x + 1)


@pytest.mark.parametrize("undo", [None, []], ids=["copied", "in place"])
def test_constructors_of_lists_and_tuples_are_not_called(undo: typing.Any) -> None:
    images, pair = Images([number(1)], [7]), Pair(number(2), number(3))
    pair.note = "kept"
    tree = [images, pair, Shifted(number(4))]
    changed = map_tensors(plus_one, tree, undo)
    assert [type(each) for each in changed] == [Images, Pair, Shifted]
    assert numbers(changed) == [2, 3, 4, 5, 6]
    assert (changed[0].sizes, changed[1].note) == ([7], "kept")


def test_a_mapping_that_cannot_be_written_is_returned_as_it_is() -> None:
    shown = types.MappingProxyType({"x": number(1)})
    assert map_tensors(plus_one, shown) is shown
    assert numbers(shown) == [1]


def test_plain_objects_and_sets_are_returned_as_they_are() -> None:
    """They cannot be rebuilt safely, and changing them in place would surprise the user."""
    plain, some = PlainObject(x=number(1)), {number(1)}
    assert map_tensors(plus_one, plain) is plain
    assert plain.x.item() == 1.0
    assert map_tensors(plus_one, some) is some


def test_a_class_of_dataclasses_is_no_dataclass() -> None:
    @dataclasses.dataclass
    class WithDefault:
        x: Tensor = number(1)  # noqa: RUF009 - never changed

    assert map_tensors(plus_one, WithDefault) is WithDefault
    assert WithDefault.x.item() == 1.0
    assert numbers(WithDefault) == []
