"""`Config` applies a config file to models: their mesh, rank 0's values, their state dicts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from shardkit._compat import torch_modules, torch_tensors
from shardkit._errors import CheckpointError, ConfigError, MeshError, WrapError
from shardkit._mesh import SHARD_AXIS, DeviceMesh
from shardkit._module.activation_checkpoint import checkpoint_module
from shardkit._module.materialize import materialize
from shardkit._params.bucket import swap_tensors
from shardkit._runtime.group import exchange_buffer
from shardkit._settings import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    refuse_non_functions,
    refuse_non_module,
)
from shardkit._tensor.sharded import ShardedTensor
from shardkit._wrapping.auto_shard import auto_shard
from shardkit._wrapping.policies import size_policy
from shardkit._wrapping.strategies import REPLICATE_AXIS, Strategy, StrategyName, strategy
from shardkit.backends import (
    TorchDeviceMesh,
    accelerator_type,
    as_device_mesh,
    init_device_mesh,
    tensor_parallel_of,
)
from shardkit.backends.base import axes_of, first_of_all
from shardkit.backends.device import use_own_device
from shardkit.backends.groups import (
    current_world_size,
    exchange,
    group_rank,
    make_torch_mesh,
    world_size_or_raise,
)
from shardkit.config._schema import Found, Parallelism, Settings, settings_of
from shardkit.config._source import plain, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer

    from shardkit._module.fsdp_module import FSDPModule


# --- the mesh of a config -------------------------------------------------------------------------

_TP_AXIS = "tp"


def _of_sizes(
    sizes: Parallelism, device_type: str, world_size: int
) -> tuple[DeviceMesh, TorchDeviceMesh | None]:
    if sizes.total_size != world_size:
        msg = (
            f"parallelism_config is about {sizes.dp_replicate_size} x {sizes.dp_shard_size} x "
            f"{sizes.tp_size} = {sizes.total_size} ranks (dp_replicate_size x dp_shard_size x "
            f"tp_size), and there are {world_size}. Change a size, or start "
            f"{sizes.total_size} ranks."
        )
        raise MeshError(msg)
    names, shape = zip(*_axes_of(sizes), strict=True)
    if sizes.tp_size == 1:
        return init_device_mesh(device_type, shape, mesh_dim_names=names), None
    if device_type == "xla":
        msg = "tensor parallelism does not work on XLA. Write tp_size: 1."
        raise MeshError(msg)
    whole = make_torch_mesh(device_type, (*shape, sizes.tp_size), (*names, _TP_AXIS))
    mesh = as_device_mesh(whole[names], device_type=device_type)
    return mesh, whole[_TP_AXIS]


def _axes_of(sizes: Parallelism) -> list[tuple[str, int]]:
    """Return the axes over which parameters are sharded, the outermost first."""
    replicas = [(REPLICATE_AXIS, sizes.dp_replicate_size)] if sizes.dp_replicate_size > 1 else []
    return [*replicas, (SHARD_AXIS, sizes.dp_shard_size)]


# --- training state in three shapes ---------------------------------------------------------------
#
# Files of LOCAL and FULL state dicts replace those of the save before. Each is written beside its
# name first, as ``.<name>.written``. Once the files of all ranks are on the disk, they get their
# names. A run that is killed meanwhile leaves files of two saves. The files of one of them are
# complete, under one name or the other: `_of_one_save` finds them.

T = TypeVar("T")

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"  # Accelerate's names of files
_SAVED_WITH = "model_crc32"
"""Key in the optimizer's file that identifies the model's file of the same save."""


def _local_file(folder: Path, described: dict[str, Any]) -> Path:
    rank, ranks = described["rank"], described["world_size"]
    return folder / f"{_MODEL}_rank-{rank:08d}-of-{ranks:08d}.pth"


def _full_files(folder: Path, optimizer: Optimizer | None) -> list[Path]:
    names = [_MODEL] if optimizer is None else [_MODEL, _OPTIMIZER]
    return [folder / f"{name}.bin" for name in names]


# --- which files belong together ------------------------------------------------------------------


def _of_one_save(files: list[Path]) -> list[Path]:
    """Return the paths of files of one save, the newest one that all ranks have."""
    found = _on_all("read", files[0], lambda: [_saves(file) for file in files])
    chosen, of_ranks = _common(files, found)
    if chosen is not None:
        return chosen
    saves: dict[object, str] = {}
    for file, numbers in of_ranks:
        saves.setdefault(numbers[0], file)
    first, second = list(saves.items())[:2]
    msg = (
        f"{files[0].parent} holds files of different saves, which do not fit together: {first[1]} "
        f"is of save {first[0]}, {second[1]} of save {second[0]}. Nothing was loaded. Put all "
        f"files of one save there; whole tensors of a model load without an optimizer."
    )
    raise CheckpointError(msg)


def _finish_last(folder: Path, mine: list[Path]) -> None:
    """Give the files of the last save their names, if it was killed while it renamed them."""
    found: list[dict[object, Path]] = []
    for file in mine:
        found.append({})
        with contextlib.suppress(Exception):  # An unreadable file belongs to no save.
            found[-1] = _saves(file)
    chosen, _ = _common(mine, found)

    def finish() -> None:
        for file, whole in zip(mine, chosen or (), strict=False):
            if whole == file:
                _aside(file).unlink(missing_ok=True)
            else:
                whole.replace(file)

    _on_all("complete", folder, finish)


def _common(
    files: list[Path], found: list[dict[object, Path]]
) -> tuple[list[Path] | None, list[tuple[str, list[object]]]]:
    """Return this rank's files of the newest save of which all ranks have all files, or None.

    Args:
        files: Files of this rank.
        found: Paths of each file by save, the newest save first.

    Returns:
        Names of all ranks' files, each with its saves.
    """
    mine = [(file.name, list(saves)) for file, saves in zip(files, found, strict=True)]
    every = [entry for of_rank in exchange(mine, None, "a checkpoint") for entry in of_rank]
    # None: the optimizer.bin of Accelerate does not record its save.
    for save in dict.fromkeys(save for _, saves in every for save in saves):
        if all(save in saves or None in saves for _, saves in every):
            return [saves[save] if save in saves else saves[None] for saves in found], every
    return None, every


def _saves(file: Path) -> dict[object, Path]:
    """Return the paths of a file, under its name or beside it, by save; the newest save first."""
    found = {_number(path): path for path in (_aside(file), file) if path.exists()}
    if not found:
        msg = f"{file} is not there: it is what Config.save writes with this fsdp_state_dict_type."
        raise CheckpointError(msg)
    return found


def _number(file: Path) -> object:
    """Return the number that files of one save share; None if the file has none."""
    if f"{_MODEL}.bin" in file.name:
        return _crc32(file)
    state = _read(file)
    return state.get(_SAVED_WITH, state.get("shard_metadata", {}).get("save"))


def _crc32(file: Path) -> int | None:
    """Return a checksum of all tensors in a file of torch.save, without reading them."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        entries = [(e.CRC, e.file_size) for e in archive.infolist() if "/data/" in e.filename]
    return zlib.crc32(repr(sorted(entries)).encode())


