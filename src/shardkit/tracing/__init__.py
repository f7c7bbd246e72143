"""Recording and showing the steps of all ranks."""

from shardkit.tracing.recorder import Recording, record

__all__ = ["Recording", "record"]
