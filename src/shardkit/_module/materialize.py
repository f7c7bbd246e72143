"""`materialize`: memory and values for a model on the meta device, module by module.

[Note: whole for a moment]
A module is initialized while it holds whole, plain parameters, as it does without sharding. So any
initialization works, also one that reads values. Each rank draws whole parameters, keeps its
pieces, and frees the rest before the next module's turn. The pieces of all groups get their memory
before that: memory that stays is not mixed with memory that is freed, which would leave holes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardkit._compat import torch_modules
from shardkit._errors import StateError
from shardkit._module.fsdp_module import own_class
from shardkit._module.hooks import groups_in
from shardkit._module.on_meta import buffers_on_meta, execute_sharding, params_on_meta
from shardkit._params.bucket import WholeValues
from shardkit._params.memory import give_back
from shardkit._progress import Meter
from shardkit._settings import refuse_non_module
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit._text import listed
from shardkit._tree import iter_tensors
from shardkit.backends.device import own_random_numbers
from shardkit.backends.groups import group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from shardkit._progress import Progress
    from shardkit._runtime.group import ParamGroup


# --- initializers ---------------------------------------------------------------------------------

_OWN = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods of a module that give values to its own parameters; the first that exists is called."""

_OF_BUFFERS = ("reset_buffers", "rope_init")
"""Methods of a module that compute its buffers, as in torchtune; called after one of `_OWN`."""

_OF_MODEL = "_init_weights"
"""A model's method that initializes a module inside it, as in transformers and timm."""

_OF_ROTARY = "rope_init_fn"
"""Function that makes a table of rotary positions from a config, in transformers before 5.0."""

_TABLE, _FIRST_TABLE = "inv_freq", "original_inv_freq"
"""Buffers where such a module keeps the table, and the table that it began with."""

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True, eq=False)
class InitializedModule:
    """A module, and the tensors that it holds itself."""

    name: str
    module: nn.Module
    # The module, and containers of parameters in it, by name. The containers are no units.
    holders: dict[str, nn.Module]
    # Lists of calls that give it values; the first list that writes all of them is enough.
    initializers: list[list[Callable[[], object]]]


