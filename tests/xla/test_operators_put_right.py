"""Operators that torch_xla computes wrongly, or that XLA ended the process for: as on the CPU."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch_xla
from torch import Tensor, nn
from torch.nn import functional

from shardkit import DeviceMesh, MixedPrecisionPolicy, StateError, fully_shard

ROWS, WIDTH = 8, 16


class Net(nn.Module):
    """Uses the outputs of a layer, and a tensor that is no buffer."""

    def __init__(self, use: typing.Callable[[Net, Tensor], typing.Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, WIDTH)
        self.use = use
        self.kept = torch.tensor([3.0, 1.0, 4.0, 1.5])

    def forward(self, x: Tensor) -> typing.Any:
        return self.use(self, self.layer(x) * 3)


def planes(y: Tensor) -> Tensor:
    return y.view(-1, 1, 4, 4)


def pooled(y: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = functional.max_pool2d(planes(y), 2, return_indices=True)
    return values, indices


USES: dict[str, typing.Callable[[Net, Tensor], typing.Any]] = {
    "indices of pooling": lambda _, y: pooled(y),
    "indices of pooling, converted": lambda _, y: pooled(y)[0] * pooled(y)[1].float(),
    "indices of pooling, undone": lambda _, y: functional.max_unpool2d(*pooled(y), 2),
    "cummax": lambda _, y: torch.cummax(y, 1),
    "cummax, converted": lambda _, y: y * torch.cummax(y, 1)[1].to(y.dtype),
    "sorted attribute": lambda net, y: y[:, :4] * net.kept.argsort(),
    "largest of an attribute": lambda net, y: y * net.kept.topk(2)[0][1],
    "place of the largest": lambda net, y: y * net.kept.argmax(0, keepdim=True),
    "quantile of an attribute": lambda net, y: y * net.kept.quantile(0.3),
    "sorted constant": lambda _, y: y[:, :3] * torch.tensor([3.0, 1.0, 2.0]).to(y).argsort(),
    "sorted": lambda _, y: y.sort(1),
    "singular values of an attribute": lambda net, y: (
        y * torch.linalg.svdvals(net.kept.view(2, 2))[0]
    ),
    "six dims": lambda _, y: y.view(-1, 2, 1, 2, 2, 2),
    "elu": lambda _, y: functional.elu(y, alpha=1.5),
    "celu": lambda _, y: functional.celu(y, alpha=0.5),
    "selu": lambda _, y: functional.selu(y),
    "elu in place": lambda _, y: functional.elu(y.clone(), inplace=True),
    "amax of all": lambda _, y: y[0].amax().expand(len(y), 1),
    "amin, kept dims": lambda _, y: y[0].amin((), keepdim=True).expand(len(y), 1),
    "norm of the largest": lambda _, y: y.norm(float("inf"), 1, keepdim=True),
    "norm of the least": lambda _, y: planes(y).norm(-float("inf"), (2, 3)),
    "integers plus a sum": lambda _, y: (y, y.int() + y.int().sum()),
    "bytes plus a sum": lambda _, y: (y, y.to(torch.int8) + (y > 0).sum()),
    "halves plus a sum": lambda _, y: (y, y.detach().bfloat16() + y.detach().sum()),
    "singles plus a double": lambda _, y: y + y.sum().double(),
    "halves or a number": lambda net, y: (y, y.detach().bfloat16().where(y > 0, net.kept[0])),
    "integers or a number": lambda _, y: (y, y.int().where(y > 0, (y > 0).sum())),
    "loss of one example": lambda _, y: y * functional.cross_entropy(y[0], y[1].argmax()),
    "loss of one example, unreduced": lambda _, y: (
        y * functional.nll_loss(y[0], y[1].argmax(), reduction="none")
    ),
}


def tensors(output: typing.Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


def loss(outputs: list[Tensor]) -> Tensor:
    """Return a sum with weights that do not depend on the outputs, whose rounding differs."""
    floats = [output.flatten() for output in outputs if output.requires_grad]
    weights = [torch.arange(len(each)).cos().to(each) for each in floats]
    return torch.stack([each @ w for each, w in zip(floats, weights, strict=True)]).sum()


@pytest.mark.filterwarnings("ignore:aten..selu. an autograd kernel was not registered")
@pytest.mark.parametrize("name", USES)
def test_values_and_gradients_are_those_of_the_cpu(name: str, mesh: DeviceMesh) -> None:
    plain = Net(USES[name])
    sharded: typing.Any = copy.deepcopy(plain).to("xla")
    sharded.kept = plain.kept.to("xla")
    fully_shard(sharded, mesh)
    x = torch.randn(ROWS, 5)
    # By rank: some uses mix the rows of a batch.
    by_rank = [tensors(plain(part)) for part in x.chunk(4)]
    expected = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    found = tensors(sharded(x.to("xla")))
    loss(expected).backward()
    loss(found).backward()
    torch_xla.sync()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.int32, torch.int64), (torch.bfloat16, torch.float32)]
)
def test_inputs_have_the_dtype_that_torch_says(
    dtype: torch.dtype, wide: torch.dtype, mesh: DeviceMesh
) -> None:
    plain = nn.Linear(5, 3)
    model: typing.Any = fully_shard(copy.deepcopy(plain).to("xla"), mesh)
    batch = (torch.arange(5.0 * ROWS).view(ROWS, 5) - 9).to(dtype)
    results = []
    for net, x in ((plain, batch), (model, batch.to("xla"))):
        net.register_forward_pre_hook(lambda _, args: args[0].float())
        results.append(net(x + x.float().amax().to(wide)))  # A number does not widen the batch.
    torch.testing.assert_close(results[1].cpu(), results[0])


def test_inputs_of_six_dims_are_split(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).to("xla"), mesh)
    x = torch.randn(ROWS, 2, 2, 2, 2, 2)
    found, expected = model(x.to("xla")), model(x.flatten(1).to("xla"))
    torch.testing.assert_close(found.cpu(), expected.cpu())


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("mode", ["train", "eval", "bf16", "eval in bf16"])
def test_batch_normalization(mode: str, dims: int, mesh: DeviceMesh) -> None:
    """A rank's statistics are those of its part; running ones are the mean over the ranks."""
    norm = nn.BatchNorm1d(3) if dims == 2 else nn.BatchNorm2d(3)
    plain = nn.Sequential(nn.Linear(3, 3) if dims == 2 else nn.Conv2d(3, 3, 1), norm)
    norm.running_var = torch.rand(3) + 0.5
    plain.train("eval" not in mode)
    sharded: typing.Any = copy.deepcopy(plain).to("xla")
    dtype = torch.bfloat16 if "bf16" in mode else None
    fully_shard(sharded, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    x = torch.randn(4 * ROWS, 3, 2, 2)[(..., *(0 for _ in range(4 - dims)))] * 2 + 1
    before, outputs, variances = norm.running_var, [], []
    for part in x.chunk(4):
        norm.running_var = before.clone()
        outputs.append(plain(part))
        variances.append(norm.running_var)
    expected, found = torch.cat(outputs), sharded(x.to("xla"))
    for output in (expected, found):
        (output.float() * expected.detach().cos().to(output.device)).mean().backward()
    torch_xla.sync()
    close: typing.Any = {"rtol": 0, "atol": 1e-5 if dtype is None else 3e-2}
    torch.testing.assert_close(found.detach().cpu().float(), expected.detach(), **close)
    variance = sharded[1].running_var.cpu()
    torch.testing.assert_close(variance, torch.stack(variances).mean(0), **close)
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad, **close)