# --- files ----------------------------------------------------------------------------------------


def _aside(file: Path) -> Path:
    return file.with_name(f".{file.name}.written")


def _write(file: Path, state: dict[str, Any]) -> None:
    """Write a file beside its name; there it is complete and on the disk, or absent."""
    from shardkit.checkpoint._files.disk import fsync_directory

    part = file.with_name(f".{file.name}.incomplete")
    with part.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(_aside(file))
    fsync_directory(file.parent)


def _name_all(files: list[Path]) -> None:
    from shardkit.checkpoint._files.disk import fsync_directory

    for file in files:
        _aside(file).replace(file)
    for file in files[:1]:
        fsync_directory(file.parent)


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _on_all(what: str, path: Path, act: Callable[[], T]) -> T:
    """Call a function on each rank; raise on all ranks if it fails on one."""
    from shardkit.checkpoint._agreement import agreed

    return agreed(None, f"could not {what} {path}", act)


# --- rank 0's values for all ranks ----------------------------------------------------------------


@dataclass
class Values:
    """The values of rank 0's model, kept while the model is sharded on meta."""

    mesh: DeviceMesh  # The mesh; all of its ranks make this object.
    state: dict[str, Any]  # A state dict; on ranks other than 0 its tensors are ignored.
    other: dict[
        str, Tensor
    ]  # Buffers that state dicts leave out, so `load_full` does not fill them.
    places: dict[str, list[str]]  # All names of a buffer in this rank's model, by each of them.
    # Parameters that are on meta now, each with its name and a parameter that holds its values.
    taken: list[tuple[str, nn.Parameter, nn.Parameter]] = field(default_factory=list)

    def take(self, model: nn.Module, ignored: set[nn.Parameter]) -> None:
        """Put this rank's parameters on meta, except what the state dict leaves out or renames."""
        with torch_modules.without_weight_refs(model.modules()):
            for name, param in model.named_parameters():
                if not param.is_meta and param not in ignored and name in self.state:
                    on_meta = torch.empty_like(param, device="meta")
                    values = nn.Parameter(on_meta, requires_grad=param.requires_grad)
                    torch_tensors.keep_grad_dtype(values, like=param)
                    swap_tensors(param, values, name)
                    param.__dict__.update(values.__dict__)
                    self.taken.append((name, param, values))

    def put_back(self, model: nn.Module) -> None:
        """Give the values back to this rank's parameters, except to sharded ones."""
        with torch_modules.without_weight_refs(model.modules()):
            for name, param, values in self.taken:
                if not isinstance(param, ShardedTensor):
                    swap_tensors(param, values, name)

    def send(self, model: nn.Module) -> None:
        """Send rank 0's values to all ranks. Collective."""
        from shardkit.checkpoint import load_full
        from shardkit.checkpoint._state.sources import from_rank0

        self.taken.clear()
        load_full(self.state, model, broadcast_from_rank0=True, progress=False)
        self.state = {}
        device = self.mesh.backend.device
        for name, value in from_rank0(lambda: self.other, device).receive():
            _set(model, self.places.get(name, [name]), value.to(device))


