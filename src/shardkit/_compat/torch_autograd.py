"""Private names of torch for backward, hooks on gradients, and steps of optimizers.

No branch on torch's version.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils

from shardkit._compat import torch_modules, torch_tensors
from shardkit._compat.once import once, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
"""Module that has a flag where backwards are compiled."""


@once
def wrap_engine(
    chosen: Callable[..., Any],
    compiled: Callable[[Any], None],
    failed: Callable[[BaseException], None],
) -> None:
    """Have a function run backwards for chosen tensors, and `autograd.grad`; once per process.

    It gets the engine's function and its arguments. A backward for all tensors bypasses it.
    `compiled` is called with the outputs before a backward that torch compiles, and `failed` with
    what ends a run of the engine, before it is raised.

    If a compiled function calls backward, torch.compile would compile the hooks that the engine
    calls, too: it is kept out of them.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    position = 3  # Position of `inputs` after the outputs, in torch 2.9 to 2.13.

    def run_for(*args: Any, **kwargs: Any) -> Any:
        results = original(*args, **kwargs)
        for each in results or ():
            if each is not None and each.device.type == "xla":
                _await_release(original, each)
                break
        return results

    @functools.wraps(original)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(sys.modules.get(_COMPILED_AUTOGRAD), "compiled_autograd_enabled", False):
            compiled(outputs)
        try:
            if len(args) <= position or not args[position]:
                return original(outputs, *args, **kwargs)
            return chosen(run_for, outputs, *args, **kwargs)
        except BaseException as error:
            failed(error)
            raise

    autograd._engine_run_backward = torch_modules.untraced(run)


