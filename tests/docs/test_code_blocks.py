"""Every block of the documentation is run, or says why it is not.

What is run how: see `code_blocks`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import typing

import code_blocks
import pytest
import shell_blocks
import typer.testing
from code_blocks import BUILD_ON_EACH_OTHER, ROOT, Block, run_blocks
from processes import run_python

from launching import start_ranks
from shardkit._cli import app

Spawn = typing.Callable[..., list[typing.Any]]

UNITS = code_blocks.units()
SHELL = ("sh", "console")
FIRST_IMPORT_S = 240  # Of transformers.
KINDS = {"transformers": "models", "xla": "xla"}  # By what is needed.
FRAMEWORKS = ("accelerate", "lightning")
REPLICAS = {"PJRT_CPU_ASYNC_CLIENT": "0", "NPROC": "16", "XLA_THREAD_POOL_SIZE": "16"}


def python_of(unit: list[Block]) -> list[Block]:
    return [block for block in unit if block.language == "python"]


def kind_of(unit: list[Block]) -> str:
    """Return what is done with a unit."""
    first = unit[0]
    if "reason" in first.options:
        return "reason"
    if first.language in SHELL:
        return "shell"
    if first.language != "python":
        return "unknown"
    if "cuda" in first.options:
        return "compiled"
    if "file" in first.options:
        return "script"
    needs = first.options.get("needs", "")
    return "frameworks" if needs in FRAMEWORKS else KINDS.get(needs, "ranks")


def params(*kinds: str) -> list[typing.Any]:
    return [pytest.param(unit, id=unit[0].where) for unit in UNITS if kind_of(unit) in kinds]


@pytest.mark.parametrize("unit", params("unknown", "reason"))
def test_what_is_not_run_says_why(unit: list[Block]) -> None:
    [block] = unit
    assert len(block.options.get("reason", "")) > 5, (
        f"{block.where}: a block of {block.language or 'no language'} is not run and does not say "
        f"why; see code_blocks.py"
    )


def test_every_block_belongs_to_a_kind_of_test() -> None:
    kinds = {"reason", "shell", "compiled", "script", "models", "frameworks", "xla", "ranks"}
    for unit in UNITS:
        assert kind_of(unit) in kinds, unit[0].where
        for block in unit[1:]:
            assert block.language in ("python", *SHELL) or "message" in block.options, block.where


def test_pages_say_where_blocks_build_on_each_other() -> None:
    for unit in UNITS:
        if any("continues" in block.options for block in unit):
            text = code_blocks.without_space((ROOT / unit[0].page).read_text())
            assert BUILD_ON_EACH_OTHER in text, unit[0].page


@pytest.mark.parametrize(
    "unit", params("ranks", "compiled", "script", "models", "frameworks", "xla")
)
def test_names_and_imports_exist(unit: list[Block]) -> None:
    blocks = python_of(unit)
    for block in blocks:
        code_blocks.compiled(block)
    assert code_blocks.unknown_names(blocks) == []


@pytest.mark.parametrize("unit", params("ranks"))
def test_on_ranks(
    spawn: Spawn, spawn_errors: Spawn, unit: list[Block], tmp_path: pathlib.Path
) -> None:
    run_on_ranks(spawn, spawn_errors, unit, tmp_path, timeout_s=60)


@pytest.mark.models
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
@pytest.mark.parametrize("unit", params("models"))
def test_with_transformers(
    spawn: Spawn, spawn_errors: Spawn, unit: list[Block], tmp_path: pathlib.Path
) -> None:
    run_on_ranks(spawn, spawn_errors, unit, tmp_path, timeout_s=FIRST_IMPORT_S)


@pytest.mark.frameworks
@pytest.mark.parametrize("unit", params("frameworks"))
def test_with_frameworks(spawn: Spawn, unit: list[Block], tmp_path: pathlib.Path) -> None:
    needed = unit[0].options["needs"]
    if not importlib.util.find_spec(needed):
        pytest.skip(f"needs {needed}")
    ranks = int(unit[0].options.get("ranks", 2))
    run = code_blocks.run_framework_blocks
    spawn(run, ranks, python_of(unit), str(tmp_path), timeout_s=FIRST_IMPORT_S)


def run_on_ranks(
    spawn: Spawn, spawn_errors: Spawn, unit: list[Block], folder: pathlib.Path, *, timeout_s: float
) -> None:
    blocks, ranks = python_of(unit), int(unit[0].options.get("ranks", 2))
    expected = blocks[-1].options.get("raises")
    messages = []
    if expected is None:
        spawn(run_blocks, ranks, blocks, str(folder), timeout_s=timeout_s)
    else:
        errors = spawn_errors(run_blocks, ranks, blocks, str(folder), timeout_s=timeout_s)
        assert [error and error.type_name for error in errors] == [expected] * ranks, errors
        messages = [error.message for error in errors]
    for block in unit:
        if "message" in block.options:
            shown = [code_blocks.is_in_message(block.source, message) for message in messages]
            assert any(shown), f"{block.where}: the error said {messages}"
        if block.language in SHELL:
            run_commands(block, folder)


def run_commands(block: Block, folder: pathlib.Path) -> None:
    """Carry out commands of ``python -m shardkit``, in this process."""
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        for words in shell_blocks.commands(block):
            assert words[:3] == ["python", "-m", "shardkit"]
            result = typer.testing.CliRunner().invoke(app, words[3:])
            assert result.exit_code == 0, f"{block.where}: {words}: {result.output}"
    finally:
        os.chdir(before)


def is_of_readme(unit: list[Block]) -> bool:
    return unit[0].page == "README.md"


@pytest.mark.parametrize("unit", [each for each in params("script") if is_of_readme(*each.values)])
def test_by_torchrun(unit: list[Block], tmp_path: pathlib.Path) -> None:
    script = tmp_path / unit[0].options["file"]
    script.write_text(unit[0].source)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0" in done.stdout


@pytest.mark.parametrize(
    "unit", [each for each in params("script") if not is_of_readme(*each.values)]
)
def test_as_ranks_of_a_launcher(
    unit: list[Block], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / unit[0].options["file"]
    script.write_text(unit[0].source)
    ranks = unit[0].options.get("ranks", "2")
    ended = start_ranks([str(script)], int(ranks), limit_s=120, LOCAL_WORLD_SIZE=ranks)
    assert [each.code for each in ended] == [0] * len(ended), ended[0].output[-4000:]
    assert "rank 0" in ended[0].output


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="needs torch_xla")
@pytest.mark.parametrize("unit", params("xla"))
def test_on_xla(unit: list[Block], tmp_path: pathlib.Path) -> None:
    options = unit[0].options
    script = tmp_path / "block.py"
    script.write_text("".join(block.source for block in python_of(unit)))
    environment = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": options.get("devices", "4"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **(REPLICAS if "replicas" in options else {}),
    }
    done = run_python([str(script)], environment)
    assert done.returncode == 0, f"{unit[0].where}: {done.stderr[-4000:]}"


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.where)
        for unit in UNITS
        for block in unit
        if block.language in SHELL and "reason" not in block.options
    ],
)
def test_commands_name_what_exists(block: Block) -> None:
    scripts = [
        other.options["file"]
        for other in code_blocks.blocks_of(ROOT / block.page)
        if "file" in other.options
    ]
    found = shell_blocks.commands(block)
    assert found, f"{block.where}: no command"
    for words in found:
        assert shell_blocks.problems(words, scripts) == [], f"{block.where}: {words}"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("nox -s nothing", "no session nothing"),
        ("nox -s demo -- --nothing", "unknown option --nothing"),
        ("python -m shardkit nothing", "no command nothing"),
        ("python -m shardkit inspect x --nothing", "unknown option --nothing"),
        ("torchrun --nothing examples/train_gpt.py", "unknown option --nothing"),
        ("torchrun nowhere.py", "no file nowhere.py"),
        ("python examples/resume.py --nothing", "unknown option --nothing"),
        ("python -m shardkit launch --nothing train.py", "unknown option --nothing"),
        ("srun --nodes 2 python -m shardkit launch --slurm nowhere.py", "no file nowhere.py"),
        ("srun --nothing python train.py", "unknown option --nothing"),
        ("pip install './shardkit[nothing]'", "extra nothing"),
        ("A=1 nothing --at all", "nothing is known of 'nothing'"),
    ],
)
def test_a_command_that_cannot_work_is_found(command: str, problem: str) -> None:
    block = Block("README.md", 1, "sh", f"{command}  # and a comment\n", {})
    [words] = shell_blocks.commands(block)
    assert problem in " ".join(shell_blocks.problems(words))


def test_names_that_lead_nowhere_are_found() -> None:
    source = "from shardkit import fully_shard, nothing\nfor x in range(2):\n    print(x, y)\n"
    block = Block("README.md", 1, "python", source, {})
    assert code_blocks.unknown_names([block]) == ["shardkit.nothing", "y"]


def test_blocks_are_read_with_their_options() -> None:
    page = ROOT / "docs" / "index.md"
    assert [block.language for block in code_blocks.blocks_of(page)] == ["sh"]
    assert code_blocks.parse_options('ranks=4 continues reason="as it is"', "here") == {
        "ranks": "4",
        "continues": "",
        "reason": "as it is",
    }
    with pytest.raises(ValueError, match="here: unknown option 'rank=4'"):
        code_blocks.parse_options("rank=4", "here")
    assert code_blocks.is_in_message("a b ... d", "x: a  b\n c d.")
    assert not code_blocks.is_in_message("a ... b", "b a")
