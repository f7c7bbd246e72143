"""Every private torch name that shardkit uses: why, and the versions it was tried on.

Tried on torch 2.9.0 and 2.13.0 (CPU). Nothing else in shardkit imports a private name of torch.
Those of plain torch come first, those of modules and of checkpoints have parts of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Variable
from torch.autograd import profiler as _autograd_profiler
from torch.distributed import distributed_c10d as c10d  # noqa: TID251 - a private name of it
from torch.nn.utils import stateless
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils, _python_dispatch, flop_counter

from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


# --- FSDP2's meshes of single parameters ----------------------------------------------------------


class MeshInfo(NamedTuple):
    """What FSDP2's ``ShardPlacementResult`` says of a parameter.

    Attributes:
        placement: The ``Shard(dim)``; None: any dim.
        mesh: Mesh of torch or of shardkit.
        shard_dim: Axis of the mesh that it is sharded over; None: it is not.
        replicate_dim: Axis that it is replicated over; None: it is not.
        spmd_mesh: Mesh of the DTensor that it is, of which `mesh` is a part; None: no part of it.
        dims: Names of the axes of `spmd_mesh` that make up `mesh`: a ``DataParallelMeshDims``.
    """

    placement: Any
    mesh: Any
    shard_dim: int | None
    replicate_dim: int | None
    spmd_mesh: Any = None
    dims: Any = None


def mesh_info_of(answer: Any) -> MeshInfo | None:
    """Read a ``ShardPlacementResult``; None of what is another thing.

    The class, and those of the mesh infos in it, are in a private module of torch 2.13 only:
    ``torch.distributed.fsdp._fully_shard._fsdp_common``.
    """
    info = getattr(answer, "mesh_info", None)
    if info is None:
        return None
    return MeshInfo(
        getattr(answer, "placement", None),
        info.mesh,
        getattr(info, "shard_mesh_dim", None),
        getattr(info, "replicate_mesh_dim", None),
        getattr(info, "spmd_mesh", None),
        getattr(info, "dp_mesh_dims", None),
    )


def symmetric_all_gather(group: Any, backend: str) -> Any:
    """Return FSDP2's all-gather out of symmetric memory; None: torch has none (before 2.11).

    Collective over the group. Not tried on a card.
    """
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: TID251
    except ImportError:
        return None
    made = getattr(_fsdp_collectives, "SymmMemAllGather", None)
    return None if made is None else made(group, backend)


# --- imports that take long -----------------------------------------------------------------------


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after it was imported, once.

    Put it first into ``sys.meta_path``.
    """

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._is_asking = False

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        """Let others find the module; add the call to what loads it.

        Who only asks whether the module is there, by ``importlib.util.find_spec``, loads nothing.
        """
        del path, target
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            sys.meta_path.remove(self)  # It is not there.
        else:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                is_first = self in sys.meta_path
                if is_first:
                    sys.meta_path.remove(self)
                execute(module)
                if is_first:
                    self._then(module)

            loader.exec_module = exec_module
        return spec


# --- torch ----------------------------------------------------------------------------------------

OPERATOR_KINDS: tuple[type, ...] = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
"""What names an operator: `torch.ops.aten.mm.default`, `torch.ops.aten.mm`, `flex_attention`."""

P = ParamSpec("P")
T = TypeVar("T")

