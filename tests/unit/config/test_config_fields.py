"""Every field of a config: what it means, what it may hold, what is said where it is wrong."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
import typing

import pytest
import torch
from torch import nn

from shardkit import (
    Config,
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    WrapError,
    from_config,
)
from shardkit.config._schema import FSDP, PARALLELISM, SECTIONS, TOP

Fields = dict[str, typing.Any]


def fields_of(*, fsdp: Fields | None = None, sizes: Fields | None = None, **top: object) -> Fields:
    result: Fields = {"distributed_type": "FSDP", "fsdp_config": fsdp or {}, **top}
    return result if sizes is None else {**result, "parallelism_config": sizes}


def meaning(*, version: int = 2, **fsdp: object) -> typing.Any:
    named = {f"fsdp_{name}": value for name, value in fsdp.items()}
    return from_config(fields_of(fsdp={"fsdp_version": version, **named})).settings


def complaint(fields: Fields) -> str:
    with pytest.raises(ConfigError) as caught:
        from_config(fields)
    return str(caught.value)


# --- defaults: those of accelerate launch ---------------------------------------------------------


def test_a_file_that_says_nothing_means_what_accelerate_takes_it_for() -> None:
    found = from_config(fields_of()).settings
    assert (found.fsdp_version, found.strategy, found.wrap) == (1, "zero3", "NO_WRAP")
    assert (found.precision, found.num_processes, found.num_machines) == ("no", None, 1)
    assert (found.offload_params, found.activation_checkpointing) == (False, False)
    assert (found.forward_prefetch, found.backward_prefetch) == (False, "none")
    assert found.state_dict_type == "FULL_STATE_DICT"
    assert found.min_num_params == 100_000_000
    assert found.sync_module_states


def test_version_2_has_defaults_of_its_own() -> None:
    found = meaning()
    assert (found.strategy, found.state_dict_type) == ("zero3", "SHARDED_STATE_DICT")
    assert (found.forward_prefetch, found.backward_prefetch) == (None, None)


# --- each field of fsdp_config --------------------------------------------------------------------

STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "replicate",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid_zero2",
}


@pytest.mark.parametrize("field", ["sharding_strategy", "reshard_after_forward"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_named_in_either_field_or_numbered(field: str, name: str) -> None:
    number = list(STRATEGIES).index(name) + 1
    for written in (name, name.lower(), number, str(number)):
        assert meaning(version=1, **{field: written}).strategy == STRATEGIES[name]


VALUES: dict[str, tuple[object, str, object]] = {
    "reshard_after_forward": ("false", "strategy", "zero2"),
    "offload_params": (True, "offload_params", True),
    "auto_wrap_policy": ("size_based_wrap", "wrap", "SIZE_BASED_WRAP"),
    "state_dict_type": ("FULL_STATE_DICT", "state_dict_type", "FULL_STATE_DICT"),
    "backward_prefetch": ("BACKWARD_POST", "backward_prefetch", "post"),
    "forward_prefetch": ("yes", "forward_prefetch", True),
    "cpu_ram_efficient_loading": (False, "sync_module_states", True),
    "sync_module_states": ("false", "sync_module_states", False),
    "ignored_modules": ("head.*", "ignored_modules", "head.*"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_says_what_it_means(name: str) -> None:
    written, attribute, expected = VALUES[name]
    assert getattr(meaning(**{name: written}), attribute) == expected


@pytest.mark.parametrize(
    "written", ["Block, Head", ["Block", "Head"], "Block,Head,"], ids=["words", "list", "comma"]
)
def test_classes_are_names_with_commas_or_a_list(written: object) -> None:
    chosen = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    found = meaning(**chosen, transformer_layer_cls_to_wrap=written)
    assert found.transformer_layer_cls_to_wrap == ("Block", "Head")


@pytest.mark.parametrize("written", [1000, "1000", "1e3", 1000.0])
def test_numbers_may_be_written_as_yaml_makes_words_of_them(written: object) -> None:
    found = meaning(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=written)
    assert found.min_num_params == 1000


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("enable_cpu_affinity", True),
        ("mpirun_config", {"mpirun_ccl": "1"}),
        ("same_network", True),
        ("main_training_function", "train"),
        ("tpu_name", "mine"),
        ("tpu_zone", "here"),
        ("tpu_use_cluster", True),
        ("tpu_use_sudo", True),
        ("tpu_vm", ["a"]),
        ("tpu_env", ["A=1"]),
    ],
)
def test_what_no_launcher_of_ours_does_is_noted(name: str, written: object) -> None:
    config = from_config(fields_of(**{name: written}))
    assert any(f"{name} changes nothing" in note for note in config.notes)
    assert config.settings.launcher[name] == written
    idle: object = [] if isinstance(written, list) else {} if isinstance(written, dict) else False
    if not isinstance(written, str):
        assert from_config(fields_of(**{name: idle})).notes == ()


def test_activation_checkpointing_is_of_the_modules_that_are_wrapped() -> None:
    chosen = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    assert meaning(**chosen, activation_checkpointing=True).activation_checkpointing


def test_names_may_stand_without_what_they_begin_with() -> None:
    short = from_config(fields_of(fsdp={"version": 2, "offload_params": True}))
    assert short.offload_policy() == CPUOffloadPolicy()


@pytest.mark.parametrize("prefix", ["", "parallelism_config_"])
def test_sizes_of_axes_make_a_strategy(prefix: str) -> None:
    def strategy(replicate: int, shard: int, tp: int = 1, *, reshard: bool = True) -> str:
        sizes = {"dp_replicate_size": replicate, "dp_shard_size": shard, "tp_size": tp}
        fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
        fsdp["fsdp_cpu_ram_efficient_loading"] = False
        named = {f"{prefix}{name}": size for name, size in sizes.items()}
        found = from_config(fields_of(fsdp=fsdp, sizes=named)).settings
        assert found.parallelism is not None
        assert found.parallelism.total_size == replicate * shard * tp
        return found.strategy

    assert strategy(1, 4) == strategy(1, 2, 2) == "zero3"
    assert strategy(1, 4, reshard=False) == "zero2"
    assert strategy(2, 2) == strategy(2, 2, 2) == "hybrid"
    assert strategy(2, 2, reshard=False) == "hybrid_zero2"
    assert strategy(4, 1) == "replicate"


# --- outermost fields -----------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_is_the_policy_that_accelerate_makes(word: str, dtype: torch.dtype) -> None:
    def policy(**fields: object) -> MixedPrecisionPolicy:
        return from_config({**fields_of(), "mixed_precision": word, **fields}).policy()

    assert policy(fsdp_config={"fsdp_version": 2}) == MixedPrecisionPolicy(dtype, dtype)
    assert policy() == MixedPrecisionPolicy(dtype, dtype, buffer_dtype=dtype)
    replicated = policy(distributed_type="MULTI_CPU", fsdp_config={})
    assert replicated == MixedPrecisionPolicy(dtype, torch.float32)


@pytest.mark.parametrize("word", ["no", "NO", False])
def test_yaml_takes_a_bare_no_for_false(word: object) -> None:
    assert from_config(fields_of(mixed_precision=word)).policy() == MixedPrecisionPolicy()
    assert from_config({"distributed_type": word}).settings.distributed_type == "NO"


@pytest.mark.parametrize(
    ("top", "device"),
    [
        ({"distributed_type": "MULTI_GPU"}, "cuda"),
        ({"distributed_type": "MULTI_CPU"}, "cpu"),
        ({"distributed_type": "MULTI_XPU"}, "xpu"),
        ({"distributed_type": "XLA"}, "xla"),
        ({"distributed_type": "FSDP", "use_cpu": True}, "cpu"),
        ({"distributed_type": "FSDP"}, None),
    ],
)
def test_the_device_is_what_the_type_names(top: Fields, device: str | None) -> None:
    found = from_config(top).settings
    assert found.device_type == device
    assert found.is_fsdp == (top["distributed_type"] == "FSDP")
    if not found.is_fsdp:
        assert found.strategy == "replicate"


def test_launchers_fields_are_kept_for_launchers() -> None:
    fields = {"machine_rank": 1, "num_machines": 2, "main_process_ip": "a", "gpu_ids": "0,1"}
    assert from_config(fields_of(**fields)).settings.launcher == {
        name: value for name, value in fields.items() if name != "num_machines"
    }


def test_what_changes_nothing_is_noted_with_the_reason() -> None:
    config = from_config(fields_of(fsdp={"fsdp_use_orig_params": True}, debug=True))
    [debug, params] = config.notes
    assert "debug changes nothing. It checks collectives of Accelerate" in debug
    assert "fsdp_use_orig_params changes nothing. Parameters are always the model's own" in params
    assert config.describe().endswith(params)


KINDS = ("applied", "launcher", "noted")


@pytest.mark.parametrize("section", SECTIONS)
def test_each_field_has_one_use_and_notes_have_reasons(section: str) -> None:
    for name, field in SECTIONS[section].items():
        assert field.use in KINDS
        assert field.note or field.use != "noted", name
        assert not (field.note and field.use == "applied"), name


def test_the_guide_names_every_field() -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs/howto/config.md").read_text()
    prefix = "parallelism_config_"
    for name in (*TOP, *FSDP, *(name.removeprefix(prefix) for name in PARALLELISM)):
        assert f"`{name}`" in page, name


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"distributed_type": "FSPD"}, "got 'FSPD'. The nearest ones are 'FSDP'"),
        ({"distributed_type": "DEEPSPEED"}, "Write FSDP with an fsdp_config"),
        ({"distributed_type": "MEGATRON_LM"}, "Write FSDP with an fsdp_config"),
        (fields_of(mixed_precision="fp8"), "Write bf16"),
        (fields_of(compute_environment="AMAZON_SAGEMAKER"), "Start the ranks by torchrun"),
        (
            fields_of(use_cpu="maybe"),
            "use_cpu must be true or false (or yes, on, 1; no, off,",
        ),
        (fields_of(num_processes=0), "must be an integer from 1 to 16777216, or -1, got 0."),
        (fields_of(num_processes=True), "num_processes must be an integer"),
        (fields_of(num_processes=1.5), "num_processes must be an integer"),
        (fields_of(gpu_ids=[1]), "gpu_ids must be one value"),
        (fields_of(fsdp={"fsdp_version": 3}), "fsdp_version must be one of 1, 2, got 3"),
        (fields_of(fsdp={"fsdp_sharding_strategy": 6}), "must be one of FULL_SHARD"),
        (
            fields_of(fsdp={"fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}),
            "'TRANSFORMER_BASED_WRAP'",
        ),
        (fields_of(dynamo_config={"dynamo_backend": "INDUCTOR"}), "layer.compile()"),
        (fields_of(fp8_config={"backend": "AO"}), "must be left out, got {'backend': 'AO'}."),
        (fields_of(fsdp={"fsdp_ignored_modules": "("}), "must be a regular expression, got '('."),
        (fields_of(deepspeed_config={"zero_stage": 3}), "distributed_type: FSDP"),
        (fields_of(megatron_lm_config={"a": 1}), "Write a parallelism_config"),
        (fields_of(downcast_bf16="yes"), "Write mixed_precision: bf16"),
        (fields_of(fp16=True), "Write mixed_precision: fp16"),
        (
            fields_of(fsdp={"fsdp_activation_checkpointing_offload": True}),
            "save_on_cpu(pin_memory=True)",
        ),
        (fields_of(fsdp={"fsdp_version": 2}, sizes={"cp_size": 2}), "split sequences"),
        (fields_of(fsdp={"fsdp_version": 2}, sizes={"sp_size": 2}), "split sequences"),
        ({"distributed_type": "FSDP", "fsdp_config": "x"}, "fsdp_config must hold fields"),
        (
            fields_of(mixed_precison="no"),
            "no field 'mixed_precison'. The nearest ones are 'mixed_p",
        ),
        (
            fields_of(fsdp={"fsdp_ofload_params": 1}),
            "of fsdp_config. The nearest ones are 'fsdp_of",
        ),
        (fields_of(fsdp_offload_params=1), "It belongs in fsdp_config."),
        (fields_of(fsdp={"use_cpu": True}), "It stands at the outermost level."),
        (
            fields_of(fsdp={"fsdp_version": 2, "version": 1}),
            "version is fsdp_version, which stands at config. Keep one of them.",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_to_write(fields: Fields, text: str) -> None:
    assert text in complaint(fields)


@pytest.mark.parametrize("value", [{}, None, "no", False])
def test_what_is_not_carried_out_may_stand_there_empty(value: object) -> None:
    empty = {} if value == "no" else value
    fields = {"deepspeed_config": empty, "dynamo_config": empty, "downcast_bf16": value or "no"}
    from_config(fields_of(**fields))


CONTRADICTIONS: dict[str, tuple[Fields, str]] = {
    "fsdp_config of another type": (
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}},
        "distributed_type is MULTI_GPU, which uses none of it",
    ),
    "sizes of another type": (
        {"distributed_type": "MULTI_GPU", "parallelism_config": {"tp_size": 2}},
        "parallelism_config is there, but distributed_type is MULTI_GPU",
    ),
    "no type": ({"mixed_precision": "no"}, "distributed_type is missing"),
    "cards and the CPU": (
        {"distributed_type": "MULTI_GPU", "use_cpu": True},
        "use_cpu is true, but distributed_type is MULTI_GPU",
    ),
    "the CPU and not the CPU": (
        {"distributed_type": "MULTI_CPU", "use_cpu": False},
        "use_cpu is false, but distributed_type is MULTI_CPU",
    ),
    "one of several": (
        {"distributed_type": "NO", "num_processes": 2},
        "num_processes is 2, but distributed_type is NO",
    ),
    "unequal machines": (
        fields_of(num_processes=3, num_machines=2),
        "num_processes is 3, which 2 machines cannot have equal parts of",
    ),
    "a machine too many": (fields_of(machine_rank=1), "machine_rank is 1, but num_machines is 1"),
    "two strategies": (
        fields_of(
            fsdp={
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
            }
        ),
        "fsdp_sharding_strategy is FULL_SHARD, but fsdp_reshard_after_forward is SHARD_GRAD_OP",
    ),
    "a flag in version 1": (
        fields_of(fsdp={"fsdp_reshard_after_forward": True}),
        "got True. That is a value of fsdp_version 2. In version 1 it names a strategy",
    ),
    "a strategy in version 2": (
        fields_of(fsdp={"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}),
        "got 'FULL_SHARD'. That is a value of fsdp_version 1. In version 2 it is true",
    ),
    "a strategy beside version 2": (
        fields_of(fsdp={"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        "write fsdp_reshard_after_forward: false.",
    ),
    "hybrid in version 2": (
        fields_of(fsdp={"fsdp_version": 2, "fsdp_sharding_strategy": "HYBRID_SHARD"}),
        "fsdp_reshard_after_forward: true, and a parallelism_config with dp_replicate_size and",
    ),
    "replicas in version 2": (
        fields_of(fsdp={"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}),
        "dp_replicate_size: (ranks), dp_shard_size: 1",
    ),
    "local files in version 2": (
        fields_of(fsdp={"fsdp_version": 2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}),
        "Write SHARDED_STATE_DICT",
    ),
    "sizes in version 1": (
        fields_of(sizes={"dp_shard_size": 2}),
        "parallelism_config_dp_shard_size needs fsdp_version: 2",
    ),
    "classes without their policy": (
        fields_of(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Block"}),
        "belongs to TRANSFORMER_BASED_WRAP, but fsdp_auto_wrap_policy is NO_WRAP",
    ),
    "a size without its policy": (
        fields_of(fsdp={"fsdp_min_num_params": 5}),
        "belongs to SIZE_BASED_WRAP",
    ),
    "nothing to checkpoint": (
        fields_of(fsdp={"fsdp_activation_checkpointing": True}),
        "shardkit.checkpoint_activations(model)",
    ),
    "empty and not filled": (
        fields_of(fsdp={"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": False}),
        "fsdp_sync_module_states is false, but fsdp_cpu_ram_efficient_loading is true",
    ),
    "another number of ranks": (
        fields_of(fsdp={"fsdp_version": 2}, sizes={"dp_shard_size": 2}, num_processes=8),
        "= 2 ranks, but num_processes is 8",
    ),
    "tensor parallelism of replicas": (
        fields_of(fsdp={"fsdp_version": 2}, sizes={"dp_replicate_size": 2, "tp_size": 2}),
        "tensor parallelism beside replicas needs dp_shard_size above 1",
    ),
    "rank 0's parts for all": (
        fields_of(
            fsdp={"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True},
            sizes={"dp_shard_size": 2, "tp_size": 2},
        ),
        "fsdp_cpu_ram_efficient_loading is true, and tp_size is above 1",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_cannot_be_meant_together_is_refused(name: str) -> None:
    fields, text = CONTRADICTIONS[name]
    assert text in complaint(fields)


# --- files ----------------------------------------------------------------------------------------

FILE = """\
# written by hand
distributed_type: FSDP
mixed_precison: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WARP
  fsdp_state_dict_type: LOCAL_STATE_DICT
  fsdp_min_num_params: 1000
