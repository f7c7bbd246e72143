"""The fields of a config file: their names, kinds, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardkit._kinds import flag, number
from shardkit.config._kinds import choice, names, pattern, text, unused
from shardkit.config._source import plain

if TYPE_CHECKING:
    from shardkit._kinds import Kind

STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "replicate",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid_zero2",
}
"""FSDP1's names, in the order of their numbers, and ours."""

WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES: dict[str, Literal["pre", "post", "none"]] = {
    "BACKWARD_PRE": "pre",
    "BACKWARD_POST": "post",
    "NO_PREFETCH": "none",
}
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
DEVICES = {
    "MULTI_GPU": "cuda",
    "MULTI_CPU": "cpu",
    "MULTI_XPU": "xpu",
    "MULTI_NPU": "npu",
    "MULTI_HPU": "hpu",
    "MULTI_MLU": "mlu",
    "MULTI_SDAA": "sdaa",
    "MULTI_MUSA": "musa",
    "MULTI_NEURON": "neuron",
    "XLA": "xla",
}
"""Device types that a distributed_type names."""

MAX_RANKS = 4096
"""On one host, and hosts: more is a slip of the finger."""

Use = Literal["applied", "launcher", "noted"]


@dataclass(frozen=True)
class Field:
    """One field.

    Attributes:
        kind: Kind of its value.
        use: User of it: ``"applied"``: the model; ``"launcher"``: whoever starts the ranks;
            ``"noted"``: nobody.
        note: Reason why it changes nothing; empty: it does something.
    """

    kind: Kind
    use: Use = "applied"
    note: str = ""


_TPU = "Only accelerate tpu-config reads it."
_TPU_LAUNCH = "Only accelerate launch reads it, on TPUs."

TOP = {
    "compute_environment": Field(
        choice(
            "LOCAL_MACHINE",
            refused={"AMAZON_SAGEMAKER": "Start the ranks by torchrun, and write LOCAL_MACHINE."},
        )
    ),
    "distributed_type": Field(
        choice(
            "FSDP",
            "NO",
            *DEVICES,
            refused={
                "DEEPSPEED": "Write FSDP with an fsdp_config; its ZeRO stage 3 is FULL_SHARD, "
                "stage 2 SHARD_GRAD_OP.",
                "MEGATRON_LM": "Write FSDP with an fsdp_config and a parallelism_config.",
            },
        )
    ),
    "mixed_precision": Field(
        choice(
            "no",
            "fp16",
            "bf16",
            refused={
                "fp8": "Write bf16, and pass low-precision weights as tensor subclasses with "
                "fsdp_pre_all_gather."
            },
        )
    ),
    "use_cpu": Field(flag),
    "num_processes": Field(number(1, MAX_RANKS * MAX_RANKS, also=(-1,))),
    "num_machines": Field(number(1, MAX_RANKS)),
    "machine_rank": Field(number(0, MAX_RANKS - 1), "launcher"),
    "gpu_ids": Field(text, "launcher"),
    "main_process_ip": Field(text, "launcher"),
    "main_process_port": Field(number(0, 2**16 - 1), "launcher"),
    "rdzv_backend": Field(text, "launcher"),
    "same_network": Field(
        flag, "launcher", "Hosts meet at main_process_ip, whatever networks lead there."
    ),
    "main_training_function": Field(
        text, "launcher", "Ranks run the script as a whole; accelerate calls it on TPUs."
    ),
    "enable_cpu_affinity": Field(
        flag, "launcher", "Ranks are not bound to cores; start the launcher by numactl for it."
    ),
    "mpirun_config": Field(
        plain, "launcher", "Ranks are started by torchrun's agent, not by mpirun."
    ),
    "ipex_config": Field(  # Of Accelerate 1.12.
        plain, "noted", "It is about Intel's extension of PyTorch, which is not used."
    ),
    "tpu_name": Field(text, "launcher", _TPU_LAUNCH),
    "tpu_zone": Field(text, "launcher", _TPU_LAUNCH),
    "tpu_use_cluster": Field(flag, "launcher", _TPU_LAUNCH),
    "tpu_use_sudo": Field(flag, "launcher", _TPU_LAUNCH),
    "tpu_vm": Field(plain, "launcher", _TPU_LAUNCH),
    "tpu_env": Field(plain, "launcher", _TPU_LAUNCH),
    "command_file": Field(text, "noted", _TPU),
    "commands": Field(plain, "noted", _TPU),
    "debug": Field(
        flag,
        "noted",
        "It checks collectives of Accelerate. Those of shardkit are compared by set_watch.",
    ),
    "downcast_bf16": Field(
        unused("Write mixed_precision: bf16 instead.", "no", "false"),
    ),
    "fp16": Field(unused("Write mixed_precision: fp16 instead.", "false")),
    "dynamo_backend": Field(
        unused("Compile layers yourself, after apply: layer.compile().", "no"),
    ),
    "dynamo_config": Field(unused("Compile layers yourself, after apply: layer.compile().")),
    "fp8_config": Field(unused("mixed_precision may be no, fp16 or bf16.")),
    "deepspeed_config": Field(unused("Write distributed_type: FSDP and an fsdp_config.")),
    "megatron_lm_config": Field(unused("Write a parallelism_config.")),
    "fsdp_config": Field(plain),
    "parallelism_config": Field(plain),
}

FSDP = {
    "fsdp_version": Field(choice("1", "2")),
    "fsdp_sharding_strategy": Field(choice(*STRATEGIES, from_1=True)),
    "fsdp_reshard_after_forward": Field(text),
    "fsdp_offload_params": Field(flag),
    "fsdp_auto_wrap_policy": Field(choice(*WRAPS)),
    "fsdp_transformer_layer_cls_to_wrap": Field(names),
    "fsdp_min_num_params": Field(number(1)),
    "fsdp_backward_prefetch": Field(choice(*PREFETCHES, from_1=True)),
    "fsdp_forward_prefetch": Field(flag),
    "fsdp_state_dict_type": Field(choice(*STATE_DICTS, from_1=True)),
    "fsdp_cpu_ram_efficient_loading": Field(flag),
    "fsdp_sync_module_states": Field(flag),
    "fsdp_activation_checkpointing": Field(flag),
    "fsdp_activation_checkpointing_offload": Field(
        unused("Run forward in torch.autograd.graph.save_on_cpu(pin_memory=True).", "false", "no")
    ),
    "fsdp_ignored_modules": Field(pattern),
    "fsdp_use_orig_params": Field(
        flag, "noted", "Parameters are always the model's own, with their own names."
    ),
}

_CONTEXT = "Shard over all ranks, and split sequences in the model."

PARALLELISM = {
    "parallelism_config_dp_replicate_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_dp_shard_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_tp_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_cp_size": Field(unused(_CONTEXT, "1")),
    "parallelism_config_sp_size": Field(unused(_CONTEXT, "1")),
    **{
        f"parallelism_config_{name}": Field(
            plain, "noted", "There is no axis of this kind: its size is 1."
        )
        for name in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    },
}

SECTIONS = {"": TOP, "fsdp_config": FSDP, "parallelism_config": PARALLELISM}
PREFIXES = {"": "", "fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}
"""What names of a section begin with; Accelerate takes those of fsdp_config without it, too."""
