"""What autograd can do with a sharded model, compared with a plain one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backends import on_meshes
from models import CASES, MLP
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    Differences,
    Ranks,
    assert_within,
    full_grads,
    make_mesh,
    shard,
    train,
)
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from backends import Run
    from models import Batch

Spawn = typing.Callable[..., list[typing.Any]]

# Sums over ranks in another order: some units in the last place of gradients below 1.
TOLERANCE = 1e-6


class BoomError(Exception):
    """Raised by tests in the middle of a step."""


def compare_one_backward(
    ranks: Ranks,
    model: nn.Module,
    reference: nn.Module,
    backward: Callable[[nn.Module, Batch], object],
) -> Differences:
    """Compare gradients after ``backward`` with the reference's mean over all ranks' batches."""
    case = CASES["mlp"]
    backward(model, ranks.batch(case, 0))
    for batch in ranks.rank_batches(case, 0):
        backward(reference, batch)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks.world_size
    differences = Differences()
    differences.note_grads(model, reference)
    return differences


def compare_later_training(
    ranks: Ranks,
    model: nn.Module,
    reference: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Differences:
    """Train both for some steps; ``optimizer`` is the sharded model's, if it has one already."""
    case = CASES["mlp"]
    steps = range(10, 14)
    differences = Differences()
    optimizer = optimizer or OPTIMIZERS["sgd"](model.parameters())
    sharded = train(
        case, model, optimizer, (ranks.batch(case, step) for step in steps), ranks.end_step
    )
    plain = train(
        case,
        reference,
        OPTIMIZERS["sgd"](reference.parameters()),
        (ranks.global_batch(case, step) for step in steps),
    )
    for loss, expected in zip(sharded, plain, strict=True):
        differences.note("loss", ranks.mean(loss), expected.double())
    differences.note_parameters(model, reference)
    return differences


