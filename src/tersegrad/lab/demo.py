"""The demo: real training by several processes over an emulated slow link, compressed and not, side by side."""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tersegrad.comm.units import show_bytes
from tersegrad.lab import plots
from tersegrad.lab.train import Plan, make_runs, read_events, show_progress

EPOCHS = 8  # 88 steps with four workers
# By name: uncompressed and bf16, the four papers' methods, and what we recommend. A * marks a preset whose phases are
# shortened to fit into the demo.
SPECS = {
    "none": "none",
    "bf16": "bf16",
    "sidco": "sidco",
    "vgc": "vgc",
    "fft*": "ErrorFeedback(AllGather(FFT(theta=0.9, values=RangeFloat(bits=6), order='channels_last')))",
    "gradiveq*": "GradiVeQ(slice_size=512, loss=0.01, warmup=5, learn=8, compress=200, worst=None, drift=None, "
    "linear=True)",
    "topk4*": "ErrorFeedback(Schedule(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))), 'ratio', "
    "steps={0: 0.25, 10: 0.03}))",
}

Runs = dict[str, list[dict[str, Any]]]  # name -> the events of its run


def run(specs: list[str], workers: int, bandwidth: str, latency: str, epochs: int | None, out: Path) -> int:
    """Trains with every spec and shows a table and a picture.

    Args:
        specs: What to compare with ``none``; empty: ``SPECS``.
        workers: Processes.
        bandwidth: Of the emulated link.
        latency: Of the emulated link, one way.
        epochs: Passes over the data; None: ``EPOCHS``.
        out: Folder for the picture and the numbers.

    Returns:
        The exit code.
    """
    console = Console()
    named = {"none": "none", **({spec: spec for spec in specs} or SPECS)}
    with tempfile.TemporaryDirectory(prefix="tersegrad-demo-") as folder:
        plan = Plan(
            specs=tuple(named.values()),
            workload="digits",
            workers=workers,
            network="throttled",
            bandwidth=bandwidth,
            latency=latency,
            seeds=(0,),
            epochs=epochs or EPOCHS,
            steps=None,
            seconds=None,
            data=None,
            out=Path(folder),
            command="tersegrad demo",
        )
        configs = plan.configs()
        console.print(
            f"[bold]tersegrad demo[/bold]: {workers} worker processes train a model of 300,000 parameters on digits\n"
            f"over an [bold]emulated[/bold] link of {bandwidth}, {latency} one way (each collective waits as long as "
            "that link would take)\n"
        )
        with show_progress(console) as progress:
            make_runs(configs, None, progress)
        runs = {name: read_events(Path(config.file)) for name, config in zip(named, configs, strict=True)}
        out.mkdir(parents=True, exist_ok=True)
        (out / "demo.jsonl").write_text("".join(Path(config.file).read_text() for config in configs))
    console.print(_table(runs))
    for name, spec in named.items():
        if name.endswith("*"):
            console.print(f"{name}, phases shortened to fit into the demo: {spec}", highlight=False)
    picture = plots.demo(runs, f"{workers} workers, emulated {bandwidth}", out / "demo.png")
    console.print(f"Picture: {picture}   Numbers: {out / 'demo.jsonl'}")
    return 0


def _table(runs: Runs) -> Table:
    """One row per spec, compared with uncompressed training."""
    table = Table(title="The same model on the same batches; bytes sent by one worker")
    for heading in ("method", "accuracy", "ms/step", "sent/step", "fewer bytes", "speed-up"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    base = runs["none"][-1]
    for spec, events in runs.items():
        last = events[-1]
        table.add_row(
            spec,
            f"{last['score']:.1%}",
            f"{1000 * last['seconds'] / last['step']:.1f}",
            show_bytes(last["sent"] / last["step"]),
            f"{base['sent'] / last['sent']:.1f}x",
            f"{(base['seconds'] / base['step']) / (last['seconds'] / last['step']):.1f}x",
        )
    return table
