"""What distributed tests compare with: data of every rank, plain training, differences.

Runs inside workers. Every rank draws the batches of all ranks and trains a plain copy of the model
on their concatenation, so that sharded training has a reference in the same process.
"""

from __future__ import annotations

import copy
import math
import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models import PARAMETER_SHAPES, Batch, Case, Parameters
from shardkit import DeviceMesh, ShardedTensor, fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


AXES = ("replicate", "shard")
STEPS = 6

# The rounding error of a loss: two units in the last place of a number between 2 and 8, as the loss
# of GPT is.
LOSS_TOLERANCE = 2e-6

# The sums over the batch and over the ranks are taken in another order than in the concatenated
# batch: some units in the last place (6e-8 at 1) of gradients below 1, over ten steps of SGD.
SGD_TOLERANCE = 1e-6

TRAINED = {"loss": LOSS_TOLERANCE, "grad": SGD_TOLERANCE, "parameter": SGD_TOLERANCE}
"""What `assert_within` takes where models were trained by SGD."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
}


# --- data and models ----------------------------------------------------------------------------


def make_mesh(shape: Sequence[int]) -> DeviceMesh:
    """Make a mesh whose last axis is ``shard`` and whose first of two is ``replicate``."""
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=AXES[-len(shape) :])


def shard(
    case: Case, model: nn.Module, mesh: DeviceMesh | None = None, **options: typing.Any
) -> nn.Module:
    """Shard the case's modules and then the root; ``options`` are those of ``fully_shard``."""
    for module in case.groups(model):
        fully_shard(module, mesh, **options)
    return fully_shard(model, mesh, **options)


def whole_and_sharded(
    mesh_shape: Sequence[int],
    shapes: dict[str, tuple[int, ...]] = PARAMETER_SHAPES,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Parameters], object] = lambda model: None,  # noqa: ARG005
) -> tuple[Parameters, Parameters]:
    """Make a plain model and the same one sharded; ``change`` sets the values before."""
    plain = Parameters(shapes, dtype)
    with torch.no_grad():
        change(plain)
    return plain, fully_shard(copy.deepcopy(plain), make_mesh(mesh_shape))


def rank_batch(case: Case, rank: int, step: int) -> Batch:
    """Draw the batch of a rank in a step: the same wherever it is drawn."""
    return case.batch(torch.Generator().manual_seed(1_000 * step + rank))


def my_batch(case: Case, step: int) -> Batch:
    """Draw this rank's batch."""
    return rank_batch(case, dist.get_rank(), step)


def global_batch(case: Case, step: int) -> Batch:
    """Draw the batches of all ranks and concatenate them."""
    xs, ys = zip(
        *(rank_batch(case, rank, step) for rank in range(dist.get_world_size())), strict=True
    )
    return torch.cat(xs), torch.cat(ys)


def step_batches(case: Case, steps: Iterable[int]) -> Iterator[tuple[Batch, Batch]]:
    """Yield for each step this rank's batch, and that of all ranks."""
    for step in steps:
        yield my_batch(case, step), global_batch(case, step)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    end_step: Callable[[], None] = lambda: None,
) -> Iterator[Tensor]:
    """Take one step per batch.

    Yields:
        The loss, before the optimizer's step, so that the gradients can be looked at.
    """
    for batch in batches:
        loss = case.loss(model, batch)
        loss.backward()
        yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        end_step()


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let each optimizer step, and drop its gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mean_over_ranks(value: Tensor) -> Tensor:
    """Average a tensor over all ranks, in fp64."""
    total = value.detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


# --- differences --------------------------------------------------------------------------------


