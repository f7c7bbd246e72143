"""Mixtures of experts of transformers whose tokens travel to the ranks that hold the experts."""

from __future__ import annotations

import functools
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import DECODER, GROUPED_QUERIES, VOCABULARY, draw_tokens

from experts import Exchange
from shardkit import ShardPlan, auto_shard

if typing.TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


NUM_EXPERTS = 8

CLASSES = {
    "deepseek_v3": "DeepseekV3Experts",
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
}
"""Class of the modules that hold stacked experts, by model."""


def make(name: str) -> typing.Any:
    """Return a small model in fp64, the same on each rank."""
    import transformers

    torch.manual_seed(5)
    options = {**DECODER, **GROUPED_QUERIES, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    if name == "mixtral":
        config: typing.Any = transformers.MixtralConfig(**options, num_local_experts=NUM_EXPERTS)
    elif name == "deepseek_v3":  # Its first layer has no experts, the second one a shared one.
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        # Its router sums over tokens: no other order of them is exact in fp32.
        modeling.torch = _Fp64()  # type: ignore[assignment]
        options["num_key_value_heads"] = options["num_attention_heads"]
        latent = {"q_lora_rank": 16, "kv_lora_rank": 16}
        heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        config = transformers.DeepseekV3Config(
            **options,
            **latent,
            **heads,
            n_routed_experts=NUM_EXPERTS,
            moe_intermediate_size=16,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        )
    else:
        config = transformers.Qwen3MoeConfig(
            **options, head_dim=8, num_experts=NUM_EXPERTS, moe_intermediate_size=16
        )
    kind: typing.Any = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
    model: typing.Any = kind(config).double()
    model.set_experts_implementation("eager")  # The default takes no fp64.
    with torch.no_grad():  # As drawn, routers hardly prefer any expert.
        for param_name, param in model.named_parameters():
            if param_name.endswith("gate.weight"):
                nn.init.normal_(param, std=1.0)
    return model


class _Fp64:
    """torch for a module of transformers that computes in fp32 whatever its weights are."""

    def __getattr__(self, name: str) -> typing.Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


# --- tokens that travel ---------------------------------------------------------------------------

routes: list[tuple[list[int], list[int]]] = []
"""Of each call on this rank: tokens that it had for each expert, and that came to each of its."""


def compute_there(
    module: typing.Any, rows: Tensor, chosen: Tensor, weights: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Compute as the experts of `module` do, of which each rank of `group` has its part.

    Args:
        module: Module of transformers with stacked experts.
        rows: Tokens, of shape (tokens, width).
        chosen: Experts of each token, of shape (tokens, k).
        weights: Weights of these.
        group: Ranks among which the experts are split.
    """
    gate_up, down = module.gate_up_proj.to_local(), module.down_proj.to_local()
    ranks = group.size()
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(gate_up) * ranks)
    counts_here = torch.empty_like(counts)  # By sender and expert.
    dist.all_to_all_single(counts_here, counts, group=group)
    sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, counts_here))
    here = Exchange.apply(rows[order // chosen.shape[1]], sent, received, group)
    experts = torch.arange(len(gate_up)).repeat(ranks).repeat_interleave(counts_here)
    by_expert = experts.argsort(stable=True)
    num_here = counts_here.view(ranks, -1).sum(0).tolist()
    outputs = []
    for index, part in enumerate(here[by_expert].split(num_here)):
        gate, up = F.linear(part, gate_up[index]).chunk(2, dim=-1)
        outputs.append(F.linear(module.act_fn(gate) * up, down[index]))
    computed = torch.cat(outputs)[by_expert.argsort()]

    back = Exchange.apply(computed, received, sent, group)[order.argsort()]
    routes.append((counts.tolist(), num_here))
    return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1)


def shard(name: str, model: typing.Any, mesh: DeviceMesh, **options: typing.Any) -> ShardPlan:
    """Shard a model; its experts are on the ranks of the axis `ep`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    compute = functools.partial(compute_there, group=mesh["ep"].get_group())
    ALL_EXPERTS_FUNCTIONS.register("there", compute)
    model.set_experts_implementation("there")
    routes.clear()
    return auto_shard(model, mesh, "no_split_modules", experts={CLASSES[name]: "ep"}, **options)


# --- data -----------------------------------------------------------------------------------------


def batches(step: int, tp: int = 1) -> tuple[Tensor, Tensor]:
    """Return the tokens of this rank, and those of all ranks in one; `tp` neighbours have equal."""
    each = []
    for rank in range(dist.get_world_size() // tp):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = draw_tokens(generator, size=2)
        # On each rank other tokens: its experts are chosen by few.
        each.append(6 + (tokens % 12 + 11 * rank) % (VOCABULARY - 6))
    return each[dist.get_rank() // tp], torch.cat(each)


def loss_of(model: typing.Any, tokens: Tensor) -> Tensor:
    """Return the mean over tokens in fp64, where transformers' own is taken in fp32."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
