"""Saving and loading training state: standard DCP checkpoints, verified and crash-safe."""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._errors import CheckpointError
from shardkit.checkpoint._consolidate import consolidate
from shardkit.checkpoint._dcp.reader import CheckpointReader
from shardkit.checkpoint._dcp.writer import CheckpointWriter
from shardkit.checkpoint._files.formats import FullFile
from shardkit.checkpoint._full import LoadedNames, load_full, save_full
from shardkit.checkpoint._load import latest, load
from shardkit.checkpoint._local import (
    get_shard_metadata,
    load_local_state_dict,
    local_state_dict,
)
from shardkit.checkpoint._save import SaveHandle, async_save, release_staging_memory, save
from shardkit.checkpoint._state.model_and_optimizer import (
    gather_optimizer_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    rekey_optimizer_state,
    scatter_optimizer_state,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "FullFile",
    "LoadedNames",
    "SaveHandle",
    "StateDictOptions",
    "async_save",
    "consolidate",
    "gather_optimizer_state",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_shard_metadata",
    "get_state_dict",
    "latest",
    "load",
    "load_full",
    "load_local_state_dict",
    "local_state_dict",
    "rekey_optimizer_state",
    "release_staging_memory",
    "save",
    "save_full",
    "scatter_optimizer_state",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
