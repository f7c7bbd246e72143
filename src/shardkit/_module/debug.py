"""`FSDPModule.set_debug`: what a step costs with and without its collectives, and its memory."""

from __future__ import annotations

from typing import Any

from shardkit._module.setters import settings_of_root, update_options


def set_debug(
    self: Any,
    *,
    dummy_gathers: bool = False,
    dummy_reductions: bool = False,
    print_memory: str | None = None,
) -> None:
    """Find out which part of a step costs what. Call it on the root; again to change it.

    With dummies nothing travels between ranks: a rank takes what it has itself for what all have.
    Buffers, casts, order and memory are as always, so the difference to a usual step is what the
    collectives cost. All values are WRONG from then on: a warning says so at each root's first
    step, and nothing of the model can be saved or pickled any more, also after they are turned
    off. Choose the same on all ranks.

    Args:
        dummy_gathers: Do not all-gather parameters.
        dummy_reductions: Do not reduce-scatter gradients, nor all-reduce them over replicas.
        print_memory: A word to print in front of a line on stderr at each gather, each free and
            each reduction of this root: bytes of unsharded parameters now and at most, of buffers
            of reductions at most, and on CUDA what is allocated. On XLA at tracing. None: print
            nothing.

    Raises:
        StateError: After the first forward: it is not the root.
    """
    settings = settings_of_root(self)
    settings.dummy_gathers, settings.dummy_reductions = dummy_gathers, dummy_reductions
    settings.memory_message = print_memory
    update_options(self)
