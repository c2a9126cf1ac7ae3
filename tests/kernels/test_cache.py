"""The cache of machine code: never stale, always somewhere, and filled by one process only.

The processes here import ``_cache`` into a package with two tiny kernels, one of which is inlined into the other.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tersegrad.kernels import cpu, ops
from tersegrad.kernels.cpu import _cache, moments

HELPER = """
    import numba

    @numba.njit(cache=True)
    def value():
        return {number}
"""
KERNEL = """
    import numba
    from tersegrad.kernels.cpu.helper import value

    @numba.njit(cache=True)
    def kernel():
        return value()
"""
RUN = """
    from tersegrad.kernels.cpu import _cache
    from tersegrad.kernels.cpu.kernel import kernel
    print(kernel(), _cache.compilations().functions, _cache.cache_folder(), sep=";")
"""


class Package:
    """A copy of the cache with two kernels, in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.cpu = root, root / "src" / "tersegrad" / "kernels" / "cpu"
        self.cpu.mkdir(parents=True)
        (self.cpu.parent / "ops").mkdir()
        for folder in (self.cpu, self.cpu.parent, self.cpu.parent.parent):
            (folder / "__init__.py").touch()
        shutil.copy(_cache.__file__, self.cpu)
        self.write("helper", HELPER.format(number=1))
        self.write("kernel", KERNEL)

    def write(self, name: str, text: str) -> None:
        (self.cpu / f"{name}.py").write_text(textwrap.dedent(text))

    def start(self, text: str, **environment: str | Path) -> subprocess.Popen[str]:
        known = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
        defaults = {"PYTHONPATH": self.root / "src", "HOME": self.root / "home", "TMPDIR": self.root}
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(text)],
            env=known | {key: str(value) for key, value in (defaults | environment).items()},
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, **environment: str | Path) -> tuple[int, int, Path]:
        """What the kernel says, how many functions were compiled for it, and where they are now."""
        return read(self.start(RUN, **environment))


def read(process: subprocess.Popen[str]) -> tuple[int, int, Path]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    answer, compiled, folder = out.strip().split(";")
    return int(answer), int(compiled), Path(folder)


@pytest.fixture
def package(tmp_path):
    return Package(tmp_path)


def machine_code(folder: Path) -> list[Path]:
    return list(folder.glob("*.nbc"))


def test_inlined_code_is_never_stale(package):
    answer, compiled, folder = package.run()
    assert (answer, compiled) == (1, 2)
    assert folder.parent == package.cpu / "__pycache__"
    assert len(machine_code(folder)) == 2
    assert package.run() == (1, 0, folder)  # loading is not compiling
    package.write("helper", HELPER.format(number=2))  # and the kernel's own file is the same
    answer, compiled, newer = package.run()
    assert (answer, compiled) == (2, 2)
    assert newer != folder
    assert not machine_code(folder)


def test_constants_of_ops_are_part_of_the_code(package):
    _, _, folder = package.run()
    (package.cpu.parent / "ops" / "numbers.py").write_text("BLOCK = 512\n")
    _, compiled, newer = package.run()
    assert newer != folder
    assert compiled == 2


def test_folders_that_cannot_be_written_to_are_passed_over(package):
    """A file in place of a folder stops root, too."""
    asked, blocked = package.root / "asked", package.root / "file"
    blocked.touch()
    answer, _, folder = package.run(NUMBA_CACHE_DIR=asked)
    assert answer == 1
    assert folder.is_relative_to(asked)
    shutil.rmtree(package.cpu / "__pycache__", ignore_errors=True)
    (package.cpu / "__pycache__").touch()
    _, compiled, folder = package.run(NUMBA_CACHE_DIR=blocked / "below")
    assert compiled == 2
    assert folder.is_relative_to(package.root / "home")
    _, compiled, folder = package.run(HOME=blocked)
    assert compiled == 2
    private = package.root / f"tersegrad-{os.getuid()}"
    assert folder.parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert package.run(HOME=blocked) == (1, 0, folder)


