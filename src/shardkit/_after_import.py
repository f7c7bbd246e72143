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
        self._is_asking = False

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        """Let others find the module; add the call to what loads it.

        Who only asks whether the module is there, by ``importlib.util.find_spec``, loads nothing.
        """
        del path, target
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            sys.meta_path.remove(self)  # It is not there.
        else:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                is_first = self in sys.meta_path
                if is_first:
                    sys.meta_path.remove(self)
                execute(module)
                if is_first:
                    self._then(module)

            loader.exec_module = exec_module
        return spec