def units_of(
    model: nn.Module, init_fn: Callable[[nn.Module], object] | None = None
) -> Iterator[InitializedModule]:
    """Yield modules in the order of `nn.Module.apply`, each once: inner modules come first."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, owner: nn.Module | None) -> Iterator[InitializedModule]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if _takes(module, _OF_MODEL, 1):
            owner = module
        for child_name, child in module.named_children():
            if not isinstance(child, _CONTAINERS):
                yield from visit(f"{name}.{child_name}".removeprefix("."), child, owner)
        if init_fn is None:
            initializers = list(_defaults(module, owner))
        else:
            initializers = [[functools.partial(init_fn, module)]]
        yield InitializedModule(name, module, dict(_with_containers(name, module)), initializers)

    yield from visit("", model, None)


def _with_containers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for child_name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _with_containers(f"{name}.{child_name}".removeprefix("."), child)


def _defaults(module: nn.Module, owner: nn.Module | None) -> Iterator[list[Callable[[], object]]]:
    """Yield the ways to initialize a module, in the order to try them.

    The model's own method comes first. Modules that it leaves alone get the values of their
    constructors, as in the plain model. Tables of rotary positions come last.
    """
    # `init_weights` of a model with `_init_weights` initializes all modules in it.
    ways = _OWN[:-1] if module is owner else _OWN
    names = [name for name in ways if _takes(module, name, 0)][:1]
    names += [name for name in _OF_BUFFERS if _takes(module, name, 0)]
    own = [getattr(module, name) for name in names]
    if owner is not None:
        init = functools.partial(getattr(owner, _OF_MODEL), module)
        yield [init]
        if own:
            yield [*own, init]
    elif own:
        yield own
    if callable(module.__dict__.get(_OF_ROTARY)) and _TABLE in module._buffers:  # noqa: SLF001
        yield [functools.partial(_compute_rotary_table, module)]


def _compute_rotary_table(module: Any) -> None:
    """Let a module of transformers compute the frequencies of rotary positions again."""
    table = getattr(module, _OF_ROTARY)(module.config)[0]
    for name in (_TABLE, _FIRST_TABLE):
        if name in module._buffers:  # noqa: SLF001
            getattr(module, name).copy_(table)


def _takes(module: nn.Module, name: str, num_args: int) -> bool:
    """Whether a module has a method that needs exactly `num_args` arguments."""
    method = getattr(type(module), name, None) and getattr(module, name)
    if not callable(method):
        return False
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return num_args == sum(p.default is p.empty and p.kind not in any_number for p in parameters)


# --- tensors without values -----------------------------------------------------------------------

_UNWRITTEN_BYTE = 0xA5


def mark_unwritten(tensor: Tensor) -> None:
    """Fill a new tensor with a value that no initialization writes."""
    if _may_be_nan(tensor):
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(_UNWRITTEN_BYTE)


def is_unwritten(tensor: Tensor) -> bool:
    """Whether an element of a parameter, or the whole of a buffer, was never written."""
    if tensor.numel() == 0:
        return False
    values = tensor.detach()
    if not _may_be_nan(tensor):
        if not values.is_contiguous():
            return False  # It is not the tensor that was marked.
        return bool((values.view(-1).view(torch.uint8) == _UNWRITTEN_BYTE).all())
    if not values.sum().isnan():
        return False  # This test needs no memory. A NaN may also be the sum of infinities.
    unwritten = values.isnan()
    return bool(unwritten.any() if isinstance(tensor, nn.Parameter) else unwritten.all())


def _may_be_nan(tensor: Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.dtype.itemsize > 1


# --- stand-ins for the time of an initialization --------------------------------------------------
#
# [Note: memory for one operator] A module may initialize tensors of modules inside, as
# `nn.Transformer` does for a whole model. So the stand-ins for these tensors have a storage
# without memory. When a function of torch gets a stand-in, or a view of it, the values are loaded.
# When a later function gets another stand-in, they are taken to their tensor, and the memory is
# freed. So one tensor is whole at a time, however many the module writes.

# fmt: off
_OVERWRITES = frozenset((
    "normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "kaiming_uniform_",
    "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_",
))
"""Functions that overwrite the whole of their first argument."""

_LOOKS = frozenset((
    "__get__", "__set__", "__len__", "__hash__", "dim", "ndimension", "size", "stride", "numel",
    "nelement", "element_size", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "get_device", "requires_grad_", "detach", "view", "view_as", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like",
))
"""Functions that do not read values of their first argument or the size of its memory."""

_STRIDED = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that torch computes only for tensors with memory."""
# fmt: on

_PLAIN = (Tensor, int, float, complex, bool, str, torch.dtype, torch.device, torch.layout)


