"""What is trained by Lightning: a model in a `LightningModule`, and data."""

from __future__ import annotations

import typing

import lightning
import torch
from torch import Tensor, nn

SAMPLES = 50
BATCH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(numbers[:, :5], numbers[:, 5:])


def make_loader() -> torch.utils.data.DataLoader[typing.Any]:
    return torch.utils.data.DataLoader(make_data(), batch_size=BATCH)


class Lit(lightning.LightningModule):
    """Two networks and a list of modules, all of which `training_step` calls."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = make_net(seed)
        self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.losses: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = self.net(x)
        return sum((head(hidden) - y).square().mean() for head in self.heads)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adversarial(lightning.LightningModule):
    """A generator and a critic, trained by hand; the generator's last forward has no backward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = make_net(seed), make_net(seed + 1)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x = batch[0]
        of_generator, of_critic = self.optimizers()
        noise = x.flip(0)
        loss = self.critic(nn.functional.pad(self.generator(noise), (0, 2))).sum()
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        made = nn.functional.pad(self.generator(noise).detach(), (0, 2))
        gap = self.critic(x).mean() - self.critic(made).mean()
        self.manual_backward(gap.square())
        of_critic.step()
        of_critic.zero_grad()
        self.losses += [float(loss.detach()), float(gap.detach())]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in self.children()]
