"""docs/reliability.md: the tests that it names exist, and its bounds are those of the code."""

import ast
import importlib
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_/]+\.py)(?:::(\w+))?`", PAGE)))
BOUNDS = re.findall(r"^\| .* \| (\d+) \| `([a-z_.]+)\.([A-Z_]+)`(?: \+ (\d+))? \|$", PAGE, re.M)


def test_the_page_names_many_tests_and_bounds():
    assert len([name for _, name in NAMED if name]) > 40
    assert len(BOUNDS) == PAGE.split("## Bounds")[1].count("\n|") - 2


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_the_page_names_exists(file, name):
    known = [path for path in (TESTS / file, TESTS.parent / "src" / "tersegrad" / file) if path.exists()]
    assert known, f"{file} is not there"
    if name:
        functions = [
            node.name for node in ast.walk(ast.parse(known[0].read_text())) if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{file} has no {name}"


@pytest.mark.parametrize(("value", "module", "constant", "more"), BOUNDS)
def test_the_bounds_of_the_page_are_those_of_the_code(value, module, constant, more):
    package = module if module.startswith("support") else f"tersegrad.{module}"
    if package == "support.fault_cases":  # a script
        (found,) = re.findall(rf"^{constant} = ([\d.]+)", (TESTS / "support" / "fault_cases.py").read_text(), re.M)
    else:
        found = getattr(importlib.import_module(package), constant)
    assert float(found) + float(more or 0) == float(value)
