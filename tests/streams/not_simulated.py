"""Which tests of CPU ranks do not run on the simulated accelerator, and why."""

from __future__ import annotations

_SUMS = "gloo's exchange sums in fp32; libraries of accelerators sum in the dtype on the wire"
_REASONS = {
    "(4,)": "on two ranks and on 2x2 the same code runs, in less time",
    "(3,)": "on two ranks and on 2x2 the same code runs, in less time",
    "gpt": "with the small model the same code of the backend runs, in less time",
    "adamw": "optimizers run on compute alone, and SGD's cases show the rest",
    "test_bf16_reduction_sums_in_fp32": _SUMS,
    "test_some_parameters_keep_their_dtype[gloo-(2,)-reduce_dtype0]": _SUMS,
    "test_some_parameters_keep_their_dtype[gloo-(2,)-None]": _SUMS,
    "test_what_an_interrupt_leaves_unfinished_is_waited_for": "no rank reads from another",
    "test_batch_normalization_trains_as_in_ddp": "DDP asks its work for a future, which simulated "
    "collectives have not got",
    "test_symmetric_memory_is_set_up_where_it_is_used": "it counts the groups of gloo, where "
    "reductions have one of their own; the scenario symmetric_memory runs there",
    "test_settings_leave_the_numbers_as_they_are[gloo-(2,)]": "on 2x2 the same code runs, and sums "
    "over replicas as well",
    "test_auto_shard.py::test_training[gloo-(2,)]": "on 2x2 the same groups are made, and sums "
    "over replicas as well",
    "test_compile.py": "what is compiled reads the memory that hooks have gathered, as eager code "
    "does",
    "[of_inputs": "a plain model on the simulated device has no forward-mode gradients either",
    "[of_parameters": "a plain model on the simulated device has no forward-mode gradients either",
    "test_a_trace_of_operators": "a trace sees the tensors behind those of the simulated device",
    "test_losses_of_slopes": "a plain model on the simulated device has no forward-mode gradients "
    "either",
    "[forward_mode": "a plain model on the simulated device has no forward-mode gradients either",
}

_KEPT = (
    "test_compiled_layers_train_as_plain_ones_in_one_graph[True-compiled first-module]",
    "test_layers_compiled_by_inductor_train_as_plain_ones",
    "test_a_compiled_root_trains_as_a_plain_one",
)
"""Those that show the rest of their file."""


def reason_to_skip(nodeid: str) -> str | None:
    """Return why a test does not run there; None if it does."""
    if nodeid.endswith(_KEPT):
        return None
    return next((reason for part, reason in _REASONS.items() if part in nodeid), None)
