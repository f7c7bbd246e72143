"""Private names of torch for modules, and for what wraps, copies or compiles them.

No branch on torch's version.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from torch.nn.utils import stateless

from shardkit._compat.torch_checkpoints import when_imported

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable, Iterator, Mapping

F = TypeVar("F", bound="Callable[..., Any]")


def is_called_by_ddp(frame: types.FrameType | None) -> bool:
    """Whether a property's `frame` was entered by the constructor of DistributedDataParallel.

    The constructor looks for ``_ddp_params_and_buffers_to_ignore`` before it uses a parameter.
    """
    caller = frame.f_back if frame is not None else None
    return (
        caller is not None
        and caller.f_code is torch.nn.parallel.DistributedDataParallel.__init__.__code__
    )


def rnn_take_weight(module: torch.nn.RNNBase, name: str) -> None:
    """Let an RNN compute with the tensor that it holds by a name; it has a list of its weights.

    `setattr` does this for parameters, but not for other tensors, which `functional_call` gives.
    """
    if name in module._flat_weights_names:  # A subclass may have others.
        index = module._flat_weights_names.index(name)
        module._flat_weights[index] = module._parameters[name]


def rnn_forget_weight_refs(module: torch.nn.RNNBase) -> None:
    """Drop the weak references that an RNN keeps to its weights; `swap_tensors` refuses them.

    From them its forward sees that weights were replaced, and has cuDNN move the weights into its
    own memory. Without them it trusts its list of weights, which `setattr` keeps up to date.
    """
    module._flat_weight_refs = [None] * len(module._flat_weights_names)


def rnn_restore_weight_refs(module: torch.nn.RNNBase) -> None:
    """Undo `rnn_forget_weight_refs`."""
    module._flat_weight_refs = [
        weakref.ref(weight) if weight is not None else None for weight in module._flat_weights
    ]


@contextlib.contextmanager
def replace_recurrences(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Have RNNs call these functions, each with torch's own one before its arguments."""
    owner: Any = torch._VF
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            replacement = functools.partial(function, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, replacement))
        yield


@contextlib.contextmanager
def without_weight_refs(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let RNNs that keep weak references to their weights, as sharded ones do not, drop them."""
    rnns = [
        module
        for module in modules
        if isinstance(module, torch.nn.RNNBase) and any(module._flat_weight_refs)
    ]
    for rnn in rnns:
        rnn_forget_weight_refs(rnn)
    try:
        yield
    finally:
        for rnn in rnns:
            rnn_restore_weight_refs(rnn)


def loads_its_own_way(module: torch.nn.Module) -> bool:
    """Return whether values loaded into a module pass other code than torch's and shardkit's."""
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    functions = (type(module)._load_from_state_dict, *hooks)
    names = {getattr(each, "__module__", None) or "" for each in functions}
    return not {name.partition(".")[0] for name in names} <= {"torch", "shardkit"}


def state_dict_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run after a module's `state_dict`; there is no public way to ask."""
    return list(module._state_dict_hooks.values())


def in_functional_call(max_frames: int | None = None) -> bool:
    """Whether `torch.func.functional_call`, or the older one, is on the stack.

    Args:
        max_frames: Number of frames to look at, from the caller on; None: all.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and max_frames != 0:
        if frame.f_code is stateless._functional_call.__code__:
            return True
        frame = frame.f_back
        max_frames = None if max_frames is None else max_frames - 1
    return False


def is_exported(module: torch.nn.Module) -> bool:
    """Whether `torch.export` has made a module, which keeps weak references to its parameters."""
    exported = sys.modules.get("torch.export.unflatten")
    kinds = (getattr(exported, "InterpreterModule", ()), getattr(exported, "UnflattenedModule", ()))
    return exported is not None and isinstance(module, (torch.fx.GraphModule, *kinds))


def computed_name(hook: object) -> str:
    """Return the attribute that an older hook computes: `weight_norm`, `spectral_norm`, pruning."""
    return str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", ""))


COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which `Module.compile` keeps a replacement call, bound to one module: not copied."""


FLAGS_OF_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
"""Attributes where modules keep what was asked of hooks, by the number of the hook."""


def untraced(fn: F, *, inner: bool = True) -> F:
    """Keep torch.compile out of a function, and unless `inner` is False out of all that it calls.

    `torch.compiler.disable` does the same, but wraps each call and imports the compiler at once.
    """
    frames = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    # For the function's frame, and for inner ones.
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if inner else action.DEFAULT)
    frames.set_code_exec_strategy(fn.__code__, strategy)
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]  # Callers do not inline it.
    fn._torchdynamo_disable_msg = "shardkit communicates"  # type: ignore[attr-defined]
    return fn


not_traced_itself = functools.partial(untraced, inner=False)
"""Decorator of functions that pause or resume the compiler: `untraced` would undo that."""

pause_compiler: Any = functools.partial(torch._C._dynamo.eval_frame.set_eval_frame, None)
"""Function that runs what this thread calls as it is, up to the end of compiled code at most.

It returns the argument of `resume_compiler`; None: nothing is being compiled.
"""

resume_compiler: Any = torch._C._dynamo.eval_frame.set_eval_frame


def run_uncompiled(*classes: type[torch.Tensor]) -> None:
    """Make functions under torch.compile run operators on tensors of some classes as they are.

    Their graphs break there. The compiler is not imported for this. Its setting exists in torch
    2.9.0 and 2.13.0; without it, the compiler asks a class for a form that it can trace.
    """
    for cls in classes:
        for name in ("__torch_function__", "__torch_dispatch__"):
            handler = getattr(vars(cls).get(name), "__func__", None)
            if handler is not None:
                untraced(handler)

    def exclude(config: Any) -> None:
        name = "nontraceable_tensor_subclasses"
        entry = config._config.get(name)
        if entry is not None:
            entry.default.update(classes)  # What is set in the usual way holds for one thread only.
            getattr(config, name).update(classes)

    when_imported("torch._dynamo.config", exclude)


def lambda_of_custom_policy(policy: object) -> Any:
    """Return the function in FSDP1's `CustomPolicy`, which has no public way to ask; else None.

    The attribute exists in torch 2.9.0 and 2.13.0. Without it the policy is not callable, and is
    refused.
    """
    module = sys.modules.get("torch.distributed.fsdp.wrap")
    custom = getattr(module, "CustomPolicy", None)
    if custom is None or not isinstance(policy, custom):
        return None
    return getattr(policy, "_lambda_fn", None)
