"""What of a checkpoint does not fit what it is loaded into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit._errors import listed_lines
from shardkit.checkpoint._files.bytes_io import TensorInfo, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Findings:
    """What does not fit.

    Attributes:
        missing: Entries that are wanted, and not there.
        unexpected: Entries that are there, and not wanted.
        misfits: Entries of another shape or kind.
        of_others: Part of `unexpected` that another stage of a pipeline has saved.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    of_others: set[str] = field(default_factory=set)

    def left_over(self, line: str, *, is_of_others: bool) -> None:
        """Note what is there and not wanted; what another stage has saved is no fault here."""
        self.unexpected.append(line)
        if is_of_others:
            self.of_others.add(line)

    def problem(self, of_all_ranks: Sequence[Findings], *, strict: bool) -> str | None:
        """Return what is wrong; None if nothing is.

        Args:
            of_all_ranks: Findings of all ranks, these among them. What one of them wants is not
                unexpected: stages of a pipeline have different entries.
            strict: Report more than entries that do not fit.
        """
        kinds = [("expected another shape or kind", self.misfits)]
        if strict:
            of_nobody = set(self.unexpected).intersection(*(f.unexpected for f in of_all_ranks))
            of_nobody -= self.of_others
            unexpected = [line for line in self.unexpected if line in of_nobody]
            kinds += [("missing", self.missing), ("unexpected", unexpected)]
        lines = [
            f"  {line}"
            for kind, found in kinds
            for line in listed_lines([f"{kind}: {each}" for each in found], f"{kind}: {{}} more")
        ]
        if not lines:
            return None
        remedy = "Make the model and the optimizer as they were when it was saved"
        if not self.misfits:
            remedy += ", or pass strict=False to leave these as they are"
        return "\n".join(["entries do not fit", *lines, f"{remedy}."])

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
