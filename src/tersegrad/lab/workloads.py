"""Workloads: a dataset, a model, and everything else that must not differ between two methods.

A training loop is written once, for all of them::

    data = workload.load(folder)
    model = DistributedDataParallel(workload.model(seed))
    optimizer = workload.optimizer(model)
    schedule = workload.schedule(optimizer, epochs * workload.steps(data, size))
    for epoch in range(epochs):
        state = None
        for batch in workload.batches(data, epoch, rank, size, seed):
            optimizer.zero_grad()
            loss, state = workload.loss(model, batch, state)
            loss.backward()
            workload.clip(model)
            optimizer.step()
            schedule.step()
        score = workload.evaluate(model.module, data)  # on one worker

All randomness comes from (seed, epoch, rank, step); the global generator is left as it was found. Every worker has the
same number of batches of the same size, and no two workers have the same sample. ``state`` is the hidden state of a
recurrent model between batches (detached: gradients stop there); it is None for other models and at the start of an
epoch. The batch size is per worker; learning rates were chosen for four workers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tersegrad.core import mix_seed
from tersegrad.lab import datasets, models
from tersegrad.lab.datasets import Images, Text
from tersegrad.lab.models import Recurrent

D = TypeVar("D", Images, Text)


@dataclass(frozen=True)
class Batch:
    """One worker's share of the data in one step."""

    x: Tensor  # normalised images, or tokens (texts, time)
    y: Tensor  # classes, or the tokens that come next
    seed: int  # of the dropout in this step


class Task(ABC, Generic[D]):
    """How a kind of data is split into batches, trained on and evaluated."""

    metric: ClassVar[str]  # "accuracy" (higher is better) or "perplexity" (lower is better)

    @abstractmethod
    def steps(self, data: D, batch: int, size: int) -> int:
        """Batches of one epoch, on each of ``size`` workers."""

    @abstractmethod
    def batches(self, data: D, batch: int, epoch: int, rank: int, size: int, seed: int) -> Iterator[Batch]:
        """One worker's batches of one epoch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, state: Recurrent) -> tuple[Tensor, Recurrent]:
        """Mean loss, and the hidden state for the next batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, data: D) -> float:
        """The metric on the test set."""


@dataclass(frozen=True)
class Classify(Task[Images]):
    """Images in classes, shuffled in each epoch."""

    metric: ClassVar[str] = "accuracy"
    mean: tuple[float, ...]  # per channel, in the units of the bytes
    std: tuple[float, ...]
    augment: bool = False  # random shift by up to 4 pixels and random mirroring

    def steps(self, data: Images, batch: int, size: int) -> int:
        """Images that do not fill a batch on every worker are left out of this epoch."""
        return len(data.train_y) // (batch * size)

    def batches(self, data: Images, batch: int, epoch: int, rank: int, size: int, seed: int) -> Iterator[Batch]:
        """Every size-th image of one shuffle that all workers share."""
        mine = _shard(len(data.train_y), self.steps(data, batch, size) * batch, epoch, rank, size, seed)
        chance = _generator(seed, epoch, rank)
        for step, chosen in enumerate(mine.split(batch)):
            x = data.train_x[chosen]
            if self.augment:
                x = shift_and_mirror(x, 4, chance)
            yield Batch(self._normal(x), data.train_y[chosen], mix_seed(seed, epoch, rank, step))

    def loss(self, model: nn.Module, batch: Batch, state: Recurrent) -> tuple[Tensor, Recurrent]:
        """Cross entropy."""
        return functional.cross_entropy(model(batch.x), batch.y), None

    def evaluate(self, model: nn.Module, data: Images) -> float:
        """Share of the test images that are classified correctly."""
        pairs = zip(data.test_x.split(500), data.test_y.split(500), strict=True)
        right = sum(int((model(self._normal(x)).argmax(1) == y).sum()) for x, y in pairs)
        return right / len(data.test_y)

    def _normal(self, x: Tensor) -> Tensor:
        """Zero mean, unit deviation; channels last in memory, with which the CPU's convolutions are faster."""
        count, channels, height, width = x.shape
        out = torch.empty(count, height, width, channels).permute(0, 3, 1, 2)
        torch.sub(x, torch.tensor(self.mean).view(-1, 1, 1), out=out)
        return out.div_(torch.tensor(self.std).view(-1, 1, 1))


