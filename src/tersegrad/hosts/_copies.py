"""Hooks that a copy of the model does not take along."""

from collections.abc import Callable


class Hook:
    """Calls a function. A copy of the model, by deepcopy or pickle, has hooks too, and those do nothing."""

    def __init__(self, function: Callable[..., None] | None = None):
        self._function = function

    def __call__(self, *args: object) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()
