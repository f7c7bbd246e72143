"""Forwards and backwards of a root on a backend that traces each rank's computation.

A root's forward takes its batch into the region of the ranks, and its outputs out of it. So a
training loop is written as for one process: a loss of the outputs is that of the whole batch.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._errors import StateError
from shardkit._params.bucket import Bucket, bucket_showing
from shardkit._params.traced_store import TracedStore
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tree import Undo, iter_tensors, map_inputs, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit._params.gradients import UnshardedGrad
    from shardkit._runtime.group import ParamGroup
    from shardkit._settings import RootSettings
    from shardkit.backends.base import Region


# --- what autograd saves --------------------------------------------------------------------------


def pack(tensor: Tensor) -> Any:
    """Save an unsharded parameter, or a view of one, as a reference and not by its contents.

    It is for `torch.autograd.graph.saved_tensors_hooks`. Backward then uses newly gathered
    parameters, and between forward and backward nothing is kept alive.
    """
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - documented
    bucket = bucket_showing(base)
    if bucket is None:
        return tensor
    index = next(i for i, param in enumerate(bucket.store.unsharded) if param is base)
    view: Any = None if tensor is base else tensor._view_func  # type: ignore[attr-defined]  # noqa: SLF001

    def restored() -> Tensor:
        whole = bucket.store.unsharded[index].detach()
        return whole if view is None else view(whole)

    return restored


def unpack(saved: Any) -> Tensor:
    """Return the tensor that `pack` saved."""
    tensor: Tensor = saved if isinstance(saved, Tensor) else saved()
    return tensor


# --- buffers and plain parameters -----------------------------------------------------------------


class RegionTensors:
    """What modules hold beside sharded parameters, while a root's forward runs in a region.

    Of buffers modules hold one rank's part, so that a rank's part is written. Plain parameters are
    ignored ones, and values of `functional_call`; their gradients are sums over the ranks.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
        self._held: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._module: nn.Module | None = None
        self._numbers: list[Tensor] = []

    def enter(self, module: nn.Module) -> None:
        """Let modules hold what the region computes with."""
        self._module = module
        self._numbers = [number for *_, number in numbers_of(module)]
        entered: dict[int, Tensor] = {}
        for child, name, buffer in buffers_of(module):
            if id(buffer) not in entered:
                entered[id(buffer)] = self._region.enter_shared(_whole(buffer).detach())
            local = entered[id(buffer)]
            self._buffers.append((child, name, buffer, local, torch_tensors.version_of(local)))
            self._hold(child._buffers, name, buffer, local)  # noqa: SLF001 - past `setattr`
        self.enter_params(module)

    def enter_params(self, module: nn.Module) -> None:
        """Let modules hold what the region computes with in place of plain parameters."""
        entered: dict[int, Tensor] = {}
        for child, name, param in plain_params_of(module):
            if id(param) not in entered:
                entered[id(param)] = self._region.enter_shared(_whole(param))
            self._hold(child._parameters, name, param, entered[id(param)])  # noqa: SLF001

    def _hold(self, holder: dict[str, Any], name: str, whole: Tensor, local: Tensor) -> None:
        self._held.append((holder, name, whole, local))
        holder[name] = local

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def average(self) -> None:
        """Take out what forwards wrote to buffers, or put in their place: statistics, counters.

        Raises:
            StateError: Another tensor is in a buffer's place, and has another shape.
        """
        done: dict[int, Tensor] = {}
        for child, name, buffer, local, version in self._buffers:
            held = child._buffers.get(name)  # noqa: SLF001 - what the forward has left there
            if held is None or (held is local and not was_written(child, local, version)):
                continue
            if held.shape != buffer.shape:
                msg = (
                    f"a forward has put a tensor of shape {tuple(held.shape)} in the place of the "
                    f"buffer {name!r}, of shape {tuple(buffer.shape)}. On XLA devices it cannot be "
                    f"put together from those of the ranks: return it."
                )
                raise StateError(msg)
            if id(held) not in done:
                done[id(held)] = self._region.leave_shared(self._region.agree(held.detach()))
                if held is local:
                    buffer.copy_(done[id(held)])
            if held is not local:
                child._buffers[name] = done[id(held)]  # noqa: SLF001 - past `setattr`
        self._buffers.clear()

    def restore(self) -> None:
        """Let modules hold their own tensors again, and also buffers after an exception."""
        for child, name, buffer, *_ in self._buffers:
            child._buffers[name] = buffer  # noqa: SLF001 - what a forward has put there is lost
        for holder, name, whole, local in self._held:
            if holder.get(name) is local:
                holder[name] = whole
        self._held.clear()
        self._buffers.clear()
        self._module, self._numbers = None, []

    def kept_numbers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return the numbers that forwards have left in attributes of modules, as `numbers_of`."""
        if self._module is None:
            return []
        before = {id(number) for number in self._numbers}
        return [each for each in numbers_of(self._module) if id(each[2]) not in before]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def plain_params_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the parameters of a module and of those in it that are not sharded, as `buffers_of`."""
    for child in module.modules():
        for name, param in child._parameters.items():  # noqa: SLF001 - tied ones as well
            if param is None or bucket_showing(param) is not None:
                continue
            if not (isinstance(param, ShardedTensor) and isinstance(param, nn.Parameter)):
                yield child, name, param


def buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the buffers of a module and of those in it, with their holders and names."""
    for child in module.modules():
        for name, buffer in child._buffers.items():  # noqa: SLF001 - tied ones as well
            if buffer is not None:
                yield child, name, buffer


def numbers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors without dims that modules hold as plain attributes, as `buffers_of`."""
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.ndim == 0 and value.device.type != "cpu":
                yield child, name, value


def was_written(module: nn.Module, buffer: Tensor, version: int) -> bool:
    """Return whether a module wrote to its buffer, which had `version` before."""
    # Kernels of batch normalization do not raise versions.
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001
    return torch_tensors.version_of(buffer) != version or (is_norm and module.training)


# --- passes ---------------------------------------------------------------------------------------

_SHARED = "_shardkit_shared"
_local = threading.local()


def open_passes() -> TracedPasses | None:
    """Return the traced passes whose root's forward is under way in this thread, if any."""
    passes: TracedPasses | None = getattr(_local, "open", None)
    return passes


def shared_input(tensor: Tensor) -> Tensor:
    """Mark an input of a root as the same for all ranks, so that XLA's SPMD mode does not split it.

    On XLA devices an input is split over the ranks if its dim 0 is as long as that of the first
    tensor among the inputs. A marked tensor is not split, such as a mask or a table that is as long
    as the batch by chance. On other devices this has no effect: there each rank passes its own
    inputs.

    Args:
        tensor: Tensor to mark.

    Returns:
        The same `tensor`, marked.
    """
    setattr(tensor, _SHARED, True)
    return tensor


class Passes:
    """Work around a root's forwards and backwards beside gathers and reductions.

    If operators are not traced, that is very little: inputs go to the parameters' device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self, module: nn.Module, args: Any, kwargs: Any, undo: Undo) -> tuple[Any, Any]:
        """Begin a root's forward; return its inputs."""
        del module
        if self._device.type == "cpu":
            return args, kwargs
        return map_inputs(self._to_device, args, kwargs, undo)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def progress(self, tree: Any) -> None:
        """Note that a module in the root is entered with these inputs."""

    def leave(self, output: Any, in_use: Callable[[int], bool]) -> Any:
        """End a root's forward; return its outputs."""
        del in_use
        return output

    def abandon(self) -> None:
        """End a root's forward after an exception."""

    def enter_backward(self, group: ParamGroup, grad: Tensor) -> None:
        """Note that backward reaches a group with a gradient of its outputs."""

    def enter_gradients(
        self, group: ParamGroup, grads: Sequence[UnshardedGrad]
    ) -> Sequence[UnshardedGrad]:
        """Return this rank's parts of gradients of unsharded parameters."""
        del group
        return grads

    def leave_gradient(self, grad: Tensor) -> Tensor:
        """Return what a user sees of the gradient of an unsharded parameter, before the average."""
        return grad

    def end_backward(self, in_use: Callable[[int], bool]) -> None:
        """End a backward."""

    def show_outside(self, groups: Sequence[ParamGroup]) -> None:
        """Show groups that were unsharded by hand to the code that runs the model."""

    def finish_graph(self) -> None:
        """Run what was traced, before the host reads a result."""


