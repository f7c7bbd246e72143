"""Fine-tune a model of transformers by LoRA adapters of peft, then generate and export.

Use it if the base model is too large for one device, and only adapters are trained. The frozen base
(bf16) is sharded like the adapters (fp32): each dtype travels as it is. Gradients and optimizer
state exist for the adapters only.

    torchrun --standalone --nproc-per-node 2 examples/lora.py
    torchrun --standalone --nproc-per-node gpu examples/lora.py --device cuda

Nothing is downloaded: the base has random weights, and learns a text by heart. With a real model,
load it as docs/howto/transformers.md does. The exit status is 1 if the loss stays too high, or if
the exported directories, read without shardkit, generate other tokens than the sharded model.
Needs the extra `models`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardkit import (
    DeviceMesh,
    checkpoint,
    fully_shard,
    init_device_mesh,
    register_fsdp_forward_method,
)

TEXT = b"""\
Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. \
Complex is better than complicated. Flat is better than nested. Sparse is better than dense."""
PROMPT = b"Beautiful"
ENOUGH = 0.1  # Nats per byte.


def make_base() -> LlamaForCausalLM:
    """Return a model of bytes with random weights, in bf16."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,  # The frozen output layer must be able to prefer one byte.
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)  # All ranks make the same model.
    return LlamaForCausalLM(config).to(torch.bfloat16)


def shard(model: PeftModel, mesh: DeviceMesh) -> None:
    """Shard each layer with its adapters, which must be there already, and then the rest."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "generate")


def train(model: PeftModel, options: argparse.Namespace) -> float:
    """Train the adapters; return the loss of the last step, in nats per byte."""
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=3e-3)
    # All ranks have the same one text. With more data, each rank has its own.
    tokens = torch.tensor([list(TEXT)], device=options.device)
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(adapters, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return loss.item()


@torch.no_grad()
def write(model: nn.Module, device: str) -> bytes:
    """Continue the prompt by the most probable bytes; all ranks call it for a sharded model."""
    prompt = torch.tensor([list(PROMPT)], device=device)
    tokens = model.eval().generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(TEXT) - len(PROMPT),
        do_sample=False,
    )
    return bytes(tokens[0].tolist())


def export_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapters, which are small, as `PeftModel.from_pretrained` reads them."""
    state = model.state_dict()
    whole = {name: state[name].full_tensor() for name in state if "lora_" in name}  # On all ranks.
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


@torch.no_grad()
def export_merged(model: PeftModel, folder: Path) -> None:
    """Add the adapters to the base, and write the base as `from_pretrained` reads it.

    A rank holds one whole matrix at a time, and the product that is added to it. `save_full`
    sends the first rank 16 MiB at a time.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            down = module.lora_A["default"].weight.full_tensor()
            up = module.lora_B["default"].weight.full_tensor()
            weight = module.get_base_layer().weight
            # Each rank takes its shard of the sum.
            weight.copy_(weight.full_tensor() + module.scaling["default"] * up @ down)
    base = model.unload()  # The base has its own layers again, in place of peft's.
    checkpoint.save_full(folder / "model.safetensors", base, format="safetensors")
    if dist.get_rank() == 0:
        base.config.save_pretrained(folder)


def run(options: argparse.Namespace) -> tuple[float, bytes]:
    """Train, generate and export; return the last loss and the generated bytes."""
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_base(), config).to(options.device)
    shard(model, mesh)
    if dist.get_rank() == 0:
        held: dict[torch.dtype, int] = {}
        for param in model.parameters():
            held[param.dtype] = held.get(param.dtype, 0) + param.to_local().nbytes
        print(f"bytes of parameters on this rank: {held}")
    loss = train(model, options)
    text = write(model, options.device)
    export_adapter(model, options.folder / "adapter")
    export_merged(model, options.folder / "merged")
    return loss, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/lora"))
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    loss, text = run(options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:
        return

    # Read without shardkit.
    adapted = PeftModel.from_pretrained(make_base(), options.folder / "adapter")
    merged = LlamaForCausalLM.from_pretrained(options.folder / "merged", dtype=torch.bfloat16)
    print(text.decode(errors="replace"))
    if not loss <= ENOUGH:  # True also for NaN.
        sys.exit(f"the loss is {loss:.3f}, more than {ENOUGH}")
    for name, model in (("adapter", adapted), ("merged model", merged)):
        found = write(model.to(options.device), options.device)
        if found != text:
            sys.exit(f"the exported {name} writes something else: {found.decode(errors='replace')}")
    print(f"CHECKED: loss {loss:.3f}; adapter and merged model generate the same tokens")


if __name__ == "__main__":
    main()
