"""docs/add-a-compressor.md does what it says, block by block."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.fork_server import command_line
from tersegrad import specs

PAGE = (Path(__file__).parent.parent / "docs" / "add-a-compressor.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "every_other.py").write_text(blocks("python")[0])
    return folder


def test_it_takes_less_than_thirty_lines():
    code = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(code) < 30


def test_what_python_says(folder):
    script = folder / "script.py"
    script.write_text("from every_other import EveryOther\n" + "\n".join(blocks("python")[1:]))
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.split()[4])
def test_what_the_console_says(folder, block):
    command, *says = block.strip().splitlines()
    done = command_line(shlex.split(command.removeprefix("$ tersegrad ")), folder)
    assert done.returncode == 0, done.stderr
    assert "\n".join(says) in done.stdout


def test_a_broken_method_is_told_which_law_it_breaks(folder):
    """The tutorial's method, which does not look whether the half that it does not send is finite."""
    code = blocks("python")[0].replace("if not x.isfinite().all():", 'if not x[state["turn"] :: 2].isfinite().all():')
    (folder / "broken.py").write_text(code.replace("EveryOther", "Broken"))
    done = command_line(["--import", "broken.py", "check", "Broken()"], folder)
    assert done.returncode == 1
    assert "Broken(): breaks a law: rank 0 was given a finite mean of a non-finite gradient" in done.stdout


def test_a_method_that_raises_is_shown_where(folder):
    code = blocks("python")[0].replace('"turn": 0', '"tern": 0').replace("EveryOther", "Raises")
    (folder / "raises.py").write_text(code)
    done = command_line(["--import", "raises.py", "check", "Raises()"], folder)
    assert done.returncode == 1
    assert "Raises(): raised" in done.stdout
    assert "KeyError: 'turn'" in done.stdout


def test_an_installed_package_is_found_by_its_entry_point(folder):
    """An installed distribution is a folder with metadata on the path; this is one."""
    site = folder / "site"
    info = site / "every_other-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "every_other.py").write_text(blocks("python")[0])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: every-other\nVersion: 1.0\n")
    entry = re.search(r"\[project.entry-points.tersegrad\]\n(.*)\n", blocks("toml")[0]).group(1).replace('"', "")
    (info / "entry_points.txt").write_text(f"[{specs.ENTRY_POINT_GROUP}]\n{entry}\n")
    script = f"import sys; sys.path.insert(0, {str(site)!r}); import tersegrad; print(tersegrad.parse('EveryOther()'))"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.stdout == "EveryOther()\n", done.stderr


@pytest.mark.parametrize("name", ["nowhere.py", "no_such_module_at_all"])
def test_a_module_that_is_not_there_is_told(name):
    with pytest.raises(ValueError, match=name):
        specs.load_module(name)
