"""Commands of the documentation: does what they name exist?"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
import tomllib
import typing

import typer
from code_blocks import ROOT, Block

from shardkit._cli import app
from shardkit.launch import parser

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

READERS_OWN = "train.py"
SESSION_SCRIPTS = {
    "demo": "examples/train_gpt.py",
    "resume": "examples/resume.py",
    "bench": "benchmarks/run.py",
}


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a block, as words."""
    source = block.source.replace("\\\n", " ")
    if block.language == "console":  # What is not behind a prompt is output.
        source = "\n".join(li[2:] for li in source.splitlines() if li.startswith("$ "))
    found = []
    for line in source.splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        for word in [*words, "&&"]:
            if word not in ("&&", ";", "|"):
                command.append(word)
                continue
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command = command[1:]
            found += [command] if command else []
            command = []
    return found


def problems(words: Sequence[str], scripts: Sequence[str] = ()) -> list[str]:
    """Return what is wrong with a command.

    Args:
        words: The command.
        scripts: Names of scripts that the page itself shows.
    """
    program, rest = words[0].removeprefix(".venv/bin/"), list(words[1:])
    checks: dict[str, typing.Callable[[], list[str]]] = {
        "python": lambda: _problems_of_python(rest, scripts),
        "python3": lambda: _problems_of_python(rest, scripts),
        "pip": lambda: _problems_of_pip(rest[1:]),
        "nox": lambda: _problems_of_nox(rest),
        "torchrun": lambda: _problems_of_torchrun(rest, scripts),
        "pytest": lambda: _unknown(rest, _help_of("pytest")),
        "py-spy": list,
        "srun": lambda: _problems_of_srun(rest, scripts),
        "cd": list,
    }
    return checks.get(program, lambda: [f"nothing is known of {program!r}"])()


def _problems_of_srun(rest: list[str], scripts: Sequence[str]) -> list[str]:
    """Check what is behind srun's own options."""
    at = next(i for i, word in enumerate(rest) if word == "python")
    known = {"--nodes", "--ntasks-per-node", "--label"}
    return _unknown(rest[:at], known) + _problems_of_python(rest[at + 1 :], scripts)


def _problems_of_python(rest: list[str], scripts: Sequence[str]) -> list[str]:
    if rest[:2] == ["-m", "shardkit"]:
        if rest[2:3] == ["launch"]:
            return _problems_of_launch(rest[3:], scripts)
        return _problems_of_shardkit(rest[2:])
    if rest[:2] == ["-m", "pip"]:
        return _problems_of_pip(rest[3:])
    if rest[:1] == ["-m"]:
        return [] if rest[1] in ("venv", "virtualenv") else [f"module {rest[1]}"]
    return _problems_of_script(rest, scripts)


def _problems_of_script(rest: list[str], scripts: Sequence[str]) -> list[str]:
    script, *arguments = rest
    if script in scripts or script == READERS_OWN:
        return []
    if not (ROOT / script).is_file():
        return [f"no file {script}"]
    return _unknown(arguments, _options_of(script))


def _problems_of_shardkit(rest: list[str]) -> list[str]:
    known: typing.Any = typer.main.get_command(app)
    if not rest or rest[0] == "--help":
        return []
    command = known.commands.get(rest[0])
    if command is None:
        return [f"python -m shardkit has no command {rest[0]}"]
    options = {option for each in command.params for option in each.opts} | {"--help"}
    return _unknown(rest[1:], options)


def _problems_of_pip(rest: list[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = extras["optional-dependencies"]
    found = []
    for word in rest:
        named = re.fullmatch(r"(?:shardkit|\.|\S*/shardkit)\[(.+)\]", word)
        found += (
            [f"extra {each}" for each in named[1].split(",") if each not in known] if named else []
        )
    return found + _unknown(rest, {"-q", "-e", "--target", "--index-url"})


def _problems_of_nox(rest: list[str]) -> list[str]:
    own, passed = (rest, [])
    if "--" in rest:
        at = rest.index("--")
        own, passed = rest[:at], rest[at + 1 :]
    sessions = [word for word in own if not word.startswith("-")]
    found = [f"no session {each}" for each in sessions if each not in _sessions()]
    found += _unknown(own, {"-s", "--no-venv", "-l"})
    for session in sessions:
        if session in SESSION_SCRIPTS:
            found += _unknown(passed, _options_of(SESSION_SCRIPTS[session]))
        elif session not in ("lint", "types"):
            found += _unknown(passed, _help_of("pytest"))
    return found


def _problems_of_torchrun(rest: list[str], scripts: Sequence[str]) -> list[str]:
    if "-m" in rest:
        at = rest.index("-m")
        own = [word.replace("_", "-") for word in rest[:at]]
        return _unknown(own, _help_of("torchrun")) + _problems_of_python(rest[at:], scripts)
    at = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
    if at is None:
        return ["torchrun without a script"]
    own = [word.replace("_", "-") for word in rest[:at]]
    return _unknown(own, _help_of("torchrun")) + _problems_of_script(rest[at:], scripts)


def _problems_of_launch(rest: list[str], scripts: Sequence[str]) -> list[str]:
    known = {option for each in parser()._actions for option in each.option_strings}  # noqa: SLF001 - argparse has no other way
    at = next((i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m"), None)
    found = _unknown(rest[:at], known)
    return (
        found if at is None or rest[at] == "-m" else found + _problems_of_script(rest[at:], scripts)
    )


def _unknown(words: Sequence[str], known: typing.Collection[str]) -> list[str]:
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    return [f"unknown option {each}" for each in options if each not in known]


@functools.cache
def _sessions() -> frozenset[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.dump(each) for each in node.decorator_list)
    )


@functools.cache
def _options_of(script: str) -> frozenset[str]:
    """Return what a script's argparse knows, without running it."""
    source = (ROOT / script).read_text()
    return frozenset(re.findall(r"""["'](--?[a-z][a-z0-9-]*)["']""", source)) | {"--help"}


@functools.cache
def _help_of(program: str) -> frozenset[str]:
    modules = {"torchrun": "torch.distributed.run", "pytest": "pytest"}
    shown = subprocess.run(
        [sys.executable, "-m", modules[program], "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    found = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", shown)
    return frozenset(word.replace("_", "-") for word in found)
