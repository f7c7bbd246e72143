"""Private names of torch for process groups, and for DTensors over them.

| branch | until which torch |
| --- | --- |
| ``root_mesh``: a table of meshes in place of a method | 2.9 |
| ``forget_dtensor_meshes``: there is no function for it | 2.9, perhaps newer ones |
| ``nccl_flight_record``: a build without NCCL | any |
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d  # noqa: TID251 - a private name of it

from shardkit._compat.once import is_wrapped, once, wrap
from shardkit._errors import ShardedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def named_group(name: str) -> Iterator[None]:
    """Give a name to the process group that this thread makes by local synchronization.

    Torch names such a group by its ranks and by the number of groups that the process is in. That
    number differs between ranks if one of them is also in another group; each rank then waits for
    the others under a different name. If torch lacks the function that is wrapped here, its own
    names stay.

    Beside the main thread, the group also gets a connection of its own to the store. On one
    connection a thread would wait for the other ranks in front of another thread, which they may
    wait for.
    """
    _wrap_making()
    _group_names.name = name
    try:
        yield
    finally:
        del _group_names.name


_group_names = threading.local()


@once
def _wrap_making() -> None:
    def named(original: Any, ranks: Any) -> Any:
        return getattr(_group_names, "name", None) or original(ranks)

    def made(original: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = hasattr(_group_names, "name")
        if is_ours and threading.current_thread() is not threading.main_thread():
            args = tuple(_cloned(each) if isinstance(each, c10d.Store) else each for each in args)
        return original(*args, **kwargs)

    for function, wrapper in (("_hash_ranks_to_str", named), ("_new_process_group_helper", made)):
        if hasattr(c10d, function):
            wrap(c10d, function, wrapper)


def _cloned(store: Any) -> Any:
    """Return a store over a new connection; the same one if that is not possible."""
    try:
        return store.clone()
    except RuntimeError:  # Torch's fake stores cannot be cloned.
        return store


def waited(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective and return it; return others unchanged."""
    from torch.distributed import _functional_collectives  # noqa: TID251 - DTensors only

    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        result: Tensor = tensor.wait()
        return result
    return tensor


def set_local_tensor(dtensor: Any, local: Tensor) -> None:
    """Replace the memory of a DTensor that no code may use any more."""
    dtensor._local_tensor = local


