"""XLA devices (TPU, and CPU in tests): one process traces the program of all ranks.

The only package that imports torch_xla, and private names of it. `mesh` makes meshes: `spmd`
for one process with all devices, `replica` where each replica traces for itself. `backend` is what
both have in common. `random_numbers` draws numbers that differ between ranks, and refuses what the
host cannot read.

Tried with torch_xla 2.9.0 on the CPU. Private names are
``_XLAC._xla_spmd_all_reduce`` (the public `all_reduce` does nothing under SPMD),
``_XLAC._spmd_full_to_shard_shape`` (the public one marks its input, see `SpmdRegion.enter`),
``_XLAC._get_xla_tensors_hlo``, ``_XLAC._set_all_reduce_token``, ``_XLAC._get_xla_sharding_spec``
and ``_XLAC._xla_get_spmd_config_is_locked``.
"""
