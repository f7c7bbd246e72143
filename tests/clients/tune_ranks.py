"""torchtune's functions on CPU ranks, once on FSDP2 and once on shardkit: what a rank does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params

import shardkit

SHARDERS = ("fsdp2", "shardkit")
VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 40,
    "max_seq_len": 16,
}
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 3, "lora_alpha": 6}
MODELS = {
    "llama2": llama2,
    "tied llama3_2": functools.partial(llama3_2, intermediate_dim=48),
    "LoRA": functools.partial(lora_llama2, **LORA),
}
CPU = torch.device("cpu")
AXES = ("dp_replicate", "dp_shard")


@dataclasses.dataclass
class Tuned:
    """What one rank found; states are those of rank 0, and empty elsewhere."""

    losses: list[float]  # By step, of this rank's data.
    norms: list[float]  # Of the gradients, by step.
    # What `gather_cpu_state_dict` returned, at the middle and at the end.
    states: list[dict[str, Tensor]]
    adapters: dict[str, Tensor]  # The same of adapters alone.
    optimizer: dict[str, Tensor]  # What `get_full_optimizer_state_dict` returned at the end, flat.
    # Names of the classes of parameters, and whether they are DTensors.
    classes: set[tuple[str, bool]]


def tune(sharder: str, model: str, shape: tuple[int, ...]) -> Tuned:
    """Load, train, save, load in another model and go on, as torchtune's recipes do."""
    with shardkit.install() if sharder == "shardkit" else contextlib.nullcontext():
        return _tune(model, shape)


def _tune(name: str, shape: tuple[int, ...]) -> Tuned:
    torch.manual_seed(0)
    found = Tuned([], [], [], {}, {}, set())
    model, optimizer = _load(name, shape, MODELS[name](**SIZES).state_dict(), None)
    found.classes = {(type(p).__name__, isinstance(p, DTensor)) for p in model.parameters()}
    _train(model, optimizer, range(3), found)
    is_zero = dist.get_rank() == 0
    middle = [
        training.gather_cpu_state_dict(model, is_zero, device=CPU),
        training.get_full_optimizer_state_dict(model, optimizer, is_zero, device=CPU),
    ]
    found.states.append(middle[0])
    dist.broadcast_object_list(middle)  # A recipe reads them from a file on every rank.
    model, optimizer = _load(name, shape, *middle)
    _train(model, optimizer, range(3, 5), found)
    found.states.append(training.gather_cpu_state_dict(model, is_zero, device=CPU))
    if name == "LoRA":
        found.adapters = training.gather_cpu_state_dict(
            model, is_zero, device=CPU, adapter_weights_only=True
        )
    whole = training.get_full_optimizer_state_dict(model, optimizer, is_zero, device=CPU)
    for key, values in whole.get("state", {}).items():
        found.optimizer.update({f"{key}.{part}": value for part, value in values.items()})
    return found


def _load(
    name: str, shape: tuple[int, ...], state: dict[str, Tensor], optimizer_state: typing.Any
) -> tuple[typing.Any, torch.optim.Optimizer]:
    """Make a model on meta, shard it and load it, then an optimizer."""
    with torch.device("meta"):
        model = MODELS[name](**SIZES)
    if name == "LoRA":
        set_trainable_params(model, get_adapter_params(model))
    condition = functools.partial(training.get_shard_conditions, names_to_match=["tok_embeddings"])
    if name.startswith("tied"):  # As its recipes do: the head's weight is that of the embedding.
        condition = training.get_shard_conditions
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES) if len(shape) > 1 else None
    training.shard_model(
        model,
        shard_conditions=[condition],
        cpu_offload=False,
        reshard_after_forward=True,
        dp_mesh=mesh,
    )
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
    training.load_from_full_model_state_dict(
        model, dict(state), device=CPU, strict=True, cpu_offload=False
    )
    training.validate_no_params_on_meta_device(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if optimizer_state is not None:
        training.load_from_full_optimizer_state_dict(model, optimizer, optimizer_state, device=CPU)
    return model, optimizer


def _train(model: typing.Any, optimizer: torch.optim.Optimizer, steps: range, found: Tuned) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm: typing.Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(float(loss.detach()))
        found.norms.append(float(norm))
