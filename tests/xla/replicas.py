"""What replicas of `torch_xla.launch` do, each on a thread of its own; prints what they return.

Arguments: names of functions below. The caller sets ``CPU_NUM_DEVICES`` and the options that
XLA's CPU client needs for collectives between threads (`test_replicas.ENVIRONMENT`).
"""

from __future__ import annotations

import copy
import faulthandler
import json
import pathlib
import pickle
import sys
import tempfile
import threading
import typing

import hlo
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from pairs import Optimizer, adamw, on_xla, sgd
from torch import Tensor, nn

import models
import shardkit
import shardkit.checkpoint
from shardkit import MixedPrecisionPolicy, fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit import DeviceMesh

MOST_SECONDS = 200
BATCH = 8
STEPS = 3
Differences = dict[str, float]
_lock = threading.Lock()  # torch's generator and settings are those of the whole process


def run(mesh: DeviceMesh) -> None:
    """Run what was traced: of ``torch_xla.sync()`` replicas on the CPU hang."""
    mesh.backend.region.finish_graph()


class Pair:
    """A model on this replica, sharded, beside the same one on the CPU, plain."""

    def __init__(
        self,
        case: models.Case | str,
        shape: tuple[int, ...] | None = None,
        adapt: Callable[[nn.Module], object] = lambda _: None,
        **options: typing.Any,
    ) -> None:
        self.case = models.CASES[case] if isinstance(case, str) else case
        self.mesh = init_device_mesh("xla", shape or (xr.world_size(),))
        with _lock:
            torch.manual_seed(0)
            self.plain = self.case.make()
            self.sharded: typing.Any = on_xla(self.plain)
        for model in (self.plain, self.sharded):
            adapt(model)
        for module in self.case.groups(self.sharded):
            fully_shard(module, self.mesh, **options)
        fully_shard(self.sharded, self.mesh, **options)
        self.generator = torch.Generator().manual_seed(1)

    def backward(self, scale: float = 1.0) -> None:
        batch = self.case.batch(self.generator, BATCH)
        rank, size = self.mesh.get_rank(), self.mesh.size()
        x, y = (part.chunk(size)[rank] for part in batch)  # The model moves its inputs.
        (self.case.loss(self.plain, batch) * scale).backward()
        (self.case.loss(self.sharded, (x, y.to(torch_xla.device()))) * scale).backward()

    def off(self, tensors: Callable[[typing.Any], list[Tensor]]) -> float:
        """Return by how much the whole tensors differ from the plain model's."""
        sharded = [t.full_tensor().detach() for t in tensors(self.sharded)]
        run(self.mesh)
        pairs = zip(sharded, tensors(self.plain), strict=True)
        return max((a.cpu() - b.detach()).abs().max().item() for a, b in pairs)


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def parameters(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def train(
    pair: Pair, *, micro_batches: int = 1, clip: float | None = None, optimizer: Optimizer = adamw
) -> Differences:
    """Train both for some steps."""
    found = {"gradient": 0.0, "norm": 0.0, "compiled": 0.0}
    optimizers = [optimizer(model.parameters()) for model in (pair.plain, pair.sharded)]
    for step in range(STEPS + 1):
        before = met.metric_data("CompileTime")
        for i in range(micro_batches):
            pair.sharded.set_requires_gradient_sync(i == micro_batches - 1)
            pair.backward(1 / micro_batches)
        norms = [torch.zeros(()), torch.zeros(())]
        if clip is not None:
            norms = [
                torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1, clip),
                pair.sharded.clip_grad_norm_(0.1, clip),
            ]
        if step < STEPS:
            for each in optimizers:
                each.step()
                each.zero_grad()
        run(pair.mesh)
        if step == STEPS - 1:
            found["compiled"] = met.metric_data("CompileTime")[0] - before[0]
        found["norm"] = max(found["norm"], (norms[0] - norms[1].cpu()).abs().item())
    found["gradient"] = pair.off(gradients)
    found["parameter"] = pair.off(parameters)
    return found


# --- cases: same as on other backends -------------------------------------------------------------


def mlp() -> Differences:
    return train(Pair("mlp"), clip=2.0)


