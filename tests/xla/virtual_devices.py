"""The environment of tests on XLA: four virtual devices of the CPU. Import it before torch_xla."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
# Each compiled graph takes memory maps, of which Linux gives a process 65,530.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "64")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Else a warning per graph.
# Graphs of tests run a few times: most of their time would be LLVM's.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
