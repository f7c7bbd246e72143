"""`materialize`: memory and values for a model on the meta device, module by module.

[Note: whole for a moment]
A module is initialized while it holds whole, plain parameters, as it does without sharding: so
whatever its initialization does is right, also what reads values. Each rank draws all of them,
keeps its pieces, and lets the whole ones go before the next module's turn. The pieces of all groups
get their memory before that: what stays is not mixed with what goes, which would leave holes.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardkit._compat import torch_modules
from shardkit._errors import StateError
from shardkit._module.hooks import get_state, groups_in
from shardkit._module.on_meta import buffers_on_meta, execute_sharding, params_on_meta
from shardkit._params.bucket import WholeValues
from shardkit._params.memory import give_back
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit._text import listed
from shardkit.backends.groups import group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from shardkit._progress import Progress
    from shardkit._runtime.group import ParamGroup


# --- initializers ---------------------------------------------------------------------------------

_OWN = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods of a module that give values to its own parameters; the first of them is called."""

_OF_BUFFERS = ("reset_buffers", "rope_init")
"""Methods of a module that compute its buffers, as torchtune's do; called after the first kind."""

_OF_MODEL = "_init_weights"
"""A model's method that initializes a module inside it, as in transformers and timm."""

_OF_ROTARY = "rope_init_fn"
"""What makes a table of rotary positions of a config, in modules of transformers before 5.0."""

_TABLE, _FIRST_TABLE = "inv_freq", "original_inv_freq"
"""Where such a module keeps the table, and the one that it began with."""

_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True, eq=False)
class InitializedModule:
    """A module with the tensors that it holds itself.

    Attributes:
        name: The name of the module.
        module: A `nn.ParameterList` or `nn.ParameterDict` is no unit, but belongs to its holder.
        holders: The module, and containers of parameters that belong to it.
        initializers: The functions that give it values: the first that writes all of them is
            enough.
    """

    name: str
    module: nn.Module
    holders: list[nn.Module]
    initializers: list[Callable[[], object]] = field(default_factory=list)


def units_of(
    model: nn.Module, init_fn: Callable[[nn.Module], object] | None = None
) -> Iterator[InitializedModule]:
    """Yield the modules in the order of `nn.Module.apply`, each once: those inside come first."""
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
        unit = InitializedModule(name, module, list(_with_containers(module)))
        if init_fn is not None:
            unit.initializers = [lambda: init_fn(module)]
        else:
            unit.initializers = list(_defaults(module, owner))
        yield unit

    yield from visit("", model, None)


