"""Saving and loading training state: standard DCP checkpoints, verified and crash-safe."""
