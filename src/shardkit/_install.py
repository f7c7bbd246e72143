"""`install` puts shardkit in the place of FSDP2, for scripts that import FSDP2 from torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from shardkit._compat.once import wrapped
from shardkit._compat.torch_checkpoints import ASK_THE_CLASS, when_imported
from shardkit._errors import IntegrationError, ShardedTensorError, warn_user
from shardkit._mesh import DeviceMesh
from shardkit._module.fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    share_comm_ctx,
)
from shardkit._module.fully_shard import fully_shard, register_fsdp_forward_method
from shardkit._settings import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit._tensor.client_answers import answer_to, telling_the_truth
from shardkit._tensor.sharded import ShardedTensor, cut_whole, from_piece
from shardkit._tensor.spec import FlatShard, ShardSpec
from shardkit.backends import TorchDeviceMesh
from shardkit.backends.process_group import ProcessGroupBackend

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator


_logger = logging.getLogger("shardkit")

_OURS = {
    each.__name__: each
    for each in (
        fully_shard,
        FSDPModule,
        UnshardHandle,
        GradientReductionHandle,
        MixedPrecisionPolicy,
        OffloadPolicy,
        CPUOffloadPolicy,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
}
_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor")
"""Modules from which users import `distribute_tensor`."""

_PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""Modules from which users import FSDP2. Other parts of torch keep torch's objects."""

_COMPANIONS = {
    "accelerate": "shardkit.integrations.accelerate",
    "transformers": "shardkit.integrations.transformers",
}
"""Packages that use FSDP2 past its public names; `use` of each module here does the rest."""

_installed: list[Installed] = []


