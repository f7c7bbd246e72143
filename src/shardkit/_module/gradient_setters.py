"""Setters of `FSDPModule` about how gradients are summed; see `_module.setters`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from shardkit._errors import StateError
from shardkit._module.hooks import groups_in

if TYPE_CHECKING:
    from shardkit._custom_comm import AllReduce


def set_gradient_predivide_factor(self: Any, factor: float | Literal["auto"] | None) -> None:
    """Divide this module's gradients by `factor` before they are summed. Not recursive.

    The sum is then multiplied by what is left: by ``factor / divide``, where ``divide`` is the
    number of ranks, or what `set_gradient_divide_factor` says. So the gradient is the same but for
    rounding, and what is on the wire is `factor` times smaller: partial sums in fp16 do not
    overflow. A power of two changes no bit but where numbers overflow or underflow.

    Args:
        factor: What fairscale and torch_xla call ``gradient_predivide_factor`` (their
            ``gradient_postdivide_factor`` is ``divide / factor``). ``"auto"``: their default, the
            first power of two from which on ``factor * factor`` is at least the number of ranks, as
            long as that is divisible. None, the default: all of the division comes after the sum,
            but half of it (the root) before in fp16 on accelerators.

    Raises:
        StateError: It is zero, negative or not finite.

    Cost: one more pass over what is sent, on the device.
    """
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    if is_number and not (math.isfinite(factor) and factor > 0):  # type: ignore[arg-type, operator]
        msg = f"gradients cannot be divided by {factor!r} first. Pass a finite number above 0."
        raise StateError(msg)
    if not is_number and factor not in ("auto", None):
        msg = f"factor must be a number, 'auto' or None, got {factor!r}."
        raise StateError(msg)
    for group in groups_in(self, recurse=False):
        chosen = float(factor) if is_number else factor  # type: ignore[arg-type]
        group.settings.comm.predivide_factor = chosen


def set_custom_all_reduce(self: Any, comm: AllReduce | None) -> None:
    """Sum this module's gradients over the replicate axis by a function of the user's.

    Not recursive. `shardkit.compression` has functions that compress, and sets one for a whole
    model. A copy of the module (``copy.deepcopy``, pickle) does not have it.

    Args:
        comm: See `AllReduce`. None: as before.

    Raises:
        StateError: There is no replicate axis, or the mesh is one of XLA devices.
    """
    for group in groups_in(self, recurse=False):
        if comm is not None and group.replicate_axis is None:
            msg = (
                f"set_custom_all_reduce: {group.name!r} is on a mesh of one axis, which has no "
                f"all-reduce. Pass fully_shard a 2-D mesh; (n, 1) replicates without sharding. For "
                f"fewer bytes in the reduce-scatter choose MixedPrecisionPolicy(reduce_dtype=...)."
            )
            raise StateError(msg)
        if comm is not None and group.mesh.backend.is_traced:
            msg = (
                f"set_custom_all_reduce: {group.name!r} is on a mesh of {group.mesh.device_type!r} "
                f"devices, whose collectives are part of the traced program. Leave it out there."
            )
            raise StateError(msg)
        group.settings.comm.all_reduce = comm