# --- refused in backward --------------------------------------------------------------------------

BACKWARDS: dict[str, typing.Callable[[Tensor], Tensor]] = {
    "AvgPool2DBackward0": lambda y: functional.avg_pool2d(planes(y), 3, ceil_mode=True),
    "MaskedScatterBackward0": lambda y: y.masked_scatter(y > 0, y * 3),
    "CholeskyBackward0": lambda y: torch.cholesky(y.t() @ y + 9 * torch.eye(WIDTH).to(y)),
}


@pytest.mark.parametrize("node", BACKWARDS)
def test_a_backward_that_the_host_would_compute_is_refused(node: str, mesh: DeviceMesh) -> None:
    net = Net(lambda _, y: BACKWARDS[node](y))
    output = fully_shard(net.to("xla"), mesh)(torch.randn(ROWS, 5))
    with pytest.raises(
        StateError, match=f"an operator of {node} inside a backward: torch_xla does"
    ):
        output.sum().backward()
    net.use = lambda _, y: y
    net(torch.randn(ROWS, 5)).sum().backward()
    torch_xla.sync()


READS: dict[str, typing.Callable[[Tensor], object]] = {
    "item": lambda grad: grad.sum().item(),
    "if": lambda grad: bool(grad.isnan().any()),
    "cpu": lambda grad: grad.cpu(),
    "tolist": lambda grad: grad.tolist(),
    "to": lambda grad: grad.to("cpu"),
    "copy_": lambda grad: torch.empty(grad.shape).copy_(grad),
}


