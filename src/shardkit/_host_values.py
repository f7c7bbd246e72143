"""Methods that use a tensor's memory on the host, for tensors that are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class HostValues(Tensor):
    """Methods that use a tensor's memory on the host; here they use the whole. Collective."""

    def full_tensor(self) -> Tensor:
        """Return the whole tensor."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """Return the whole as nested lists. Collective, as `full_tensor`."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole as a read-only array. Collective, as `full_tensor`.

        Writes to the array would not reach the pieces.
        """
        array: Any = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001
        """Return a copy of the whole as an array. Collective, as `full_tensor`."""
        del copy
        array: Any = self.full_tensor().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of the whole, in memory of its own. Collective, as `full_tensor`."""
        return self.full_tensor().__dlpack__(**options)

    def __format__(self, format_spec: str) -> str:
        """Format as `repr`; with a format spec format the value, which is collective."""
        return format(self.item(), format_spec) if format_spec else repr(self)

    def apply_(self, function: Any) -> Any:
        """Write ``function(value)`` in the place of each value. Collective, as `full_tensor`."""
        return self._write_by("apply_", function)

    def map_(self, other: Any, function: Any) -> Any:
        """Write what a function of two values returns. Collective, as `full_tensor`."""
        return self._write_by("map_", other, function)

    def map2_(self, other: Any, third: Any, function: Any) -> Any:
        """Write what a function of three values returns. Collective, as `full_tensor`."""
        return self._write_by("map2_", other, third, function)

    def _write_by(self, method: str, *args: Any) -> Any:
        wholes = [each.full_tensor() if isinstance(each, HostValues) else each for each in args]
        return self.copy_(getattr(self.full_tensor(), method)(*wholes))
