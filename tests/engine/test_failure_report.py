"""A rank raises, dies, hangs or strays: every other ends by itself, soon, and says which rank it was."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tersegrad
from support.fault_cases import BUSY, GRACE, LIMIT, SIZE, TIMEOUT
from tersegrad.specs import PRESETS

SCRIPT = Path(__file__).parents[1] / "support" / "fault_cases.py"
METHODS = {
    "none": "none",
    "topk": "topk",
    "ring": "Ring(BF16())",
    "ring of sparse": "ErrorFeedback(Ring(TopK(0.1)))",
    "two shot": "TwoShot(QSGD(bits=4))",
    "powersgd": "powersgd",
} | {name: name for name in PRESETS if name not in ("none", "topk", "powersgd")}


@dataclass
class Outcome:
    """How four ranks ended."""

    codes: list[int]
    texts: list[str]
    seconds: float
    victim: int

    def __str__(self) -> str:
        return "\n".join(f"--- rank {r}: {c}\n{t}" for r, (c, t) in enumerate(zip(self.codes, self.texts, strict=True)))

    def others(self) -> list[tuple[int, int, str]]:
        """(rank, exit code, words) of all but the victim."""
        everyone = zip(range(SIZE), self.codes, self.texts, strict=True)
        return [outcome for outcome in everyone if outcome[0] != self.victim]


@pytest.fixture(scope="module")
def server():
    alone = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # it forks, so it may have no threads
    with subprocess.Popen(
        [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone
    ) as process:
        yield process
        process.stdin.close()
        process.wait(LIMIT)


@pytest.fixture
def run(server, tmp_path):
    def run(spec: str, fault: str, victim: int = 2, init_method: str | None = None) -> Outcome:
        case = {"spec": spec, "fault": fault, "victim": victim, "folder": str(tmp_path)}
        print(
            json.dumps(case | {"init_method": init_method or f"file://{tmp_path}/store"}), file=server.stdin, flush=True
        )
        answer = json.loads(server.stdout.readline())
        texts = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(SIZE)]
        return Outcome(answer["codes"], texts, answer["seconds"], victim)

    return run


def assert_all_say(outcome: Outcome, words: str) -> None:
    for rank, code, text in outcome.others():
        assert code is not None, f"rank {rank} did not end\n{outcome}"
        assert code > 0, f"rank {rank} ended with {code}\n{outcome}"
        assert words in text, f"rank {rank} does not say {words!r}\n{outcome}"
        for took in re.findall(r"raised after (.*) s", text):
            assert float(took) < TIMEOUT + GRACE + 1 + BUSY, f"rank {rank} took {took} s\n{outcome}"
    assert outcome.seconds < LIMIT, "all have ended"


def assert_blamed_alone(outcome: Outcome) -> None:
    for rank, _, text in outcome.others():
        others = set(range(SIZE)) - {rank, outcome.victim}
        assert not any(f"rank {other} does" in text for other in others), f"rank {rank} blames another\n{outcome}"
        assert not any(f"rank {other} failed" in text for other in others), f"rank {rank} blames another\n{outcome}"
        assert "ranks 0" not in text, f"rank {rank} blames several\n{outcome}"
        assert "ranks 1" not in text, f"rank {rank} blames several\n{outcome}"


SILENT = "rank 2 does not answer: ended, killed, stopped"
HANGS = "rank 2 does answer, but did not come to step 3 in time"
FAILED = "rank 2 failed: ArithmeticError: the codec divided by zero"


SOON = [
    ("topk", "killed", SILENT),
    ("none", "hangs on a lock", HANGS),
    ("none", "killed", SILENT),
    ("powersgd", "raises in the worker", FAILED),
]
LATER = [
    *((method, "killed", SILENT) for method in METHODS if method not in ("topk", "none")),
    *((method, "raises in the worker", FAILED) for method in METHODS if method != "powersgd"),
    *((method, "hangs on a lock", HANGS) for method in METHODS if method != "none"),
    *((method, "stopped", SILENT) for method in METHODS),
    ("topk", "raises in forward", SILENT),
    ("topk", "raises in backward", SILENT),
    ("powersgd", "raises, not closed", SILENT),
]


@pytest.mark.parametrize(
    ("method", "fault", "says"), [*SOON, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)]
)
def test_the_others_say_which_rank_it_was(run, method, fault, says):
    outcome = run(METHODS[method], fault)
    assert_all_say(outcome, says)
    assert all("raised after" in text for _, _, text in outcome.others()), str(outcome)
    assert_blamed_alone(outcome)
    if "raises" in fault:
        assert outcome.codes[outcome.victim] > 0, str(outcome)
        assert "Error: " in outcome.texts[outcome.victim]
    if "not closed" not in fault:
        assert all("threads left: []" in text for _, _, text in outcome.others()), str(outcome)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("another spec", "  rank 2: tersegrad {}, AllReduce(BF16())"),
        pytest.param("another version", "  rank 2: tersegrad 0.0.1,", marks=pytest.mark.slow),
    ],
)
def test_a_stray_rank_is_named_before_the_first_step(run, fault, line):
    assert_all_say(run("topk", fault), line.format(tersegrad.__version__))


@pytest.mark.slow
def test_a_rank_that_never_attaches(run):
    outcome = run("topk", "never attaches")
    assert_all_say(outcome, "rank 2 does not answer")
    assert_blamed_alone(outcome)


@pytest.fixture
def tcp():
    """A rendezvous whose store lives in rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"tcp://127.0.0.1:{port}"


GONE = "rank 0, which holds it (unless torchrun does), has ended, was killed, or is stopped"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("killed", GONE),
        pytest.param(
            "raises in the worker",
            "rank 0 failed: ArithmeticError: the codec divided by zero",
            marks=pytest.mark.slow,
        ),
        pytest.param("stopped", GONE, marks=pytest.mark.slow),
        pytest.param(
            "hangs on a lock", "rank 0 does answer, but did not come to step 3 in time", marks=pytest.mark.slow
        ),
    ],
)
def test_the_rank_that_holds_the_store(run, tcp, fault, says):
    assert_all_say(run("topk", fault, victim=0, init_method=tcp), says)
