"""The meaning of a config: names, kinds and defaults of its fields, and contradictions."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from shardkit._errors import ConfigError
from shardkit._text import Kind, NotOfKindError, flag, is_of_kind, nearest, number
from shardkit._wrapping.policies import MIN_NUM_PARAMS
from shardkit._wrapping.strategies import strategy
from shardkit.config._source import Section, Setting, SourceLine, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


# --- kinds of values ------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Read any scalar as text."""
    if isinstance(value, (list, Section)):
        raise NotOfKindError(expected="must be one value")
    return str(value)


def pattern(value: Any) -> str:
    """Read a regular expression."""
    found = text(value)
    try:
        re.compile(found)
    except (re.error, OverflowError, RecursionError) as error:
        hint = f"It is none: {error}."
        raise NotOfKindError(expected="must be a regular expression", hint=hint) from error
    return found


def names(value: Any) -> tuple[str, ...]:
    """Read names, from a list or from text with commas."""
    parts = value if isinstance(value, list) else str(value).split(",")
    found = tuple(str(part).strip() for part in parts if str(part).strip())
    if isinstance(value, Section) or not found:
        raise NotOfKindError(expected="must be one or more names with commas between them")
    return found


def choice(
    *words: str, from_1: bool = False, refused: Mapping[str, str] | None = None
) -> Callable[[Any], str]:
    """Return a kind: one of several words, in upper or lower case; with `from_1` also its number.

    `refused` has other words of Accelerate, and what to do instead.
    """
    expected = f"must be one of {', '.join(words)}"
    by_word = {word.lower(): word for word in words}
    remedies = {word.lower(): remedy for word, remedy in (refused or {}).items()}

    def parse(value: Any) -> str:
        # YAML reads a bare `no` as False.
        written = "no" if value is False else str(value).strip()
        if written.lower() in by_word:
            return by_word[written.lower()]
        if from_1 and written.isdecimal() and 1 <= int(written) <= len(words):
            return words[int(written) - 1]
        hint = nearest(written, words)
        if written.lower() in remedies:
            hint = f"shardkit does not carry this out. {remedies[written.lower()]}"
        raise NotOfKindError(expected, hint)

    return parse


def unused(remedy: str, *unset: str) -> Callable[[Any], None]:
    """Return the kind of a field or section that must not be used; `unset` counts as left out."""

    def parse(value: Any) -> None:
        is_nothing = value is False or (isinstance(value, Section) and not value.entries)
        if not is_nothing and str(value).strip().lower() not in unset:
            expected = f"must be {''.join(f'{word}, or ' for word in unset)}left out"
            raise NotOfKindError(expected, f"shardkit does not carry it out. {remedy}")

    return parse


# --- fields ---------------------------------------------------------------------------------------

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's names, in the order of their numbers, which `shardkit.strategy` accepts."""

WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES: dict[str, Literal["pre", "post", "none"]] = {
    "BACKWARD_PRE": "pre",
    "BACKWARD_POST": "post",
    "NO_PREFETCH": "none",
}
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
DEVICES = {
    "MULTI_GPU": "cuda",
    "MULTI_CPU": "cpu",
    "MULTI_XPU": "xpu",
    "MULTI_NPU": "npu",
    "MULTI_HPU": "hpu",
    "MULTI_MLU": "mlu",
    "MULTI_SDAA": "sdaa",
    "MULTI_MUSA": "musa",
    "MULTI_NEURON": "neuron",
    "XLA": "xla",
}
"""Device types that a distributed_type names."""

MAX_RANKS = 4096  # Limit of ranks on one host, and of hosts: more is a typing error.

Use = Literal["applied", "launcher", "noted"]


@dataclass(frozen=True)
class Field:
    """One field."""

    kind: Kind  # Kind of its value.
    # User of the field: ``"applied"``: the model; ``"launcher"``: the launcher of the ranks;
    # ``"noted"``: no one.
    use: Use = "applied"
    note: str = ""  # Reason why it has no effect; empty: it has one.
    default: Any = None  # Value if the field is not written.


_TPU = "Only accelerate tpu-config reads it."
_TPU_LAUNCH = "Only accelerate launch reads it, on TPUs."

