"""Fields that cannot be meant together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._kinds import NotOfKindError, flag, is_of_kind
from shardkit.config._fields import DEVICES, FSDP, MAX_RANKS, STRATEGIES
from shardkit.config._schema import (
    is_fsdp_type,
    num_processes_of,
    parallelism_of,
    reshards,
    strategy_name,
)

if TYPE_CHECKING:
    from shardkit.config._schema import Found


def check(found: Found) -> None:
    """Add a complaint to `found` for each contradiction."""
    _check_type(found)
    _check_processes(found)
    if not is_fsdp_type(found):
        return
    if found.value("fsdp_version", "1") == "1":
        _check_version_1(found)
    else:
        _check_version_2(found)
    _check_wrapping(found)
    _check_sync(found)
    _check_parallelism(found)


def _check_type(found: Found) -> None:
    kind = found.value("distributed_type")
    if kind is None:
        if not found.complaints:
            found.complain("distributed_type", "is missing. As a rule it is FSDP.")
        return
    for section in ("fsdp_config", "parallelism_config"):
        if found.has_fields(section) and not is_fsdp_type(found):
            found.complain(
                section,
                f"is there, but distributed_type is {kind}, which uses none of it. Write "
                f"distributed_type: FSDP, or leave {section} out.",
            )
    use_cpu, device = found.value("use_cpu"), DEVICES.get(kind)
    if use_cpu and device not in (None, "cpu"):
        found.complain(
            "use_cpu",
            f"is true, but distributed_type is {kind}. Write use_cpu: false, or distributed_type: "
            f"MULTI_CPU, or FSDP, which shards on the CPU, too.",
        )
    if use_cpu is False and kind == "MULTI_CPU":
        found.complain("use_cpu", "is false, but distributed_type is MULTI_CPU. Write true.")


def _check_processes(found: Found) -> None:
    number, machines = num_processes_of(found), found.value("num_machines", 1)
    if found.value("distributed_type") == "NO" and number not in (None, 1):
        found.complain(
            "num_processes",
            f"is {number}, but distributed_type is NO, which is one process. Write "
            f"distributed_type: FSDP, or MULTI_GPU or MULTI_CPU to replicate the model.",
        )
    if number is not None and number % machines:
        found.complain(
            "num_processes",
            f"is {number}, which {machines} machines cannot have equal parts of. It counts the "
            f"processes of all machines.",
        )
    elif number is not None and number > machines * MAX_RANKS:
        found.complain(
            "num_processes",
            f"is {number}, which are {number // machines} on each of {machines} machines. Write "
            f"{MAX_RANKS} for a machine at the most.",
        )
    rank = found.value("machine_rank", 0)
    if rank >= machines:
        found.complain(
            "machine_rank",
            f"is {rank}, but num_machines is {machines}: the ranks of machines are 0 to "
            f"{machines - 1}.",
        )


def _check_version_1(found: Found) -> None:
    written = found.value("fsdp_reshard_after_forward")
    try:
        name = strategy_name(found)
    except NotOfKindError:
        if not is_of_kind(flag, written):
            must = NotOfKindError(f"must be one of {', '.join(STRATEGIES)} in fsdp_version 1")
            found.refuse("fsdp_reshard_after_forward", must)
            return
        found.complain(
            "fsdp_reshard_after_forward",
            f"is {written!r}, which is a value of fsdp_version 2. In version 1 it names a "
            f"strategy: FULL_SHARD for true, SHARD_GRAD_OP for false; or write fsdp_version: 2.",
        )
        return
    other = found.value("fsdp_sharding_strategy")
    if other is not None and other != name:
        found.complain(
            "fsdp_sharding_strategy",
            f"is {other}, but fsdp_reshard_after_forward is {name}. Keep one of them.",
        )
    if found.document.entries.get("parallelism_config") and parallelism_of(found):
        found.complain(
            "parallelism_config",
            "needs fsdp_version: 2. In version 1 HYBRID_SHARD replicates over machines, and "
            "NO_SHARD over all ranks.",
        )


def _check_version_2(found: Found) -> None:
    written = found.value("fsdp_reshard_after_forward")
    try:
        keeps = not reshards(found)
    except NotOfKindError as error:
        if not is_of_kind(FSDP["fsdp_sharding_strategy"].kind, written):
            found.refuse("fsdp_reshard_after_forward", error)
            return
        found.complain(
            "fsdp_reshard_after_forward",
            f"is {written!r}, which is a value of fsdp_version 1. In version 2 it is true (as "
            f"FULL_SHARD) or false (as SHARD_GRAD_OP); sizes of a parallelism_config do the rest.",
        )
        return
    name = found.value("fsdp_sharding_strategy")
    if name is not None and name != ("SHARD_GRAD_OP" if keeps else "FULL_SHARD"):
        word = "false" if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "true"
        found.complain(
            "fsdp_sharding_strategy",
            f"is {name}, a field of fsdp_version 1, and other fields say something else. In "
            f"version 2 write fsdp_reshard_after_forward: {word}{_sizes_for(name)}.",
        )
    if found.value("fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        found.complain(
            "fsdp_state_dict_type",
            "is LOCAL_STATE_DICT, which only fsdp_version 1 has. Write SHARDED_STATE_DICT, which "
            "loads at every number of ranks.",
        )


def _sizes_for(name: str) -> str:
    if name == "NO_SHARD":
        return ", and a parallelism_config with dp_replicate_size: (ranks), dp_shard_size: 1"
    if name.startswith("HYBRID"):
        return ", and a parallelism_config with dp_replicate_size and dp_shard_size"
    return ""


def _check_wrapping(found: Found) -> None:
    policy = found.value("fsdp_auto_wrap_policy", "NO_WRAP")
    for name, owner in (
        ("fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_min_num_params", "SIZE_BASED_WRAP"),
    ):
        if found.value(name) is not None and policy != owner:
            found.complain(
                name,
                f"belongs to {owner}, but fsdp_auto_wrap_policy is {policy}. Write "
                f"fsdp_auto_wrap_policy: {owner}, or leave {name} out.",
            )
    if policy == "NO_WRAP" and found.value("fsdp_activation_checkpointing"):
        found.complain(
            "fsdp_activation_checkpointing",
            "is true, but fsdp_auto_wrap_policy is NO_WRAP, which chooses no modules for it. "
            "Choose a policy, or write false and call shardkit.checkpoint_activations(model).",
        )


def _check_sync(found: Found) -> None:
    sync, efficient = "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"
    if found.value(efficient) and found.value(sync) is False:
        found.complain(
            sync,
            f"is false, but {efficient} is true: other ranks get their values from rank 0 then. "
            f"Write {sync}: true, or {efficient}: false.",
        )


def _check_parallelism(found: Found) -> None:
    sizes = parallelism_of(found)
    if sizes is None:
        return
    number, total = num_processes_of(found), sizes.total_size
    text = (
        f"dp_replicate_size {sizes.dp_replicate_size} x dp_shard_size {sizes.dp_shard_size} x "
        f"tp_size {sizes.tp_size}"
    )
    if number is not None and total != number:
        found.complain(
            "parallelism_config",
            f"is about {text} = {total} ranks, but num_processes is {number}. Their product must "
            f"be num_processes.",
        )
    if sizes.tp_size > 1 and sizes.dp_replicate_size > 1 and sizes.dp_shard_size == 1:
        found.complain(
            "parallelism_config",
            f"is about {text}: tensor parallelism beside replicas needs dp_shard_size above 1.",
        )
    senders = ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states")
    written = [name for name in senders if found.value(name)]
    if sizes.tp_size > 1 and written:
        found.complain(
            written[0],
            "is true, and tp_size is above 1: weights that are split over tp are sent by "
            "parallelize_module, and others must be equal on all ranks. Write false.",
        )
