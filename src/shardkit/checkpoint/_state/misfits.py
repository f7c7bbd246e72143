"""What of a saved state does not fit a model or an optimizer: all of it, in one error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit._text import listed_lines
from shardkit.checkpoint._files.disk import TensorInfo, dtype_name, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Misfits:
    """What does not fit."""

    # Entries of another shape or kind, with what is wrong.
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # Entries that are wanted, and not there.
    unexpected: list[str] = field(default_factory=list)  # Entries that are there, and not wanted.
    # Part of `unexpected` that another stage of a pipeline has saved.
    of_others: set[str] = field(default_factory=set)

    def left_over(self, line: str, *, is_of_others: bool) -> None:
        """Note what is there and not wanted; what another stage has saved is no fault here."""
        self.unexpected.append(line)
        if is_of_others:
            self.of_others.add(line)

    def compare(self, name: str, wanted: Any, found: TensorInfo | None) -> bool:
        """Note an entry of another shape or kind of dtype, or a tensor on one side only."""
        differing = []
        if not isinstance(wanted, Tensor) or found is None:
            if isinstance(wanted, Tensor) or found is not None:
                differing.append("another kind")
        else:
            if tuple(wanted.shape) != found.shape:
                differing.append("another shape")
            if kind_of(found.dtype) > kind_of(wanted.dtype):
                differing.append("another dtype")
        if differing:
            difference = f"{name}: expected {described(wanted)}, found {described(found)}"
            self.wrong.append(f"expected {' and '.join(differing)}: {difference}")
        return not differing

    def common(self, of_all_ranks: Sequence[Misfits]) -> Misfits:
        """Return these without what another rank wants: stages of a pipeline differ in entries."""
        of_nobody = set(self.unexpected).intersection(*(each.unexpected for each in of_all_ranks))
        unexpected = [line for line in self.unexpected if line in of_nobody - self.of_others]
        return Misfits(self.wrong, self.missing, unexpected)

    def report(self, head: str, remedy: str, *, strict: bool, where: str = "") -> str | None:
        """Return the text of an error; None if there is none to raise."""
        lines = listed_lines(self.wrong)
        for kind, found in (("missing", self.missing), ("unexpected", self.unexpected)):
            if strict:
                named = [f"{kind}{where}: {each}" for each in found]
                lines += listed_lines(named, f"{kind}{where}: {{}} more")
        return "\n".join([f"{head}:", *(f"  {line}" for line in lines), remedy]) if lines else None


def described(value: Any) -> str:
    """Describe a tensor, or what was saved of one."""
    if isinstance(value, Tensor | TensorInfo):
        return f"shape {tuple(value.shape)} of {dtype_name(value.dtype)}"
    return "something that is no tensor"
