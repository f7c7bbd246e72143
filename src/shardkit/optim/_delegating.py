"""What optimizers have in common that let another one do the steps, on other tensors.

The *outer* optimizer is the one that users have. Its parameter groups hold their sharded
parameters, so that schedulers, clipping, scaling and checkpoints work as with any other. The
*inner* one is of the class that users named. It steps tensors that stand for the parameters: runs
of a shard (`shardkit.optim.LocalOptimizer`), or whole matrices at the ranks that own them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardkit._errors import OptimizerError
from shardkit._params.state_dicts import map_leaves
from shardkit.optim._codecs import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# --- the outer optimizer --------------------------------------------------------------------------

State = dict[Any, Any]
"""What an optimizer keeps: by parameter, then by name. Few keep something by other keys, too."""

_NOT_SETTINGS = ("params", "param_names")


class DelegatingOptimizer(Optimizer, ABC):
    """An optimizer whose inner one is of another class, and steps other tensors.

    **What this class does.** It tries `optimizer_class` on a small tensor, so that wrong options
    raise at once, and takes its default settings for the parameter groups. In each step it brings
    the inner optimizer up to date, copies settings (``lr`` and the like) into it, runs it, and
    copies settings back that it changed. It keeps the state that users see and the state of the
    inner one in agreement, in both directions, and loads state dicts without a change of dtype.

    **What a subclass gives.** All of it is called without grad mode.

    - `_new_tensors` decides which tensors the inner optimizer steps. The base calls it when there
      is no inner optimizer, when `state` was written or loaded, and when `_is_outdated` says that
      the old tensors do not fit any more. `state` is that of before. The base keeps it over such a
      change: by parameters, as users see it.
    - `_run` sets gradients of these tensors, and brings their values up to date; has the inner
      optimizer step them; and writes results back. It may communicate. `_drop` drops the gradients.
    - `_show_state` returns the state by the users' parameters. What it returns may be views of the
      inner state, and is cheap then. `_put_state` is the other direction: state by the users'
      parameters, from a state dict or from before a change of the tensors, into ``inner.state``.
      Nothing is known about it but that each tensor belongs to its parameter.

    **Who leads.** After a step the inner state is right, and `state` is made from it when somebody
    asks (`_show_state`). What is written to `state` or loaded is right from then on: before the
    next step `_put_state` hands it over. Entries that were replaced are found by their identity;
    subclasses find what was written in place, in `_is_written`, where their entries are copies.

    Attributes:
        optimizer_class: Class of the inner optimizer.
        inner: The inner optimizer; None before the first step. Its parameter groups are those of
            this optimizer, one by one, with other ``params``.
    """

    _shown: State | None = None
    """What `state` returns; None: it is to be made from the inner state."""
    _as_shown: State | None = None
    """The entries of `_shown` as they were when they were made; None: the inner has others."""

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
            options: Arguments that it is constructed with.

        Raises:
            OptimizerError: It is no class of optimizers.
        """
        given: Any = optimizer_class
        if not inspect.isclass(given) or not issubclass(given, Optimizer):
            msg = (
                f"optimizer_class must be a class of optimizers, got {optimizer_class!r}. Pass the "
                f"class and its options: {type(self).__name__}(model.parameters(), "
                f"torch.optim.AdamW, lr=1e-3)."
            )
            raise OptimizerError(msg)
        self.optimizer_class = optimizer_class
        self._options = dict(options)
        self._forget()
        super().__init__(params, self._defaults_of(self._probe()))

    _kept: tuple[str, ...] = ("optimizer_class", "_options")
    """Attributes that copies and pickles have, too."""

    def _forget(self) -> None:
        """Begin without an inner optimizer."""
        self.inner: Optimizer | None = None
        self._sent: list[dict[str, Any]] = []

    # --- what subclasses give -------------------------------------------------------------------

    def _probe(self) -> Optimizer:
        """Return an optimizer of the class, of a small tensor on the host, to be looked at."""
        return self.optimizer_class([torch.nn.Parameter(torch.zeros(1))], **self._options)

    @abstractmethod
    def _is_outdated(self) -> bool:
        """Whether the inner optimizer's tensors no longer stand for the parameters."""

    @abstractmethod
    def _new_tensors(self) -> list[list[torch.nn.Parameter]]:
        """Return anew what the inner optimizer steps, for each parameter group; maybe nothing."""

    @abstractmethod
    def _run(self, inner: Optimizer) -> None:
        """Step all inner tensors once."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the gradients of the inner tensors; called also if the step raised."""

    @abstractmethod
    def _show_state(self) -> State:
        """Return the inner state by the users' parameters; `inner` is not None."""

    @abstractmethod
    def _put_state(self, state: State) -> None:
        """Have the inner optimizer continue from a state by the users' parameters.

        `inner` is not None. Entries of parameters that it does not step are to be kept or dropped
        by the subclass.
        """

    def _is_written(self) -> bool:
        """Whether somebody wrote into what `_show_state` returned, where that is a copy."""
        return False

    # --- steps ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Call it on all ranks.

        Args:
            closure: Computes the loss and gradients anew, once.

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
            self._shown = self._as_shown = None
        self._fetch_settings(inner)
        return loss

    def _prepare(self) -> Optimizer:
        """Return the inner optimizer, whose tensors and state are those of the parameters."""
        inner = self.inner
        if inner is not None and not self._is_state_written() and not self._is_outdated():
            return inner
        state = self.state
        self._as_shown = None  # Where this raises, `state` leads in the next step, too.
        inner = self._renew(self._new_tensors())
        self._put_state(state)
        self._shown = self._as_shown = None
        return inner

    def _is_state_written(self) -> bool:
        """Whether somebody wrote to `state`, or loaded it, since it was made of the inner one."""
        return self._shown is not None and self._is_changed(self._shown)

    def _renew(self, tensors: Sequence[Sequence[torch.nn.Parameter]]) -> Optimizer:
        """Return an inner optimizer of other tensors; what it has itself, it keeps."""
        groups = [
            {**self._settings_of(group), "params": list(of_group)}
            for group, of_group in zip(self.param_groups, tensors, strict=True)
        ]
        made = self.optimizer_class(groups, **self._options)
        if self.inner is None:
            self.inner = made
        else:  # Some keep numbers of their own, beside the state.
            self.inner.param_groups, self.inner.state = made.param_groups, made.state
        self._sent = [{} for _ in groups]
        return self.inner

    def _is_changed(self, shown: State) -> bool:
        before = self._as_shown
        if before is None or before.keys() != shown.keys():
            return True
        for param, entries in shown.items():
            known = before[param]
            if isinstance(entries, dict) and (
                known.keys() != entries.keys()
                or any(known[name] is not value for name, value in entries.items())
            ):
                return True
        return self._is_written()

    # --- settings -------------------------------------------------------------------------------

    def _defaults_of(self, probe: Optimizer) -> dict[str, Any]:
        """Return the class's settings: as users gave them, else numbers where it has tensors."""
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
        """Copy settings into the inner groups; a tensor there keeps its identity."""
        for group, other, sent in zip(
            self.param_groups, inner.param_groups, self._sent, strict=True
        ):
            for key, value in self._settings_of(group).items():
                current = other.get(key)
                if isinstance(current, Tensor) and isinstance(value, (int, float)):
                    if sent.get(key) is not value:
                        current.fill_(value)
                else:
                    other[key] = value
                sent[key] = value

    def _fetch_settings(self, inner: Optimizer) -> None:
        """Copy settings back that the step changed: some classes count there."""
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
        """The state by parameters, as that of an optimizer that steps them itself.

        It follows the inner state from one step to the next: ask again after a step. What is
        written to it counts in the next step.
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
        """Return the state as that of an optimizer that steps the parameters itself."""
        result: dict[str, Any] = super().state_dict()
        # Parameters share their numbers here, and what is loaded into one must not reach others.
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
        # Hooks of users see the state as it is; torch would cast it to the parameters' dtype.
        last = self.register_load_state_dict_pre_hook(_wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of: no inner optimizer, all of its state."""
        return {
            **super().__getstate__(),
            "state": dict(self.state),
            **{name: getattr(self, name) for name in self._kept},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was copied or loaded; the inner optimizer follows at the next step."""
        state = dict(state)
        if "state" in state:
            shown = map_leaves(state.pop("state"), _unwrap)
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


def _unwrap(leaf: Any) -> Any:
    return leaf.tensor if isinstance(leaf, _Wrapped) else leaf
