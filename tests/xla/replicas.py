"""What replicas of `torch_xla.launch` do besides training; each function runs on all of them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import typing

import hlo
import torch
import torch_xla
import torch_xla.runtime as xr
from replica_ranks import ReplicaRanks
from torch import Tensor, nn
from xla_ranks import finish_graph

import models
import reference
import shardkit
import shardkit.checkpoint
from parity import Pair
from shardkit import MixedPrecisionPolicy, fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


Differences = dict[str, float]


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


# --- dtypes -------------------------------------------------------------------------------------


def half_precision() -> dict[str, object]:
    """Gathers in bf16, reduces in fp32; parameters, gradients and state stay fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pair = Pair(ReplicaRanks(), "mlp", mp_policy=policy)
    pair.backward(pair.draw())
    grads = [grad.local_piece for grad in gradients(pair.sharded)]
    text = torch_xla._XLAC._get_xla_tensors_hlo(grads)  # noqa: SLF001
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    reduced = [line for line in text.splitlines() if " reduce-scatter(" in line]
    finish_graph()
    differences = reference.Differences()
    differences.note_grads(pair.sharded, pair.plain)
    largest = max(grad.abs().max().item() for grad in gradients(pair.plain))
    return {
        "gathered": sorted({_first_dtype(line) for line in lines}),
        "reduced": sorted({_first_dtype(line) for line in reduced}),
        "dtypes": sorted({str(grad.dtype) for grad in grads}),
        "relative": differences["grad"] / largest,
    }


def _first_dtype(instruction: str) -> str:
    """Return the dtype of an instruction's result, which may be a tuple."""
    return instruction.split("= ")[1].lstrip("(").split("[")[0]


# --- cases: what is a rank's own ------------------------------------------------------------------


def reductions_leave_padding_out() -> Differences:
    """Of five and seven elements over the replicas, filled so that padding would tell."""
    mesh = init_device_mesh("xla", (xr.world_size(),))
    layer: typing.Any = nn.Linear(7, 5).to(torch_xla.device())
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) + 0.5)
    plain = copy.deepcopy(layer).cpu()
    fully_shard(layer, mesh)
    found = {}
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda t: t.sum(),
        "mean": lambda t: t.mean(),
        "max": lambda t: (-t).max(),
        "min": lambda t: t.min(),
        "any": lambda t: (t < 1.25).any(),
        "all": lambda t: (t > 1.25).all(),
        "product": lambda t: (t / 10).prod().log(),
        "1-norm": lambda t: t.norm(1),
        "inf-norm": lambda t: t.norm(float("inf")),
        "least": lambda t: torch.linalg.vector_norm(t, -float("inf")),
        "negative": lambda t: torch.linalg.vector_norm(t, -1.0),
    }
    with torch.no_grad():
        layer.weight.add_(1.0)  # Padding as well.
        layer.bias.add_(1.0)
        plain.weight.add_(1.0)
        plain.bias.add_(1.0)
    for name, function in functions.items():
        for param, expected in zip(layer.parameters(), plain.parameters(), strict=True):
            value = function(param.detach())
            finish_graph()
            off = (value.cpu().double() - function(expected.detach()).double()).abs().item()
            found[name] = max(found.get(name, 0.0), off)
    finish_graph()
    return found


def asked_gradients() -> Differences:
    """Gradients by `torch.autograd.grad`: of the mean over the ranks, none of what is unused."""
    pair = Pair(ReplicaRanks(), "unused")
    found = {}
    for model, loss in zip((pair.plain, pair.sharded), pair.losses(pair.draw()), strict=True):
        names, params = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        found[model] = dict(zip(names, grads, strict=True))
    wholes = {n: g.full_tensor() for n, g in found[pair.sharded].items() if g is not None}
    finish_graph()
    expected = {name: grad for name, grad in found[pair.plain].items() if grad is not None}
    assert wholes.keys() == expected.keys()
    return {name: reference.difference(wholes[name].cpu(), expected[name]) for name in wholes}


def gradients_of_inputs() -> Differences:
    """Gradients by `torch.autograd.grad` of a batch, of which only the sum is left to be run."""
    pair = Pair(ReplicaRanks(), "mlp")
    xs, ys = pair.ranks.rank_batches(pair.case, 0)[pair.ranks.mesh.get_rank()]
    sums = []
    for model, device in ((pair.plain, "cpu"), (pair.sharded, torch_xla.device())):
        batch = xs.to(device).requires_grad_(), ys.to(device)
        sums.append(torch.autograd.grad(pair.case.loss(model, batch), batch[:1])[0].sum())
    finish_graph()
    return {"sum": reference.difference(sums[1].cpu(), sums[0])}


def with_a_slow_engine(gradients_of: Callable[[], Differences]) -> Differences:
    """Of a later run, in which this replica, if it is the first one, outruns its engine's thread.

    The thread lets go of gradients after it has told this one that they are there. So another graph
    would run here than on the other replica, which would wait for it.
    """
    gradients_of()
    if xr.global_ordinal() != 0:
        return [gradients_of() for _ in range(3)][-1]
    threads = [threading.get_native_id()]
    leaf = torch.ones(2, device=torch_xla.device(), requires_grad=True)
    leaf.register_hook(lambda _: threads.append(threading.get_native_id()))
    torch.autograd.grad(leaf.sum(), [leaf])
    core = {min(os.sched_getaffinity(0))}
    spin = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        for thread in (*threads, busy.pid):
            os.sched_setaffinity(thread, core)
        os.setpriority(os.PRIO_PROCESS, threads[-1], 19)
        try:
            return [gradients_of() for _ in range(3)][-1]
        finally:
            busy.kill()


