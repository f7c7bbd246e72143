"""Plans of models with experts, which are cut only when the plan is applied."""

from __future__ import annotations

import typing

import pytest
from torch import nn

from experts import Block, Experts, Model
from recording import recording_mesh
from shardkit import MeshError, WrapError, auto_shard

pytestmark = pytest.mark.helpers


def test_experts_are_planned_for_a_shape() -> None:
    model = Model()
    whole = sum(param.numel() for param in model.parameters())
    stacks = sum(p.numel() for block in model.blocks for p in block.experts.parameters())
    sizes = {}
    for shape in ((8, 1), (4, 2), (2, 4), (2, 2, 2)):
        plan = auto_shard(model, shape, {"blocks.*": {}}, experts={Experts: "ep"}, apply=False)
        ep = shape[-1]
        assert sum(group.numel for group in plan.groups) == whole
        assert plan.mesh_shape == ((8,) if len(shape) == 2 else (2, 4))
        assert str(plan).count(f"<experts over ep={ep}>") == 2
        sizes[shape] = sum(group.unsharded_nbytes for group in plan.groups)
    # What is gathered of the experts is 1 / ep of them, in fp32.
    saved = (sizes[8, 1] - sizes[2, 4]) / 4
    assert abs(saved - stacks * 3 / 4) < 200  # Elements of padding.
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ("Experts", "a mapping from modules"),
        ({}, "a mapping from modules"),
        ({"Experts": "ep", "blocks.0.experts": "tp"}, "one axis of the mesh"),
        ({"Exprts": "ep"}, "neither a class nor a module .* The nearest ones are 'Experts'"),
        ({"blocks.*.expert": "ep"}, "no module of this Model has the name"),
        ({nn.LSTM: "ep"}, "of which no module of this Model is"),
        ({3: "ep"}, "by a class, its name, or a pattern, got 3"),
        ({Block: "ep"}, "Name the module that holds them itself"),
        ({"LayerNorm": "ep"}, r"'weight': \(6,\), .* a multiple of the 4 ranks of 'ep'"),
    ],
    ids=str,
)
def test_what_holds_no_experts_is_refused(experts: typing.Any, message: str) -> None:
    with pytest.raises(WrapError, match=message):
        auto_shard(Model(), (2, 4), experts=experts, apply=False)


def test_experts_need_an_axis_beside_another() -> None:
    for mesh in (8, (8,), (2, 2, 2, 1)):
        with pytest.raises(MeshError, match="and one more"):
            auto_shard(Model(), mesh, experts={Experts: "ep"}, apply=False)
    for mesh in (None, recording_mesh((2, 2))[0]):
        with pytest.raises(MeshError, match="with experts= the mesh is torch's"):
            auto_shard(Model(), mesh, experts={Experts: "ep"}, apply=False)
    with pytest.raises(MeshError, match="Pass apply=False, or a mesh of torch"):
        auto_shard(Model(), (2, 2), experts={Experts: "ep"})
