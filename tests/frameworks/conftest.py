"""What needs a package that is not there is not collected, file by file."""

from __future__ import annotations

import importlib.util

_NEEDS = {
    "test_accelerate_checkpoints.py": ("accelerate", "transformers"),
    "test_accelerate_files.py": ("accelerate",),
    "test_accelerate_low_precision.py": ("accelerate", "transformers", "torchao", "peft"),
    "test_accelerate_optimizers.py": ("accelerate", "transformers", "torchao"),
    "test_accelerate_parallelism.py": ("accelerate",),
    "test_accelerate_settings.py": ("accelerate", "transformers"),
    "test_accelerate_training.py": ("accelerate", "transformers"),
    "test_lightning_fabric.py": ("lightning",),
    "test_lightning_own_strategies.py": ("lightning",),
    "test_lightning_trainer.py": ("lightning",),
    "test_adapters_under_install.py": ("peft", "transformers", "accelerate"),
    "test_stateful_loader.py": ("torchdata",),
    "test_trainer_beside_fsdp2.py": ("accelerate", "transformers", "torchao"),
    "test_transformers_loading.py": ("accelerate", "transformers"),
    "test_transformers_trainer.py": ("accelerate", "transformers"),
    "test_what_is_replaced.py": ("accelerate", "transformers", "lightning", "peft"),
}

collect_ignore = [
    name for name, needs in _NEEDS.items() if not all(map(importlib.util.find_spec, needs))
]