def values_of(model: nn.Module, mesh: DeviceMesh) -> Values | None:
    """Return the values of a model, which `Values.take` takes out of it.

    Parameters stay the same objects, so optimizers and ties stay valid.

    Returns:
        The values; None if there is nothing to send: for one rank, for one process with all
        devices, or for a model without values on rank 0.

    Cost: one exchange of a flag per axis.
    """
    if mesh.backend.is_traced:
        if (current_world_size() or 1) > 1:
            msg = (
                "rank 0's values cannot be sent to replicas on XLA. Write "
                "fsdp_cpu_ram_efficient_loading: false and fsdp_sync_module_states: false, and "
                "make the model with the same seed on all of them."
            )
            raise ConfigError(msg)
        return None
    if mesh.size() == 1:
        return None
    is_on_meta = any(param.is_meta for param in model.parameters())
    if first_of_all(is_on_meta, axes_of(mesh)):
        return None
    state = model.state_dict()
    other = {n: b.detach() for n, b in model.named_buffers() if n not in state}
    names_of: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names_of.setdefault(id(buffer), []).append(name)
    places = {name: names for names in names_of.values() for name in names}
    return Values(mesh, state, other, places)


def _set(model: nn.Module, names: list[str], value: Tensor) -> None:
    """Set the value of tensors with these names; those on meta become one tensor again."""
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        current = getattr(module, own)
        if current.is_meta:
            value = value.to(current.dtype)  # Sharding may have cast the other buffers.
            setattr(module, own, value)
        else:
            current.data.copy_(value)


# --- the config -----------------------------------------------------------------------------------

CONFIG_VARIABLE = "SHARDKIT_CONFIG"
"""Variable in which ``python -m shardkit launch`` passes the config's path to its ranks."""

