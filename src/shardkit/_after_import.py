"""What is to be done when somebody imports a module that takes long to import."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types
    from collections.abc import Callable


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after it was imported, once.

    Put it first into ``sys.meta_path``.
    """

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        """Let others find the module; add the call to what loads it."""
        del path, target
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec
