"""Axes, coordinates and submeshes, seen from any rank; no process group."""

from __future__ import annotations

import itertools
import math
import typing

import numpy as np
import pytest
import torch

from recording import recording_mesh
from shardkit import DeviceMesh, MeshError, init_device_mesh

SHAPE = (2, 3, 4)
NAMES = ("pipeline", "replicate", "shard")
COORDINATES = list(itertools.product(*map(range, SHAPE)))  # in rank order: row-major


def cube(rank: int, names: tuple[str, ...] | None = NAMES) -> DeviceMesh:
    """Return a mesh of 2 x 3 x 4 ranks, seen from one of them."""
    return recording_mesh(SHAPE, rank=rank, mesh_dim_names=names)[0]


def plain(
    shape: tuple[int, ...] = (2, 2),
    ranks: tuple[int, ...] | None = None,
    names: tuple[str, ...] | None = None,
    rank: int = 0,
) -> DeviceMesh:
    """Return a mesh of which only the arithmetic is used."""
    ranks = tuple(range(math.prod(shape))) if ranks is None else ranks
    return DeviceMesh("cpu", shape, ranks, names, rank)


# --- axes ---------------------------------------------------------------------------------------


def test_sizes_of_axes_by_name_and_number() -> None:
    mesh = cube(0)
    assert mesh.ndim == 3
    assert mesh.size() == 24
    assert [mesh.size(axis) for axis in (0, 1, 2)] == [2, 3, 4]
    assert [mesh.size(name) for name in NAMES] == [2, 3, 4]
    assert [mesh.axis_index(axis) for axis in (-1, -3, "replicate")] == [2, 0, 1]


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_number_out_of_range_is_refused(axis: int) -> None:
    with pytest.raises(MeshError, match=rf"has 3 axes, got axis {axis}\."):
        cube(0).axis_index(axis)


def test_an_unknown_axis_name_is_refused_and_the_known_ones_are_told() -> None:
    with pytest.raises(MeshError, match=r"no axis 'tensor'; its axes are \('pipeline', 'repl"):
        cube(0).size("tensor")
    with pytest.raises(MeshError, match=r"no axis 'shard': make it with names"):
        cube(0, names=None)["shard"]


# --- coordinates --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(24))
def test_coordinates_are_row_major(rank: int) -> None:
    mesh = cube(rank)
    assert mesh.get_rank() == rank
    assert mesh.get_coordinate() == list(COORDINATES[rank])
    assert [mesh.get_local_rank(name) for name in NAMES] == list(COORDINATES[rank])
    assert mesh.get_local_rank(-1) == COORDINATES[rank][-1]


def test_the_place_of_a_rank_and_its_number_are_two_things() -> None:
    mesh = plain((2, 2), ranks=(1, 3, 5, 7), rank=5)
    assert mesh.get_coordinate() == [1, 0]
    assert mesh.get_rank() == 5


def test_the_only_axis_needs_no_name() -> None:
    assert plain((4,), rank=3).get_local_rank() == 3
    with pytest.raises(MeshError, match=r"name an axis: the mesh has 2 \(\('a', 'b'\)\)"):
        plain(names=("a", "b")).get_local_rank()


def test_a_rank_outside_the_mesh_has_no_coordinate() -> None:
    mesh = plain((2,), ranks=(4, 6), names=("shard",), rank=5)
    assert mesh.get_coordinate() is None
    for ask in (mesh.get_local_rank, lambda: mesh["shard"]):
        with pytest.raises(MeshError, match=r"rank 5 is not in the mesh of ranks \[4, 6\]\."):
            ask()


def test_many_ranks_are_shortened_in_messages() -> None:
    assert plain((8,)).describe_ranks() == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert plain((9,)).describe_ranks() == "[0, 1, 2, 3, 4, 5, 6, 7 and 1 more]"


# --- submeshes ----------------------------------------------------------------------------------