def masks() -> dict[str, object]:
    """What ranks drop, twice from one seed; and that a checkpointed forward repeats it."""
    mesh = init_device_mesh("xla", (xr.world_size(),))
    dropped = []
    for checkpointed in (False, True):
        model: typing.Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        model.to(torch_xla.device())
        if checkpointed:
            shardkit.checkpoint_module(model)
        fully_shard(model, mesh)
        torch_xla.manual_seed(3, torch_xla.device())
        x = torch.ones(16, 4, device=torch_xla.device(), requires_grad=True)
        output = model(x)
        output.sum().backward()
        finish_graph()
        assert x.grad is not None
        # Each row of the gradient counts the kept ones, as each output does (5 apart, and 1).
        kept = ((output.detach() - 1) / 10).view(-1)
        assert torch.equal(kept.cpu(), (x.grad[:, 0] / 2).cpu()), "another mask in backward"
        dropped.append([int(value) for value in kept.cpu()])
    return {"first": dropped[0], "second": dropped[1]}


def statistics() -> dict[str, float]:
    """Return how far batch statistics are from those of a rank's part, and from those of all."""
    pair = Pair(ReplicaRanks(), "conv")
    alone = copy.deepcopy(pair.plain)
    batch = pair.draw()
    pair.backward(batch)
    finish_graph()
    with torch.no_grad():
        alone(batch[0].chunk(pair.ranks.world_size)[pair.ranks.mesh.get_rank()])
    found = pair.sharded.stages[0][1].running_mean.cpu()
    return {
        name: reference.difference(found, model.stages[0][1].running_mean)
        for name, model in (("of its part", alone), ("of all", pair.plain))
    }


def files(folder: pathlib.Path) -> dict[str, object]:
    """Pieces are refused; whole tensors come back from one model to another."""
    pair, other = (Pair(ReplicaRanks(), "tiny") for _ in range(2))
    pair.backward(pair.draw())
    with torch.no_grad():
        for param in pair.sharded.parameters():
            param.add_(1.0)  # Padding as well.
    saved = {name: value.full_tensor() for name, value in pair.sharded.state_dict().items()}
    finish_graph()
    saved = {name: value.cpu() for name, value in saved.items()}
    other.sharded.load_state_dict(saved)
    other.plain.load_state_dict(saved)
    finish_graph()
    refused = []
    writes: list[Callable[[], object]] = [
        lambda: pickle.dumps(next(pair.sharded.parameters())),
        lambda: next(pair.sharded.parameters()).__create_write_items__("name", None),
        lambda: shardkit.checkpoint.save_full(folder / "whole.pt", pair.sharded),
        pair.sharded.mlp.layers[0].weight.detach()[0].zero_,
    ]
    for write in writes:
        try:
            write()
        except shardkit.ShardedTensorError as error:
            refused.append(str(error))
    differences = reference.Differences()
    differences.note_parameters(other.sharded, other.plain)
    return {"off": differences["parameter"], "refused": refused}


def other_models() -> str:
    """Each replica has another model."""
    mesh = init_device_mesh("xla", (xr.world_size(),))
    model: typing.Any = nn.Linear(3, 4 + mesh.get_rank()).to(torch_xla.device())
    fully_shard(model, mesh)
    try:
        model(torch.ones(2, 3, device=torch_xla.device()))
    except shardkit.RankMismatchError as error:
        return str(error)
    return "no error"


# --- a graph that is not run ----------------------------------------------------------------------


def graphs() -> dict[str, object]:
    """The third step's graph. Nothing is run: XLA's CPU client is not sure with four threads."""
    from shardkit._runtime import runtime
    from shardkit.backends.xla import replica  # Waits where another replica imports the package.

    replica.run_graph = lambda: None
    runtime.check_same_model = lambda *_: None  # It runs a collective.
    found: dict[str, object] = {}
    for name, shape, reshard in (
        ("resharded", (xr.world_size(),), None),
        ("kept", (xr.world_size(),), False),
        ("hybrid", (xr.world_size() // 2, 2), None),
    ):
        deep = models.Case(
            lambda: models.MLP([7, 16, 16, 16, 16, 5]),
            lambda model: list(model.layers),  # type: ignore[arg-type, union-attr]
            models.regression_batch,
            models.squared_error,
        )
        pair = Pair(ReplicaRanks(shape), deep, reshard_after_forward=reshard)
        for _ in range(3):
            pair.sharded.zero_grad()
            # Running would end the chain in which torch_xla puts collectives.
            device = torch_xla._XLAC._xla_get_default_device()  # noqa: SLF001
            torch_xla._XLAC._set_all_reduce_token(device, None)  # noqa: SLF001
            pair.backward(pair.draw())
        pieces = [grad.local_piece for grad in gradients(pair.sharded)]
        text = torch_xla._XLAC._get_xla_tensors_hlo(pieces)  # noqa: SLF001
        norm = pair.sharded.clip_grad_norm_(1.0, float("inf"))
        clipped = hlo.Program(torch_xla._XLAC._get_xla_tensors_hlo([norm]))  # noqa: SLF001
        program = hlo.Program(text)
        opcodes = ("all-gather", "reduce-scatter", "all-reduce")
        found[name] = {
            "text": text,
            "count": dict(program.count()),
            "groups": {
                opcode: sorted({program.instructions[n].groups for n in program.of(opcode)})
                for opcode in opcodes
            },
            "channels": sorted(
                {program.instructions[n].channel for o in opcodes for n in program.of(o)}
            ),
            "of the norm": clipped.count()["all-reduce"],
            "waits": [program.num_before(n, "dot") for n in program.of("all-gather")],
        }
    return found
