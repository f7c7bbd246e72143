"""Events of a backward from autograd: entries and exits of groups, gradients of parameters."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat import torch_autograd, torch_groups
from shardkit._errors import StateError
from shardkit._tensor.sharded import relay_hooks, while_trainable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from shardkit._params.gradients import BucketGradients
    from shardkit._schedule import GroupState


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardRecord:
    """One forward of one group; autograd's graph keeps it alive until its backward."""

    group: Any  # The `ParamGroup`, which knows the `Backward` of its root.
    in_pass: int | None  # Number of the pass in the schedule; None for a forward inside backward.
    versions: tuple[int, ...]  # Versions of the shards when the forward used them.
    # Weak reference to the node by which backward reports that the gradients of the inputs have
    # come; None: it does not report that.
    input_grads: weakref.ref[Any] | None = None
    # Number of the engine's run in which backward entered this forward; -1: none has.
    run: int = -1
    active: bool = False  # Whether backward is inside this forward.
    left_in: int = 0  # Number of the backward that left this forward last; 0: none has.
    is_first: bool = False  # Whether no forward had entered the group since the last backward.
    may_lack_outputs: bool = False  # Whether the forward may return nothing to differentiate.

    @property
    def is_in_run(self) -> bool:
        """Whether the running backward will report that the gradients of the inputs have come."""
        node = None if self.input_grads is None else self.input_grads()
        return node is not None and torch_autograd.will_run(node)

    @property
    def listener(self) -> Any:
        """The backward of the root; that is a new root if a larger one ran since the forward."""
        listener = self.group.listener
        assert listener is not None
        return listener

    def watch_outputs(self, outputs: Iterable[Tensor]) -> bool:
        """Report the first gradient of `outputs` to the listener; return whether there are any."""
        has_any = False
        for output in outputs:
            has_any = True
            output.register_hook(self._enter_backward)
        return has_any

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]
    def _enter_backward(self, grad: Tensor) -> None:
        self.listener.enter_backward(self, grad)


def _waited(tensor: Tensor) -> Tensor:
    result = torch_groups.waited(tensor)
    return tensor if result is tensor else result.view_as(result)  # The tensor holds the result.