def ranks_through(rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` in the named axes only, in row-major order."""
    fixed = [axis for axis, name in enumerate(NAMES) if name not in names]
    here = COORDINATES[rank]
    places = {
        tuple(there[NAMES.index(name)] for name in names): number
        for number, there in enumerate(COORDINATES)
        if all(there[axis] == here[axis] for axis in fixed)
    }
    return tuple(places[place] for place in sorted(places))


SUBSETS = [
    subset for count in (1, 2, 3) for subset in itertools.permutations(NAMES, count)
]  # fmt: skip


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_a_submesh_has_the_ranks_through_this_one(names: tuple[str, ...]) -> None:
    """For every choice of axes, in every order, seen from every rank."""
    for rank in range(24):
        sub = cube(rank)[names]
        assert sub.ranks == ranks_through(rank, names)
        assert sub.shape == tuple(SHAPE[NAMES.index(name)] for name in names)
        assert sub.mesh_dim_names == names
        here = COORDINATES[rank]
        assert sub.get_coordinate() == [here[NAMES.index(name)] for name in names]


def test_a_submesh_communicates_along_the_axes_it_is_made_of() -> None:
    mesh = cube(17)
    sub = mesh["shard", "pipeline"]
    assert sub.backend.axis(0) is mesh.backend.axis(2)
    assert sub.backend.axis(1) is mesh.backend.axis(0)
    assert mesh["replicate"].backend.axis(0) is mesh.backend.axis(1)


def test_a_submesh_of_a_submesh() -> None:
    mesh = cube(17)
    inner = mesh["replicate", "shard"]["shard"]
    assert inner == mesh["shard"]
    assert inner.backend.axis(0) is mesh.backend.axis(2)


def test_the_process_group_is_asked_of_the_backend() -> None:
    class Backend:
        def process_group(self, axis: int) -> str:
            return f"group of axis {axis}"

    mesh = DeviceMesh("cpu", (2, 2), (0, 1, 2, 3), ("replicate", "shard"), 0, Backend())
    assert mesh.get_group("shard") == "group of axis 1"
    assert mesh.get_group(-2) == "group of axis 0"
    assert mesh.get_all_groups() == ["group of axis 0", "group of axis 1"]
    with pytest.raises(MeshError, match="name an axis: the mesh has 2"):
        mesh.get_group()
    assert DeviceMesh("cpu", (2,), (0, 1), None, 0, Backend()).get_group() == "group of axis 0"


# --- the ranks as a tensor ----------------------------------------------------------------------


def test_the_ranks_as_a_tensor() -> None:
    """As in `mesh` of torch's DeviceMesh, which packages read from ``param.device_mesh``."""
    whole = torch.arange(24, dtype=torch.int).view(SHAPE)
    with torch.device("meta"):
        found = {names: cube(17)[names].mesh for names in (NAMES, NAMES[1:], NAMES[2:])}
    expected = {NAMES: whole, NAMES[1:]: whole[1], NAMES[2:]: whole[1, 1]}
    for names, ranks in found.items():
        torch.testing.assert_close(ranks, expected[names], rtol=0, atol=0)


# --- what a mesh is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "given", "ranks"),
    [
        ((3,), (2, 0, 1), (0, 1, 2)),
        ((2, 2), (3, 2, 1, 0), (0, 1, 2, 3)),
        ((2, 2), (1, 3, 0, 2), (0, 2, 1, 3)),  # Each axis ascends.
        ((2, 2), (0, 3, 1, 2), (0, 3, 1, 2)),  # Replicas may have any order.
        ((2, 2), (2, 1, 3, 0), (0, 3, 1, 2)),
        ((2, 1, 2), (1, 2, 0, 3), (0, 3, 1, 2)),
    ],
)
def test_ranks_have_the_order_of_process_groups(
    shape: tuple[int, ...], given: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    assert plain(shape, given).ranks == ranks


def test_ranks_of_which_each_group_has_another_order_are_refused() -> None:
    with pytest.raises(
        MeshError, match=r"ranks \[3, 1\] along axis 1, and at another place \[0, 2"
    ):
        plain((2, 2), (3, 1, 0, 2))


def test_meshes_are_equal_by_what_they_arrange() -> None:
    mesh = plain(names=("a", "b"))
    assert mesh == DeviceMesh("cpu", (2, 2), (0, 1, 2, 3), ("a", "b"), 0, backend=object())
    assert hash(mesh) == hash(plain(names=("a", "b")))
    others = [
        plain(names=("a", "c")),
        plain(),
        plain((4,)),
        plain(ranks=(0, 2, 1, 3), names=("a", "b")),
        DeviceMesh("cuda", (2, 2), (0, 1, 2, 3), ("a", "b"), 0),
    ]
    for other in others:
        assert mesh != other


def test_a_mesh_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        plain().rank = 1  # type: ignore[misc]


def test_a_number_is_no_shape() -> None:
    with pytest.raises(MeshError, match=r"mesh_shape .* got 4\. Write \(4,\)"):
        init_device_mesh("cpu", 4)  # type: ignore[arg-type]
    for given in (None, 4.0, torch.tensor(4), np.int64(4)):
        wrong: typing.Any = given
        with pytest.raises(MeshError, match=r"mesh_shape has the size of each axis, got"):
            init_device_mesh("cpu", wrong)


def test_a_device_is_no_name_of_a_device_type() -> None:
    with pytest.raises(MeshError, match=r"a name such as 'cpu' .* got device\(type='cpu'\)"):
        init_device_mesh(torch.device("cpu"), (1,))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.xpu.is_available(), reason="There is one.")
def test_a_device_type_without_devices_is_refused() -> None:
    with pytest.raises(
        MeshError, match=r"no device of type 'xpu' can be used here: torch .* 'cpu'"
    ):
        init_device_mesh("xpu", (1,))


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_a_shape_that_does_not_fit_its_ranks_is_refused(ranks: tuple[int, ...]) -> None:
    message = rf"a mesh of shape \(2, 2\) needs 4 ranks, got {len(ranks)}\."
    with pytest.raises(MeshError, match=message):
        plain((2, 2), ranks=ranks)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("a", "a"), ()])
def test_names_that_do_not_name_each_axis_once_are_refused(names: typing.Any) -> None:
    with pytest.raises(MeshError, match="must be 2 different names, one per axis of shape"):
        plain((2, 2), names=names)
