"""Answers of `ShardedTensor` to packages that know FSDP2.

They look for the names of a DTensor: `_local_tensor`, `_spec`, the class itself. And they ask for
memory, mostly to find out whether two parameters are the same.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import dlpack, weak

from shardkit._compat import torch_tensors
from shardkit._errors import ShardedTensorError
from shardkit._host_values import HostValues

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, MutableMapping

    from shardkit._tensor.spec import ShardSpec

P = ParamSpec("P")
R = TypeVar("R")

_own_storages: weakref.WeakKeyDictionary[ShardSpec, torch.UntypedStorage] = (
    weakref.WeakKeyDictionary()
)
"""Memory for empty pieces, which have none: it gives each parameter an address."""


_FIRST_ADDRESS, _ADDRESS_NBYTES = 0xFF80 << 48, 2**54
"""A range of addresses that no process can read, on the host and on accelerators."""
_ADDRESS_ALIGNMENT = 512

_addresses: MutableMapping[Tensor, int] = weak.WeakTensorKeyDictionary()
"""Addresses of wholes, by piece. No two wholes overlap, nor do views of them."""
_taken_nbytes = 0
_address_lock = threading.Lock()


class _Claimed:
    """Class that sharded tensors claim beside their own; None: no other."""

    cls: type | None = None


_truth = threading.local()
"""Thread-local: it has `is_asked` in a thread that needs the real class of objects."""


def answer_to(cls: type | None) -> None:
    """Let sharded tensors answer ``isinstance(p, cls)`` with True from now on; None: end that.

    Python first checks the class of an object, then the class that the object claims. So all checks
    that were True stay True, and `type` returns the real class.
    """
    _Claimed.cls = cls


def telling_the_truth(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of torch that needs the real class of a tensor (`answer_to`)."""

    @functools.wraps(function)
    def asking(*args: P.args, **kwargs: P.kwargs) -> R:
        before = getattr(_truth, "is_asked", False)
        _truth.is_asked = True
        try:
            return function(*args, **kwargs)
        finally:
            _truth.is_asked = before

    return asking


