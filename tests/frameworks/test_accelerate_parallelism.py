"""Tensor and context parallelism of a `ParallelismConfig`, beside training on one rank."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate_runs import accelerate_ranks
from launched import TIMEOUT_S
from torch import Tensor, nn

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.frameworks

STEPS, BATCH, LENGTH, WIDTH = 6, 4, 8, 15
TOLERANCE = 1e-12  # In fp64.


# --- the model and the data -----------------------------------------------------------------------


class GatheredOverRanks(torch.autograd.Function):
    """Keys of all ranks of a group, along the sequence."""

    @staticmethod
    def forward(ctx: typing.Any, keys: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(keys) for _ in range(group.size())]
        dist.all_gather(parts, keys.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


class Block(nn.Module):
    """Causal attention with one head, and two layers that tensor parallelism can split."""

    group: dist.ProcessGroup | None = None
    """Ranks that have parts of the sequences; None: this rank has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 22)
        self.down = nn.Linear(22, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        queries, keys, of_keys = self.query(x), self.key(x), places
        if self.group is not None:
            keys = GatheredOverRanks.apply(keys, self.group)
            of_keys = GatheredOverRanks.apply(places, self.group)
        scores = queries @ keys.transpose(1, 2) / WIDTH
        hidden = of_keys[:, None, :] > places[:, :, None]
        x = x + scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ keys
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    _no_split_modules: typing.ClassVar = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, places)
        return self.head(x)


def make() -> typing.Any:
    torch.manual_seed(0)
    return Net().double()


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (STEPS * BATCH, LENGTH)
        self.inputs = torch.randn(*shape, 7, generator=generator, dtype=torch.float64)
        self.wanted = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.wanted[index]


def places_in(inputs: Tensor) -> Tensor:
    return torch.arange(LENGTH, dtype=torch.float64).repeat(len(inputs), 1)


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """What a training was like."""

    losses: list[float] = dataclasses.field(default_factory=list)  # Means over the ranks, by step.
    # Of the gradients before they were clipped, by step.
    norms: list[float] = dataclasses.field(default_factory=list)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train_on_one_rank() -> tuple[History, dict[str, Tensor]]:
    model, history = make(), History()
    optimizer = make_optimizer(model)
    for inputs, wanted in torch.utils.data.DataLoader(Sequences(), batch_size=BATCH):
        loss = F.mse_loss(model(inputs, places_in(inputs)), wanted)
        loss.backward()
        history.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        history.losses.append(float(loss.detach()))
    return history, model.state_dict()


def split(model: typing.Any, mesh: typing.Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Run:
    """A model that Accelerate has prepared, with `sizes` of a `ParallelismConfig`."""

    def __init__(
        self, sizes: dict[str, int], plugin: dict[str, typing.Any], *, is_sharded_before: bool
    ) -> None:
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.utils import FullyShardedDataParallelPlugin

        config = ParallelismConfig(**sizes)
        settings = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **plugin}
        given = FullyShardedDataParallelPlugin(**settings)
        self.accelerator: typing.Any = Accelerator(
            cpu=True, fsdp_plugin=given, parallelism_config=config
        )
        mesh: typing.Any = self.accelerator.torch_device_mesh
        model = make()
        if config.tp_enabled:
            split(model, mesh["tp"])
        self.num_parts = config.cp_size
        for block in model.blocks if config.cp_enabled else ():
            block.group = mesh["cp"].get_group()
        if is_sharded_before:
            of_data = mesh[tuple(config.fsdp_dim_names)]
            for block in model.blocks:
                shardkit.fully_shard(block, mesh=of_data)
            shardkit.fully_shard(model, mesh=of_data)
        share = BATCH // config.data_parallel_size
        loader = torch.utils.data.DataLoader(Sequences(), batch_size=share)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, make_optimizer(model), loader
        )
        self.history = History()

    def train(self, steps: range) -> None:
        for step, (inputs, wanted) in enumerate(self.loader):
            if step in steps:
                self.step(inputs, wanted)

    def step(self, inputs: Tensor, wanted: Tensor) -> None:
        buffers = [inputs, wanted, places_in(inputs)]
        with self.accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            assert inputs.shape[1] == LENGTH // self.num_parts
            loss = F.mse_loss(self.model(inputs, buffers[2]), wanted)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
        self.history.norms.append(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))