HAS_STORAGE_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""torch >= 2.12 can exchange the memory behind two storages (pytorch#177449); older resizes."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Tensor subclasses that only want `__torch_dispatch__` skip `__torch_function__` with it."""


plain_torch_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called."""


def swap_storage(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange memory and nbytes of two storages of one device; one of them has none."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


@functools.cache
def wrap_engine(chosen: Callable[..., Any]) -> None:
    """Have a function run backwards for chosen tensors, and `autograd.grad`; once per process.

    It gets the engine's function and its arguments. Those of a backward for all are not looked at.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    position = 3  # Of `inputs`, behind the outputs, in torch 2.9 to 2.13.

    @functools.wraps(original)
    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= position or not args[position]:
            return original(outputs, *args, **kwargs)
        return chosen(original, outputs, *args, **kwargs)

    autograd._engine_run_backward = run


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` runs, such as vmap or jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that transforms of `torch.func` have wrapped, or itself."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Any) -> bool:
    """Whether a tensor stands for several: inside of a vmap, torch's older one included."""
    functorch: Any = torch._C._functorch
    return isinstance(tensor, Tensor) and bool(
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` once at the end of the running backward; there is no public way."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether the calling thread is inside a backward, e.g. in a checkpoint's recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_user_function() -> bool:
    """Whether forward or backward of a user's `autograd.Function` runs.

    Such a forward turns forward-mode gradients off, as nothing but inference mode does; the node of
    a backward says whose it is. In reentrant checkpointing modules run in such a forward; in its
    backward a whole backward runs, to the steps of optimizers, so that one is not meant.
    """
    if not torch._C._is_fwd_grad_enabled():
        return not torch.is_inference_mode_enabled()
    if not in_backward():
        return False
    function = getattr(torch._C._current_autograd_node(), "_forward_cls", None)
    return function is not None and not function.__module__.startswith(("shardkit.", "torch."))


@contextlib.contextmanager
def named_group(name: str) -> Iterator[None]:
    """Let the process group that this thread makes by local synchronization have this name.

    Torch names it by its ranks and by the number of groups that the process is in. That differs
    between ranks of which one is in another group as well: each then waits for the others under a
    name of its own. A torch without the function that is wrapped here names its groups itself.
    """
    _wrap_naming()
    _group_names.name = name
    try:
        yield
    finally:
        del _group_names.name


_group_names = threading.local()


@functools.cache
def _wrap_naming() -> None:
    original = getattr(c10d, "_hash_ranks_to_str", None)
    if original is not None:
        c10d._hash_ranks_to_str = lambda ranks: (
            getattr(_group_names, "name", None) or original(ranks)
        )


# Operators whose names are private, though every optimizer and `model.to` calls them.
copy_to_op = torch.ops.aten._to_copy.default
unsafe_view_op = torch.ops.aten._unsafe_view.default
item_op = torch.ops.aten._local_scalar_dense.default
foreach_max_op = torch.ops.aten._foreach_max.default
foreach_norm_op = torch.ops.aten._foreach_norm.Scalar
unscale_op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
propagate_xla_data_op = torch.ops.aten._propagate_xla_data.default

# On lists of tensors, by few kernels on an accelerator.
foreach_norm: Any = torch._foreach_norm
foreach_copy: Any = torch._foreach_copy_
foreach_add: Any = torch._foreach_add_


make_wrapper: Any = Tensor._make_wrapper_subclass
"""Makes a tensor of a class with a shape, a dtype and a device, and no memory of its own."""


def waited(tensor: Tensor) -> Tensor:
    """Return what a functional collective returned when it is there; others as they are."""
    from torch.distributed import _functional_collectives  # noqa: TID251 - DTensors only

    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        result: Tensor = tensor.wait()
        return result
    return tensor


def set_local_tensor(dtensor: Any, local: Tensor) -> None:
    """Exchange the memory of a DTensor that nobody shall use any more."""
    dtensor._local_tensor = local


def root_mesh(mesh: Any) -> Any:
    """Return the torch mesh that a torch mesh is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # noqa: TID251 - torch < 2.10

    return _mesh_resources.get_root_mesh(mesh)


def is_profiling() -> bool:
    """Whether a profiler of torch is on; it records ranges only then."""
    return bool(_autograd_profiler._is_profiler_enabled)


_capturing = threading.Lock()
_num_captures = 0


@contextlib.contextmanager
def unless_capturing() -> Iterator[bool]:
    """Give whether no CUDA graph is being captured; none begins while the context is open.

    A thread that asks for an event makes a capture of another thread fail. Torch (2.9 to 2.13)
    tells each thread of its own stream only.
    """
    _note_captures()
    with _capturing:
        yield _num_captures == 0


@functools.cache
def _note_captures() -> None:
    cls: Any = torch.cuda.CUDAGraph
    begin, end = cls.capture_begin, cls.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global _num_captures  # noqa: PLW0603 - of the process, as captures are
        with _capturing:
            _num_captures += 1
        try:
            begin(self, *args, **kwargs)
        except BaseException:
            with _capturing:
                _num_captures -= 1
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        global _num_captures  # noqa: PLW0603
        try:
            end(self)
        finally:
            with _capturing:
                _num_captures = max(_num_captures - 1, 0)

    cls.capture_begin, cls.capture_end = capture_begin, capture_end


def nccl_flight_record() -> str | None:
    """Return torch's record of NCCL collectives that are not done, in JSON; None: it has none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # A build without NCCL.
        return None
    found: bytes = dump(includeCollectives=True, onlyActive=True)
    return found.decode()


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make a default process group whose collectives return at once; no public way in 2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = flop_counter.flop_registry
"""Functions that count operations of floating point, by operator. The public counter is a mode that
counts all together; each operator's own are wanted here."""


def group_named(name: str) -> Any:
    """Return the process group of a name, which operators of DTensors have."""
    resolve: Any = getattr(c10d, "_resolve_process_group")  # noqa: B009 - typed in some versions
    return resolve(name)


def forget_dtensor_meshes() -> None:
    """Have operators on DTensors not return meshes of a world that has ended; no public way.

    torch remembers the placements of results, with their mesh, by those of the inputs.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug  # noqa: TID251 - private names of it

    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        clear = getattr(debug, name, None)
        if clear is not None:
            clear()
            return


def default_store() -> Any:
    """Return the store of the default process group: ranks that wait for each other meet there."""
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: TID251


def ranks_are_threads() -> bool:
    """Whether the ranks are threads of this process, as in torch's `MultiThreadedTestCase`."""
    return type(c10d._world).__name__ == "ThreadLocalWorld"


def separate_attempts() -> None:
    """Keep the ranks that torchrun starts again from names that those before them left.

    With ``--max-restarts`` all attempts share torchrun's store (`_create_c10d_store` of torch 2.9
    to 2.13 expects a new one), and a rank would wait for the address of one that has died.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    module: Any = sys.modules["torch.distributed.rendezvous"]
    original = getattr(module, "_create_c10d_store", None)
    if attempt == "0" or original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = original(*args, **kwargs)
        return c10d.PrefixStore(f"attempt_{attempt}", store) if is_shared else store

    module._create_c10d_store = create


def before_threads_end(callback: Callable[[], None]) -> None:
    """Call `callback` when Python is about to end, while thread pools still take work.

    Functions of `atexit` come later: pools have been shut down. Theirs is registered here as well
    (CPython 3.9 to 3.14), and the last one is called first.
    """
    import concurrent.futures.thread  # noqa: F401 - so that its function is there before

    threading._register_atexit(callback)  # type: ignore[attr-defined]


def before_world_ends(callback: Callable[[], object]) -> None:
    """Call `callback` when ``dist.destroy_process_group()`` is about to end the default group.

    Torch has no hook for it. Who imported the function by its name before does not come by here.
    """
    _around_destroy(before=callback)


def after_world_ends(callback: Callable[[], object]) -> None:
    """Call `callback` when it has ended the default group; see `before_world_ends`."""
    _around_destroy(after=callback)


def _around_destroy(
    before: Callable[[], object] | None = None, after: Callable[[], object] | None = None
) -> None:
    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def wrapper(group: Any = None) -> None:
        is_end = c10d.is_initialized() and group in {None, c10d.GroupMember.WORLD}
        if is_end and before is not None:
            before()
        destroy(group)
        if is_end and after is not None:
            after()

    c10d.destroy_process_group = wrapper
    torch.distributed.destroy_process_group = wrapper  # noqa: TID251


def process_group_backend(group: Any, device: torch.device) -> Any:
    """Return the engine behind a process group for a device type; None if it has none."""
    try:
        return group._get_backend(device)
    except RuntimeError:  # "No backend type associated with device type"
        return None


def coalesced(group: Any) -> Any:
    """Return a context whose all-gathers travel as one collective; no public way in 2.13."""
    return c10d._coalescing_manager(group)


def register_foreach_class(cls: type[Tensor]) -> None:
    """Let optimizers and `clip_grad_norm_` take their foreach path for `cls`, as for DTensor."""
    lists: tuple[list[Any], ...] = (
        _torch_optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for supported in lists:
        if cls not in supported:
            supported.append(cls)


def after_unscaling(hook: Callable[[torch.optim.Optimizer, dict[Any, Tensor]], None]) -> None:
    """Call `hook` after a stock gradient scaler has looked at the gradients of an optimizer.

    With its numbers by device that are not zero if one is not finite; there is no public way.
    """
    scaler: Any = torch.amp.GradScaler
    original = scaler._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found: dict[Any, Tensor] = original(self, optimizer, *args, **kwargs)
        hook(optimizer, found)
        return found

    scaler._unscale_grads_ = unscale


def step_without_global_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of an optimizer inside of another one's step, whose hooks have been called.

    Torch calls hooks of all optimizers before the step of each. Those of this one are called.
    """
    step = type(optimizer).step
    has_own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if getattr(step, "hooked", False) and not has_own:
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


def note_step(optimizer: Any, *_: object) -> None:
    """Let learning rate schedules know that an optimizer has stepped, though another one did."""
    optimizer._opt_called = True


def share_optimizer_hooks(optimizer: Any, other: Any) -> None:
    """Let `other` run the hooks of an optimizer, also those that are registered or removed later.

    Torch 2.9 to 2.13 keep six dicts of them.
    """
    for name, hooks in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(other, name, hooks)


def register_device_module(name: str) -> None:
    """Give torch a module of a device type, for functions that look for one: checkpoint does.

    torch_xla 2.9.0 registers none.
    """
    if not hasattr(torch, name):
        torch._register_device_module(name, types.ModuleType(f"torch.{name}"))


def has_saved_tensors_hooks() -> bool:
    """Whether somebody decides how tensors are saved for backward; nothing public tells."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def track_views(tensor: Tensor) -> Tensor:
    """Return a tensor whose views follow when it is written, where the device has no storages.

    XLA tensors are wrapped so when they are made, but not inside a dispatch (torch 2.9.0).
    """
    if is_tracked(tensor) or tensor.device.type != "xla":
        return tensor
    return torch._to_functional_tensor(tensor)


def is_tracked(tensor: Tensor) -> bool:
    """Whether views of an XLA tensor follow when it is written; see `track_views`."""
    return torch._is_functional_tensor(tensor)


def without_tracking(tensor: Tensor) -> Tensor:
    """Return a tensor as operators must see it inside a dispatch; see `track_views`."""
    if tensor.device.type != "xla" or not _is_tracking_off() or not is_tracked(tensor):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(tensor)


def _is_tracking_off() -> bool:
    key = torch._C.DispatchKey.Functionalize
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(key))


def without_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function's operators pass by dispatch modes, each of which costs microseconds."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


def unseen_by_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """Have selective checkpointing and transforms of `torch.func` not see a function's operators.

    Selective checkpointing counts the operators of a forward, and finds what it kept by counting
    those of the repetition. What gathers and frees is not the same in both. Transforms refuse
    writes to tensors that are not their arguments. Other modes see the operators.
    """
    selective: tuple[type, ...] = tuple(
        getattr(torch.utils.checkpoint, name)
        for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
        if hasattr(torch.utils.checkpoint, name)
    )

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if in_function_transform():
            from torch._functorch import pyfunctorch  # It is loaded where a transform runs.

            with pyfunctorch.temporarily_clear_interpreter_stack():
                return wrapper(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() == 0:
            return function(*args, **kwargs)
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if not any(isinstance(mode, selective) for mode in modes):
            return function(*args, **kwargs)
        with _python_dispatch._disable_current_modes(), contextlib.ExitStack() as stack:
            for mode in modes:
                if not isinstance(mode, selective):
                    _python_dispatch._push_mode(mode)
                    stack.callback(_python_dispatch._pop_mode)
            return function(*args, **kwargs)

    return wrapper


def operator_name(operator: Any) -> str:
    """Return an operator's name without its overload, a higher-order one's as it is."""
    packet = getattr(operator, "overloadpacket", operator)
    name: str = getattr(packet, "_qualified_op_name", None) or operator.name()
    return name


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written; there is no public way to ask."""
    return tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often tensors have been written."""
    return [tensor._version for tensor in tensors]


def preserve_versions(tensors: Sequence[Tensor]) -> Any:
    """Return a context in which writes to tensors do not raise their version counters."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def is_mutable_op(func: Any) -> bool:
    """Whether the operator writes to one of its arguments."""
    return bool(func._schema.is_mutable)


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int | str, ...], tuple[str, ...]]:
    """Return which arguments an operator writes: those that it changes, those it only fills.

    By position, and those that can be given by name only by name (``out=``).
    """
    changed: list[int | str] = []
    filled: list[str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only and argument.is_out:
                filled.append(argument.name)
            else:
                changed.append(argument.name if argument.kwarg_only else position)
    return tuple(changed), tuple(filled)


def add_first_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook on a tensor's gradient that runs before those of users.

    `swap_tensors` leaves the list of a leaf's hooks behind, and torch looks no more into it.
    """
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    hooks.move_to_end(handle.id, last=False)
    if tensor.is_leaf:
        tensor._backward_hooks = hooks


def tensor_hooks(tensor: Tensor) -> Any:
    """Return the list of hooks on a tensor's gradient, by number; None: there has been none."""
    return tensor._backward_hooks


def share_hooks(tensor: Tensor, hooks: Any) -> None:
    """Let a leaf have a list of hooks: another tensor's, or its own that torch does not see."""
    tensor._backward_hooks = hooks


def has_post_accumulate_grad_hooks(params: Iterable[Tensor]) -> bool:
    """Whether users have post-accumulate-grad hooks on any of the parameters."""
    # A list: a generator takes longer, for each bucket of a step.
    return any([getattr(param, "_post_accumulate_grad_hooks", None) for param in params])  # noqa: C419


def post_accumulate_grad_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the user's post-accumulate-grad hooks; torch has no public way to list them."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


# --- modules and wrappers -------------------------------------------------------------------------
#
# Tried on torch 2.9.0 and 2.13.0 (CPU).


def is_called_by_ddp(frame: types.FrameType | None) -> bool:
    """Whether a property's `frame` was entered by the constructor of DistributedDataParallel.

    That looks for ``_ddp_params_and_buffers_to_ignore`` before it touches a parameter.
    """
    caller = frame.f_back if frame is not None else None
    return (
        caller is not None
        and caller.f_code is torch.nn.parallel.DistributedDataParallel.__init__.__code__
    )


def rnn_forget_weight_refs(module: torch.nn.RNNBase) -> None:
    """Drop the weak references an RNN keeps on its weights; `swap_tensors` refuses them.

    By them its forward sees that weights were replaced, and has cuDNN move those into memory of its
    own. With None it trusts its list of weights, which `setattr` keeps up to date.
    """
    module._flat_weight_refs = [None] * len(module._flat_weights_names)


def rnn_restore_weight_refs(module: torch.nn.RNNBase) -> None:
    """Undo `rnn_forget_weight_refs`."""
    module._flat_weight_refs = [
        weakref.ref(weight) if weight is not None else None for weight in module._flat_weights
    ]


def state_dict_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run after a module's `state_dict`; there is no public way to ask."""
    return list(module._state_dict_hooks.values())


def in_functional_call(max_frames: int | None = None) -> bool:
    """Whether `torch.func.functional_call`, or the older one, is on the stack.

    Args:
        max_frames: Number of frames that are looked at, from the caller on; None: all.
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
    """Return which attribute an older hook computes: `weight_norm`, `spectral_norm`, pruning."""
    return str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", ""))


COMPILED_CALL = "_compiled_call_impl"
"""Where `Module.compile` keeps what to call instead, bound to that one module: not for copies."""


def untraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a function and of all that it calls.

    What `torch.compiler.disable` does, but that wraps each call, and imports the compiler at once.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)  # Of the function's frame, of those inside.
    frames.set_code_exec_strategy(fn.__code__, strategy)
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]  # Nor is it inlined by its caller.
    fn._torchdynamo_disable_msg = "shardkit gathers and frees"  # type: ignore[attr-defined]
    return fn


def lambda_of_custom_policy(policy: object) -> Any:
    """Return the function in FSDP1's `CustomPolicy`, which has no public way to ask it; else None.

    The attribute is there in torch 2.9.0 and 2.13.0. Without it the policy is no callable, and
    is refused.
    """
    module = sys.modules.get("torch.distributed.fsdp.wrap")
    custom = getattr(module, "CustomPolicy", None)
    if custom is None or not isinstance(policy, custom):
        return None
    return getattr(policy, "_lambda_fn", None)


def _contract() -> Any:
    # From the list of modules: the package has a function of this module's name as well.
    importlib.import_module("torch.distributed._composable.contract")
    return sys.modules["torch.distributed._composable.contract"]


def _registry_key() -> str:
    key: str = _contract().REGISTRY_KEY
    return key


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` was called on a module."""
    return "replicate" in getattr(module, _registry_key(), ())


def note_fully_sharded(cls: type) -> None:
    """Have torch's composable functions, `replicate` for one, leave modules of a class alone."""
    key = _registry_key()

    def noted(module: Any) -> dict[str, Any]:
        return {**module.__dict__.get(key, {}), "fully_shard": None}

    setattr(cls, key, property(noted))


# --- FSDP2 as torch's pipelines know it -----------------------------------------------------------
#
# Tried on torch 2.9.0 and 2.13.0 (CPU).


class StageState:
    """Stands for FSDP2's state of a module, which torch's `PipelineStage` asks for one thing.

    At the end of a step it has each group of the state reduce, and then the state end a backward.
    Here the end does all of it.
    """

    def __init__(self, finish_step: Callable[[], None]) -> None:
        self.__self__ = finish_step.__self__  # type: ignore[attr-defined]
        self._state_ctx = types.SimpleNamespace(all_states=())
        self._root_post_backward_final_callback = finish_step


def _fsdp2() -> Any:
    # Not the package, whose names `install` replaces.
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")


@functools.cache
def stage_class() -> type:
    """Return a class whose modules torch's pipelines unshard, reshard and reduce as FSDP2's.

    The import costs nothing where there is an optimizer: torch makes it with the first one.
    """
    fsdp2_class: Any = _fsdp2().FSDPModule

    class Stage(fsdp2_class):  # type: ignore[misc]
        """What torch's pipelines and other packages take for FSDP2's; the methods are shardkit's.

        It is the last base of a sharded module's class.
        """

        def _get_fsdp_state(self) -> Any:
            msg = (
                f"a method of torch's FSDPModule was called on {type(self).__name__} that "
                f"shardkit has not. shardkit.FSDPModule lists those it has."
            )
            raise StateError(msg)

    return Stage


def note_stage(module: torch.nn.Module, finish_step: Callable[[], None]) -> None:
    """Have torch's pipelines call a bound method at the end of a step of a sharded stage."""
    contract = _contract()
    states = module.__dict__.setdefault(contract.STATE_KEY, {})
    states[_fsdp2().fully_shard.__wrapped__] = StageState(finish_step)


def goes_to_inputs_of_stage(frame: types.FrameType | None) -> bool:
    """Whether torch's pipelines run the engine for a stage's inputs, and for its weights later.

    Args:
        frame: Frame of what `wrap_engine` calls.
    """
    for _ in range(4):  # The wrapper, `autograd.grad` and, in newer torch, one more lie between.
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "stage_backward_input":
            return True
    return False


def is_called_by_pipeline(frame: types.FrameType | None) -> bool:
    """Whether a method's `frame` was entered by a schedule of torch's pipelines."""
    caller = frame.f_back if frame is not None else None
    schedules = "torch.distributed.pipelining.schedules"
    return caller is not None and caller.f_globals.get("__name__") == schedules


# --- checkpoints and state dicts ------------------------------------------------------------------
#
# Tried on torch 2.9.0 and 2.13.0 (CPU).


def dcp_storage_info() -> Any:
    """Return the record of where an entry of a checkpoint is stored: part of every `.metadata`.

    Like `dcp_memory_format` a function: torch.distributed.checkpoint takes as long to import as
    torch.
    """
    from torch.distributed.checkpoint import filesystem  # noqa: TID251 - a record

    return filesystem._StorageInfo


def dcp_memory_format() -> Any:
    """Return the enum of memory formats that stands in every `.metadata`."""
    from torch.distributed.checkpoint import metadata  # noqa: TID251 - a record

    return metadata._MEM_FORMAT_ENCODING


# --- torch's functions for state dicts ------------------------------------------------------------

_HELPERS_MODULE = "torch.distributed._state_dict_utils"
_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_WRITER_MODULE = "torch.distributed.checkpoint.hf_storage"
_PUBLIC_STATE_DICT_FUNCTIONS = (
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
)

HelperWrapper = Any
"""``wrapper(original, *args, **kwargs)``: what to call instead of a helper of torch."""


def wrap_state_dict_helpers(wrappers: Mapping[str, HelperWrapper]) -> None:
    """Let torch's functions for full state dicts call `wrappers` in the place of their helpers.

    They ask ``isinstance(value, DTensor)`` and have no way to learn of other sharded tensors. Both
    modules take long to import, so it is done when they are. Helpers by these names and arguments
    are in torch 2.9.0 to 2.13.0. Where one is missing, the public functions refuse a full state
    dict of a sharded model, instead of returning pieces as whole tensors.
    """

    def wrap(module: types.ModuleType) -> None:
        if module.__name__ == _STATE_DICT_MODULE and not _has_all(wrappers):
            _refuse_full_state_dicts(module)
            return
        for name, wrapper in wrappers.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "wraps_torch"):
                setattr(module, name, _wrapped(original, wrapper))

    for name in (_HELPERS_MODULE, _STATE_DICT_MODULE):
        if name in sys.modules:
            wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport(name, wrap))


