"""The class that `fully_shard` gives a module, for modules whose own class looks at subclasses."""

from __future__ import annotations

import copy
import typing
from abc import ABC, abstractmethod

import pytest
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import FSDPModule, fully_shard
from shardkit._module.fsdp_module import own_class


class Registered(nn.Module):
    """Its subclasses have a name each."""

    by_name: typing.ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        assert name not in Registered.by_name
        Registered.by_name[name] = cls


class Encoder(Registered, name="encoder"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_the_original_class_is_not_told() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(Encoder(), mesh)
    assert isinstance(model, FSDPModule)
    assert isinstance(copy.deepcopy(model), Encoder)
    assert Registered.by_name == {"encoder": Encoder}


def test_subclasses_of_the_sharded_class_are_told() -> None:
    mesh, _ = recording_mesh((2,))
    sharded: typing.Any = type(fully_shard(Encoder(), mesh))
    try:
        mine = type("Mine", (sharded,), {}, name="mine")
        assert Registered.by_name["mine"] is mine
    finally:
        Registered.by_name.pop("mine", None)


Item = typing.TypeVar("Item")


class Maps(typing.Protocol):
    def forward(self, x: Tensor) -> Tensor: ...


class Slots:
    __slots__ = ()


class Abstract(ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class OfAbstract(Abstract):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OfGeneric(typing.Generic[Item], OfAbstract):  # noqa: PYI059 - this order is tested
    pass


class OfProtocol(Maps, OfAbstract):
    pass


class OfSlots(Slots, OfAbstract):
    pass


class Chosen(OfGeneric[int]):
    pass


@pytest.mark.parametrize("cls", [OfAbstract, OfGeneric, OfProtocol, OfSlots, Chosen])
def test_a_class_whose_first_base_is_no_module(cls: type[nn.Module]) -> None:
    mesh, _ = recording_mesh((2,))
    model: typing.Any = fully_shard(cls(), mesh)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, cls)
    assert own_class(model) is cls
    assert type(model).__name__ == f"FSDP{cls.__name__}"
    assert type(model).unshard is FSDPModule.unshard
    assert type(model).forward is cls.forward
    assert type(copy.deepcopy(model)) is type(model)
    assert not isinstance(type(model)(), FSDPModule)  # As containers do when they are sliced.
