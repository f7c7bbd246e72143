"""`materialize`: memory and values for a model on the meta device, module by module.

[Note: whole for a moment]
A module is initialized while it holds whole, plain parameters, as it does without sharding: so
whatever its initialization does is right, also what reads values. Each rank draws all of them,
keeps its pieces, and lets the whole ones go before the next module's turn. The pieces of all groups
get their memory before that: what stays is not mixed with what goes, which would leave holes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardkit import _compat_modules
from shardkit._errors import StateError, listed
from shardkit._module.borrowed import Borrowed, is_unwritten
from shardkit._module.deferred import execute_sharding
from shardkit._module.hooks import get_state, groups_in
from shardkit._module.initializers import InitializedModule, units_of
from shardkit._module.lent import Lent
from shardkit._module.on_meta import buffers_on_meta, params_on_meta
from shardkit._params.fingerprint import WholeValues
from shardkit._params.host_heap import give_back
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit.backends.world import group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from shardkit._progress import Progress
    from shardkit._runtime.group import ParamGroup


def materialize(
    model: nn.Module,
    init_fn: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
    progress: Progress = None,
) -> nn.Module:
    """Give memory and values to what is on the meta device, module by module, in place.

    After `fully_shard`, on all ranks, with the same seed:

        with torch.device("meta"):
            model = Model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(0)
        materialize(model)

    Every module that holds parameters or buffers on meta is initialized once, in the order of
    ``model.apply``: children in the order in which they were registered, then the module itself. In
    that moment its own parameters are whole and plain. Without `init_fn`, modules that hold nothing
    have their turn, too, if they have an initialization: it may write or scale what modules inside
    hold, as those of `nn.Transformer` and of transformers' GPT2 and T5 do.

    What has values already keeps them, so after `load_full` this fills in what the file lacks, as
    buffers with ``persistent=False``. A parameter that several modules hold gets its values from
    the first of them, and from those around them. A model that is not sharded becomes the plain one
    that has the same values. After an error, what has no values is on meta, and a second call goes
    on with it.

    Random numbers come from the generator of `device`, one module after the other; how modules are
    grouped has no influence. So one seed gives the same values at every number of ranks, and those
    of ``torch.manual_seed(0); Model()`` on that device, if there each module draws in its
    `reset_parameters` alone, in the order of ``apply``, and no parameter is tied.

    Args:
        model: A model that is on meta as a whole or in part; sharded, or not. Or a module in a
            sharded model.
        init_fn: A function of each such module (`param_init_fn` of FSDP1 and torch_xla). It writes
            the module's own parameters and buffers, not those of modules inside. It may replace
            them, also by ``module.to_empty(device=..., recurse=False)``. None: the model's
            ``_init_weights(module)``, as in transformers; where there is none, or it writes
            nothing, the module's own ``reset_parameters()`` (or ``_reset_parameters``, or
            ``init_weights``, without arguments) and ``reset_buffers()`` or ``rope_init()``.
        device: The device on which modules are initialized. None: the mesh's device, for XLA the
            host. With ``"cpu"`` an accelerator gets the values of the plain model on the CPU.
        progress: A progress as of `shardkit.checkpoint.save`, of the bytes of whole tensors.

    Returns:
        `model`.

    Raises:
        StateError: Before anything is changed: modules with nothing to initialize them. Else: an
            initialization has left a tensor unwritten, or made one of another shape or dtype. Names
            are those in `model`.

    Cost: no collectives where each module writes its own tensors, or overwrites whole ones of
    modules inside. One that reads those, or writes a part of them, costs a gather of each at its
    first touch after another one. On XLA that is refused. Memory: the shards, then the largest
    module's own parameters once more, whole, and of modules inside one tensor at a time, or those
    that one function of torch gets; what was made NumPy's, or replaced, to the end of the module's
    turn. Of a group the pieces once more, while it gets its memory.
    Source: `param_init_fn` of PyTorch's FSDP1 and torch_xla.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        what = f"initializing {type(model).__name__}"
        with Meter(progress, what, rank=max(group_rank(None), 0)) as meter:
            Filling(model, init_fn, device).run(meter)
    return model


