"""Directories of distributed checkpoints: files, manifest, planners, storage."""
