"""``tersegrad list``: every preset and every class with its parameters."""

import argparse
from dataclasses import MISSING, fields

from tersegrad.core import Composite, Compressor, Spec, doc_of
from tersegrad.specs import PRESETS, registry

_GROUPS = {
    "compressors": "Compressors: make bytes of one vector",
    "reducers": "Reducers: N workers agree on one mean",
    "wrappers": "Wrappers: reducers made of reducers",
}


def run(args: argparse.Namespace) -> int:
    """Prints all of them."""
    print("Presets: one word for a whole spec")
    for preset_group in dict.fromkeys(preset.group for preset in PRESETS.values()):
        print(f"\n {preset_group}")
        for name, preset in PRESETS.items():
            if preset.group == preset_group:
                print(f"  {name:<14} {preset.meaning}\n{'':<17}{preset.spec}")
    classes = list(registry().values())
    for group, title in _GROUPS.items():
        print(f"\n{title}")
        for cls in classes:
            if _group(cls) == group:
                print(described(cls))
    return 0


def _group(cls: type[Spec]) -> str:
    if issubclass(cls, Compressor):
        return "compressors"
    return "wrappers" if issubclass(cls, Composite) else "reducers"


def described(cls: type[Spec]) -> str:
    """The class with its one-line meaning, then a line for each parameter."""
    lines = [f"  {cls.__name__:<15} {(cls.__doc__ or '').splitlines()[0]}"]
    for f in fields(cls):  # type: ignore[arg-type]
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        shown = f.name if default is MISSING else f"{f.name}={default!r}"
        lines.append(f"{'':<18}{shown:<20} {doc_of(f)}".rstrip())
    return "\n".join(lines)