_PARAMETRIZED = (
    " torch.nn.utils.parametrizations hold the tensors that a weight is computed from in a "
    "ParametrizationList, which initializes nothing: have init_fn write the parameters of each "
    "ParametrizationList, and the buffers of the parametrizations in it; or build the module with "
    "values, not on meta, and shard it then."
)


class Filling:
    """What is on meta, and where it goes.

    Args:
        model: The model, as of `materialize`.
        init_fn: The function, as of `materialize`.
        device: The device, as of `materialize`.
        only: Tensors that are to get values; None: all that is on meta.

    Attributes:
        device: The device on which modules are initialized.
    """

    def __init__(
        self,
        model: nn.Module,
        init_fn: Callable[[nn.Module], object] | None = None,
        device: torch.device | str | None = None,
        only: Iterable[Tensor] | None = None,
    ) -> None:
        self._model = model
        held = [*model.parameters(), *model.buffers()]
        wanted = held if only is None else only
        self._pending: dict[int, Tensor] = {id(each): each for each in wanted if each.is_meta}
        self._groups = [g for g in groups_in(model, recurse=True) if self._is_pending_in(g)]
        self._group_of = {id(p): g for g in self._groups for b in g.buckets for p in b.sharded}
        self._values = {group: WholeValues() for group in self._groups}
        backend = next((s.spec.mesh.backend for s in held if isinstance(s, ShardedTensor)), None)
        is_traced = backend is not None and backend.is_traced
        chosen = None if device is None else torch.device(device)
        host = torch.device("cpu")
        self._home = (chosen or host) if backend is None else backend.device
        self.device = chosen or (host if is_traced else self._home)
        self._has_init_fn = init_fn is not None
        self._fresh = frozenset(self._pending)
        self._units = [
            u for u in units_of(model, init_fn) if any(self._wanted_of(u)) or self._writes_inside(u)
        ]
        self._last_group: ParamGroup | None = None
        self._meter = Meter(progress=False, what="", rank=0)

    def _is_pending_in(self, group: ParamGroup) -> bool:
        return any(id(param) in self._pending for b in group.buckets for param in b.sharded)

    def _wanted_of(self, unit: InitializedModule) -> Iterator[tuple[str, Tensor]]:
        """Yield those tensors of a unit that have no values yet."""
        for tensors in _dicts_of(unit):
            for attribute, tensor in tensors.items():
                if tensor is not None and id(tensor) in self._pending:
                    yield f"{unit.name}.{attribute}".removeprefix("."), tensor

    def _writes_inside(self, unit: InitializedModule) -> bool:
        """Whether a unit has an initialization, and modules inside hold what it may write."""
        if self._has_init_fn or not unit.initializers:
            return False
        own = {id(tensor) for tensors in _dicts_of(unit) for tensor in tensors.values()}
        held = [*unit.module.parameters(), *unit.module.buffers()]
        return any(id(tensor) in self._fresh and id(tensor) not in own for tensor in held)

    def run(self, meter: Meter) -> None:
        self._check()
        self._meter = meter
        meter.expect(sum(tensor.nbytes for tensor in self._pending.values()))
        try:
            self._fill_all()
        finally:
            self._forget_unwritten()
        self._check_all_have_values()

    def run_where_possible(self) -> None:
        """Initialize modules until all that is wanted has values; what fails stays on meta."""
        for unit in self._units:
            inside = [*unit.module.parameters(), *unit.module.buffers()]
            if unit.initializers and any(id(tensor) in self._pending for tensor in inside):
                with contextlib.suppress(Exception):
                    self._fill(unit)
        self._execute(None)

    def _forget_unwritten(self) -> None:
        """Put pieces that have memory and no values back on meta: after an error."""
        for tensor in self._pending.values():
            if isinstance(tensor, ShardedTensor) and not tensor.is_meta:
                piece = torch.empty(tensor.spec.piece_numel, dtype=tensor.dtype, device="meta")
                tensor.replace_piece(piece)

    def _fill_all(self) -> None:
        for module in self._model.modules():
            state = get_state(module)
            if state is not None and state.group in self._values:
                cast("Any", module).reshard()
        for group in self._groups:
            if not group.mesh.backend.is_traced:
                _give_memory(group, self._pending)
        with self._plain_rnns():
            for unit in self._units:
                give_back(self._fill(unit))
        self._execute(None)
        for group, values in self._values.items():
            group.take_up_pieces()
            group.note_values(values)

    def _check(self) -> None:
        """Raise if something cannot be given values."""
        tensor_parallel = [
            name
            for name, param in self._model.named_parameters()
            if id(param) in self._pending
            and hasattr(param, "redistribute")
            and not isinstance(param, ShardedTensor)
        ]
        if tensor_parallel:
            msg = (
                f"materialize found DTensors on meta that fully_shard did not take: "
                f"{listed(tensor_parallel)}. Call fully_shard on their modules first."
            )
            raise StateError(msg)
        names: list[str] = []
        kinds: dict[str, None] = {}
        claimed: set[int] = set()
        for unit in self._units:
            wanted = [
                (n, tensor) for n, tensor in self._wanted_of(unit) if id(tensor) not in claimed
            ]
            claimed |= {id(tensor) for _, tensor in wanted}
            if wanted and not unit.initializers:
                names += [name for name, _ in wanted]
                kinds[type(unit.module).__name__] = None
        if names:
            msg = (
                f"materialize has no way to give values to {listed(names)}: {', '.join(kinds)} has "
                f"no reset_parameters() that can be called without arguments. Add one, pass "
                f"materialize(model, init_fn), a function that initializes the module it gets, or "
                f"set these tensors before."
            )
            if "ParametrizationList" in kinds:
                msg += _PARAMETRIZED
            raise StateError(msg)

    def _check_all_have_values(self) -> None:
        left = [*params_on_meta(self._model), *buffers_on_meta(self._model)]
        if left:
            msg = (
                f"still on the meta device after materialize: {listed(left)}. Their modules' "
                f"initialization does not write them. Have reset_parameters() or init_fn do it, "
                f"or set them before, e.g. module.table = compute_table()."
            )
            raise StateError(msg)

    @contextlib.contextmanager
    def _plain_rnns(self) -> Iterator[None]:
        """Let RNNs that are not sharded have no weak references to weights that get memory."""
        rnns = [
            module
            for module in self._model.modules()
            if isinstance(module, nn.RNNBase)
            and not any(isinstance(p, ShardedTensor) for p in module.parameters())
        ]
        for rnn in rnns:
            _compat_modules.rnn_forget_weight_refs(rnn)
        try:
            yield
        finally:
            for rnn in rnns:
                _compat_modules.rnn_restore_weight_refs(rnn)

    # --- one module -----------------------------------------------------------------------------

    def _fill(self, unit: InitializedModule) -> int:
        """Initialize a module, keep what is wanted of it; return the bytes that are let go then."""
        freed = 0
        wanted = list(self._wanted_of(unit))
        if not wanted and not self._writes_inside(unit):
            return freed  # Tied to what an earlier module has initialized.
        with Borrowed(unit, self.device, self._pending) as borrowed, self._lent(unit, borrowed):
            for initialize in unit.initializers:
                self._run(unit, initialize)
                unwritten = borrowed.unwritten()
                if not unwritten:
                    break
            results = borrowed.results()
        for name, tensor in wanted:
            result = results.pop(id(tensor), None)
            if isinstance(tensor, nn.Parameter):
                _check_result(name, tensor, result, unwritten=id(tensor) in unwritten)
            elif result is None or id(tensor) in unwritten:
                continue  # A buffer, which stays on meta.
            self._execute(self._group_of.get(id(tensor)))
            self._take(tensor, cast("Tensor", result))
            del self._pending[id(tensor)]
            self._meter.add(tensor.nbytes)
            if isinstance(tensor, ShardedTensor) and result is not None:
                freed += result.nbytes if result.device.type == "cpu" else 0
        return freed

    def _lent(
        self, unit: InitializedModule, borrowed: Borrowed
    ) -> contextlib.AbstractContextManager[object]:
        """Let the rest of what a unit and the modules inside hold be there where it is touched."""
        if self.device.type == "xla":  # Its tensors have no storages.
            return contextlib.nullcontext()
        own = {id(tensor) for tensors in _dicts_of(unit) for tensor in tensors.values()}

        def take(name: str, target: Tensor, whole: Tensor) -> None:
            if id(target) not in self._fresh or id(target) in own:
                return  # It had values before, or it is tied to what has got them.
            if id(target) in self._pending and is_unwritten(whole):
                return
            _check_result(name, target, whole, unwritten=False)
            self._execute(self._group_of.get(id(target)))
            is_kept = target.is_meta and not isinstance(target, ShardedTensor)
            self._take(target, whole.clone() if is_kept else whole)
            self._pending.pop(id(target), None)

        return Lent(unit.name, unit.module, self.device, borrowed.stand_ins, self._pending, take)

    def _run(self, unit: InitializedModule, initialize: Callable[[], object]) -> None:
        try:
            with self.device:  # Also where `materialize` is called under torch.device("meta").
                initialize()
        except Exception as error:
            kind = type(unit.module).__name__
            error.add_note(f"while materialize() initialized {unit.name or 'the root'!r}, a {kind}")
            raise

    def _take(self, target: Tensor, result: Tensor) -> None:
        """Let a tensor of the model have the values."""
        added = user_attributes(result)
        if isinstance(target, ShardedTensor):
            group = self._group_of.get(id(target))
            entry: Any = target.spec.entry() if target.spec.entry is not None else None
            if group is not None and entry is not None and not target.spec.is_traced:
                self._values[group].note(entry, result)
            target.copy_values(result.detach())
        elif not target.is_meta:
            target.detach().copy_(result)
        else:
            new = result.detach().to(self._home)
            if isinstance(target, nn.Parameter):
                new = nn.Parameter(new, requires_grad=target.requires_grad)
            new.__dict__.update(user_attributes(target))
            torch.utils.swap_tensors(target, new)
        target.__dict__.update(added)

    def _execute(self, group: ParamGroup | None) -> None:
        """Where operators are traced, run what was traced for the last group."""
        last, self._last_group = self._last_group, group
        if last is not None and last is not group and last.mesh.backend.is_traced:
            execute_sharding(last.mesh.backend.region)


