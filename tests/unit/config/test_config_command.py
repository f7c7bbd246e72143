"""``python -m shardkit config``: what it asks, and what it writes."""

from __future__ import annotations

import itertools
import typing

import pytest
import typer.testing
import yaml

from shardkit import from_config, strategy
from shardkit._cli import app
from shardkit.config._command import asked_fields, default_fields
from shardkit.config._schema import STRATEGIES

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from click.testing import Result


class Answers:
    """Answers each question by its first words; others by what is offered."""

    def __init__(self, **by_word: object) -> None:
        self._by_word = by_word

    def _find(self, text: str, default: object) -> typing.Any:
        for word, answer in self._by_word.items():
            if word in text or word.replace("_", " ") in text:
                return answer
        return default

    def choice(self, text: str, words: Sequence[str], default: str) -> str:
        answer = self._find(text, default)
        assert answer in words
        return typing.cast("str", answer)

    def number(self, text: str, default: int, least: int = 1) -> int:
        number = self._find(text, default)
        assert number >= least
        return typing.cast("int", number)

    def yes(self, text: str, *, default: bool) -> bool:
        return bool(self._find(text, default))

    def text(self, text: str) -> str:
        return typing.cast("str", self._find(text, "Block"))


def meaning(**answers: object) -> typing.Any:
    fields = asked_fields(Answers(**answers), num_processes=4, use_cpu=False)
    assert from_config(yaml.safe_load(yaml.safe_dump(fields))).to_dict() == fields
    return from_config(fields).settings


@pytest.mark.parametrize(
    ("sharded", "policy", "kind"),
    list(
        itertools.product(
            STRATEGIES,
            ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
            ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        )
    ),
)
def test_all_answers_of_version_1_make_a_config(
    sharded: typing.Any, policy: str, kind: str
) -> None:
    found = meaning(
        fsdp_version="1",
        What_is_sharded=sharded,
        Which_modules=policy,
        state_saved=kind,
        Are_activations=True,
    )
    assert found.strategy == strategy(sharded).name
    assert (found.wrap, found.state_dict_type) == (policy, kind)
    assert found.activation_checkpointing == (policy != "NO_WRAP")
    assert (found.forward_prefetch, found.backward_prefetch) == (True, "pre")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_sizes_of_axes_say_how_many_ranks_there_are(tp_size: int) -> None:
    found = meaning(Is_the_mesh=True, How_many_replicas=2, sharded=3, weights_split=tp_size)
    assert found.num_processes == 6 * tp_size
    assert found.strategy == "hybrid"
    assert found.sync_module_states == (tp_size == 1)


def test_several_machines_are_asked_for_their_address() -> None:
    found = meaning(many_machines=2, rank_of_this_machine=1, address_of="10.0.0.1")
    assert found.num_machines == 2
    assert found.launcher["main_process_ip"] == "10.0.0.1"
    assert (found.launcher["machine_rank"], found.launcher["main_process_port"]) == (1, 29500)


@pytest.mark.parametrize("layers", [None, "Block"])
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_what_is_written_without_questions_is_a_config(layers: str | None, precision: str) -> None:
    fields = default_fields(num_processes=2, use_cpu=True, mixed_precision=precision, layers=layers)
    found = from_config(fields).settings
    assert (found.strategy, found.precision, found.num_processes) == ("zero3", precision, 2)
    assert found.wrap == ("SIZE_BASED_WRAP" if layers is None else "TRANSFORMER_BASED_WRAP")


# --- at the terminal ------------------------------------------------------------------------------


def call(*args: object, typed: str = "") -> Result:
    return typer.testing.CliRunner().invoke(app, ["config", *map(str, args)], input=typed)


def test_it_says_why_it_asks_again(tmp_path: pathlib.Path) -> None:
    # CPU; machines; version; reshard; offload; TRANSFORMER_BASED_WRAP; no; then nothing, a name.
    typed = "\n".join(["y", "0", "1", "2", "y", "n", "", "n", "", "Block", *[""] * 8])
    found = call("--config_file", tmp_path / "x.yaml", typed=typed)
    assert "It is at least 1." in found.output
    assert "It is asked for, and there is no default" in found.output


def test_a_line_alone_takes_what_is_offered(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "fsdp.yaml"
    result = call("--config_file", file, typed="y\n\n\n\n\n\nn\nBlock,Head\n" + "\n" * 20)
    assert result.exit_code == 0, result.output
    found = from_config(file).settings
    assert found.transformer_layer_cls_to_wrap == ("Block", "Head")
    assert found.device_type == "cpu"
    assert "strategy: zero3" in result.output


def test_nothing_is_asked_with_default_and_nothing_overwritten(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "new" / "fsdp.yaml"
    options = ("--default", "--mixed_precision", "bf16", "--num_processes", 2)
    assert call("--config_file", file, *options).exit_code == 0
    assert from_config(file).settings.precision == "bf16"
    again = call("--config_file", file, "--default")
    assert again.exit_code == 1
    assert "Pass --overwrite" in again.output
    assert call("--config_file", file, "--default", "--overwrite").exit_code == 0
    assert from_config(file).settings.precision == "no"
    assert [path.name for path in file.parent.iterdir()] == ["fsdp.yaml"]
    folder = call("--config_file", file.parent, "--default", "--overwrite")
    assert "is a directory" in folder.output
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
