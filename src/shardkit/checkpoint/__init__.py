"""Checkpoints of sharded models."""

from shardkit.checkpoint._full_files import FullFile
from shardkit.checkpoint._full_models import LoadedNames, load_full, save_full

__all__ = ["FullFile", "LoadedNames", "load_full", "save_full"]