def sharded_and_plain(
    ranks: Ranks, name: str = "mlp", **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    """Make a case's model sharded layer by layer, and plain."""
    plain = CASES[name].make()
    return ranks.shard(CASES[name], plain, **options), plain


def in_every_mode(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize a test over ``reshard_after_forward``."""
    return pytest.mark.parametrize("reshard_after_forward", [True, False, None])(test)


def assert_same_gradients(by_rank: list[Differences]) -> None:
    assert_within(by_rank, grad=TOLERANCE)


def assert_same_training(by_rank: list[Differences]) -> None:
    assert_within(by_rank, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


# --- unused parameters --------------------------------------------------------------------------


class Experts(nn.Module):
    """Parameters of one group, of which a forward uses the one it is told."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.zeros(5)) for _ in range(num_experts))

    def forward(self, expert: int) -> Tensor:
        return self.experts[expert].sum()


def each_rank_uses_its_own() -> list[list[float] | None]:
    model = fully_shard(Experts())
    model(dist.get_rank()).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


def test_ranks_that_use_different_parameters_average_the_right_ones(spawn: Spawn) -> None:
    """A rank that did not use a parameter adds zero to its mean; nobody used the last one."""
    assert spawn(each_rank_uses_its_own, 2) == [[[0.5] * 5, [0.5] * 5, None]] * 2


def experts_over_several_steps(synced: bool) -> list[list[float] | None]:
    """Use expert 0 on rank 0 in the first micro-batch and expert 1 everywhere in the second."""
    model = fully_shard(Experts())
    model.set_requires_gradient_sync(synced)
    model(2 if dist.get_rank() else 0).backward()
    model.set_requires_gradient_sync(True)
    model(1).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


@pytest.mark.parametrize("synced", [True, False])
def test_different_parameters_in_different_micro_batches(spawn: Spawn, synced: bool) -> None:
    assert spawn(experts_over_several_steps, 2, synced) == [[[0.5] * 5, [1.0] * 5, [0.5] * 5]] * 2


def experts_with_late_all_reduce() -> list[list[float] | None]:
    """Use expert r on rank r while the all-reduce is off, and expert 0 everywhere when it is on."""
    model = fully_shard(Experts(num_experts=5), make_mesh((2, 2)))
    model.set_requires_all_reduce(False)
    model(dist.get_rank()).backward()
    model.set_requires_all_reduce(True)
    model(0).backward()
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


def test_different_parameters_before_a_late_all_reduce(spawn: Spawn) -> None:
    expected = [[1.25] * 5, [0.25] * 5, [0.25] * 5, [0.25] * 5, None]
    assert spawn(experts_with_late_all_reduce, 4) == [expected] * 4


def unused_with_weight_decay() -> list[bool]:
    """Return whether the parameter that nobody uses is as it was, and the used ones are not."""
    model = fully_shard(Experts())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        model(dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.equal(parameter.full_tensor(), torch.ones(5)) for parameter in model.parameters()]


def test_a_parameter_unused_everywhere_does_not_decay(spawn: Spawn) -> None:
    """Its gradient is None as in plain PyTorch; a zero would let AdamW decay it."""
    assert spawn(unused_with_weight_decay, 2) == [[False, False, True]] * 2


def unused_group(ranks: Ranks) -> list[bool]:
    model, _ = sharded_and_plain(ranks, "unused")
    case = CASES["unused"]
    case.loss(model, ranks.batch(case, 0)).backward()
    return [
        parameter.grad is None
        for name, parameter in model.named_parameters()
        if name.startswith("unused")
    ]


@on_meshes((2,))
def test_a_group_unused_everywhere_keeps_none(run: Run) -> None:
    assert all(found == [True, True] for found in run(unused_group))


# --- freezing -----------------------------------------------------------------------------------


def frozen_before_trainable(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """Backward needs the frozen weight after the last gradient of its group has arrived."""
    plain = nn.Sequential(*(half_frozen_group() for _ in range(3)), nn.Linear(7, 5))
    model = ranks.put(plain)
    for layer in model[:-1]:
        fully_shard(layer, ranks.mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, ranks.mesh, reshard_after_forward=reshard_after_forward)
    differences = compare_one_backward(
        ranks, model, plain, lambda each, batch: CASES["mlp"].loss(each, batch).backward()
    )
    return differences | compare_later_training(ranks, model, plain)


def half_frozen_group() -> nn.Sequential:
    """Make a group of a frozen linear layer and, after it, a trainable one."""
    group = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
    group[0].requires_grad_(requires_grad=False)
    return group


@in_every_mode
@on_meshes((2,))
def test_a_frozen_linear_before_a_trainable_layer_of_its_group(
    run: Run, reshard_after_forward: bool | None
) -> None:
    found = run(frozen_before_trainable, reshard_after_forward)
    assert_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def freeze_and_thaw(ranks: Ranks) -> Differences:
    model, plain = sharded_and_plain(ranks)
    differences = Differences()
    for frozen in (True, False, True):
        for each in (model, plain):
            each.zero_grad()
            each.layers[1].requires_grad_(requires_grad=not frozen)
        differences |= compare_one_backward(
            ranks, model, plain, lambda each, batch: CASES["mlp"].loss(each, batch).backward()
        )
    return differences


@on_meshes((2,))
def test_layers_frozen_and_thawed_after_sharding(run: Run) -> None:
    assert_same_gradients(run(freeze_and_thaw))


# --- forwards and backwards, combined -----------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> None:
    """Run the model on a batch and on its negative before one backward."""
    x, y = batch
    loss = CASES["mlp"].loss
    (loss(model, (x, y)) + 2 * loss(model, (-x, y))).backward()


def recurrent(model: nn.Module, batch: Batch) -> None:
    """Use one layer three times in a forward."""
    x, _ = batch
    model.layers[0](x).mean().backward()
    h = model.layers[0](x)
    for _ in range(2):
        h = model.layers[0](torch.tanh(h[:, :7]))
    (10 * h.square().mean()).backward()


def two_backwards(model: nn.Module, batch: Batch) -> None:
    """Go backward twice through one graph."""
    loss = CASES["mlp"].loss(model, batch)
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def interleaved(model: nn.Module, batch: Batch) -> None:
    """Go backward through the first of two forwards after the second."""
    x, y = batch
    first = CASES["mlp"].loss(model, (x, y))
    second = CASES["mlp"].loss(model, (-x, y))
    first.backward()
    second.backward()


def partial_forward(model: nn.Module, batch: Batch) -> None:
    """Run layers without the root."""
    x, _ = batch
    model.layers[1](torch.tanh(model.layers[0](x))).square().mean().backward()


def gradient_of_inputs(model: nn.Module, batch: Batch) -> None:
    """Ask for the gradient of the input too, and use it."""
    x, y = batch
    x = x.clone().requires_grad_()
    CASES["mlp"].loss(model, (x, y)).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def discarded_forward(model: nn.Module, batch: Batch) -> None:
    """Throw away the graph of one forward, then train on another."""
    CASES["mlp"].loss(model, batch)
    x, y = batch
    CASES["mlp"].loss(model, (x * 0.5, y)).backward()


def inference_before(model: nn.Module, batch: Batch) -> None:
    """Evaluate in inference mode before a step."""
    with torch.inference_mode():
        model(batch[0])
    evaluation_between(model, batch)


def evaluation_between(model: nn.Module, batch: Batch) -> None:
    """Evaluate, without gradients, between forward and backward and before both."""
    x, y = batch
    with torch.no_grad():
        model(x)
    loss = CASES["mlp"].loss(model, (x, y))
    with torch.no_grad():
        model.eval()
        model(-x)
        model.train()
    loss.backward()


@in_every_mode
@pytest.mark.parametrize(
    "backward",
    [
        two_forwards,
        recurrent,
        two_backwards,
        interleaved,
        partial_forward,
        gradient_of_inputs,
        discarded_forward,
        evaluation_between,
    ],
)
@on_meshes((2,))
def test_forwards_and_backwards_in_any_order(
    run: Run, backward: Callable[[nn.Module, Batch], None], reshard_after_forward: bool | None
) -> None:
    found = run(backward_in_order, backward, reshard_after_forward)
    assert_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


@in_every_mode
@on_meshes((2,), xla=())  # torch_xla has no inference mode: plain linear layers fail in it.
def test_inference_before_a_step(run: Run, reshard_after_forward: bool | None) -> None:
    found = run(backward_in_order, inference_before, reshard_after_forward)
    assert_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def backward_in_order(
    ranks: Ranks, backward: Callable[[nn.Module, Batch], None], reshard_after_forward: bool | None
) -> Differences:
    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    differences = compare_one_backward(ranks, model, plain, backward)
    for each in (model, plain):
        each.zero_grad()
    return differences | compare_later_training(ranks, model, plain)


def gradient_of_the_input(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """``autograd.grad`` for the input is right, leaves no ``.grad``, and training goes on."""
    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    differences = Differences()
    x, y = ranks.batch(CASES["mlp"], 0)
    for _ in range(2):
        grads: list[Tensor] = []
        for each, device in ((model, x.device), (plain, "cpu")):
            inputs = x.detach().to(device, copy=True).requires_grad_()
            grads += torch.autograd.grad(CASES["mlp"].loss(each, (inputs, y.to(device))), inputs)
        differences.note("grad", *grads)
        assert all(parameter.grad is None for parameter in model.parameters())
    return differences | compare_later_training(ranks, model, plain)


@in_every_mode
@on_meshes((2,))
def test_autograd_grad_creates_no_grad(run: Run, reshard_after_forward: bool | None) -> None:
    found = run(gradient_of_the_input, reshard_after_forward)
    assert_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def gradient_penalty(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """Differentiate the gradient of the input: double backward."""

    def backward(model: nn.Module, batch: Batch) -> None:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = CASES["mlp"].loss(model, (x, y))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        # A mean over the batch, also where the batch is that of all ranks.
        (loss + (grad * len(x)).square().sum(1).mean()).backward()

    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    return compare_one_backward(ranks, model, plain, backward)


@in_every_mode
@on_meshes((2,))
def test_a_gradient_penalty_differentiates_twice(
    run: Run, reshard_after_forward: bool | None
) -> None:
    assert_same_gradients(run(gradient_penalty, reshard_after_forward))


# --- interruptions ------------------------------------------------------------------------------


class Fragile(MLP):
    """An MLP that raises where it is told: in forward or in backward, before the last layer."""

    breaks: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        if self.breaks == "forward":
            raise BoomError
        if self.breaks == "backward":
            x.register_hook(raise_boom)
        return self.layers[-1](x)


def raise_boom(grad: Tensor) -> Tensor:  # noqa: ARG001 - a hook's argument
    raise BoomError


def train_after_an_exception(
    ranks: Ranks, where: str, reshard_after_forward: bool | None
) -> Differences:
    case = CASES["mlp"]
    plain = Fragile()
    model = ranks.shard(case, plain, reshard_after_forward=reshard_after_forward)
    # Made first: an interrupted forward leaves unsharded parameters in the module until the next
    # one.
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    case.loss(model, ranks.batch(case, 0)).backward()
    for _ in range(2):
        model.breaks = where
        with pytest.raises(BoomError):
            case.loss(model, ranks.batch(case, 1)).backward()
        model.breaks = None
        optimizer.zero_grad()
    return compare_later_training(ranks, model, plain, optimizer)


@in_every_mode
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_meshes((2,))
def test_training_goes_on_after_an_exception(
    run: Run, where: str, reshard_after_forward: bool | None
) -> None:
    assert_same_training(run(train_after_an_exception, where, reshard_after_forward))


def train_with_evaluations(ranks: Ranks) -> Differences:
    """Evaluate the whole model between steps, where it has only just been resharded or stepped."""
    case = CASES["gpt"]
    model, plain = sharded_and_plain(ranks, "gpt")
    differences = Differences()
    optimizer, plain_optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain))
    for step in range(4):
        for _ in zip(
            train(case, model, optimizer, [ranks.batch(case, step)], ranks.end_step),
            train(case, plain, plain_optimizer, [ranks.global_batch(case, step)]),
            strict=True,
        ):
            pass
        with torch.no_grad():
            model.eval()
            plain.eval()
            loss = ranks.mean(case.loss(model, ranks.batch(case, 100)))
            differences.note("loss", loss, case.loss(plain, ranks.global_batch(case, 100)).double())
            model.train()
            plain.train()
    differences.note_parameters(model, plain)
    return differences


@on_meshes((2,))
def test_evaluation_between_steps_sees_the_stepped_weights(run: Run) -> None:
    assert_same_training(run(train_with_evaluations))


def halve_by_optimizer(parameters: list[Tensor], **form: bool) -> None:
    """Take a step that halves the parameters."""
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(parameters, lr=0.5, **form).step()
    for parameter in parameters:
        parameter.grad = None


def halve_pieces(parameters: list[Tensor]) -> None:
    """Write to each rank's piece, as initializers and exponential averages do."""
    with torch.no_grad():
        for parameter in parameters:
            piece = parameter.to_local() if isinstance(parameter, ShardedTensor) else parameter
            piece.mul_(0.5)


def halve_detached(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def halve_by_copy(parameters: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 0.5)


WRITES: dict[str, Callable[[list[Tensor]], None]] = {
    "foreach": functools.partial(halve_by_optimizer, foreach=True),
    "for-loop": functools.partial(halve_by_optimizer, foreach=False),
    "fused": functools.partial(halve_by_optimizer, fused=True),
    "pieces": halve_pieces,
    "detached": halve_detached,
    "copy": halve_by_copy,
}


def write_after_a_forward(ranks: Ranks, write: str) -> Differences:
    """Change parameters while a group is gathered; compare what the next forward computes."""
    case = CASES["mlp"]
    model, plain = sharded_and_plain(ranks, reshard_after_forward=False)
    parameters = list(model.parameters())
    batch = ranks.batch(case, 0)
    case.loss(model, batch)  # Its graph is gone, its gathered weights are kept.
    WRITES[write](parameters)
    halve_by_copy(list(plain.parameters()))
    differences = Differences()
    loss = ranks.mean(case.loss(model, batch).detach())
    expected = case.loss(plain, ranks.global_batch(case, 0)).detach()
    differences.note("loss", loss, expected.double())
    return differences


@pytest.mark.parametrize("write", [write for write in WRITES if write != "fused"])
@on_meshes((2,))
def test_a_forward_sees_parameters_changed_since_the_last_one(run: Run, write: str) -> None:
    """Also where that one had no backward, and `reshard_after_forward` kept what it gathered."""
    assert_within(run(write_after_a_forward, write), loss=LOSS_TOLERANCE)


@on_meshes((2,), xla=())  # torch has no fused optimizers for XLA.
def test_a_forward_sees_parameters_changed_by_a_fused_optimizer(run: Run) -> None:
    assert_within(run(write_after_a_forward, "fused"), loss=LOSS_TOLERANCE)


# --- checkpointing ------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes the forward of the module inside."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def train_checkpointed(
    ranks: Ranks, order: str, use_reentrant: bool, reshard_after_forward: bool | None
) -> Differences:
    """Recompute blocks inside or outside of their groups.

    Args:
        ranks: Where.
        order: What is outside: ``"checkpoint"`` recomputes a sharded block, unsharding included;
            ``"shard"`` recomputes the inside of one.
        use_reentrant: Kind of checkpointing.
        reshard_after_forward: As of ``fully_shard``.
    """
    case = CASES["gpt"]
    plain = case.make()
    model = copy.deepcopy(plain)
    for i, block in enumerate(model.blocks):
        if order == "checkpoint":
            fully_shard(block, reshard_after_forward=reshard_after_forward)
            model.blocks[i] = Checkpointed(block, use_reentrant=use_reentrant)
        else:
            model.blocks[i] = fully_shard(
                Checkpointed(block, use_reentrant=use_reentrant),
                reshard_after_forward=reshard_after_forward,
            )
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    return compare_renamed_training(ranks, model, plain)


def compare_renamed_training(ranks: Ranks, model: nn.Module, plain: nn.Module) -> Differences:
    """Train a model whose blocks are wrapped; compare by position, for names differ."""
    case = CASES["gpt"]
    differences = Differences()
    batches = range(4)
    sharded = train(
        case, model, OPTIMIZERS["sgd"](model.parameters()), (ranks.batch(case, i) for i in batches)
    )
    expected = train(
        case,
        plain,
        OPTIMIZERS["sgd"](plain.parameters()),
        (ranks.global_batch(case, i) for i in batches),
    )
    for losses in zip(sharded, expected, strict=True):
        differences.note("loss", ranks.mean(losses[0]), losses[1].double())
        grads = zip(full_grads(model).values(), full_grads(plain).items(), strict=True)
        for actual, (name, grad) in grads:
            differences.note("grad", actual, grad, name)
    return differences


@in_every_mode
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", ["checkpoint", "shard"])
@on_meshes((2,), xla=())  # torch's checkpointing does not know XLA; `checkpoint_module` does.
def test_checkpointing_inside_and_outside_of_groups(
    run: Run, order: str, use_reentrant: bool, reshard_after_forward: bool | None
) -> None:
    found = run(train_checkpointed, order, use_reentrant, reshard_after_forward)
    assert_within(found, loss=LOSS_TOLERANCE, grad=TOLERANCE)


class SharedSegments(nn.Module):
    """Two reentrant segments that use one layer: its gradient arrives twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.shared = nn.Linear(7, 7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.last(x)


def train_shared_segments(ranks: Ranks, one_group: bool) -> Differences:
    plain = SharedSegments()
    model = copy.deepcopy(plain)
    if not one_group:
        for layer in (model.first, model.shared, model.last):
            fully_shard(layer)
    fully_shard(model)
    return compare_later_training(ranks, model, plain)


@pytest.mark.parametrize("one_group", [True, False])
@on_meshes((2,), xla=())  # torch's checkpointing does not know XLA; `checkpoint_module` does.
def test_reentrant_segments_that_share_a_layer(run: Run, one_group: bool) -> None:
    assert_same_training(run(train_shared_segments, one_group))


# --- outputs ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    """An output that pytree does not look into."""

    logits: Tensor
    hidden: list[Tensor]
    label: str = "output"


Pair = collections.namedtuple("Pair", ["logits", "hidden"])  # noqa: PYI024 - as users have it


class Plain:
    """An output that is no container at all."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


PACK: dict[str, Callable[[Tensor, Tensor], typing.Any]] = {
    "tuple": lambda logits, hidden: (logits, hidden),
    "dict": lambda logits, hidden: {"logits": logits, "nested": {"hidden": [hidden]}},
    "dataclass": lambda logits, hidden: Output(logits, [hidden]),
    "namedtuple": Pair,
    "object": lambda logits, hidden: Plain(logits),  # noqa: ARG005
}
UNPACK: dict[str, Callable[[typing.Any], Tensor]] = {
    "tuple": lambda output: output[0],
    "dict": lambda output: output["logits"],
    "dataclass": lambda output: output.logits,
    "namedtuple": lambda output: output.logits,
    "object": lambda output: output.logits,
}


class Packer(nn.Module):
    """Takes and returns its tensors in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, inputs: typing.Any) -> typing.Any:
        x = UNPACK[self.kind](inputs)
        return PACK[self.kind](self.norm(torch.tanh(self.linear(x))), x)


class Packed(nn.Module):
    """A chain of such modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Packer(kind) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        packed = PACK[self.kind](x, x)
        for layer in self.layers:
            packed = layer(packed)
        return self.head(UNPACK[self.kind](packed))


def train_packed(ranks: Ranks, kind: str, reshard_after_forward: bool | None) -> Differences:
    plain = Packed(kind)
    model = ranks.shard(CASES["mlp"], plain, reshard_after_forward=reshard_after_forward)
    return compare_later_training(ranks, model, plain)


@in_every_mode
@pytest.mark.parametrize("kind", PACK)
@on_meshes((2,))
def test_inputs_and_outputs_in_containers(
    run: Run, kind: str, reshard_after_forward: bool | None
) -> None:
    assert_same_training(run(train_packed, kind, reshard_after_forward))


def root_output(ranks: Ranks, kind: str) -> Differences:
    """Take the loss of what the root returns in a container."""

    def backward(model: nn.Module, batch: Batch) -> None:
        x, _ = batch
        UNPACK[kind](model(PACK[kind](x, x))).square().mean().backward()

    plain = Packer(kind)
    return compare_one_backward(ranks, fully_shard(ranks.put(plain), ranks.mesh), plain, backward)


@pytest.mark.parametrize("kind", [kind for kind in PACK if kind != "object"])
@on_meshes((2,))
def test_the_roots_output_in_a_container(run: Run, kind: str) -> None:
    assert_same_gradients(run(root_output, kind))


@on_meshes((2,), xla=())  # Refused there: what the ranks return would have no place to go.
def test_the_roots_output_in_an_object(run: Run) -> None:
    assert_same_gradients(run(root_output, "object"))


# --- parameters' hooks and copies of models -----------------------------------------------------


def hooks_on_parameters(ranks: Ranks, registered: str) -> list[int]:
    """Return how often each parameter's hook ran in two backwards, with the gradient in place."""
    model = ranks.put(MLP())
    counts = [0] * len(list(model.parameters()))
    if registered == "after":
        shard(CASES["mlp"], model, ranks.mesh)
    for i, parameter in enumerate(model.parameters()):

        def count(param: Tensor, i: int = i) -> None:
            assert isinstance(param, ShardedTensor)
            assert isinstance(param.grad, ShardedTensor)
            counts[i] += 1

        parameter.register_post_accumulate_grad_hook(count)
    if registered == "before":
        shard(CASES["mlp"], model, ranks.mesh)
    for step in range(2):
        CASES["mlp"].loss(model, ranks.batch(CASES["mlp"], step)).backward()
    return counts


@pytest.mark.parametrize("registered", ["before", "after"])
@on_meshes((2,))
def test_post_accumulate_hooks_run_once_per_backward(run: Run, registered: str) -> None:
    assert all(counts == [2] * 6 for counts in run(hooks_on_parameters, registered))


def train_a_copy(ranks: Ranks, when: str) -> Differences:
    """Train a deep copy of a sharded model; the original must stay as it was."""
    case = CASES["mlp"]
    model, plain = sharded_and_plain(ranks)
    if when == "after training":
        compare_later_training(ranks, model, plain)
    duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
    differences = compare_later_training(ranks, duplicate, plain_duplicate)
    differences.note_parameters(model, plain)  # Training the copy did not change the original.
    case.loss(model, ranks.batch(case, 50)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in duplicate.parameters())
    return differences


@pytest.mark.parametrize("when", ["at once", "after training"])
@on_meshes((2,))
def test_a_deep_copy_trains_by_itself(run: Run, when: str) -> None:
    assert_same_training(run(train_a_copy, when))


# --- tied weights -------------------------------------------------------------------------------


def tied_weight_stays_tied(ranks: Ranks, name: str) -> bool:
    model, _ = sharded_and_plain(ranks, name)
    first, second = {"gpt": ("tokens", "head"), "tied": ("encoder", "decoder")}[name]
    case = CASES[name]
    case.loss(model, ranks.batch(case, 0)).backward()
    first, second = getattr(model, first), getattr(model, second)
    return isinstance(first.weight, ShardedTensor) and first.weight is second.weight


@pytest.mark.parametrize("name", ["gpt", "tied"])
@on_meshes((2,))
def test_a_tied_weight_stays_one_parameter(run: Run, name: str) -> None:
    """That its gradient is the sum over its uses is seen in the parity tests."""
    assert all(run(tied_weight_stays_tied, name))
