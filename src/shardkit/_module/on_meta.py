"""Which tensors of a model have no values: on the meta device, or deferred on purpose."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from shardkit._compat import torch_tensors
from shardkit._errors import StateError, warn_user
from shardkit._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn

    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.base import Region


# --- sharding that is put off ---------------------------------------------------------------------

_deferred = threading.local()


def execute_sharding(region: Region) -> None:
    """Run the graph that cuts parameters, so that the memory of the whole ones is freed."""
    regions: list[Region] | None = getattr(_deferred, "regions", None)
    if regions is None:
        region.finish_graph()
    elif region not in regions:
        regions.append(region)


@contextlib.contextmanager
def defer_sharding() -> Iterator[None]:
    """Cut the parameters of all `fully_shard` calls inside together, at the end of the block.

    It has an effect on XLA devices only. There each call runs a graph that cuts its parameters, so
    that the memory of the whole ones is freed at once. In this block one graph cuts all parameters:
    that takes fewer compilations, but the whole model is in memory until the end of the block.

        with defer_sharding():
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
    """
    regions: list[Region] = []
    before, _deferred.regions = getattr(_deferred, "regions", None), regions
    try:
        yield
    finally:
        _deferred.regions = before
    for region in regions:
        execute_sharding(region)


# --- tensors on the meta device -------------------------------------------------------------------

_MAX_COMPARED = 4096


def params_on_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters on meta; of tied ones the first name."""
    return [name for name, param in module.named_parameters() if param.is_meta]


def buffers_on_meta(module: nn.Module) -> list[str]:
    """Return the names of buffers on meta, persistent or not."""
    return [name for name, buffer in module.named_buffers() if buffer.is_meta]


class Emptied:
    """A buffer that got memory but no values, for example by ``to_empty``.

    Writes to ``.data``, by NumPy and by collectives do not raise the version counter. So elements
    all over the buffer are compared as well.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer  # The buffer, as it was then.
        self._version = torch_tensors.version_of(buffer)
        self._sample = self._taken()

    def _taken(self) -> Tensor | None:
        """Return the bytes of some elements; None where reading them would run a graph."""
        values = self.buffer.detach()
        if values.device.type == "xla" or not values.is_contiguous():
            return None
        step = values.numel() // _MAX_COMPARED | 1  # Odd: not always the same column.
        return values.view(-1)[::step].clone().view(torch.uint8)

    @property
    def is_unchanged(self) -> bool:
        if self.buffer.is_meta or torch_tensors.version_of(self.buffer) != self._version:
            return False
        before, now = self._sample, self._taken()
        return before is None or now is None or torch.equal(before, now)


class NotedConversion:
    """A conversion of a module that notes the buffers to which it gives memory."""

    def __init__(self, module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        self._module = module
        self._given = fn
        self._new: dict[int, Emptied] = {}
        # The function to apply to each tensor, in the place of the original one.
        self.fn = self._note if buffers_on_meta(module) else fn

    def _note(self, tensor: Tensor) -> Tensor:
        # Note it at once: a module's own `_apply` may write values afterwards.
        result = self._given(tensor)
        is_plain = type(result) is torch.Tensor and result.layout is torch.strided
        if tensor.is_meta and is_plain and not result.is_meta and not result.is_inference():
            self._new[id(result)] = Emptied(result)
        return result

    def emptied(self) -> list[Emptied]:
        """Return the buffers that got memory."""
        held = {id(buffer) for buffer in self._module.buffers()}
        return [new for key, new in self._new.items() if key in held]


def warn_of_emptied(module: nn.Module, emptied: Iterable[Emptied]) -> None:
    """Warn of buffers that were not written since they got memory."""
    unwritten = {id(each.buffer) for each in emptied if each.is_unchanged}
    names = [name for name, buffer in module.named_buffers() if id(buffer) in unwritten]
    if names:
        warn_user(
            f"buffers {listed(names)} got memory from to_empty(), and nobody has written values to "
            f"it. State dicts leave out buffers that were registered with persistent=False, so "
            f"loading does not fill them. Have their modules compute them (reset_parameters(), "
            f"reset_buffers()), or call shardkit.materialize(model) in the place of to_empty(). If "
            f"the forward writes them before it reads them, call zero_() on them."
        )


def check_has_values(module: nn.Module, groups: Iterable[ParamGroup]) -> None:
    """Refuse a forward that would compute with tensors on meta."""
    for group in groups:
        if group.mesh.backend.is_dry:
            return
        group.check_materialized()
    params, buffers = params_on_meta(module), buffers_on_meta(module)
    if params:
        msg = (
            f"on the meta device, without values: {listed(params)}, which no group of fully_shard "
            f"has taken. Before the first forward call shardkit.materialize(model), or load them "
            f"(shardkit.checkpoint.load_full)."
        )
        raise StateError(msg)
    if buffers:
        msg = (
            f"on the meta device, without values: buffers {listed(buffers)}. State dicts leave out "
            f"those that were registered with persistent=False, so loading fills them only where "
            f"their modules can compute them. Before the first forward call "
            f"shardkit.materialize(model, init_fn) with a function that does, or set them by hand: "
            f"module.table = compute_table()."
        )
        raise StateError(msg)
