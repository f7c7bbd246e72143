"""Config files go both ways: what Accelerate writes is read, and it reads what is written here."""

from __future__ import annotations

import os
import subprocess
import sys
import typing

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config import config_args, default
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import constants
from accelerate.utils.launch import prepare_multi_gpu_env

from shardkit import from_config
from shardkit.config import _schema
from shardkit.config._command import default_fields

if typing.TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.frameworks

VERSION_1 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer,BertEmbeddings",
    "fsdp_use_orig_params": True,
    "fsdp_version": 1,
}
VERSION_2 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_min_num_params": 1000,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_version": 2,
}
SIZES = {
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_cp_size": 1,
    "parallelism_config_dp_replicate_size": 2,
    "parallelism_config_dp_shard_size": 4,
    "parallelism_config_tp_size": 1,
}


def written_by_accelerate(path: pathlib.Path, **fields: typing.Any) -> str:
    """Write what the questions of ``accelerate config`` end with."""
    common = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "use_cpu": False,
        "debug": False,
        "num_processes": 8,
        "downcast_bf16": "no",
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "tpu_env": [],
        "enable_cpu_affinity": False,
    }
    ClusterConfig(**{**common, **fields}).to_yaml_file(str(path))
    return str(path)


def test_a_file_of_version_1_is_read(tmp_path: pathlib.Path) -> None:
    file = written_by_accelerate(tmp_path / "one.yaml", fsdp_config=VERSION_1)
    found = from_config(file).settings
    assert (found.strategy, found.wrap) == ("zero2", "TRANSFORMER_BASED_WRAP")
    assert found.transformer_layer_cls_to_wrap == ("BertLayer", "BertEmbeddings")
    assert (found.backward_prefetch, found.forward_prefetch) == ("pre", False)
    assert (found.offload_params, found.activation_checkpointing) == (True, True)
    assert (found.precision, found.state_dict_type) == ("bf16", "SHARDED_STATE_DICT")


def test_a_file_of_version_2_with_sizes_is_read(tmp_path: pathlib.Path) -> None:
    file = written_by_accelerate(
        tmp_path / "two.yaml", fsdp_config=VERSION_2, parallelism_config=SIZES
    )
    found = from_config(file).settings
    assert (found.strategy, found.min_num_params) == ("hybrid", 1000)
    assert found.parallelism is not None
    assert found.parallelism.total_size == found.num_processes == 8


def test_what_its_basic_command_writes_is_read(tmp_path: pathlib.Path) -> None:
    path = default.write_basic_config("bf16", str(tmp_path / "basic.json"))
    found = from_config(path).settings
    assert (found.distributed_type, found.precision) == ("NO", "bf16")


def test_its_own_command_writes_what_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "command.yaml"
    words = ["config", "default", "--config_file", str(file), "--mixed_precision", "bf16"]
    program = "from accelerate.commands.accelerate_cli import main; main()"
    subprocess.run([sys.executable, "-c", program, *words], check=True, env=dict(os.environ))
    assert from_config(file).settings.precision == "bf16"


@pytest.mark.parametrize("layers", [None, "Block"])
def test_it_reads_what_is_written_here(tmp_path: pathlib.Path, layers: str | None) -> None:
    fields = default_fields(num_processes=2, use_cpu=False, mixed_precision="bf16", layers=layers)
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(fields))
    theirs = load_config_from_file(str(file))
    assert theirs.fsdp_config == fields["fsdp_config"]
    assert theirs.num_processes == 2
    parser = launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(file), "script.py"])
    args.nondefault = set()
    args, _, _ = launch._validate_launch_command(args)  # noqa: SLF001 - what the command does
    environment = prepare_multi_gpu_env(args)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"


def test_all_of_its_fields_are_known() -> None:
    known = set(_schema.TOP)
    assert set(ClusterConfig.__dataclass_fields__) <= known
    parser = launch.launch_command_parser()
    options = {action.dest for action in parser._actions}  # noqa: SLF001 - argparse has no other
    for prefix, fields in (
        ("fsdp_", _schema.FSDP),
        ("parallelism_config_", _schema.PARALLELISM),
    ):
        assert {name for name in options if name.startswith(prefix)} <= set(fields)
    assert list(_schema.STRATEGIES) == constants.FSDP_SHARDING_STRATEGY
    assert list(_schema.WRAPS) == constants.FSDP_AUTO_WRAP_POLICY
    assert list(_schema.PREFETCHES) == constants.FSDP_BACKWARD_PREFETCH
    assert list(_schema.STATE_DICTS) == constants.FSDP_STATE_DICT_TYPE
    assert config_args.ClusterConfig is ClusterConfig