@dataclass(frozen=True)
class Streams(Task[Text]):
    """A text for a recurrent model: size x batch contiguous streams, read in parallel; the state outlives a step.

    As published, nothing is shuffled: a seed changes the weights and the dropout only.
    """

    metric: ClassVar[str] = "perplexity"
    length: int  # tokens per step and stream; gradients do not reach further back

    def steps(self, data: Text, batch: int, size: int) -> int:
        """The end of each stream that does not fill a step is left out."""
        return (len(data.train) - 1) // (batch * size) // self.length

    def batches(self, data: Text, batch: int, epoch: int, rank: int, size: int, seed: int) -> Iterator[Batch]:
        """The worker's own streams, a piece of each at a time."""
        x, y = _streams(data.train, batch * size)
        mine = slice(rank * batch, (rank + 1) * batch)
        for step in range(self.steps(data, batch, size)):
            now = slice(step * self.length, (step + 1) * self.length)
            yield Batch(x[mine, now], y[mine, now], mix_seed(seed, epoch, rank, step))

    def loss(self, model: nn.Module, batch: Batch, state: Recurrent) -> tuple[Tensor, Recurrent]:
        """Mean over the tokens of -log p(next token)."""
        return _next_token_loss(model, batch.x, batch.y, state)

    def evaluate(self, model: nn.Module, data: Text) -> float:
        """Perplexity over ten streams; the state outlives a step."""
        x, y = _streams(data.test, 10)
        return _perplexity(model, x.split(self.length, 1), y.split(self.length, 1))


@dataclass(frozen=True)
class Windows(Task[Text]):
    """A text for a model without hidden state: pieces of equal length, split and shuffled anew in each epoch."""

    metric: ClassVar[str] = "perplexity"
    length: int  # tokens in a piece

    def steps(self, data: Text, batch: int, size: int) -> int:
        """Pieces that do not fill a batch on every worker are left out of this epoch."""
        return self._pieces(data) // (batch * size)

    def batches(self, data: Text, batch: int, epoch: int, rank: int, size: int, seed: int) -> Iterator[Batch]:
        """Every size-th piece of one shuffle that all workers share."""
        start = int(torch.randint(self.length, (), generator=_generator(seed, epoch, 0)))
        mine = _shard(self._pieces(data), self.steps(data, batch, size) * batch, epoch, rank, size, seed)
        within = torch.arange(self.length)
        for step, chosen in enumerate(mine.split(batch)):
            at = start + self.length * chosen[:, None] + within
            yield Batch(data.train[at], data.train[at + 1], mix_seed(seed, epoch, rank, step))

    def loss(self, model: nn.Module, batch: Batch, state: Recurrent) -> tuple[Tensor, Recurrent]:
        """Mean over the tokens of -log p(next token)."""
        return _next_token_loss(model, batch.x, batch.y, state)

    def evaluate(self, model: nn.Module, data: Text) -> float:
        """Perplexity over the test text, piece by piece."""
        pieces = (len(data.test) - 1) // self.length
        x, y = (data.test[i : i + pieces * self.length].view(pieces, self.length) for i in (0, 1))
        return _perplexity(model, x.split(64), y.split(64))

    def _pieces(self, data: Text) -> int:
        """How many pieces there are at least, wherever the first one starts."""
        return (len(data.train) - self.length) // self.length