class TracedPasses(Passes):
    """The `Passes` of a backend that traces operators into a graph."""

    def __init__(
        self, region: Region, groups: Sequence[ParamGroup], settings: RootSettings
    ) -> None:
        super().__init__(region.device)
        self.region = region
        self._groups = groups
        self._settings = settings
        self._open: contextlib.ExitStack | None = None
        self._tensors = RegionTensors(region)
        self._entered: set[int] = set()
        self._comes_from_output = False

    # --- a root's forward ---

    def enter(self, module: nn.Module, args: Any, kwargs: Any, undo: Undo) -> tuple[Any, Any]:
        """Take a batch, and everything else that the forward uses, into the region.

        Containers in a batch of SPMD mode are copied: what the forward writes stays in the region.

        Raises:
            StateError: The batch cannot be split evenly, or is hidden in an object.
        """
        self.abandon()
        self.region.progress(None)
        if not torch.is_grad_enabled():
            self.region.forget_collectives()
        with contextlib.ExitStack() as stack:
            if self.region.is_spmd:
                args, kwargs = self._enter_inputs(args, kwargs)
                self._move(self._groups, self.region.enter_shared, outside=False)
                stack.callback(self._tensors.restore)
                self._tensors.enter(module)
            else:
                args, kwargs = super().enter(module, args, kwargs, undo)
            if torch.is_grad_enabled() and not torch_autograd.has_saved_tensors_hooks():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            stack.enter_context(self.region.draw_apart())
            _local.open = self
            self._open = stack.pop_all()
        return args, kwargs

    def leave(self, output: Any, in_use: Callable[[int], bool]) -> Any:
        """Take outputs out of the region; `in_use` returns whether the user holds a group.

        Raises:
            StateError: All tensors of the output are hidden in objects.
        """
        if not self.region.is_spmd:
            self.abandon()
            return output
        self._tensors.average()
        kept = self._tensors.kept_numbers()
        self.abandon()
        for child, name, number in kept:
            vars(child)[name] = self._leave_output(number)
        for group in self._groups:
            if not in_use(group.index):
                group.show(unsharded=False)  # Else a user would see one rank's kept parameters.
        self._move(
            [group for group in self._groups if in_use(group.index)],
            self.region.leave_shared,
            outside=True,
        )
        _refuse_hidden(output, "returned")
        return map_tensors(self._leave_output, output)

    def abandon(self) -> None:
        """Close a forward, even if it ended in an exception."""
        if self._open is not None:
            stack, self._open = self._open, None
            _local.open = None
            stack.close()
        self._entered.clear()
        self._comes_from_output = False
        self.region.progress(None)

    def progress(self, tree: Any) -> None:
        """Let later gathers come after the first tensor in `tree`, a module's inputs."""
        first = next(iter_tensors(tree), None)
        if first is not None:
            self.region.progress(first)
        self.region.gathers_wait = self._settings.barrier_in_forward

    def enter_backward(self, group: ParamGroup, grad: Tensor) -> None:
        """Note that backward reaches a group with a gradient of its outputs."""
        self._entered.add(group.index)
        if self.region.is_spmd:  # The user may have looked at it, too.
            self._move([group], self.region.enter_shared, outside=False)
        self.region.progress(grad)
        self.region.gathers_wait = self._settings.barrier_in_backward

    def enter_gradients(
        self, group: ParamGroup, grads: Sequence[UnshardedGrad]
    ) -> Sequence[UnshardedGrad]:
        """Return a rank's parts of gradients of unsharded parameters.

        The gradient of a use outside of forward, after `unshard()` by hand, is whole, and no
        rank's part.
        """
        if group.index in self._entered or not self.region.is_spmd:
            return grads
        return [(of, index, self._part_of(of.bucket, grad)) for of, index, grad in grads]

    def _part_of(self, bucket: Bucket, grad: Tensor) -> Tensor:
        assert isinstance(bucket.store, TracedStore)
        if not bucket.store.is_outside and self._comes_from_output:
            return grad
        return self.region.enter_shared(grad.detach()) / self.region.num_ranks

    def leave_gradient(self, grad: Tensor) -> Tensor:
        """Return the sum over the ranks, in SPMD mode; its graph leads back into the region."""
        if not self.region.is_spmd:
            return grad
        self._watch_graph(grad)
        return self.region.leave_sum(grad)

    def _watch_graph(self, grad: Tensor) -> None:
        """Note when a backward by the graph of a gradient, which left the region, comes back."""
        if grad.requires_grad:
            grad.register_hook(self._reenter)

    def _reenter(self, grad: Tensor) -> None:
        self._note_backward(grad)
        self._move(self._groups, self.region.enter_shared, outside=False)

    def end_backward(self, in_use: Callable[[int], bool]) -> None:
        """End a backward, and keep none of its tensors alive."""
        self.region.progress(None)
        self._entered.clear()
        self._comes_from_output = False
        self.show_outside([group for group in self._groups if in_use(group.index)])
        if self._settings.sync_on_finalization:
            self.region.finish_graph()

    def show_outside(self, groups: Sequence[ParamGroup]) -> None:
        """Let the code that runs the model see unsharded parameters, after `unshard()` by hand."""
        if self.region.is_spmd:
            self._move(groups, self.region.leave_shared, outside=True)

    def finish_graph(self) -> None:
        """Run what was traced, before the host reads a result."""
        self.region.finish_graph()

    # --- inputs and outputs ---

    def _enter_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def is_batched(tensor: Tensor) -> bool:
            return tensor.ndim > 0 and not getattr(tensor, _SHARED, False)

        _refuse_hidden((args, kwargs), "was passed")
        first = next(filter(is_batched, iter_tensors((args, kwargs))), None)
        length = None if first is None else first.shape[0]
        if length is not None and length % self.region.num_ranks:
            msg = (
                f"the batch cannot be split over {self.region.num_ranks} ranks: dim 0 of the "
                f"first input, of shape {tuple(first.shape)}, is {length}. Pass a "  # type: ignore[union-attr]
                f"multiple of {self.region.num_ranks} examples, or mark an input that is no batch "
                f"by shardkit.shared_input()."
            )
            raise StateError(msg)
        entered: dict[int, Tensor] = {}

        def enter(tensor: Tensor) -> Tensor:
            if id(tensor) not in entered:
                is_split = is_batched(tensor) and tensor.shape[0] == length
                into = self.region.enter_batch if is_split else self.region.enter_shared
                entered[id(tensor)] = into(tensor)
                if entered[id(tensor)].requires_grad:
                    entered[id(tensor)].register_hook(self._watch_graph)
            return entered[id(tensor)]

        return map_tensors(enter, args), map_tensors(enter, kwargs)

    def _leave_output(self, tensor: Tensor) -> Tensor:
        """Take an output out of the region, and note when backward reaches it."""
        if tensor.ndim > 0:
            output = self.region.leave_batch(tensor)
        elif tensor.is_floating_point():
            output = self.region.leave_mean(tensor)
        else:
            output = self.region.leave_shared(self.region.agree(tensor))
        if output.requires_grad:
            output.register_hook(self._note_backward)
        return output

    def _note_backward(self, grad: Tensor) -> None:
        del grad
        self._comes_from_output = True

    # --- unsharded parameters ---

    def _move(
        self, groups: Sequence[ParamGroup], fn: Callable[[Tensor], Tensor], *, outside: bool
    ) -> None:
        for group in groups:
            with group.unnoticed_writes():
                for bucket in group.buckets:
                    assert isinstance(bucket.store, TracedStore)
                    bucket.store.move(fn, outside=outside)


def _refuse_hidden(tree: Any, verb: str) -> None:
    """Refuse inputs or outputs whose tensors are all in objects that cannot be copied.

    Some tensors may be in such objects: an output may also hold a cache that only the model reads.
    """
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    map_tensors(see, tree)
    if not seen and next(iter_tensors(tree), None) is not None:
        msg = (
            f"a model on XLA devices {verb} its tensors in an object that is neither a list, "
            f"tuple, mapping nor dataclass, so they cannot be split over the ranks and put "
            f"together again. Use one of those."
        )
        raise StateError(msg)
