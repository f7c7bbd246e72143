"""Code blocks of the documentation: which there are, and what must be done with each.

A comment in front of a block says how it is run, where that is not the default::

    <!-- test: ranks=4 -->

| option | meaning |
| --- | --- |
| `ranks=4` | A Python block runs on so many gloo ranks; 2 if nothing is said. |
| `continues` | It goes on from the block before. The page must say so: `BUILD_ON_EACH_OTHER`. |
| `raises=StateError` | It ends with this error on all ranks. |
| `message` | The text is in the message of the error that the block before raised. |
| `needs=transformers` | It is run by `nox -s models`. |
| `needs=accelerate`, `needs=lightning` | It is run by `nox -s frameworks`, as by a launcher. |
| `needs=xla` | It is run by `nox -s xla`, in a process of its own with `devices=` devices (4). |
| `replicas` | The same, as replicas of `torch_xla.launch`. |
| `file=script.py` | It is a script, started as a launcher starts it, on two ranks or `ranks=1`. |
| `cuda` | It is compiled and its names are resolved, no more: no card is there. |
| `run` | The commands are carried out, after the block before, in the same folder. |
| `reason="..."` | It is neither run nor checked, and this is why. |
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import re
import shlex
import textwrap
import typing
import warnings

ROOT = pathlib.Path(__file__).parents[2]
BUILD_ON_EACH_OTHER = "The blocks on this page build on each other."

_OTHERS = ("torch_xla", "transformers", "peft", "accelerate", "lightning", "bitsandbytes")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^`]*$")
_COMMENT = re.compile(r"^ *<!-- test: (?P<options>.*) -->$")
_FLAGS = {"continues", "message", "replicas", "cuda", "run"}
_VALUES = {"ranks", "raises", "needs", "file", "reason", "devices"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str  # From the root of the repository.
    line: int  # Of the fence that opens it, from 1.
    language: str  # What the fence says.
    source: str  # What is in it.
    options: dict[str, str]  # See above.

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def follows(self) -> bool:
        """Whether it belongs to the block before."""
        return bool({"continues", "message"} & self.options.keys()) or (
            self.language in ("sh", "console") and "run" in self.options
        )


def pages() -> list[pathlib.Path]:
    single = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
    return [*(ROOT / name for name in single), *sorted((ROOT / "docs").rglob("*.md"))]


def parse_options(text: str, where: str) -> dict[str, str]:
    options = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if name not in (_VALUES if equals else _FLAGS):
            msg = f"{where}: unknown option {word!r}"
            raise ValueError(msg)
        options[name] = value
    return options


def blocks_of(page: pathlib.Path) -> list[Block]:
    """Return all blocks of a page in order."""
    name = str(page.relative_to(ROOT))
    found, lines, options = [], page.read_text().splitlines(), {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if comment := _COMMENT.match(line):
            options = parse_options(comment["options"], f"{name}:{number}")
        elif fence := _FENCE.match(line):
            opened = number
            while lines[number].strip() != "```":
                number += 1
            source = textwrap.dedent("\n".join(lines[opened:number])) + "\n"
            found.append(Block(name, opened, fence["language"], source, options))
            number += 1
            options = {}
        elif line.strip():
            assert not options, f"{name}:{number}: options without a block"
    return found


def units() -> list[list[Block]]:
    """Return blocks that are run together: each with those that go on from it."""
    found: list[list[Block]] = []
    for page in pages():
        of_page: list[list[Block]] = []
        for block in blocks_of(page):
            if block.follows and of_page:
                of_page[-1].append(block)
            else:
                of_page.append([block])
        found += of_page
    return found


# --- Python ---------------------------------------------------------------------------------------


def run_blocks(blocks: typing.Sequence[Block], folder: str) -> None:
    """Run Python blocks in one namespace; a warning is an error."""
    before = pathlib.Path.cwd()
    os.chdir(folder)
    namespace: dict[str, typing.Any] = {"__name__": "__main__"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.9's own
            _forget_seed()
            for block in blocks:
                exec(compiled(block), namespace)
    finally:
        os.chdir(before)


def run_framework_blocks(blocks: typing.Sequence[Block], folder: str) -> None:
    """Run Python blocks as a launcher's rank does; the packages that they need warn of much."""
    from launched import forget_accelerate, set_launchers_variables

    before = pathlib.Path.cwd()
    os.chdir(folder)
    set_launchers_variables()
    forget_accelerate()
    try:
        names: dict[str, typing.Any] = {"__name__": "__main__"}
        _forget_seed()
        for block in blocks:
            exec(compiled(block), names)
    finally:
        os.chdir(before)
        forget_accelerate()


def _forget_seed() -> None:
    """Give each rank other random numbers, as the processes of a launcher have at their start."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    torch.manual_seed(1000 + rank)


def compiled(block: Block) -> typing.Any:
    """Compile a block so that tracebacks show the page's lines."""
    return compile("\n" * block.line + block.source, str(ROOT / block.page), "exec")


def unknown_names(blocks: typing.Sequence[Block]) -> list[str]:
    """Return names that the blocks use and never bind, and imports that lead nowhere."""
    bound, used, problems = set(dir(builtins)) | {"__name__"}, [], []
    for block in blocks:
        for node in ast.walk(ast.parse(block.source)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.append(name)
                case ast.Name(id=name):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.arg(arg=name):
                    bound.add(name)
                case ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.Import(names=names):
                    bound |= {(each.asname or each.name).split(".")[0] for each in names}
                    problems += [p for each in names for p in _missing(each.name, ())]
                case ast.ImportFrom(module=str(module), names=names):
                    bound |= {each.asname or each.name for each in names}
                    problems += _missing(module, [each.name for each in names])
    return [*problems, *sorted({name for name in used if name not in bound})]


def _missing(module: str, names: typing.Sequence[str]) -> list[str]:
    package = module.split(".", maxsplit=1)[0]
    if module.startswith("shardkit.integrations."):
        package = module.split(".")[2]
    if package in _OTHERS and not importlib.util.find_spec(package):
        return []  # Where the package is, the block is run.
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        return [f"import {module}: {error}"]
    submodule = f"{module}." + "{}"
    return [
        f"{module}.{name}"
        for name in names
        if not hasattr(loaded, name) and not importlib.util.find_spec(submodule.format(name))
    ]


def without_space(text: str) -> str:
    return " ".join(text.split())


def is_in_message(text: str, message: str) -> bool:
    """Whether a message has the parts of a text, between which "..." stands, in this order."""
    parts = map(re.escape, map(str.strip, without_space(text).split("...")))
    return re.search(".*".join(parts), without_space(message)) is not None
