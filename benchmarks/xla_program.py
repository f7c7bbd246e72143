"""Traffic and memory of a compiled XLA program, read from the dumps of ``--xla_dump_to``."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_LINE = re.compile(rf" = (?P<type>.*?) (?P<opcode>{'|'.join(_COLLECTIVES)})(?:-start)?\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d+)\[(?P<dims>[\d,]*)\]")
_TEMP = re.compile(r"size (\d+), preallocated-temp")


@dataclass(frozen=True)
class Program:
    """One compiled program, as one of its devices runs it."""

    counts: dict[str, int]  # Numbers of collectives, by opcode.
    bytes_moved: int  # Bytes that a device sends in collectives, by rings.
    temp_bytes: int  # Bytes of memory apart from arguments and results.

    @property
    def num_collectives(self) -> int:
        """Number of all collectives."""
        return sum(self.counts.values())


def last_program(folder: Path, num_devices: int) -> Program:
    """Return the program that was compiled last, of those that communicate.

    After the first steps nothing is compiled, so this is the program of every later step.

    Args:
        folder: The folder of the dumps.
        num_devices: Number of devices that take part in every collective.
    """
    files = sorted(folder.glob("*cpu_after_optimizations.txt"), key=lambda path: path.name)
    texts = [(path, path.read_text(encoding="utf-8")) for path in files]
    path, text = next((p, t) for p, t in reversed(texts) if _LINE.search(t))
    counts: dict[str, int] = {}
    moved = 0.0
    for found in _LINE.finditer(text):
        opcode = found["opcode"]
        counts[opcode] = counts.get(opcode, 0) + 1
        moved += _result_bytes(found["type"]) * _factor(opcode, num_devices)
    assignment = path.with_name(path.name.replace(".txt", "-buffer-assignment.txt"))
    temp = sum(map(int, _TEMP.findall(assignment.read_text(encoding="utf-8"))))
    return Program(counts, round(moved), temp)


def _result_bytes(shapes: str) -> int:
    total = 0
    for shape in _SHAPE.finditer(shapes):
        bits = int(re.sub(r"\D", "", shape["dtype"]))
        total += math.prod(int(dim) for dim in shape["dims"].split(",") if dim) * bits // 8
    return total


def _factor(opcode: str, num_devices: int) -> float:
    """Return the bytes that a device sends for each byte of its result."""
    share = (num_devices - 1) / num_devices
    return {
        "all-gather": share,
        "reduce-scatter": num_devices - 1,
        "all-reduce": 2 * share,
        "all-to-all": share,
        "collective-permute": 1,
    }[opcode]