class _Place(NamedTuple):
    """Place where a module holds a tensor."""

    name: str  # The name of the tensor in the model.
    holder: nn.Module
    tensors: dict[str, Any]  # Its parameters, or its buffers.
    attribute: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Let the module hold a tensor, without the checks of `setattr`."""
        self.tensors[self.attribute] = tensor
        if isinstance(self.holder, nn.RNNBase) and isinstance(tensor, nn.Parameter):
            setattr(self.holder, self.attribute, tensor)  # An RNN also has a list of its weights.


def _places_in(holders: Mapping[str, nn.Module]) -> Iterator[_Place]:
    """Yield every place of the tensors that modules hold themselves, tied ones once per place."""
    for name, holder in holders.items():
        for tensors in (holder._parameters, holder._buffers):  # noqa: SLF001 - keeps tied ones apart
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    full_name = f"{name}.{attribute}".removeprefix(".")
                    yield _Place(full_name, holder, tensors, attribute, tensor)


@dataclass(slots=True, eq=False)
class _StandIn:
    """A tensor, and the plain one that modules hold in its place."""

    name: str  # The name of the tensor in the model.
    target: Tensor  # The tensor.
    held: Tensor  # The tensor that modules hold in its place.
    whole: Tensor  # A tensor on the memory of `held`, even if the module replaces `held`.
    is_own: bool  # Whether the module whose turn it is holds the tensor itself.
    storage: torch.UntypedStorage | None = None  # The memory of both, if it is there only at times.
    is_pinned: bool = False  # Whether code may reach the memory without torch's functions.


class StandIns(TorchFunctionMode):
    """A context in which a module and modules inside hold plain tensors in place of their own.

    The module's own tensors without values are whole from the start. Other tensors get memory when
    they are touched, see the note. On XLA they stay as they are, since tensors have no storages
    there. On exit modules hold their own tensors again.

    Args:
        unit: The module.
        device: The device of the stand-ins.
        pending: The tensors that have no values yet, by id.
        take: A function that is called with the name, the tensor and its values, for tensors of
            modules inside, if these may have been written. It decides which values to keep. Their
            memory is freed after the call.
    """

    is_touched = False  # Whether a function of torch got a tensor of modules inside.

    def __init__(
        self,
        unit: InitializedModule,
        device: torch.device,
        pending: Container[int],
        take: Callable[[str, Tensor, Tensor], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._pending = pending
        self._take = take
        self._places: list[_Place] = []
        self._by_target: dict[int, _StandIn] = {}
        self._by_storage: dict[int, _StandIn] = {}
        self._loaded: list[_StandIn] = []
        own = {id(place.tensor) for place in _places_in(unit.holders)}
        named = unit.module.named_modules()
        inside = {f"{unit.name}.{name}".strip("."): module for name, module in named}
        for place in _places_in({**unit.holders, **inside}):
            key = id(place.tensor)
            if key not in self._by_target:
                is_own = key in own
                is_whole = is_own and key in pending
                is_plain = type(place.tensor) in (Tensor, nn.Parameter)
                may_be_lent = isinstance(place.tensor, ShardedTensor) or (
                    is_plain and place.tensor.layout is torch.strided
                )
                if not is_whole and (device.type == "xla" or not may_be_lent):
                    continue
                self._by_target[key] = self._new(place, is_own=is_own, is_whole=is_whole)
            self._places.append(place)

    def _new(self, place: _Place, *, is_own: bool, is_whole: bool) -> _StandIn:
        tensor = place.tensor
        whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        held = whole.detach()
        if isinstance(tensor, nn.Parameter):
            held = nn.Parameter(held, requires_grad=tensor.requires_grad)
        held.__dict__.update(user_attributes(tensor))
        result = _StandIn(place.name, tensor, held, whole, is_own)
        if is_whole:
            mark_unwritten(whole)
        else:
            result.storage = whole.untyped_storage()
            result.storage.resize_(0)
            self._by_storage[id(result.storage)] = result
        return result

    def __enter__(self) -> Self:
        for place in self._places:
            place.put(self._by_target[id(place.tensor)].held)
        if self._by_storage:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _found(self) -> list[tuple[_StandIn, Tensor]]:
        """Return each stand-in and the tensors that modules hold in its place now."""
        found = ((place, place.tensors.get(place.attribute)) for place in self._places)
        return [(self._by_target[id(p.tensor)], each) for p, each in found if each is not None]

    def results(self) -> dict[int, Tensor]:
        """Return the module's whole tensors as it holds them now, by the ids of its own tensors."""
        found = reversed(self._found())  # The module's own places come first: they decide.
        return {id(stand_in.target): each for stand_in, each in found if stand_in.storage is None}

    def unwritten(self) -> set[int]:
        """Return the ids of the module's tensors that still have no values."""
        found = self.results().items()
        return {key for key, each in found if each.is_meta or is_unwritten(each)}

    def __exit__(self, *error: object) -> None:
        if self._by_storage:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        held = self._found()
        for place in self._places:
            place.put(place.tensor)
        try:
            if error[0] is None:
                for stand_in, found in held:
                    if stand_in.storage is not None:
                        self._settle(stand_in, found)
                for stand_in in list(self._loaded):
                    self._let_go(stand_in)
        finally:
            held.clear()
            self._by_storage.clear()
            while self._by_target:
                left = self._by_target.popitem()[1]
                # Code that still holds the stand-in may print it, which needs some memory.
                if left.storage is not None and left not in self._loaded and not left.is_pinned:
                    left.storage.resize_(left.whole.numel() * left.whole.element_size())

    def _settle(self, stand_in: _StandIn, found: Tensor) -> None:
        """Take over the tensor that the initialization put in the place of a stand-in."""
        target = stand_in.target
        if found.untyped_storage() is not stand_in.storage and not found.is_meta:
            self._load_for("", (found,))
            self._give(stand_in, found.detach().clone())
        if id(target) in self._pending or not target.is_meta:
            target.__dict__.update(user_attributes(found))

    def _give(self, stand_in: _StandIn, values: Tensor) -> None:
        if not stand_in.is_own:  # Its own tensor had values, or got them through a tied one.
            self._take(stand_in.name, stand_in.target, values)

    # --- touched tensors --------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, _: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, with the values of stand-ins loaded."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        looks = name in _LOOKS and attribute not in _STRIDED
        touched = self._load_for(name, (args[1:] if looks else args, kwargs))
        result = func(*args, **kwargs)
        self.is_touched |= bool(touched)
        if touched and (name == "data_ptr" or not _is_plain(result)):
            for loan in touched:
                loan.is_pinned = True
        return result

    def _load_for(self, name: str, given: tuple[Any, ...]) -> list[_StandIn]:
        """Load the values of the tensors that a function gets, and free all others."""
        tensors = [*iter_tensors(given, depth=0)]
        touched = {id(loan): loan for loan in map(self._loan_of, tensors) if loan is not None}
        if not touched:
            return []
        for loan in list(self._loaded):
            if id(loan) not in touched and not loan.is_pinned:
                self._let_go(loan)
        for loan in touched.values():
            if loan in self._loaded:
                continue
            is_alone = name in _OVERWRITES and loan not in map(self._loan_of, tensors[1:])
            # The function overwrites the whole stand-in, and writes each element once.
            is_whole = is_alone and tensors[0].numel() == loan.whole.numel()
            self._load(loan, is_overwritten=is_whole and tensors[0].is_contiguous())
        return [*touched.values()]

    def _loan_of(self, tensor: Tensor) -> _StandIn | None:
        if isinstance(tensor, ShardedTensor) or tensor.layout is not torch.strided:
            return None
        try:
            return self._by_storage.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # A subclass that has none.
            return None

    def _load(self, loan: _StandIn, *, is_overwritten: bool) -> None:
        assert loan.storage is not None
        values: Tensor | None = None
        if id(loan.target) not in self._pending and not is_overwritten:
            values = _whole_of(loan)
        loan.storage.resize_(loan.whole.numel() * loan.whole.element_size())
        self._loaded.append(loan)
        if values is not None:
            loan.whole.copy_(values)
        elif not is_overwritten:
            mark_unwritten(loan.whole)

    def _let_go(self, loan: _StandIn) -> None:
        assert loan.storage is not None
        self._loaded.remove(loan)
        if loan.held.untyped_storage() is loan.storage:
            self._give(loan, loan.whole)
        if loan.is_pinned:  # It is freed at the end: torch does not resize memory NumPy shares.
            return
        nbytes = loan.storage.nbytes()
        loan.storage.resize_(0)
        if self._device.type == "cpu":
            give_back(nbytes)


