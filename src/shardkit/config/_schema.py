"""From what was written to what is meant: names, kinds, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardkit._errors import ConfigError, nearest
from shardkit._kinds import NotOfKindError, flag
from shardkit.config._fields import DEVICES, PREFETCHES, PREFIXES, SECTIONS, STRATEGIES
from shardkit.config._source import Section, Setting, plain

if TYPE_CHECKING:
    from shardkit.config._source import SourceLine

_MIN_NUM_PARAMS = 100_000_000  # What Accelerate takes where nothing is said.


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
    """What a config means; names are those of its fields, values those of shardkit.

    Attributes:
        device_type: Type of the mesh's device; None: the machine's accelerator, else the host.
        strategy: Name of a `shardkit.strategy`.
        precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        is_fsdp: Whether there is an `fsdp_config` to apply; else the model is replicated.
        parallelism: Sizes of the mesh; None: the strategy and the number of ranks give them.
        num_processes: Number of ranks; None: not said.
        min_num_params: Threshold of a policy by size.
        forward_prefetch: Choice of the user; None: shardkit's default. So is `backward_prefetch`.
        sync_module_states: Whether values of rank 0 are sent to the others.
        notes: Fields that change nothing, and why.
    """

    distributed_type: str
    device_type: str | None
    strategy: str
    precision: str
    is_fsdp: bool
    fsdp_version: int
    parallelism: Parallelism | None
    num_processes: int | None
    num_machines: int
    offload_params: bool
    wrap: str
    transformer_layer_cls_to_wrap: tuple[str, ...] | None
    min_num_params: int
    forward_prefetch: bool | None
    backward_prefetch: Literal["pre", "post", "none"] | None
    state_dict_type: str
    sync_module_states: bool
    activation_checkpointing: bool
    ignored_modules: str | None
    launcher: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Found:
    """Fields that were written, with their values as they are meant, and all complaints.

    Args:
        document: The file or dict as it was read.
    """

    def __init__(self, document: Section) -> None:
        self.document = document
        self.complaints: list[tuple[SourceLine, str]] = []
        self._values: dict[str, Any] = {}
        self._entries: dict[str, Setting] = {}
        for name in SECTIONS:
            self._take(name)

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, by its whole name."""
        return self._values.get(name, default)

    def has_fields(self, section: str) -> bool:
        """Whether a section was written, and is not empty."""
        written = self.document.entries.get(section)
        return bool(written and isinstance(written.value, Section) and written.value.entries)

    def complain(self, name: str, text: str) -> None:
        """Say that a field is wrong; `text` goes on from its name."""
        place = (self._entries.get(name) or self.document).place
        self.complaints.append((place, f"{name} {text}"))

    def refuse(self, name: str, error: NotOfKindError) -> None:
        """Say that the value of a field is not of its kind."""
        entry = self._entries[name]
        self.complaints.append((entry.place, error.sentence(name, plain(entry.value))))

    def raise_complaints(self) -> None:
        """Raise all complaints at once, by lines.

        Raises:
            ConfigError: There are some.
        """
        if self.complaints:
            ordered = sorted(self.complaints, key=lambda item: item[0].line or 0)
            raise ConfigError("\n".join(f"{place}: {text}" for place, text in ordered))

    def notes(self) -> tuple[str, ...]:
        """Return what was written and changes nothing, with the reason."""
        fields = {name: each for fields in SECTIONS.values() for name, each in fields.items()}
        return tuple(
            f"{self._entries[name].place}: {name} changes nothing. {fields[name].note}"
            for name in self._values
            if fields[name].note and self._values[name] not in (None, False, [], {})
        )

    def launcher(self) -> dict[str, Any]:
        """Return the fields that whoever starts the ranks uses."""
        fields = SECTIONS[""]
        return {n: v for n, v in self._values.items() if n in fields and fields[n].use != "applied"}

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
            try:
                self._values[name] = SECTIONS[section][name].kind(entry.value)
            except NotOfKindError as error:
                self.refuse(name, error)
            except (RecursionError, ValueError):  # No text can be made of it.
                self.refuse(name, NotOfKindError("must be a value that fits into a line of text"))

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
    """Return what fields mean that are free of contradictions."""
    distributed_type = found.value("distributed_type", "NO")
    version = int(found.value("fsdp_version", "1"))
    is_fsdp = is_fsdp_type(found)
    is_fsdp_1 = is_fsdp and version == 1
    parallelism = parallelism_of(found)
    return Settings(
        distributed_type=distributed_type,
        device_type="cpu" if found.value("use_cpu") else DEVICES.get(distributed_type),
        strategy=_strategy_of(found, version, parallelism) if is_fsdp else "replicate",
        precision=found.value("mixed_precision", "no"),
        is_fsdp=is_fsdp,
        fsdp_version=version,
        parallelism=parallelism,
        num_processes=num_processes_of(found),
        num_machines=found.value("num_machines", 1),
        offload_params=found.value("fsdp_offload_params", False),
        wrap=found.value("fsdp_auto_wrap_policy", "NO_WRAP"),
        transformer_layer_cls_to_wrap=found.value("fsdp_transformer_layer_cls_to_wrap"),
        min_num_params=found.value("fsdp_min_num_params", _MIN_NUM_PARAMS),
        forward_prefetch=found.value("fsdp_forward_prefetch", False if is_fsdp_1 else None),
        backward_prefetch=PREFETCHES.get(
            found.value("fsdp_backward_prefetch", "NO_PREFETCH" if is_fsdp_1 else "")
        ),
        state_dict_type=found.value(
            "fsdp_state_dict_type",
            "SHARDED_STATE_DICT" if is_fsdp and version != 1 else "FULL_STATE_DICT",
        ),
        sync_module_states=_is_synced(found, parallelism) if is_fsdp else True,
        activation_checkpointing=found.value("fsdp_activation_checkpointing", False),
        ignored_modules=found.value("fsdp_ignored_modules"),
        launcher=found.launcher(),
        notes=found.notes(),
    )


