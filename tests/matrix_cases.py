"""Optimizers that need whole matrices, and training with them beside an unsharded model.

Runs inside workers.
"""

from __future__ import annotations

import copy
import typing

import torch
from torch import Tensor, nn

from models import CASES, Case
from one_by_one import Entries, OneByOne
from reference import make_mesh, my_batch, shard
from shardkit import MixedPrecisionPolicy, ShardedTensor
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from collections.abc import Iterable


class Shampoo(OneByOne):
    """One preconditioner for each dimension (arXiv:1802.09568), in a list, renewed every step."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, power: float = 0.25) -> None:
        super().__init__(params, lr=lr, power=power)

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        if not state:
            state["step"] = 0
            state["factors"] = [torch.eye(size, dtype=param.dtype) * 1e-2 for size in param.shape]
        state["step"] += 1
        update = grad
        for dim, factor in enumerate(state["factors"]):
            rows = grad.movedim(dim, 0).flatten(1)
            factor.add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp(min=1e-8) ** -group["power"])
            root = root @ vectors.T
            update = torch.tensordot(root, update, ([1], [dim])).movedim(0, dim)
        param.add_(update, alpha=-group["lr"])


class Soap(OneByOne):
    """Adam in the eigenbasis of Shampoo's factors (arXiv:2409.11321), which it keeps transposed.

    It counts its steps in the parameter group, as some classes do.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, every: int = 2) -> None:
        super().__init__(params, lr=lr, every=every, count=0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
        super().step(closure)

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        if not state:
            state["left"] = torch.eye(param.shape[0], dtype=param.dtype) * 1e-2
            state["right"] = torch.eye(param.shape[1], dtype=param.dtype) * 1e-2
            state["second"] = torch.zeros_like(param)
            state["first"] = torch.zeros_like(param)
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        state["left"].lerp_(grad @ grad.T, 0.1)
        state["right"].lerp_(grad.T @ grad, 0.1)
        if group["count"] % group["every"] == 1:
            for side in ("left", "right"):
                # Rows of a transposed tensor: what a checkpoint gets is not contiguous.
                state[f"{side} basis"] = torch.linalg.eigh(state[side])[1].T
        left, right = state["left basis"], state["right basis"]
        turned = left @ grad @ right.T
        state["first"].lerp_(grad, 0.1)
        state["second"].lerp_(turned.square(), 0.05)
        step = (left @ state["first"] @ right.T) / (state["second"].sqrt() + 1e-3)
        param.add_(left.T @ step @ right, alpha=-group["lr"])


class Anchored(OneByOne):
    """Descent that pulls parameters back to their first values, which its constructor copies."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, pull: float = 0.1) -> None:
        super().__init__(params, lr=lr, pull=pull)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["anchor"] = param.detach().clone()

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        param.add_(grad, alpha=-group["lr"])
        param.lerp_(state["anchor"], group["pull"])


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, typing.Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adafactor foreach": (torch.optim.Adafactor, {"lr": 0.01, "foreach": True}),
    "shampoo": (Shampoo, {}),
    "soap": (Soap, {}),
    "anchored": (Anchored, {}),
}


def is_matrix(param: Tensor) -> bool:
    return param.ndim == 2


def optimizers_of(
    model: nn.Module, name: str, *, matrix: bool, **options: typing.Any
) -> list[torch.optim.Optimizer]:
    """Return one optimizer of a model's matrices, and AdamW of the rest."""
    optimizer_class, defaults = CLASSES[name]
    matrices = [param for param in model.parameters() if is_matrix(param)]
    rest = [param for param in model.parameters() if not is_matrix(param)]
    if matrix:
        first = MatrixOptimizer(matrices, optimizer_class, **options, **defaults)
    else:
        first = optimizer_class(matrices, **defaults)
    return [first, torch.optim.AdamW(rest, lr=1e-3)]


def compute_gradients(
    case: Case, model: nn.Module, batches: list[typing.Any], max_norm: float | None = None
) -> None:
    """Accumulate gradients over some batches, and clip them."""
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        (case.loss(model, batch) / len(batches)).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def step_both(
    plain: nn.Module,
    model: nn.Module,
    plain_by: list[torch.optim.Optimizer],
    by: list[torch.optim.Optimizer],
) -> None:
    """Step both with the gradients of the sharded model.

    So results must be equal to the last bit: whole gradients that differ by rounding are turned
    into other updates by Newton-Schulz in bf16, and by eigenvectors.
    """
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else whole(ours.grad)
    for optimizer in (*plain_by, *by):
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: typing.Any) -> Tensor:
    """Return a tensor of the global shape, in memory of its own."""
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach().clone()


def train_both(  # noqa: PLR0913 - what is varied
    name: str,
    mesh_shape: tuple[int, ...],
    *,
    steps: int = 3,
    accumulate: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    policy: MixedPrecisionPolicy | None = None,
    **options: typing.Any,
) -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
    """Train a small GPT, and step a plain copy with its gradients.

    Returns:
        The plain model, the sharded one, and the optimizers of both.
    """
    case = CASES["gpt"]
    torch.manual_seed(0)
    plain = case.make().to(dtype)
    more = {} if policy is None else {"mp_policy": policy}
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape), **more)
    plain_by = optimizers_of(plain, name, matrix=False)
    by = optimizers_of(model, name, matrix=True, **options)
    for step in range(steps):
        numbers = range(step * accumulate, (step + 1) * accumulate)
        compute_gradients(case, model, [my_batch(case, n) for n in numbers], max_norm)
        step_both(plain, model, plain_by, by)
    return plain, model, plain_by, by


def worst_difference(plain: nn.Module, model: nn.Module) -> float:
    """Return the largest difference between parameters."""
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max((a - whole(b)).abs().max().item() for a, b in pairs)
