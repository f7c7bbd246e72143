"""Saving and loading training state."""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit.checkpoint._consolidate import consolidate
from shardkit.checkpoint._full_files import FullFile
from shardkit.checkpoint._full_models import LoadedNames, load_full, save_full
from shardkit.checkpoint._local_files import load_local_state_dict, local_state_dict
from shardkit.checkpoint._state import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "FullFile",
    "LoadedNames",
    "StateDictOptions",
    "consolidate",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load_full",
    "load_local_state_dict",
    "local_state_dict",
    "save_full",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
