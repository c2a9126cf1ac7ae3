"""Run by torchrun in test_restart.py: a training with checkpoints, undisturbed and then with a rank that is killed.

    torchrun ... restart_script.py FOLDER KILL_AT SPEC...

One small model for each spec. Every rank saves model, optimizer and the handle's state every few steps. The first
incarnation trains to the end, in FOLDER/undisturbed, and then again in FOLDER/killed, where rank 1 kills itself before
step KILL_AT; the second goes on from there. At the end of each training rank 0 writes the digests of all weights.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad

STEPS, EVERY = 14, 4


class Trained:
    """One model with all that a checkpoint holds."""

    def __init__(self, spec: str):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(30, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 5))
        self.model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = tersegrad.attach(self.model, spec, timeout=30, optimizer=self.optimizer)

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(16, 30, generator=generator), torch.randint(0, 5, (16,), generator=generator)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "tersegrad": self.handle.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.handle.load_state_dict(saved["tersegrad"])

    def digest(self) -> str:
        raw = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(raw).hexdigest()


def file_of(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}.rank{rank}.pt"


def save(folder: Path, step: int, trained: dict[str, Trained]) -> None:
    """A file is there as a whole or not at all."""
    file = file_of(folder, step, dist.get_rank())
    unfinished = file.with_suffix(".unfinished")
    torch.save({spec: one.state_dict() for spec, one in trained.items()}, unfinished)
    os.replace(unfinished, file)


def last_complete(folder: Path) -> int:
    """The last step that all ranks have saved; 0 if there is none."""
    ranks = range(dist.get_world_size())
    return max((s for s in range(STEPS) if all(file_of(folder, s, r).exists() for r in ranks)), default=0)


def init(incarnation: int) -> None:
    """With a store of its own for every incarnation.

    torchrun 2.13 keeps the store over a restart, and gloo's new ranks then read the addresses of the dead ones now and
    then: init_process_group("gloo") alone fails or hangs in the second incarnation, with no tersegrad about.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"incarnation {incarnation}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def train(folder: Path, incarnation: int, kill_at: int | None, specs: list[str]) -> None:
    first = last_complete(folder)
    trained = {spec: Trained(spec) for spec in specs}
    if first:
        saved = torch.load(file_of(folder, first, dist.get_rank()), weights_only=True)
        for spec, one in trained.items():
            one.load_state_dict(saved[spec])
    for step in range(first, STEPS):
        if step == kill_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for one in trained.values():
            one.step(step)
        if (step + 1) % EVERY == 0:
            save(folder, step + 1, trained)
    digests = {spec: one.digest() for spec, one in trained.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    if dist.get_rank() == 0:
        told = {"digests": everyone, "incarnation": incarnation, "first": first}
        (folder / "end.json").write_text(json.dumps(told))
    for one in trained.values():
        one.handle.close()


def main(folder: Path, kill_at: int, specs: list[str]) -> None:
    torch.set_num_threads(1)
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    init(incarnation)
    if incarnation == 0:
        train(folder / "undisturbed", incarnation, None, specs)
    train(folder / "killed", incarnation, kill_at if incarnation == 0 else None, specs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
