"""Pictures of results, drawn with matplotlib without a screen."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def demo(results: dict[str, list[dict[str, Any]]], title: str, path: Path) -> Path:
    """Accuracy against time, and against bytes sent by one worker."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for spec, epochs in results.items():
        score = [100 * e["accuracy"] for e in epochs]
        by_time.plot([e["seconds"] for e in epochs], score, marker="o", markersize=3, label=spec)
        by_bytes.plot([e["metrics"]["bytes_sent"] / 1e6 for e in epochs], score, marker="o", markersize=3)
    by_time.set_xlabel("training time, seconds")
    by_time.set_ylabel("test accuracy, %")
    by_time.legend(fontsize="small")
    by_bytes.set_xlabel("sent by one worker, MB")
    for axes in (by_time, by_bytes):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    return path
