"""`ShardedTensor` against the tensor that it is a piece of."""

from __future__ import annotations

import copy
import math
import os
import pickle
import typing
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import PARAMETER_SHAPES
from reference import assert_nothing_wrong, make_mesh, whole_and_sharded
from shardkit import ShardedTensor, ShardedTensorError, fully_shard, init_device_mesh
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MESHES = ((1,), (2,), (3,), (4,), (2, 2))


def on_every_mesh(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize a test over meshes."""
    return pytest.mark.parametrize("mesh_shape", MESHES, ids=str)(test)


def run_on(
    spawn: Spawn, fn: Callable[..., object], mesh_shape: tuple[int, ...], *args: object
) -> list[typing.Any]:
    """Run ``fn(mesh_shape, *args)`` on the ranks of a mesh."""
    return spawn(fn, math.prod(mesh_shape), mesh_shape, *args)


# --- dtypes that no engine sends ------------------------------------------------------------------


class Coded(nn.Module):
    """A frozen weight in a dtype of its own, and a layer that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(33).reshape(3, 11).to(dtype), requires_grad=False)
        self.layer = nn.Linear(11, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Add the codes to the input."""
        output: Tensor = self.layer(x + self.codes.float())
        return output


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_every_dtype_is_gathered(num_ranks: int, shared: str) -> None:
    with mock.patch.dict(os.environ, {"SHARDKIT_SHARED_MEMORY": shared}):
        for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn, torch.bool):
            plain = Coded(dtype)
            model: typing.Any = fully_shard(copy.deepcopy(plain), make_mesh((num_ranks,)))
            x = torch.ones(11)
            output = model(x)
            torch.testing.assert_close(output, plain(x), rtol=0, atol=0)
            output.sum().backward()
            whole = model.codes.full_tensor()
            assert torch.equal(whole.view(torch.uint8), plain.codes.view(torch.uint8)), dtype
            assert torch.equal(model.codes[1].float(), plain.codes[1].float()), dtype


# --- complex numbers ------------------------------------------------------------------------------

COMPLEX_USES: dict[str, Callable[[Tensor], Tensor]] = {
    "times its conjugate": lambda z: z * z.conj(),
    "a row of the conjugate": lambda z: z.conj()[1] * 2,
    "the conjugate of a row": lambda z: z[1].conj() * 2,
    "adjoint": lambda z: z @ z.mH,
    "sum of the conjugate": lambda z: z.conj().sum(),
    "square": lambda z: z**2,
    "pseudoinverse": torch.linalg.pinv,
    "pseudoinverse of a view": lambda z: torch.linalg.pinv(z.T),
    "to real": torch.fft.hfft,
    "norm": lambda z: torch.linalg.vector_norm(z, dtype=torch.complex128),
}


def fill(values: Tensor, model: nn.Module) -> None:
    next(model.parameters()).copy_(values)


@on_ranks(3)
def test_conjugates_are_those_of_the_whole() -> None:
    values = torch.randn(4, 3, dtype=torch.complex128)
    plain, model = whole_and_sharded((3,), {"z": (4, 3)}, torch.complex128, partial(fill, values))
    whole, sharded = plain.z, typing.cast("typing.Any", model.z)
    for name, use in COMPLEX_USES.items():
        whole.grad = sharded.grad = None
        expected, found = use(whole), use(sharded)
        for result in (expected, found):
            slopes = torch.arange(1.0, result.numel() + 1).view(result.shape)
            (result.abs() ** 2 * slopes).sum().backward()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert found.dtype == expected.dtype, name
        torch.testing.assert_close(found, expected, msg=name)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, msg=name)


class Conjugated(nn.Module):
    """A complex product, for which autograd gives the gradient as a view of its conjugate."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.z.conj()).imag.sum()


@on_ranks(2)
def test_views_of_conjugates_are_written_as_their_values() -> None:
    values = torch.randn(4, 3, dtype=torch.complex128)
    model = fully_shard(Conjugated(values.conj()), mesh=make_mesh((2,)))
    assert torch.equal(model.z.full_tensor(), values.conj())
    with torch.no_grad():
        model.z.copy_((2 * values).conj())
    assert torch.equal(model.z.full_tensor(), 2 * values.conj())
    model.load_state_dict({"z": (3 * values).conj()})
    assert torch.equal(model.z.full_tensor(), 3 * values.conj())


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_gradients_may_be_views_of_conjugates(num_ranks: int) -> None:
    values, x = torch.randn(2, 4, 3, dtype=torch.complex128)
    plain = Conjugated(values.clone())
    model = fully_shard(copy.deepcopy(plain), mesh=make_mesh((num_ranks,)))
    for trained in (plain, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        trained(x.T).backward()
        assert trained is model or trained.z.grad.is_conj()
        optimizer.step()
    torch.testing.assert_close(model.z.full_tensor(), plain.z.detach())


# --- beside sparse matrices -----------------------------------------------------------------------


SPARSE_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda p, s: p + s,
    "product": lambda p, s: p * s,
    "product of the other": lambda p, s: s * p,
    "sum of lists": lambda p, s: torch._foreach_add([p], [s])[0],  # noqa: SLF001
    "update": lambda p, s: p.add_(s, alpha=-0.5),
    "update of a list": lambda p, s: (torch._foreach_add_([p], [s]), p)[1],
    "update of a copy": lambda p, s: torch.zeros_like(p).add_(s),
    "out": lambda p, s: torch.add(p, s, out=p),
}


@on_ranks(3)
def test_sparse_operands_are_those_of_the_whole() -> None:
    values = torch.randn(4, 3)
    sparse = torch.randn(4, 3).relu().to_sparse()
    for name, use in SPARSE_USES.items():
        plain, model = whole_and_sharded((3,), {"p": (4, 3)}, torch.float32, partial(fill, values))
        whole, sharded = next(plain.parameters()), next(model.parameters())
        with torch.no_grad():
            expected, found = use(whole, sparse), use(sharded, sparse)
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert found.layout is expected.layout, name
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), msg=name)
        torch.testing.assert_close(sharded.full_tensor(), whole.detach(), msg=name)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@on_ranks(2)
