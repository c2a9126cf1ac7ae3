"""A rank is killed in mid-epoch, torchrun begins anew, and the end is that of an undisturbed run, to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "restart_script.py"
SPECS = [
    "ErrorFeedback(AllGather(TopK(ratio=0.05)))",
    "powersgd",
    "StepAhead(ErrorFeedback(AllGather(TopK(ratio=0.05))))",
]
KILL_AT = 10  # checkpoints are made after steps 4, 8 and 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """How the undisturbed run ended, and the one with a rank that was killed."""
    folder = tmp_path_factory.mktemp("restart")
    folders = folder / "undisturbed", folder / "killed"
    for each in folders:
        each.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(folder), str(KILL_AT), *SPECS],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((each / "end.json").read_text()) for each in folders]


def test_the_run_was_killed_and_resumed_from_its_last_checkpoint(runs):
    undisturbed, killed = runs
    assert (undisturbed["incarnation"], undisturbed["first"]) == (0, 0)
    assert (killed["incarnation"], killed["first"]) == (1, 8)


@pytest.mark.parametrize("spec", SPECS)
def test_the_end_is_that_of_an_undisturbed_run(runs, spec):
    undisturbed, killed = ([digests[spec] for digests in run["digests"]] for run in runs)
    assert undisturbed[0] == undisturbed[1], "the replicas differ"
    assert killed == undisturbed
