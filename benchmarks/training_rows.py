"""Finished simulations as rows, one a run, to be kept: what was trained, what it reached, what it sent, its command.

python benchmarks/training_rows.py DIR [DIR ...] --json benchmarks/results/training/fashion.jsonl --workload fashion

A run that is in the file already, by all that decides its result, is not added again.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

KEPT = ("spec", "expression", "workload", "metric", "workers", "steps", "seed", "parameters", "environment", "time")


def row_of(file: Path) -> dict[str, Any] | None:
    """One run; None if it has not come to its end, or has been ended early."""
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    if not lines or lines[0].get("event") != "start" or lines[-1].get("event") != "end":
        return None
    start, end = lines[0], lines[-1]
    if start["network"] != "simulated" or end["step"] != start["steps"]:
        return None
    argv = ["tersegrad", "simulate", start["spec"], "--workload", start["workload"], "--data", "DIR"]
    argv += ["--workers", str(start["workers"]), "--steps", str(start["steps"]), "--seeds", str(start["seed"])]
    return {
        **{key: start[key] for key in KEPT},
        "score": end["score"],
        "sent": end["sent"],
        "curve": [[line["step"], line["score"]] for line in lines if line["event"] == "eval"],
        "identity": start["identity"],
        "command": shlex.join([*argv, "--out", "DIR"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    seen = {json.dumps(row["identity"], sort_keys=True) for row in known}
    for file in sorted(file for folder in args.folder for file in folder.rglob("*.jsonl")):
        row = row_of(file)
        if row is None or row["workload"] != args.workload or args.steps not in (None, row["steps"]):
            continue
        identity = json.dumps(row["identity"], sort_keys=True)
        if identity not in seen:
            seen.add(identity)
            known.append(row)
    known.sort(key=lambda row: (row["steps"], row["spec"] != "none", row["spec"], row["seed"]))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text("".join(json.dumps(row) + "\n" for row in known))
    plain = {(row["steps"], row["seed"]): row["sent"] for row in known if row["spec"] == "none"}
    for row in known:
        base = plain.get((row["steps"], row["seed"]))
        fewer = f"{base / row['sent']:6.1f}x" if base else " " * 7
        print(f"{row['score']:.4f} {fewer} seed {row['seed']} {row['steps']:5} {row['spec']}")


if __name__ == "__main__":
    main()
