"""Short scripts of real work, each written once: run sharded by all ranks, and by plain torch.

A script does what a user's does, and asks a `Run` for what differs: what is sharded, and which
part of a batch there is.
"""

from __future__ import annotations

import copy
import os
import pathlib
import signal
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from models import GPT, VOCABULARY
from shardkit import fully_shard, init_device_mesh
from shardkit.checkpoint import latest, load, save

BATCH = 8


class Run:
    """Where a script runs: sharded over all ranks, or plain, with the data of all of them.

    Args:
        is_plain: By torch alone, without communication.
    """

    def __init__(self, *, is_plain: bool) -> None:
        self.is_plain = is_plain
        self.losses: list[Tensor] = []  # Those of all data, step by step.
        self.models: list[nn.Module] = []  # Whose weights are compared in the end.
        self.mesh = None if is_plain else init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(self, *modules: nn.Module) -> None:
        """Call fully_shard for each."""
        for module in () if self.is_plain else modules:
            fully_shard(module, mesh=self.mesh)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return what this process trains on: its rank's part, or one part after the other."""
        parts = whole.chunk(dist.get_world_size())
        return list(parts) if self.is_plain else [parts[dist.get_rank()]]

    def own(self, whole: Tensor) -> Tensor:
        """Return its rank's part, or all."""
        return whole if self.is_plain else self.parts(whole)[0]

    def total(self, own: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        if not self.is_plain:
            dist.all_reduce(own)
        return own

    def note(self, loss: Tensor) -> None:
        """Log a loss: the mean over the ranks."""
        mean = loss.detach().clone()
        self.losses.append(mean if self.is_plain else self.total(mean) / dist.get_world_size())


def draw(step: int, *shape: int) -> Tensor:
    """Draw the same batch on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)


class KilledError(Exception):
    """The machine went away."""


# --- 1: pretraining that is killed, and goes on on another number of ranks ------------------------


def pretrain(run: Run, folder: str, kill_at: int | None = None) -> None:
    torch.manual_seed(0)
    model = GPT().double()
    run.shard(*model.blocks, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.models.append(model)
    step, newest = 0, None if run.is_plain else latest(folder)
    if newest is not None:
        step = load(newest, model, optimizer, schedule=schedule)["step"]
    while step < 6:
        tokens = (draw(step, 13).abs() * 25).long() % VOCABULARY
        logits = model(run.own(tokens)[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), run.own(tokens)[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == kill_at:
            raise KilledError
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.note(loss)
        step += 1
        if step % 2 == 0 and not run.is_plain:
            path = pathlib.Path(folder, f"step-{step}")
            save(path, model, optimizer, step=step, schedule=schedule)


# --- 2: adapters of a frozen base -----------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(run: Run, when: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if when == "after":  # The base is trained, sharded, before anybody thinks of adapters.
        run.shard(model.double()[2], model)
        model(run.own(draw(0, 6))).square().mean().backward()
        model.zero_grad()
    model.requires_grad_(False)
    added = [Adapted(model[0]), Adapted(model[2])]
    model[0], model[2] = added[0].double(), added[1].double()
    if when == "before":
        run.shard(*added, model.double())
    elif not run.is_plain:
        fully_shard([m for each in added for m in (each.down, each.up)], mesh=run.mesh)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.models.append(model)
    for step in range(1, 6):
        loss = F.mse_loss(model(run.own(draw(step, 6))), run.own(draw(step + 50, 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss)


# --- 3: a VQ-VAE whose forward moves its codebook -------------------------------------------------


class Codebook(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.total = run.total

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        chosen = F.one_hot(torch.cdist(z, self.codes).argmin(1), 5).to(z.dtype)
        code = chosen @ self.codes
        if self.training:
            with torch.no_grad():  # Of all ranks, so that all write the same.
                counts, sums = self.total(chosen.sum(0)), self.total(chosen.T @ z)
                means = torch.where(counts[:, None] > 0, sums / counts[:, None], self.codes)
                self.codes.lerp_(means, 0.1)
        return z + (code - z).detach(), F.mse_loss(z, code.detach())


class Autoencoder(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.codebook = Codebook(run)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        code, commitment = self.codebook(self.encoder(x))
        return F.mse_loss(self.decoder(code), x) + 0.25 * commitment


def vector_quantization(run: Run) -> None:
    torch.manual_seed(0)
    model = Autoencoder(run).double()
    run.shard(model.encoder, model.codebook, model.decoder, model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    run.models.append(model)
    before = [param.detach().clone() for param in model.codebook.parameters()]
    for step in range(6):
        loss = model(run.own(draw(step, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss)
    assert not torch.equal(model.codebook.codes.detach(), before[0]), "the codebook has not moved"


# --- 4: WGAN with a gradient penalty --------------------------------------------------------------


def adversarial(run: Run) -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    last = parametrizations.spectral_norm(nn.Linear(8, 1))
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), last).double()
    run.shard(maker, critic[0], critic)
    run.models += [maker, critic]
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.02, betas=(0.0, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.0, 0.9))
    for step in range(6):
        noise, real = run.own(draw(step, 3)), run.own(draw(step + 50, 4))
        fake = maker(noise).detach()
        mixed = real.lerp(fake, run.own(draw(step + 90, 1)).sigmoid()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        run.note(loss)
        if step % 2:
            critic.requires_grad_(False)
            loss = -critic(maker(noise)).mean()
            maker_optimizer.zero_grad()
            loss.backward()
            maker_optimizer.step()
            critic.requires_grad_(True)
            run.note(loss)


# --- 5: distillation from an average of the student -----------------------------------------------


def self_distillation(run: Run) -> None:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU()).double()
    head = nn.Linear(8, 8).double()
    run.shard(student[0], student, head)
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    params = [*student.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.02)
    run.models += [student, head, teacher]
    for step in range(6):
        x = run.own(draw(step, 6))
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(head(student(x + 0.1 * run.own(draw(step + 50, 6)))), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, param in zip(teacher.parameters(), student.parameters(), strict=True):
                average.lerp_(param, 0.1)
        run.note(loss)


# --- 6: a vocabulary that grows while the model is trained ----------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))


def growing_vocabulary(run: Run) -> None:
    torch.manual_seed(0)
    model, size = Tagger().double(), 6
    run.shard(model.embed, model.body, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.models.append(model)
    handle = None
    for step in range(9):
        if step == 3:  # Three more words; for a while only their rows are trained.
            weight, size = model.embed.weight.detach(), 9
            grown = nn.Embedding(size, 4).double()
            with torch.no_grad():
                grown.weight[:6] = weight if run.is_plain else weight.full_tensor()
            mask = (torch.arange(size) >= 6)[:, None]
            handle = grown.weight.register_hook(lambda grad, mask=mask: grad * mask)
            run.shard(grown)
            model.embed = grown
            optimizer.add_param_group({"params": grown.parameters()})
            kept = weight.clone() if run.is_plain else weight.full_tensor()
        if step == 6:
            now = model.embed.weight.detach()
            assert torch.equal((now if run.is_plain else now.full_tensor())[:6], kept)
            handle.remove()
        tokens = run.own((draw(step, 5).abs() * 10).long() % size)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)


# --- 7: sharpness-aware minimization: two passes a step -------------------------------------------


def sharpness_aware(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    run.shard(model.double()[0], model[2], model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.models.append(model)
    for step in range(6):
        x, y = run.own(draw(step, 6)), run.own(draw(step + 50, 1))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        run.note(loss)
        params = [param for param in model.parameters() if param.grad is not None]
        norm = nn.utils.get_total_norm([param.grad for param in params])
        with torch.no_grad():
            uphill = [0.05 * param.grad / (norm + 1e-12) for param in params]
            for param, away in zip(params, uphill, strict=True):
                param.add_(away)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for param, away in zip(params, uphill, strict=True):
                param.sub_(away)
        optimizer.step()
        optimizer.zero_grad()


# --- 8: MAML: a step of gradient descent that is differentiated -----------------------------------


def meta_learning(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    run.shard(model[0], model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run.models.append(model)
    params = dict(model.named_parameters())
    for step in range(5):
        total = []
        for task in range(2):
            x, y = run.own(draw(step, 4)), (task + 1) * run.own(draw(step + 50, 1))
            inner = F.mse_loss(functional_call(model, params, (x,)), y)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            pairs = zip(params.items(), grads, strict=True)
            fast = {name: param - 0.1 * grad for (name, param), grad in pairs}
            query, answer = run.own(draw(step + 70, 4)), (task + 1) * run.own(draw(step + 90, 1))
            total.append(F.mse_loss(functional_call(model, fast, (query,)), answer))
        loss = sum(total) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)


# --- 9: parametrized convolutions in channels_last, batch normalization, a gradient scaler --------


def images(run: Run) -> None:
    torch.manual_seed(0)
    stem = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), nn.ReLU()
    )
    model = nn.Sequential(
        stem, nn.Conv2d(6, 4, 3), nn.Flatten(), parametrizations.orthogonal(nn.Linear(16, 5))
    )
    model = model.double().to(memory_format=torch.channels_last)
    run.shard(stem, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    run.models.append(model)
    for step in range(5):
        x = draw(step, 3, 6, 6).to(memory_format=torch.channels_last)
        losses = []
        for part in run.parts(x):  # Each rank normalizes by its own batch, as under DDP.
            target = (part.flatten(1).sum(1).abs() * 7).long() % 5
            losses.append(F.cross_entropy(model(part), target))
        loss = sum(losses) / len(losses)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.note(loss)


# --- 10: a machine that is taken away, and a run that goes on -------------------------------------


def preempted(run: Run, folder: str) -> None:
    for start in range(1 if run.is_plain else 2):  # The second start goes on from the first.
        torch.manual_seed(start)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        run.shard(model[0], model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        newest, step = None if run.is_plain else latest(folder), 0
        if newest is not None:
            step = load(newest, model, optimizer)["step"]
        is_over = torch.zeros(1)
        before = signal.signal(signal.SIGTERM, lambda *_, flag=is_over: flag.fill_(1))
        while step < 6 and not is_over:
            loss = F.mse_loss(model(run.own(draw(step, 6))), run.own(draw(step + 50, 1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.note(loss)
            step += 1
            if step == 3 and not run.is_plain and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # One machine hears of it.
            if not run.is_plain:
                dist.all_reduce(is_over, op=dist.ReduceOp.MAX)  # All ranks stop at one step.
        signal.signal(signal.SIGTERM, before)
        if not run.is_plain:
            save(pathlib.Path(folder, f"step-{step}"), model, optimizer, step=step, overwrite=True)
    run.models.append(model)


SCRIPTS: dict[str, typing.Callable[..., None]] = {
    "adapters added before": lambda run, _: adapters(run, "before"),
    "adapters added after": lambda run, _: adapters(run, "after"),
    "a VQ-VAE": lambda run, _: vector_quantization(run),
    "WGAN with a gradient penalty": lambda run, _: adversarial(run),
    "distillation from an average": lambda run, _: self_distillation(run),
    "a growing vocabulary": lambda run, _: growing_vocabulary(run),
    "sharpness-aware minimization": lambda run, _: sharpness_aware(run),
    "MAML": lambda run, _: meta_learning(run),
    "images": lambda run, _: images(run),
    "a preempted run": preempted,
}
