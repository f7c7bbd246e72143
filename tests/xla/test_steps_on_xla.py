"""What happens between steps and in unusual ones: accumulation, dtypes, states, errors, copies."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch_xla
from torch import nn
from xla_graphs import adamw, own_graph, sharding_of
from xla_ranks import XlaRanks, on_xla

import models
from parity import ROWS, Pair
from shardkit import (
    DeviceMesh,
    FreedParameterError,
    MeshError,
    MixedPrecisionPolicy,
    ShardedTensor,
    StateError,
    WrapError,
    fully_shard,
    init_device_mesh,
)
from shardkit._runtime.passes import open_passes

# --- accumulation -------------------------------------------------------------------------------


def test_gradients_are_accumulated_over_graphs(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp", adamw)
    for _ in range(2):
        for is_last in (False, False, True):
            pair.sharded.set_requires_gradient_sync(is_last)
            pair.backward(pair.draw(), scale=1 / 3)
            torch_xla.sync()
        pair.assert_equal_gradients()
        pair.update()
    pair.assert_equal()


# --- graphs that end inside a step --------------------------------------------------------------


def test_a_step_may_be_cut_anywhere(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    for _ in range(2):
        plain, sharded = pair.losses(pair.draw())
        assert sharded.item() == pytest.approx(plain.item(), abs=2e-6)
        plain.backward()
        sharded.backward()
        torch_xla.sync()
        pair.assert_equal_gradients()
        pair.update()
    pair.assert_equal()


def test_a_compiled_step_is_the_same_step(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = pair.case.loss(pair.sharded, (x, y))
        loss.backward()
        pair.optimizers[1].step()
        pair.optimizers[1].zero_grad()
        return loss.detach()

    compiled = torch_xla.compile(step)
    for _ in range(3):
        batch = pair.draw()
        expected = pair.case.loss(pair.plain, batch)
        expected.backward()
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        loss = compiled(*(part.to("xla") for part in batch))
        torch.testing.assert_close(loss.cpu(), expected.detach(), rtol=0, atol=2e-6)


# --- dtypes -------------------------------------------------------------------------------------


def test_parameters_travel_in_bf16_and_gradients_in_fp32(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    pair = Pair(XlaRanks(mesh), "mlp", mp_policy=policy)
    plain, sharded = pair.backward(pair.draw())
    hlo = own_graph([p.grad.local_piece for p in pair.sharded.parameters()])
    gathers = [line for line in hlo.splitlines() if " all-gather(" in line]
    scatters = [line for line in hlo.splitlines() if " reduce-scatter(" in line]
    assert gathers
    assert all("bf16[" in line.split(" all-gather(")[0] for line in gathers)
    assert scatters
    assert all("f32[" in line.split(" reduce-scatter(")[0] for line in scatters)
    assert all(p.grad.dtype == torch.float32 for p in pair.sharded.parameters())
    torch.testing.assert_close(sharded.cpu(), plain, rtol=0.02, atol=0)


# --- inputs and outputs -------------------------------------------------------------------------


class Mixed(nn.Module):
    """Takes a batch, a table and a number; returns rows, their mean and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, *, scale: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        rows = self.linear(x) * scale + table.sum()
        return {"rows": rows, "mean": rows.square().mean(), "most": (rows > 0).sum()}


