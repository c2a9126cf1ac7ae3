"""Spec: everything that is written as a constructor expression, so that ``parse(repr(spec)) == spec``."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def param(default: T = MISSING, doc: str = "", *, factory: Callable[[], T] | None = None) -> T:  # type: ignore[assignment]
    """A hyper-parameter of a spec: a dataclass field with a sentence for ``tersegrad list``.

    Args:
        default: Its value where none is given; leave it out for a parameter that must be given.
        doc: What it does, in a sentence.
        factory: Makes the default, where that is a spec or a dict.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, repr=False)
    ... class _Example(Spec):
    ...     ratio: float = param(0.01, "fraction of elements sent")
    >>> _Example(), doc_of(fields(_Example)[0])
    (_Example(), 'fraction of elements sent')
    """
    metadata = {"doc": doc}
    made: Any = field(metadata=metadata)
    if factory is not None:
        made = field(default_factory=factory, metadata=metadata)
    elif default is not MISSING:
        made = field(default=default, metadata=metadata)
    result: T = made
    return result


def doc_of(parameter: "Field[Any]") -> str:
    """The sentence that ``param`` was given; empty if there is none."""
    return str(parameter.metadata.get("doc", ""))


class Spec:
    """Base of compressors and reducers: a frozen dataclass whose ``repr`` is the expression that makes it."""

    # Expressions that the laws are run on; default: the class with no argument.
    examples: ClassVar[tuple[str, ...]] = ()
    # Members of the contract: no hyper-parameter may have such a name (see ``__init_subclass__``).
    contract: ClassVar[frozenset[str]] = frozenset({"examples", "contract", "fingerprint", "walk"})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members = frozenset[str]().union(*(base.contract for base in cls.__mro__[1:] if issubclass(base, Spec)))
        parameters = set(vars(cls).get("__annotations__", {})) - _class_variables(cls)
        hidden = sorted(parameters & members)
        if hidden:
            raise TypeError(
                f"{cls.__name__}: a parameter called {hidden[0]!r} would hide {hidden[0]!r}, which every "
                f"{_kind(cls)} has. Give the parameter another name, e.g. {hidden[0]}_value."
            )

    def __repr__(self) -> str:
        return self._expression(with_defaults=False)

    def fingerprint(self) -> int:
        """64 bits that name this spec with all its parameters, defaults included."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> int:  # every frame has it, and a spec never changes
        digest = hashlib.blake2b(self._expression(with_defaults=True).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def walk(self) -> "Iterator[Spec]":
        """This spec and every spec inside it, outermost first."""
        yield self
        for f in fields(self):  # type: ignore[arg-type]  # every final subclass is a dataclass
            value = getattr(self, f.name)
            for child in value.values() if isinstance(value, dict) else (value,):
                if isinstance(child, Spec):
                    yield from child.walk()

    def _expression(self, with_defaults: bool) -> str:
        parts = []
        leading = True  # a nested spec in front is written without its field's name
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            leading = leading and isinstance(value, Spec | dict)
            if value == default and not with_defaults:
                leading = False
                continue
            text = _literal(value, with_defaults)
            parts.append(text if leading else f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _class_variables(cls: type) -> set[str]:
    """Names that are annotated as ClassVar: they set a member of the contract, and are no parameters."""
    return {name for name, kind in vars(cls).get("__annotations__", {}).items() if "ClassVar" in str(kind)}


def _kind(cls: type) -> str:
    names = [base.__name__ for base in cls.__mro__]
    return next((name.lower() for name in ("Compressor", "Reducer") if name in names), "spec")


def _literal(value: Any, with_defaults: bool) -> str:
    if isinstance(value, Spec):
        return value._expression(with_defaults)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v, with_defaults)}" for k, v in value.items()) + "}"
    return repr(value)


def require(spec: Spec, field_name: str, kind: type, advice: str) -> None:
    """Refuses a parameter of the wrong kind at construction, with what to write instead."""
    value = getattr(spec, field_name)
    if not isinstance(value, kind):
        raise TypeError(
            f"{type(spec).__name__}: {field_name} must be a {kind.__name__.lower()}, and {value!r} is not one. {advice}"
        )


def require_fraction(spec: Spec, field_name: str, advice: str) -> None:
    """Refuses a parameter that is not a number above 0 and at most 1."""
    value = getattr(spec, field_name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"{type(spec).__name__}({field_name}={value!r}): a fraction is above 0 and at most 1. {advice}"
        )
