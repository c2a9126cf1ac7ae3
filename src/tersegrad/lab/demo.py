"""The demo: real training by several processes over an emulated slow link, plain and compressed, side by side."""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tersegrad.comm.units import show_bytes
from tersegrad.lab import plots
from tersegrad.lab.train import Plan, make_runs, read_events, show_progress

SPECS = ("none", "bf16", "qsgd", "powersgd", "topk", "sidco", "vgc")  # one of each kind; all presets take too long

Runs = dict[str, list[dict[str, Any]]]  # spec -> the events of its run


def run(specs: list[str], workers: int, bandwidth: str, latency: str, epochs: int | None, out: Path) -> int:
    """Trains with every spec and shows a table and a picture."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tersegrad-demo-") as folder:
        plan = Plan(
            specs=tuple(dict.fromkeys(["none", *(specs or SPECS)])),
            workload="digits",
            workers=workers,
            network="throttled",
            bandwidth=bandwidth,
            latency=latency,
            seeds=(0,),
            epochs=epochs,
            steps=None,
            seconds=None,
            data=None,
            out=Path(folder),
            command="tersegrad demo",
        )
        configs = plan.configs()
        console.print(
            f"[bold]tersegrad demo[/bold]: {workers} worker processes train a network of 300,000 parameters on digits\n"
            f"over an [bold]emulated[/bold] link of {bandwidth}, {latency} one way (each collective waits as long as "
            "that link would take)\n"
        )
        with show_progress(console) as progress:
            make_runs(configs, None, progress)
        runs = {config.spec: read_events(Path(config.file)) for config in configs}
        out.mkdir(parents=True, exist_ok=True)
        (out / "demo.jsonl").write_text("".join(Path(config.file).read_text() for config in configs))
    console.print(_table(runs))
    picture = plots.demo(runs, f"{workers} workers, emulated {bandwidth}", out / "demo.png")
    console.print(f"Picture: {picture}   Numbers: {out / 'demo.jsonl'}")
    return 0


def _table(runs: Runs) -> Table:
    """One row per spec, against plain."""
    table = Table(title="The same network on the same batches; bytes as they leave one worker")
    for heading in ("spec", "accuracy", "ms/step", "sent/step", "fewer bytes", "speed-up"):
        table.add_column(heading, justify="left" if heading == "spec" else "right")
    plain = runs["none"][-1]
    for spec, events in runs.items():
        last = events[-1]
        table.add_row(
            spec,
            f"{last['score']:.1%}",
            f"{1000 * last['seconds'] / last['step']:.1f}",
            show_bytes(last["sent"] / last["step"]),
            f"{plain['sent'] / last['sent']:.1f}x",
            f"{(plain['seconds'] / plain['step']) / (last['seconds'] / last['step']):.1f}x",
        )
    return table
