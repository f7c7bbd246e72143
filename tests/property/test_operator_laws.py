"""Laws of operators on sharded tensors: the result is the whole tensor's, wherever cuts fall.

Ranks are threads, so that many shapes, cuts and numbers of ranks are tried.
"""

from __future__ import annotations

import itertools
import threading
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode, TorchDispatchMode

import strategies
from shardkit import ShardedTensor, ShardedTensorError
from threaded_ranks import run_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit._tensor.spec import ShardSpec

# Sums over pieces are taken in another order, of numbers up to some tens.
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
world_sizes = st.integers(1, 4)
shapes = strategies.shapes
first_numels = st.integers(0, 9)
"""Elements of a parameter in front of the one that is looked at: they shift its cuts."""

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], typing.Any]] = {
    "add": lambda p, q: p + q,
    "of a plain one": lambda p, q: q.sub(p, alpha=2),
    "maximum": lambda p, q: torch.maximum(q, p),
    "where": lambda p, q: torch.where(q > 0, p, -1.0),
    "addcmul": lambda p, q: torch.addcmul(q, p, p, value=0.5),
    "compare": lambda p, q: p >= q,
    "clamp": lambda p, q: p.clamp(max=q),
    "lerp": lambda p, q: p.lerp(q, 0.3),
    "atan2": torch.atan2,
    "in double": lambda p, q: p * q.double(),
    "with whole numbers": lambda p, q: p * (q * 3).long(),
    "of whole numbers": lambda p, q: (p * 3).long() + q,
    "close": torch.isclose,
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda p, q: p.add_(q, alpha=0.5),
    "copy_": lambda p, q: p.copy_(q),
    "mul_": lambda p, q: p.mul_(q.double()),
    "out": lambda p, q: torch.mul(p, q, out=p),
    "out of wholes": lambda p, q: torch.add(torch.zeros(p.shape), q, out=p),
    "out of random numbers": lambda p, q: torch.normal(
        q.expand(p.shape), 0.5, generator=torch.Generator().manual_seed(3), out=p
    ),
    "list": lambda p, q: torch._foreach_lerp_([p], [q], 0.25),
    "addcdiv_": lambda p, q: p.addcdiv_(q, q.abs() + 1),
    "masked_fill_": lambda p, q: p.masked_fill_(q > 0, 2.0),
}
REDUCTIONS: dict[str, Callable[..., typing.Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "any": lambda p, **kw: torch.any(p > 0.5, **kw),
    "norm": lambda p, **kw: torch.linalg.vector_norm(p, 3, **kw),
    "std": torch.std,
    "logsumexp": torch.logsumexp,
    "count": lambda p, dim, keepdim: (p > 0).sum(dim, keepdim=keepdim),
}
WHOLES: dict[str, Callable[[Tensor], typing.Any]] = {
    "sort": lambda p: p.flatten().sort(),
    "cumsum": lambda p: p.reshape(-1).cumsum(0),
    "product": lambda p: p.flatten() @ p.flatten(),
    "outer": lambda p: torch.outer(p.view(-1), p.view(-1)),
    "stack": lambda p: torch.stack([p, p * 2]),
    "flip": lambda p: p.flip(tuple(range(p.ndim))),
    "list": lambda p: p.tolist(),
    "std": torch.std,
    "numbers": lambda p: [p.sum(), p.mean(), p.prod(), p.norm(), p.norm(1), torch.count_nonzero(p)],
    "truth": lambda p: [(p > 0).all(), (p == p).any(), p.isnan().any()],  # noqa: PLR0124
    "equal": lambda p: [torch.equal(p, p + 0), torch.allclose(p, p + 1)],
    "norms of lists": lambda p: torch._foreach_norm([p, p * 2], 1),  # noqa: SLF001
    "histogram": lambda p: torch.histc(p, 4, -1, 1),
}


REFUSED = -123456789


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def piece_of(whole: Tensor, spec: ShardSpec) -> ShardedTensor:
    return ShardedTensor(spec.slice_full(whole).clone(), spec)


def as_plain(result: typing.Any) -> typing.Any:
    if isinstance(result, (list, tuple)):
        return [as_plain(item) for item in result]
    return result.full_tensor() if hasattr(result, "full_tensor") else result


def outcome(fn: Callable[[], typing.Any]) -> typing.Any:
    """Return what a call returns, or that it is refused."""
    try:
        return fn()
    except (RuntimeError, IndexError, ValueError):
        return REFUSED


def check(
    world_size: int,
    first: int,
    shape: tuple[int, ...],
    use: Callable[[Tensor], typing.Any],
    whole: Tensor | None = None,
) -> None:
    """Compare a use of a sharded tensor, and what it leaves there, with that of the whole one.

    A use that is refused leaves a sharded tensor as it was. A plain one may be written in part:
    `index_put_` of the CPU writes until it meets the index that is out of bounds.
    """
    whole = numbers(shape, 1) if whole is None else whole

    def on_rank(specs: list[ShardSpec]) -> typing.Any:
        tensor = piece_of(whole, specs[1])
        with torch.no_grad():
            return as_plain(outcome(lambda: use(tensor))), tensor.full_tensor()

    expected_after = whole.clone()
    with torch.no_grad():
        expected = outcome(lambda: use(expected_after))
    if isinstance(expected, int) and expected == REFUSED:
        expected_after = whole
    for result, after in run_ranks(world_size, [(first,), shape], on_rank):
        torch.testing.assert_close(result, as_plain(expected), **TOLERANCES)
        torch.testing.assert_close(after, expected_after, **TOLERANCES)


@st.composite
def operands(draw: st.DrawFn, *, may_enlarge: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a shape, and one that broadcasts with it."""
    shape = draw(shapes)
    other = [size if draw(st.booleans()) else 1 for size in shape]
    other = other[draw(st.integers(0, len(other))) :]
    if may_enlarge and draw(st.booleans()):
        other = [draw(st.integers(1, 3)), *[1] * (len(shape) - len(other)), *other]
    return shape, tuple(other)


@pytest.mark.parametrize("name", ELEMENTWISE)
@settings(max_examples=25)
@given(world_size=world_sizes, first=first_numels, both=operands(may_enlarge=True))
def test_elementwise_operators_with_a_plain_operand(
    name: str, world_size: int, first: int, both: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    other = numbers(both[1], 2)
    check(world_size, first, both[0], lambda p: ELEMENTWISE[name](p, other))


@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=25)
@given(world_size=world_sizes, first=first_numels, both=operands(may_enlarge=False))
def test_writes_of_a_plain_operand(
    name: str, world_size: int, first: int, both: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    other = numbers(both[1], 2)
    check(world_size, first, both[0], lambda p: (WRITES[name](p, other), None)[1])


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=25)
@given(
    world_size=world_sizes, first=first_numels, shape=shapes, keepdim=st.booleans(), data=st.data()
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
def test_reductions_over_some_dims(
    name: str,
    world_size: int,
    first: int,
    shape: tuple[int, ...],
    *,
    keepdim: bool,
    data: st.DataObject,
) -> None:
    every = range(-len(shape), len(shape))
    dims = data.draw(st.lists(st.sampled_from(every or [0]), min_size=1, max_size=3))
    dim = tuple({d % max(len(shape), 1): d for d in dims}.values())
    check(world_size, first, shape, lambda p: REDUCTIONS[name](p, dim=dim, keepdim=keepdim))


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(("shape", "dim"), [((3,), (1,)), ((3, 2), (0, 3)), ((3, 2), (0, 1, -1))])
def test_dims_that_are_missing_or_come_twice_are_refused(
    name: str, shape: tuple[int, ...], dim: tuple[int, ...]
) -> None:
    def use(p: Tensor) -> typing.Any:
        return REDUCTIONS[name](p, dim=dim, keepdim=False)

    assert outcome(lambda: use(numbers(shape, 1))) == REFUSED
    check(2, 3, shape, use)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: torch.linalg.vector_norm(p.long()),
        lambda p: torch.linalg.vector_norm(p, 3, dtype=torch.float16),
    ],
    ids=["of whole numbers", "in a narrow dtype"],
)
def test_norms_that_torch_refuses_are_refused_on_all_ranks(use: Callable[[Tensor], Tensor]) -> None:
    """Also on ranks that have no element to take the norm of."""
    assert outcome(lambda: use(numbers((1,), 1))) == REFUSED
    check(2, 1, (1,), use)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_pieces_are_not_rounded_to_narrow_dtypes(dtype: torch.dtype) -> None:
    """A piece's sum may be too large for the dtype, or lose what the others leave of the sum."""
    whole = torch.tensor([60000.0, 60000.0, 1000.0, 1.5, -60000.0, -60000.0, -1000.0, -0.5])
    check(2, 0, (8,), lambda p: [p.sum(), p.sum(0, keepdim=True)], whole.to(dtype))


@pytest.mark.parametrize("name", WHOLES)
@settings(max_examples=20)
@given(world_size=world_sizes, first=first_numels, shape=shapes)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
def test_operators_on_the_whole(
    name: str, world_size: int, first: int, shape: tuple[int, ...]
) -> None:
    check(world_size, first, shape, WHOLES[name])


DRAWING = threading.Lock()


class Drawing(TorchDispatchMode):
    """Starts torch's generator anew for each random operator on plain tensors.

    Ranks are threads and share it. The operators that sharded tensors run on plain ones are seen.
    """

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        if ShardedTensor in types:
            with self:
                return ShardedTensor.__torch_dispatch__(func, types, args, kwargs)
        with DRAWING:
            torch.manual_seed(3)
            return func(*args, **(kwargs or {}))


def operators_of(selected: Callable[[typing.Any], bool]) -> dict[str, typing.Any]:
    """Return aten's operators without ``out=`` that are selected, by name."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001 - all that there are
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        func = getattr(packet, overload or "default", None)
        if func is not None and not overload.endswith("out") and selected(func):
            found[rest] = func
    return dict(sorted(found.items()))


VALUES: dict[str, typing.Any] = {
    "float": 0.5,
    "int": 2,
    "bool": True,
    "number": 0.5,
    "Optional[int]": 9,
    "Optional[bool]": True,
}
"""Of arguments that have no default, by type."""


def arguments_of(func: typing.Any, tensors: typing.Iterator[typing.Any]) -> list[typing.Any]:
    """Return arguments for an operator, of which tensors and lists come from an iterator."""
    result = []
    for argument in func._schema.arguments:  # noqa: SLF001
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind != "Tensor"):
            break
        result.append(next(tensors) if "Tensor" in kind else VALUES[kind])
    return result


def runs(func: typing.Any, *, lists: bool) -> bool:
    """Whether an operator takes such arguments; those of one device or layout do not."""
    whole = torch.full((2, 2), 0.5)
    tensors = itertools.repeat([whole.clone()] if lists else whole)
    try:
        with torch.inference_mode():
            func(*arguments_of(func, tensors))
    except (RuntimeError, IndexError, KeyError):
        return False
    return True


RANDOM = {
    name: func
    for name, func in operators_of(
        lambda func: torch.Tag.nondeterministic_seeded in func.tags
    ).items()
    if any(str(each.type) == "Tensor" for each in func._schema.arguments)  # noqa: SLF001
    and runs(func, lists=False)
}
LISTS = {
    name: func
    for name, func in operators_of(lambda func: "::_foreach_" in func.name()).items()
    if runs(func, lists=True)
}


def test_random_operators_and_those_on_lists_are_found() -> None:
    assert {"normal.Tensor_float", "_standard_gamma", "dropout", "uniform_"} <= RANDOM.keys()
    assert {"_foreach_norm.Scalar", "_foreach_lerp_.Scalar"} <= LISTS.keys()


@pytest.mark.helpers
@pytest.mark.parametrize("name", RANDOM)
@settings(max_examples=8)
@given(
    world_size=world_sizes,
    first=first_numels,
    shape=shapes,
    kinds=st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_random_operators_draw_as_of_the_whole(
    name: str, world_size: int, first: int, shape: tuple[int, ...], kinds: list[bool]
) -> None:
    """Whichever of the operands are sharded, and whether they read them or draw by their shape."""
    func = RANDOM[name]

    def use(p: Tensor) -> typing.Any:
        plain = numbers(shape, 2).sigmoid()
        tensors = itertools.chain((p if kind else plain for kind in kinds), itertools.repeat(p))
        with torch.inference_mode(), Drawing():
            return func(*arguments_of(func, tensors))

    # Torch notes for the whole process that a mode is on. Ranks that are threads may leave the note
    # behind; then torch 2.9 compiles nothing more. The end of this mode takes the note away.
    with BaseTorchDispatchMode():
        check(world_size, first, shape, use, numbers(shape, 1).sigmoid())


@pytest.mark.helpers
@pytest.mark.parametrize("name", LISTS)
@settings(max_examples=8)
@given(world_size=world_sizes, first=first_numels, shape=shapes, is_first=st.booleans())
def test_operators_on_lists_have_the_results_of_wholes(
    name: str, world_size: int, first: int, shape: tuple[int, ...], *, is_first: bool
) -> None:
    func = LISTS[name]

    def use(p: Tensor) -> typing.Any:
        entries = [p, p * 2] if is_first else [p * 2, p]
        return func(*arguments_of(func, itertools.repeat(entries)))

    check(world_size, first, shape, use)


def index_of(draw: st.DrawFn, size: int) -> typing.Any:
    kinds: list[typing.Any] = [slice(None), slice(1, None, 2), slice(-2, None), [], None]
    if size > 0:
        kinds += [draw(st.integers(-size, size - 1)), [0, size - 1]]
    return draw(st.sampled_from(kinds))


@st.composite
def indices(draw: st.DrawFn) -> tuple[tuple[int, ...], typing.Any]:
    """Draw a shape, and what indexes a tensor of it."""
    shape = draw(shapes)
    count = draw(st.integers(0, len(shape)))
    index = tuple(index_of(draw, size) for size in shape[:count])
    return shape, (..., *index) if draw(st.booleans()) and len(index) == len(shape) else index


@settings(max_examples=150)
@given(world_size=world_sizes, first=first_numels, both=indices(), is_written=st.booleans())
def test_indexing_reads_and_writes_as_in_the_whole(
    world_size: int,
    first: int,
    both: tuple[tuple[int, ...], typing.Any],
    *,
    is_written: bool,
) -> None:
    def use(p: Tensor) -> typing.Any:
        if is_written:
            p[both[1]] = 7.0
            return p.sum()
        shown = p[both[1]]
        return [shown + 1, shown, list(shown.shape)]

    check(world_size, first, both[0], use)


class Twice(torch.autograd.Function):
    """A user's operator: what it calls is not recorded."""

    @staticmethod
    def forward(ctx: typing.Any, p: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(q)
        return 2 * torch.dot(p.flatten(), q.flatten())

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor, None]:
        (q,) = ctx.saved_tensors
        return 2 * grad * q, None


class Fused(torch.autograd.Function):
    """As fused losses do: the gradient is filled in forward, in what is made like the weight."""

    @staticmethod
    def forward(ctx: typing.Any, p: Tensor, q: Tensor) -> Tensor:
        made = torch.zeros_like(p)
        made += q
        ctx.save_for_backward(made)
        return (p * q).sum()

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


class FilledInBackward(torch.autograd.Function):
    """As `Fused`, but the gradient is filled in backward."""

    @staticmethod
    def forward(ctx: typing.Any, p: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(p, q)
        return (p * q).sum()

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor, None]:
        p, q = ctx.saved_tensors
        return torch.empty_like(p).copy_(q).mul_(grad), None


class ByLists(torch.autograd.Function):
    """A user's operator that calls operators on lists."""

    @staticmethod
    def forward(ctx: typing.Any, p: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(p, q)
        (product,) = torch._foreach_mul([p], [q])  # noqa: SLF001
        return product.square().sum()

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor, None]:
        p, q = ctx.saved_tensors
        (product,) = torch._foreach_mul([p], [q])  # noqa: SLF001
        return 2 * grad * product * q, None


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda p, q: p.square().sum() * q.sum(),
    "product": lambda p, q: (p * q).sum(),
    "of pieces": lambda p, q: ((p * 2).exp() * q).sum() + (p * 2).sin().sum(),
    "view": lambda p, q: (p.view(-1) * q.view(-1)).square().sum(),
    "mean": lambda p, q: (p - q).abs().sum() * p.sum(),
    "norm": lambda p, q: (p + 3).norm() * q.sum(),
    "sorted": lambda p, q: (p.flatten().sort().values * q.flatten()).sum(),
    "by a function": lambda p, q: Twice.apply(p, q) * q.sum(),
    "by a fused function": lambda p, q: Fused.apply(p, q) * q.sum(),
    "by lists": lambda p, q: ByLists.apply(p, q) * q.sum(),
    "filled in backward": lambda p, q: FilledInBackward.apply(p, q) * q.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25)
@given(world_size=world_sizes, first=first_numels, shape=shapes)
def test_gradients_are_those_of_the_mean_of_the_ranks_losses(
    name: str, world_size: int, first: int, shape: tuple[int, ...]
) -> None:
    """Each rank has data of its own."""
    loss = LOSSES[name]
    whole = numbers(shape, 1).double()  # Large terms cancel each other in some losses.
    data = [numbers(shape, 2 + rank).double() for rank in range(world_size)]

    def on_rank(specs: list[ShardSpec]) -> Tensor:
        tensor = piece_of(whole, specs[1]).requires_grad_()
        loss(tensor, data[tensor.spec.axis.rank]).backward()
        assert type(tensor.grad) is ShardedTensor
        return tensor.grad.full_tensor()

    plain = whole.clone().requires_grad_()
    (sum(loss(plain, each) for each in data) / world_size).backward()
    for grad in run_ranks(world_size, [(first,), shape], on_rank):
        torch.testing.assert_close(grad, plain.grad, **TOLERANCES)


def test_a_batch_of_one_sample_beside_a_larger_one() -> None:
    """There autograd sends a number expanded to the shape, elsewhere all elements."""
    whole = numbers((4, 3), 1)
    data = [numbers((size, 4, 3), size) for size in (1, 3)]

    def on_rank(specs: list[ShardSpec]) -> Tensor:
        tensor = piece_of(whole, specs[1]).requires_grad_()
        batch = data[tensor.spec.axis.rank]
        (tensor[None] + batch).sum().backward()
        (tensor.full_tensor()[None] + batch).sum().backward()
        return tensor.grad.full_tensor()

    for grad in run_ranks(2, [(2,), (4, 3)], on_rank):
        torch.testing.assert_close(grad, torch.full((4, 3), 4.0))


def test_a_function_cannot_write_its_own_data_into_a_sharded_tensor() -> None:
    class Writes(Fused):
        @staticmethod
        def forward(ctx: typing.Any, p: Tensor, q: Tensor) -> Tensor:
            del ctx
            return p.clone().add_(q).sum()

    def on_rank(specs: list[ShardSpec]) -> None:
        tensor = piece_of(numbers((4, 3), 1), specs[1]).requires_grad_()
        with pytest.raises(ShardedTensorError, match=r"autograd.Function writes.*zeros_like"):
            Writes.apply(tensor, torch.ones(4, 3))

    run_ranks(1, [(2,), (4, 3)], on_rank)


@settings(max_examples=40)
@given(world_size=world_sizes, first=first_numels, shape=shapes, is_alike=st.booleans())
def test_gradients_of_gradients(
    world_size: int, first: int, shape: tuple[int, ...], *, is_alike: bool
) -> None:
    """Of the loss that is the mean of the ranks'."""
    whole = numbers(shape, 1)
    data = [numbers(shape, 2 if is_alike else 2 + rank) for rank in range(world_size)]

    def penalty(p: Tensor, losses: typing.Any) -> Tensor:
        (grad,) = torch.autograd.grad(losses, p, create_graph=True)
        return grad.square().sum() + (grad * p).sum()

    def on_rank(specs: list[ShardSpec]) -> Tensor:
        tensor = piece_of(whole, specs[1]).requires_grad_()
        penalty(tensor, (tensor.exp() * data[tensor.spec.axis.rank]).sum()).backward()
        return tensor.grad.full_tensor()

    plain = whole.clone().requires_grad_()
    penalty(plain, sum((plain.exp() * each).sum() for each in data) / world_size).backward()
    for grad in run_ranks(world_size, [(first,), shape], on_rank):
        torch.testing.assert_close(grad, plain.grad, **TOLERANCES)