@pytest.mark.parametrize("name", READS)
def test_hooks_of_backward_cannot_read(name: str, mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).to("xla"), mesh)
    model[1].register_full_backward_hook(lambda _, ins, __: READS[name](ins[0]) and None)
    with pytest.raises(StateError, match="inside a backward takes a tensor's values to the host"):
        model(torch.randn(ROWS, 5)).sum().backward()


def test_a_hook_prints_without_values(mesh: DeviceMesh, capsys: pytest.CaptureFixture[str]) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).to("xla"), mesh)
    model[1].register_full_backward_hook(lambda _, ins, __: print(ins[0]))
    model(torch.randn(ROWS, 5)).sum().backward()
    assert "<a rank's tensor inside of a backward, of shape (2, 5)" in capsys.readouterr().out


@pytest.mark.parametrize("is_synced", [False, True])
def test_what_a_forward_has_kept_cannot_be_read(is_synced: bool, mesh: DeviceMesh) -> None:
    net: typing.Any = fully_shard(Net(lambda _, y: y).to("xla"), mesh)
    kept: list[Tensor] = []
    net.layer.register_forward_hook(lambda _, __, y: kept.extend((y.detach(), y.norm().detach())))
    output = net(torch.randn(ROWS, 5))
    if is_synced:
        torch_xla.sync()
    whole, number = kept
    reads: tuple[typing.Callable[[], object], ...] = (
        *(whole.cpu, whole.tolist, lambda: whole.to("cpu"), number.item),
        lambda: torch.empty(whole.shape).copy_(whole),
        lambda: torch.equal(whole, whole + 1),
        lambda: (whole * 2 + torch.ones(WIDTH, device="xla")).mean().item(),
    )
    for read in reads:
        with pytest.raises(StateError, match="that a forward has kept beside its outputs"):
            read()
    assert repr(number).startswith("<a rank's tensor that a forward has kept, of shape ()")
    assert output.cpu().shape == (ROWS, WIDTH)


def test_a_loss_outside_is_computed_by_the_host(mesh: DeviceMesh) -> None:
    """Its operands come out of the region, but the graph in which they are has it."""
    model = fully_shard(nn.Linear(5, 3).to("xla"), mesh)
    plain = nn.Linear(5, 3)
    plain.load_state_dict({k: v.full_tensor().cpu() for k, v in model.state_dict().items()})
    x = torch.randn(ROWS, 5)
    for net, batch in ((model, x.to("xla")), (plain, x)):
        functional.glu(net(batch).square().repeat(1, 2)).lgamma().sum().backward()
    torch_xla.sync()
    torch.testing.assert_close(
        model.weight.grad.full_tensor().cpu(), plain.weight.grad, rtol=1e-4, atol=1e-4
    )
