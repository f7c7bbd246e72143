"""The common part of optimizers that let another one do the steps, on other tensors.

The *outer* optimizer is the one that users hold. Its parameter groups hold the users' sharded
parameters, so that schedulers, clipping, scaling and checkpoints work as with any optimizer. The
*inner* optimizer is of the class that users named. It steps tensors that represent the parameters:
runs of a shard (`shardkit.optim.LocalOptimizer`), or whole matrices on the ranks that own them.
"""

from __future__ import annotations

import inspect
import operator
import reprlib
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardkit._compat import torch_tensors
from shardkit._errors import OptimizerError
from shardkit._params.state_dicts import map_leaves
from shardkit.optim._codecs import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# --- the outer optimizer --------------------------------------------------------------------------

State = dict[Any, Any]
"""State of an optimizer: by parameter, then by name. A few optimizers use other keys, too."""

_NOT_SETTINGS = ("params", "param_names")


class DelegatingOptimizer(Optimizer, ABC):
    """Base of optimizers that let an inner optimizer step other tensors than the parameters.

    **What this class does.** It tries `optimizer_class` on a small tensor, so that wrong options
    raise at once, and takes its default settings for the parameter groups. In each step it updates
    the inner optimizer's tensors and state, copies settings (``lr`` and the like) into it, runs it,
    and copies back the settings that it changed. It keeps the inner state and the state that users
    see equal, in both directions, and loads state dicts without a change of dtype.

    **What a subclass gives.** All of these methods are called without grad mode.

    - `_new_tensors` returns the tensors that the inner optimizer steps, and sets `_known` to
      `_described`. The base class calls it when there is no inner optimizer, when `state` was
      written or loaded, and when `_is_outdated` returns that the old tensors do not fit any more.
      `state` is then still the old one. The base class keeps it over such a change: by parameters,
      as users see it.
    - `_run` sets the gradients of these tensors and updates their values, has the inner optimizer
      step them, and writes the results back. It may communicate. `_drop` drops the gradients.
    - `_show_state` returns the state by the users' parameters. Its tensors may be views of the
      inner state, which is cheap; copies are noted by `_note_copy`, so that writes to them count.
      `_put_state` does the opposite: it puts state by the users'
      parameters, from a state dict or from before a change of the tensors, into ``inner.state``.
      All that it may assume is that each tensor belongs to its parameter.

    **Which state is valid.** After a step the inner state is valid, and `state` is made from it on
    request (`_show_state`). After a user has written to `state` or loaded one, that one is valid,
    and before the next step `_put_state` copies it to the inner optimizer. Entries that were
    replaced are found by their identity, copies that were written in place by their version.

    Attributes:
        optimizer_class: Class of the inner optimizer.
        inner: The inner optimizer; None before the first step. It has the parameter groups of this
            optimizer, one for one, with other ``params``.
    """

    _shown: State | None = None  # The value of `state`; None: it must be made from the inner state.
    _as_shown: State | None = None
    """The original entries of `_shown`; None: those of the inner optimizer differ."""
    _copies: list[tuple[Tensor, int]]
    """Copies in `_shown`, each with its version; writes to them do not reach the inner state."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        """Try the class, then make groups of the users' parameters.

        Args:
            params: Parameters, named ones, or groups, as for any optimizer.
            optimizer_class: Class of the inner optimizer.
            options: Arguments of its constructor.

        Raises:
            OptimizerError: `optimizer_class` is no class of optimizers.
        """
        given: Any = optimizer_class
        if not inspect.isclass(given) or not issubclass(given, Optimizer):
            msg = (
                f"optimizer_class must be a class of optimizers, got "
                f"{reprlib.repr(optimizer_class)}. Pass the "
                f"class and its options: {type(self).__name__}(model.parameters(), "
                f"torch.optim.AdamW, lr=1e-3)."
            )
            raise OptimizerError(msg)
        self.optimizer_class = optimizer_class
        self._options = dict(options)
        self._forget()
        try:
            probe = self._probe()
        except Exception as error:
            if isinstance(params, (list, tuple)) and any(isinstance(each, dict) for each in params):
                error.add_note(
                    f"{type(self).__name__} has tried {optimizer_class.__name__} on one parameter, "
                    f"without the settings of groups. If the class needs keys in each group, such "
                    f"as use_muon, pass the sharded parameters to the class itself."
                )
            raise
        super().__init__(params, self._defaults_of(probe))

    _kept: tuple[str, ...] = ("optimizer_class", "_options")
    """Attributes that copies and pickles also have."""

    def _forget(self) -> None:
        """Begin without an inner optimizer."""
        self.inner: Optimizer | None = None
        self._copies = []
        self._known: list[Any] = []
        self._sent: list[dict[str, Any]] = []

    # --- what subclasses give -------------------------------------------------------------------

    def _probe(self) -> Optimizer:
        """Return an optimizer of the class, of a small tensor on the host, to inspect it."""
        return self.optimizer_class(
            [torch.nn.Parameter(torch.zeros(1, device="cpu"))], **self._options
        )

    @abstractmethod
    def _identity_of(self, param: Any) -> tuple[Any, ...]:
        """Return objects that are others when an inner tensor does not represent the parameter."""

    def _described(self) -> list[Any]:
        """Return the identities of all parameters, and None before those of each group."""
        found: list[Any] = []
        for group in self.param_groups:
            found.append(None)
            for param in group["params"]:
                found += self._identity_of(param)
        return found

    def _is_outdated(self) -> bool:
        """Whether the inner optimizer's tensors no longer represent the parameters."""
        known, now = self._known, self._described()
        return len(known) != len(now) or not all(map(operator.is_, known, now))

    @abstractmethod
    def _new_tensors(self) -> list[list[torch.nn.Parameter]]:
        """Return new tensors for the inner optimizer to step, by parameter group; maybe none."""

    @abstractmethod
    def _run(self, inner: Optimizer) -> None:
        """Step all inner tensors once."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the gradients of the inner tensors; also called if the step raised."""

    @abstractmethod
    def _show_state(self) -> State:
        """Return the inner state by the users' parameters; `inner` is not None."""

    @abstractmethod
    def _put_state(self, state: State) -> None:
        """Have the inner optimizer continue from a state by the users' parameters.

        `inner` is not None. The subclass decides whether it keeps or drops entries of parameters
        that the inner optimizer does not step.
        """

    # --- steps ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Call it on all ranks.

        Args:
            closure: Function that computes the loss and gradients anew; called once.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self._prepare()
        self._send_settings(inner)
        try:
            self._run(inner)
        finally:
            self._drop()
            self._forget_shown()
        self._fetch_settings(inner)
        return loss

    def _prepare(self) -> Optimizer:
        """Return the inner optimizer, with the present tensors and state of the parameters."""
        inner = self.inner
        if inner is not None and not self._is_state_written() and not self._is_outdated():
            return inner
        state = self.state
        self._as_shown = None  # If this raises, `state` stays the valid one.
        inner = self._renew(self._new_tensors())
        self._put_state(state)
        self._forget_shown()
        return inner

    def _forget_shown(self) -> None:
        """Have `state` made from the inner state when it is read next."""
        self._shown = self._as_shown = None
        self._copies = []

    def _note_copy(self, value: Any) -> None:
        """Note a part of the shown state that is no view of the inner state."""
        if isinstance(value, Tensor):
            self._copies.append((value, torch_tensors.version_of(value)))

    def _is_state_written(self) -> bool:
        """Whether a user wrote to `state`, or loaded it, since it was made from the inner state."""
        shown, before = self._shown, self._as_shown
        if shown is None:
            return False
        if before is None or before.keys() != shown.keys():
            return True
        for param, entries in shown.items():
            known = before[param]
            if isinstance(entries, dict) and (
                known.keys() != entries.keys()
                or any(known[name] is not value for name, value in entries.items())
            ):
                return True
        return any(torch_tensors.version_of(copy) != version for copy, version in self._copies)

    def _renew(self, tensors: Sequence[Sequence[torch.nn.Parameter]]) -> Optimizer:
        """Return the inner optimizer with other tensors; its own attributes stay."""
        groups = [
            {**self._settings_of(group), "params": list(of_group)}
            for group, of_group in zip(self.param_groups, tensors, strict=True)
        ]
        made = self.optimizer_class(groups, **self._options)
        if self.inner is None:
            self.inner = made
        else:  # Some classes keep numbers in attributes.
            self.inner.param_groups, self.inner.state = made.param_groups, made.state
        self._sent = [{} for _ in groups]
        return self.inner

    # --- settings -------------------------------------------------------------------------------

    def _defaults_of(self, probe: Optimizer) -> dict[str, Any]:
        """Return the class's settings, as users gave them; its tensors become numbers."""
        found = {**probe.defaults, **self._settings_of(probe.param_groups[0])}
        return {
            key: self._options[key]
            if key in self._options
            else value.item()
            if isinstance(value, Tensor) and value.ndim == 0
            else value
            for key, value in found.items()
        }

    @staticmethod
    def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}

    def _send_settings(self, inner: Optimizer) -> None:
        """Copy settings into the inner groups; a tensor of the class stays the same object."""
        for group, other, sent in zip(
            self.param_groups, inner.param_groups, self._sent, strict=True
        ):
            for key, value in self._settings_of(group).items():
                current, before = other.get(key), sent.get(key)
                if isinstance(current, Tensor) and isinstance(value, (int, float)):
                    if isinstance(before, Tensor):  # The user's own; other groups may share it.
                        other[key] = torch.full_like(current, value)
                    elif before is not value:
                        current.fill_(value)
                else:
                    other[key] = value
                sent[key] = value

    def _fetch_settings(self, inner: Optimizer) -> None:
        """Copy back the settings that the step changed: some classes count in them."""
        for group, other, sent in zip(
            self.param_groups, inner.param_groups, self._sent, strict=True
        ):
            for key, value in self._settings_of(other).items():
                before = sent.get(key)
                is_filled = isinstance(value, Tensor) and isinstance(before, (int, float))
                if value is not before and not is_filled:
                    group[key] = sent[key] = value

    # --- state ----------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The state by parameters, like that of an optimizer that steps the parameters itself.

        It does not follow the inner state after a step: read it again. Values that are written to
        it count in the next step.
        """
        if self._shown is None:
            shown: State = {} if self.inner is None else self._show_state()
            self._shown = defaultdict(dict, shown)
            self._as_shown = {
                param: dict(entries) if isinstance(entries, dict) else entries
                for param, entries in shown.items()
            }
        return self._shown

    @state.setter
    def state(self, value: Any) -> None:
        self._shown, self._as_shown = value, None

    def state_dict(self) -> dict[str, Any]:
        """Return the state like that of an optimizer that steps the parameters itself."""
        result: dict[str, Any] = super().state_dict()
        # Parameters share their numbers here; a loaded number must not be shared.
        result["state"] = {
            number: {
                key: value.clone() if isinstance(value, Tensor) and is_number(value) else value
                for key, value in entries.items()
            }
            if isinstance(entries, dict)
            else entries
            for number, entries in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one that steps the parameters itself.

        Args:
            state_dict: A dict that `state_dict` returned. Its tensors are kept, with their dtypes.
        """
        # Users' hooks see the state unwrapped. Torch would cast it to the parameters' dtype.
        last = self.register_load_state_dict_pre_hook(_wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return the content of copies and pickles: all of the state, and no inner optimizer."""
        return {
            **super().__getstate__(),
            "state": dict(self.state),
            **{name: getattr(self, name) for name in self._kept},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copied or loaded content; the next step makes the inner optimizer."""
        state = dict(state)
        if "state" in state:
            shown = map_leaves(
                state.pop("state"), lambda leaf: leaf.tensor if isinstance(leaf, _Wrapped) else leaf
            )
            self._shown, self._as_shown = defaultdict(dict, shown), None
        if "optimizer_class" in state:
            self._forget()
        super().__setstate__(state)

    def __repr__(self) -> str:
        """Show the settings of each group."""
        own, inner = type(self).__name__, self.optimizer_class.__name__
        return super().__repr__().replace(f"{own} (", f"{own} of {inner} (", 1)


@dataclass(slots=True)
class _Wrapped:
    """A tensor that torch does not recognize while it loads a state dict."""

    tensor: Tensor


def _wrap_tensors(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def wrap(leaf: Any) -> Any:
        return _Wrapped(leaf) if isinstance(leaf, Tensor) else leaf

    return {**state_dict, "state": map_leaves(state_dict["state"], wrap)}
