"""The versions of other packages with which shardkit was tested."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING

from shardkit._errors import IntegrationError, warn_user
from shardkit._text import release_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIED = {
    "accelerate": ("1.12", "1.13", "1.14", "1.15"),
    "transformers": ("5.20", "5.21", "5.22", "5.23", "5.24"),
    "lightning": ("2.3", "2.4", "2.5", "2.6"),
}
"""Tested versions of each package, without their last number, which only counts corrections."""

_warned: set[str] = set()


def check_version(package: str) -> None:
    """Warn once if a package is newer than the tested versions.

    Raises:
        IntegrationError: The package is older.
    """
    version = importlib.metadata.version(package)
    oldest, newest = TRIED[package][0], TRIED[package][-1]
    if release_of(version) < release_of(oldest):
        msg = (
            f"{package} {version} is installed, and shardkit was tried with {oldest} to {newest}: "
            f"older ones lack functions that it replaces. Install one of these: "
            f"pip install '{package}=={newest}.*'"
        )
        raise IntegrationError(msg)
    if release_of(version) > release_of(newest) and package not in _warned:
        _warned.add(package)
        msg = (
            f"{package} {version} is newer than what shardkit was tried with, {oldest} to "
            f"{newest}. Functions that it replaces may do something else there. Compare the first "
            f"losses with those of {newest}, or install that: pip install '{package}=={newest}.*'"
        )
        warn_user(msg)


@contextlib.contextmanager
def replacing(package: str) -> Iterator[None]:
    """Name the package's version if something to be replaced is missing in it.

    Raises:
        IntegrationError: Something is missing.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        version, tried = importlib.metadata.version(package), TRIED[package]
        msg = (
            f"{package} {version} lacks what shardkit replaces ({error}). It was tried with "
            f"{tried[0]} to {tried[-1]}: pip install '{package}=={tried[-1]}.*'"
        )
        raise IntegrationError(msg) from error
