"""Train a small byte-level GPT, sharded over all ranks, on the source of Python's standard library.

On one machine, with two CPU processes or with every GPU:

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    torchrun --standalone --nproc-per-node gpu examples/train_gpt.py --device cuda --bf16

On XLA devices one process computes for all ranks, and passes the batches of all ranks:

    python examples/train_gpt.py --device xla --bf16

On several hosts the same script runs under torchrun's --nnodes and --rdzv-endpoint. All code for
sharding is in `shard`; the rest is plain PyTorch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from shardkit import DeviceMesh, MixedPrecisionPolicy, fully_shard, init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Iterable

VOCABULARY = 256  # A token is a byte.
WIDTH, DEPTH, HEADS, CONTEXT = 192, 4, 6, 128
MAX_TEXT_BYTES = 20_000_000
WARMUP = 0.02  # Part of the training in which the learning rate rises.
REPORT_EVERY = 10  # Steps between two looks at the clock, which all ranks share.

console = Console()


# ------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each of them added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, head, position, channel)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer with rotary positions; the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        half_head = WIDTH // HEADS // 2
        frequencies = 1000 ** (-torch.arange(half_head) / half_head)
        angles = torch.outer(torch.arange(CONTEXT), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):
                nn.init.zeros_(parameter)  # Every block starts as the identity.
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position (arXiv:2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def make_mesh(options: argparse.Namespace, num_ranks: int) -> DeviceMesh:
    """Return a mesh of all ranks; with --replicate several groups each hold the whole model."""
    if options.replicate == 1:
        return init_device_mesh(options.device, (num_ranks,), mesh_dim_names=("shard",))
    sizes = (options.replicate, num_ranks // options.replicate)
    return init_device_mesh(options.device, sizes, mesh_dim_names=("replicate", "shard"))


def shard(model: GPT, mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """Keep this rank's part of `model`, and gather each block only while it is in use."""
    policy = MixedPrecisionPolicy()
    if options.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# -------------------------------------------------------------------------------------------- text


def read_texts() -> tuple[Tensor, Tensor]:
    """Return the bytes for training and, from other files, the bytes for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    kept, held_out = bytearray(), bytearray()
    for index, path in enumerate(sorted(library.rglob("*.py"))):
        if excluded.isdisjoint(path.relative_to(library).parts):
            (held_out if index % 20 == 0 else kept).extend(path.read_bytes())
        if len(kept) > MAX_TEXT_BYTES:
            break
    if min(len(kept), len(held_out)) <= CONTEXT:
        sys.exit(f"found no text to train on: {library} holds no Python source")
    return torch.frombuffer(kept, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def random_segments(
    text: Tensor, count: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `count` random segments of `text`, and the byte that follows each of their bytes."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    segments = text[starts + torch.arange(CONTEXT + 1)].to(device, torch.int64)
    return segments[:, :-1], segments[:, 1:]


# ---------------------------------------------------------------------------------------- training


class Ranks:
    """The ranks of this training.

    Attributes:
        device: The device of this process.
        rank: This process's position.
        size: Number of ranks.
        batches: Number of batches that this process passes to the model: one for each of its ranks.
    """

    def __init__(self, device_type: str) -> None:
        self.is_xla = device_type == "xla"
        self.rank, self.batches = 0, 1
        if self.is_xla:
            import torch_xla.runtime as xr

            self.size = self.batches = xr.global_runtime_device_count()
            self.device = torch.device("xla")
            return
        if device_type == "cpu":
            dist.init_process_group("gloo")
            self.device = torch.device("cpu")
        else:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def of_first(self, value: float) -> float:
        """Return the value of rank 0, on all ranks."""
        if self.is_xla:
            return value
        shared = torch.tensor(value, device=self.device)
        dist.broadcast(shared, src=0)
        return shared.item()

    def mean(self, value: Tensor) -> float:
        """Return the mean over the ranks; on XLA the value is one already."""
        if self.is_xla:
            return value.item()
        dist.all_reduce(value)
        return value.item() / self.size

    def end_step(self) -> None:
        """Run the traced graph; on other devices operators run at once."""
        if self.is_xla:
            import torch_xla

            torch_xla.sync()

    def leave(self) -> None:
        """Leave the other processes."""
        if not self.is_xla:
            dist.destroy_process_group()


class Budget:
    """The part of the training that is done; it is the same on all ranks.

    It decides the learning rate and when to stop. If each rank used its own clock, one would stop a
    step before the others, and they would wait for it.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.num_steps = options.steps
        self.seconds = options.seconds
        self.ranks = ranks
        self.started = time.monotonic()
        self.done = 0.0

    def progress(self, step: int) -> float:
        """Return the part that is done before `step`: 0.0 at the start, 1.0 or more at the end."""
        if self.num_steps is not None:
            return step / self.num_steps
        if step % REPORT_EVERY == 0:
            done = (time.monotonic() - self.started) / self.seconds
            self.done = self.ranks.of_first(done)
        return self.done


