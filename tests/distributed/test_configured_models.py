"""A model configured by a file trains as one whose calls are written by hand: to the bit."""

from __future__ import annotations

import copy
import pathlib
import typing
import weakref

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

import shardkit
from models import Batch, cross_entropy, token_batch
from reference import full_grads, full_parameters
from shardkit import (
    CheckpointError,
    Config,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    checkpoint_module,
    from_config,
    fully_shard,
    init_device_mesh,
)
from shardkit._compat.torch_tensors import HAS_GRAD_DTYPE
from shardkit._module.activation_checkpoint import CheckpointedForward
from workers import Spawn, on_ranks
from wrapped_models import FeedForward, Stack

pytestmark = pytest.mark.helpers

Fields = dict[str, typing.Any]
BLOCKS = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block",
}
STEPS = 3


def fsdp(version: int, *, top: Fields | None = None, **fields: typing.Any) -> Fields:
    named = {f"fsdp_{name}": value for name, value in fields.items()}
    return {
        "distributed_type": "FSDP",
        "use_cpu": True,
        "fsdp_config": {"fsdp_version": version, **BLOCKS, **named},
        **(top or {}),
    }


def sizes(replicate: int, shard: int) -> Fields:
    prefix = "parallelism_config_dp_"
    return {f"{prefix}replicate_size": replicate, f"{prefix}shard_size": shard}


def by_hand(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    recompute: bool = False,
    prefetch: Fields | None = None,
    root_policy: MixedPrecisionPolicy | None = None,
    **options: typing.Any,
) -> typing.Any:
    """Shard a `Stack` by calls of `fully_shard`."""
    names = ("replicate", "shard")[-len(shape) :]
    options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in typing.cast("Stack", model).blocks:
        fully_shard(checkpoint_module(block) if recompute else block, **options)
    if root_policy is not None:
        options["mp_policy"] = root_policy
    root: typing.Any = fully_shard(model, **options)
    if prefetch is not None:
        root.set_prefetch_policy(**prefetch)
    return root


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
NO_PREFETCH = {"forward": False, "backward": "none"}
CASES: dict[str, tuple[int, Fields, Fields]] = {
    "FULL_SHARD": (
        2,
        fsdp(1, sharding_strategy="FULL_SHARD"),
        {"shape": (2,), "prefetch": NO_PREFETCH},
    ),
    "SHARD_GRAD_OP": (
        2,
        fsdp(1, reshard_after_forward="SHARD_GRAD_OP", backward_prefetch="BACKWARD_POST"),
        {
            "shape": (2,),
            "reshard_after_forward": False,
            "prefetch": {"forward": False, "backward": "post"},
        },
    ),
    "NO_SHARD": (
        2,
        fsdp(1, sharding_strategy=3, forward_prefetch=True, backward_prefetch="BACKWARD_PRE"),
        {"shape": (2, 1), "reshard_after_forward": False, "prefetch": {"forward": True}},
    ),
    "HYBRID_SHARD": (
        4,
        fsdp(1, top={"num_machines": 2, "num_processes": 4}, sharding_strategy="HYBRID_SHARD"),
        {"shape": (2, 2), "prefetch": NO_PREFETCH},
    ),
    "HYBRID_SHARD_ZERO2": (
        4,
        fsdp(1, top={"num_machines": 2}, sharding_strategy="HYBRID_SHARD_ZERO2"),
        {"shape": (2, 2), "reshard_after_forward": False},
    ),
    "version 2": (2, fsdp(2), {"shape": (2,)}),
    "version 2, three ranks": (3, fsdp(2), {"shape": (3,)}),
    "version 2, one rank": (1, fsdp(2), {"shape": (1,)}),
    "version 2, kept": (
        2,
        fsdp(2, reshard_after_forward="false"),
        {"shape": (2,), "reshard_after_forward": False},
    ),
    "version 2, hybrid": (
        4,
        fsdp(2, top={"parallelism_config": sizes(2, 2)}),
        {"shape": (2, 2)},
    ),
    "version 2, replicas": (
        2,
        fsdp(2, top={"parallelism_config": sizes(2, 1)}),
        {"shape": (2, 1), "reshard_after_forward": False},
    ),
    "offload": (
        2,
        fsdp(2, offload_params=True),
        {"shape": (2,), "offload_policy": CPUOffloadPolicy()},
    ),
    "activation checkpointing": (
        2,
        fsdp(2, activation_checkpointing=True),
        {"shape": (2,), "recompute": True},
    ),
    "bf16": (
        2,
        fsdp(2, top={"mixed_precision": "bf16"}),
        {
            "shape": (2,),
            "mp_policy": BF16,
            "root_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.bfloat16, output_dtype=torch.float32
            ),
        },
    ),
    "seeds that differ": (2, fsdp(2, cpu_ram_efficient_loading=True), {"shape": (2,)}),
}


