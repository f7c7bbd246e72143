"""What torchrun is told: the command line above a config file above defaults."""

from __future__ import annotations

import typing

import pytest
import torch

import shardkit
from shardkit._errors import ConfigError, LaunchError
from shardkit.launch import Arguments, environment_of, parse, read_config

if typing.TYPE_CHECKING:
    import pathlib

FILE = {
    "num_processes": 8,
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 4000,
    "rdzv_backend": "static",
}


def parsed(*argv: str, **fields: typing.Any) -> Arguments:
    return parse(argv, lambda _: fields)


def test_without_anything_there_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for cards, ranks in ((0, "1"), (3, "3")):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda cards=cards: cards)
        found = parsed("train.py", "--config", "x").torchrun
        assert (found.nnodes, found.nproc_per_node, found.standalone) == ("1", ranks, True)
        assert found.training_script_args == ["--config", "x"]
        assert parsed("--cpu", "train.py").torchrun.nproc_per_node == "1"


def test_a_config_file_is_read() -> None:
    found = parsed("--config", "f.yaml", "train.py", **FILE)
    options = found.torchrun
    assert found.torchrun.config == "f.yaml"
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "4", 1)
    assert (options.master_addr, options.master_port) == ("10.0.0.1", 4000)
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("static", "")


WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_version: 2
gpu_ids: all
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 4000
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: c10d
same_network: true
use_cpu: false
"""


def test_what_accelerate_writes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks find the same file by `from_config()`."""
    pytest.importorskip("yaml")
    file = tmp_path / "fsdp.yaml"
    file.write_text(WRITTEN)
    found = parse(["--config", str(file), "--machine_rank", "1", "t.py"], read_config)
    options = found.torchrun
    assert (options.nnodes, options.nproc_per_node) == ("2", "8")
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "10.0.0.1:4000")
    assert (options.rdzv_conf, found.cards) == ("is_host=0", None)
    for name, value in environment_of(found).items():
        monkeypatch.setenv(name, value)
    assert shardkit.from_config().settings.precision == "bf16"
    monkeypatch.delenv("SHARDKIT_CONFIG")
    with pytest.raises(ConfigError, match="python -m shardkit launch --config"):
        shardkit.from_config()


def test_the_command_line_is_above_the_file() -> None:
    words = ("--config", "f.yaml", "--machine-rank", "0", "--num_processes", "2", "train.py")
    options = parsed(*words, **FILE).torchrun
    assert (options.nproc_per_node, options.node_rank) == ("1", 0)
    assert parsed("--nproc-per-node", "3", *words, **FILE).torchrun.nproc_per_node == "3"


@pytest.mark.parametrize("variables", [False, True])
def test_torchruns_own_names_of_the_place_are_above_the_file(
    variables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"node_rank": "0", "master_addr": "host-b", "master_port": "7"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in place.items()]
    for name, value in place.items() if variables else ():
        monkeypatch.setenv(f"PET_{name.upper()}", value)
    given = () if variables else words
    options = parsed("--config", "f.yaml", *given, "train.py", **FILE).torchrun
    assert (options.master_addr, options.master_port, options.node_rank) == ("host-b", 7, 0)
    file = {**FILE, "rdzv_backend": "c10d"}
    options = parsed("--config", "f.yaml", *given, "train.py", **file).torchrun
    assert (options.rdzv_endpoint, options.rdzv_conf) == ("host-b:7", "is_host=1")
    own = ("--main_process_ip=host-c", "--machine_rank=1")
    if variables:
        options = parsed("--config", "f.yaml", *own, "train.py", **FILE).torchrun
        assert (options.master_addr, options.master_port, options.node_rank) == ("host-c", 7, 1)


def test_hosts_of_the_command_line_share_the_ranks_of_the_file() -> None:
    options = parsed("--config", "f.yaml", "--nnodes", "4", "train.py", **FILE).torchrun
    assert (options.nnodes, options.nproc_per_node) == ("4", "2")


def test_torchruns_variables_are_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    options = parsed("--config", "f.yaml", "train.py", **FILE).torchrun
    assert (options.nnodes, options.nproc_per_node) == ("2", "5")


@pytest.mark.parametrize(("rank", "is_host"), [(0, "1"), (1, "0")])
def test_a_number_of_hosts_that_may_change_needs_c10d(rank: int, is_host: str) -> None:
    words = ("--config", "f.yaml", "--nnodes", "1:2", "--machine_rank", str(rank), "train.py")
    found = parsed(*words, **FILE)
    assert found.torchrun.rdzv_backend == "c10d"
    assert found.torchrun.rdzv_endpoint == "10.0.0.1:4000"
    assert found.torchrun.rdzv_conf == f"is_host={is_host}"
    assert found.hosts == (1, 2)