def test_a_sparse_matrix_times_a_sharded_one_has_the_gradient_of_the_whole(reduce: str) -> None:
    whole = torch.randn(5, 3, dtype=torch.float64)
    _, model = whole_and_sharded((2,), {"p": (5, 3)}, torch.float64, partial(fill, whole))
    sharded = next(model.parameters())
    entries = torch.tensor([[0.0, 2.0, 0.0, 0.5, 0.0], [1.0, 0.0, 3.0, 0.0, 4.0]]).double()
    slopes = torch.arange(6.0).view(2, 3)
    for each in (whole.requires_grad_(), sharded):
        product = torch.sparse.mm(entries.to_sparse_csr(), each, reduce)
        (product * slopes).sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


# --- gradients that users set ---------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_backward_adds_to_a_whole_gradient_that_was_set(num_ranks: int) -> None:
    plain, model = whole_and_sharded((num_ranks,))
    slopes = plain.draw_slopes(torch.Generator().manual_seed(0))
    for each in (plain, model):
        for param in list(each.parameters())[::2]:
            param.grad = torch.ones(param.shape)
        each(slopes).backward()
    for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        assert isinstance(sharded.grad, ShardedTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), param.grad)


# --- data movement ------------------------------------------------------------------------------


def gathering_inverts_sharding(mesh_shape: tuple[int, ...]) -> list[bool]:
    plain, sharded = whole_and_sharded(mesh_shape)
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return [torch.equal(piece.detach().full_tensor(), whole) for whole, piece in pairs]


