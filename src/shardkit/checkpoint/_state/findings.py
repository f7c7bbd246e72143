"""What of a checkpoint does not fit what it is loaded into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import TensorInfo, kind_of


@dataclass
class Findings:
    """What does not fit.

    Attributes:
        missing: Wanted, and not there.
        unexpected: There, and not wanted.
        misfits: Of another shape or kind.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    def check(self, *, strict: bool) -> None:
        """Raise if there is anything.

        Raises:
            CheckpointError: It lists all; without `strict` only entries that do not fit.
        """
        kinds = [("expected another shape or kind", self.misfits)]
        if strict:
            kinds += [("missing", self.missing), ("unexpected", self.unexpected)]
        lines = [f"  {kind}: {line}" for kind, found in kinds for line in found]
        if not lines:
            return
        remedy = "Make the model and the optimizer as they were when it was saved"
        if not self.misfits:
            remedy += ", or pass strict=False to leave these as they are"
        raise CheckpointError("\n".join(["entries do not fit", *lines, f"{remedy}."]))

    def fits(self, name: str, wanted: Any, found: TensorInfo | None) -> bool:
        """Note an entry of another shape or kind of dtype, or a tensor on one side only."""
        if isinstance(wanted, Tensor) and found is not None:
            is_lossless = kind_of(found.dtype) <= kind_of(wanted.dtype)
            if tuple(wanted.shape) == found.shape and is_lossless:
                return True
        elif not isinstance(wanted, Tensor) and found is None:
            return True
        self.misfits.append(f"{name}: expected {described(wanted)}, found {described(found)}")
        return False


def described(value: Any) -> str:
    """Describe a tensor, or what was saved of one."""
    if isinstance(value, Tensor | TensorInfo):
        return f"shape {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return "no tensor"