TOP = {
    "compute_environment": Field(
        choice(
            "LOCAL_MACHINE",
            refused={"AMAZON_SAGEMAKER": "Start the ranks by torchrun, and write LOCAL_MACHINE."},
        )
    ),
    "distributed_type": Field(
        choice(
            "FSDP",
            "NO",
            *DEVICES,
            refused={
                "DEEPSPEED": "Write FSDP with an fsdp_config; its ZeRO stage 3 is FULL_SHARD, "
                "stage 2 SHARD_GRAD_OP.",
                "MEGATRON_LM": "Write FSDP with an fsdp_config and a parallelism_config.",
            },
        )
    ),
    "mixed_precision": Field(
        choice(
            "no",
            "fp16",
            "bf16",
            refused={
                "fp8": "Write bf16, and pass low-precision weights as tensor subclasses with "
                "fsdp_pre_all_gather."
            },
        ),
        default="no",
    ),
    "use_cpu": Field(flag),
    "num_processes": Field(number(1, MAX_RANKS * MAX_RANKS, also=(-1,)), default=-1),
    "num_machines": Field(number(1, MAX_RANKS), default=1),
    "machine_rank": Field(number(0, MAX_RANKS - 1), "launcher", default=0),
    "gpu_ids": Field(text, "launcher"),
    "main_process_ip": Field(text, "launcher"),
    "main_process_port": Field(number(0, 2**16 - 1), "launcher"),
    "rdzv_backend": Field(text, "launcher"),
    "same_network": Field(
        flag, "launcher", "Hosts meet at main_process_ip, whatever networks lead there."
    ),
    "main_training_function": Field(
        text, "launcher", "Ranks run the script as a whole; accelerate calls it on TPUs."
    ),
    "enable_cpu_affinity": Field(
        flag, "launcher", "Ranks are not bound to cores; start the launcher by numactl for it."
    ),
    "mpirun_config": Field(
        plain, "launcher", "Ranks are started by torchrun's agent, not by mpirun."
    ),
    "ipex_config": Field(  # A section of Accelerate 1.12.
        plain, "noted", "It is about Intel's extension of PyTorch, which is not used."
    ),
    "tpu_name": Field(text, "launcher", _TPU_LAUNCH),
    "tpu_zone": Field(text, "launcher", _TPU_LAUNCH),
    "tpu_use_cluster": Field(flag, "launcher", _TPU_LAUNCH),
    "tpu_use_sudo": Field(flag, "launcher", _TPU_LAUNCH),
    "tpu_vm": Field(plain, "launcher", _TPU_LAUNCH),
    "tpu_env": Field(plain, "launcher", _TPU_LAUNCH),
    "command_file": Field(text, "noted", _TPU),
    "commands": Field(plain, "noted", _TPU),
    "debug": Field(
        flag,
        "noted",
        "It checks collectives of Accelerate. Those of shardkit are compared by set_watch.",
    ),
    "downcast_bf16": Field(unused("Write mixed_precision: bf16 instead.", "no", "false")),
    "fp16": Field(unused("Write mixed_precision: fp16 instead.", "false")),
    "dynamo_backend": Field(unused("Compile layers yourself, after apply: layer.compile().", "no")),
    "dynamo_config": Field(unused("Compile layers yourself, after apply: layer.compile().")),
    "fp8_config": Field(unused("mixed_precision may be no, fp16 or bf16.")),
    "deepspeed_config": Field(unused("Write distributed_type: FSDP and an fsdp_config.")),
    "megatron_lm_config": Field(unused("Write a parallelism_config.")),
    "fsdp_config": Field(plain),
    "parallelism_config": Field(plain),
}

