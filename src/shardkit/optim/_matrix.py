"""`MatrixOptimizer`: each whole matrix belongs to one rank, which updates it."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd
from shardkit._errors import OptimizerError, RankMismatchError
from shardkit._params.state_dicts import map_leaves, zip_leaves
from shardkit._settings import as_number, refuse_texts
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import Mark, memory_of, writing_only
from shardkit._text import NotOfKindError, byte_size
from shardkit.backends.watch.watchdog import current_watchdog
from shardkit.optim._delegating import DelegatingOptimizer, State
from shardkit.optim._owners import Gathering, OwnerGroup, Scattering, make_owner_groups, matrix_cost
from shardkit.optim._refusals import check_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.optim import Optimizer


# --- state as all ranks see it --------------------------------------------------------------------
#
# An owner keeps the state that its optimizer made: tensors of any shape, numbers, lists of them.
# The other ranks know its form, and show tensors of which they hold nothing. So state dicts have
# the same entries on all ranks, and a checkpoint gets each tensor from its owner.

Entries = dict[str, Any]


class _Form(NamedTuple):
    """What other ranks know about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"a tensor {self.shape} of {self.dtype}"


def _form_of(leaf: Any) -> Any:
    return _Form(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _form_or_number(leaf: Any) -> Any:
    is_number = isinstance(leaf, Tensor) and leaf.ndim == 0
    return leaf.detach().cpu() if is_number else _form_of(leaf)


# --- stacks ---------------------------------------------------------------------------------------
#
# The inner optimizer steps views of a stack of shape (..., rows, columns), one for each matrix. Its
# state is shown as a stack of the same kind.


def _matrices(stack: Tensor) -> Sequence[Tensor]:
    """Return views of a stack's matrices; none for a stack without elements."""
    return stack.detach().flatten(0, -3).unbind() if stack.numel() else ()


def _form_of_stack(entries: Sequence[Entries], lead: Sequence[int], name: str) -> Entries:
    """Return the form of `_stacked` for the state of all matrices of a parameter."""
    first, *others = [map_leaves(each, _form_of) for each in entries]
    for other in others:
        for key in {**first, **other}:
            one, another = first.get(key, "nothing"), other.get(key, "nothing")
            if one != another:
                msg = (
                    f"state {key!r} of {name!r} must be tensors of one shape and dtype, or equal, "
                    f"for all matrices of the stack, got {one} and {another}. Keep a tensor there, "
                    f"or pass a class that takes stacks, and stacks=False."
                )
                raise OptimizerError(msg)

    def stacked(form: Any) -> Any:
        return _Form((*lead, *form.shape), form.dtype) if isinstance(form, _Form) else form

    return {key: map_leaves(form, stacked) for key, form in first.items()}


def _stacked(entries: Sequence[Any], lead: Sequence[int]) -> Any:
    """Return the state of all matrices of a stack; `lead` is its shape without theirs."""

    def stack(leaves: Sequence[Any]) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.stack(list(leaves)).unflatten(0, tuple(lead))

    return zip_leaves(entries, stack)


def _of_matrix(leaf: Any, number: int, lead: int) -> Any:
    """Return one matrix' part of stacked state; `lead` counts the dims of the stack."""
    if not isinstance(leaf, Tensor):
        return leaf
    return (leaf.flatten(0, lead - 1)[number] if leaf.ndim >= lead else leaf).clone()


# --- the part of one rank -------------------------------------------------------------------------


class OwnedParams:
    """The parameters of an owner group that belong to this rank."""

    def __init__(self, group: OwnerGroup, *, stacks: bool) -> None:
        self.group = group  # The group.
        self._stacks = stacks
        # Indices of parameters that have been stepped, on any rank: these have state.
        self.stepped: set[int] = set()
        # Separate memory with its own version counter, until values are gathered.
        # Whole parameters that belong to this rank, by index.
        self.wholes = {
            index: nn.Parameter(param.local_piece.new_empty(tuple(param.shape)))
            for index, (param, owner) in enumerate(zip(group.params, group.owners, strict=True))
            if owner == group.me
        }
        # Tensors that the inner optimizer steps for each of them: the whole, or views of it.
        self.stepped_as: dict[int, list[nn.Parameter]] = {
            index: [nn.Parameter(each) for each in _matrices(whole)]
            if self._is_stack(index)
            else [whole]
            for index, whole in self.wholes.items()
        }
        self._forms: dict[int, Entries] = {}
        # The piece's state when the whole was made of it; None: never, or a step raised since then.
        self.marks: list[Mark | None] = [None] * len(group.params)

    def is_anywhere(self, here: bool) -> bool:  # noqa: FBT001 - the only argument
        """Whether `here` is true on any rank. Collective: an all-reduce of one byte."""
        flag = torch.tensor([here], dtype=torch.uint8, device="cpu")
        self.group.axis.all_reduce_flags(flag)
        return bool(flag.item())

    def agree(self, batch_nbytes: int) -> list[int]:
        """Return the parameters that have gradients; update their wholes. Collective.

        Raises:
            RankMismatchError: A parameter has a gradient on some ranks only.

        Cost: one all-reduce of 3 bytes for each parameter, and an exchange of the values that
        others have written.
        """
        params, number = self.group.params, len(self.group.params)
        has_grad = [param.grad is not None for param in params]
        stale = [self._is_stale(index) for index in range(number)]
        marks = [*has_grad, *(not has for has in has_grad), *stale]
        flags = torch.tensor(marks, dtype=torch.uint8, device="cpu")
        self.group.axis.all_reduce_flags(flags)
        somewhere, missing, is_stale = flags.view(3, number).tolist()
        mixed = [i for i in range(number) if somewhere[i] and missing[i]]
        if mixed:
            self._raise_mixed(mixed[0], len(mixed))
        active = [index for index in range(number) if somewhere[index]]
        self.gather_values([i for i in active if is_stale[i]], batch_nbytes)
        return active

    def gather_values(self, indices: Sequence[int], batch_nbytes: int) -> None:
        """Fill wholes with the present values of some parameters. Collective."""
        for batch in self.group.batches(indices, batch_nbytes):
            pieces = {index: self.group.params[index].local_piece for index in batch}
            for index, whole in Gathering(self.group, batch, pieces, "values").finish().items():
                if self.group.is_whole_here(index):
                    self.wholes[index].data = whole
                else:
                    self.wholes[index].data.copy_(whole)
                for each, view in self._views(index):
                    each.data = view
            for index in batch:
                self.marks[index] = Mark(self.group.params[index])

    def _is_stack(self, index: int) -> bool:
        return self._stacks and self.wholes[index].ndim > 2  # noqa: PLR2004 - a matrix has two

    def _views(self, index: int) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Return the stepped tensors of a stack, each with its view of the whole."""
        if not self._is_stack(index):
            return ()
        return list(zip(self.stepped_as[index], _matrices(self.wholes[index]), strict=True))

    def take_gradient(self, index: int, gradient: Tensor) -> list[nn.Parameter]:
        """Set the gradients of a parameter's stepped tensors, and return these tensors."""
        steps = self.stepped_as[index]
        parts = _matrices(gradient) if self._is_stack(index) else [gradient]
        for each, part in zip(steps, parts, strict=True):
            each.grad = part
        return steps

    def stepped_whole(self, index: int) -> Tensor:
        """Return the stepped values of a parameter, contiguous.

        If a class assigned to the data of a matrix (``p.data = p.data - update``), the new data is
        copied to its place in the stack.
        """
        for each, view in self._views(index):
            if not each.is_set_to(view):
                view.copy_(each)
                each.data = view
        return self.wholes[index].detach().contiguous()

    def _is_stale(self, index: int) -> bool:
        """Whether others have written this rank's piece since the whole was made of it."""
        mark, param = self.marks[index], self.group.params[index]
        return mark is None or (param.local_piece.numel() > 0 and mark.is_past(param))

    def _raise_mixed(self, index: int, number: int) -> None:
        """Name the ranks on which a parameter has no gradient, although it has one on others."""
        group, param = self.group, self.group.params[index]
        has = group.axis.exchange(param.grad is not None)
        ranks = [rank for rank, there in zip(group.axis.members, has, strict=True) if not there]
        more = f" (and {number - 1} more parameters)" if number > 1 else ""
        msg = (
            f"parameter {param.spec.name!r}{more} has no gradient on ranks {ranks}, and "
            f"one on the others. Set gradients to None, or call zero_grad(), on all ranks or none."
        )
        raise RankMismatchError(msg)

    # --- state ---

    def exchange_forms(self, inner: Optimizer, reason: str | None) -> str | None:
        """Send the form of this rank's inner state to the other ranks. Collective.

        Numbers, also those in tensors without dims, are sent themselves.

        Args:
            inner: The optimizer.
            reason: Reason why another group failed to; None: none did.

        Returns:
            The first reason why a rank failed, or None. After a failure the old forms stay.

        Cost: one exchange of a few hundred bytes for each parameter.
        """
        forms: dict[int, Entries] = {}
        try:
            for index in self.wholes:
                entries = self._entries(index, inner)
                if not entries:
                    continue
                forms[index] = (
                    _form_of_stack(entries, self._lead(index), self.group.params[index].spec.name)
                    if self._is_stack(index)
                    else map_leaves(entries[0], _form_or_number)
                )
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            kind = "" if isinstance(error, OptimizerError) else f"{type(error).__name__}: "
            reason = reason or f"{kind}{error}"
        everyone = self.group.axis.exchange((reason, forms))
        reason = next((each for each, _ in everyone if each is not None), None)
        if reason is None:
            self._forms = {index: form for _, of_one in everyone for index, form in of_one.items()}
        return reason

    def show(self, inner: Optimizer, note_copy: Callable[[Tensor], None]) -> State:
        """Return the state by parameter; this rank's tensors are views where possible."""
        result = {}
        for index, form in self._forms.items():
            entries = self._own_state(index, inner) if index in self.wholes else form
            if entries:
                result[self.group.params[index]] = self._shown(index, entries, note_copy)
        return result

    def put(self, state: State, inner: Optimizer) -> None:
        """Put this rank's part of a state by parameter into an optimizer. Collective.

        Cost: one all-to-all for each tensor that is sharded like its parameter; a gather for each
        one that is sharded otherwise.
        """
        given = {i: state[param] for i, param in enumerate(self.group.params) if state.get(param)}
        for index, shown in given.items():
            entries = map_leaves(shown, functools.partial(self._whole, index))
            if index not in self.wholes:
                continue
            if not self._is_stack(index):
                inner.state[self.wholes[index]] = entries
                continue
            lead = len(self._lead(index))
            for number, each in enumerate(self.stepped_as[index]):
                part = functools.partial(_of_matrix, number=number, lead=lead)
                inner.state[each] = map_leaves(entries, part)
        self.stepped = set(given)

    def _shown(self, index: int, entries: Entries, note_copy: Callable[[Tensor], None]) -> Any:
        group = self.group

        def show(leaf: Any) -> Any:
            if isinstance(leaf, _Form):
                nothing = torch.empty(0, dtype=leaf.dtype, device=group.params[index].spec.device)
                return ShardedTensor(nothing, group.owned_spec(index, leaf.shape))
            if not isinstance(leaf, Tensor) or leaf.ndim == 0:
                return leaf
            flat = leaf.detach().reshape(-1)
            if not leaf.is_contiguous() or self._is_stack(index):
                note_copy(flat)
            return ShardedTensor(flat, group.owned_spec(index, leaf.shape))

        return map_leaves(entries, show)

    def _whole(self, index: int, leaf: Any) -> Any:
        """Return a leaf of the state as its owner keeps it; other ranks get a meaningless value."""
        if not isinstance(leaf, Tensor):
            return leaf
        group, spec = self.group, self.group.params[index].spec
        if not isinstance(leaf, ShardedTensor):
            return leaf.detach().clone() if leaf.ndim == 0 else leaf.detach().to(spec.device)
        leaf = leaf.detach()
        assert isinstance(leaf, ShardedTensor)
        if leaf.spec.same_cut(spec):
            gathered = Gathering(group, [index], {index: leaf.local_piece}, "state").finish()
            return gathered.get(index)
        if leaf.spec.same_cut(group.owned_spec(index, leaf.shape)):
            is_mine = group.owners[index] == group.me
            return leaf.local_piece.view(tuple(leaf.shape)) if is_mine else None
        return leaf.full_tensor()

    def _lead(self, index: int) -> tuple[int, ...]:
        return tuple(self.wholes[index].shape[:-2])

    def _entries(self, index: int, inner: Optimizer) -> list[Entries]:
        """Return the state of a parameter's stepped tensors; empty if there is none to show."""
        state: Mapping[Any, Entries] = inner.state
        entries = [state.get(each) or {} for each in self.stepped_as[index]]
        # There is none before all matrices have been stepped, also if that step has raised.
        is_complete = all(entries) or index in self.stepped
        return entries if is_complete and any(entries) else []

    def _own_state(self, index: int, inner: Optimizer) -> Entries:
        """Return an optimizer's state of a parameter that belongs to this rank."""
        entries = self._entries(index, inner)
        if not entries or not self._is_stack(index):
            return entries[0] if entries else {}
        lead = self._lead(index)
        _form_of_stack(entries, lead, self.group.params[index].spec.name)
        result: Entries = _stacked(entries, lead)
        return result


class Batch:
    """Parameters that are sent together: gradients to the owners, new values back."""

    _gradients: Gathering
    _values: Scattering

    def __init__(self, owned: OwnedParams, indices: list[int]) -> None:
        self._owned = owned
        self._indices = indices

    def start_gradients(self) -> None:
        """Send pieces of gradients to the owners."""
        pieces = {index: self._piece_of_gradient(index) for index in self._indices}
        self._gradients = Gathering(self._owned.group, self._indices, pieces, "gradients")

    def finish_gradients(self) -> list[nn.Parameter]:
        """Return the tensors that the inner optimizer steps on this rank, with gradients."""
        mine = []
        for index, gradient in self._gradients.finish().items():
            mine += self._owned.take_gradient(index, gradient)
        del self._gradients  # This also frees the receive buffer.
        return mine

    def start_values(self) -> None:
        """Send the present whole parameters to the ranks that hold pieces of them."""
        owned = self._owned
        mine = {i: owned.stepped_whole(i) for i in self._indices if i in owned.wholes}
        self._values = Scattering(self._owned.group, self._indices, mine)

    def finish_values(self) -> None:
        """Write the received values to the parameters' pieces."""
        group = self._owned.group
        params = [group.params[index] for index in self._indices]
        with writing_only(params):
            self._values.finish({index: group.params[index].local_piece for index in self._indices})
            # If the piece is the whole, or empty, nothing has raised the version counter that marks
            # gathered values as stale, on all ranks alike.
            unraised = [
                memory_of(param)
                for index, param in zip(self._indices, params, strict=True)
                if group.is_whole_here(index) or not param.local_piece.numel()
            ]
            torch.autograd.graph.increment_version(unraised)
        del self._values
        for index, param in zip(self._indices, params, strict=True):
            self._owned.marks[index] = Mark(param)

    def _piece_of_gradient(self, index: int) -> Tensor:
        param = self._owned.group.params[index]
        spec, grad = param.spec, param.grad
        if not isinstance(grad, ShardedTensor) or not grad.spec.same_cut(spec):
            msg = (
                f"the gradient of {spec.name!r}, shape {tuple(spec.shape)}, is a "
                f"{type(grad).__name__} that is not sharded as the parameter is. Let fully_shard "
                f"make gradients, or assign a filled zeros_like(parameter)."
            )
            raise OptimizerError(msg)
        return grad.local_piece.to(param.dtype)


# --- the optimizer --------------------------------------------------------------------------------

BATCH_BYTES = 16 << 20
"""Gradients that a rank gets at once: a few ms of traffic, and much longer computation."""


class MatrixOptimizer(DelegatingOptimizer):
    """Steps whole parameters, each on the one rank that owns it, with any class of optimizers.

    It is for classes that need more of a parameter than a range of its elements:
    ``torch.optim.Muon``, ``torch.optim.Adafactor``, Shampoo, SOAP. In each step gradients go
    straight to the owners, and new values come back. Nothing is computed twice, and the result is
    the same as that of `optimizer_class` on whole parameters. The class must update each parameter
    by itself, without random numbers. Classes that are known to compute over all parameters
    together are refused (LBFGS, Prodigy, D-Adaptation, ...).

    The owners are ranks of all axes of a parameter's mesh; the work is balanced by `cost`. An owner
    keeps a whole copy of its parameters. If other code writes a parameter (`load_state_dict`,
    weights of an EMA), its whole is gathered again at the next step. Writes that torch does not
    count in a tensor's version (``to_local().data``, NumPy) are not noticed. Parameters that are
    not sharded are stepped on every rank.

    Gradients of other batches are sent while one batch is computed. The inner optimizer's ``step``
    is called for each batch. A counter in its parameter groups counts once per step; a counter in
    an attribute counts once per batch.

    `state` and `state_dict` show the state as `ShardedTensor`, of which the owner holds everything.
    Call `state_dict` and `load_state_dict` on all ranks. Between steps, if a rank does not own
    a parameter, the numbers in its `state` are those of the last `state_dict` or of the first step.

    Cost of each step, with N ranks and P elements: for each batch one all-to-all of gradients, and
    one of values. A rank sends ``P/N`` elements of gradients times ``(N-1)/N``, and as many values.
    With R replicas of S ranks it sends ``P/(RS) (S-1)/S`` and ``P/S (RS-1)/(RS)``. In addition, one
    all-reduce of 3 bytes for each parameter, and one of 1 byte. Memory: ``P/N`` elements for the
    wholes, the state of ``P/N``, and about three times `batch_bytes` in a step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        cost: Callable[[tuple[int, ...]], float] | None = None,
        batch_bytes: int | str = BATCH_BYTES,
        stacks: bool = False,
        **defaults: Any,
    ) -> None:
        """Take parameters of a model that is sharded, or will be before the first step.

        Args:
            params: Parameters, named ones, or groups, as for any optimizer; the same ones, in the
                same order, on all ranks.
            optimizer_class: Class that steps whole parameters, of any shape and dtype that it
                supports.
            cost: Function that returns the cost of a parameter by its global shape, in any unit;
                equal on all ranks. None: the multiplications of its Gram matrix.
            batch_bytes: Approximate number of bytes of gradients that a rank gets at once; also
                as text, such as ``"16MiB"``.
            stacks: Whether parameters of more than two dims are stacks of matrices, such as
                experts. Then `optimizer_class` steps each matrix separately. The state is shown
                stacked, so it must have the same form for all matrices of a stack. Stacks without
                elements are not stepped. Otherwise the class gets such parameters unchanged.
            **defaults: Options of `optimizer_class`.

        Raises:
            OptimizerError: `optimizer_class` is no class of optimizers, or is known to compute over
                all parameters together, or `cost` or `batch_bytes` is none. At the first step:
                parameters are on XLA devices, ranks have different parameters, stacks are not
                sharded, or `cost` returns no number of at least 0.
            Exception: Any error of `optimizer_class` about parameters of these shapes.
        """
        if cost is not None and not callable(cost):
            msg = (
                f"cost must be a function of a shape, such as math.prod, got {cost!r}. Leave it "
                f"out for the multiplications of each Gram matrix."
            )
            raise OptimizerError(msg)
        try:
            self._batch_nbytes = byte_size(batch_bytes)
        except NotOfKindError as error:
            msg = f"{error.sentence('batch_bytes', batch_bytes)} The default is {BATCH_BYTES}."
            raise OptimizerError(msg) from None
        refuse_texts(OptimizerError, stacks=stacks)
        self._cost = cost
        self._stacks = stacks
        super().__init__(params, optimizer_class, defaults)

    _kept = (*DelegatingOptimizer._kept, "_cost", "_batch_nbytes", "_stacks")  # noqa: SLF001 - base

    def _forget(self) -> None:
        super()._forget()
        self._owned: list[OwnedParams] = []
        self._loads: dict[int, float] = {}
        self._plain: list[nn.Parameter] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            Exception: Any error of the class about parameters of these shapes.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(p.shape[-2:] if self._stacks else p.shape) for p in group["params"]]
        like = [
            nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"))
            for shape, p in zip(shapes, group["params"], strict=True)
        ]
        if like:
            try:
                options = [{**self._settings_of(group), "params": like}]
                self.optimizer_class(options, **self._options)
            except BaseException as error:
                self.param_groups.pop()
                if any(len(shape) > 2 for shape in shapes):  # noqa: PLR2004 - a matrix has two
                    error.add_note(
                        "MatrixOptimizer(..., stacks=True) has the class step each matrix of a "
                        "parameter of more than two dims by itself: if it is a stack of matrices, "
                        "as experts are; not weights of convolutions."
                    )
                raise

    # --- who owns what --------------------------------------------------------------------------

    @property
    def loads(self) -> dict[int, float]:
        """The work of each rank in a step, in units of `cost`; empty before the first step."""
        return dict(self._loads)

    def owner_of(self, param: nn.Parameter) -> int | None:
        """Return the global rank that owns a parameter; None: each rank steps it.

        Raises:
            OptimizerError: It is no parameter of this optimizer, or there was no step yet.
        """
        for owned in self._owned:
            for index, own in enumerate(owned.group.params):
                if own is param:
                    return owned.group.axis.members[owned.group.owners[index]]
        if any(own is param for own in self._plain):
            return None
        msg = (
            "owner_of() knows the parameters of the optimizer's groups, from its first step on. "
            "Ask after a step, or after load_state_dict() and a step."
        )
        raise OptimizerError(msg)

    def _probe(self) -> Optimizer:
        check_class(self.optimizer_class, on_wholes=True)
        return self.optimizer_class(
            [nn.Parameter(torch.zeros(1, 1, device="cpu"))], **self._options
        )

    def _identity_of(self, param: Any) -> tuple[Any, ...]:
        return param, getattr(param, "spec", None), param.dtype

    def _new_tensors(self) -> list[list[nn.Parameter]]:
        if self._is_outdated():
            self._give_out()
        inner: dict[int, list[nn.Parameter]] = {id(param): [param] for param in self._plain}
        for owned in self._owned:
            inner |= {id(owned.group.params[i]): steps for i, steps in owned.stepped_as.items()}
        return [
            [each for param in group["params"] for each in inner.get(id(param), ())]
            for group in self.param_groups
        ]

    def _give_out(self) -> None:
        """Assign each parameter to a rank. Collective."""
        params = [param for group in self.param_groups for param in group["params"]]
        sharded: list[Any] = [param for param in params if isinstance(param, ShardedTensor)]
        self._plain = [param for param in params if not isinstance(param, ShardedTensor)]
        plain = [tuple(p.shape) for p in self._plain if p.ndim > 2]  # noqa: PLR2004 - a stack
        if self._stacks and plain:
            msg = (
                f"stacks=True takes sharded stacks, got a parameter of shape {plain[0]} that is "
                f"not sharded. Shard its module, or step it by an optimizer of its own."
            )
            raise OptimizerError(msg)
        about = f"{self.optimizer_class.__qualname__}, batch_bytes={self._batch_nbytes}"
        about += f", stacks={self._stacks}"
        cost = matrix_cost if self._cost is None else self._checked_cost
        groups, loads = make_owner_groups(sharded, cost, about)
        self._owned = [OwnedParams(group, stacks=self._stacks) for group in groups]
        for owned in self._owned:  # Some classes make state of the values in their constructor.
            owned.gather_values(range(len(owned.group.params)), self._batch_nbytes)
        self._known = self._described()
        ranks = groups[0].axis.members if groups else ()
        self._loads = dict(zip(ranks, loads, strict=True))

    def _checked_cost(self, shape: tuple[int, ...]) -> float:
        """Return what the user's function says a parameter costs."""
        assert self._cost is not None
        found = self._cost(shape)
        if not 0 <= as_number(found) < math.inf:
            msg = (
                f"cost returned {found!r} for the shape {shape}. It must return a finite number of "
                f"at least 0."
            )
            raise OptimizerError(msg)
        return float(found)

    # --- steps ----------------------------------------------------------------------------------

    def _prepare(self) -> Optimizer:
        if self.inner is not None and self._is_outdated() and not self._is_state_written():
            self._learn_numbers()  # New owners must not begin with old numbers.
        return super()._prepare()

    def _run(self, inner: Optimizer) -> None:
        try:
            self._step_all(inner)
        except BaseException as error:
            current_watchdog().note_error(error)  # Other ranks wait for this one's values.
            for owned in self._owned:  # The wholes may be ahead of the pieces.
                owned.marks = [None] * len(owned.marks)
            raise

    def _step_all(self, inner: Optimizer) -> None:
        active = [(owned, owned.agree(self._batch_nbytes)) for owned in self._owned]
        batches = [
            Batch(owned, batch)
            for owned, indices in active
            for batch in owned.group.batches(indices, self._batch_nbytes)
        ]
        settings = (value for group in inner.param_groups for value in group.values())
        before = [(value, value.clone()) for value in settings if isinstance(value, Tensor)]
        if not batches:
            _step_some(inner, self._plain)
        for number, batch in enumerate(batches):
            if number == 0:
                batch.start_gradients()
            if number + 1 < len(batches):
                batches[number + 1].start_gradients()  # Sent while this one is computed.
            mine = batch.finish_gradients()
            if number == 0:
                _step_some(inner, [*self._plain, *mine])
            elif mine:  # The same settings, so that a counter in them counts once.
                self._send_settings(inner)
                _step_some(inner, mine, before)
            for whole in mine:
                whole.grad = None
            if number > 0:
                batches[number - 1].finish_values()
            batch.start_values()
        if batches:
            batches[-1].finish_values()
        self._note_stepped(inner, active)

    def _note_stepped(
        self, inner: Optimizer, active: Sequence[tuple[OwnedParams, list[int]]]
    ) -> None:
        """Send the form of the state that the step has made to the other ranks."""
        made = [owned for owned, indices in active if not owned.stepped.issuperset(indices)]
        for owned, indices in active:
            owned.stepped.update(indices)
        _exchange_forms(made, inner)

    def _drop(self) -> None:
        for owned in self._owned:
            for steps in owned.stepped_as.values():
                for each in steps:
                    each.grad = None

    # --- state ----------------------------------------------------------------------------------

    def _show_state(self) -> State:
        assert self.inner is not None
        inner, shown = self.inner, State()
        for owned in self._owned:
            shown |= owned.show(inner, self._note_copy)
        for param in self._plain:
            if inner.state.get(param):
                shown[param] = inner.state[param]
        order = [param for group in self.param_groups for param in group["params"]]
        return {param: shown[param] for param in order if param in shown}

    def _put_state(self, state: State) -> None:
        assert self.inner is not None
        inner = self.inner
        for param in self._plain:
            if state.get(param):
                inner.state[param] = state[param]
        for owned in self._owned:
            owned.put(state, inner)
        _exchange_forms(self._owned, inner)

    def _is_state_written(self) -> bool:
        """Whether a user wrote to `state` on any rank, since only the owner has copies."""
        is_written = super()._is_state_written()
        for owned in self._owned:
            is_written = owned.is_anywhere(is_written)
        return is_written

    def _learn_numbers(self) -> None:
        """Update the numbers that this rank shows of others' state to the last step. Collective."""
        assert self.inner is not None
        _exchange_forms(self._owned, self.inner)
        self._forget_shown()

    def state_dict(self) -> dict[str, Any]:
        """Return the state; each tensor's owner holds all of it. Call it on all ranks.

        Raises:
            OptimizerError: On all ranks: matrices of a stack have state of different forms.

        Cost: one exchange of a few hundred bytes for each parameter.
        """
        if self.inner is not None and not self._is_state_written():
            self._learn_numbers()
        return super().state_dict()


def _exchange_forms(groups: Sequence[OwnedParams], inner: Optimizer) -> None:
    """Send the form of the state of some groups to the other ranks. Collective.

    Raises:
        OptimizerError: On all ranks of these groups: one of them cannot show its state.
    """
    reason: str | None = None
    for owned in reversed(groups):  # Inner groups first, so that the outer ones hear of it.
        reason = owned.exchange_forms(inner, reason)
    if reason is not None:
        raise OptimizerError(reason)


def _step_some(
    inner: Optimizer,
    tensors: Sequence[nn.Parameter],
    settings: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Have an optimizer step some of its tensors, maybe none, after `settings` have been set."""
    for setting, value in settings:
        setting.copy_(value)
    chosen = {id(tensor) for tensor in tensors}
    whole = [group["params"] for group in inner.param_groups]
    try:
        for group, params in zip(inner.param_groups, whole, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        torch_autograd.step_without_global_hooks(inner)
    finally:
        for group, params in zip(inner.param_groups, whole, strict=True):
            group["params"] = params