def refuse_to_split_sharded() -> None:
    """Have torch refuse to split sharded tensors into DTensors.

    It would send parts of them by a collective that reads memory which they do not have, which ends
    the process: no dispatch sees the tensors in its list of lists.
    """
    module = sys.modules.get("torch.distributed.tensor")  # Without it there is nothing to split.
    if module is None or is_wrapped(module.Shard, "_shard_tensor"):
        return

    def refuse(original: Any, placement: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(tensor, "local_piece"):
            msg = (
                f"a sharded tensor of shape {tuple(tensor.shape)} cannot become a DTensor. Call "
                f"parallelize_module first, then fully_shard over another axis of the mesh."
            )
            raise ShardedTensorError(msg)
        return original(placement, tensor, *args, **kwargs)

    wrap(module.Shard, "_shard_tensor", refuse)


_IN_LISTS_OF_LISTS = ("scatter_list", "input_list", "gather_list")
"""Lists of ``dist.scatter``, `reduce_scatter`, `gather`, which torch puts into lists of lists."""


@once
def refuse_sharded_in_lists(sharded: type) -> None:
    """Have torch refuse sharded tensors in lists whose memory a collective would read or write.

    No dispatch sees them there, and they do not have that memory, which ends the process. `gather`
    would fill this rank's piece only.

    Args:
        sharded: Base class of sharded tensors and of their views.
    """

    def check(original: Any, param: Any, name: str) -> None:
        original(param, name)
        for each in param if name in _IN_LISTS_OF_LISTS else ():
            if issubclass(type(each), sharded):
                msg = (
                    f"{name} of a collective has a sharded tensor of shape {tuple(each.shape)}, of "
                    f"which this rank has a shard only. Pass plain tensors: to_local().clone(), or "
                    f"full_tensor(), called on all ranks."
                )
                raise ShardedTensorError(msg)

    wrap(c10d, "_check_tensor_list", check)


def strided_split_factor(placement: Any) -> int | None:
    """Return the split factor of a ``_StridedShard``; None: the placement is another one.

    Each rank has a chunk of each of so many parts of a dim. The class is private in torch 2.9.0 to
    2.13.0.
    """
    is_strided = type(placement).__name__ == "_StridedShard"
    return int(placement.split_factor) if is_strided else None


def root_mesh(mesh: Any) -> Any:
    """Return the torch mesh of which a torch mesh is a part, or the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # noqa: TID251 - torch < 2.10

    return _mesh_resources.get_root_mesh(mesh)


def nccl_flight_record(*, with_entries: bool) -> str | None:
    """Return torch's record of NCCL collectives, in JSON; None: there is no record.

    Args:
        with_entries: Whether to list those that are not done. For each one that was captured in a
            graph, torch then prints an error, since its event cannot be queried.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # Torch was built without NCCL.
        return None
    found: bytes = dump(includeCollectives=with_entries, onlyActive=True)
    return found.decode()


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make a default process group whose collectives return at once; no public way in 2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def group_named(name: str) -> Any:
    """Return the process group with a name; operators of DTensors have only the name."""
    resolve: Any = getattr(c10d, "_resolve_process_group")  # noqa: B009 - typed in some versions
    return resolve(name)


def forget_dtensor_meshes() -> None:
    """Prevent operators on DTensors from returning meshes of a destroyed default group.

    Torch caches the placements of results, with their mesh, by the inputs' placements. There is no
    public way to clear the cache.
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
    """Return the store of the default process group, which ranks use to wait for each other."""
    return torch.distributed.distributed_c10d._get_default_store()  # noqa: TID251


def ranks_are_threads() -> bool:
    """Whether the ranks are threads of this process, as in torch's `MultiThreadedTestCase`."""
    return type(c10d._world).__name__ == "ThreadLocalWorld"


def separate_attempts() -> None:
    """Keep ranks that torchrun has restarted apart from the names that earlier ranks left.

    With ``--max-restarts`` all attempts share torchrun's store (`_create_c10d_store` of torch 2.9
    to 2.13 expects a new one), so a rank would wait for the address of a dead rank.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return
    module = sys.modules["torch.distributed.rendezvous"]
    if is_wrapped(module, "_create_c10d_store"):
        return

    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = original(*args, **kwargs)
        return c10d.PrefixStore(f"attempt_{attempt}", store) if is_shared else store

    wrap(module, "_create_c10d_store", create)


def before_threads_end(callback: Callable[[], None]) -> None:
    """Call `callback` when Python is about to end, while thread pools still accept work.

    Functions of `atexit` run later, when pools have been shut down. The function of the pools is
    registered in the same place (CPython 3.9 to 3.14), and the last one registered runs first.
    """
    import concurrent.futures.thread  # noqa: F401 - so that its function is registered before

    threading._register_atexit(callback)  # type: ignore[attr-defined]


def around_end_of_world(
    before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> None:
    """Have functions called around ``dist.destroy_process_group()`` of the default group.

    Torch has no hook for it. Code that imported the function by its name before bypasses the
    wrapper.
    """

    def wrapper(destroy: Any, group: Any = None) -> None:
        is_end = c10d.is_initialized() and group in {None, c10d.GroupMember.WORLD}
        if is_end:
            before()
        destroy(group)
        if is_end:
            after()

    wrap(c10d, "destroy_process_group", wrapper)
    torch.distributed.destroy_process_group = c10d.destroy_process_group  # noqa: TID251


def process_group_backend(group: Any, device: torch.device) -> Any:
    """Return the engine behind a process group for a device type; None if it has none."""
    try:
        return group._get_backend(device)
    except RuntimeError:  # "No backend type associated with device type"
        return None


def timeout_of(group: Any) -> float | None:
    """Return the seconds after which gloo ends a wait of a process group; None: unknown."""
    engine = process_group_backend(group, torch.device("cpu"))
    timeout = getattr(getattr(engine, "options", None), "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())


def coalesced(group: Any) -> Any:
    """Return a context whose all-gathers are sent as one collective; no public way in 2.13."""
    return c10d._coalescing_manager(group)