FSDP = {
    "fsdp_version": Field(choice("1", "2"), default="1"),
    "fsdp_sharding_strategy": Field(choice(*STRATEGIES, from_1=True)),
    "fsdp_reshard_after_forward": Field(text),  # See `_RESHARDS`.
    "fsdp_offload_params": Field(flag, default=False),
    "fsdp_auto_wrap_policy": Field(choice(*WRAPS), default="NO_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": Field(names),
    "fsdp_min_num_params": Field(number(1)),
    "fsdp_backward_prefetch": Field(choice(*PREFETCHES, from_1=True)),
    "fsdp_forward_prefetch": Field(flag),
    "fsdp_state_dict_type": Field(choice(*STATE_DICTS, from_1=True)),
    "fsdp_cpu_ram_efficient_loading": Field(flag),
    "fsdp_sync_module_states": Field(flag),
    "fsdp_activation_checkpointing": Field(flag, default=False),
    "fsdp_activation_checkpointing_offload": Field(
        unused("Run forward in torch.autograd.graph.save_on_cpu(pin_memory=True).", "false", "no")
    ),
    "fsdp_ignored_modules": Field(pattern),
    "fsdp_use_orig_params": Field(
        flag, "noted", "Parameters are always the model's own, with their own names."
    ),
}


def _of_version(version: int, own: Kind, other: Kind, hint: str) -> Kind:
    """Return a kind that one version has, with a hint for values of the other version's kind."""

    def parse(value: Any) -> Any:
        try:
            return own(value)
        except NotOfKindError as error:
            given = hint if is_of_kind(other, value) else error.hint
            expected = f"{error.expected} in fsdp_version {version}"
            raise NotOfKindError(expected, given) from error

    return parse


_strategy_kind = choice(*STRATEGIES, from_1=True)
_RESHARDS = {
    "1": _of_version(
        1,
        _strategy_kind,
        flag,
        "That is a value of fsdp_version 2. In version 1 it names a strategy: FULL_SHARD for true, "
        "SHARD_GRAD_OP for false; or write fsdp_version: 2.",
    ),
    "2": _of_version(
        2,
        flag,
        _strategy_kind,
        "That is a value of fsdp_version 1. In version 2 it is true (as FULL_SHARD) or false (as "
        "SHARD_GRAD_OP); sizes of a parallelism_config do the rest.",
    ),
}
"""Kinds of fsdp_reshard_after_forward by fsdp_version."""

_CONTEXT = "Shard over all ranks, and split sequences in the model."

PARALLELISM = {
    "parallelism_config_dp_replicate_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_dp_shard_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_tp_size": Field(number(1, MAX_RANKS * MAX_RANKS)),
    "parallelism_config_cp_size": Field(unused(_CONTEXT, "1")),
    "parallelism_config_sp_size": Field(unused(_CONTEXT, "1")),
    **{
        f"parallelism_config_{name}": Field(
            plain, "noted", "There is no axis of this kind: its size is 1."
        )
        for name in (
            "cp_backend",
            "cp_comm_strategy",
            "sp_backend",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    },
}

SECTIONS = {"": TOP, "fsdp_config": FSDP, "parallelism_config": PARALLELISM}
_FIELDS = {**TOP, **FSDP, **PARALLELISM}
PREFIXES = {"": "", "fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}
"""Prefix of the names in a section; for fsdp_config, Accelerate also accepts names without it."""


# --- from the fields to their meaning -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of the axes of a mesh."""

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1

    @property
    def total_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate_size * self.dp_shard_size * self.tp_size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The meaning of a config; names are those of its fields, values those of shardkit."""

    distributed_type: str
    # Type of the mesh's device; None: the machine's accelerator, or else the host.
    device_type: str | None
    strategy: str  # Name of a `shardkit.strategy`.
    precision: str  # ``"no"``, ``"fp16"`` or ``"bf16"``.
    is_fsdp: bool  # Whether there is an `fsdp_config` to apply; otherwise the model is replicated.
    fsdp_version: int
    # Sizes of the mesh; None: they follow from the strategy and the number of ranks.
    parallelism: Parallelism | None
    num_processes: int | None  # Number of ranks; None: not given.
    num_machines: int
    offload_params: bool
    wrap: str
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    min_num_params: int  # Threshold of a policy by size.
    # Choice of the user; None: shardkit's default. The same holds for `backward_prefetch`.
    forward_prefetch: bool | None
    backward_prefetch: Literal["pre", "post", "none"] | None
    state_dict_type: str
    sync_module_states: bool  # Whether values of rank 0 are sent to the other ranks.
    activation_checkpointing: bool
    ignored_modules: str | None
    launcher: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # Fields without effect, and the reasons.


class _RefusedError(Exception):
    """The value of a field was refused, so nothing is known of what it means."""


class Found:
    """Fields of a config with their interpreted values, and all complaints."""

    def __init__(self, document: Section) -> None:
        self.document = document
        self.complaints: list[tuple[SourceLine, str]] = []
        self._values: dict[str, Any] = {}
        self._entries: dict[str, Setting] = {}
        self._refused: set[str] = set()
        for name in SECTIONS:
            self._take(name)
        with contextlib.suppress(_RefusedError):
            if "fsdp_reshard_after_forward" in self._values and is_fsdp_type(self):
                self._read("fsdp_reshard_after_forward", _RESHARDS[self.value("fsdp_version")])

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, by its whole name; else `default`, or its own default."""
        if name in self._refused:
            raise _RefusedError
        return self._values.get(name, _FIELDS[name].default if default is None else default)

    def has_fields(self, section: str) -> bool:
        """Whether a section was written, and is not empty."""
        written = self.document.entries.get(section)
        return bool(written and isinstance(written.value, Section) and written.value.entries)

    def check(self) -> None:
        """Raise all complaints at once, sorted by line."""
        for sentence in contradictions(self):
            field = self._entries.get(sentence.split()[0], self.document)
            self.complaints.append((field.place, sentence))
        if self.complaints:
            ordered = sorted(self.complaints, key=lambda item: item[0].line or 0)
            raise ConfigError("\n".join(f"{place}: {text}" for place, text in ordered))

    def notes(self) -> tuple[str, ...]:
        """Return the fields without effect, each with the reason."""
        return tuple(
            f"{self._entries[name].place}: {name} changes nothing. {_FIELDS[name].note}"
            for name in self._values
            if _FIELDS[name].note and self._values[name] not in (None, False, [], {})
        )

    def launcher(self) -> dict[str, Any]:
        """Return the fields for the launcher of the ranks."""
        return {n: v for n, v in self._values.items() if n in TOP and TOP[n].use != "applied"}

    def _take(self, section: str) -> None:
        document = self.document
        if section:
            entry = self.document.entries.get(section)
            if entry is None or entry.value is None:
                return
            if not isinstance(entry.value, Section):
                error = NotOfKindError("must hold fields (name: value)")
                self.complaints.append((entry.place, error.sentence(section, entry.value)))
                return
            document = entry.value
        for key, entry in document.entries.items():
            name = self._name_of(section, key, entry)
            if name is None or entry.value is None:
                continue
            if name in self._values:
                first = self._entries[name].place
                self.complaints.append(
                    (entry.place, f"{key} is {name}, which stands at {first}. Keep one of them.")
                )
                continue
            self._entries[name] = entry
            self._read(name, SECTIONS[section][name].kind)

    def _read(self, name: str, kind: Kind) -> None:
        """Interpret the value of a field; complain if it is not of its kind."""
        try:
            self._values[name] = kind(self._entries[name].value)
        except NotOfKindError as error:
            self._refuse(name, error)
        except (RecursionError, ValueError):  # It cannot be converted to text.
            self._refuse(name, NotOfKindError("must be a value that fits into a line of text"))

    def _refuse(self, name: str, error: NotOfKindError) -> None:
        entry = self._entries[name]
        self.complaints.append((entry.place, error.sentence(name, plain(entry.value))))
        self._refused.add(name)

    def _name_of(self, section: str, key: str, entry: Setting) -> str | None:
        """Return the whole name of a field; complain if there is none."""
        fields, prefix = SECTIONS[section], PREFIXES[section]
        for name in (key, prefix + key):
            if name in fields:
                return name
        inside = f" of {section}" if section else ""
        homes = [home for home in SECTIONS if PREFIXES[home] + key in SECTIONS[home]]
        homes += [home for home in SECTIONS if key in SECTIONS[home]]
        if homes:
            where = (
                f"It belongs in {homes[0]}." if homes[0] else "It stands at the outermost level."
            )
        else:
            where = nearest(key, fields)
        self.complaints.append((entry.place, f"there is no field {key!r}{inside}. {where}"))
        return None


def settings_of(found: Found) -> Settings:
    """Return the meaning of fields that have no contradictions."""
    distributed_type = found.value("distributed_type", "NO")
    version = int(found.value("fsdp_version"))
    is_fsdp = is_fsdp_type(found)
    is_fsdp_1 = is_fsdp and version == 1
    parallelism = parallelism_of(found)
    chosen = _strategy_of(found, version, parallelism) if is_fsdp else "replicate"
    return Settings(
        distributed_type=distributed_type,
        device_type="cpu" if found.value("use_cpu") else DEVICES.get(distributed_type),
        strategy=strategy(cast("Any", chosen)).name,
        precision=found.value("mixed_precision"),
        is_fsdp=is_fsdp,
        fsdp_version=version,
        parallelism=parallelism,
        num_processes=num_processes_of(found),
        num_machines=found.value("num_machines"),
        offload_params=found.value("fsdp_offload_params"),
        wrap=found.value("fsdp_auto_wrap_policy"),
        transformer_layer_cls_to_wrap=found.value("fsdp_transformer_layer_cls_to_wrap"),
        min_num_params=found.value("fsdp_min_num_params", MIN_NUM_PARAMS),
        forward_prefetch=found.value("fsdp_forward_prefetch", False if is_fsdp_1 else None),
        backward_prefetch=PREFETCHES.get(
            found.value("fsdp_backward_prefetch", "NO_PREFETCH" if is_fsdp_1 else "")
        ),
        state_dict_type=found.value(
            "fsdp_state_dict_type",
            "SHARDED_STATE_DICT" if is_fsdp and version != 1 else "FULL_STATE_DICT",
        ),
        sync_module_states=_is_synced(found, parallelism) if is_fsdp else True,
        activation_checkpointing=found.value("fsdp_activation_checkpointing"),
        ignored_modules=found.value("fsdp_ignored_modules"),
        launcher=found.launcher(),
        notes=found.notes(),
    )


def is_fsdp_type(found: Found) -> bool:
    """Whether fsdp_config applies; on XLA it applies if it is present."""
    kind = found.value("distributed_type")
    return kind == "FSDP" or (kind == "XLA" and found.has_fields("fsdp_config"))


def num_processes_of(found: Found) -> int | None:
    """Return num_processes; None if it is not given, or is -1."""
    number: int = found.value("num_processes")
    return None if number == -1 else number


_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size")


def parallelism_of(found: Found) -> Parallelism | None:
    """Return the sizes of axes; None if none is given."""
    prefix = PREFIXES["parallelism_config"]
    given = {name: found.value(prefix + name) for name in _SIZES}
    given = {name: size for name, size in given.items() if size is not None}
    return Parallelism(**given) if given else None


def _strategy_of(found: Found, version: int, parallelism: Parallelism | None) -> str:
    reshards = found.value("fsdp_reshard_after_forward")
    if version == 1:
        return str(reshards or found.value("fsdp_sharding_strategy", "FULL_SHARD"))
    kept = "_zero2" if reshards is False else ""
    if parallelism is None or parallelism.dp_replicate_size == 1:
        return "zero2" if kept else "zero3"
    return "replicate" if parallelism.dp_shard_size == 1 else f"hybrid{kept}"


def _is_synced(found: Found, parallelism: Parallelism | None) -> bool:
    """Whether rank 0's values go to all ranks; the default is yes, as in accelerate launch."""
    if parallelism is not None and parallelism.tp_size > 1:
        return False
    sync: bool = found.value("fsdp_sync_module_states", True)
    efficient: bool = found.value("fsdp_cpu_ram_efficient_loading", sync)
    return sync or efficient


# --- contradictions -------------------------------------------------------------------------------


def contradictions(found: Found) -> Iterator[str]:
    """Yield a sentence for each contradiction, which begins with the name of the wrong field.

    A check ends at a field whose value was refused.
    """
    of_fsdp = (_check_version, _check_wrapping, _check_sync, _check_parallelism)
    for check in (_check_type, _check_processes, *of_fsdp):
        with contextlib.suppress(_RefusedError):
            if check not in of_fsdp or is_fsdp_type(found):
                yield from check(found)


def _check_type(found: Found) -> Iterator[str]:
    kind = found.value("distributed_type")
    if kind is None:
        if not found.complaints:
            yield "distributed_type is missing. As a rule it is FSDP."
        return
    for section in ("fsdp_config", "parallelism_config"):
        if found.has_fields(section) and not is_fsdp_type(found):
            yield (
                f"{section} is there, but distributed_type is {kind}, which uses none of it. Write "
                f"distributed_type: FSDP, or leave {section} out."
            )
    use_cpu, device = found.value("use_cpu"), DEVICES.get(kind)
    if use_cpu and device not in (None, "cpu"):
        yield (
            f"use_cpu is true, but distributed_type is {kind}. Write use_cpu: false, or "
            f"distributed_type: MULTI_CPU, or FSDP, which shards on the CPU, too."
        )
    if use_cpu is False and kind == "MULTI_CPU":
        yield "use_cpu is false, but distributed_type is MULTI_CPU. Write true."


def _check_processes(found: Found) -> Iterator[str]:
    number, machines = num_processes_of(found), found.value("num_machines")
    if found.value("distributed_type") == "NO" and number not in (None, 1):
        yield (
            f"num_processes is {number}, but distributed_type is NO, which is one process. Write "
            f"distributed_type: FSDP, or MULTI_GPU or MULTI_CPU to replicate the model."
        )
    if number is not None and number % machines:
        yield (
            f"num_processes is {number}, which {machines} machines cannot have equal parts of. It "
            f"counts the processes of all machines."
        )
    elif number is not None and number > machines * MAX_RANKS:
        yield (
            f"num_processes is {number}, which are {number // machines} on each of {machines} "
            f"machines. Write {MAX_RANKS} for a machine at the most."
        )
    rank = found.value("machine_rank")
    if rank >= machines:
        yield (
            f"machine_rank is {rank}, but num_machines is {machines}: the ranks of machines are 0 "
            f"to {machines - 1}."
        )


def _check_version(found: Found) -> Iterator[str]:
    is_version_1 = found.value("fsdp_version") == "1"
    yield from _check_version_1(found) if is_version_1 else _check_version_2(found)


def _check_version_1(found: Found) -> Iterator[str]:
    name = found.value("fsdp_reshard_after_forward")
    other = found.value("fsdp_sharding_strategy", name)
    if name is not None and other != name:
        yield (
            f"fsdp_sharding_strategy is {other}, but fsdp_reshard_after_forward is {name}. Keep "
            f"one of them."
        )
    for size in _SIZES:
        size_name = PREFIXES["parallelism_config"] + size
        if found.value(size_name) is not None:
            yield (
                f"{size_name} needs fsdp_version: 2. In version 1 HYBRID_SHARD replicates over "
                f"machines, and NO_SHARD over all ranks."
            )


def _check_version_2(found: Found) -> Iterator[str]:
    keeps = found.value("fsdp_reshard_after_forward") is False
    name = found.value("fsdp_sharding_strategy")
    if name is not None and name != ("SHARD_GRAD_OP" if keeps else "FULL_SHARD"):
        word = "false" if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "true"
        yield (
            f"fsdp_sharding_strategy is {name}, a field of fsdp_version 1, and other fields say "
            f"something else. In version 2 write fsdp_reshard_after_forward: "
            f"{word}{_sizes_for(name)}."
        )
    if found.value("fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        yield (
            "fsdp_state_dict_type is LOCAL_STATE_DICT, which only fsdp_version 1 has. Write "
            "SHARDED_STATE_DICT, which loads at every number of ranks."
        )


def _sizes_for(name: str) -> str:
    if name == "NO_SHARD":
        return ", and a parallelism_config with dp_replicate_size: (ranks), dp_shard_size: 1"
    if name.startswith("HYBRID"):
        return ", and a parallelism_config with dp_replicate_size and dp_shard_size"
    return ""


def _check_wrapping(found: Found) -> Iterator[str]:
    policy = found.value("fsdp_auto_wrap_policy")
    for name, owner in (
        ("fsdp_transformer_layer_cls_to_wrap", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_min_num_params", "SIZE_BASED_WRAP"),
    ):
        if found.value(name) is not None and policy != owner:
            yield (
                f"{name} belongs to {owner}, but fsdp_auto_wrap_policy is {policy}. Write "
                f"fsdp_auto_wrap_policy: {owner}, or leave {name} out."
            )
    if policy == "NO_WRAP" and found.value("fsdp_activation_checkpointing"):
        yield (
            "fsdp_activation_checkpointing is true, but fsdp_auto_wrap_policy is NO_WRAP, which "
            "chooses no modules for it. Choose a policy, or write false and call "
            "shardkit.checkpoint_activations(model)."
        )


def _check_sync(found: Found) -> Iterator[str]:
    sync, efficient = "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"
    if found.value(efficient) and found.value(sync) is False:
        yield (
            f"{sync} is false, but {efficient} is true: other ranks get their values from rank 0 "
            f"then. Write {sync}: true, or {efficient}: false."
        )


def _check_parallelism(found: Found) -> Iterator[str]:
    sizes = parallelism_of(found)
    if sizes is None:
        return
    number, total = num_processes_of(found), sizes.total_size
    text = (
        f"dp_replicate_size {sizes.dp_replicate_size} x dp_shard_size {sizes.dp_shard_size} x "
        f"tp_size {sizes.tp_size}"
    )
    if number is not None and total != number:
        yield (
            f"parallelism_config is about {text} = {total} ranks, but num_processes is {number}. "
            f"Their product must be num_processes."
        )
    if sizes.tp_size > 1 and sizes.dp_replicate_size > 1 and sizes.dp_shard_size == 1:
        yield (
            f"parallelism_config is about {text}: tensor parallelism beside replicas needs "
            f"dp_shard_size above 1."
        )
    senders = ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states")
    written = [name for name in senders if found.value(name)]
    if sizes.tp_size > 1 and written:
        yield (
            f"{written[0]} is true, and tp_size is above 1: weights that are split over tp are "
            f"sent by parallelize_module, and others must be equal on all ranks. Write false."
        )
