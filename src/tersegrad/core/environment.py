"""What a measurement depends on besides the code."""

import os
import platform
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }
