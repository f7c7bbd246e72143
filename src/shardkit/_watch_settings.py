"""What users choose of the watch over ranks: all of its times, and what it compares."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from shardkit._errors import StateError
from shardkit._text import NotOfKindError, flag, seconds


@dataclass(slots=True)
class WatchSettings:
    """Settings of this process; `set_watch` says what they mean."""

    ask_after_s: float = 10.0
    ask_unexpected_after_s: float = 2.0
    answer_s: float = 4.0
    silent_after_s: float = 60.0
    timeout_s: float = 1800.0
    compare_values: bool = True
    check_gradients: bool = False

    def update(self, changes: dict[str, Any], names: dict[str, str]) -> None:
        """Take over settings; none if one of them is refused.

        Args:
            changes: Values by field. Texts are read as the environment writes them.
            names: Names that the user gives to fields, for errors.

        Raises:
            StateError: A value that cannot be meant.
        """
        found = {
            field.name: _value(names.get(field.name, field.name), changes[field.name], field.type)
            for field in dataclasses.fields(self)
            if field.name in changes
        }
        for name, value in found.items():
            setattr(self, name, value)

    @classmethod
    def of_environment(cls) -> WatchSettings:
        """Return what the environment says: ``SHARDKIT_ASK_AFTER_S``, and so on.

        Raises:
            StateError: A variable has a value that cannot be meant.
        """
        names = {field.name: f"SHARDKIT_{field.name.upper()}" for field in dataclasses.fields(cls)}
        settings = cls()
        given = {field: os.environ[name] for field, name in names.items() if name in os.environ}
        settings.update(given, names)
        return settings


def _value(name: str, value: Any, kind: Any) -> bool | float:
    """Return a setting, also from its text.

    Raises:
        StateError: It cannot be meant.
    """
    try:
        parsed: bool | float = (flag if kind == "bool" else seconds)(value)
    except NotOfKindError as error:
        raise StateError(error.sentence(name, value)) from None
    return parsed


watch_settings = WatchSettings.of_environment()


def set_watch(  # noqa: PLR0913 - a setting each
    *,
    ask_after_s: float | None = None,
    ask_unexpected_after_s: float | None = None,
    answer_s: float | None = None,
    silent_after_s: float | None = None,
    timeout_s: float | None = None,
    compare_values: bool | None = None,
    check_gradients: bool | None = None,
) -> None:
    """Choose how the ranks watch each other; the same on every rank.

    A rank that has waited long asks the others where they are, and one of them logs who is awaited.
    A run ends in a `RankMismatchError` only where it is proved that it cannot go on. Each setting
    has a variable of the environment: ``SHARDKIT_ASK_AFTER_S`` for `ask_after_s`, and so on.

    Args:
        ask_after_s: Seconds of a wait after which a rank asks. 10 by default. Longer is better with
            many ranks, for all of them answer.
        ask_unexpected_after_s: Seconds of a wait after which a rank asks if the steps before did
            not foretell the collective, or if it met an exception. 2 by default.
        answer_s: Seconds that a rank which asks waits for answers. 4 by default.
        silent_after_s: Seconds of one wait in which a rank has not answered, after which it counts
            as lost if nobody of its host answers either. 60 by default; ``math.inf``: never.
        timeout_s: Seconds after which torch itself ends a collective, of process groups that
            shardkit makes from now on. 1800 by default.
        compare_values: Whether samples of the values that parameters had when they were sharded,
            and of what is loaded or filled later, are compared. True by default.
        check_gradients: Whether each backward notes which of this rank's own gradients are not
            finite, for `FSDPModule.check_gradients`. Reads each gradient once more. False by
            default.

    Raises:
        StateError: A value that cannot be meant. No setting has changed then.
    """
    given = dict(locals())
    watch_settings.update({name: v for name, v in given.items() if v is not None}, {})
