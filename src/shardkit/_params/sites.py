"""Places where modules hold the parameters of a bucket, and what is put there."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit._compat import torch_modules, torch_tensors
from shardkit._errors import StateError
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._mesh import DeviceMesh
    from shardkit._tensor.written_values import WrittenValue
    from shardkit.backends.dtensor import TensorParallel

_Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]


@dataclass(slots=True, eq=False, weakref_slot=True)
class ParamEntry:
    """A parameter to shard."""

    name: str  # Name for errors: relative to the group's module until the root's first forward.
    param: nn.Parameter  # Parameter object of the user.
    sites: list[tuple[nn.Module, str]]  # Every (module, attribute) that holds it.
    # Mesh over which to shard it, before its bucket is made; None: that of its group.
    mesh: DeviceMesh | None = None
    # Mesh that `mesh` is a part of, if other ranks of it hold other parameters in its place; None:
    # there are no such ranks.
    around: DeviceMesh | None = None
    is_spmd: bool = False  # Whether it is a DTensor whose mesh has the axes of `mesh` as well.
    # Split of it over that mesh, if it is no DTensor but a plain parameter that the package
    # spmd_types describes; None: it is not.
    annotated: TensorParallel | None = None
    # Values last written to it as a whole since the last comparison; None: nothing.
    written: WrittenValue | None = None
    num_written: int = 0  # Number of such writes in all.
    order: int = 0  # Position among the parameters of the root, from its first forward.

    @property
    def split(self) -> TensorParallel | None:
        """How the parameter is spread over a mesh of its own, before it is cut; None: it is not."""
        return self.annotated or tensor_parallel_of(self.param)

    def __getstate__(self) -> Any:
        """Return the state to pickle, without the writes, which other processes do not know."""
        return None, {"name": self.name, "param": self.param, "sites": self.sites}

    def __setstate__(self, state: Any) -> None:
        """Take the pickled state."""
        self.__init__(**state[1])  # type: ignore[misc]


_set_requires_grad = torch_tensors.unseen_by_transforms(nn.Parameter.requires_grad_)


class ParamSites:
    """Every place of a bucket's parameters."""

    def __init__(self, entries: Sequence[ParamEntry], unsharded: Sequence[nn.Parameter]) -> None:
        self._entries = entries  # The parameters, and the modules that hold them.
        self._unsharded = unsharded  # Parameters that modules hold while they are in use.
        self.is_visible = False  # Whether the modules hold the unsharded parameters.
        self._given: dict[int, Any] = {}
        self._returned: set[int] = set()
        # Value of `is_visible` when the `functional_call` of this pass began; None: there is none.
        self.was_visible: bool | None = None
        self._rnn_places: list[tuple[nn.RNNBase, str]] = []

    def show(self, *, unsharded: bool) -> None:
        """Let the modules hold the unsharded parameters, or the sharded ones.

        Raises:
            StateError: A module holds neither of them, but another parameter in their place.
        """
        if unsharded == self.is_visible:
            if unsharded and not self._given and not self._holds_unsharded():
                self._take_given([place[3] for place in self._places])
        elif unsharded:
            self._show_unsharded()
        else:
            self._show_sharded()
        self.is_visible = unsharded
        if self._rnn_places:
            self._update_rnns()

    def _show_unsharded(self) -> None:
        for params, attribute, sharded, whole in self._places:
            held = params.get(attribute)
            if held is not sharded and held is not whole:
                self._take_ties()
                self._take_given([place[2] for place in self._places])
                break
        for index, (params, attribute, sharded, whole) in enumerate(self._places):
            if sharded.requires_grad != whole.requires_grad:
                _set_requires_grad(whole, sharded.requires_grad)
            if index not in self._given:
                params[attribute] = whole

    def _show_sharded(self) -> None:
        for index, (params, attribute, sharded, whole) in enumerate(self._places):
            held = params.get(attribute)
            if held is whole:
                params[attribute] = sharded
            elif held is not sharded and index not in self._given and self.was_visible is None:
                self.was_visible = True  # `functional_call` has put something there.
        if self._given:
            self.return_given()

    def _take_ties(self) -> None:
        """Take up where users have put one parameter of the bucket in the place of another.

        A parameter that no place holds any more is one that is not used.
        """
        shown = {
            id(entry.param): (entry.param, whole)
            for entry, whole in zip(self._entries, self._unsharded, strict=True)
        }
        self._places = [
            (params, name, *shown.get(id(params.get(name)), (sharded, whole)))
            for params, name, sharded, whole in self._places
        ]
        self.__dict__.pop("_columns", None)

    def _holds_unsharded(self) -> bool:
        """Whether all places hold the unsharded parameters; a forward of a visible bucket asks."""
        params, attributes, wholes = self._columns
        return all(map(operator.is_, map(dict.get, params, attributes), wholes))

    # --- `functional_call` ---

    @property
    def has_only_given(self) -> bool:
        """Whether modules compute only with tensors that `functional_call` was given."""
        return len(self._given) == len(self._places)

    @property
    def gets_only_given(self) -> bool:
        """Whether `functional_call` has put something in all places, so that nothing is gathered.

        Usually the first place already shows that it has not.
        """
        for params, attribute, sharded, whole in self._places:
            held = params.get(attribute)
            if held is sharded or held is whole or held is None:
                return False
        return torch_modules.in_functional_call()

    def _take_given(self, own: Sequence[nn.Parameter]) -> None:
        """Find the tensors that `functional_call` has put in places of parameters; show them.

        Raises:
            StateError: A place has something else, or a transform differentiates by sharded values.
        """
        for index, ((params, attribute, sharded, whole), wanted) in enumerate(
            zip(self._places, own, strict=True)
        ):
            held = params.get(attribute)
            if held is wanted or held is whole:
                continue
            in_call = torch_modules.in_functional_call()
            if held is sharded and not in_call:
                params[attribute] = whole  # The user has swapped parameters, and put these back.
                continue
            if held is None or not in_call:
                self._refuse_replaced(sharded)
            if self.was_visible is None:
                self.was_visible = self.is_visible
            self._given[index] = held
            params[attribute] = self._as_used(held, sharded, whole)

    def _as_used(self, given: Any, sharded: nn.Parameter, whole: nn.Parameter) -> Any:
        """Return the tensor that a forward uses for a given value: whole, like parameters.

        Cost: that of `full_tensor` for a sharded one.
        """
        if isinstance(torch_tensors.inside_transforms(given), ShardedTensor):
            if not isinstance(given, ShardedTensor):
                name = next(entry.name for entry in self._entries if entry.param is sharded)
                msg = (
                    f"a transform of torch.func got the sharded {name!r}, and transforms compute "
                    f"with whole values only. Pass {{name: param.full_tensor().detach() for name, "
                    f"param in model.named_parameters()}} to it; gradients are this rank's then. "
                    f"Or call torch.autograd.grad(loss, list(model.parameters()))."
                )
                raise StateError(msg)
            given = given.full_tensor()
        is_cast = given.is_floating_point() and given.dtype != whole.dtype
        return given.to(whole.device, whole.dtype if is_cast else given.dtype)

    def return_given(self) -> None:
        """Put back the tensors of `functional_call`, which may run the module once more."""
        for index, given in self._given.items():
            params, attribute, _, _ = self._places[index]
            params[attribute] = given
        self._returned.update(self._given)
        self._given.clear()

    def forget_given(self) -> None:
        """Forget a `functional_call` that an interrupt has ended; it has put back what it saved."""
        self._given.clear()
        self._returned.clear()
        self.was_visible = None

    def end_functional_call(self, *, has_memory: bool) -> None:
        """Restore what modules held before a `functional_call`, which puts back what it saved.

        It also writes to the caller's dict what it then finds where it has put something.
        """
        was_visible = self.was_visible
        self.show(unsharded=False)
        returned, self._returned = self._returned, set()
        self.was_visible = None
        if was_visible and has_memory:
            self.is_visible = True
            for index, (params, attribute, sharded, whole) in enumerate(self._places):
                if params.get(attribute) is sharded and index not in returned:
                    params[attribute] = whole
            self._update_rnns()

    def show_others(self, others: Sequence[nn.Parameter] | None) -> None:
        """Let the modules hold `others`, one for each entry; None: the sharded parameters.

        Raises:
            StateError: For the reason that `show` gives.
        """
        self.show(unsharded=False)
        instead: dict[int, nn.Parameter] = {}
        if others is not None:
            self._take_ties()
            for params, attribute, sharded, _ in self._places:
                if params.get(attribute) is not sharded:
                    self._refuse_replaced(sharded)
            pairs = zip(self._entries, others, strict=True)
            instead = {id(entry.param): other for entry, other in pairs}
        for params, attribute, sharded, _ in self._places:
            params[attribute] = instead.get(id(sharded), sharded)
        self._update_rnns()

    def held(self, index: int) -> list[nn.Parameter | None]:
        """Return the tensors that modules hold in each place of parameter `index`."""
        wanted = self._entries[index].param
        return [params.get(name) for params, name, sharded, _ in self._places if sharded is wanted]

    def check_held(self, index: int) -> None:
        """Refuse something else in a place of parameter `index`, unless `functional_call` put it.

        Raises:
            StateError: A module holds something else there.
        """
        own = (self._entries[index].param, self._unsharded[index])
        for module, attribute in self._entries[index].sites:
            held = module._parameters.get(attribute)  # noqa: SLF001
            if not any(held is each for each in own) and not torch_modules.in_functional_call():
                self._refuse_replaced(own[0])

    def _update_rnns(self) -> None:
        for module, attribute in self._rnn_places:
            torch_modules.rnn_take_weight(module, attribute)
            torch_modules.rnn_forget_weight_refs(module)  # ``.to(dtype)`` makes new ones.

    @functools.cached_property
    def _places(self) -> list[_Place]:
        """Every place of a parameter: the dict, the attribute, and what is put there.

        They are not found before they are used: the user's Parameter objects might be exchanged.
        """
        sites = [
            (module, attribute, entry.param, whole)
            for entry, whole in zip(self._entries, self._unsharded, strict=True)
            for module, attribute in entry.sites
        ]
        self._rnn_places = [(m, name) for m, name, _, _ in sites if isinstance(m, nn.RNNBase)]
        # As in torch's own FSDP, this skips the checks of `setattr`.
        return [(m._parameters, name, param, whole) for m, name, param, whole in sites]  # noqa: SLF001

    @functools.cached_property
    def _columns(self) -> tuple[list[Any], list[str], list[nn.Parameter]]:
        """The dicts, the attributes, and the unsharded parameters of all places."""
        places = self._places
        return [p for p, *_ in places], [name for _, name, *_ in places], [p[3] for p in places]

    def _refuse_replaced(self, sharded: nn.Parameter) -> None:
        entry = next(item for item in self._entries if item.param is sharded)
        module, attribute = next(
            (module, attribute)
            for module, attribute in entry.sites
            if module._parameters.get(attribute) is not sharded  # noqa: SLF001
        )
        msg = (
            f"{attribute!r} of a {type(module).__name__} is no longer the parameter "
            f"{entry.name!r} that fully_shard took: it was replaced, removed or "
            f"parametrized since. Tie, prune, parametrize (weight norm, ...) and "
            f"exchange parameters before fully_shard; new values go into the sharded "
            f"parameter by copy_() or load_state_dict()."
        )
        raise StateError(msg)
