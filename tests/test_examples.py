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


def test_simulate_own_model():
    out = subprocess.run([sys.executable, str(EXAMPLES / "simulate_own_model.py")], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    rows = re.findall(r"(\w+) +accuracy ([\d.]+)%, ([\d.]+) kB a step", out.stdout)
    assert [spec for spec, _, _ in rows] == ["none", "topk4", "sidco"]
    scores, sent = zip(*((float(score), float(sent)) for _, score, sent in rows), strict=True)
    assert min(scores) > 80
    assert sent[0] > 3 * sent[1] > 3 * sent[2]
