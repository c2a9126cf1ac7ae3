"""The registry: every class that a spec can name. Nothing is registered by hand: subclasses are found."""

import importlib
import importlib.util
import inspect
import sys
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from tersegrad.core import Compressor, Reducer, Spec

ENTRY_POINT_GROUP = "tersegrad"  # third parties name modules here; importing one defines its classes


def registry() -> dict[str, type[Spec]]:
    """Every concrete compressor and reducer by name: the subclasses that exist, third parties' included."""
    _load_third_parties()
    found: dict[str, type[Spec]] = {}
    bases: tuple[type[Spec], ...] = (Compressor, Reducer)
    for base in bases:
        for cls in _concrete_subclasses(base):
            if cls.__name__.startswith("_") or cls.__module__.rpartition(".")[2].startswith("_"):
                continue  # private: an experiment, a test's own, or a part of other methods
            other = found.setdefault(cls.__name__, cls)
            if other is not cls:
                raise ValueError(
                    f"two classes are called {cls.__name__}: {other.__module__} and {cls.__module__}. Rename one."
                )
    return dict(sorted(found.items()))


@cache
def _load_third_parties() -> None:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()


_loaded: dict[str, None] = {}


def load_module(name: str) -> None:
    """Imports a module, or runs a file, whose classes shall be known to specs. Twice is once."""
    if name in _loaded:
        return
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {name} to import methods from.")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module  # dataclasses look their module up
        found.loader.exec_module(module)
        name = str(path)
    else:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--import {name}: {error}. Name an installed module, or a file that ends in .py."
            ) from None
    _loaded[name] = None


def loaded_modules() -> tuple[str, ...]:
    """What ``load_module`` has loaded here, for processes that shall know the same classes."""
    return tuple(_loaded)


def _concrete_subclasses(base: type[Spec]) -> list[type[Spec]]:
    found = [] if inspect.isabstract(base) or not is_dataclass(base) else [base]
    for sub in base.__subclasses__():
        found += _concrete_subclasses(sub)
    return found