def gpt() -> Differences:
    return train(Pair("gpt"), optimizer=sgd)


def tiny_clipped_by_the_largest() -> Differences:
    return train(Pair("tiny"), clip=float("inf"))


def frozen_kept_from_forward_to_backward() -> Differences:
    return train(Pair("frozen", reshard_after_forward=False))


def unused() -> Differences:
    return train(Pair("unused"))


def tied_in_micro_batches() -> Differences:
    return train(Pair("tied"), micro_batches=2)


def replicas_of_shards() -> Differences:
    return train(Pair("mlp", (xr.world_size(), 1)), micro_batches=2)


def checkpointed() -> Differences:
    def adapt(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            shardkit.checkpoint_module(block)

    return train(Pair("gpt", adapt=adapt), optimizer=sgd)


def half_precision() -> dict[str, object]:
    """Gathers in bf16, reduces in fp32; parameters, gradients and state stay fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pair = Pair("mlp", mp_policy=policy)
    pair.backward()
    grads = [grad.local_piece for grad in gradients(pair.sharded)]
    text = torch_xla._XLAC._get_xla_tensors_hlo(grads)  # noqa: SLF001
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    reduced = [line for line in text.splitlines() if " reduce-scatter(" in line]
    run(pair.mesh)
    return {
        "gathered": sorted({_first_dtype(line) for line in lines}),
        "reduced": sorted({_first_dtype(line) for line in reduced}),
        "dtypes": sorted({str(grad.dtype) for grad in grads}),
        "relative": pair.off(gradients) / max(g.abs().max().item() for g in gradients(pair.plain)),
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
            run(mesh)
            off = (value.cpu().double() - function(expected.detach()).double()).abs().item()
            found[name] = max(found.get(name, 0.0), off)
    run(mesh)
    return found


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
        run(mesh)
        assert x.grad is not None
        # Each row of the gradient counts the kept ones, as each output does (5 apart, and 1).
        kept = ((output.detach() - 1) / 10).view(-1)
        assert torch.equal(kept.cpu(), (x.grad[:, 0] / 2).cpu()), "another mask in backward"
        dropped.append([int(value) for value in kept.cpu()])
    return {"first": dropped[0], "second": dropped[1]}


def statistics() -> dict[str, float]:
    """Batch statistics are a rank's own, as on other backends."""
    pair = Pair("conv")
    pair.backward()
    run(pair.mesh)
    buffer = pair.sharded.stages[0][1].running_mean.cpu()
    return {"sum": float(buffer.double().sum())}


def files() -> dict[str, object]:
    """Pieces are refused; whole tensors come back from one model to another."""
    pair, other = Pair("tiny"), Pair("tiny")
    pair.backward()
    with torch.no_grad():
        for param in pair.sharded.parameters():
            param.add_(1.0)  # Padding as well.
    saved = {name: value.full_tensor() for name, value in pair.sharded.state_dict().items()}
    run(pair.mesh)
    saved = {name: value.cpu() for name, value in saved.items()}
    other.sharded.load_state_dict(saved)
    other.plain.load_state_dict(saved)
    run(pair.mesh)
    refused = []
    folder = pathlib.Path(tempfile.mkdtemp())
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
    return {"off": other.off(parameters), "refused": refused}


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
    import shardkit.backends.xla.replica
    from shardkit._runtime import agreement

    shardkit.backends.xla.replica.run_graph = lambda: None
    agreement.check_same_model = lambda *_: None  # It runs a collective.
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
        pair = Pair(deep, shape, reshard_after_forward=reshard)
        for _ in range(3):
            pair.sharded.zero_grad()
            # Running would end the chain in which torch_xla puts collectives.
            device = torch_xla._XLAC._xla_get_default_device()  # noqa: SLF001
            torch_xla._XLAC._set_all_reduce_token(device, None)  # noqa: SLF001
            pair.backward()
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


def replica(index: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    found = {}
    for name in names:
        print(f"replica {index}: {name}", file=sys.stderr, flush=True)
        found[name] = globals()[name]()
    pathlib.Path(folder, f"{index}.json").write_text(json.dumps(found))


def main(folder: str, names: list[str]) -> None:
    torch_xla.launch(replica, args=(names, folder))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