def _with_containers(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _with_containers(child)


def _defaults(module: nn.Module, owner: nn.Module | None) -> Iterator[Callable[[], object]]:
    """Yield what to try.

    A model's own way comes first. Modules that it says nothing about have the values of their
    constructors, as in the plain model. Last come tables of rotary positions.
    """
    own = _own_methods(module, is_model=module is owner)

    def run_own() -> None:
        for method in own:
            method()

    if owner is not None:
        init: Any = getattr(owner, _OF_MODEL)
        yield lambda: init(module)

        def run_both() -> None:
            run_own()
            init(module)

        if own:
            yield run_both
    elif own:
        yield run_own
    if callable(module.__dict__.get(_OF_ROTARY)) and _TABLE in module._buffers:  # noqa: SLF001
        yield lambda: _compute_rotary_table(module)


def _compute_rotary_table(module: Any) -> None:
    """Have a module of transformers compute the frequencies of rotary positions again."""
    table = getattr(module, _OF_ROTARY)(module.config)[0]
    for name in (_TABLE, _FIRST_TABLE):
        if name in module._buffers:  # noqa: SLF001
            getattr(module, name).copy_(table)


def _own_methods(module: nn.Module, *, is_model: bool) -> list[Callable[[], object]]:
    # `init_weights` of a model with `_init_weights` initializes all modules in it.
    names = [name for name in _OWN if _takes(module, name, 0)]
    if is_model:
        names = [name for name in names if name != "init_weights"]
    names = names[:1] + [name for name in _OF_BUFFERS if _takes(module, name, 0)]
    return [getattr(module, name) for name in names]


def _takes(module: nn.Module, name: str, num_args: int) -> bool:
    """Whether a module has a method that can be called with so many arguments, and needs them."""
    method = getattr(type(module), name, None) and getattr(module, name)
    if not callable(method):
        return False
    needed = 0
    for parameter in inspect.signature(method).parameters.values():
        is_named = parameter.kind is not parameter.VAR_POSITIONAL
        if parameter.default is parameter.empty and is_named:
            needed += parameter.kind is not parameter.VAR_KEYWORD
    return needed == num_args


# --- whole tensors for a while --------------------------------------------------------------------

_UNWRITTEN_BYTE = 0xA5


class Borrowed:
    """A context in which a module holds whole tensors, in the place of its own.

    Replaced are those that have no values yet. On exit the module holds its own again.

    Attributes:
        stand_ins: The whole tensors, by the id of the module's own.
    """

    def __init__(
        self, unit: InitializedModule, device: torch.device, pending: Container[int]
    ) -> None:
        self._device = device
        self._pending = pending
        self.stand_ins: dict[int, Tensor] = {}
        self._places = [
            (holder, tensors, attribute, tensor)
            for holder in unit.holders
            for tensors in (holder._parameters, holder._buffers)  # noqa: SLF001
            for attribute, tensor in tensors.items()
            if tensor is not None and id(tensor) in pending
        ]

    def __enter__(self) -> Self:
        for holder, tensors, attribute, tensor in self._places:
            stand_in = self.stand_ins.get(id(tensor))
            if stand_in is None:
                stand_in = self.stand_ins[id(tensor)] = self._whole(tensor)
            put(holder, tensors, attribute, stand_in)
        return self

    def _whole(self, tensor: Tensor) -> Tensor:
        whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        mark_unwritten(whole)
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        whole.__dict__.update(user_attributes(tensor))
        return whole

    def unwritten(self) -> set[int]:
        """Return the ids of the module's tensors that have no values still."""
        held = self.results()
        wanted = [key for key in held if key in self._pending]
        return {key for key in wanted if held[key].is_meta or is_unwritten(held[key])}

    def results(self) -> dict[int, Tensor]:
        """Return what the module holds, by the id of its own tensor."""
        held = [(tensor, tensors.get(name)) for _, tensors, name, tensor in self._places]
        return {id(tensor): found for tensor, found in held if found is not None}

    def __exit__(self, *error: object) -> None:
        for holder, tensors, attribute, tensor in self._places:
            put(holder, tensors, attribute, tensor)


def put(holder: nn.Module, tensors: dict[str, Any], attribute: str, tensor: Tensor) -> None:
    """Let a module hold a tensor, past the checks of `setattr`."""
    tensors[attribute] = tensor
    if isinstance(holder, nn.RNNBase) and isinstance(tensor, nn.Parameter):
        setattr(holder, attribute, tensor)  # It keeps a list of its weights as well.


# --- tensors without values -----------------------------------------------------------------------


def mark_unwritten(tensor: Tensor) -> None:
    """Fill a new tensor with what no initialization writes."""
    if _may_be_nan(tensor):
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(_UNWRITTEN_BYTE)


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a parameter has an element that was not written, or nothing of a buffer was."""
    if tensor.numel() == 0:
        return False
    values = tensor.detach()
    if not _may_be_nan(tensor):
        if not values.is_contiguous():
            return False  # Another tensor than the one that was marked.
        return bool((values.view(-1).view(torch.uint8) == _UNWRITTEN_BYTE).all())
    if not values.sum().isnan():
        return False  # Needs no memory; else it may also be the sum of infinities.
    unwritten = values.isnan()
    return bool(unwritten.any() if isinstance(tensor, nn.Parameter) else unwritten.all())


def _may_be_nan(tensor: Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.dtype.itemsize > 1


# --- tensors lent to an initialization ------------------------------------------------------------
#
# [Note: memory for one operator] A module may initialize what modules inside hold, as
# `nn.Transformer` does for a whole model. So its stand-ins for their tensors have a storage
# without memory. A function of torch that gets one, or a view of it, finds the values there. The
# next function that gets another one lets them go, to where they belong. So one tensor is whole
# at a time, however many the module writes.

# fmt: off
_OVERWRITES = frozenset((
    "normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "kaiming_uniform_",
    "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_",
))
"""Functions after which nothing of their first argument is left."""

_LOOKS = frozenset((
    "__get__", "__set__", "__len__", "__hash__", "dim", "ndimension", "size", "stride", "numel",
    "nelement", "element_size", "storage_offset", "is_contiguous", "is_floating_point",
    "is_complex", "get_device", "requires_grad_", "detach", "view", "view_as", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like",
))
"""Functions that read no values of their first argument, and do not ask for the size of memory."""

_STRIDED = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that torch makes only where there is memory."""
# fmt: on

_LEAKS = frozenset(["numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"])
"""Functions whose results lead to the memory past torch."""

_PLAIN = (Tensor, int, float, complex, bool, str, torch.dtype, torch.device, torch.layout)


@dataclass(slots=True, eq=False)
class _Loan:
    """A tensor, and what stands in for it.

    Attributes:
        name: The name of the tensor in the model.
        target: The tensor.
        stand_in: The tensor that modules hold in its place.
        whole: Shares the memory of `stand_in`, whatever becomes of that.
        storage: The memory of both.
        is_loaded: Whether the memory is there.
        is_pinned: Whether somebody may reach the memory past torch's functions.
    """

    name: str
    target: Tensor
    stand_in: Tensor
    whole: Tensor
    storage: torch.UntypedStorage
    is_loaded: bool = False
    is_pinned: bool = False


class Lent(TorchFunctionMode):
    """A context in which a module and those inside hold stand-ins for what is not borrowed.

    Args:
        name: The name of the module.
        module: The module.
        device: The device of the stand-ins.
        borrowed: The stand-ins for the module's own tensors that are initialized, by their id.
        pending: The tensors that have no values yet, by id.
        take: A function that is called with the name, the tensor and its values, where they may
            have been written. What it is not to keep it leaves out. The values are let go after the
            call.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        borrowed: Mapping[int, Tensor],
        pending: Container[int],
        take: Callable[[str, Tensor, Tensor], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._borrowed = borrowed
        self._pending = pending
        self._take = take
        stand_ins = set(map(id, borrowed.values()))
        self._places = [
            (f"{name}.{inner}.{attribute}".replace("..", ".").strip("."), *place)
            for inner, holder in module.named_modules()
            for tensors in (holder._parameters, holder._buffers)  # noqa: SLF001
            for attribute, tensor in tensors.items()
            if tensor is not None and id(tensor) not in stand_ins and _can_lend(tensor)
            for place in [(holder, tensors, attribute, tensor)]
        ]
        self._loans: dict[int, _Loan] = {}
        self._by_storage: dict[int, _Loan] = {}
        self._loaded: list[_Loan] = []

    def __enter__(self) -> Self:
        for name, holder, tensors, attribute, tensor in self._places:
            stand_in = self._borrowed.get(id(tensor))
            if stand_in is None:
                loan = self._loans.get(id(tensor)) or self._lend(name, tensor)
                stand_in = loan.stand_in
            put(holder, tensors, attribute, stand_in)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _lend(self, name: str, tensor: Tensor) -> _Loan:
        whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        storage = whole.untyped_storage()
        storage.resize_(0)
        stand_in = whole.detach()
        if isinstance(tensor, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
        stand_in.__dict__.update(user_attributes(tensor))
        loan = _Loan(name, tensor, stand_in, whole, storage)
        self._loans[id(tensor)] = self._by_storage[id(storage)] = loan
        return loan

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        held = [(loan, tensors.get(attr)) for loan, tensors, attr in self._places_of_loans()]
        for _, holder, tensors, attribute, tensor in self._places:
            put(holder, tensors, attribute, tensor)
        try:
            if error[0] is None:
                for loan, found in held:
                    if found is not None:
                        self._settle(loan, found)
                for loan in list(self._loaded):
                    self._let_go(loan)
        finally:
            held.clear()
            self._by_storage.clear()
            while self._loans:
                _drop(self._loans.popitem()[1])

    def _places_of_loans(self) -> Iterator[tuple[_Loan, dict[str, Any], str]]:
        for _, _, tensors, attribute, tensor in self._places:
            if id(tensor) in self._loans:
                yield self._loans[id(tensor)], tensors, attribute

    def _settle(self, loan: _Loan, found: Tensor) -> None:
        """Take over what the initialization has put in the place of a stand-in."""
        if found.untyped_storage() is not loan.storage and not found.is_meta:
            self._load_for(_overwrites_none, (found,), {})
            self._take(loan.name, loan.target, found.detach().clone())
        if id(loan.target) in self._pending or not loan.target.is_meta:
            loan.target.__dict__.update(user_attributes(found))

    # --- touched tensors --------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, _: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function on values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        looks = name in _LOOKS and _attribute_of(func) not in _STRIDED
        touched = self._load_for(func, args[1:] if looks else args, kwargs)
        result = func(*args, **kwargs)
        if touched and (name in _LEAKS or not _is_plain(result)):
            for loan in touched:
                loan.is_pinned = True
        return result

    def _load_for(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> list[_Loan]:
        """Have the values of the tensors that a function gets, and no others."""
        tensors = [*_tensors_in((args, kwargs))]
        touched = {id(loan): loan for loan in map(self._loan_of, tensors) if loan is not None}
        if not touched:
            return []
        for loan in list(self._loaded):
            if id(loan) not in touched and not loan.is_pinned:
                self._let_go(loan)
        is_overwritten = getattr(func, "__name__", "") in _OVERWRITES
        for loan in touched.values():
            if loan.is_loaded:
                continue
            aliases = [t for t in tensors if self._loan_of(t) is loan]
            self._load(
                loan,
                is_overwritten=is_overwritten and aliases == tensors[:1] and _is_all(loan, tensors),
            )
        return [*touched.values()]

    def _loan_of(self, tensor: Tensor) -> _Loan | None:
        if isinstance(tensor, ShardedTensor) or tensor.layout is not torch.strided:
            return None
        try:
            return self._by_storage.get(id(tensor.untyped_storage()))
        except (NotImplementedError, RuntimeError):  # A subclass that has none.
            return None

    def _load(self, loan: _Loan, *, is_overwritten: bool) -> None:
        target = loan.target
        values: Tensor | None = None
        if id(target) not in self._pending and not is_overwritten:
            values = _whole_of(loan)
        loan.storage.resize_(loan.whole.numel() * loan.whole.element_size())
        loan.is_loaded = True
        self._loaded.append(loan)
        if values is not None:
            loan.whole.copy_(values)
        elif not is_overwritten:
            mark_unwritten(loan.whole)

    def _let_go(self, loan: _Loan) -> None:
        self._loaded.remove(loan)
        if loan.stand_in.untyped_storage() is loan.storage:
            self._take(loan.name, loan.target, loan.whole)
        loan.is_loaded = False
        if loan.is_pinned:  # At the end; torch refuses to resize what NumPy shares.
            return
        nbytes = loan.storage.nbytes()
        loan.storage.resize_(0)
        if self._device.type == "cpu":
            give_back(nbytes)


def _attribute_of(func: Any) -> str:
    """Return the name of the attribute that a function gets or sets."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _drop(loan: _Loan) -> None:
    """Let go of a loan. What somebody still holds of it may be printed: it needs some memory."""
    if not loan.is_loaded and not loan.is_pinned:
        loan.storage.resize_(loan.whole.numel() * loan.whole.element_size())


def _overwrites_none() -> None:
    """Stand for the end of the initialization, which reads."""


def _can_lend(tensor: Tensor) -> bool:
    """Whether a plain tensor can stand in for one."""
    if isinstance(tensor, ShardedTensor):
        return True
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _whole_of(loan: _Loan) -> Tensor:
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


def _is_all(loan: _Loan, tensors: list[Tensor]) -> bool:
    """Whether the first of some tensors is all of what is lent, each element once."""
    first = tensors[0]
    return first.numel() == loan.whole.numel() and first.is_contiguous()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in([*value.values()])


def _is_plain(result: Any) -> bool:
    """Whether nothing in a result leads to memory, but tensors."""
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
    """What is on meta, or of it only some tensors, and where it goes."""

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
            torch_modules.rnn_forget_weight_refs(rnn)
        try:
            yield
        finally:
            for rnn in rnns:
                torch_modules.rnn_restore_weight_refs(rnn)

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


# --- buffers that no file has ---------------------------------------------------------------------


def rebuild_buffers(model: nn.Module, buffers: list[Tensor]) -> None:
    """Have modules compute buffers on meta; those that cannot be computed stay there.

    As `materialize` does, which asks the same methods of modules. All else in the model keeps its
    values, and random numbers drawn later are those that would have been drawn without it. A buffer
    of random numbers gets the same ones on all ranks.

    Cost: see `materialize`.
    """
    wanted = [buffer for buffer in buffers if buffer.is_meta]
    if wanted:
        filling = Filling(model, only=wanted)
        with torch.inference_mode(mode=False), torch.no_grad(), _own_numbers(filling.device):
            filling.run_where_possible()


@contextlib.contextmanager
def _own_numbers(device: torch.device) -> Iterator[None]:
    """Draw from generators that begin at 0, and leave others where they are."""
    accelerator = None
    if device.type not in ("cpu", "xla"):
        accelerator = torch.get_device_module(device)
    own = [] if accelerator is None else [accelerator.current_device()]
    with torch.random.fork_rng(devices=own, device_type=device.type if own else "cuda"):
        torch.default_generator.manual_seed(0)
        if accelerator is not None:
            accelerator.manual_seed(0)
        yield