ASK_THE_CLASS = (
    ("torch.utils", "swap_tensors"),
    ("torch.distributed.checkpoint.planner_helpers", "_iterate_state_dict"),
    ("torch.distributed.checkpoint.default_planner", "_create_default_metadata_only_plan"),
    ("torch.distributed.pipelining._utils", "extract_tensor_meta"),
    ("torch._dynamo.variables.builder.VariableBuilder", "wrap_tensor"),
)
"""Functions of torch that need the class which a tensor has; torch 2.9.0 to 2.13.0.

They read a DTensor's own fields of what answers ``isinstance(value, DTensor)``, make DTensors of
rows for it, or give its class to another tensor. A module, or a class in one, and a name each; a
version of torch may lack some.
"""


def _has_all(names: Iterable[str]) -> bool:
    modules = (sys.modules[_HELPERS_MODULE], sys.modules[_STATE_DICT_MODULE])
    return all(any(hasattr(module, name) for module in modules) for name in names)


def _wrapped(original: Any, wrapper: HelperWrapper) -> Any:
    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    helper.wraps_torch = True  # type: ignore[attr-defined]
    return helper


def write_boxes_apart() -> None:
    """Let torch's writer of safetensors keep all boxes that a rank has of a tensor.

    Its files have one entry for each name. A piece that begins or ends inside a row is several
    boxes, of which the last one alone would stay. So each goes into a file of its own, which torch
    consolidates as those of other ranks. Torch's class and arguments are those of 2.9.0 to 2.13.0.
    """

    def wrap(module: types.ModuleType) -> None:
        writer: Any = getattr(module, "HuggingFaceStorageWriter", None)
        if writer is not None and not hasattr(writer.write_data, "wraps_torch"):
            writer.write_data = _wrapped(writer.write_data, _write_in_rounds)

    if _WRITER_MODULE in sys.modules:
        wrap(sys.modules[_WRITER_MODULE])
    else:
        sys.meta_path.insert(0, AfterImport(_WRITER_MODULE, wrap))