def _package_of(frame: types.FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


class ClaimsClass:
    """A tensor that claims another class beside its own (`answer_to`)."""

    # Whether it does not claim the class if code of torch asks.
    tells_torch_the_truth: ClassVar[bool] = False

    @property
    def __class__(self) -> type:
        """The class, or the claimed one (`answer_to`), but the class for torch's dispatcher."""
        claimed = _Claimed.cls
        if claimed is None or getattr(_truth, "is_asked", False) or torch_tensors.in_dispatch():
            return type(self)
        asking = sys._getframe(1)  # noqa: SLF001 - documented for this use
        if self.tells_torch_the_truth and _package_of(asking) == "torch":
            return type(self)
        return claimed

    @__class__.setter
    def __class__(self, cls: type) -> None:
        if cls is _Claimed.cls:
            return  # `swap_tensors` sets what it read from another sharded tensor.
        object.__dict__["__class__"].__set__(self, cls)


def refused_grad_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> str | None:
    """Return why gradients of parameters of a dtype cannot have a wanted one; None: they can."""
    if wanted in (None, dtype) or (dtype.is_floating_point and wanted.is_floating_point):
        return None
    return (
        f"gradients of {dtype} are averaged over the ranks, and {wanted} would round them or drop "
        f"a part of them. Set grad_dtype to {dtype}, or to another floating-point dtype if the "
        f"parameter has one."
    )


class MeshAndPlacements:
    """The part of a DTensor's spec that a sharded tensor has, too.

    A real spec says which rows a rank has, and a piece is a range of elements.

    Attributes:
        device_mesh: Mesh of the ranks.
        placements: Placement on each axis of the mesh.
        shape: Shape of the whole tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.device_mesh = self.mesh = tensor.device_mesh
        self.placements, self.shape = tensor.placements, tensor.shape
        self._name = tensor.spec.name

    def __getattr__(self, name: str) -> Any:
        """Refuse all else.

        Raises:
            AttributeError: Always, so that `hasattr` is False.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        msg = (
            f"_spec of sharded {self._name!r} has no {name}: a DTensorSpec says which rows a rank "
            f"has, and this shard is a range of elements. Use to_local(), full_tensor(), "
            f"device_mesh and placements."
        )
        raise AttributeError(msg)

    def __reduce__(self) -> Any:
        """Refuse: a DTensor of this piece cannot be made elsewhere.

        Raises:
            ShardedTensorError: Always.
        """
        msg = (
            f"_spec of sharded {self._name!r} cannot be pickled: no DTensor can be made of a range "
            f"of elements. Send full_tensor(), or a checkpoint."
        )
        raise ShardedTensorError(msg)


class ClientAnswers(ClaimsClass, HostValues):
    """The part of a `ShardedTensor` that only other packages need, as they do of a DTensor."""

    local_piece: Tensor
    spec: ShardSpec

    @property
    def _local_tensor(self) -> Tensor:
        """The piece, as `to_local` returns it when autograd does not record."""
        return self.local_piece

    @_local_tensor.setter
    def _local_tensor(self, piece: Tensor) -> None:
        """Use another piece from now on, without a copy, as `replace_piece` does.

        Raises:
            ShardedTensorError: The piece has another number of elements.
        """
        wanted = tuple(self.local_piece.shape)
        if tuple(piece.shape) != wanted:
            msg = (
                f"_local_tensor of sharded {self.spec.name!r} must be this rank's shard, of shape "
                f"{wanted}, got {tuple(piece.shape)}. Whole tensors are written by copy_."
            )
            raise ShardedTensorError(msg)
        self.replace_piece(piece)

    replace_piece: Callable[[Tensor], None]

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the gradient: that of this tensor, or the one that was set.

        None: the gradient keeps the dtype in which ranks reduced it.
        """
        return self._grad_dtype.__get__(self)  # type: ignore[no-any-return]

    @grad_dtype.setter
    def grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Choose the dtype of gradients, from the next forward on.

        Raises:
            ShardedTensorError: It cannot hold gradients of this tensor.
            RuntimeError: There is a gradient of another dtype; torch raises.
        """
        refusal = refused_grad_dtype(self.dtype, dtype)
        if refusal is not None:
            msg = f"sharded {self.spec.name!r} cannot take grad_dtype={dtype}: {refusal}"
            raise ShardedTensorError(msg)
        is_new = dtype is not self.grad_dtype
        self._grad_dtype.__set__(self, dtype)
        if is_new and isinstance(self, torch.nn.Parameter):
            self.replace_piece(self.local_piece)  # So its group sees it, as it sees conversions.

    @property
    def _grad_dtype(self) -> Any:
        """The attribute of torch, which is missing in torch 2.9."""
        return torch.Tensor.grad_dtype

    @property
    def _spec(self) -> MeshAndPlacements:
        """The part of a DTensor's spec that a sharded tensor has, too."""
        return MeshAndPlacements(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of this rank's piece alone.

        Its address distinguishes parameters. So an empty piece has an address as well, which all
        tensors of its parameter share.
        """
        piece = self.local_piece
        if type(piece) is not Tensor or piece.is_meta or piece.device.type == "xla":
            return piece.untyped_storage()
        if piece.numel():
            # A storage that begins at the piece, because all pieces of a bucket share one storage.
            there = piece.detach().view(torch.uint8)
            return dlpack.from_dlpack(there).untyped_storage()
        if self.spec not in _own_storages:
            _own_storages[self.spec] = torch.UntypedStorage(1, device=piece.device)
        return _own_storages[self.spec]

    def storage(self) -> Any:
        """Refuse: writers of whole files call it, such as transformers' `save_pretrained`."""
        raise self._no_whole()

    def data_ptr(self) -> int:
        """Return an address that distinguishes tensors, but where no memory is; see `address`."""
        return self.address(sys._getframe(1))  # noqa: SLF001 - documented for this use

    def address(self, asking: types.FrameType, offset: int = 0) -> int:
        """Return the address of a byte of the whole, which no rank has in its memory.

        Packages find state, and tied parameters, by the address of a tensor. So tensors that share
        this rank's piece have one address, and others have another. Code that reads from there
        fails. Torch asks to learn that the tensor has no memory of its own: it gets 0, as of a
        DTensor.

        Args:
            asking: Frame that asks.
            offset: Position of the byte in the whole.

        Raises:
            ShardedTensorError: safetensors asks, which would read the whole tensor there.
        """
        global _taken_nbytes  # noqa: PLW0603 - addresses are of the process, too
        package = _package_of(asking)
        if package == "safetensors":
            raise self._no_whole()
        piece = self.local_piece
        if package == "torch" or piece.is_meta:
            return 0
        with _address_lock:
            first = _addresses.get(piece)
            if first is None:
                first = _addresses[piece] = _FIRST_ADDRESS + _taken_nbytes % _ADDRESS_NBYTES
                blocks = self.numel() * self.element_size() // _ADDRESS_ALIGNMENT + 1
                _taken_nbytes += blocks * _ADDRESS_ALIGNMENT
        return first + offset

    def _no_whole(self) -> ShardedTensorError:
        """Return the error for a writer of files that asks for the memory of the whole."""
        msg = (
            f"sharded {self.spec.name!r} has no storage of the whole tensor, which a writer of "
            f"files asks for (save_pretrained, safetensors). Save the whole model, on all ranks, "
            f'by shardkit.checkpoint.save_full(path, model, format="safetensors").'
        )
        return ShardedTensorError(msg)
