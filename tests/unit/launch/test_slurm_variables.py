"""SLURM's variables, as those of a launcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit._errors import LaunchError
from shardkit.launch import slurm_environment
from shardkit.launch.slurm import host_names, tasks_per_host

# What srun of SLURM 22.05 set for the last of four tasks on two nodes.
REAL = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[001-002]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "3,1",
}


def test_a_task_knows_its_place() -> None:
    assert slurm_environment(REAL) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node001",
        "MASTER_PORT": "12062",
    }


def test_a_step_may_have_fewer_hosts_than_its_job() -> None:
    step = {
        "SLURM_JOB_NODELIST": "node[001-004]",
        "SLURM_STEP_NODELIST": "node[003-004]",
        "SLURM_TASKS_PER_NODE": "8(x4)",
    }
    found = slurm_environment(REAL | step | {"SLURM_NNODES": "4"})
    assert (found["MASTER_ADDR"], found["GROUP_WORLD_SIZE"]) == ("node003", "2")
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("4", "1")


@pytest.mark.parametrize("of_job", [None, "4"])
def test_the_list_says_how_many_hosts_there_are(of_job: str | None) -> None:
    names = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")
    variables = {name: value for name, value in REAL.items() if name not in names}
    if of_job is not None:
        variables |= {"SLURM_NNODES": of_job, "SLURM_JOB_NUM_NODES": of_job}
    assert slurm_environment(variables)["GROUP_WORLD_SIZE"] == "2"


def test_a_chosen_place_stays() -> None:
    found = slurm_environment(REAL | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "5")


def test_steps_of_one_job_meet_at_different_ports() -> None:
    ports = {
        slurm_environment(REAL | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[
            "MASTER_PORT"
        ]
        for job in (7, 8)
        for step in range(5)
    }
    assert len(ports) == 10
    assert all(1024 < int(port) < 32768 for port in ports)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("node[001-003,007]", ("node001", "node002", "node003", "node007")),
        ("node[7,9-11],node[1-2]", ("node7", "node9", "node10", "node11", "node1", "node2")),
        ("gpu-a,node[9-11]", ("gpu-a", "node9", "node10", "node11")),
        ("r[1-2]n[01-02]-x", ("r1n01-x", "r1n02-x", "r2n01-x", "r2n02-x")),
        ("n[099-101],z[5]", ("n099", "n100", "n101", "z5")),
    ],
)
def test_lists_of_hosts(text: str, names: tuple[str, ...]) -> None:
    assert host_names(text) == names


@given(st.lists(st.integers(0, 1200), min_size=1, max_size=20), st.integers(1, 4))
def test_any_numbers_come_back(numbers: list[int], width: int) -> None:
    words = [str(number).zfill(width) for number in numbers]
    assert host_names(f"n[{','.join(words)}]") == tuple(f"n{word}" for word in words)


def test_tasks_of_hosts() -> None:
    assert tasks_per_host("2(x3),1") == (2, 2, 2, 1)
    assert tasks_per_host("4") == (4,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not in the environment"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID must be an integer of at least 0, got 'x'"),
        ({"SLURM_STEP_NODELIST": "node[1-2"}, "no list of hosts"),
        ({"SLURM_STEP_NODELIST": "node[1-b]"}, "has '1-b' in brackets"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "how many tasks hosts have"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "start this process by `srun` itself"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "node001, node002 and 3 numbers of tasks"),
        ({"SLURM_STEP_NODELIST": "node[1-b]", "MASTER_ADDR": "a"}, "has '1-b' in brackets"),
        ({"SLURM_NODEID": "2"}, "this is host 2"),
    ],
)
def test_what_cannot_be_read_has_a_name(changed: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message.replace("[", r"\[")):
        slurm_environment(REAL | changed)


def test_a_batch_script_is_no_task_though_sbatch_gives_it_a_place() -> None:
    batch = {name: value for name, value in REAL.items() if not name.startswith("SLURM_STEP")}
    with pytest.raises(LaunchError, match="Write `srun python -m shardkit launch --slurm"):
        slurm_environment(batch)
