"""What happens in the steps of all ranks: recorded, and shown."""

from shardkit.tracing.recorder import Recording, record

__all__ = ["Recording", "record"]
