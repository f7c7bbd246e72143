"""What autograd saves of unsharded parameters, where operators are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._params.bucket import bucket_showing

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit._params.bucket import Bucket


def pack(tensor: Tensor) -> Any:
    """Save an unsharded parameter, or a view of one, by what it is rather than by its contents.

    For `torch.autograd.graph.saved_tensors_hooks`. Backward then uses what is gathered anew, and
    between forward and backward nothing is kept alive.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - documented
    bucket = bucket_showing(base)
    if bucket is None:
        return tensor
    index = next(i for i, param in enumerate(bucket.store.unsharded) if param is base)
    return _Saved(bucket, index, None if tensor is base else tensor._view_func)  # type: ignore[attr-defined]  # noqa: SLF001


class _Saved:
    """Stands for an unsharded parameter or a view of it."""

    __slots__ = ("_bucket", "_index", "_view")

    def __init__(self, bucket: Bucket, index: int, view: Any) -> None:
        self._bucket, self._index, self._view = bucket, index, view

    def restore(self) -> Tensor:
        whole = self._bucket.store.unsharded[self._index].detach()
        result: Tensor = whole if self._view is None else self._view(whole)
        return result


def unpack(saved: Any) -> Tensor:
    """Return what `pack` saved."""
    tensor: Tensor = saved.restore() if isinstance(saved, _Saved) else saved
    return tensor