@dataclass(frozen=True)
class Workload:
    """One experiment, complete except for the method and the link between the workers."""

    name: str
    task: Task[Any]
    read: Callable[[Path | None], Images | Text]
    build: Callable[[], nn.Module]
    parameters: int
    batch: int  # per worker
    epochs: int  # by default; takes minutes with the small workloads and hours with the large
    learning_rate: float  # the highest of the run: reached after the warm-up, then falls to zero along a cosine
    warmup: float = 0.05  # share of the run in which the learning rate rises
    momentum: float = 0.9
    weight_decay: float = 0.0
    max_norm: float | None = None  # the averaged gradient is clipped to this norm
    adam: bool = False  # AdamW instead of SGD (with Nesterov's momentum, if any)

    @property
    def metric(self) -> str:
        """What ``evaluate`` returns: "accuracy" (higher is better) or "perplexity" (lower is better)."""
        return self.task.metric

    def load(self, data: Path | None = None) -> Images | Text:
        """The data, from ``--data`` or fetched; ``MissingData`` says what to do otherwise."""
        return self.read(data)

    def model(self, seed: int) -> nn.Module:
        """A new model; the same seed gives the same weights in every process."""
        with seeded(mix_seed(seed)):
            return self.build()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Fixed, so that two runs differ in the method only."""
        if self.adam:
            return AdamW(model.parameters(), self.learning_rate, betas=(0.9, 0.99), weight_decay=self.weight_decay)
        return SGD(
            model.parameters(),
            self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Linear warm-up, then half a cosine to zero; step it after each step of the optimizer."""
        rise = max(1, round(self.warmup * total_steps))
        fall = max(1, total_steps - rise)

        def factor(step: int) -> float:
            if step < rise:
                return (step + 1) / rise
            return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - rise) / fall))

        return LambdaLR(optimizer, factor)

    def steps(self, data: Images | Text, size: int) -> int:
        """Batches of one epoch on each of ``size`` workers."""
        steps = self.task.steps(data, self.batch, size)
        if steps == 0:
            raise ValueError(
                f"{self.name} on {size} workers: its data do not fill one batch of {self.batch} on each of them. "
                "Use fewer workers, or a smaller batch: dataclasses.replace(workload, batch=...)."
            )
        return steps

    def batches(self, data: Images | Text, epoch: int, rank: int, size: int, seed: int) -> Iterator[Batch]:
        """This worker's batches of one epoch."""
        if not 0 <= rank < size:
            raise ValueError(f"batches for rank {rank} of {size} workers: ranks are 0 to {size - 1}.")
        self.steps(data, size)
        return self.task.batches(data, self.batch, epoch, rank, size, seed)

    def loss(self, model: nn.Module, batch: Batch, state: Recurrent = None) -> tuple[Tensor, Recurrent]:
        """The loss to call ``backward`` on, and the state for the next batch; dropout comes from the batch's seed."""
        with seeded(batch.seed):
            return self.task.loss(model, batch, state)

    def clip(self, model: nn.Module) -> None:
        """Clips the averaged gradient to ``max_norm``, if there is one; call it between ``backward`` and ``step``."""
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)

    def evaluate(self, model: nn.Module, data: Images | Text) -> float:
        """The metric on the test set, in evaluation mode."""
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "evaluate was given a DistributedDataParallel model: its forward may start a collective "
                "that the other workers do not take part in. Write workload.evaluate(model.module, data)."
            )
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.task.evaluate(model, data)
        finally:
            model.train(training)


def find(name: str) -> Workload:
    """The workload of that name.

    >>> find("digits").parameters
    301066
    """
    if name not in WORKLOADS:
        raise ValueError(f"There is no workload {name!r}. Write one of: {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global CPU generator inside the block, and restores it afterwards."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def shift_and_mirror(x: Tensor, most: int, chance: torch.Generator) -> Tensor:
    """Each image shifted by up to ``most`` pixels (padded with black) and mirrored half of the time, all at once."""
    count, _, height, width = x.shape
    moves = torch.randint(2 * most + 1, (2, count, 1), generator=chance)
    mirrored = torch.randint(2, (count, 1), generator=chance, dtype=torch.bool)
    columns = torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width)) + moves[0]
    rows = torch.arange(height) + moves[1]
    padded = functional.pad(x, (most, most, most, most)).permute(0, 2, 3, 1)
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _generator(*parts: int) -> torch.Generator:
    """A new generator, seeded with these numbers."""
    return torch.Generator().manual_seed(mix_seed(*parts))