def test_batches_are_split_and_other_inputs_are_not(mesh: DeviceMesh) -> None:
    plain = Mixed()
    sharded = fully_shard(on_xla(plain), mesh)
    x, table, scale = torch.randn(ROWS, 5), torch.randn(3, 2), torch.tensor(1.5)
    inputs = [[t.clone().to(d).requires_grad_() for t in (x, table, scale)] for d in ("cpu", "xla")]
    outputs = [
        model(mine[0], mine[1], scale=mine[2])
        for model, mine in zip((plain, sharded), inputs, strict=True)
    ]
    for output in outputs:
        (output["mean"] + output["rows"].mean()).backward()
    torch_xla.sync()
    for key in ("rows", "mean"):
        torch.testing.assert_close(outputs[1][key].cpu(), outputs[0][key])
    for mine, theirs in zip(inputs[1], inputs[0], strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    torch.testing.assert_close(
        sharded.linear.weight.grad.full_tensor().cpu(), plain.linear.weight.grad
    )


def test_a_batch_that_cannot_be_split_is_refused(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    with pytest.raises(StateError, match=r"4 ranks: dim 0 .* \(6, 7\), is 6"):
        pair.sharded(torch.randn(6, 7))
    pair.step()


class Opaque:
    """No container."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class Hiding(nn.Linear):
    """Takes and returns a tensor; either may be in an object."""

    def forward(self, x: typing.Any) -> typing.Any:
        return super().forward(x.rows) if isinstance(x, Opaque) else Opaque(super().forward(x))


def test_tensors_in_an_object_are_refused(mesh: DeviceMesh) -> None:
    """They would stay what one rank has of them, and gradients be wrong."""
    model = fully_shard(Hiding(5, 3).to("xla"), mesh)
    x = torch.randn(ROWS, 5)
    with pytest.raises(StateError, match="was passed its tensors in an object that is neither"):
        model(Opaque(x))
    with pytest.raises(StateError, match="returned its tensors in an object that is neither"):
        model(x)
    assert_outside()


# --- random numbers -----------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x)[:, None]
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return nn.functional.dropout(attended[:, 0] * 0 + 1, 0.5)


def test_ranks_drop_different_elements_and_a_seed_repeats_them(mesh: DeviceMesh) -> None:
    import torch_xla.core.xla_model as xm

    model = fully_shard(Dropping().to("xla"), mesh)
    x = torch.randn(4 * mesh.size(), 16)
    outputs = []
    for seed in (3, 3, 4):
        xm.set_rng_state(seed)
        outputs.append(model(x).detach().cpu())
    parts = outputs[0].chunk(mesh.size())
    assert all(not torch.equal(parts[0], other) for other in parts[1:])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert 0.3 < (outputs[0] > 0).float().mean() < 0.7


# --- buffers ------------------------------------------------------------------------------------


def test_running_statistics_are_the_mean_over_the_ranks(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).to("xla"), mesh)
    x = torch.randn(ROWS, 3)
    model(x).sum().backward()
    torch_xla.sync()
    parts = x.chunk(mesh.size())
    mean = torch.stack([part.mean(0) for part in parts]).mean(0)
    var = torch.stack([part.var(0) for part in parts]).mean(0)
    torch.testing.assert_close(model[0].running_mean.cpu(), 0.1 * mean)
    torch.testing.assert_close(model[0].running_var.cpu(), 0.9 + 0.1 * var)
    assert model[0].num_batches_tracked.item() == 1
    model.eval()
    model(x)
    assert model[0].num_batches_tracked.item() == 1


# --- parameters outside of forward --------------------------------------------------------------


@pytest.mark.parametrize("is_written", [False, True])
def test_a_buffer_may_be_a_sharded_tensor(is_written: bool, mesh: DeviceMesh) -> None:
    plain = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    model = fully_shard(on_xla(plain), mesh)

    def shift(module: nn.Module, args: typing.Any, y: torch.Tensor) -> torch.Tensor:
        del args
        if is_written:
            module.start += 1
        return y + module.start.sum(1)

    outputs = []
    for each, x in ((plain, torch.ones(ROWS, 7)), (model, torch.ones(ROWS, 7).to("xla"))):
        each[0].register_buffer("start", each[0].weight.detach().clone())
        each[0].register_forward_hook(shift)
        outputs += [each(x), each[0].start]
    assert isinstance(model[0].start, ShardedTensor)
    torch.testing.assert_close(outputs[2].cpu(), outputs[0])
    torch.testing.assert_close(outputs[3].full_tensor().cpu(), outputs[1])


class Balanced(nn.Module):
    """Keeps a loss and a number beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
        self.loss: typing.Any = None
        self.factor: typing.Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        self.loss = y.square().mean()
        self.factor = torch.full((), 0.5, device=x.device)
        return typing.cast("torch.Tensor", self.layers[1](y))


@pytest.mark.parametrize("training", [True, False])
def test_numbers_may_be_kept_beside_the_outputs(training: bool, mesh: DeviceMesh) -> None:
    plain = Balanced()
    model = on_xla(plain)
    fully_shard(model.layers[0], mesh)
    fully_shard(model, mesh)
    x = torch.randn(ROWS, 7)
    with torch.set_grad_enabled(training):
        for _ in range(2):
            losses = [
                each(batch).sum() + each.factor * each.loss
                for each, batch in ((plain, x), (model, x.to("xla")))
            ]
            if training:
                for loss in losses:
                    loss.backward()
            torch_xla.sync()
            assert model.loss.item() == pytest.approx(plain.loss.item(), abs=1e-6)
            torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=0, atol=1e-5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if training:
            torch.testing.assert_close(mine.grad.full_tensor().cpu(), theirs.grad)


def test_a_parameter_may_be_swapped_for_a_plain_one(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    for model in (pair.plain, pair.sharded):
        weight = model.layers[0].weight
        torch.utils.swap_tensors(
            weight, nn.Parameter(torch.ones(weight.shape, device=weight.device))
        )
    for _ in range(2):
        pair.step()
    pair.assert_equal()
    assert isinstance(pair.sharded.layers[0].weight, ShardedTensor)


class Counting(nn.Module):
    """Puts new tensors in the place of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fails = False
        self.keeps: typing.Callable[[torch.Tensor], torch.Tensor] = lambda y: y.detach().mean(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.5 * self.mean + self.keeps(y)
        self.count = self.count + 1
        if self.fails:
            raise ArithmeticError
        return typing.cast("torch.Tensor", y - 0.1 * self.count)


def test_buffers_may_be_exchanged(mesh: DeviceMesh) -> None:
    plain = Counting()
    model = fully_shard(on_xla(plain), mesh)
    x = torch.randn(ROWS, 7)
    for fails in (False, True, False):
        if fails:
            model.fails = True
            with pytest.raises(ArithmeticError):
                model(x.to("xla"))
            model.fails = False
            continue
        outputs = plain(x), model(x.to("xla"))
        torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=0, atol=1e-6)
        torch_xla.sync()
    torch.testing.assert_close(model.mean.cpu(), plain.mean.detach(), rtol=0, atol=1e-6)
    assert model.count.item() == plain.count.item() == 2
    model.keeps = lambda y: y.detach()  # A rank's rows.
    with pytest.raises(StateError, match=r"shape \(2, 3\) in the place of the buffer 'mean'"):
        model(x.to("xla"))
    assert model.count.item() == 2


def test_a_parameter_that_was_kept_cannot_be_used(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    kept = []
    pair.sharded.layers[0].register_forward_pre_hook(lambda m, _: kept.append(m.weight))
    pair.step()
    with pytest.raises(FreedParameterError, match=r"layers\.0\.weight"):
        kept[0].sum()


def test_parameters_unsharded_by_hand_can_be_read(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    pair.step()
    layer = pair.sharded.layers[0]
    layer.unshard()
    expected = pair.plain.layers[0].weight.detach()
    torch.testing.assert_close(layer.weight.detach().cpu(), expected, rtol=0, atol=1e-6)
    pair.step()
    pair.assert_equal()
    assert layer.weight.shape == expected.shape
    layer.reshard()
    pair.step()
    pair.assert_equal()


def test_reductions_do_not_count_padding(mesh: DeviceMesh) -> None:
    layer = nn.Linear(3, 3)
    sharded = fully_shard(on_xla(layer), mesh)
    with torch.no_grad():
        for each in (layer, sharded):
            each.weight.fill_(2.0)
            each.weight.add_(1.0)
    weight = sharded.weight.detach()
    assert weight.sum().item() == 27
    assert weight.prod().item() == 3.0**9
    assert weight.min().item() == 3
    assert weight.mean().item() == 3
    assert torch.linalg.vector_norm(weight).item() == 9
    assert bool((weight == 3).all())


def test_initialization_of_sharded_parameters(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Embedding(9, 5, padding_idx=2).to("xla"), mesh)
    weight = model.weight
    nn.init.constant_(weight, 0.5)
    with torch.no_grad():
        weight[2].fill_(0)
    expected = torch.full((9, 5), 0.5)
    expected[2] = 0
    assert torch.equal(weight.full_tensor().detach().cpu(), expected)
    nn.init.normal_(weight)
    torch_xla.sync()
    assert sharding_of(weight.local_piece) == "{devices=[4]0,1,2,3}"
    assert 0.5 < weight.detach().full_tensor().std().item() < 1.5


def test_state_dicts_are_loaded_and_copies_are_independent(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "gpt")
    torch.manual_seed(5)
    other = models.CASES["gpt"].make()
    copied = copy.deepcopy(pair.sharded)
    pair.sharded.load_state_dict(other.state_dict())
    torch_xla.sync()
    for name, param in pair.sharded.named_parameters():
        assert sharding_of(param.local_piece) == "{devices=[4]0,1,2,3}", name
        expected = other.get_parameter(name).detach()
        assert torch.equal(param.full_tensor().detach().cpu(), expected)
    x, _ = pair.draw()
    with torch.no_grad():
        for model, plain in ((copied, pair.plain), (pair.sharded, other)):
            torch.testing.assert_close(model(x).cpu(), plain(x), rtol=0, atol=2e-6)


# --- refusals -----------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused(mesh: DeviceMesh) -> None:
    from shardkit import CPUOffloadPolicy

    with pytest.raises(MeshError, match="reshard_after_forward=2"):
        fully_shard(nn.Linear(2, 2).to("xla"), mesh, reshard_after_forward=2)
    with pytest.raises(WrapError, match="offload"):
        fully_shard(nn.Linear(2, 2).to("xla"), mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(WrapError, match="Move the module first"):
        fully_shard(nn.Linear(2, 2), mesh)
    with pytest.raises(MeshError, match=r"needs 6 devices, but there are 4"):
        init_device_mesh("xla", (6,))
    with pytest.raises(MeshError, match="no process groups"):
        mesh.get_group()


def test_a_forward_that_failed_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    pair.step()

    def fail(*_: object) -> None:
        raise KeyError

    handle = pair.sharded.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        pair.sharded(pair.draw()[0])
    handle.remove()
    assert_outside()
    pair.step()
    pair.assert_equal()


def assert_outside() -> None:
    """Nothing draws apart, and buffers of views are written through, as outside of a forward."""
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None  # noqa: SLF001
    assert open_passes() is None


def test_a_root_that_is_refused_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(7, 3).to("xla"), mesh)
    x = torch.randn(ROWS, 7)
    model(x)
    own = model.weight
    del model.weight
    model.weight = nn.Parameter(torch.zeros(3, 7, device="xla"))
    with pytest.raises(StateError, match="no longer the parameter"):
        model(x)
    assert_outside()
    model.weight = own
    model(x)


def integers(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.int64)


# Of a tensor of zeros of a rank's rows: the draw, and the mean that it should have.
DRAWN: dict[str, tuple[typing.Callable[[torch.Tensor], torch.Tensor], float | None]] = {
    "normal, both tensors": (lambda x: torch.normal(x + 3, x + 1), 3.0),
    "normal, mean a tensor": (lambda x: torch.normal(x + 3, 0.5), 3.0),
    "normal, std a tensor": (lambda x: torch.normal(3.0, x + 0.5), 3.0),
    "normal, a size": (lambda x: torch.normal(3.0, 0.5, x.shape, device=x.device), 3.0),
    "randint_like": (lambda x: torch.randint_like(x, 11).float(), 5.0),
    "randint_like, from": (lambda x: torch.randint_like(x, 5, 16).float(), 10.0),
    "random_": (lambda x: integers(x).random_(11).float(), 5.0),
    "random_, from": (lambda x: integers(x).random_(5, 16).float(), 10.0),
    "random_, all": (lambda x: x.clone().random_() / 2**24, 0.5),
    "log_normal_": (lambda x: x.clone().log_normal_(1.0, 0.5).log(), 1.0),
    "cauchy_": (lambda x: x.clone().cauchy_(2.0, 0.1).clamp(0, 4), 2.0),
    "geometric_": (lambda x: x.clone().geometric_(0.25), 4.0),
    "bernoulli_ of a tensor": (lambda x: x.clone().bernoulli_(x + 0.25), 0.25),
    "rrelu": (lambda x: nn.functional.rrelu(x - 1, 0.2, 0.4, training=True), -0.3),
    "multinomial": (lambda x: torch.multinomial(x + 1, 3).float()[:, :1] + x[:, :1], None),
    "multinomial, again": (
        lambda x: torch.multinomial(x + 1, 9, replacement=True).float() + x[:, :9],
        None,
    ),
    "randperm": (lambda x: x + torch.randperm(x.shape[1], device=x.device), 15.5),
    "gumbel_softmax": (nn.functional.gumbel_softmax, 1 / 32),
    "dropout1d": (lambda x: nn.functional.dropout1d(x[..., None] + 1), 1.0),
    "alpha_dropout": (lambda x: nn.functional.alpha_dropout(x, 0.5, training=True), None),
}


class Drawing(nn.Module):
    def __init__(self, draws: dict[str, typing.Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.draws = draws

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        zeros = self.linear(x) * 0
        return {name: draw(zeros) for name, (draw, _) in self.draws.items()}


def test_every_draw_of_a_rank_is_its_own(mesh: DeviceMesh) -> None:
    model = fully_shard(Drawing(DRAWN).to("xla"), mesh)
    with torch.no_grad():
        outputs = {name: y.cpu() for name, y in model(torch.randn(64, 32)).items()}
    for name, (_, mean) in DRAWN.items():
        parts = outputs[name].chunk(mesh.size())
        assert all(not torch.equal(parts[0], other) for other in parts[1:]), name
        if mean is not None:
            found = outputs[name].mean().item()
            assert found == pytest.approx(mean, abs=0.1 * max(abs(mean), 1)), (name, found)


def test_rrelu_is_differentiated_by_its_own_numbers(mesh: DeviceMesh) -> None:
    model = fully_shard(Drawing({"rrelu": (DRAWN["rrelu"][0], 0)}).to("xla"), mesh)
    output = model(torch.randn(8, 32))["rrelu"]
    output.sum().backward()
    assert model.linear.weight.grad.full_tensor().abs().sum() == 0  # Of zeros, but it runs.


@pytest.mark.parametrize(
    "draw", [lambda x: torch.poisson(x + 1), lambda x: torch.binomial(x + 3, x + 0.5)]
)
def test_what_would_be_the_same_on_all_ranks_is_refused(
    draw: typing.Callable[[torch.Tensor], torch.Tensor], mesh: DeviceMesh
) -> None:
    model = fully_shard(Drawing({"draw": (draw, 0)}).to("xla"), mesh)
    with pytest.raises(StateError, match=r"aten\.(poisson|binomial)"):
        model(torch.randn(8, 32))


def test_a_generator_of_the_user_is_obeyed(mesh: DeviceMesh) -> None:
    """It is one object for all ranks."""
    generator = torch.Generator().manual_seed(0)
    draws = {"draw": (lambda x: x + torch.randn(2, 32, generator=generator).to(x.device), 0)}
    model = fully_shard(Drawing(draws).to("xla"), mesh)
    assert model(torch.randn(8, 32))["draw"].cpu().shape == (8, 32)


class Clamped(nn.Linear):
    """Writes to its weight in the forward."""

    writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_forward_that_writes_to_its_parameters_is_refused(
    mesh: DeviceMesh, *, is_first: bool
) -> None:
    """In ranks' region their values may differ, and nobody compares them."""
    model = nn.Sequential(Clamped(4, 4), nn.Linear(4, 2)).to("xla")
    model[0].writes = is_first
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    x = torch.ones(4, 4).to("xla")
    if not is_first:
        for _ in range(3):
            model(x).sum().backward()
            torch_xla.sync()
    model[0].writes = True
    with pytest.raises(StateError, match=r"wrote to its parameter '0\.weight', which meshes of"):
        model(x)


def test_a_forward_that_wrote_and_raised_is_told_at_the_next(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(Clamped(4, 4), nn.Linear(3, 2)).to("xla"), mesh)
    with pytest.raises(RuntimeError, match=r"shape|size|dim"):
        model(torch.ones(4, 4).to("xla"))
    model[0].writes = False
    model[1] = nn.Identity()
    with pytest.raises(StateError, match=r"wrote to its parameter '0\.weight'"):
        model(torch.ones(4, 4).to("xla"))
    assert_outside()


def test_a_write_to_what_is_unsharded_by_hand_is_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(4, 4).to("xla"), mesh)
    for _ in range(2):
        model.unshard()
        assert model.weight.shape == (4, 4)
        model(torch.ones(4, 4).to("xla")).sum().backward()
        model.reshard()
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(1.0)
    with pytest.raises(StateError, match="wrote to its parameter 'weight'"):
        model.reshard()
