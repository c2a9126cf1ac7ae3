"""Grids as loops: one test that runs many cases, and says which one failed."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import Any


def cases(names: str = "", rows: Iterable[Any] = (), /, **grid: Iterable[Any]) -> Callable[..., Any]:
    """Runs a test for every combination, in one loop; as ``pytest.mark.parametrize``, but one test id for all.

    ``@cases(n=[1, 2], scale=[0.5, 1.0])`` is a grid; ``@cases("n k", [(3, 1), (4, 2)])`` is rows of arguments.
    """
    axes = [[{name: value} for value in values] for name, values in grid.items()]
    if names:
        axes.append([dict(zip(names.split(), row, strict=True)) for row in rows])
    assert all(axes), "a grid without cases tests nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for parts in product(*axes):
                case = {name: value for part in parts for name, value in part.items()}
                with noted(**case):
                    test(*args, **kwargs, **case)

        signature = inspect.signature(test)
        ours = {name for axis in axes for name in axis[0]}
        others = [parameter for name, parameter in signature.parameters.items() if name not in ours]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def noted(**case: Any) -> Iterator[None]:
    """Whatever fails inside says in which case."""
    try:
        yield
    except BaseException as error:  # that of pytest.fail is no Exception
        error.add_note("case: " + ", ".join(f"{name}={value!r}" for name, value in case.items()))
        raise
