"""What a run has cost so far, as ``Handle.metrics`` shows it."""

import math
from typing import Any

from tersegrad.auto.decisions import Decisions
from tersegrad.comm.metered import Metered
from tersegrad.core import Reducer
from tersegrad.core import state as states
from tersegrad.engine.buckets import BucketStore


def metrics_of(spec: Reducer, store: BucketStore, comm: Metered, dense_bytes: int) -> dict[str, Any]:
    """Bytes, times and what methods report; see ``Handle.metrics``."""
    total, timing = comm.total, comm.timing
    reports = [report for entry in store.entries() for report in states.reports(entry.state)]
    sent, of, empty = (sum(report.get(key, 0) for report in reports) for key in ("sent", "of", "empty"))
    layers = {name: figures for report in reports for name, figures in report.get("layer", {}).items()}
    return {
        "spec": repr(spec),
        "buckets": len(store),
        "bytes_sent": total.sent,
        "bytes_handed_over": total.payload,
        "dense_bytes": dense_bytes,
        "ratio": dense_bytes / total.sent if total.sent else 1.0,
        "encode_seconds": timing.encode,
        "wait_seconds": timing.wait,
        "decode_seconds": timing.decode,
        "density": sent / of if of else 1.0,
        "empty_sends": empty,
        "collectives": {name: meter.calls for name, meter in comm.by_collective.items()},
        "layers": layers,
        "decisions": list(Decisions.of(comm).made),
    }


def residual_norm(spec: Reducer, store: BucketStore) -> float:
    """Of all that this rank remembers and has not sent."""
    residuals = (spec.residual(layout, state) for layout, state in store.all_states())
    return math.hypot(*(float(residual.norm()) for residual in residuals if residual is not None))
