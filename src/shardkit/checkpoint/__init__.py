"""Saving and loading training state."""

from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit.checkpoint._full_files import FullFile
from shardkit.checkpoint._full_models import LoadedNames, load_full, save_full
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
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load_full",
    "save_full",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
