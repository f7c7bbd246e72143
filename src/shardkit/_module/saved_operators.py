"""Which operators' outputs a checkpointed forward keeps, rather than computing them again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from shardkit import _compat
from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Literal

Operators: TypeAlias = (
    "Literal['matmuls', 'every_second_matmul'] | Collection[Any] | Callable[..., Any]"
    " | SavedOperators | None"
)

_MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::convolution"}
)
"""Products with weights. Not `bmm`: scores of attention are its outputs, which fill memory."""

_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
    }
)


@dataclass(frozen=True)
class SavedOperators:
    """Which outputs are kept. Operators stand here by names, because they cannot be pickled.

    Attributes:
        names: ``namespace::operator``, all overloads; those of higher-order operators are bare.
        counted: Operators of which only every `every`-th call is kept, the first one included.
        every: See `counted`.
        decide: A user's function in their place, see `create_selective_checkpoint_contexts`.
    """

    names: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    every: int = 1
    decide: Callable[..., Any] | None = None

    @classmethod
    def of(cls, operators: Operators) -> SavedOperators | None:
        """Return what a user's choice means; None: nothing is kept.

        Raises:
            StateError: It is no such choice.
        """
        if operators is None or isinstance(operators, cls):
            return operators
        if operators == "matmuls":
            return cls(_MATMULS | _ATTENTION)
        if operators == "every_second_matmul":
            return cls(_ATTENTION, _MATMULS, every=2)
        if isinstance(operators, str) or (
            not callable(operators) and not hasattr(operators, "__iter__")
        ):
            msg = (
                f"operators must be 'matmuls', 'every_second_matmul', operators such as "
                f"[torch.ops.aten.mm], a function of torch's create_selective_checkpoint_contexts, "
                f"or None, got {operators!r}."
            )
            raise StateError(msg)
        if callable(operators):
            return cls(decide=operators)
        for operator in operators:
            if not isinstance(operator, _compat.OPERATOR_KINDS):
                msg = (
                    f"operators has {operator!r}, which is a {type(operator).__name__} and no "
                    f"operator. Name those that torch dispatches, such as torch.ops.aten.mm or "
                    f"torch.ops.aten.addmm.default."
                )
                raise StateError(msg)
        return cls(frozenset(map(_compat.operator_name, operators)))

    def contexts(self) -> tuple[Any, Any]:
        """Return contexts of one forward and of its repetition."""
        if self.decide is not None:
            first, again = create_selective_checkpoint_contexts(self.decide)
            return first, again
        calls = _Calls(self)
        first, again = create_selective_checkpoint_contexts(calls.decide)
        return first, calls.from_the_beginning(again)


class _Calls:
    """Counts the calls of one forward, and again those of its repetition."""

    def __init__(self, saved: SavedOperators) -> None:
        self._saved = saved
        self._num_calls = 0
        self._names: dict[Any, str] = {}

    @contextlib.contextmanager
    def from_the_beginning(self, context: Any) -> Iterator[None]:
        """Enter a context of a repetition."""
        self._num_calls = 0
        with context:
            yield

    def decide(
        self, _: SelectiveCheckpointContext, operator: Any, *__: Any, **___: Any
    ) -> CheckpointPolicy:
        """Say whether the output of this call is kept; torch <= 2.9 asks in the repetition too."""
        name = self._names.get(operator)
        if name is None:
            name = self._names[operator] = _compat.operator_name(operator)
        keep = name in self._saved.names
        if name in self._saved.counted:
            keep = self._num_calls % self._saved.every == 0
            self._num_calls += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
