"""Config documents, command lines, the environment and arguments: accepted, or refused by name."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import tempfile
import typing
from unittest import mock

import pytest
import torch
from fuzzing import EXAMPLES, REFUSED, changes, fuzzed, junk, numbers, texts, tried
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, checkpoint, from_config, fully_shard
from shardkit._cli import app
from shardkit.backends.groups import world_size_or_raise
from shardkit.checkpoint._files.formats import FullWriter
from shardkit.config._schema import SECTIONS
from shardkit.launch import parse

pytestmark = pytest.mark.helpers

CHEAP = settings(max_examples=10 * EXAMPLES)
GOOD = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
FIELDS = sorted({name for section in SECTIONS.values() for name in section})


@CHEAP
@given(several=st.lists(changes(), max_size=4))
def test_bytes_of_config_files(several: list[typing.Callable[[bytes], bytes]]) -> None:
    content = GOOD.encode()
    for change in several:
        content = change(content)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "fsdp.yaml")
        file.write_bytes(content)
        tried(lambda: from_config(file))


@CHEAP
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), junk, max_size=4),
    inner=st.dictionaries(st.sampled_from(FIELDS), junk, max_size=4),
)
@example(fields={"num_processes": 10**400}, inner={})
def test_fields_of_configs(fields: dict[str, typing.Any], inner: dict[str, typing.Any]) -> None:
    tried(lambda: from_config({"fsdp_config": inner, "distributed_type": "FSDP", **fields}))


OPTIONS = (
    "--num_processes",
    "--num_machines",
    "--machine_rank",
    "--main_process_port",
    "--main_process_ip",
    "--nnodes",
    "--nproc-per-node",
    "--node-rank",
    "--master-port",
    "--max-restarts",
)


@fuzzed
@given(words=st.lists(st.tuples(st.sampled_from(OPTIONS), st.one_of(numbers, texts)), max_size=3))
@example(words=[("--num_processes", 99999999999999)])
def test_command_lines_of_launch(words: list[tuple[str, typing.Any]]) -> None:
    line = [str(word) for pair in words for word in pair]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            tried(lambda: parse([*line, "script.py"], lambda _: {}))
        except SystemExit:  # What argparse says of words that are no numbers.
            assert said.getvalue()


@fuzzed
@given(
    command=st.sampled_from(["inspect", "verify", "consolidate", "nothing"]),
    words=st.lists(st.one_of(texts, st.sampled_from(["--dtype", "--json", "out.pt"])), max_size=3),
)
@example(command="verify", words=["\0"])
@example(command="verify", words=["\ud800"])
def test_command_lines(command: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        result = CliRunner().invoke(app, [command, *words])
    assert isinstance(result.exception, (SystemExit, type(None))), result.exception


@CHEAP
@given(value=texts.filter(lambda text: "\0" not in text and "\ud800" not in text))
@example(value="two")
def test_the_number_of_ranks_in_the_environment(value: str) -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": value, "RANK": "0"}):
        tried(world_size_or_raise)


# --- arguments ------------------------------------------------------------------------------------


def sharded() -> typing.Any:
    mesh, _ = recording_mesh((4,))
    return fully_shard(nn.Linear(4, 4), mesh)


CALLS: dict[str, typing.Callable[[typing.Any], object]] = {
    "divide": lambda value: sharded().set_gradient_divide_factor(value),
    "predivide": lambda value: sharded().set_gradient_predivide_factor(value),
    "clip": lambda value: sharded().clip_grad_norm_(value),
    "clip by": lambda value: sharded().clip_grad_norm_(1.0, value),
    "prefetch": lambda value: sharded().set_prefetch_policy(backward=value),
    "size": lambda value: FullWriter("x", {}, format="torch", max_shard_size=value),
    "param_dtype": lambda value: MixedPrecisionPolicy(param_dtype=value),
    "reduce_dtype": lambda value: MixedPrecisionPolicy(reduce_dtype=value),
}
DTYPES = st.sampled_from(
    [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
)


@pytest.mark.parametrize("name", CALLS)
@fuzzed
@given(value=st.one_of(junk, DTYPES))
def test_arguments(name: str, value: typing.Any) -> None:
    tried(lambda: CALLS[name](value))


@fuzzed
@given(
    value=junk,
    name=st.sampled_from(["mesh", "mp_policy", "reshard_after_forward", "offload_policy"]),
)
def test_what_fully_shard_refuses_has_changed_nothing(value: typing.Any, name: str) -> None:
    mesh, _ = recording_mesh((4,))
    module = nn.Linear(4, 4)
    before = [*module.parameters()], type(module)
    if tried(lambda: fully_shard(module, **{"mesh": mesh, name: value})) is REFUSED:
        assert type(module) is before[1]
        assert all(map(lambda a, b: a is b, module.parameters(), before[0]))
        fully_shard(module, mesh)


@fuzzed
@given(value=junk, name=st.sampled_from(["keep_last", "path", "model", "optimizer"]))
def test_what_save_refuses_has_written_nothing(value: typing.Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        arguments = {"path": "x", "model": nn.Linear(2, 2), name: value}
        if tried(lambda: checkpoint.save(**arguments)) is REFUSED:
            assert list(pathlib.Path(folder).iterdir()) == []