def _write_in_rounds(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
    rounds: list[list[Any]] = []
    seen: dict[str, int] = {}
    for item in plan.items:
        number = seen[item.index.fqn] = seen.get(item.index.fqn, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    if len(rounds) < 2:  # noqa: PLR2004 - nothing is written twice
        return original(writer, plan, planner)
    if "shard_index" not in plan.storage_data:
        msg = (
            f"HuggingFaceStorageWriter without save_distributed=True has one entry for each name, "
            f"and this rank has several parts of {rounds[1][0].index.fqn!r}. Pass "
            f"save_distributed=True, or use shardkit.checkpoint.save_full(path, model, "
            f'format="safetensors").'
        )
        raise StateError(msg)
    results: list[Any] = []
    for number, items in enumerate(rounds):
        index = plan.storage_data["shard_index"] + number * c10d.get_world_size()
        storage_data = {**plan.storage_data, "shard_index": index}
        part = dataclasses.replace(plan, items=items, storage_data=storage_data)
        results += original(writer, part, planner).wait()
    done: torch.futures.Future[list[Any]] = torch.futures.Future()
    done.set_result(results)
    return done


def _refuse_full_state_dicts(module: types.ModuleType) -> None:
    def refuse(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("options")
        is_sharded = any(hasattr(param, "local_piece") for param in model.parameters())
        if is_sharded and getattr(options, "full_state_dict", False):
            msg = (
                f"{original.__name__} of torch {torch.__version__} cannot handle full_state_dict="
                f"True for modules sharded by shardkit. Use the function of the same name in "
                f"shardkit.checkpoint."
            )
            raise StateError(msg)
        return original(model, *args, **kwargs)

    for name in _PUBLIC_STATE_DICT_FUNCTIONS:
        setattr(module, name, _wrapped(getattr(module, name), refuse))
