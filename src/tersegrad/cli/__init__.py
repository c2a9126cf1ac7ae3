"""The command line: ``tersegrad list``, ``inspect``, ``simulate``, ``train`` and others (``tersegrad --help``)."""

import os
import sys

from tersegrad.cli.parser import make_parser
from tersegrad.specs import load_module


def main(argv: list[str] | None = None) -> int:
    """Runs a command; errors that a user can mend come without a traceback."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        for module in args.modules:
            load_module(module)
        code: int = args.run(args)
    except ModuleNotFoundError as error:
        print(f"tersegrad {args.command} needs {error.name}: pip install 'tersegrad[lab]'", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has seen enough, as in ``tersegrad list | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"tersegrad {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntersegrad {args.command}: stopped. The same command goes on from here.", file=sys.stderr)
        return 130
    return code