def is_fsdp_type(found: Found) -> bool:
    """Whether fsdp_config is meant; on XLA it is where it is there."""
    kind = found.value("distributed_type")
    return kind == "FSDP" or (kind == "XLA" and found.has_fields("fsdp_config"))


def strategy_name(found: Found) -> str | None:
    """Return the sharding strategy that either field of version 1 names; None: no field does.

    Raises:
        NotOfKindError: fsdp_reshard_after_forward names none.
    """
    written = found.value("fsdp_reshard_after_forward")
    if written is None:
        name: str | None = found.value("fsdp_sharding_strategy")
        return name
    kind = SECTIONS["fsdp_config"]["fsdp_sharding_strategy"].kind
    return str(kind(written))


def reshards(found: Found) -> bool:
    """Return fsdp_reshard_after_forward of version 2.

    Raises:
        NotOfKindError: It is neither true nor false.
    """
    return flag(found.value("fsdp_reshard_after_forward", True))


def num_processes_of(found: Found) -> int | None:
    """Return num_processes; None: not said, which -1 means."""
    number: int = found.value("num_processes", -1)
    return None if number == -1 else number


def parallelism_of(found: Found) -> Parallelism | None:
    """Return the sizes of axes, if any is said."""
    prefix = PREFIXES["parallelism_config"]
    names = ("dp_replicate_size", "dp_shard_size", "tp_size")
    given = {name: found.value(prefix + name) for name in names}
    given = {name: size for name, size in given.items() if size is not None}
    return Parallelism(**given) if given else None


def _strategy_of(found: Found, version: int, parallelism: Parallelism | None) -> str:
    if version == 1:
        return STRATEGIES[strategy_name(found) or "FULL_SHARD"]
    kept = "" if reshards(found) else "_zero2"
    if parallelism is None or parallelism.dp_replicate_size == 1:
        return "zero2" if kept else "zero3"
    return "replicate" if parallelism.dp_shard_size == 1 else f"hybrid{kept}"


def _is_synced(found: Found, parallelism: Parallelism | None) -> bool:
    """Whether rank 0's values are everyone's; by default they are, as in accelerate launch."""
    if parallelism is not None and parallelism.tp_size > 1:
        return False
    sync: bool = found.value("fsdp_sync_module_states", True)
    efficient: bool = found.value("fsdp_cpu_ram_efficient_loading", sync)
    return sync or efficient