def make_optimizer(model: GPT, learning_rate: float) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices only, not the scales and shifts of norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), foreach=True)


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    options: argparse.Namespace,
    ranks: Ranks,
) -> None:
    """Train until the time or the number of steps is used up."""
    rank, device = ranks.rank, ranks.device
    generator = torch.Generator().manual_seed(1 + rank)  # Every process draws different data.
    count = options.batch * ranks.batches
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=rank != 0) as bar:
        task = bar.add_task("starting", total=1.0)
        budget = Budget(options, ranks)
        step, tenths = 0, 0
        recent_loss = torch.zeros((), device=device)
        while (progress := budget.progress(step)) < 1.0:
            warmup = min(1.0, (progress + 1e-3) / WARMUP)
            for group in optimizer.param_groups:
                group["lr"] = options.lr * warmup * (1 + math.cos(math.pi * progress)) / 2
            loss = loss_of(model, *random_segments(text, count, generator, device))
            optimizer.zero_grad()  # Here and not after the step: the gradients are weighed later.
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            step += 1
            recent_loss += loss.detach()
            ranks.end_step()
            if step % REPORT_EVERY == 0 and rank == 0:
                seconds = time.monotonic() - budget.started
                rate = step * options.batch * CONTEXT * ranks.size / seconds
                mean_loss = recent_loss.item() / REPORT_EVERY
                recent_loss.zero_()
                state = f"step {step}  loss {mean_loss:.3f}  {rate:,.0f} tokens/s"
                bar.update(task, completed=progress, description=state)
                if int(progress * 10) > tenths:  # For logs, which have no progress bar.
                    tenths = int(progress * 10)
                    bar.console.print(f"{progress:4.0%}  {state}", highlight=False)
        bar.update(task, completed=1.0)


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, ranks: Ranks) -> float:
    """Return the mean loss over random segments of `text`, which differ between ranks."""
    generator = torch.Generator().manual_seed(1_000_000 + ranks.rank)
    count = 16 * ranks.batches
    losses = []
    for _ in range(12):
        losses.append(loss_of(model, *random_segments(text, count, generator, ranks.device)))
        ranks.end_step()
    return ranks.mean(torch.stack(losses).mean())


@torch.no_grad()
def sample(model: GPT, prompt: str, num_bytes: int, ranks: Ranks) -> str:
    """Continue `prompt` by `num_bytes` bytes; all ranks must call it: each holds a part."""
    generator = torch.Generator().manual_seed(0)  # The same bytes on all ranks.
    tokens = list(prompt.encode())
    for _ in range(num_bytes):
        seen = tokens[-CONTEXT:]
        # One length only, or XLA would compile for each; later bytes do not change earlier ones.
        padded = torch.tensor(seen + [0] * (CONTEXT - len(seen)), device=ranks.device)
        logits = model(padded.expand(ranks.batches, -1))[0].float().cpu()[len(seen) - 1]
        token = torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        tokens.append(int(token))
    return bytes(tokens).decode(errors="replace")


# ------------------------------------------------------------------------------------------ memory


def memory_table(model: GPT, optimizer: torch.optim.Optimizer, ranks: Ranks) -> Table:
    """Return the bytes that this rank holds between and in steps, beside those of a whole copy."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    stats = model.memory_stats()
    rows = [
        ("parameters", local_nbytes(parameters, ranks), whole_nbytes(parameters)),
        ("gradients", local_nbytes(gradients, ranks), whole_nbytes(gradients)),
        ("optimizer state", local_nbytes(states, ranks), whole_nbytes(states)),
        ("unsharded parameters, at most", stats["peak_unsharded_nbytes"], 0),
        ("buffers to reduce gradients", stats["reduce_buffer_nbytes"], 0),
    ]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    table = Table("", title="MB per rank")
    table.add_column("sharded", justify="right")
    table.add_column("replicated", justify="right")
    for name, sharded, replicated in rows:
        table.add_row(name, f"{sharded / 1e6:.2f}", f"{replicated / 1e6:.2f}")
    return table


def local_nbytes(tensors: Iterable[Tensor], ranks: Ranks) -> int:
    """Return the bytes of one rank's shards; unsharded state, like step counters, counts whole."""
    tensors = list(tensors)
    sharded = whole_nbytes(t.to_local() for t in tensors if hasattr(t, "to_local"))
    # On XLA this process has the shards of all ranks.
    return sharded // ranks.batches + whole_nbytes(t for t in tensors if not hasattr(t, "to_local"))


def whole_nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -------------------------------------------------------------------------------------------- main


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--seconds", type=float, default=110.0, help="time to train (110)")
    parser.add_argument("--steps", type=int, help="steps to train, whatever time they take")
    parser.add_argument("--batch", type=int, default=4, help="segments per rank and step (4)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (2e-3)")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, reduce in fp32")
    parser.add_argument("--replicate", type=int, default=1, help="copies of the sharded model (1)")
    options = parser.parse_args()
    if options.device == "xla":
        return options
    if "RANK" not in os.environ:
        parser.exit(2, f"{__file__} must be started by torchrun:\n\n{parser.description}")
    if int(os.environ["WORLD_SIZE"]) % options.replicate:
        parser.error("--replicate must divide the number of ranks")
    return options


def main() -> None:
    """Train, then show memory, validation loss and a sample."""
    options = parse_options()
    ranks = Ranks(options.device)
    mesh = make_mesh(options, ranks.size)  # On XLA the mesh is made before the device is used.
    console.quiet = ranks.rank != 0

    torch.manual_seed(0)  # Every rank makes the same model.
    model = GPT().to(ranks.device)
    train_text, validation_text = read_texts()
    num_params = sum(parameter.numel() for parameter in model.parameters())
    shard(model, mesh, options)
    console.print(
        f"{num_params:,} parameters over {ranks.size} ranks, "
        f"{len(train_text):,} bytes of Python to train on",
        highlight=False,
    )

    optimizer = make_optimizer(model, options.lr)
    train(model, optimizer, train_text, options, ranks)
    console.print(memory_table(model, optimizer, ranks))
    loss = validation_loss(model, validation_text, ranks)
    console.print(f"validation loss, on files held out: [bold]{loss:.3f}[/bold] nats per byte")
    written = sample(model, "def read", 300, ranks)
    console.print(Panel(Text(written), title="written by the model", expand=False))
    ranks.leave()


if __name__ == "__main__":
    main()
