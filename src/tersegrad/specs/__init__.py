"""Specs as text: presets, the registry of classes, and the parser."""

from tersegrad.specs.parse import parse, parse_reducer
from tersegrad.specs.presets import PRESETS, Preset
from tersegrad.specs.registry import ENTRY_POINT_GROUP, load_module, loaded_modules, registry

__all__ = [
    "ENTRY_POINT_GROUP",
    "PRESETS",
    "Preset",
    "load_module",
    "loaded_modules",
    "parse",
    "parse_reducer",
    "registry",
]
