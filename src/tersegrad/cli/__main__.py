"""``python -m tersegrad.cli``."""

import sys

from tersegrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