def full(tensor: Tensor | None) -> Tensor | None:
    """Return the whole of a sharded tensor, and others as they are. Collective."""
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def on_cpu(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return tensors on the CPU; those of XLA devices are computed and fetched together."""
    result = dict(tensors)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type == "xla":
            by_dtype.setdefault(tensor.dtype, []).append(name)
    for names in by_dtype.values():
        found = [tensors[name] for name in names]
        flat = torch.cat([tensor.reshape(-1) for tensor in found])
        from xla_ranks import finish_graph

        finish_graph()  # All that has been traced, as one graph: a loss is not computed again.
        parts = flat.cpu().split([tensor.numel() for tensor in found])
        result |= {n: p.view(t.shape) for n, p, t in zip(names, parts, found, strict=True)}
    return result


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters by name, on the CPU. Collective."""
    wholes = {name: full(p) for name, p in model.named_parameters()}
    return on_cpu({name: comparable(whole).clone() for name, whole in wholes.items()})


def comparable(tensor: Tensor) -> Tensor:
    """Return a plain tensor; of a class over several tensors (quantized weights) their bytes."""
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach()
    parts = [comparable(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    flat = [part.new_empty(part.numel()).copy_(part.reshape(-1)) for part in parts]
    return torch.cat([part.view(torch.uint8) for part in flat])


@torch.no_grad()
def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the whole gradients by parameter name, on the CPU. Collective."""
    return on_cpu({name: full(p.grad) for name, p in model.named_parameters()})


@torch.no_grad()
def own_grads(
    model: nn.Module, wholes: dict[str, Tensor | None]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return what this rank has of each gradient, and the same parts of whole ones.

    Nothing communicates: each rank looks at its own. On XLA, where one process may have the pieces
    of all ranks, these are wholes.
    """
    if any(param.device.type == "xla" for param in model.parameters()):
        return full_grads(model), wholes
    return own_parts({name: param.grad for name, param in model.named_parameters()}, wholes)


@torch.no_grad()
def own_parts(
    tensors: dict[str, Tensor | None], wholes: dict[str, Tensor | None]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return what this rank has of each tensor, and the same parts of whole ones."""
    actual, wanted = dict(tensors), dict(wholes)
    for name, tensor in tensors.items():
        whole = wanted.get(name)
        if isinstance(tensor, ShardedTensor):
            actual[name] = tensor.to_local()
            if whole is not None:
                assert tensor.shape == whole.shape, name
                wanted[name] = tensor.spec.slice_full(whole)
    return actual, wanted


def difference(actual: Tensor | None, expected: Tensor | None, name: str = "tensor") -> float:
    """Return the largest absolute difference, 0 also for two Nones; NaN if one is NaN.

    Raises:
        AssertionError: If one is None and the other is not, or shape or dtype differ.
    """
    if actual is None or expected is None:
        assert actual is expected, f"{name}: got {actual}, expected {expected}"
        return 0.0
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    return (actual.double() - expected.double()).abs().max().item()


class Differences(dict[str, float]):
    """The largest difference of each kind (loss, grad, parameter) that was noted."""

    def note(
        self, kind: str, actual: Tensor | None, expected: Tensor | None, name: str = ""
    ) -> None:
        """Compare two tensors."""
        found = difference(actual if actual is None else actual.cpu(), expected, name or kind)
        worst = self.get(kind, 0.0)
        self[kind] = math.nan if math.isnan(found) or math.isnan(worst) else max(found, worst)

    def note_all(
        self, kind: str, actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]
    ) -> None:
        """Compare tensors by name."""
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            self.note(kind, actual[name], tensor, f"{kind} of {name!r}")

    def note_grads(self, model: nn.Module, reference: nn.Module) -> None:
        """Compare all gradients of a sharded model with a plain one's."""
        self.note_all("grad", *own_grads(model, full_grads(reference)))

    def note_parameters(self, model: nn.Module, reference: nn.Module) -> None:
        """Compare all parameters. Collective."""
        self.note_all("parameter", full_parameters(model), full_parameters(reference))

    def note_training(
        self,
        case: Case,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Iterable[tuple[Batch, Batch]],
        max_norm: float | None = None,
    ) -> None:
        """Train a sharded model beside a plain one; compare losses and gradients. Collective.

        Args:
            case: Says what the loss is.
            models: The sharded one, and the plain one.
            optimizers: One for each of them.
            batches: What each model takes in each step.
            max_norm: Norm to which gradients are clipped; these norms are compared, too.
        """
        for batch in batches:
            losses = [case.loss(*each) for each in zip(models, batch, strict=True)]
            for loss in losses:
                loss.backward()
            self.note("loss", mean_over_ranks(losses[0]), losses[1].detach().double())
            self.note_grads(*models)
            if max_norm is not None:
                norms = [nn.utils.clip_grad_norm_(m.parameters(), max_norm) for m in models]
                self.note("norm", *(norm.detach().double() for norm in norms))
            step_all(optimizers)


def assert_within(by_rank: Sequence[Differences], what: str = "", /, **tolerances: float) -> None:
    """Check what every rank found: the kinds named in ``tolerances``, all of them and no other.

    Args:
        by_rank: What each rank found.
        what: Which of several cases it is, for the message.
        tolerances: By kind.
    """
    for rank, differences in enumerate(by_rank):
        where = f"{what}: rank {rank}" if what else f"rank {rank}"
        assert differences.keys() == tolerances.keys(), f"{where} compared {sorted(differences)}"
        for kind, tolerance in tolerances.items():
            # Written so that NaN fails.
            assert differences[kind] <= tolerance, (
                f"{where}: {kind} differs by {differences[kind]:.3g}"
            )


def assert_each_within(found: Mapping[str, Sequence[Differences]], /, **tolerances: float) -> None:
    """Check what every rank found in each of several cases: see `assert_within`."""
    for what, by_rank in found.items():
        assert_within(by_rank, what, **tolerances)


def assert_nothing_wrong(by_rank: Sequence[Sequence[str]]) -> None:
    """Check that no rank found anything wrong, else show all of it."""
    shown = [f"rank {rank}: {why}" for rank, found in enumerate(by_rank) for why in found]
    assert not shown, "\n".join(shown)
