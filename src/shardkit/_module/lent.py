"""Tensors of the modules inside a module, lent to its initialization where that touches them.

[Note: memory for one operator]
A module may initialize what modules inside hold, as `nn.Transformer` does for a whole model. So its
stand-ins for their tensors have a storage without memory. A function of torch that gets one, or a
view of it, finds the values there. The next function that gets another one lets them go, to where
they belong. So one tensor is whole at a time, however many the module writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardkit._errors import StateError
from shardkit._module.borrowed import mark_unwritten, put
from shardkit._params.host_heap import give_back
from shardkit._tensor.sharded import ShardedTensor, user_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

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
