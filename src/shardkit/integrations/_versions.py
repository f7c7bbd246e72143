"""Which versions of other packages are known."""

from __future__ import annotations

import importlib.metadata

from shardkit._errors import IntegrationError

KNOWN = {"accelerate": "1.15", "transformers": "5.23", "lightning": "2.6"}
"""Of each the version without its last number: those differ by corrections only."""


def check_version(package: str) -> None:
    """Raise unless a package has the version whose functions are known.

    Raises:
        IntegrationError: It has another one.
    """
    version = importlib.metadata.version(package)
    known = KNOWN[package]
    if not version.startswith(f"{known}."):
        msg = (
            f"{package} {version} is installed, and shardkit knows {known}: in another one, "
            f"functions that it replaces may do something else, and training may be wrong without "
            f"an error. Install the known one: pip install '{package}=={known}.*'"
        )
        raise IntegrationError(msg)
