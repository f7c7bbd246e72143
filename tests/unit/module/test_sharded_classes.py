"""The class that `fully_shard` gives a module, for modules whose own class looks at subclasses."""

from __future__ import annotations

import copy
import typing

from torch import Tensor, nn

from recording import recording_mesh
from shardkit import FSDPModule, fully_shard


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