class InputGrads(torch.autograd.Function):
    """Identity on a group's inputs; its backward runs when backward is done with the group."""

    @staticmethod
    def forward(ctx: Any, record: ForwardRecord, *inputs: Tensor) -> Any:
        """Pass the inputs through, and wait for those that functional collectives compute.

        A compiled layer gives no gradient for the result of such a collective before the wait.
        """
        ctx.record = record
        record.input_grads = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple(each if type(each) is torch.Tensor else _waited(each) for each in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Tell the listener, and pass the gradients through."""
        ctx.record.listener.exit_backward(ctx.record)
        return (None, *grads)


# --- gradients of parameters ----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer in which backward is, and whose gradients are held until backward leaves."""

    # Counts of its gradients; None: each gradient is reported when it comes.
    counts: GroupState | None = None
    due: int = 0  # Number of gradients after which `notify` is called next.
    half: int = 0  # Half of all gradients, after which it is called for the last time.
    # Method that is called with the group; weak, since C++ keeps this object.
    notify: weakref.WeakMethod[Callable[[Any], None]] | None = None


class GradHooks:
    """Hooks on every parameter that can be trained, even if it is frozen for now.

    If nothing waits for a gradient (one rank, no casts), all gradients are taken at the end of
    backward, and almost no code runs for each of them before. The same holds while the gradients of
    a layer are held.

    User code may call backward inside of a backward, once for each part of a batch. Gradients that
    come in such a run stay in ``.grad`` until backward leaves the layer: they add up there, and the
    code may read and drop them.

    Args:
        group: The `ParamGroup` of the parameters.
        at_once: Whether to take gradients when they come.
    """

    def __init__(self, group: Any, *, at_once: bool) -> None:
        # Weak, also in hooks: C++ keeps hooks, and the garbage collector sees no cycles there.
        self._group = weakref.ref(group)
        self._buckets = [gradients.bucket for gradients in group.gradients.buckets]
        self._noted: list[Tensor] = []
        self._layer = _Layer()
        self._places = {
            id(param): (param, weakref.ref(gradients), index)
            for gradients in group.gradients.buckets
            for index, param in enumerate(gradients.bucket.store.unsharded)
        }
        self.at_once = False
        # Number of the engine's run in which backward entered the group; -1: in none.
        self.run = -1
        # Parameters whose gradients were not taken yet, because they came in runs inside of that
        # one, or before the user's hooks ran.
        self.nested: list[Tensor] = []
        for bucket in self._buckets:
            for param, unsharded in zip(bucket.sharded, bucket.store.unsharded, strict=True):
                relay_hooks(param, unsharded)
        if at_once:
            self.collect_at_once()
        else:
            note = _notes_arrival(self._group, self._noted)
            for param, _, _ in self._places.values():
                _add_hook(param, note)

    def collect_at_once(self) -> None:
        """From now on take gradients when they come, not at the end of backward."""
        if self.at_once:
            return
        self.at_once = True
        for param, of, index in self._places.values():
            own: list[Any] = []
            take = functools.partial(_take_grad, self._group, of, index, self._layer, own)
            own.append(_add_hook(param, take))

    def hold(self, counts: GroupState, notify: Callable[[Any], None], *, at_first: bool) -> None:
        """From now on hold and count gradients, and report only when half of them have come.

        Args:
            counts: Counts of the group's gradients.
            notify: Method that is called with the group when half of the gradients have come.
            at_first: Whether it is also called when the first one has come.
        """
        layer = self._layer
        layer.counts, layer.notify = counts, weakref.WeakMethod(notify)
        layer.half = (counts.num_expected + 1) // 2
        layer.due = 1 if at_first else layer.half

    def release(self) -> None:
        """Report each gradient again; gradients that are held stay held."""
        self._layer.counts = self._layer.notify = None

    @property
    def has_user_hooks(self) -> bool:
        """Whether users have hooks that need gradients as they come."""
        return any(
            torch_autograd.has_post_accumulate_grad_hooks(bucket.sharded)
            for bucket in self._buckets
        )

    def flush(self) -> None:
        """Take the gradients that have come but were not taken."""
        if self._noted or self.nested:
            self._take((*self._noted, *self.nested))
            self._noted.clear()
            self.nested.clear()

    @property
    def has_left(self) -> bool:
        """Whether a parameter has a gradient that no hook reported."""
        return any(param.grad is not None for param, _, _ in self._places.values())

    def take_left(self) -> None:
        """Take the gradients that no hook reported."""
        self._take([param for param, _, _ in self._places.values()])

    def _take(self, params: Iterable[Tensor]) -> None:
        grads = []
        for each in params:
            param, of, index = self._places[id(each)]
            gradients, grad = of(), param.grad
            if gradients is not None and grad is not None:
                param.grad = None
                if grad.layout is not torch.strided:
                    raise _no_sparse(grad, gradients, index)
                grads.append((gradients, index, grad))
        group = self._group()
        if grads and group is not None:
            group.listener.on_grads(group, grads)

    def discard(self) -> None:
        """Drop all gradients that have not been taken."""
        for param, _, _ in self._places.values():
            param.grad = None
        self._noted.clear()
        self.nested.clear()
        self.release()


def _notes_arrival(group_ref: weakref.ref[Any], arrived: list[Tensor]) -> Callable[[Tensor], None]:
    """Return a hook that notes a parameter; the first call asks for a call at backward's end."""

    def note(param: Tensor) -> None:
        if not arrived:
            group = group_ref()
            if group is not None and group.listener is not None:
                group.listener.begin_backward()
        arrived.append(param)

    return note


def _add_hook(param: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Register a post-accumulate-grad hook, even on a parameter that is frozen for now."""
    with while_trainable(param):
        return param.register_post_accumulate_grad_hook(hook)


def _take_grad(
    group_ref: weakref.ref[Any],
    gradients_ref: weakref.ref[BucketGradients],
    index: int,
    layer: _Layer,
    own: list[Any],
    param: Tensor,
) -> None:
    """Take a gradient from an unsharded parameter, as its hook, of which `own` has the handle.

    Code in a forward sees the unsharded parameter, and may add hooks there that want the gradient.
    The first time they run after this one, so the gradient stays for them.
    """
    group, gradients, grad = group_ref(), gradients_ref(), param.grad
    if group is None or gradients is None or grad is None:
        return
    (handle,) = own
    hooks = handle.hooks_dict_ref()
    if next(reversed(hooks)) != handle.id:
        torch_autograd.move_to_end(hooks, handle.id)
        group.grad_hooks.nested.append(param)
        return
    if group.grad_hooks.run not in (-1, torch_autograd.current_run()):
        group.grad_hooks.nested.append(param)
        return
    param.grad = None
    if grad.layout is not torch.strided:
        raise _no_sparse(grad, gradients, index)
    counts = layer.counts
    if counts is None or index in gradients.held:
        group.listener.on_grads(group, [(gradients, index, grad)])
        return
    gradients.fired[index] = 1
    gradients.held[index] = grad
    counts.num_arrived = arrived = counts.num_arrived + 1
    if arrived == layer.due and layer.notify is not None:
        layer.due = layer.half
        notify = layer.notify()
        if notify is not None:
            notify(group)


def _no_sparse(grad: Tensor, gradients: BucketGradients, index: int) -> StateError:
    return StateError(
        f"parameter {gradients.bucket.entries[index].name!r} got a sparse gradient "
        f"({grad.layout}), which cannot be cut into flat ranges and averaged: expected a dense "
        f"one. Look it up with sparse=False, or pass it in ignored_params of fully_shard."
    )