def _dicts_of(unit: InitializedModule) -> Iterator[dict[str, Any]]:
    for holder in unit.holders:
        yield holder._parameters  # noqa: SLF001 - keeps tied ones apart
        yield holder._buffers  # noqa: SLF001


def _check_result(name: str, target: Tensor, result: Tensor | None, *, unwritten: bool) -> None:
    """Raise if a parameter did not get values, or not such as it can take."""
    if result is None or unwritten:
        msg = (
            f"the initialization of parameter {name!r} of shape {tuple(target.shape)} leaves "
            f"elements of it without values. Have reset_parameters() of its module write all of "
            f"it, or pass materialize(model, init_fn), a function that does."
        )
        raise StateError(msg)
    if result.shape != target.shape or result.dtype != target.dtype:
        msg = (
            f"the initialization made parameter {name!r} one of shape {tuple(result.shape)}, "
            f"{result.dtype}; it is of shape {tuple(target.shape)}, {target.dtype}. Write to the "
            f"parameter that the module has."
        )
        raise StateError(msg)


def _give_memory(group: ParamGroup, pending: Container[int]) -> None:
    """Give memory, and no values, to those pieces of a group that are wanted.

    Cost: the shards; beside them the pieces once more, for a moment.
    """
    for bucket in group.buckets:
        for param in bucket.sharded:
            if isinstance(param, ShardedTensor) and param.is_meta and id(param) in pending:
                spec = param.spec
                empty = torch.empty(spec.piece_numel, dtype=param.dtype, device=spec.device)
                param.replace_piece(empty)
    group.take_up_pieces()