@pytest.mark.parametrize("trap", ["link", "open to all"])
def test_code_of_others_is_not_run_from_the_temporary_folder(package, trap):
    private, elsewhere = package.root / f"tersegrad-{os.getuid()}", package.root / "elsewhere"
    elsewhere.mkdir()
    if trap == "link":
        private.symlink_to(elsewhere)
    else:
        private.mkdir()
        private.chmod(0o777)
    (package.cpu / "__pycache__").touch()
    blocked = package.root / "file"
    blocked.touch()
    answer, compiled, folder = package.run(HOME=blocked)
    assert (answer, compiled) == (1, 2)
    assert folder.parent == package.root
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(elsewhere.iterdir())


HOLDS = """
    import pathlib, time
    from tersegrad.kernels.cpu import _cache
    from tersegrad.kernels.cpu.kernel import kernel
    with _cache.compile_lock(), _cache.compile_lock():
        pathlib.Path({holding!r}).touch()
        while not pathlib.Path({asking!r}).exists():
            time.sleep(0.01)
        time.sleep(0.2)
        kernel()
    print(kernel(), _cache.compilations().functions, _cache.cache_folder(), sep=";")
"""
ASKS = """
    import pathlib
    from tersegrad.kernels.cpu import _cache
    from tersegrad.kernels.cpu.kernel import kernel
    pathlib.Path({asking!r}).touch()
    with _cache.compile_lock():
        kernel()
    print(kernel(), _cache.compilations().functions, _cache.cache_folder(), sep=";")
"""


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def test_one_process_compiles_and_the_other_loads(package):
    holding, asking = package.root / "holding", package.root / "asking"
    names = {"holding": str(holding), "asking": str(asking)}
    first = package.start(HOLDS.format(**names))
    wait_for(holding)
    second = package.start(ASKS.format(**names))
    assert read(first)[:2] == (1, 2)
    assert read(second)[:2] == (1, 0)


def test_a_process_that_dies_lets_others_compile(package):
    holding, asking = package.root / "holding", package.root / "asking"
    names = {"holding": str(holding), "asking": str(asking) + " never"}
    first = package.start(HOLDS.format(**names))
    wait_for(holding)
    second = package.start(ASKS.format(asking=str(asking)))
    wait_for(asking)
    first.kill()
    first.communicate()
    assert read(second)[:2] == (1, 2)


def test_without_locks_all_compile(monkeypatch):
    monkeypatch.setattr(_cache, "_fcntl", None)
    with cpu.compile_lock(), cpu.compile_lock():
        pass


def test_compilations_are_timed(package):
    text = """
        import time
        from tersegrad.kernels.cpu import _cache
        from tersegrad.kernels.cpu.kernel import kernel
        assert _cache.compilations() == (0, 0.0)
        start = time.perf_counter()
        kernel()
        found = _cache.compilations()
        assert 0 < found.seconds <= time.perf_counter() - start, found
        kernel()
        assert _cache.compilations() == found
        import numba
        numba.njit(lambda: 3)()  # somebody else's
        assert _cache.compilations() == found
    """
    process = package.start(text)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_kernels_themselves_are_cached_there():
    folder = str(cpu.cache_folder())
    functions = [
        function
        for name, module in sys.modules.items()
        if name.startswith("tersegrad.kernels.cpu.")
        for function in vars(module).values()
        if hasattr(function, "_cache") and function.py_func.__module__ == name
    ]
    assert len(functions) > 60
    for function in functions:
        assert function._cache.cache_path == folder, function
    sources = [Path(_cache.__file__).parent, Path(next(iter(ops.__path__)))]
    assert sorted(_cache._SOURCES) == sorted(path.resolve() for path in sources)


def test_functions_of_others_are_cached_as_ever():
    assert _cache._Locator.from_function(wait_for, __file__) is None
    assert callable(moments)  # the operation, not its file
