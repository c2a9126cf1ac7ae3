"""``python -m tersegrad.cli``."""

import sys

from tersegrad.cli import main

sys.exit(main())
