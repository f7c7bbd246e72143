"""What shardkit replaces in other packages stands on one page, and `undo` gives it back."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.frameworks

PAGE = pathlib.Path(__file__).parents[2] / "docs/howto/torchtitan.md"

FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable")
"""Of its four modules not each has all eight names."""

# It does not ask shardkit what it replaces: it looks at all modules, and at all their classes.
LOOK = """
import json
import sys
import types

import torch._dynamo.variables.builder
import torch.distributed._composable.fsdp
import torch.distributed.checkpoint.format_utils
import torch.distributed.checkpoint.hf_storage, torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp as fsdp
import torch.distributed.pipelining
import accelerate, lightning.fabric, lightning.pytorch, peft
import transformers.distributed.mixin, transformers.trainer

PACKAGES = ("torch", "accelerate", "transformers", "lightning", "peft")


def look():
    found = {}
    for module, value in list(sys.modules.items()):
        if module.split(".")[0] in PACKAGES and isinstance(value, types.ModuleType):
            for key, each in list(vars(value).items()):
                found[f"{module}.{key}"] = each
                if isinstance(each, type) and each.__module__ == module:
                    found |= {f"{module}.{key}.{name}": own for name, own in vars(each).items()}
    return found


def changed(before, after):
    replaced = {name for name, value in before.items() if after.get(name) is not value}
    new = {name for name in after if name not in before}
    ours = {name for name in new if getattr(after[name], "__module__", None) or ""}
    ours = {name for name in ours if str(after[name].__module__).startswith("shardkit")}
    both = {name for name in replaced | ours if not name.endswith("__warningregistry__")}
    # What is in a class that was replaced as a whole is no replacement of its own.
    return sorted(name for name in both if name.rpartition(".")[0] not in replaced)


first = look()
import shardkit, shardkit.checkpoint

second = look()
with shardkit.install():
    third = look()
theirs = [fsdp.fully_shard, fsdp.CPUOffloadPolicy, fsdp.MixedPrecisionPolicy]
theirs.append(torch.distributed.tensor.distribute_tensor)
print(json.dumps({
    "import": changed(first, second),
    "install": changed(second, third),
    "undo": changed(second, look()),
    "copies": [name for name, value in second.items() if any(value is each for each in theirs)],
}))
"""


def listed_on_page(beginning: str) -> set[str]:
    """Return the names that the page's lines of a beginning list."""
    found: set[str] = set()
    for line in PAGE.read_text().splitlines():
        if not line.startswith(beginning):
            continue
        words = re.findall(r"`([\w.]+)`", line)
        places = [word for word in words if "." in word]
        names = [word for word in words if "." not in word]
        found |= {f"{place}.{name}" for place in places for name in names} or set(places)
    return found


def test_all_that_is_replaced_is_listed_and_given_back() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOK], check=True, capture_output=True, text=True
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found["import"]) == listed_on_page("- on import")
    # Modules outside of torch that imported FSDP2's names before: the page has a line for all.
    copies = {name for name in found["copies"] if not name.startswith("torch.")}
    assert copies <= set(found["install"])
    replaced, listed = set(found["install"]) - copies, listed_on_page("- in ")
    assert replaced - listed == set()
    assert {name for name in listed - replaced if not name.startswith(FSDP2)} == set()
    assert found["undo"] == []
