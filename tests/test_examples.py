"""The example runs as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_train():
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = subprocess.run([*argv, str(EXAMPLES / "train.py"), "sidco"], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    accuracy, ratio = map(float, re.search(r"accuracy ([\d.]+)%, (\d+)x fewer", out.stdout).groups())
    assert accuracy > 95
    assert ratio > 20
