"""``python -m shardkit``: the commands, or how to install what they need."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or print which packages it needs."""
    try:
        from shardkit._cli import app

        app(prog_name="python -m shardkit")
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "yaml", "psutil"}:
            raise
        print(
            f"python -m shardkit needs the packages of its extra 'cli', and {error.name!r} is not "
            f"installed: pip install 'shardkit[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