class Installed:
    """Record of what `install` has done. As a context manager it undoes that at the end."""

    def __init__(self) -> None:
        self._undoing: list[Callable[[], object]] = []
        self.brought_along: set[str] = set()

    def replace(self, owner: object, name: str, value: Any) -> None:
        """Replace a name of a module or class, and remember the former value."""
        former = inspect.getattr_static(owner, name)
        setattr(owner, name, staticmethod(value) if isinstance(former, staticmethod) else value)
        self.at_undo(functools.partial(setattr, owner, name, former))

    def wrap(self, owner: object, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace a function or a method by ``wrapper(original, *args, **kwargs)``."""
        self.replace(owner, name, wrapped(getattr(owner, name), wrapper))

    @property
    def has_replaced(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._undoing)

    def at_undo(self, call: Callable[[], object]) -> None:
        """Call a function at `undo`; the function that was given last is called first."""
        self._undoing.append(call)

    def after_import(self, name: str, then: Callable[[Any], None]) -> None:
        """Call a function with a module: now if it is imported, else right after its import."""
        finder = when_imported(name, then)
        self.at_undo(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)

    def undo(self) -> None:
        """Give torch's names back. Models that are sharded do not change.

        Nor do modules that were imported meanwhile: they keep the names that they got.
        """
        while self._undoing:
            self._undoing.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def once(in_use: list[Installed], replace_all: Callable[[Installed], None]) -> Installed:
    """Replace names, unless that was done before; undo everything if it raises.

    Args:
        in_use: Record of what is replaced now.
        replace_all: Function that replaces the names.
    """
    made = Installed()
    if not in_use:
        in_use.append(made)
        made.at_undo(in_use.clear)
        try:
            replace_all(made)
        except BaseException:
            made.undo()
            raise
    return made


def install() -> Installed:
    """Replace FSDP2 in torch, so that scripts and packages that import it use shardkit.

    ``from torch.distributed.fsdp import fully_shard`` then gives shardkit's function. The same
    holds for `FSDPModule`, `UnshardHandle`, the policies, `register_fsdp_forward_method` and
    `share_comm_ctx`, and for ``torch.distributed._composable.fsdp``. So an unchanged FSDP2 script
    trains with shardkit:

        import shardkit

        shardkit.install()
        import train  # The script.

    Modules outside of torch that imported these names earlier get shardkit's objects as well, under
    the names that they chose. Objects that they keep elsewhere, such as in a class or as a default
    argument, stay torch's: shardkit accepts torch's policies, but torch's `fully_shard` shards as
    FSDP2 does. So call this first. Torch's own modules continue to use FSDP2. Torch's pipelines
    recognize shardkit's modules by their base class.

    Until `undo()` ``isinstance(param, DTensor)`` is True for sharded tensors, as with FSDP2.

    If Accelerate is imported, before or after this call, `shardkit.integrations.accelerate.use` is
    called as well. That also serves the Trainer of transformers, and TRL. If the version of
    Accelerate is too old for that, a warning says so.

    Rank 0 logs once what was done, through the logger ``shardkit``. A second call changes nothing.

    Returns:
        Object whose `undo()` gives torch's names back, as does the end of ``with install():``. The
        object of a second call has nothing to undo.
    """
    return once(_installed, _take_the_place)


def _take_the_place(installed: Installed) -> None:
    import torch.distributed.fsdp as torch_fsdp  # noqa: TID251 - to replace its names
    import torch.distributed.tensor as torch_tensor  # noqa: TID251 - to replace its names

    # These use private parts of FSDP2's modules, or are the modules that define its names.
    importlib.import_module("torch.distributed.pipelining")
    importlib.import_module("torch.distributed._composable.fsdp")
    theirs = {name: getattr(torch_fsdp, name) for name in _OURS if hasattr(torch_fsdp, name)}
    ours = {**_OURS, "distribute_tensor": cutting(torch_tensor.distribute_tensor)}
    before = set()
    for module, attribute, name in _places_of(
        {**theirs, "distribute_tensor": torch_tensor.distribute_tensor}
    ):
        is_given_by_torch = module.__name__.startswith(_PACKAGES) or module.__name__ in _MODULES
        is_outside = module.__name__.split(".")[0] not in ("torch", "shardkit")
        if is_given_by_torch or is_outside:
            installed.replace(module, attribute, ours[name])
        if is_outside:
            before.add(f"{module.__name__}.{attribute}")
    _answer_as_dtensors(installed)
    _say(
        "shardkit is in the place of FSDP2: torch.distributed.fsdp gives shardkit's %s; "
        "isinstance(param, DTensor) is True of sharded ones.",
        ", ".join(theirs),
    )
    if before:
        _say(
            "imported before, and shardkit's now: %s. What these modules keep elsewhere is "
            "still torch's, so call shardkit.install() first.",
            ", ".join(sorted(before)),
        )
    for package in _COMPANIONS:
        installed.after_import(package, functools.partial(_bring_along, installed))


def _answer_as_dtensors(installed: Installed) -> None:
    """Let ``isinstance(param, DTensor)`` be True for sharded tensors, as with FSDP2."""
    import torch.distributed.tensor as torch_tensor  # noqa: TID251 - to be taken for its classes

    answer_to(torch_tensor.DTensor)
    installed.at_undo(functools.partial(answer_to, None))
    for name, wrap in (("from_local", joining), ("redistribute", redistributing)):
        value = wrap(getattr(torch_tensor.DTensor, name))
        installed.replace(torch_tensor.DTensor, name, value)

    def replace(owner: Any, name: str, module: types.ModuleType) -> None:
        owner = module if owner is None else getattr(module, owner, None)
        if hasattr(owner, name):
            installed.replace(owner, name, telling_the_truth(getattr(owner, name)))

    for place, name in ASK_THE_CLASS:
        module, _, owner = place.rpartition(".")
        of = (module, owner) if owner[0].isupper() else (place, None)
        installed.after_import(of[0], functools.partial(replace, of[1], name))


def cutting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``distribute_tensor``: given a sharded tensor's placements, it cuts in the same way.

    A tensor that is cut in this way already stays as it is; a DTensor is gathered first. Given
    torch's placements with a sharded tensor's mesh, it makes a DTensor of torch.

    Cost: a broadcast of the tensor on each axis of several ranks of the parameter's mesh, including
    axes of tensor parallelism, unless `src_data_rank` is None or the tensor is on meta.
    """

    @functools.wraps(original)
    def distribute_tensor(
        tensor: torch.Tensor,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        src_data_rank: int | None = 0,
    ) -> Any:
        flat = _flat_of(placements)
        if flat is None:
            mesh = _torch_mesh(device_mesh)
            return original(tensor, mesh, placements, src_data_rank=src_data_rank)
        spec = _spec_for(flat, "distribute_tensor", tensor, device_mesh, placements)
        if isinstance(tensor, ShardedTensor) and tensor.spec.same_cut(spec):
            return tensor
        if hasattr(tensor, "full_tensor"):  # It is distributed in another way, as a DTensor may be.
            return cut_whole(tensor.full_tensor(), spec)
        whole = tensor.detach()
        if not whole.is_meta:
            whole = whole.to(spec.mesh.backend.device)
        if src_data_rank is not None and not (whole.is_meta or spec.is_traced):
            whole = whole.clone(memory_format=torch.contiguous_format)
            # In the order of the mesh: the first rank of an axis has received what it sends on.
            for index in range(spec.mesh.ndim):
                spec.mesh.backend.axis(index).broadcast(whole, src_data_rank)
        piece = spec.slice_full(whole).clone()
        cut = ShardedTensor(piece if piece.is_meta else piece.to(spec.device), spec)
        return cut.requires_grad_(tensor.requires_grad)

    return distribute_tensor


def joining(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DTensor.from_local``: given a sharded tensor's placements, it takes a rank's piece.

    The result shares memory with the piece, and is differentiable. Nothing is sent or checked.
    Given torch's placements with a sharded tensor's mesh, it makes a DTensor of torch.
    """

    @functools.wraps(original)
    def from_local(
        local_tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        flat = _flat_of(placements)
        if flat is None:
            return original(local_tensor, _torch_mesh(device_mesh), placements, **options)
        spec, shape = flat.spec, tuple(local_tensor.shape)
        is_piece = spec is not None and shape == (spec.piece_numel,)
        if spec is None or not is_piece or isinstance(local_tensor, ShardedTensor):
            whose = "no tensor's own"
            if spec is not None:
                whose = f"those of sharded {spec.name!r}, whose shard here is ({spec.piece_numel},)"
            msg = (
                f"DTensor.from_local got placements {tuple(placements)}, which are {whose}, for a "
                f"{type(local_tensor).__name__} of shape {shape}. Pass a tensor like to_local() of "
                f"that parameter. For a whole tensor call distribute_tensor."
            )
            raise ShardedTensorError(msg)
        _check_mesh("DTensor.from_local", device_mesh, spec)
        return from_piece(local_tensor.to(spec.device), spec)

    return from_local


def redistributing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DTensor.redistribute``: given a sharded tensor's placements, it cuts in the same way.

    Cost: that of the DTensor's ``full_tensor()``.
    """

    @functools.wraps(original)
    def redistribute(
        self: Any, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        flat = _flat_of(placements)
        if flat is None:
            return original(self, _torch_mesh(device_mesh), placements, **options)
        mesh = self.device_mesh if device_mesh is None else device_mesh
        spec = _spec_for(flat, "DTensor.redistribute", self, mesh, placements)
        return cut_whole(self.full_tensor(), spec)

    return redistribute


def _torch_mesh(mesh: Any) -> Any:
    """Return torch's mesh for the mesh of a sharded tensor; anything else as it is."""
    backend = mesh.backend if isinstance(mesh, DeviceMesh) else None
    return backend.as_torch(mesh) if isinstance(backend, ProcessGroupBackend) else mesh


def _spec_for(
    flat: FlatShard, asked: str, tensor: torch.Tensor, mesh: Any, placements: Any
) -> ShardSpec:
    """Return the cut that placements come from, for a whole tensor.

    Raises:
        ShardedTensorError: They come from none, or from that of a tensor of another shape, or the
            mesh is another one.
    """
    spec = flat.spec
    if spec is None or tuple(tensor.shape) != tuple(spec.shape):
        whose = "no tensor's own" if spec is None else f"those of {tuple(spec.shape)}"
        msg = (
            f"{asked} got placements {tuple(placements)}, which are {whose}, for a "
            f"tensor of shape {tuple(tensor.shape)}. Pass the placements of the sharded "
            f"parameter that it is for, or call fully_shard on a module that holds it."
        )
        raise ShardedTensorError(msg)
    _check_mesh(asked, mesh, spec)
    return spec


def _flat_of(placements: Any) -> FlatShard | None:
    """Return the placement of ours among placements, or None."""
    return next((each for each in placements or () if type(each) is FlatShard), None)


def _check_mesh(asked: str, mesh: Any, spec: ShardSpec) -> None:
    """Refuse a mesh other than the parameter's; None, and torch's mesh of the same ranks, are fine.

    Raises:
        ShardedTensorError: The mesh is another one.
    """
    own = spec.mesh
    is_own = mesh is None or mesh == own
    if isinstance(mesh, TorchDeviceMesh):
        ranks = tuple(mesh.mesh.flatten().tolist())
        theirs = (mesh.device_type, tuple(mesh.mesh.shape), ranks)
        is_own = theirs == (own.device_type, own.shape, own.ranks)
    if not is_own:
        msg = (
            f"{asked} got device_mesh={mesh!r} with the placements of sharded "
            f"{spec.name!r}, which lies on the mesh of shape {own.shape} and ranks "
            f"{own.describe_ranks()}. Pass the device_mesh of that parameter as well."
        )
        raise ShardedTensorError(msg)


def _bring_along(installed: Installed, package: types.ModuleType) -> None:
    """Let a package that was imported use shardkit as well."""
    name = package.__name__
    integration: Any = importlib.import_module(_COMPANIONS[name])
    if not hasattr(integration, "use") or name in installed.brought_along:
        return  # The integration is importing the package, and calls `catch_up` at its end.
    installed.brought_along.add(name)
    try:
        used = integration.use()
    except IntegrationError as error:
        refuse_or_warn(name, error)
        return
    if not used.has_replaced:  # The user called `use` before, and gets the errors.
        installed.brought_along.discard(name)
        return
    installed.at_undo(used.undo)
    _say("shardkit is in the place of FSDP2 in %s, too.", name)


def catch_up(package: str) -> None:
    """Finish `install` at the end of an integration that imports its package itself."""
    for installed in _installed:
        _bring_along(installed, sys.modules[package])


def refuse_or_warn(package: str, error: IntegrationError) -> None:
    """Raise an error of an integration; only warn of it if `install` alone called the integration.

    A script that only calls `install` may import the package for something else.
    """
    if not any(installed.brought_along for installed in _installed):
        raise error
    warn_user(f"shardkit.install() does not reach into {package}: {error}")


def _say(text: str, *args: object) -> None:
    """Log on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        _logger.warning(text, *args)


def _places_of(theirs: dict[str, Any]) -> Iterator[tuple[types.ModuleType, str, str]]:
    """Yield each loaded module that has one of torch's objects, its name there, and torch's name.

    The files of FSDP2 itself are left out: they continue to use their own objects.
    """
    home = Path(inspect.getfile(inspect.unwrap(theirs["fully_shard"]))).parent
    by_id = {id(value): name for name, value in theirs.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        file = Path(names.get("__file__") or "")
        if file.parent == home and file.stem != "__init__":
            continue
        for attribute, value in list(names.items()):
            name = by_id.get(id(value))
            if name is not None:
                yield module, attribute, name