def _shard(count: int, each: int, epoch: int, rank: int, size: int, seed: int) -> Tensor:
    """One worker's ``each`` of ``count`` samples, in an order that all workers agree on."""
    order = torch.randperm(count, generator=_generator(seed, epoch))
    return order[rank : each * size : size]


def _streams(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (streams, time): the tokens, and those that come next."""
    length = (len(tokens) - 1) // count
    x, y = (tokens[i : i + count * length].view(count, length) for i in (0, 1))
    return x, y


def _next_token_loss(model: nn.Module, x: Tensor, y: Tensor, state: Recurrent) -> tuple[Tensor, Recurrent]:
    """Mean of -log p(next token), and the detached state."""
    scores, state = model(x, state)
    loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
    return loss, None if state is None else (state[0].detach(), state[1].detach())


def _perplexity(model: nn.Module, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...]) -> float:
    """exp of the mean loss over all tokens of successive pieces."""
    total, count = 0.0, 0
    state: Recurrent = None
    for x, y in zip(xs, ys, strict=True):
        loss, state = _next_token_loss(model, x, y, state)
        total += y.numel() * float(loss)
        count += y.numel()
    return float(torch.tensor(total / count, dtype=torch.float64).exp())  # infinite, not an error, after a divergence


_CIFAR = Classify(mean=(125.3, 123.0, 113.9), std=(63.0, 62.1, 66.7), augment=True)

WORKLOADS = {
    workload.name: workload
    for workload in [
        Workload(
            *("digits", Classify((0.0,), (16.0,)), datasets.digits, models.mlp),
            parameters=301_066,
            batch=32,
            epochs=12,
            learning_rate=0.2,
        ),
        Workload(
            *("fashion", Classify((72.9,), (90.0,)), datasets.fashion, models.cnn),
            parameters=421_642,
            batch=32,
            epochs=3,
            learning_rate=0.05,
        ),
        Workload(
            *("cifar-resnet20", _CIFAR, datasets.cifar10, models.resnet20),
            parameters=269_722,
            batch=32,
            epochs=10,
            learning_rate=0.1,
            weight_decay=5e-4,
        ),
        Workload(
            *("cifar-vgg", _CIFAR, datasets.cifar10, models.vgg16),
            parameters=14_724_042,
            batch=32,
            epochs=10,
            learning_rate=0.05,
            weight_decay=5e-4,
        ),
        Workload(
            *("cifar-vgg-slim", _CIFAR, datasets.cifar10, partial(models.vgg16, slim=4)),
            parameters=923_130,
            batch=32,
            epochs=5,
            learning_rate=0.1,
            weight_decay=5e-4,
        ),
        Workload(
            *("ptb-lstm", Streams(length=35), datasets.penn_treebank),
            build=partial(models.WordLSTM, 10_000, 1500, layers=2, dropout=0.65, spread=0.04),
            parameters=66_034_000,
            batch=5,
            epochs=30,
            learning_rate=20.0,
            momentum=0.0,
            max_norm=0.25,
        ),
        Workload(
            *("ptb-lstm-small", Streams(length=35), datasets.penn_treebank),
            build=partial(models.WordLSTM, 10_000, 200, layers=2, dropout=0.0, spread=0.1),
            parameters=4_653_200,
            batch=5,
            epochs=4,
            learning_rate=20.0,
            momentum=0.0,
            max_norm=0.25,
        ),
        Workload(
            *("shakespeare-gpt", Windows(length=64), datasets.shakespeare),
            build=partial(models.CharGPT, 65, 64, width=160, layers=4, heads=5),
            parameters=1_268_480,
            batch=16,
            epochs=5,
            learning_rate=3e-3,
            max_norm=1.0,
            adam=True,
        ),
    ]
}