machine_rank: 1
num_machines: two
"""


def aliases(depth: int, width: int) -> str:
    lines = ["a0: &a0 [1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (aliases(9, 10), ":5: with its aliases a4 has more values than the 10000"),
        ("a: &a [*a]", "with its aliases a has more values|not YAML"),
        ("b: 1\na: " + "[" * 20_000, ":2: a is nested too deep: no field has more than 20 lev"),
        ('{"b": "c", "a": ' + "[" * 20_000, ":1: a is nested too deep"),
        ("a: " + "x" * 300_000, "has more than 262144 bytes"),
        ("num_machines: " + "9" * 400, "num_machines must be an integer"),
    ],
)
def test_files_that_would_take_all_memory(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        from_config(file)
    assert len(str(caught.value)) < 1000


def test_a_fifo_is_no_config_file(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fsdp.yaml")
    with pytest.raises(ConfigError, match=r"fsdp\.yaml cannot be read: it is no regular file"):
        from_config(tmp_path / "fsdp.yaml")


@pytest.mark.parametrize("source", [5, [], b"fsdp.yaml"])
def test_what_is_no_file_and_no_dict_is_refused(source: typing.Any) -> None:
    with pytest.raises(ConfigError, match="must be the path of a file, or a dict of its fields"):
        from_config(source)


@pytest.mark.parametrize("model", [3, None, {"weight": 1}])
def test_a_config_shards_modules(model: typing.Any) -> None:
    """It says so before it makes a mesh."""
    with pytest.raises(WrapError, match="model: expected a module, not "):
        from_config({"distributed_type": "FSDP"}).apply(model)
    wrong: typing.Any = "normal"
    with pytest.raises(WrapError, match="param_init_fn must be a function or None, got 'normal'"):
        from_config({"distributed_type": "FSDP"}).apply(nn.Linear(2, 2), param_init_fn=wrong)


def test_a_dict_that_holds_itself() -> None:
    fields: Fields = {}
    fields["fsdp_config"] = fields
    with pytest.raises(ConfigError, match="fsdp_config is nested too deep"):
        from_config(fields)


BAD: list[typing.Any] = [
    *(True, False, 0, -1, 3, 3.5, 1e300, float("nan"), float("inf"), 10**400, 10**5000, 2**63),
    *("", "banana", "nan", "-1", "(", "[", "\0", "a,b", ",", "\ud800", "1e400", "x" * 2000, b"x"),
    *([], ["a"], [None], {}, {"a": 1}, {1: {"b": 2}}, (1,), {1}, object, Ellipsis),
    functools.reduce(lambda inner, _: [inner], range(100_000), []),
]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_refusal_names_the_field_the_value_and_what_is_allowed(section: str) -> None:
    names = "|".join(name for fields in SECTIONS.values() for name in fields)
    remedy = "Write|write|leave|It counts|the ranks of machines are|belongs|sizes of a"
    count = 0
    for name in SECTIONS[section]:
        for value in BAD:
            fields = fields_of(**({section: {name: value}} if section else {name: value}))
            try:
                from_config(fields)
            except ConfigError as error:
                found = str(error)
            else:
                continue
            count += 1
            assert len(found) < 2000
            for line in found.splitlines():
                assert re.match(
                    rf"config: ({names}) (must .*, got .*\.|(is|belongs) .*({remedy})|needs .*)|"
                    rf"config: there is no field .*(nearest|belongs|stands|are )",
                    line,
                ), (name, line)
            assert name in found or (section and section in found), found
    assert count > 100


def test_all_errors_of_a_file_come_at_once_with_their_lines(tmp_path: pathlib.Path) -> None:
    """What a refused field would have meant contradicts nothing."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigError) as caught:
        from_config(file)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(str(file))[:3] for line in lines] == [":3:", ":6:", ":7:", ":10"]
    assert "'SIZE_BASED_WRAP'" in lines[1]