def batch(step: int, rank: int) -> Batch:
    return token_batch(torch.Generator().manual_seed(100 * step + rank), 2)


def train(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor | None]]:
    """Return losses, and parameters and the last gradients as wholes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    x, y = batch(0, dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, full_parameters(model), full_grads(model)


def train_both(file: str, options: Fields) -> dict[str, typing.Any]:
    """Train by the file and by hand; on ranks but the first the file's model begins otherwise."""
    torch.manual_seed(0)
    plain = Stack()
    config = from_config(file)
    torch.manual_seed(dist.get_rank() if config.settings.sync_module_states else 0)
    configured = config.apply(Stack())
    repeated = [
        isinstance(vars(block).get("forward"), CheckpointedForward)
        for block in typing.cast("Stack", configured).blocks
    ]
    assert repeated == [options.get("recompute", False)] * 3  # Numbers are the same without it.
    mine, theirs = train(configured), train(by_hand(copy.deepcopy(plain), **options))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    groups = [name for name, m in configured.named_modules() if isinstance(m, shardkit.FSDPModule)]
    return {"groups": groups, "loss": [loss.item() for loss in mine[0]]}


@pytest.mark.parametrize("name", CASES)
def test_a_file_does_what_calls_do(spawn: Spawn, tmp_path: pathlib.Path, name: str) -> None:
    ranks, fields, options = CASES[name]
    file = tmp_path / "fsdp.yaml"
    file.write_text(yaml.safe_dump(fields))
    found = spawn(train_both, ranks, str(file), options)
    assert [item["groups"] for item in found] == [["", "blocks.0", "blocks.1", "blocks.2"]] * ranks
    assert all(item["loss"][-1] < item["loss"][0] for item in found)


# --- what ranks hold before ---------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(3)
def test_values_come_from_rank_0_and_objects_stay(version: int) -> None:
    """An optimizer made before, a tie, ranks on meta but for the first: all as with one model."""
    torch.manual_seed(0)
    plain = Stack()
    plain.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
    plain.register_buffer("count", torch.tensor([5.0]))
    plain.head.weight = plain.tokens.weight
    config = from_config(fsdp(version))
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Stack()
        model.register_buffer("scale", torch.tensor([0.0, 0.0]), persistent=False)
        model.register_buffer("count", torch.tensor([0.0]))
        model.head.weight = model.tokens.weight
    if dist.get_rank() == 0:
        model.load_state_dict(plain.state_dict())
        model.scale = plain.scale.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config.apply(model)
    assert isinstance(model.tokens.weight, shardkit.ShardedTensor)
    assert model.head.weight is model.tokens.weight
    torch.testing.assert_close(full_parameters(model), full_parameters(plain), rtol=0, atol=0)
    assert torch.equal(model.scale, plain.scale)
    assert torch.equal(model.count, plain.count)
    x, y = batch(0, 0)
    for net in (model, plain):
        cross_entropy(net, (x, y)).backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(full_parameters(model), full_parameters(plain), rtol=0, atol=1e-6)


class Tables(nn.Module):
    """Blocks with a buffer of their own and others that all have in common, kept and not kept."""

    def __init__(self) -> None:
        super().__init__()
        tables = {name: torch.rand(8) for name in ("kept", "common")}
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for block in self.blocks:
            block.register_buffer("own", torch.rand(8), persistent=False)
            for name, table in tables.items():
                block.register_buffer(name, table, persistent=name == "kept")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.own * block.common * block.kept
        return x


