"""Without the packages there is nothing to collect here."""

from __future__ import annotations

import importlib.util

_PACKAGES = ("torchao", "bitsandbytes")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, _PACKAGES)) else ["test_*.py"]
