"""The demo: real training by several processes over an emulated slow link, plain and compressed, side by side."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tersegrad.lab import plots
from tersegrad.spec import PRESETS, parse_reducer
from tersegrad.taps import Throttled
from tersegrad.units import show_bytes

Epochs = dict[str, list[dict[str, Any]]]  # spec -> its epochs, as rank 0 reported them


def run(specs: list[str], workers: int, bandwidth: str, latency: str, epochs: int, out: Path) -> int:
    """Trains with every spec and shows a table and a picture."""
    specs = list(dict.fromkeys(["none", *(specs or PRESETS)]))
    for spec in specs:
        parse_reducer(spec)  # a mistake is told now, not by a worker
    Throttled(bandwidth, latency=latency)
    console = Console()
    console.print(
        f"[bold]tersegrad demo[/bold]: {workers} worker processes train a network of 300,000 parameters on digits\n"
        f"over an [bold]emulated[/bold] link of {bandwidth}, {latency} one way (each collective waits as long as that "
        "link would take)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["-m", "tersegrad.lab.demo_worker", *specs]
    command += [f"--bandwidth={bandwidth}", f"--latency={latency}", f"--epochs={epochs}"]
    results, log, code = _watch(command, specs, epochs, console)
    if code:
        console.print(f"[red]The workers failed (exit code {code}); their last words:[/red]")
        console.print("".join(log[-25:]), markup=False)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(epoch) for spec in specs for epoch in results[spec]]
    (out / "demo.jsonl").write_text("\n".join(lines) + "\n")
    console.print(_table(specs, results))
    picture = plots.demo(results, f"{workers} workers, emulated {bandwidth}", out / "demo.png")
    console.print(f"Picture: {picture}   Numbers: {out / 'demo.jsonl'}")
    return 0


def _watch(command: list[str], specs: list[str], epochs: int, console: Console) -> tuple[Epochs, list[str], int]:
    """Runs the workers and moves one bar per spec as they report."""
    results: Epochs = {spec: [] for spec in specs}
    log: list[str] = []
    columns = (
        TextColumn("{task.description:<34.34}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with (
        Progress(*columns, console=console) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        bars = {s: progress.add_task(s, total=epochs, note="", start=s == specs[0]) for s in specs}
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"event"'):
                log.append(line)
                continue
            event = json.loads(line)
            spec = event["spec"]
            results[spec].append(event)
            note = f"accuracy {event['accuracy']:.1%}  {1000 * event['seconds'] / event['steps']:.0f} ms/step"
            progress.start_task(bars[spec])
            progress.update(bars[spec], completed=event["epoch"], note=note)
    return results, log, process.returncode


def _table(specs: list[str], results: Epochs) -> Table:
    """One row per spec, against plain."""
    table = Table(title="The same network on the same batches; bytes as they leave one worker")
    for heading in ("spec", "accuracy", "ms/step", "sent/step", "fewer bytes", "speed-up"):
        table.add_column(heading, justify="left" if heading == "spec" else "right")
    plain = results[specs[0]][-1]
    for spec in specs:
        last = results[spec][-1]
        metrics = last["metrics"]
        table.add_row(
            spec,
            f"{last['accuracy']:.1%}",
            f"{1000 * last['seconds'] / last['steps']:.1f}",
            show_bytes(metrics["bytes_sent"] / metrics["steps"]),
            f"{metrics['ratio']:.1f}x",
            f"{(plain['seconds'] / plain['steps']) / (last['seconds'] / last['steps']):.1f}x",
        )
    return table
