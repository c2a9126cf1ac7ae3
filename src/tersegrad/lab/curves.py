"""The picture of ``tersegrad plan --workers 4..1024``: predicted step time against the number of workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.lines import Line2D

from tersegrad.lab import plots


def draw(workers: Sequence[int], steps: Mapping[str, Sequence[float]], compute: float, title: str, path: Path) -> Path:
    """Draw one line per spec, in milliseconds; the dotted line is a step without communication."""
    with plots.style():
        figure = plots.new_figure(3.4)
        axes = figure.subplots()
        handles = []
        taken = 0
        for spec, seconds in steps.items():
            colour = plots.PLAIN if spec == "none" else plots.SERIES[taken % len(plots.SERIES)]
            dashes = plots.DASHES[0 if spec == "none" else taken // len(plots.SERIES) % len(plots.DASHES)]
            taken += spec != "none"
            (line,) = axes.plot(workers, [1e3 * s for s in seconds], color=colour, linestyle=dashes, linewidth=1.9)
            handles.append(line)
        if compute > 0:
            axes.axhline(1e3 * compute, color=plots.MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)), zorder=1)
            handles.append(Line2D([], [], color=plots.MUTED, linewidth=0.9, linestyle=(0, (1, 2.5))))
        plots.log_scale(axes.yaxis, lambda v: f"{v:g}")
        plots.log_scale(axes.xaxis, lambda v: f"{v:g}")
        axes.set_xticks([n for n in workers if n & (n - 1) == 0], minor=False)
        axes.set_xlabel(f"workers (log)   {title}")
        axes.set_ylabel("predicted ms per step (log)")
        plots.legend(figure, handles, [*steps, *(["no communication"] if compute > 0 else [])])
    return plots.save(figure, path)
