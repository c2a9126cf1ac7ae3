"""``tersegrad warm``: compiles all that specs can need, e.g. while an image is built."""

import argparse

from tersegrad.engine.warm import LONG, warm
from tersegrad.specs import parse_reducer


def run(args: argparse.Namespace) -> int:
    """Compiles what is not in the cache yet; says how long it took and where the cache is."""
    from tersegrad.kernels import cpu  # here, not above: importing Numba takes a while

    for text in args.spec:
        before = cpu.compilations().functions
        seconds = warm(parse_reducer(text), LONG.numel)
        print(f"{text}: {cpu.compilations().functions - before} kernels compiled, {seconds:.1f} s")
    print(f"cached in {cpu.cache_folder()}")
    return 0
