"""What users call: `fully_shard`, the methods of `FSDPModule`, and the hooks of modules."""

from shardkit._module.fsdp_module import _restore  # noqa: F401 - pickled modules name it here