@on_every_mesh
def test_full_tensor_inverts_sharding(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    assert run_on(spawn, gathering_inverts_sharding, mesh_shape) == [
        [True] * len(PARAMETER_SHAPES)
    ] * math.prod(mesh_shape)


def local_pieces(mesh_shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return each whole parameter, flat, and this rank's piece."""
    plain, sharded = whole_and_sharded(mesh_shape)
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    return [(whole.detach().view(-1), piece.detach().to_local()) for whole, piece in pairs]


@on_every_mesh
def test_pieces_tile_the_flat_parameter_in_rank_order(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    by_rank = run_on(spawn, local_pieces, mesh_shape)
    shard_size = mesh_shape[-1]
    for first in range(0, len(by_rank), shard_size):  # Each replica by itself.
        for index in range(len(PARAMETER_SHAPES)):
            whole = by_rank[first][index][0]
            pieces = [by_rank[first + i][index][1] for i in range(shard_size)]
            assert all(piece.ndim == 1 for piece in pieces)
            assert torch.equal(torch.cat(pieces), whole)


def metadata(mesh_shape: tuple[int, ...]) -> None:
    plain, sharded = whole_and_sharded(mesh_shape)
    for whole, piece in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(piece, ShardedTensor)
        assert isinstance(piece, nn.Parameter)
        assert piece.is_leaf
        assert piece.requires_grad
        assert piece.shape == whole.shape
        assert piece.numel() == whole.numel()
        assert piece.dtype == whole.dtype
        assert piece.device == whole.device
        assert tuple(piece.device_mesh.shape) == tuple(mesh_shape)
        assert len(piece.placements) == len(mesh_shape)
        assert "shape" in repr(piece)


@on_every_mesh
def test_metadata_is_global(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    run_on(spawn, metadata, mesh_shape)


@on_ranks(2)
def test_the_mesh_that_fully_shard_makes_is_the_one_without_names() -> None:
    """By the names of a mesh packages tell sharding from tensor parallelism."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0])
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    meshes = [param.device_mesh for param in model.parameters()]
    assert meshes[0].mesh_dim_names is None
    assert meshes == [meshes[-1]] * 4


EMPTY_SHAPES = {"matrix": (7, 13), "empty": (0,), "rows": (0, 4), "columns": (3, 0)}


def train_with_empty_parameters(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    plain, sharded = whole_and_sharded(mesh_shape, EMPTY_SHAPES)
    sharded({name: torch.ones(shape) for name, shape in EMPTY_SHAPES.items()}).backward()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    optimizer.step()
    for whole, piece in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(piece.detach().full_tensor(), whole - 1.0)
    return [tuple(piece.full_tensor().shape) for piece in sharded.parameters()]


@pytest.mark.parametrize("mesh_shape", [(2,), (4,)], ids=str)
def test_parameters_without_elements_are_sharded_and_trained(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    world_size = math.prod(mesh_shape)
    assert (
        run_on(spawn, train_with_empty_parameters, mesh_shape)
        == [list(EMPTY_SHAPES.values())] * world_size
    )


@on_ranks(2)
def test_unshard_and_reshard_by_hand() -> None:
    plain, sharded = whole_and_sharded((2,))
    for _ in range(2):
        handle = sharded.unshard(async_op=True)
        handle.wait()
        for whole, unsharded in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert not isinstance(unsharded, ShardedTensor)
            assert torch.equal(unsharded, whole)
        sharded.reshard()
        assert all(isinstance(parameter, ShardedTensor) for parameter in sharded.parameters())
        sharded.unshard()
        assert torch.equal(sharded.matrix, plain.matrix)
        sharded.reshard()


COLLECTIVES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce, async": partial(dist.all_reduce, async_op=True),
    "broadcast": partial(dist.broadcast, src=0),
    "reduce": partial(dist.reduce, dst=0),
    "recv": partial(dist.recv, src=0),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [torch.ones(t.shape, dtype=t.dtype)] * 2),
    "functional all_reduce": lambda t: torch.ops._c10d_functional.all_reduce_(  # noqa: SLF001
        t, "sum", dist.group.WORLD.group_name
    ),
    "functional broadcast": lambda t: torch.ops._c10d_functional.broadcast_(  # noqa: SLF001
        t, 0, dist.group.WORLD.group_name
    ),
}


@on_ranks(2)
def test_collectives_of_users_do_not_write_into_sharded_tensors() -> None:
    """They would write into copies, as each rank has a piece."""
    plain, sharded = whole_and_sharded((2,))
    weight = sharded.matrix.detach()
    for name, write in COLLECTIVES.items():
        for target in (weight, sharded.matrix.data, weight[0], weight.t()):
            with pytest.raises(ShardedTensorError, match="a collective writes tensors in place"):
                write(target)
        assert torch.equal(weight.full_tensor(), plain.matrix), name
    wholes = [torch.empty_like(plain.matrix) for _ in range(2)]
    dist.all_gather(wholes, weight)
    assert all(torch.equal(whole, plain.matrix) for whole in wholes)
    double = plain.matrix.detach().clone()
    dist.all_reduce(double)
    weight.copy_(double)
    assert torch.equal(weight.full_tensor(), 2 * plain.matrix)


@on_ranks(2)
def test_one_rank_alone_does_not_gather_what_it_sends() -> None:
    """The others would not take part, and all would wait."""
    plain, sharded = whole_and_sharded((2,))
    weight = sharded.matrix.detach()
    if dist.get_rank() == 0:
        for target in (weight, weight[0]):
            for send in (dist.send, dist.isend):
                with pytest.raises(ShardedTensorError, match=r"'matrix' .*gathering takes all ran"):
                    send(target, 1)
    received = torch.empty_like(plain.matrix)
    whole = weight.full_tensor()
    dist.send(whole, 1) if dist.get_rank() == 0 else dist.recv(received, 0)
    assert dist.get_rank() == 0 or torch.equal(received, plain.matrix)


@on_ranks(2)
def test_lists_of_collectives_hold_no_sharded_tensors() -> None:
    """No dispatch sees them there, and their memory ended the process; gather filled one piece."""
    plain, sharded = whole_and_sharded((2,))
    whole, weight = plain.matrix.detach(), sharded.matrix.detach()
    is_first = dist.get_rank() == 0
    for target in (weight, weight[0].expand_as(whole)):
        lists = [whole, target]
        with pytest.raises(ShardedTensorError, match="input_list of a collective has a sharded"):
            dist.reduce_scatter(torch.empty_like(whole), lists)
        if is_first:
            with pytest.raises(ShardedTensorError, match="scatter_list of a collective has a shar"):
                dist.scatter(torch.empty_like(whole), lists)
            with pytest.raises(ShardedTensorError, match="gather_list of a collective has a shard"):
                dist.gather(whole, lists)
    gathered = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(gathered, whole)  # Each rank fills its piece.
    assert all(torch.equal(each.full_tensor(), whole) for each in gathered)
    received, values = torch.empty_like(whole), [weight.full_tensor()] * 2
    dist.scatter(received, values if is_first else None)
    assert torch.equal(received, whole)


@on_ranks(2)
def test_copies_are_independent_and_detached_tensors_share_memory() -> None:
    plain, sharded = whole_and_sharded((2,))
    original = sharded.matrix
    with torch.no_grad():
        copies = [
            original.clone(),
            copy.deepcopy(original),
            torch.zeros_like(original).copy_(original),
        ]
        original.zero_()
        for each in copies:
            assert isinstance(each, ShardedTensor)
            assert torch.equal(each.full_tensor(), plain.matrix)
            assert each.to_local().data_ptr() != original.to_local().data_ptr()
        original.copy_(
            plain.matrix
        )  # A plain tensor of the global shape: every rank takes its piece.
        assert torch.equal(original.full_tensor(), plain.matrix)
        assert original.detach().to_local().data_ptr() == original.to_local().data_ptr()


def doubled(tensor: Tensor) -> Tensor:
    return tensor.detach() * 2


def give_back(parameter: Tensor) -> list[Tensor]:
    """Exchange the values, as for an evaluation of averages, and give them back."""
    kept = parameter.data
    parameter.data = doubled(parameter)
    between = parameter.detach().clone()
    parameter.data = kept
    return [between, parameter]


def keep_views(parameter: Tensor) -> list[Tensor]:
    """Keep views of the data, of other shapes and of the same."""
    data = parameter.data
    views = [data.flatten(), data[1:], data.t(), data.view(data.shape), data.data, data.data[:]]
    parameter.data = doubled(parameter)
    parameter.data.add_(1)
    views[0].mul_(3)
    return [*views, parameter]


def write_before_and_after(parameter: Tensor) -> list[Tensor]:
    """Write to kept data while it is the parameter's, and later."""
    first, second = parameter.data, parameter.data
    first.add_(1)
    before = parameter.detach().clone()
    parameter.data = doubled(parameter)
    torch._foreach_mul_([first], 3)
    later = parameter.data
    later.sub_(1)
    return [before, first, second, later, parameter]


def set_itself(parameter: Tensor) -> list[Tensor]:
    """Set the same memory again, which changes nothing and separates nothing."""
    data = parameter.data
    parameter.data = parameter.data
    parameter.data = data.to("cpu")
    parameter.data *= 2
    data.add_(1)
    return [data, parameter]


def change_dtype(parameter: Tensor) -> list[Tensor]:
    kept = parameter.data
    parameter.data = doubled(parameter).double()
    kept.add_(1)
    kept.data = kept.double()
    return [kept, parameter]


def set_data_of_data(parameter: Tensor) -> list[Tensor]:
    """Set the data of what is the parameter's data: that leaves the parameter alone."""
    first, second = parameter.data, parameter.data
    first.data = doubled(parameter)
    second.add_(1)
    parameter.data = doubled(parameter)
    return [first, second, parameter]


def set_in_inference_mode(parameter: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        kept = parameter.data
        parameter.data = doubled(parameter)
    kept.add_(1)
    return [kept, parameter]


def set_gradients(parameter: Tensor) -> list[Tensor]:
    parameter.square().sum().backward()
    assert parameter.grad is not None
    kept = parameter.grad.data
    parameter.grad.data = doubled(parameter.grad)
    kept.add_(1)
    return [kept, parameter.grad]


def read_often(parameter: Tensor) -> list[Tensor]:
    """Read the data as optimizers do, in each step, and keep some of it."""
    kept = [data for i in range(200) if (data := parameter.data) is not None and i % 40 == 0]
    parameter.data = doubled(parameter)
    return [*kept, parameter]


DATA_USES = (
    *(give_back, keep_views, write_before_and_after, set_itself, change_dtype, set_data_of_data),
    *(set_in_inference_mode, set_gradients, read_often),
)


@pytest.mark.parametrize("use", DATA_USES, ids=lambda use: use.__name__)
@on_ranks(2)
def test_what_data_returned_keeps_its_values(use: Callable[[Tensor], list[Tensor]]) -> None:
    """As that of plain tensors does, when `data` of the parameter is set."""
    plain, sharded = whole_and_sharded((2,))
    address = sharded.matrix.to_local().data_ptr()
    found: list[typing.Any] = use(sharded.matrix)
    for index, (value, whole) in enumerate(zip(found, use(plain.matrix), strict=True)):
        assert torch.equal(value.detach().full_tensor(), whole), f"result {index}"
    assert (sharded.matrix.to_local().data_ptr() == address) == (use is not change_dtype)


@on_ranks(2)
def test_data_costs_memory_only_while_it_is_kept() -> None:
    _, sharded = whole_and_sharded((2,))
    matrix = sharded.matrix
    piece = matrix.detach().to_local()
    for _ in range(200):
        matrix.data.add_(1)
    assert len(matrix.data_refs) < 40
    matrix.data = matrix.data * 2
    assert matrix.detach().to_local() is piece
    assert "data_refs" not in matrix.__dict__
    kept = matrix.data
    assert kept.to_local() is piece
    with pytest.raises(ShardedTensorError, match="cannot take values of shape"):
        matrix.data = torch.zeros(1)
    assert kept.to_local() is piece
    assert len(pickle.dumps(kept)) < 100_000
    torch.utils.swap_tensors(matrix, nn.Parameter(kept))  # No weak reference forbids it.


@on_ranks(2)
def test_a_parameter_that_was_swapped_with_a_plain_one_is_sharded_again() -> None:
    plain, sharded = nn.Linear(3, 3), fully_shard(nn.Linear(3, 3))
    torch.utils.swap_tensors(sharded.weight, nn.Parameter(plain.weight.detach().clone()))
    sharded.bias.data.copy_(plain.bias.data)
    x = torch.ones(1, 3)
    assert torch.equal(sharded(x), plain(x))
    assert all(isinstance(param, ShardedTensor) for param in sharded.parameters())


@on_ranks(2)
def test_views_in_inference_mode_are_those_of_other_modes() -> None:
    """Of ordinary tensors, as torch's: a state dict of there is loaded and written elsewhere."""
    plain, sharded = whole_and_sharded((2,))
    with torch.inference_mode():
        matrix = sharded.matrix
        views = [matrix.detach(), matrix.data, matrix[1], sharded.state_dict()["matrix"]]
        inside = matrix.clone().detach()
    assert not any(each.is_inference() for each in views)
    assert inside.is_inference()
    for index, whole in enumerate((plain.matrix, plain.matrix, plain.matrix[1], plain.matrix)):
        found: typing.Any = views[index]
        assert torch.equal(found.full_tensor(), whole)
    with torch.no_grad():
        views[0].zero_()
        views[2].fill_(1)
    assert torch.equal(sharded.matrix.full_tensor()[1], torch.ones_like(plain.matrix[1]))
    assert not sharded.matrix.full_tensor()[0].any()


@on_ranks(2)
def test_conversions_in_inference_mode_are_those_of_other_modes() -> None:
    """Autograd, which splits ``to`` and ``reshape`` into other operators, is not there then."""
    plain, sharded = whole_and_sharded((2,))
    other = torch.zeros(1, dtype=torch.float64)
    conversions: tuple[Callable[[typing.Any], typing.Any], ...] = (
        *(lambda t: t.double(), lambda t: t.half(), lambda t: t.cpu(), lambda t: t.to(other)),
        *(lambda t: t.t().reshape(-1), lambda t: t[1].double(), lambda t: t.t().half()),
    )
    for number, convert in enumerate(conversions):
        expected = convert(plain.matrix)
        with torch.inference_mode():
            converted = convert(sharded.matrix)
            found = converted.full_tensor() if isinstance(converted, ShardedTensor) else converted
        assert found.dtype == expected.dtype, number
        assert torch.equal(found, expected), number


@on_ranks(2)
def test_copies_have_gradients_where_torch_copies_them() -> None:
    """Of tensors, and not of parameters."""
    plain, sharded = whole_and_sharded((2,))
    for parameter in (plain.matrix, sharded.matrix):
        parameter.square().sum().backward()
        assert copy.deepcopy(parameter).grad is None
        tensor = parameter.detach().clone().requires_grad_()
        tensor.grad = parameter.grad
        assert copy.deepcopy(tensor).grad is not None
    with pytest.raises(ShardedTensorError, match=r"cannot be deep-copied.*Copy its detach\(\)"):
        copy.deepcopy(sharded.matrix * 2)


@on_ranks(2)
def test_shallow_copies_share_memory() -> None:
    plain, sharded = whole_and_sharded((2,))
    for original in (plain.matrix, sharded.matrix, plain.matrix * 2, sharded.matrix * 2):
        original.note = "kept"
        copied = copy.copy(original)
        assert isinstance(copied, nn.Parameter) is isinstance(original, nn.Parameter)
        assert isinstance(copied, ShardedTensor) is isinstance(original, ShardedTensor)
        assert copied.is_leaf
        assert copied.requires_grad
        assert copied.note == "kept"
        with torch.no_grad():
            copied.fill_(3)
            assert original.sum() == 3 * original.numel()


def convert_module_dtype(mesh_shape: tuple[int, ...]) -> None:
    plain, sharded = whole_and_sharded(mesh_shape)
    plain.to(torch.bfloat16)
    sharded.to(torch.bfloat16)
    for whole, piece in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert piece.dtype == piece.to_local().dtype == torch.bfloat16
        assert torch.equal(piece.detach().full_tensor(), whole)
    slopes = plain.draw_slopes(torch.Generator())
    loss, expected = sharded(slopes), plain(slopes)
    loss.backward()
    assert torch.equal(loss, expected)
    for name, piece in sharded.named_parameters():
        assert torch.equal(piece.grad.full_tensor(), slopes[name])


@pytest.mark.parametrize("mesh_shape", [(2,), (4,)], ids=str)
def test_a_sharded_module_can_change_dtype(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    run_on(spawn, convert_module_dtype, mesh_shape)


def random_fill(mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    _, sharded = whole_and_sharded(mesh_shape)
    torch.manual_seed(3)
    nn.init.normal_(sharded.matrix)
    nn.init.uniform_(sharded.vector)
    nn.init.kaiming_uniform_(sharded.cube)
    trunc = nn.init.trunc_normal_(torch.empty_like(sharded.matrix))
    orthogonal = nn.init.orthogonal_(torch.empty_like(sharded.matrix))
    with torch.no_grad():
        noise = torch.randn_like(sharded.matrix)
    filled = {
        **dict(sharded.named_parameters()),
        "noise": noise,
        "trunc": trunc,
        "orthogonal": orthogonal,
    }
    result = {name: piece.detach().full_tensor() for name, piece in filled.items()}
    return {**result, "random state": torch.get_rng_state()}


def test_random_fills_are_those_of_the_full_tensor_at_every_world_size(spawn: Spawn) -> None:
    """Equal on all meshes; one stream repeated on every shard is not."""
    results = [result for mesh_shape in MESHES for result in run_on(spawn, random_fill, mesh_shape)]
    torch.manual_seed(3)
    assert torch.equal(results[0]["matrix"], nn.init.normal_(torch.empty(7, 13)))
    for result in results[1:]:
        for name, expected in results[0].items():
            assert torch.equal(result[name], expected), name


# --- operators ----------------------------------------------------------------------------------

# Elementwise operators run on the pieces alone and so are exact.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda p, q: p + q,
    "scaled add": lambda p, q: torch.add(p, q, alpha=0.3),
    "multiply": lambda p, q: p * q * 2.5,
    "divide": lambda p, q: p / (q.abs() + 1),
    "power": lambda p, q: p**2,  # noqa: ARG005
    "square root": lambda p, q: p.abs().sqrt(),  # noqa: ARG005
    "compare": lambda p, q: p > q,
    "where": lambda p, q: torch.where(p > 0, p, q),
    "lerp": lambda p, q: p.lerp(q, 0.25),
    "clamp": lambda p, q: p.clamp(-0.5, 0.5),  # noqa: ARG005
    "maximum": torch.maximum,
    "sign": lambda p, q: p.sign(),  # noqa: ARG005
    "addcmul": lambda p, q: p.addcmul(q, q, value=0.5),
    "addcdiv": lambda p, q: p.addcdiv(q, q.abs() + 1, value=0.5),
    "isnan": lambda p, q: (p / p.relu()).isnan(),  # noqa: ARG005
    "cast": lambda p, q: p.to(torch.float64),  # noqa: ARG005
    "in place": lambda p, q: p.clone().mul_(2).add_(q).div_(3).neg_(),
    "fill": lambda p, q: p.clone().fill_(3.0) + q,
    "scalar tensor": lambda p, q: p * torch.tensor(3.0) - q,
    "foreach": lambda p, q: torch._foreach_add([p], [q], alpha=2)[0],  # noqa: SLF001
}


def wrong_elementwise(mesh_shape: tuple[int, ...]) -> list[str]:
    """Return the operators whose result is not that of the whole tensors."""
    plain, sharded = whole_and_sharded(mesh_shape)
    wrong = []
    with torch.no_grad():
        for name, op in ELEMENTWISE.items():
            for (key, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                expected, result = op(p, p * 0.5 - 0.1), op(q, q * 0.5 - 0.1)
                if result.dtype != expected.dtype or not torch.equal(
                    result.full_tensor().nan_to_num(), expected.nan_to_num()
                ):
                    wrong.append(f"{name} of {key}")
    return wrong


@on_every_mesh
def test_elementwise_operators_are_exact(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    assert_nothing_wrong(run_on(spawn, wrong_elementwise, mesh_shape))


# Sums are taken in another order: relative to the result, a few units in the last place of fp32.
REDUCTION_TOLERANCE = 1e-6

REDUCTIONS: dict[str, Callable[[Tensor], typing.Any]] = {
    "sum": Tensor.sum,
    "mean": Tensor.mean,
    "product": Tensor.prod,
    "max": Tensor.max,
    "min": Tensor.min,
    "amax": Tensor.amax,
    "amin": Tensor.amin,
    "largest size": lambda p: p.abs().max(),
    "any": lambda p: (p > 2).any(),
    "all": lambda p: (p > -1).all(),
    "count": torch.count_nonzero,
    "any nan": lambda p: p.isnan().any(),
    "all finite": lambda p: p.isfinite().all(),
    "norm": Tensor.norm,
    "norm 1": lambda p: p.norm(1),
    "norm inf": lambda p: p.norm(math.inf),
    "norm -inf": lambda p: torch.linalg.vector_norm(p, -math.inf),
    "norm 0": lambda p: torch.linalg.vector_norm(p, 0),
    "norm 3": lambda p: torch.linalg.vector_norm(p, 3),
    "norm -1": lambda p: torch.linalg.vector_norm(p, -1),
    "norm in fp64": lambda p: torch.linalg.vector_norm(p, 2, dtype=torch.float64),
    "foreach norm": lambda p: torch._foreach_norm([p, p * 2])[1],  # noqa: SLF001
    "foreach norm inf": lambda p: torch._foreach_norm([p, p * 2], math.inf)[1],  # noqa: SLF001
    "sum over all dims": lambda p: p.sum(dim=tuple(range(p.ndim))),
    "max over all dims": lambda p: p.amax(dim=tuple(range(p.ndim))),
    "equal": lambda p: torch.equal(p, p.clone()),
    "not equal": lambda p: torch.equal(p, p + (p == p.max())),
    "close": lambda p: torch.allclose(p, p * (1 + 1e-7)),
    "not close": lambda p: torch.allclose(p, p + (p == p.max()) * 0.1),
    "close enough": lambda p: torch.allclose(p, p + (p == p.max()) * 0.1, atol=0.2),
    "shape not equal": lambda p: torch.equal(p, p.new_zeros(1, 9)),
}


def wrong_reductions(
    mesh_shape: tuple[int, ...],
    names: Iterable[str] = tuple(REDUCTIONS),
    change: Callable[[nn.Module], object] = lambda model: None,  # noqa: ARG005
) -> list[str]:
    """Return what is wrong with reductions of sharded tensors: all of it, not the first."""
    plain, sharded = whole_and_sharded(mesh_shape, change=change)
    wrong = []
    with torch.no_grad():
        for name in names:
            for (key, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                wrong += [f"{name} of {key}: {why}" for why in what_differs(REDUCTIONS[name], q, p)]
    return wrong


def what_differs(op: Callable[[Tensor], typing.Any], sharded: Tensor, whole: Tensor) -> list[str]:
    """Compare results of a reduction: kind, dtype, shape and value, where NaN equals NaN."""
    expected = op(whole)
    try:
        result = op(sharded)
    except (RuntimeError, ValueError, TypeError) as error:
        return [f"raised {type(error).__name__}: {error}"]
    if not isinstance(expected, Tensor):
        return [] if result is expected else [f"{result} is not {expected}"]
    if isinstance(result, ShardedTensor):
        return ["the result is sharded"]
    if (result.dtype, result.shape) != (expected.dtype, expected.shape):
        return [f"{result.dtype} {result.shape}, not {expected.dtype} {expected.shape}"]
    tolerance = REDUCTION_TOLERANCE * max(1.0, expected.double().abs().nan_to_num().item())
    close = torch.allclose(
        result.double(), expected.double(), rtol=0, atol=tolerance, equal_nan=True
    )
    return [] if close else [f"{result.item()} is not {expected.item()}"]


@on_every_mesh
def test_reductions_are_those_of_the_whole_tensor(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    """Also of parameters smaller than the number of ranks, of which some ranks hold nothing."""
    assert_nothing_wrong(run_on(spawn, wrong_reductions, mesh_shape))


@on_ranks(2)
def test_a_list_of_norms_refuses_integers_on_all_ranks() -> None:
    """The second rank holds nothing, so nothing would raise there."""
    _, sharded = whole_and_sharded((2,), {"one": (1,)})
    one = sharded.one.detach()
    for tensors in ([one.long()], [one, one > 0], [one.int(), one]):
        with pytest.raises(RuntimeError, match="floating-point or complex numbers"):
            torch._foreach_norm(tensors)  # noqa: SLF001


def put_nan_into_first(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.view(-1)[0] = math.nan


def put_nan_into_last(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.view(-1)[-1] = math.nan


NAN_REDUCTIONS = (
    "sum",
    "max",
    "min",
    "amax",
    "norm",
    "norm inf",
    "norm -inf",
    "foreach norm inf",
    "any nan",
)


@pytest.mark.parametrize("change", [put_nan_into_first, put_nan_into_last])
@pytest.mark.parametrize("mesh_shape", [(2,), (4,)], ids=str)
def test_a_nan_on_one_rank_is_seen_by_all(
    spawn: Spawn, mesh_shape: tuple[int, ...], change: Callable[[nn.Module], object]
) -> None:
    assert_nothing_wrong(run_on(spawn, wrong_reductions, mesh_shape, NAN_REDUCTIONS, change))


def mean_of_large_fp16(mesh_shape: tuple[int, ...]) -> float:
    _, sharded = whole_and_sharded(
        mesh_shape, {"large": (40, 50)}, torch.float16, lambda model: model.large.fill_(100.0)
    )
    return sharded.large.detach().mean().item()


def test_the_mean_of_fp16_does_not_overflow(spawn: Spawn) -> None:
    """The sum, 200,000, is above the largest fp16 number; plain torch sums in fp32."""
    assert run_on(spawn, mean_of_large_fp16, (2,)) == [100.0, 100.0]


def norms_of_bf16(mesh_shape: tuple[int, ...]) -> list[float]:
    """Return the relative error of reductions of bf16 parameters."""
    plain, sharded = whole_and_sharded(mesh_shape, {"large": (40, 50)}, torch.bfloat16)
    p, q = plain.large.detach(), sharded.large.detach()
    return [
        abs(op(q).item() / op(p).item() - 1)
        for op in (Tensor.norm, Tensor.sum, lambda t: t.abs().mean())
    ]


def test_reductions_of_bf16_round_once(spawn: Spawn) -> None:
    """At most one unit in the last place of bf16 off, however many pieces there are."""
    for errors in run_on(spawn, norms_of_bf16, (4,)):
        assert all(error <= 2**-7 for error in errors), errors


def differentiate_full_tensor(mesh_shape: tuple[int, ...]) -> bool:
    plain, sharded = whole_and_sharded(mesh_shape)
    (plain.matrix**2).sum().backward()
    (sharded.matrix.full_tensor() ** 2).sum().backward()
    return torch.equal(sharded.matrix.grad.full_tensor(), plain.matrix.grad)


def test_full_tensor_is_differentiable(spawn: Spawn) -> None:
    assert run_on(spawn, differentiate_full_tensor, (2,)) == [True, True]


def pieces_of_nothing(mesh_shape: tuple[int, ...]) -> list[int]:
    """Return how many elements of each parameter this rank holds."""
    _, sharded = whole_and_sharded(mesh_shape)
    return [parameter.to_local().numel() for parameter in sharded.parameters()]


def test_some_ranks_own_nothing_of_small_parameters(spawn: Spawn) -> None:
    """The tests above mean what they say: there are such ranks."""
    by_rank = run_on(spawn, pieces_of_nothing, (4,))
    for held in zip(*by_rank, strict=True):
        assert sum(held) > 0
    assert any(0 in held for held in by_rank)