def beside_one_rank(
    sizes: dict[str, int], plugin: dict[str, typing.Any], is_sharded_before: bool, folder: str
) -> None:
    """Train half of the steps, save, go astray, load, and train the rest."""
    wanted, expected = train_on_one_rank()
    with accelerate_ranks():
        run = Run(sizes, plugin, is_sharded_before=is_sharded_before)
        assert all(isinstance(param, shardkit.ShardedTensor) for param in run.model.parameters())
        run.train(range(STEPS // 2))
        run.accelerator.save_state(folder)
        astray, run.history = run.history, History()
        run.train(range(STEPS // 2, STEPS - 1))
        run.accelerator.load_state(folder)
        run.history = astray
        run.train(range(STEPS // 2, STEPS))
        torch.testing.assert_close(run.history.losses, wanted.losses, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(run.history.norms, wanted.norms, rtol=TOLERANCE, atol=0)
        whole = run.accelerator.get_state_dict(run.model)
        assert whole.keys() == (expected.keys() if dist.get_rank() == 0 else set())
        for name, value in whole.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE, msg=name)
        run.accelerator.save_state(f"{folder}/end")
        check_merged(run, whole, pathlib.Path(folder) / "end")


def check_merged(run: Run, whole: dict[str, Tensor], folder: pathlib.Path) -> None:
    """Compare the file of the model, merged from pieces if it consists of them."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    pieces = folder / "pytorch_model_fsdp_0"
    if not pieces.exists():
        if dist.get_rank() == 0:
            saved = torch.load(folder / "pytorch_model_fsdp.bin")
            assert all(torch.equal(saved[name], value) for name, value in whole.items())
    elif dist.get_rank() == 0:
        merge_fsdp_weights(str(pieces), str(folder / "merged"))
        saved = load_file(folder / "merged" / "model.safetensors")
        assert saved.keys() == whole.keys()
        assert all(torch.equal(saved[name], value) for name, value in whole.items())
    else:
        run.accelerator.wait_for_everyone()


FILES = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
TENSOR: dict[str, int] = {"tp_size": 2, "dp_shard_size": 2}


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("is_sharded_before", [False, True], ids=["by prepare", "before"])
def test_tensor_parallelism(
    spawn: Spawn, tmp_path: pathlib.Path, files: str, is_sharded_before: bool
) -> None:
    args = (TENSOR, {"state_dict_type": files}, is_sharded_before, str(tmp_path))
    spawn(beside_one_rank, 4, *args, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("plugin", [{"activation_checkpointing": True}, {"cpu_offload": True}])
def test_tensor_parallelism_with_other_settings(
    spawn: Spawn, tmp_path: pathlib.Path, plugin: dict[str, bool]
) -> None:
    spawn(beside_one_rank, 4, TENSOR, plugin, False, str(tmp_path), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("sizes", "plugin"),
    [
        ({"cp_size": 2}, {"state_dict_type": "FULL_STATE_DICT"}),
        ({"cp_size": 2, "dp_shard_size": 2}, {"state_dict_type": "SHARDED_STATE_DICT"}),
        ({"cp_size": 2, "dp_shard_size": 2}, {"cpu_ram_efficient_loading": True}),
        ({"cp_size": 2, "tp_size": 2}, {"state_dict_type": "SHARDED_STATE_DICT"}),
    ],
    ids=str,
)
def test_context_parallelism(
    spawn: Spawn,
    tmp_path: pathlib.Path,
    sizes: dict[str, int],
    plugin: dict[str, typing.Any],
) -> None:
    if importlib.metadata.version("accelerate").startswith("1.12."):
        pytest.skip("this version of Accelerate leaves out context parallelism")
    ranks = 4 if len(sizes) > 1 else 2
    spawn(beside_one_rank, ranks, sizes, plugin, False, str(tmp_path), timeout_s=TIMEOUT_S)


# --- what is refused or warned of -----------------------------------------------------------------


def load_split_ones_on_one_rank() -> None:
    with accelerate_ranks():
        Run(TENSOR, {"cpu_ram_efficient_loading": True}, is_sharded_before=False)


def test_split_parameters_are_loaded_on_all_ranks(spawn_errors: Spawn) -> None:
    for error in spawn_errors(load_split_ones_on_one_rank, 4, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert "'blocks.0.up.weight' is a DTensor: the first rank can send" in error.message


def split_nothing() -> None:
    with accelerate_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "split", lambda *_: None)
        if dist.get_rank() > 0:
            Run(TENSOR, {}, is_sharded_before=False)
        else:
            with pytest.warns(UserWarning, match="tp_size=2, and the model has no DTensors"):
                Run(TENSOR, {}, is_sharded_before=False)


def test_a_model_that_is_not_split_is_warned_of(spawn: Spawn) -> None:
    spawn(split_nothing, 4, timeout_s=TIMEOUT_S)
