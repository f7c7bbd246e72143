"""What a bucket keeps its parameters in: this rank's shard, and the unsharded parameters.

`Store` says what every kind can do. The kinds are `flat_store`, for plain parameters and DTensors,
`packed_store`, for frozen parameters over several tensors, `subclass_store`, for parameters that
gather themselves, and `traced_store`, where operators are traced into a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardkit._custom_comm import GradientPiece
from shardkit._params.freed import NAME_ATTRIBUTE, class_without_memory
from shardkit._tensor.sharded import user_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._custom_comm import AllGather
    from shardkit._params.memory import SlotPool
    from shardkit._params.plan import BucketPlan
    from shardkit._params.send_buffer import GradientBuffer
    from shardkit._params.sites import ParamEntry
    from shardkit._tensor.sharded import ShardedTensor
    from shardkit._tensor.spec import ShardSpec
    from shardkit.backends.base import AxisComm
    from shardkit.backends.events import Event


class Store(ABC):
    """The shard of a bucket, and its unsharded parameters, whose memory comes and goes.

    Args:
        plan: Plan of the bucket.
        entries: Parameters of the bucket: ordinary ones, or sharded ones that were cut in the same
            way.

    Attributes:
        layout: Layout of the bucket.
        specs: Cut of each parameter.
        unsharded: Parameters that modules hold while the memory is there.
        bucket_id: Number of the bucket where collectives are traced.
        aliases_shard: Whether the unsharded memory is the shard itself, so that nothing is
            gathered.
        keeps_flats: Whether reduced gradients are views of one tensor, as the pieces are of the
            shard.
        converts_gradients: Whether gradients are passed through `part_of_gradient`.
        keeps_writes: Whether writes of a forward to an unsharded parameter can be kept.
        why_lost: Reason why such writes are lost, in the middle of a sentence.
    """

    layout: Any
    specs: list[ShardSpec]
    unsharded: list[nn.Parameter]
    bucket_id = 0
    aliases_shard = False
    keeps_flats = True
    converts_gradients = False
    keeps_writes = False
    why_lost = ""

    def __init__(self, plan: BucketPlan, entries: Sequence[ParamEntry]) -> None:
        self.plan = plan
        self.entries = entries
        self._gathered_version = -1
        self._classes: list[type] = []

    # --- the shard ---

    @abstractmethod
    def sharded(self, index: int) -> ShardedTensor:
        """Return parameter `index` as a tensor over its piece of the shard."""

    @abstractmethod
    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Return this rank's piece of a whole gradient of parameter `index`, copied."""

    @abstractmethod
    def has_piece_of(self, index: int) -> bool:
        """Whether parameter `index` still has its piece here; not after ``.to(dtype)``."""

    @abstractmethod
    def piece(self, reduced: Tensor, index: int) -> Tensor:
        """Return the part of a reduced gradient, as long as a shard, that is of one parameter."""

    @property
    @abstractmethod
    def shard_version(self) -> int:
        """Raised by every write to the shard."""

    @property
    @abstractmethod
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shard."""

    # --- the unsharded parameters ---

    @property
    @abstractmethod
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters while they exist; 0 where they are the shard."""

    @property
    @abstractmethod
    def has_memory(self) -> bool:
        """Whether there is memory that was gathered into, or is about to be."""

    @property
    def is_stale(self) -> bool:
        """Whether the shard changed since it was gathered."""
        return self.has_memory and self._gathered_version != self.shard_version

    @abstractmethod
    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory for the unsharded parameters; return the fence to wait for before a write."""

    @abstractmethod
    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Give the memory back; its readers are done at `fence`."""

    @abstractmethod
    def gather_jobs(self, comm: AllGather | None) -> list[Any]:
        """Return what the backend has to gather."""

    def finish_gather(self) -> None:  # noqa: B027 - for stores that need it
        """Do what is left to do when everything has come."""

    def _new_unsharded(self, index: int, data: Tensor) -> nn.Parameter:
        """Return the parameter that is shown in the place of a sharded one."""
        entry = self.entries[index]
        param = nn.Parameter(data, requires_grad=entry.param.requires_grad)
        own = param.__dict__
        own.update({k: v for k, v in user_attributes(entry.param).items() if k not in own})
        own[NAME_ATTRIBUTE] = entry.name
        return param

    def attributes_of(self, index: int) -> dict[str, Any]:
        """Return what users have set on parameter `index`, which the sharded one gets."""
        return user_attributes(self.entries[index].param)

    def rename(self, index: int, name: str) -> None:
        """Give a parameter its full name."""
        self.specs[index].name = name
        self.unsharded[index].__dict__[NAME_ATTRIBUTE] = name

    def drop_originals(self) -> None:  # noqa: B027 - for stores that need it
        """The whole parameters are not needed any more; let go what else refers to them."""

    def _note_classes(self) -> None:
        """Remember of which classes the unsharded parameters are."""
        self._classes = [type(param) for param in self.unsharded]

    def _allow_use(self) -> None:
        """Let the unsharded parameters be used."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = cls

    def _refuse_use(self) -> None:
        """Let any use of the unsharded parameters raise."""
        for param, cls in zip(self.unsharded, self._classes, strict=True):
            param.__class__ = class_without_memory(cls)

    # --- what a forward writes to its own parameters ---

    def written_to(self, index: int) -> Sequence[Tensor]:
        """Return the tensors whose version counters tell of writes to an unsharded parameter."""
        return (self.unsharded[index],)

    def has_moved(self) -> bool:
        """Whether a parameter was given other memory, by ``param.data = ...``."""
        return False

    def take_back(self) -> Sequence[int]:
        """Lay parameters that have moved over the unsharded memory again, with their values."""
        return ()

    def unsharded_values(self, index: int) -> Tensor:
        """Return what an unsharded parameter lies over: plain, in compute dtype."""
        raise NotImplementedError(index)

    def keep_written(self, index: int) -> None:
        """Take what was written to an unsharded parameter over into the shard."""
        raise NotImplementedError(index)

    # --- a part that stays between forward and backward ---

    @property
    def kept_part(self) -> Any:
        """What `keep_part` has kept; None: nothing."""
        return None

    def keep_part(self, axis: AxisComm, fence: Callable[[], Event | None]) -> None:
        """Keep this rank's part on a smaller axis, over which backward gathers; or nothing."""
        del axis, fence

    def drop_part(self) -> None:  # noqa: B027
        """Forget what was kept."""

    # --- gradients ---

    @abstractmethod
    def new_gradient_buffer(self, receive_chunks: int) -> GradientBuffer:
        """Return what collects gradients and sends them; it receives so many shards' worth."""

    def gradient_pieces(self) -> list[GradientPiece]:
        """Return what lies where in this rank's range of the bucket."""
        rank, layout = self.plan.axis.rank, self.layout
        pieces = []
        for i, entry in enumerate(self.entries):
            start, stop = layout.owned_range(i, rank)
            offset, _ = layout.shard_range(i, rank)
            pieces.append(GradientPiece(entry.name, layout.shapes[i], start, stop, offset))
        return pieces

    def part_of_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return the plain tensor of a gradient, if `converts_gradients`; may be collective."""
        del index
        return grad