_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def from_config(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Config:
    """Read a config file of ``accelerate config`` or ``python -m shardkit config``.

        config = shardkit.from_config("fsdp.yaml")
        model = config.apply(Model())

    The guide "Config files" explains each field.

    Args:
        source: A file of YAML or JSON, or a dict of the same fields. None: the file of ``python -m
            shardkit launch --config``, from the environment variable SHARDKIT_CONFIG.

    Raises:
        ConfigError: PyYAML is missing (``pip install 'shardkit[config]'``), the file cannot be
            read, or fields are unknown, wrong or contradictory. The error lists all of them, each
            with its line and what to write.

    Cost: no collective, no process group.
    """
    if source is None and not (source := os.environ.get(CONFIG_VARIABLE)):
        msg = (
            f"from_config() without a file reads the one that {CONFIG_VARIABLE} in the environment "
            f"names, and it is not set. Start the script by `python -m shardkit launch --config "
            f"F`, or pass the file: from_config(F)."
        )
        raise ConfigError(msg)
    found = Found(read(source))
    found.check()
    return Config(plain(found.document), settings_of(found))


class Config:
    """A config that has been read: its meaning, and methods that apply it.

    Get one by `from_config`.

    Args:
        fields: Fields as they were written.
        settings: Meaning of the fields.

    Attributes:
        settings: Meaning of the fields, in shardkit's terms. Do not change it.
    """

    def __init__(self, fields: dict[str, Any], settings: Settings) -> None:
        self._fields = fields
        self._mesh: DeviceMesh | None = None
        self._tensor_parallel_mesh: TorchDeviceMesh | None = None
        self.settings = settings

    # --- what it means ---

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they were written."""
        return dict(self._fields)

    @property
    def notes(self) -> tuple[str, ...]:
        """Fields in the config that have no effect, each with the reason."""
        return self.settings.notes

    @property
    def device_type(self) -> str:
        """Type of the device that computes: ``"cpu"``, ``"cuda"``, ..."""
        return self.settings.device_type or accelerator_type() or "cpu"

    def strategy(self) -> Strategy:
        """Return the strategy, for example `zero3` for FULL_SHARD."""
        return strategy(cast("StrategyName", self.settings.strategy))

    def mesh_shape(self) -> tuple[int, ...] | None:
        """Return the size of each axis; None: the config does not give the number of ranks.

        Raises:
            MeshError: The strategy has no mesh for this number of ranks.
        """
        sizes, number = self.settings.parallelism, self.settings.num_processes
        if sizes is not None:
            return tuple(size for _, size in _axes_of(sizes))
        if number is None:
            return None
        return self.strategy().mesh_shape(number, number // self.settings.num_machines)

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes of `mixed_precision`, which are those of Accelerate.

        Compute and reductions use this dtype; with `fsdp_version` 1 buffers do, too. If the model
        is replicated (MULTI_GPU, MULTI_CPU), gradients are reduced in fp32.
        """
        dtype = _DTYPES[self.settings.precision]
        if dtype is None:
            return MixedPrecisionPolicy()
        if not self.settings.is_fsdp:
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        buffer_dtype = dtype if self.settings.fsdp_version == 1 else None
        return MixedPrecisionPolicy(dtype, dtype, buffer_dtype=buffer_dtype)

    def offload_policy(self) -> OffloadPolicy:
        """Return the offload policy of `fsdp_offload_params`."""
        return CPUOffloadPolicy() if self.settings.offload_params else OffloadPolicy()

    def describe(self) -> str:
        """Return the meaning of the config: a line for each choice, then the notes."""
        settings, policy = self.settings, self.policy()
        chosen = self.strategy()
        wrapped = {
            "TRANSFORMER_BASED_WRAP": ", ".join(settings.transformer_layer_cls_to_wrap or ())
            or "what the model's _no_split_modules names",
            "SIZE_BASED_WRAP": f"modules from {settings.min_num_params:,} parameters on",
            "NO_WRAP": "the whole model",
        }
        copies = {"replicate": "rank", "hybrid": "machine", "hybrid_zero2": "machine"}
        holder = copies.get(settings.strategy)
        mesh = "one axis of all ranks" if holder is None else f"a copy for each {holder}"
        if (sizes := settings.parallelism) is not None:
            mesh = (
                f"dp_replicate {sizes.dp_replicate_size}, dp_shard {sizes.dp_shard_size}, "
                f"tp {sizes.tp_size}"
            )
        repeated = "each group" if settings.activation_checkpointing else "no"
        prefetch = f"forward {settings.forward_prefetch}, backward {settings.backward_prefetch}"
        lines = [
            f"strategy: {chosen.name} (split among ranks: {chosen.shards})",
            f"mesh: {self.device_type}, {mesh}",
            f"groups: {wrapped[settings.wrap]}",
            f"mixed precision: {policy if settings.precision != 'no' else 'no'}",
            f"offload: {'to the CPU' if settings.offload_params else 'no'}",
            f"activation checkpointing: {repeated}",
            f"prefetch: {prefetch}".replace("None", "as by default"),
            f"rank 0's values for all: {'yes' if settings.sync_module_states else 'no'}",
            f"state dict: {settings.state_dict_type}",
            *settings.notes,
        ]
        return "\n".join(lines)

    # --- what it does ---

    def mesh(self) -> DeviceMesh:
        """Return the mesh over which models are sharded: 1-D, or (replicate, shard).

        It is made once, over all ranks; call it on all of them. On an accelerator the current
        device is set first, to that of ``LOCAL_RANK``.

        Raises:
            MeshError: The number of ranks differs from the sizes of `parallelism_config`, or is not
                one with ``distributed_type: NO``, or no launcher started this process.

        Cost: one process group per axis.
        """
        if self._mesh is None:
            use_own_device(self.device_type)  # Accelerate does the same.
            if self.device_type == "xla":
                world_size = as_device_mesh(None, device_type="xla").size()
            else:
                world_size = world_size_or_raise()
            sizes = self.settings.parallelism
            if sizes is None:
                self._mesh = self._mesh_of_strategy(world_size)
            else:
                found = _of_sizes(sizes, self.device_type, world_size)
                self._mesh, self._tensor_parallel_mesh = found
        return self._mesh

    def _mesh_of_strategy(self, world_size: int) -> DeviceMesh:
        if self.settings.distributed_type == "NO" and world_size > 1:
            msg = (
                f"distributed_type is NO, which is one process, and there are {world_size} ranks. "
                f"Write distributed_type: FSDP."
            )
            raise MeshError(msg)
        chosen, machines = self.strategy(), self.settings.num_machines
        # Otherwise LOCAL_WORLD_SIZE of the launcher gives the number of ranks that share a copy.
        counts = "LOCAL_WORLD_SIZE" not in os.environ and world_size % machines == 0
        shape = chosen.mesh_shape(world_size, world_size // machines if counts else None)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=chosen.mesh_dim_names)

    def tensor_parallel_mesh(self) -> TorchDeviceMesh | None:
        """Return torch's 1-D mesh of the ``tp`` axis; None if `tp_size` is 1.

            parallelize_module(model, config.tensor_parallel_mesh(), plan)
            config.apply(model)

        Cost: see `mesh`.
        """
        self.mesh()
        return self._tensor_parallel_mesh

    def apply(
        self, model: nn.Module, *, param_init_fn: Callable[[nn.Module], object] | None = None
    ) -> FSDPModule:
        """Shard a model as the config says, in place. Call it on all ranks.

        With `mixed_precision`, trainable parameters become fp32 first, as in Accelerate, and the
        outermost module's output is fp32. Unlike Accelerate it opens no autocast. So norms, softmax
        and losses inside the model use the lower dtype, too; open `torch.autocast` where they
        should be fp32. With `fsdp_sync_module_states` or `fsdp_cpu_ram_efficient_loading`, which
        are the default, all ranks get rank 0's values, and the model of other ranks may be on the
        meta device. The optimizer may be made before or after.

        Args:
            model: Model that is not sharded, on the host, on the mesh's device, or on meta.
            param_init_fn: Function that initializes a model that is on meta on all ranks, see
                `materialize`. Without it such a model stays on meta: call `materialize`, or load a
                checkpoint.

        Returns:
            `model`.

        Raises:
            ConfigError: The pattern of `fsdp_ignored_modules` fits no module; or no parameter is
                split although `tp_size` is above 1. Nothing has been changed.
            WrapError: The model cannot be sharded in this way, see `auto_shard`: for example, it
                has no module of a class in `fsdp_transformer_layer_cls_to_wrap`. Parameters are as
                before.
            MeshError: See `mesh`.

        Cost: if rank 0's values are sent, broadcasts of all of them in parts of 16 MiB, and memory
        for the shards and one part. Otherwise none.
        """
        refuse_non_module(WrapError, model)
        refuse_non_functions(WrapError, param_init_fn=param_init_fn)
        settings, mesh = self.settings, self.mesh()
        self._check(model)
        ignored = self._ignored_params(model)
        kept = [(param, param.dtype, param.device) for param in model.parameters()]
        values = values_of(model, mesh) if settings.sync_module_states else None
        try:
            if values is not None:
                values.take(model, ignored)
            self._shard(model, mesh, ignored)
        except BaseException:
            if values is not None:
                values.put_back(model)
            for param, dtype, device in kept:
                if not isinstance(param, ShardedTensor):
                    param.data = param.data.to(device, dtype)
            raise
        self._set_prefetch(model)
        if values is not None:
            values.send(model)
        elif param_init_fn is not None:
            materialize(model, param_init_fn)
        return cast("FSDPModule", model)

    def save(
        self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
    ) -> None:
        """Save training state into a directory, by `fsdp_state_dict_type`. Call it on all ranks.

        - ``SHARDED_STATE_DICT``: a checkpoint of `shardkit.checkpoint.save`, with a file of each
          rank; it loads on any number of ranks.
        - ``FULL_STATE_DICT``: whole tensors by their names, in ``pytorch_model_fsdp.bin`` and
          ``optimizer.bin`` (Accelerate's names); rank 0 writes.
        - ``LOCAL_STATE_DICT``: each rank's pieces in a file, which load only with the same config.

        If the save is killed, `load` loads the save before it.

        Raises:
            CheckpointError: The state cannot be written, or `path` holds a checkpoint already
                (``SHARDED_STATE_DICT``).

        Cost: see `save`, `save_full` with `gather_optimizer_state`, `local_state_dict`.
        """
        from shardkit import checkpoint
        from shardkit.checkpoint._files.disk import refuse_url

        refuse_url(path)
        folder, kind = Path(path), self.settings.state_dict_type
        if kind == "SHARDED_STATE_DICT":
            checkpoint.save(folder, model, optimizer)
            return
        _on_all("make", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        if kind == "LOCAL_STATE_DICT":
            mine = [_local_file(folder, checkpoint.get_shard_metadata(model))]
            _finish_last(folder, mine)
            state = checkpoint.local_state_dict(model, optimizer)
            _on_all("write", mine[0], lambda: _write(mine[0], state))
        else:
            files = _full_files(folder, optimizer)
            mine = files if group_rank(None) == 0 else []
            _finish_last(folder, mine)
            checkpoint.save_full(_aside(files[0]), model)
            if optimizer is not None:
                state = checkpoint.gather_optimizer_state(model, optimizer)

                def write_optimizer() -> None:
                    for file in mine[1:]:
                        _write(file, {**state, _SAVED_WITH: _crc32(_aside(mine[0]))})

                _on_all("write", files[1], write_optimizer)
        _on_all("complete", folder, lambda: _name_all(mine))

    def load(
        self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
    ) -> None:
        """Load the state that `save` wrote, in place. Call it on all ranks.

        Raises:
            CheckpointError: The state is missing, does not fit, or is of two saves.
        """
        from shardkit import checkpoint

        folder, kind = Path(path), self.settings.state_dict_type
        if kind == "SHARDED_STATE_DICT":
            checkpoint.load(folder, model, optimizer)
        elif kind == "LOCAL_STATE_DICT":
            file = _local_file(folder, checkpoint.get_shard_metadata(model))
            (found,) = _of_one_save([file])
            state = _on_all("read", file, lambda: _read(found))
            _on_all("load", file, lambda: checkpoint.load_local_state_dict(model, state, optimizer))
        else:
            of_model, *of_optimizer = _of_one_save(_full_files(folder, optimizer))
            checkpoint.load_full(of_model, model)
            if optimizer is not None:
                whole = _on_all("read", of_optimizer[0], lambda: _read(of_optimizer[0]))
                checkpoint.scatter_optimizer_state(whole, model, optimizer, from_rank0=False)

    # --- parts of apply ---

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard a model over a mesh as the config says, without sending values; for plans.

        Args:
            model: Model that is not sharded, on the mesh's device or on meta.
            mesh: Mesh, in place of the config's own.

        Raises:
            ConfigError: The same as for `apply`.
            WrapError: The same as for `apply`.
        """
        self._check(model)
        self._shard(model, mesh, self._ignored_params(model))
        self._set_prefetch(model)

    def _set_prefetch(self, model: nn.Module) -> None:
        settings = self.settings
        chosen = {"forward": settings.forward_prefetch, "backward": settings.backward_prefetch}
        if given := {name: each for name, each in chosen.items() if each is not None}:
            cast("Any", model).set_prefetch_policy(**given)

    def _shard(self, model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
        settings = self.settings
        if settings.precision != "no":
            _make_masters(model, ignored)
        _move(model, mesh, ignored, offload=settings.offload_params)
        wrap: Any = settings.wrap  # A policy may have Accelerate's name.
        if settings.transformer_layer_cls_to_wrap is not None:
            wrap = set(settings.transformer_layer_cls_to_wrap)
        elif wrap == "SIZE_BASED_WRAP":
            wrap = size_policy(settings.min_num_params)
        policy = self.policy()
        root = dataclasses.replace(policy, output_dtype=torch.float32)
        auto_shard(
            model,
            mesh,
            wrap,
            units={"": {"mp_policy": root}} if settings.precision != "no" else (),
            strategy=self.strategy(),
            before=checkpoint_module if settings.activation_checkpointing else None,
            mp_policy=policy,
            offload_policy=self.offload_policy(),
            ignored_params=ignored,
        )

    def _check(self, model: nn.Module) -> None:
        sizes = self.settings.parallelism
        if sizes is None or sizes.tp_size == 1:
            return
        if all(tensor_parallel_of(param) is None for param in model.parameters()):
            msg = (
                f"tp_size is {sizes.tp_size}, but no parameter of this {type(model).__name__} is "
                f"split. Before apply call parallelize_module(model, "
                f"config.tensor_parallel_mesh(), plan), or write tp_size: 1."
            )
            raise ConfigError(msg)

    def _ignored_params(self, model: nn.Module) -> set[nn.Parameter]:
        pattern = self.settings.ignored_modules
        if pattern is None:
            return set()
        modules = [m for name, m in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not modules:
            names = [repr(name) for name, _ in model.named_modules() if name]
            msg = (
                f"fsdp_ignored_modules is {pattern!r}, which is the whole name of no module of "
                f"this {type(model).__name__}. Its modules have names such as "
                f"{', '.join(names[:3])}."
            )
            raise ConfigError(msg)
        return {param for module in modules for param in module.parameters()}


def _make_masters(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Convert trainable parameters to fp32, in which optimizers step."""
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point() and param not in ignored:
            wide = torch.promote_types(param.dtype, torch.float32)
            if param.dtype != wide:
                param.data = param.data.to(wide)


def _move(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter], *, offload: bool) -> None:
    """Move a model to the mesh's device, except tensors on meta and those that stay on the host."""
    device = mesh.backend.device
    for param in model.parameters():
        stays = offload and param not in ignored
        if not param.is_meta and param.device != device and not stays:
            param.data = param.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                exchange_buffer(module, name, buffer.to(device))