def test_what_is_told_to_torchrun_itself_stays() -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-conf=a=b", "t.py")
    options = parsed(*words).torchrun
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "h:1")
    assert options.rdzv_conf == "a=b"
    words = ("--nnodes=2", "--node-rank=1", "--master-addr=h", "--master-port=7", "t.py")
    options = parsed(*words).torchrun
    assert (options.master_addr, options.master_port, options.node_rank) == ("h", 7, 1)


def test_devices_of_a_config_file() -> None:
    found = parsed("--config=f", "t.py", use_cpu=True, num_processes=2)
    assert found.cards == ""
    assert found.torchrun.nproc_per_node == "2"
    assert parsed("--config=f", "t.py", gpu_ids="0,2", num_processes=2).cards == "0,2"
    assert parsed("--config=f", "t.py", gpu_ids="all").cards is None
    options = parsed("--config=f", "t.py", distributed_type="XLA", num_processes=8).torchrun
    assert (options.nnodes, options.nproc_per_node, options.standalone) == ("1", "1", True)


@pytest.mark.parametrize(
    ("words", "fields", "message"),
    [
        ([], {"num_processes": 3, "num_machines": 2}, "3 cannot be shared out evenly"),
        ([], {"num_processes": 4, "num_machines": 2}, "give the address of the first"),
        (["--nnodes", "2"], {}, "give the address of the first"),
        (["--xla"], {"num_machines": 2}, "on XLA shardkit trains on one host"),
        (["--no-python"], {}, "leave out --no-python"),
        (
            ["--node-rank=1", "--machine-rank=0"],
            {"num_machines": 2},
            "--node-rank 1 and --machine_rank 0 contradict each other",
        ),
        (["--nnodes=2", "--num_machines=3"], {}, "--nnodes 2 and --num_machines 3 contradict"),
    ],
)
def test_contradictions_have_names(
    words: list[str], fields: dict[str, typing.Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        parsed("--config=f", *words, "t.py", **fields)


def test_cards_that_are_chosen_are_as_many_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert parsed("--config", "f", "train.py", gpu_ids="0,3").torchrun.nproc_per_node == "2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--num_processes", "99999999999999"],
            r"must be an integer from 1 to \d+, or -1, got '9999",
        ),
        (["--num_processes", "-3"], "num_processes must be .* got '-3'"),
        (["--num_processes", "0"], "num_processes must be .* got '0'"),
        (["--num_processes", "50000"], "--nproc-per-node 50000: 50000 is not in 1 to 4096"),
        (["--num_machines", "0"], "num_machines must be .* got '0'"),
        (
            ["--num_machines", "2", "--machine_rank", "2"],
            "machine_rank must .* 0 to 1, got '2'",
        ),
        (["--main_process_port", "70000"], "main_process_port must be .* 0 to 65535, got '7"),
        (["--num_processes", "two"], "num_processes must be an integer .*, got 'two'"),
        (["--num_machines", "two"], "num_machines must be an integer .*, got 'two'"),
        (["--nnodes", "4:2"], "--nnodes 4:2 .* 4 hosts at the least are more than 2 at the most"),
        (["--max-restarts", "-1"], "max_restarts must be an integer of at least 0, got -1"),
        (["--monitor-interval", "nan"], "monitor_interval must be a positive number .*, got nan"),
        (["--nproc-per-node", "-3"], "-3 is not in 1 to 4096"),
        (["--nproc-per-node", "99999999999999"], "is not in 1 to 4096"),
        (["--nnodes", "0"], "num_machines must be .* from 1 to 4096, got '0'"),
    ],
)
def test_numbers_that_cannot_be_meant(words: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parsed(*words, "t.py")


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nnodes"])
def test_a_number_that_is_none_is_named(option: str) -> None:
    with pytest.raises(LaunchError, match=f"{option} two"):
        parsed(option, "two", "train.py")


def test_an_option_of_the_script_before_it_is_answered_with_the_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed("--lr", "1e-3", "train.py")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("launch [options] script.py [arguments of the script]")


def test_a_script_that_is_missing_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--nnodes", "1")
    assert capsys.readouterr().err.endswith("arguments are required: script.py\n")