def _await_release(engine: Callable[..., Any], result: Tensor) -> None:
    """Wait until the engine's thread no longer holds a result of its last run.

    `autograd.grad` returns a moment before that. If a graph of XLA is cut in that moment, results
    that the caller has dropped are outputs of the graph, on one rank only: ranks then run different
    programs, whose collectives wait for each other. The thread begins a second run after it has let
    go of the first, and a run that accumulates gradients holds no results. Torch refuses such a run
    inside of vmap, and where operators are recorded nothing has run.
    """
    if torch_tensors.is_batched(result) or torch_tensors.is_recording_operators():
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.zeros((), device=result.device, requires_grad=True)
        engine((leaf.clone(),), (torch.ones_like(leaf),), False, False, (), **options)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` once at the end of the running backward; there is no public way."""
    Variable._execution_engine.queue_callback(callback)


current_run: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the engine's innermost run on the calling thread; -1: none.

A backward that is called inside of a backward is a run of its own.
"""


def is_from_engine() -> bool:
    """Whether the operator that a dispatch mode runs was called by the engine, not by Python.

    It is called by functions of a mode's `__torch_dispatch__`.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name in {"inner", "_fn"}:  # from torch 2.10 on
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "_engine_run_backward"


def leaves_of(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield the leaves whose gradients a backward of tensors or edges of a graph computes."""
    waiting = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        if hasattr(node, "variable"):
            yield node.variable


def in_backward() -> bool:
    """Whether the calling thread is inside a backward, e.g. in a checkpoint's recomputation."""
    return bool(current_run() != -1)


def current_node_name() -> str | None:
    """Return the name of the node that a backward runs on the calling thread, if one does."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


def will_run(node: Any) -> bool:
    """Whether a backward runs that has a node in its graph, and needs its gradient.

    That is also true for a node that has run already.
    """
    return in_backward() and bool(torch._C._will_engine_execute_node(node))


def keeps_graph() -> bool:
    """Whether a backward runs after which another one may go through the same graph."""
    return in_backward() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_user_function() -> bool:
    """Whether the forward or backward of a user's `autograd.Function` runs.

    Such a forward turns forward-mode gradients off, as only inference mode does otherwise. A
    backward is recognized by the class of its node. Reentrant checkpointing is such a function,
    too: modules run in its forward. Its backward does not count, because it runs a whole backward,
    including the steps of optimizers.
    """
    if not torch._C._is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    if not in_backward():
        return False
    function = getattr(torch._C._current_autograd_node(), "_forward_cls", None)
    return function is not None and not function.__module__.startswith(("shardkit.", "torch."))


def register_foreach_class(cls: type[Tensor]) -> None:
    """Make optimizers and `clip_grad_norm_` use their foreach path for `cls`, as for DTensor."""
    lists: tuple[list[Any], ...] = (
        _torch_optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for supported in lists:
        if cls not in supported:
            supported.append(cls)


@contextlib.contextmanager
def optimizers_on_meta(*, on_cpu: bool) -> Iterator[None]:
    """Let optimizers choose their kernels for tensors on meta as for those of a device.

    Functions list the devices that have list operators, fused kernels, and steps that graphs can
    capture. Modules of optimizers import the last one by name. Tested with torch 2.9 to 2.15.
    """
    names = ["_get_fused_kernels_supported_devices"]
    if not on_cpu:
        names += ["_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices"]

    def with_meta(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        return lambda *args, **kwargs: [*original(*args, **kwargs), "meta"]

    modules = [each for name, each in sys.modules.items() if name.startswith("torch.optim.")]
    with contextlib.ExitStack() as stack:
        for module, name in itertools.product(modules, names):
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, with_meta(getattr(module, name))))
        yield


_SPARE, _SPARE_KEY = "ipu", "AutocastIPU"
"""Type of devices for which torch has autocast, and its dispatch key. Nobody has such devices."""


def autocast_operators(device_type: str) -> list[Any]:
    """Return the operators of torch whose inputs autocast converts on a device.

    CUDA's stand for those of other accelerators.
    """
    key = "AutocastCPU" if device_type == "cpu" else "AutocastCUDA"
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


@contextlib.contextmanager
def autocast_on_meta(
    target: str, conversions: dict[Any, Callable[..., Any]], clear: Callable[[], None]
) -> Iterator[None]:
    """Let autocast for devices of type `target`, and for meta, convert inputs of operators.

    Torch has no autocast for tensors on meta. So both types stand for one that nobody has, whose
    dispatch key all calls get. Tested with torch 2.9 to 2.15.

    Args:
        target: Type of devices.
        conversions: Function for each operator, which gets its arguments, and returns them with
            others in the place of some.
        clear: Function that is called when torch forgets its casts of weights.
    """
    types = {target, "meta"}
    available, enabled = torch.amp.is_autocast_available, torch.is_autocast_enabled
    get_dtype, clear_cache = torch.get_autocast_dtype, torch.clear_autocast_cache

    def is_available(device_type: str) -> bool:
        return device_type in types or available(device_type)

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled(_SPARE if device_type in types else device_type)

    def dtype_of(device_type: str) -> torch.dtype:
        if device_type not in types:
            return get_dtype(device_type)
        return get_dtype(_SPARE if enabled(_SPARE) else target)

    def clear_both() -> None:
        clear()
        clear_cache()

    key = getattr(torch._C.DispatchKey, _SPARE_KEY)
    keys = torch._C.DispatchKeySet(key)

    def kernel_of(operator: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = convert(*args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*args, **kwargs)

        return call

    fallback, library = (torch.library.Library(name, "IMPL", _SPARE_KEY) for name in ("_", "aten"))
    fallback.fallback(torch.library.fallthrough_kernel)
    for operator, convert in conversions.items():
        library.impl(operator, kernel_of(operator, convert))
    with (
        patch.object(torch.autocast, "__init__", _init_as_spare(target, types, dtype_of)),
        patch.object(torch.amp, "is_autocast_available", is_available),
        patch.object(torch, "is_autocast_enabled", is_enabled),
        patch.object(torch, "get_autocast_dtype", dtype_of),
        patch.object(torch, "clear_autocast_cache", clear_both),
        torch._C._IncludeDispatchKeyGuard(key),
    ):
        yield


def _init_as_spare(
    target: str, types: set[str], dtype_of: Callable[[str], torch.dtype]
) -> Callable[..., None]:
    """Return a constructor of `torch.autocast` that takes some types for the spare one."""
    init = torch.autocast.__init__

    @functools.wraps(init)
    def wrapper(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type not in types:
            init(self, device_type, dtype, *args, **kwargs)
            return
        dtype = dtype or dtype_of(device_type)
        # CUDA takes all dtypes.
        init(self, _SPARE, dtype if target == "cpu" else torch.half, *args, **kwargs)
        self.fast_dtype = dtype

    return wrapper


def after_unscaling(hook: Callable[[torch.optim.Optimizer, dict[Any, Tensor]], None]) -> None:
    """Call `hook` after a stock gradient scaler has checked the gradients of an optimizer.

    It gets the scaler's number of each device, which is not zero if a gradient is not finite. There
    is no public way.
    """

    def unscale(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(scaler, optimizer, *args, **kwargs)
        hook(optimizer, found)
        return found

    wrap(torch.amp.GradScaler, "_unscale_grads_", unscale)


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of an optimizer inside of another one's step, which runs the global hooks.

    Torch calls the global hooks around the step of each optimizer, and around the step of its base
    class that it may call. The optimizer's own hooks run.
    """
    hooks: tuple[dict[int, Any], ...] = (
        _torch_optimizer._global_optimizer_pre_hooks,
        _torch_optimizer._global_optimizer_post_hooks,
    )
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        type(optimizer).step(optimizer)  # Schedules replace that of the object.
    finally:
        for each, entries in zip(hooks, kept, strict=True):
            each.update(entries)


def note_step(optimizer: Any, *_: object) -> None:
    """Tell learning rate schedules that an optimizer has stepped, although another one did."""
    optimizer._opt_called = True


def share_optimizer_hooks(optimizer: Any, other: Any) -> None:
    """Make `other` run the hooks of an optimizer, also those registered or removed later.

    Torch 2.9 to 2.13 keep six dicts of hooks.
    """
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(other, name, hooks)


def has_saved_tensors_hooks() -> bool:
    """Whether hooks decide how tensors are saved for backward; there is no public way to ask."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def add_first_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook on a tensor's gradient that runs before those of users.

    `swap_tensors` leaves the hooks of a leaf behind, and torch does not look into them any more.
    """
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for key in [key for key in hooks if key != handle.id]:
        move_to_end(hooks, key)
    if tensor.is_leaf:
        tensor._backward_hooks = hooks


def move_to_end(hooks: Any, key: int) -> None:
    """Have a hook run last: torch goes by when they came in, not by `OrderedDict.move_to_end`."""
    hooks[key] = hooks.pop(key)


def run_last(tensor: Tensor, handle: Any) -> None:
    """Have a hook on a tensor's gradient run after all that are there now, if it is there."""
    hooks: Any = tensor._backward_hooks
    if handle.id in hooks:
        move_to_end(hooks, handle.id)


def tensor_hooks(tensor: Tensor) -> Any:
    """Return the list of hooks on a tensor's gradient, by number; None: there was never one."""
    return tensor._backward_hooks


def share_hooks(tensor: Tensor, hooks: Any) -> None:
    """Give a leaf a list of hooks: another tensor's, or its own that torch does not see."""
    tensor._backward_hooks = hooks


def is_of_several_tensors(hook: Any) -> bool:
    """Whether `torch.autograd.graph.register_multi_grad_hook` made a hook that awaits all tensors.

    Such a hook counts which of the tensors' own nodes the engine will run.
    """
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_")


def has_post_accumulate_grad_hooks(params: Iterable[Tensor]) -> bool:
    """Whether users have post-accumulate-grad hooks on any of the parameters."""
    # A list, because a generator takes longer, for each bucket of a step.
    return any([getattr(param, "_post_accumulate_grad_hooks", None) for param in params])  # noqa: C419


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the user's post-accumulate-grad hooks; torch has no public way to list them."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())