@pytest.mark.parametrize(
    ("text", "complaint_"),
    [
        ("a: 1\nb: [", r"fsdp.yaml:2: this is not YAML"),
        ("a: \0", r"fsdp.yaml: this is not YAML: unacceptable character"),
        ("a: 2024-13-45", r"fsdp.yaml:1: there is no field 'a'"),
        ("a: &b\n  c: 1\n<<: *b\n", r"fsdp.yaml:3: << \(a merge key of YAML\) is not supported"),
        ("use_cpu: true\nuse_cpu: false\n", r"fsdp.yaml:2: use_cpu stands here and at .*yaml:1"),
        ("- a\n", r"fsdp.yaml:1: this is not a config file"),
        ("", r"fsdp.yaml:1: this is not a config file"),
    ],
)
def test_what_is_no_config_file_is_refused(
    tmp_path: pathlib.Path, text: str, complaint_: str
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint_):
        from_config(str(file))


def test_a_file_that_is_not_there_is_named_with_what_writes_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("Write one by python -m shardkit config")):
        from_config(tmp_path / "fsdp.yaml")


def test_json_with_tabs_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "default_config.json"
    file.write_text('{\n\t"distributed_type": "NO",\n\t"use_cpu": true\n}\n')
    config = from_config(file)
    assert isinstance(config, Config)
    assert config.to_dict() == {"distributed_type": "NO", "use_cpu": True}


def test_without_pyyaml_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "fsdp.yaml"
    file.write_text("distributed_type: NO\n")
    with pytest.raises(ConfigError, match=r"pip install .shardkit\[config\]."):
        from_config(file)
    assert from_config({"distributed_type": "NO"}).settings.precision == "no"
