"""Runs every benchmark of this folder and keeps its measurements in ``benchmarks/results``: one JSON line each.

python benchmarks/run_all.py
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COMMANDS = {
    "dense_overhead": [*TORCHRUN, "2", str(HERE / "dense_overhead.py")],
    "add": [sys.executable, str(HERE / "add.py")],
    "topk": [sys.executable, str(HERE / "topk.py")],
    "sidco": [sys.executable, str(HERE / "sidco.py")],
    "index_codec": [sys.executable, str(HERE / "index_codec.py")],
    "vgc": [sys.executable, str(HERE / "vgc.py")],
    "per_sample": [sys.executable, str(HERE / "per_sample.py")],
    "range_float": [sys.executable, str(HERE / "range_float.py")],
    "quantisers": [sys.executable, str(HERE / "quantisers.py")],
    "sparsifiers": [sys.executable, str(HERE / "sparsifiers.py")],
    "fft": [sys.executable, str(HERE / "fft.py")],
    "gradiveq": [sys.executable, str(HERE / "gradiveq.py")],
    "gradiveq_link": [*TORCHRUN, "4", str(HERE / "gradiveq.py"), "--link"],
    "lab_overhead": [sys.executable, str(HERE / "lab_overhead.py")],
    "thresholds": [sys.executable, str(HERE / "thresholds.py")],
    "plan": [sys.executable, str(HERE / "plan.py")],
    "growth": [sys.executable, str(HERE / "growth.py")],
    "exchanges": [*TORCHRUN, "4", str(HERE / "exchanges.py")],
}


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    for name, command in COMMANDS.items():
        print(f"\n=== {name}", flush=True)
        subprocess.run([*command, "--json", str(RESULTS / f"{name}.jsonl")], check=True)


if __name__ == "__main__":
    main()