def buffers_of_all(version: int) -> list[tuple[str, str, str, list[float]]]:
    torch.manual_seed(dist.get_rank())
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Tables()
    top = {"mixed_precision": "bf16"}
    from_config(fsdp(version, top=top, transformer_layer_cls_to_wrap="Linear")).apply(model)
    model(torch.ones(2, 8)).sum().backward()
    return [
        (name, str(buffer.dtype), buffer.device.type, buffer.tolist())
        for name, buffer in model.named_buffers(remove_duplicate=False)
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_buffers_come_from_rank_0_wherever_they_stand(spawn: Spawn, version: int) -> None:
    first, *others = spawn(buffers_of_all, 2, version)
    assert len(first) == 9
    assert {dtype for _, dtype, *_ in first} == {
        "torch.bfloat16" if version == 1 else "torch.float32"
    }
    assert others == [first]


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(2)
def test_a_model_that_all_have_on_meta_is_initialized(version: int) -> None:
    with torch.device("meta"):
        model = Stack()
    stays = from_config(fsdp(version)).apply(copy.deepcopy(model))
    assert all(param.is_meta for param in stays.parameters())

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    from_config(fsdp(version)).apply(model, param_init_fn=fill)
    assert all((values == 0.5).all() for values in full_parameters(model).values())


def frozen_in_bf16() -> tuple[set[torch.dtype], torch.dtype]:
    model = Stack().bfloat16()
    model.head.requires_grad_(requires_grad=False)
    from_config(fsdp(2, top={"mixed_precision": "bf16"})).apply(model)
    trained = {param.dtype for param in model.parameters() if param.requires_grad}
    return trained, model.head.weight.dtype


def test_what_is_trained_is_fp32_between_steps(spawn: Spawn) -> None:
    assert spawn(frozen_in_bf16, 2) == [({torch.float32}, torch.bfloat16)] * 2


def ignored() -> list[bool]:
    model = Stack()
    from_config(fsdp(2, ignored_modules=r"head|blocks\.1\.fc.")).apply(model)
    whole = [model.head.weight, model.blocks[1].fc1.weight, model.blocks[1].fc2.bias]
    split = [model.tokens.weight, model.blocks[0].fc1.weight]
    assert torch.equal(whole[0], whole[0].clone())
    return [isinstance(param, shardkit.ShardedTensor) for param in whole + split]


def test_ignored_modules_stay_whole(spawn: Spawn) -> None:
    assert spawn(ignored, 2) == [[False] * 3 + [True] * 2] * 2


def replicated(precision: str) -> tuple[str, list[str]]:
    torch.manual_seed(dist.get_rank())
    config = from_config({"distributed_type": "MULTI_CPU", "mixed_precision": precision})
    model = config.apply(Stack())
    with torch.no_grad():
        assert model(batch(0, 0)[0]).dtype == torch.float32
    losses, params, _ = train(model)
    gathered: list[typing.Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, params)
    torch.testing.assert_close(gathered[0], gathered[-1], rtol=0, atol=0)
    groups = [n for n, m in model.named_modules() if isinstance(m, shardkit.FSDPModule)]
    return str(losses[0].dtype), groups


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_without_fsdp_the_model_is_replicated(spawn: Spawn, precision: str) -> None:
    assert spawn(replicated, 2, precision) == [("torch.float32", [""])] * 2


@on_ranks(4)
def test_tensor_parallelism_goes_before_sharding() -> None:
    """A model that is split over tp, then sharded, beside the plain one, on the same data."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    plain = FeedForward()
    config = from_config(
        {
            "distributed_type": "FSDP",
            "use_cpu": True,
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"dp_shard_size": 2, "tp_size": 2},
        }
    )
    model = copy.deepcopy(plain)
    tp = config.tensor_parallel_mesh()
    assert tp is not None
    parallelize_module(model, tp, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    config.apply(model)
    assert (config.mesh().shape, config.mesh().mesh_dim_names) == ((2,), ("shard",))
    torch.manual_seed(1)
    x = torch.randn(2, 4, 32)  # For each rank of the shard axis its own.
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    plain(x).square().mean().backward()
    model(x[config.mesh().get_local_rank()]).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    # Sums are made in another order.
    torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-5, atol=1e-6)


# --- errors on ranks ----------------------------------------------------------------------------


def apply(fields: Fields) -> None:
    from_config(fields).apply(Stack())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            fsdp(2, transformer_layer_cls_to_wrap="Blok"),
            "Blok",
        ),
        (fsdp(2, ignored_modules="heads"), "is the whole name of no module of this Stack"),
        (
            fsdp(2, top={"parallelism_config": sizes(2, 2)}),
            "2 x 2 x 1 = 4 ranks (dp_replicate_size x dp_shard_size x tp_size), and there are 2",
        ),
        ({"distributed_type": "NO"}, "distributed_type is NO, which is one process"),
        (
            fsdp(
                2,
                top={
                    "parallelism_config": {
                        "parallelism_config_dp_shard_size": 1,
                        "parallelism_config_tp_size": 2,
                    }
                },
            ),
            "no parameter of this Stack is split",
        ),
    ],
)
def test_what_does_not_fit_raises_on_all_ranks(
    spawn_errors: Spawn, fields: Fields, text: str
) -> None:
    errors = spawn_errors(apply, 2, fields)
    assert all(error is not None and text in error.message for error in errors), errors


# --- states -------------------------------------------------------------------------------------


def save_and_load(folder: str, fields: Fields) -> list[str]:
    config = from_config(fields)
    model = config.apply(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch(0, dist.get_rank())
    for _ in range(2):
        cross_entropy(model, (x, y)).backward()
        optimizer.step()
    config.save(folder, model, optimizer)
    saved = full_parameters(model)
    other = from_config(fields).apply(Stack())
    others = torch.optim.AdamW(other.parameters(), lr=1e-2)
    config.load(folder, other, others)
    torch.testing.assert_close(full_parameters(other), saved, rtol=0, atol=0)
    for net, stepper in ((model, optimizer), (other, others)):
        net.zero_grad()
        cross_entropy(net, (x, y)).backward()
        stepper.step()
    torch.testing.assert_close(full_parameters(other), full_parameters(model), rtol=0, atol=0)
    return sorted(file.name for file in pathlib.Path(folder).iterdir())


@pytest.mark.parametrize(
    ("version", "kind", "files"),
    [
        (2, "SHARDED_STATE_DICT", None),
        (2, "FULL_STATE_DICT", ["optimizer.bin", "pytorch_model_fsdp.bin"]),
        (1, "FULL_STATE_DICT", ["optimizer.bin", "pytorch_model_fsdp.bin"]),
        (
            1,
            "LOCAL_STATE_DICT",
            [f"pytorch_model_fsdp_rank-0000000{rank}-of-00000002.pth" for rank in range(2)],
        ),
    ],
)
def test_state_is_saved_in_the_shape_that_is_named(
    spawn: Spawn, tmp_path: pathlib.Path, version: int, kind: str, files: list[str] | None
) -> None:
    found = spawn(save_and_load, 2, str(tmp_path / "state"), fsdp(version, state_dict_type=kind))
    assert files is None or found[1] == files
    if kind == "FULL_STATE_DICT":
        whole = torch.load(tmp_path / "state" / "pytorch_model_fsdp.bin")
        assert set(whole) == set(Stack().state_dict())


def load_nothing(folder: str) -> None:
    config: Config = from_config(fsdp(1, state_dict_type="LOCAL_STATE_DICT"))
    config.load(folder, config.apply(Stack()))


def test_what_was_not_saved_is_an_error_on_all_ranks(
    spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    for error in spawn_errors(load_nothing, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert "is not there: it is what Config.save writes" in error.message


def test_a_folder_is_no_url(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = from_config(fsdp(1, state_dict_type="LOCAL_STATE_DICT"))
    with pytest.raises(CheckpointError, match="is a URL"):
        config.save("s3://bucket/run", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def save_beside_a_folder(folder: str) -> None:
    """Save again where a folder has the name of a file that an interrupted save left."""
    config: Config = from_config(fsdp(1, state_dict_type="FULL_STATE_DICT"))
    model = config.apply(Stack())
    config.save(folder, model)
    if dist.get_rank() == 0:
        pathlib.Path(folder, ".pytorch_model_fsdp.bin.written").mkdir()
    config.save(folder, model)


def test_a_save_before_that_cannot_be_completed_is_an_error_on_all_ranks(
    spawn_errors: Spawn, tmp_path: pathlib.Path
) -> None:
    for error in spawn_errors(save_beside_a_folder, 2, str(tmp_path)):
        assert error.type_name == "CheckpointError"
        assert "could not complete" in error.message


def mix_saves(folder: str, kind: str) -> None:
    config: Config = from_config(fsdp(1, state_dict_type=kind))
    model = config.apply(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config.save(pathlib.Path(folder, "first"), model, optimizer)
    for param in model.parameters():
        nn.init.zeros_(param)
    config.save(pathlib.Path(folder, "second"), model, optimizer)
    if dist.get_rank() == 0:
        for file in sorted(pathlib.Path(folder, "first").iterdir())[:1]:
            file.replace(pathlib.Path(folder, "second", file.name))
    dist.barrier()
    config.load(pathlib.Path(folder, "second"), model, optimizer)


@pytest.mark.parametrize("kind", ["LOCAL_STATE_DICT", "FULL_STATE_DICT"])
def test_a_mixture_of_two_saves_is_refused_by_name(
    spawn_errors: Spawn, tmp_path: pathlib.Path, kind: str
) -> None:
    for error in spawn_errors(mix_saves, 2, str(tmp_path), kind):
        assert error.type_name == "CheckpointError"
        assert "holds files of different saves" in error.message
        first, second = {
            "LOCAL_STATE_DICT": ("rank-00000000-of-00000002.pth", "rank-00000001-of-00000002.pth"),
            "FULL_STATE_DICT": ("optimizer.bin", "pytorch_model_fsdp.bin"),
        }[kind]
        assert first in error.message
        assert second in error.message


def refused(policy: str) -> list[object]:
    fields = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": policy}
    config = from_config(fsdp(2, **fields, top={"mixed_precision": "bf16"}))
    model = Stack().to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    params = dict(model.named_parameters())
    with pytest.raises(shardkit.WrapError, match=policy):
        config.apply(model)
    assert all(dict(model.named_parameters())[name] is params[name] for name in params)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    return [value.dtype for value in before.values()]


def test_a_model_that_is_refused_keeps_its_values(spawn: Spawn) -> None:
    spawn(refused, 2, "NoSuchBlock")


def leave_out_head(_module: nn.Module, state: Fields, prefix: str, _: object) -> None:
    del state[f"{prefix}head.weight"]


@on_ranks(2)
def test_what_a_state_dict_leaves_out_stays() -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    model.register_state_dict_post_hook(leave_out_head)
    from_config(fsdp(2)).apply(model)
    torch.testing.assert_close(full_parameters(model), full_parameters(plain), rtol=0, atol=0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@on_ranks(2)
def test_recurrent_layers_and_attributes_of_parameters_are_as_without_rank_0s_values() -> None:
    torch.manual_seed(0)
    plain = Recurrent()
    torch.manual_seed(dist.get_rank())
    model = Recurrent()
    model.rnn.weight_hh_l0.decay = 0.5
    config = from_config(fsdp(2, transformer_layer_cls_to_wrap="LSTM"))
    kept = weakref.ref(model.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(shardkit.WrapError, match=r"'head.weight' cannot be sharded in place"):
        config.apply(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(map(weakref.getweakrefs, model.rnn.parameters()))  # As torch leaves them.
    del kept
    if HAS_GRAD_DTYPE:
        model.head.bias.grad_dtype = torch.float64
    config.apply(model)
    assert model.rnn.weight_hh_l0.decay == 0.5
    x = torch.ones(2, 3, 4)
    out = model(x)
    torch.testing.assert_close(out, plain(x), rtol=0, atol=0)
    out.sum().backward()
    assert model.head.bias.grad.dtype == (torch.float64 if HAS_GRAD_DTYPE else torch.float32)
