"""A script under `accelerate launch` with a YAML file, by FSDP2 and by shardkit."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import typing

import pytest
import torch
import yaml
from accelerate_script import ACCUMULATE, STEPS

from launching import free_port

if typing.TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.clients

TESTS = pathlib.Path(__file__).parents[1]
SCRIPT = TESTS / "clients/accelerate_script.py"
TIMEOUT_S = 200
TOLERANCE = 1e-5  # Losses lie between 4 and 5; norms below 2.

FILE: dict[str, typing.Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": True,
}
# With FSDP2 itself SIZE_BASED_WRAP fails, for a list of layers cannot be sharded; so does
# fsdp_offload_params, which pins memory, where there is no accelerator: it trains without.
SETTINGS = {
    "recomputed layers, files of pieces": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_version": 2,
    },
    "parameters on the host": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    },
}


def launch(file: pathlib.Path, *words: str) -> list[dict[str, typing.Any]]:
    """Run the script; return what it wrote of each epoch."""
    results = file.with_name("results.pt")
    results.unlink(missing_ok=True)
    sharder, *others = words
    paths = [TESTS.parent / "src", TESTS, TESTS / "frameworks", TESTS / "real_models"]
    options = ["--config_file", str(file), "--main_process_port", str(free_port())]
    ran = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", *options),
            *(str(SCRIPT), sharder, str(results), *others),
        ],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return torch.load(results, weights_only=True)


def difference(found: dict[str, typing.Any], wanted: dict[str, typing.Any]) -> float:
    """Return the largest one of losses and norms of an epoch; compare the parameters."""
    assert len(wanted["losses"]) == STEPS * ACCUMULATE
    assert len(wanted["norms"]) == STEPS
    assert found["parameters"].keys() == wanted["parameters"].keys()
    for name, value in wanted["parameters"].items():
        # AdamW divides by the size of a gradient, also where it is all rounding.
        torch.testing.assert_close(
            found["parameters"][name], value, rtol=0, atol=10 * TOLERANCE, msg=name
        )
    pairs = zip(found["losses"] + found["norms"], wanted["losses"] + wanted["norms"], strict=True)
    return max(abs(one - other) for one, other in pairs)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_launched_script_trains_and_goes_on_as_with_fsdp2(
    tmp_path: pathlib.Path, tell: Callable[[str, str, str], None], settings: str
) -> None:
    file, their_file = tmp_path / "accelerate.yaml", tmp_path / "fsdp2.yaml"
    for path, changed in ((file, {}), (their_file, {"fsdp_offload_params": False})):
        path.write_text(yaml.safe_dump({**FILE, "fsdp_config": SETTINGS[settings] | changed}))
    theirs, ours = str(tmp_path / "fsdp2"), str(tmp_path / "shardkit")
    wanted = launch(their_file, "fsdp2", "--save", theirs)
    found = launch(file, "shardkit", "--save", ours, "--load", ours, theirs)
    back = launch(their_file, "fsdp2", "--load", ours)
    assert {each["class"] for each in wanted + back} == {"DTensor"}
    assert {each["class"] for each in found} == {"ShardedTensor"}
    first, second = wanted
    assert first["losses"] != second["losses"]
    assert difference(found[2], found[1]) == 0  # From its own state.
    epochs = [(found[0], first), (found[1], second), (found[3], second), (back[0], second)]
    largest = max(difference(*pair) for pair in epochs)
    tell("accelerate", f"launch with a YAML, {settings}, both states", f"{largest:.1e}")
    assert largest <= TOLERANCE
