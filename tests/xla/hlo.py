"""Reads HLO as text: which instruction there is, and what it depends on."""

from __future__ import annotations

import collections
import dataclasses
import re

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (?:\([^=]*?\)|\S+) ([\w\-]+)\((.*)")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([A-Za-z][\w.\-]*)")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\})")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass
class Instruction:
    """One line of the main program."""

    opcode: str  # Such as ``all-gather``.
    operands: list[str]  # Names of other instructions.
    rest: str  # Operands with their types, and attributes.

    @property
    def groups(self) -> str:
        """Which devices a collective goes over."""
        found = _GROUPS.search(self.rest)
        return found[1] if found else ""

    @property
    def channel(self) -> int:
        """Number of a collective."""
        found = _CHANNEL.search(self.rest)
        return int(found[1]) if found else -1


class Program:
    """The entry computation of an HLO module."""

    def __init__(self, text: str) -> None:
        self.instructions: dict[str, Instruction] = {}
        for line in text[text.index("\nENTRY") :].splitlines()[1:]:
            found = _INSTRUCTION.match(_COMMENT.sub("", line))
            if found is not None:
                names = _NAME.findall(found[3])  # Also of other computations, which are not here.
                self.instructions[found[1]] = Instruction(found[2], names, found[3])

    def count(self) -> collections.Counter[str]:
        """Return how many instructions there are of each kind."""
        return collections.Counter(i.opcode for i in self.instructions.values())

    def of(self, opcode: str) -> list[str]:
        """Return the names of the instructions of a kind, in order."""
        return [name for name, i in self.instructions.items() if i.opcode == opcode]

    def before(self, name: str) -> set[str]:
        """Return the names of all that an instruction depends on."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            for operand in self.instructions[stack.pop()].operands:
                if operand in self.instructions and operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return seen

    def num_before(self, name: str, opcode: str) -> int:
        """Return how many instructions of a kind another one depends on."""
        return sum(self.instructions[other].opcode == opcode for other in self.before(name))
