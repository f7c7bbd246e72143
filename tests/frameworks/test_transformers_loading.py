"""``from_pretrained(..., distributed_config=...)`` of transformers shards by shardkit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import accelerate_ranks, make
from launched import TIMEOUT_S, forget_accelerate
from test_transformers_trainer import STEPS, TOLERANCE, history, make_trainer

import shardkit

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.frameworks

REPLICAS_SINCE = (5, 23)
VOCABULARY = 98
SIZES: dict[str, typing.Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


LLAMA = ("LlamaConfig", "LlamaForCausalLM")
MIXTRAL = ("MixtralConfig", "MixtralForCausalLM")
HRM = ("HrmTextConfig", "HrmTextForCausalLM")
T5_SIZES: dict[str, typing.Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MODELS: dict[str, tuple[str, str, dict[str, typing.Any]]] = {
    "as in the model": (*LLAMA, SIZES),
    "tied": (*LLAMA, {**SIZES, "tie_word_embeddings": True}),
    "tied without a norm": (*HRM, {**SIZES, "tie_word_embeddings": True}),
    "tied in two stacks": ("T5Config", "T5ForConditionalGeneration", T5_SIZES),
    # Of experts, which are stacked and joined.
    "a tensor for each row": (*MIXTRAL, {**SIZES, "num_local_experts": 6}),
    "a tensor for one row": (
        *MIXTRAL,
        {**SIZES, "num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    # Queries, keys and values, which are cut apart.
    "parts of one tensor": (*HRM, SIZES),
    "no head": ("LlamaConfig", "LlamaModel", SIZES),
}
"""By what is in its files: classes of transformers, and fields of the config."""

EXPERTS = "a tensor for each row"


def make_model(kind: str) -> typing.Any:
    """Make a model of transformers with random weights."""
    import transformers

    config, model, fields = MODELS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**fields))


@contextlib.contextmanager
def saved(model: typing.Any, folder: str) -> Iterator[typing.Any]:
    """Save a model on the first rank; give the class that loads it."""
    import transformers

    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with accelerate_ranks(shardkit.install()):
        is_translator = model.config.is_encoder_decoder
        yield (
            transformers.AutoModelForSeq2SeqLM
            if is_translator
            else transformers.AutoModelForCausalLM
        )


def load(
    loader: typing.Any, folder: str, sizes: dict[str, int] | None, **options: object
) -> typing.Any:
    """Load a model; with `sizes`, fields of a DistributedConfig, it is sharded."""
    from transformers.distributed import DistributedConfig

    torch.manual_seed(1)
    if sizes is not None:
        options["distributed_config"] = DistributedConfig(**sizes)
    return loader.from_pretrained(folder, dtype=torch.float32, **options)


def whole(param: typing.Any) -> Tensor:
    return param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()


def assert_equal(found: typing.Any, wanted: typing.Any) -> None:
    expected = dict(wanted.named_parameters())
    assert [name for name, _ in found.named_parameters()] == list(expected)
    for name, param in found.named_parameters():
        assert torch.equal(whole(param), whole(expected[name])), name


def train(model: typing.Any, num_batches: int, own: slice) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (num_batches, 16), generator=generator)[own]
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def load_train_and_save(folder: str, kind: str, sizes: dict[str, int]) -> None:
    with saved(make_model(kind), f"{folder}/plain") as loader:
        model = load(loader, f"{folder}/plain", sizes)
        plain = load(loader, f"{folder}/plain", None)
        assert isinstance(model, shardkit.FSDPModule)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert_equal(model, plain)
        for name, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name

        ranks, tensor_parallel = dist.get_world_size(), sizes.get("tp_size", 1)
        num_batches = ranks // tensor_parallel
        mine = dist.get_rank() // tensor_parallel
        losses = torch.stack(train(model.train(), num_batches, slice(mine, mine + 1)))
        dist.all_reduce(losses)
        expected = torch.stack(train(plain.train(), num_batches, slice(None)))
        torch.testing.assert_close(losses / ranks, expected, rtol=0, atol=TOLERANCE)

        model.save_pretrained(f"{folder}/trained")
        dist.barrier()
        assert_equal(model, load(loader, f"{folder}/trained", None))
        model.save_pretrained(f"{folder}/pieces", distributed_checkpoint=True)
        dist.barrier()
        assert_equal(model, load(loader, f"{folder}/pieces", {"fsdp_size": ranks}))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_sharded_while_it_is_loaded(
    spawn: Spawn, tmp_path: pathlib.Path, kind: str
) -> None:
    args = (str(tmp_path), kind, {"fsdp_size": 2})
    spawn(load_train_and_save, 2, *args, timeout_s=TIMEOUT_S)


MESHES = {
    "four": (EXPERTS, {"fsdp_size": 4}),  # Cuts fall inside of experts.
    "hybrid": (EXPERTS, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "expert parallel": (EXPERTS, {"fsdp_size": 4, "ep_size": 2}),
    "tensor parallel": ("tied", {"fsdp_size": 2, "tp_size": 2}),
    "parts of gate and up": (EXPERTS, {"fsdp_size": 2, "tp_size": 2}),
}


@pytest.mark.parametrize(("kind", "sizes"), MESHES.values(), ids=MESHES)
def test_a_model_is_loaded_on_any_mesh(
    spawn: Spawn, tmp_path: pathlib.Path, kind: str, sizes: dict[str, int]
) -> None:
    version = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
    if "dp_replicate_size" in sizes and version < REPLICAS_SINCE:
        pytest.skip("this version of transformers has no replicas")
    spawn(load_train_and_save, 4, str(tmp_path), kind, sizes, timeout_s=TIMEOUT_S)


def test_tied_weights_are_loaded_by_three_ranks(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    args = (str(tmp_path), "tied", {"fsdp_size": 3})
    spawn(load_train_and_save, 3, *args, timeout_s=TIMEOUT_S)


class CountingSlice:
    """A slice of safetensors that counts the elements that are read."""

    read_numel = 0

    def __init__(self, stored: typing.Any) -> None:
        self.stored = stored

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, places: typing.Any) -> Tensor:
        read = self.stored[places]
        CountingSlice.read_numel += read.numel()
        return read


def count_what_is_read(folder: str, kind: str) -> None:
    from shardkit.integrations import transformers as integration

    original = integration.Stored.__init__

    def counting(self: typing.Any, spec: object, source: object, dtype: object) -> None:
        original(self, spec, CountingSlice(source), dtype)

    with saved(make_model(kind), folder) as loader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration.Stored, "__init__", counting)
        patch.setattr(CountingSlice, "read_numel", 0)
        params = list(load(loader, folder, {"fsdp_size": dist.get_world_size()}).parameters())
        read = CountingSlice.read_numel
    own = sum(param.to_local().numel() for param in params)
    if kind == "as in the model":
        assert read == own
    else:  # Rows in which a piece begins and ends.
        rows = sum(2 * param.numel() // param.shape[0] for param in params if param.ndim == 3)
        assert own <= read <= own + rows < sum(param.numel() for param in params)


@pytest.mark.parametrize("kind", ["as in the model", "a tensor for each row"])
def test_ranks_read_only_their_pieces(spawn: Spawn, tmp_path: pathlib.Path, kind: str) -> None:
    spawn(count_what_is_read, 2, str(tmp_path), kind, timeout_s=TIMEOUT_S)


def load_other_sizes(folder: str) -> None:
    with saved(make_model("as in the model"), folder) as loader:
        sizes, other = {"fsdp_size": dist.get_world_size()}, {"vocab_size": VOCABULARY + 3}
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            load(loader, folder, sizes, **other)
        options = {**other, "ignore_mismatched_sizes": True}
        assert_equal(load(loader, folder, sizes, **options), load(loader, folder, None, **options))


def test_weights_of_other_sizes_are_told_or_initialized(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    spawn(load_other_sizes, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def load_with_other_rows(folder: str, dim: int) -> None:
    """Load a weight whose rows, or columns, lie in another order in the files."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    order = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Interleave(dim=dim)])
    with (
        saved(make_model("as in the model"), folder) as loader,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
        conversion_mapping.register_checkpoint_conversion_mapping("llama", [order])
        plain = load(loader, folder, None)
        assert_equal(load(loader, folder, {"fsdp_size": dist.get_world_size()}), plain)
        stored = make_model("as in the model").get_parameter(
            "model.layers.0.self_attn.q_proj.weight"
        )
        assert not torch.equal(stored, plain.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("dim", [0, 1])
def test_conversions_may_move_rows(spawn: Spawn, tmp_path: pathlib.Path, dim: int) -> None:
    spawn(load_with_other_rows, 2, str(tmp_path), dim, timeout_s=TIMEOUT_S)


def load_only_the_head(folder: str) -> None:
    """Load files that name a tied weight by its other name."""
    from safetensors.torch import load_file, save_file

    with saved(make_model("tied"), folder) as loader:
        path = f"{folder}/model.safetensors"
        if dist.get_rank() == 0:
            tensors = load_file(path)
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, path, metadata={"format": "pt"})
        dist.barrier()
        torch.use_deterministic_algorithms(True)  # New memory is filled.
        try:
            model = load(loader, folder, {"fsdp_size": dist.get_world_size()})
        finally:
            torch.use_deterministic_algorithms(False)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_equal(model, load(loader, folder, None))


def test_tied_weights_have_one_name_in_files(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(load_only_the_head, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def load_untied(folder: str) -> None:
    with saved(make_model("as in the model"), folder) as loader:
        sizes = {"fsdp_size": dist.get_world_size()}
        with pytest.warns(UserWarning, match="another weight, and the files have different"):
            load(loader, folder, sizes, tie_word_embeddings=True)


def test_tied_weights_that_differ_are_warned_of(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(load_untied, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def load_quantized(folder: str) -> None:
    with (
        saved(make_model("as in the model"), folder) as loader,
        pytest.MonkeyPatch.context() as patch,
    ):
        import transformers

        patch.setattr(transformers.LlamaForCausalLM, "is_quantized", True, raising=False)
        load(loader, folder, {"fsdp_size": dist.get_world_size()})


def test_quantized_weights_are_refused(spawn_errors: Spawn, tmp_path: pathlib.Path) -> None:
    for error in spawn_errors(load_quantized, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert "loads a quantized LlamaForCausalLM" in error.message


def train_by_trainer(folder: str) -> None:
    """Train replicated, then sharded by the load; the Trainer is asked for nothing."""
    model = make("llama")
    with saved(model, f"{folder}/files") as loader:
        plain = make_trainer(f"{folder}/plain", None, model)
        plain.train()
        forget_accelerate()
        loaded = load(loader, f"{folder}/files", {"fsdp_size": dist.get_world_size()})
        trainer = make_trainer(f"{folder}/sharded", None, loaded, save_only_model=True)
        trainer.train()
        for each, tolerance in (("loss", 1), ("eval_loss", 1), ("grad_norm", 5)):
            found, wanted = history(trainer, each), history(plain, each)
            assert len(found) >= STEPS // 2
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * TOLERANCE)
        trainer.save_model(f"{folder}/trained")
        dist.barrier()
        assert_equal(loaded, load(loader, f"{folder}/trained", None))


def test_the_trainer_trains_a_model_that_the_load_sharded(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    spawn(train_by_trainer, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def train_by_accelerate(folder: str) -> None:
    """Train as it is, then split and sharded by the load, and prepared; save and load that."""
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    from shardkit.integrations import accelerate as integration

    tokens = torch.randint(VOCABULARY, (6, 4, 8), generator=torch.Generator().manual_seed(2))
    with saved(make_model("as in the model"), f"{folder}/files") as loader, integration.use():
        plain = load(loader, f"{folder}/files", None).train()
        loaded = load(loader, f"{folder}/files", {"fsdp_size": 2, "tp_size": 2}).train()
        accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
        )
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (plain, loaded)]
        data = torch.utils.data.DataLoader(typing.cast("typing.Any", tokens.flatten(0, 1)), 2)
        model, optimizer, batches = accelerator.prepare(loaded, optimizers[1], data)
        assert model is loaded
        for every, own in zip(tokens, batches, strict=True):
            found, wanted = model(own, labels=own).loss, plain(every, labels=every).loss
            accelerator.backward(found)
            wanted.backward()
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            torch.testing.assert_close(float(norm), float(expected), rtol=1e-5, atol=0)
            mean = accelerator.reduce(found.detach(), "mean")
            torch.testing.assert_close(mean, wanted.detach(), rtol=0, atol=TOLERANCE)
            for each in (optimizer, optimizers[0]):
                each.step()
                each.zero_grad()
        trained = accelerator.get_state_dict(model)
        for name, value in trained.items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-5, msg=name)
        accelerator.save_state(f"{folder}/state")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(f"{folder}/state")
        again = accelerator.get_state_dict(model)
        assert all(torch.equal(again[name], value) for name, value in trained.items())


def test_accelerate_prepares_a_model_that_the_load_split(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    spawn(train_by_accelerate, 4, str(tmp_path), timeout_s=TIMEOUT_S)
