"""How flat ranges and rows are cut over ranks: integer arithmetic, no torch."""

from shardkit._layout.flat import FlatLayout  # noqa: F401 - files of earlier versions name it here