def _whole_of(loan: _StandIn) -> Tensor:
    target = loan.target
    if not isinstance(target, ShardedTensor):
        return target.detach()
    if target.spec.is_traced:
        msg = (
            f"an initialization reads parameter {loan.name!r} of a module inside, or writes a "
            f"part of it. On XLA it can only overwrite it as a whole (nn.init, fill_, copy_). Pass "
            f"materialize(model, init_fn), a function that initializes each module by itself."
        )
        raise StateError(msg)
    return target.whole_values().detach()


def _is_plain(result: Any) -> bool:
    """Whether a result gives access to memory through tensors only."""
    if isinstance(result, list | tuple):
        items: Iterable[Any] = result
        return all(map(_is_plain, items))
    return result is None or isinstance(result, _PLAIN)


# --- materialize ----------------------------------------------------------------------------------


def materialize(
    model: nn.Module,
    init_fn: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
    progress: Progress = None,
) -> nn.Module:
    """Give memory and values to tensors on the meta device, module by module, in place.

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
    have their turn, too, if they have an initialization: it may write or scale tensors of modules
    inside, as in `nn.Transformer` and in transformers' GPT2 and T5.

    Tensors that have values keep them. So after `load_full` this fills in what the file lacks, such
    as buffers with ``persistent=False``. A parameter that several modules hold gets its values from
    the first of them, and from modules around them. A model that is not sharded becomes the plain
    model with the same values. After an error, tensors without values are on meta, and a second
    call continues with them.

    Random numbers come from the generator of `device`, one module after the other; how modules are
    grouped has no influence. So one seed gives the same values at every number of ranks. They are
    the values of ``torch.manual_seed(0); Model()`` on that device, if each module of that model
    draws in its `reset_parameters` alone, in the order of ``apply``, and no parameter is tied.

    Args:
        model: A model that is on meta as a whole or in part, sharded or not. Or a module in a
            sharded model.
        init_fn: A function that is called with each such module (`param_init_fn` of FSDP1 and
            torch_xla). It writes the module's own parameters and buffers, not those of modules
            inside. It may replace them, e.g. by ``module.to_empty(device=..., recurse=False)``.
            None: the model's ``_init_weights(module)``, as in transformers. If there is none, or it
            writes nothing: the module's own ``reset_parameters()`` (or ``_reset_parameters``, or
            ``init_weights``, without arguments) and ``reset_buffers()`` or ``rope_init()``.
        device: The device on which modules are initialized. None: the mesh's device, for XLA the
            host. With ``"cpu"`` an accelerator gets the values of the plain model on the CPU.
        progress: A progress as in `shardkit.checkpoint.save`; it counts bytes of whole tensors.

    Returns:
        `model`.

    Raises:
        StateError: Nothing can initialize some modules, or `init_fn` cannot be called; this is
            raised before anything is changed. Or an initialization has left a tensor unwritten, or
            made one of another shape or dtype. Names are those in `model`.

    Cost: no collectives where each module writes its own tensors, or overwrites whole tensors of
    modules inside. A module that reads those tensors, or writes a part of them, costs a gather of
    each tensor when it is touched after another one. On XLA shardkit refuses that. Memory: the
    shards, the largest module's own parameters whole, and one tensor at a time of modules inside
    (all that one function of torch gets). Tensors that NumPy shares, or that were replaced, stay to
    the end of the module's turn. A group's shards exist twice while the group gets its memory.
    Source: `param_init_fn` of PyTorch's FSDP1 and torch_xla.
    """
    refuse_non_module(StateError, model)
    if init_fn is not None and not callable(init_fn):
        msg = (
            f"init_fn must be a function of a module, got {init_fn!r}. Pass a device by its name: "
            f"materialize(model, device='cpu')."
        )
        raise StateError(msg)
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
    """The tensors of a model on meta, or some of them, and how they get their values."""

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
        held_by = {
            group: [id(param) for bucket in group.buckets for param in bucket.sharded]
            for group in groups_in(model, recurse=True)
        }
        groups = [g for g, ids in held_by.items() if not self._pending.keys().isdisjoint(ids)]
        self._group_of = {key: group for group in groups for key in held_by[group]}
        self._values = {group: WholeValues() for group in groups}
        backend = next((s.spec.mesh.backend for s in held if isinstance(s, ShardedTensor)), None)
        is_traced = backend is not None and backend.is_traced
        chosen = None if device is None else torch.device(device)
        host = torch.device("cpu")
        self._home = (chosen or host) if backend is None else backend.device
        self.device = chosen or (host if is_traced else self._home)
        self._has_init_fn = init_fn is not None
        self._fresh = frozenset(self._pending)
        self._units = [
            u for u in units_of(model, init_fn) if self._wanted_of(u) or self._writes_inside(u)
        ]
        self._last_group: ParamGroup | None = None
        self._meter = Meter(progress=False, what="", rank=0)

    def _wanted_of(self, unit: InitializedModule) -> list[_Place]:
        """Return the places of a unit's tensors that have no values yet, one for each tensor."""
        places = {id(place.tensor): place for place in reversed([*_places_in(unit.holders)])}
        return [place for key, place in reversed(places.items()) if key in self._pending]

    def _writes_inside(self, unit: InitializedModule) -> bool:
        """Whether a unit has an initialization that may write tensors of modules inside."""
        if self._has_init_fn or not unit.initializers:
            return False
        inside = {id(each) for each in (*unit.module.parameters(), *unit.module.buffers())}
        inside -= {id(place.tensor) for place in _places_in(unit.holders)}
        return not inside.isdisjoint(self._fresh)

    def run(self, meter: Meter) -> None:
        self._check()
        self._meter = meter
        meter.expect(sum(tensor.nbytes for tensor in self._pending.values()))
        try:
            self._fill_all()
        finally:  # After an error pieces may have memory but no values.
            for tensor in self._pending.values():
                if isinstance(tensor, ShardedTensor) and not tensor.is_meta:
                    piece = torch.empty(tensor.spec.piece_numel, dtype=tensor.dtype, device="meta")
                    tensor.replace_piece(piece)
        left = [*params_on_meta(self._model), *buffers_on_meta(self._model)]
        if left:
            msg = (
                f"still on the meta device after materialize: {listed(left)}. Their modules' "
                f"initialization does not write them. Have reset_parameters() or init_fn do it, "
                f"or set them before, e.g. module.table = compute_table()."
            )
            raise StateError(msg)

    def run_where_possible(self) -> None:
        """Initialize modules until all wanted tensors have values; failed ones stay on meta."""
        for unit in self._units:
            inside = [*unit.module.parameters(), *unit.module.buffers()]
            if any(id(tensor) in self._pending for tensor in inside):
                with contextlib.suppress(Exception):
                    self._fill(unit)
        self._execute(None)

    def _fill_all(self) -> None:
        for group in self._values:
            cast("Any", group.modules[0]).reshard()
        for group in self._values:
            if not group.mesh.backend.is_traced:
                _give_memory(group, self._pending)
        with torch_modules.without_weight_refs(self._model.modules()):
            for unit in self._units:
                give_back(self._fill(unit))
        self._execute(None)
        for group, values in self._values.items():
            group.take_up_pieces()
            group.note_values(values)

    def _check(self) -> None:
        """Raise if a tensor cannot get values."""
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
            wanted = [p for p in self._wanted_of(unit) if id(p.tensor) not in claimed]
            claimed |= {id(place.tensor) for place in wanted}
            if wanted and not unit.initializers:
                names += [place.name for place in wanted]
                kinds[own_class(unit.module).__name__] = None
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

    # --- one module -----------------------------------------------------------------------------

    def _fill(self, unit: InitializedModule) -> int:
        """Initialize a module and keep the wanted tensors; return the bytes that are freed then."""
        freed = 0
        wanted = self._wanted_of(unit)
        if not unit.initializers or not (wanted or self._writes_inside(unit)):
            return freed  # Earlier modules that hold the same tensors have initialized them or not.
        with StandIns(unit, self.device, self._pending, self._take_inside) as stand_ins:
            for calls in unit.initializers:
                self._run(unit, calls)
                unwritten = stand_ins.unwritten()
                if not unwritten and (wanted or stand_ins.is_touched):
                    break
            results = stand_ins.results()
        for place in wanted:
            tensor = place.tensor
            result = results.pop(id(tensor), None)
            if isinstance(tensor, nn.Parameter):
                _check_result(place.name, tensor, result, unwritten=id(tensor) in unwritten)
            elif result is None or id(tensor) in unwritten:
                continue  # A buffer, which stays on meta.
            self._keep(tensor, cast("Tensor", result))
            self._meter.add(tensor.nbytes)
            if isinstance(tensor, ShardedTensor) and result is not None:
                freed += result.nbytes if result.device.type == "cpu" else 0
        return freed

    def _take_inside(self, name: str, target: Tensor, whole: Tensor) -> None:
        """Keep values that were written to a tensor of a module inside."""
        if id(target) not in self._fresh:
            return  # It had values before.
        if id(target) in self._pending and is_unwritten(whole):
            return
        _check_result(name, target, whole, unwritten=False)
        is_kept = target.is_meta and not isinstance(target, ShardedTensor)
        self._keep(target, whole.clone() if is_kept else whole)

    def _run(self, unit: InitializedModule, calls: Iterable[Callable[[], object]]) -> None:
        try:
            with self.device:  # Also where `materialize` is called under torch.device("meta").
                for call in calls:
                    call()
        except Exception as error:
            kind = own_class(unit.module).__name__
            error.add_note(f"while materialize() initialized {unit.name or 'the root'!r}, a {kind}")
            raise

    def _keep(self, target: Tensor, result: Tensor) -> None:
        """Give a tensor of the model its values."""
        group = self._group_of.get(id(target))
        self._execute(group)
        added = user_attributes(result)
        if isinstance(target, ShardedTensor):
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
        self._pending.pop(id(target), None)

    def _execute(self, group: ParamGroup | None) -> None:
        """Run what was traced for the last group, if operators are traced."""
        last, self._last_group = self._last_group, group
        if last is not None and last is not group and last.mesh.backend.is_traced:
            execute_sharding(last.mesh.backend.region)


