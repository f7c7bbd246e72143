"""What cannot be done while users have whole parameters (`_module.full_params`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit._runtime.group import ParamGroup


def refuse_summoned(groups: Iterable[ParamGroup], what: str) -> None:
    """Raise that `what` cannot be done, if modules of a group hold whole parameters for the user.

    Raises:
        StateError: Inside of `summon_full_params`.
    """
    for group in groups:
        if group.summoned is not None:
            msg = (
                f"{what} inside of summon_full_params, where the modules of {group.name!r} hold "
                f"plain copies of whole parameters. Leave the with block first."
            )
            raise StateError(msg)
