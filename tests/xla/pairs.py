"""A model on XLA, sharded, beside the same one on the CPU, plain: both take the same steps."""

from __future__ import annotations

import contextlib
import dataclasses
import typing

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import Tensor, nn
from xla_ranks import on_xla

import models
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardkit import DeviceMesh

BATCH = 8
Optimizer = typing.Callable[["Iterable[nn.Parameter]"], torch.optim.Optimizer]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Of a small eps, noise in gradients that are nearly zero makes whole steps.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def num_compiles() -> int:
    """Return how often XLA has compiled a graph in this process."""
    data = met.metric_data("CompileTime")
    return 0 if data is None else data[0]


@dataclasses.dataclass
class Pair:
    """See the module's docstring.

    Attributes:
        case: What is trained.
        plain: On the CPU, on the whole batch.
        sharded: On XLA.
    """

    case: models.Case
    plain: nn.Module
    sharded: typing.Any
    optimizers: list[torch.optim.Optimizer]
    generator: torch.Generator

    @classmethod
    def make(
        cls,
        case: models.Case | str,
        mesh: DeviceMesh,
        optimizer: Optimizer = sgd,
        prepare: Callable[[nn.Module], None] = lambda _: None,
        **options: typing.Any,
    ) -> Pair:
        case = models.CASES[case] if isinstance(case, str) else case
        torch.manual_seed(0)
        plain = case.make()
        sharded = on_xla(plain)
        for model in (plain, sharded):
            prepare(model)
        for module in case.groups(sharded):
            fully_shard(module, mesh, **options)
        fully_shard(sharded, mesh, **options)
        made = [optimizer(plain.parameters()), optimizer(sharded.parameters())]
        return cls(case, plain, sharded, made, torch.Generator().manual_seed(1))

    def draw(self, size: int = BATCH) -> models.Batch:
        return self.case.batch(self.generator, size)

    def losses(self, batch: models.Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of the plain model and that of the sharded one, with their graphs."""
        on_device = tuple(part.to("xla") for part in batch)
        return self.case.loss(self.plain, batch), self.case.loss(self.sharded, on_device)

    def backward(self, batch: models.Batch, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        plain, sharded = self.losses(batch)
        (plain * scale).backward()
        (sharded * scale).backward()
        return plain.detach(), sharded.detach()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()

    def step(self) -> None:
        plain, sharded = self.backward(self.draw())
        self.update()
        torch.testing.assert_close(sharded.cpu(), plain, rtol=0, atol=2e-6)

    def assert_equal(self, atol: float = 1e-6) -> None:
        expected = dict(self.plain.named_parameters())
        for name, param in self.sharded.named_parameters():
            full = param.full_tensor().detach().cpu()
            torch.testing.assert_close(
                full, expected[name].detach(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )

    def assert_equal_gradients(self, atol: float = 1e-6) -> None:
        expected = dict(self.plain.named_parameters())
        for name, param in self.sharded.named_parameters():
            if expected[name].grad is None:
                assert param.grad is None, name
                continue
            full = param.grad.full_tensor().cpu()
            torch.testing.assert_close(
                full, expected[name].grad, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


@contextlib.contextmanager
def compiles(at_most: int) -> typing.Iterator[None]:
    """Fail if more graphs are compiled inside."""
    before = num_compiles()
    yield
    torch_xla.sync(wait=True)
    assert num_compiles() - before <= at_most


def own_graph(tensors: list[Tensor]) -> str:
    """Return the HLO of what tensors are computed by, not run yet."""
    xm.wait_device_ops()  # What a run has not delivered yet would crash the next line.
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # noqa: SLF001
    return text


def sharding_of(tensor: Tensor) -> str:
    spec: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)  # noqa: SLF001
    return spec