def _check_result(name: str, target: Tensor, result: Tensor | None, *, unwritten: bool) -> None:
    """Raise if a parameter got no values, or values that it cannot take."""
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
    """Give memory, but no values, to the wanted pieces of a group.

    Cost: memory for the shards, and for a moment that of the pieces once more.
    """
    for bucket in group.buckets:
        for param in bucket.sharded:
            if isinstance(param, ShardedTensor) and param.is_meta and id(param) in pending:
                spec = param.spec
                empty = torch.empty(spec.piece_numel, dtype=param.dtype, device=spec.device)
                param.replace_piece(empty)
    group.take_up_pieces()


# --- buffers that no file has ---------------------------------------------------------------------


def rebuild_buffers(model: nn.Module, saved: Iterable[Any]) -> None:
    """Let modules compute buffers on meta that are not `saved`; what they cannot stays there.

    It calls the same methods of modules as `materialize`. All else in the model keeps its values.
    Random numbers drawn later are the same as without this call. A buffer of random numbers gets
    the same numbers on all ranks.

    Cost: see `materialize`.
    """
    known = {*map(id, saved)}
    wanted = [each for each in model.buffers() if each.is_meta and id(each) not in known]
    if wanted:
        filling = Filling(model, only=wanted)
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            own_random_numbers(filling.device, 0),
        ):
            filling.run_where_possible()
