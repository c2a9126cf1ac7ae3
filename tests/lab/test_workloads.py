"""Workloads: the same for every method, fair to every worker, and they learn."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tersegrad.lab import datasets, models, workloads
from tersegrad.lab.datasets import Images, Text
from tersegrad.lab.workloads import WORKLOADS, Classify, Streams, Windows, find

DATA = Path(__file__).parents[2] / "data"  # put or link datasets here to have them tested
SOURCES = {
    datasets.fashion: datasets.FASHION,
    datasets.cifar10: datasets.CIFAR10,
    datasets.penn_treebank: datasets.PTB,
    datasets.shakespeare: datasets.SHAKESPEARE,
}
SMALL = [name for name, workload in WORKLOADS.items() if workload.parameters < 10**7]

# data whose samples can be told apart; image i has the value i everywhere, word i of a text is i
PICTURES = torch.arange(250, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
NUMBERED = Images(PICTURES, torch.arange(250), PICTURES, torch.arange(250))
COUNTING = Text(torch.arange(1000), torch.arange(1000), 1000)
TASKS = [(Classify((0.0,) * 3, (1.0,) * 3), NUMBERED), (Streams(7), COUNTING), (Windows(7), COUNTING)]


def workload(task, **changes):
    return replace(find("digits"), task=task, batch=5, **changes)


def batches(task, data, rank=0, size=1, epoch=0, seed=0):
    return list(workload(task).batches(data, epoch, rank, size, seed))


def train(load, data, epochs, seed=0):
    """The loop of the module's docstring, alone."""
    model = load.model(seed)
    optimizer = load.optimizer(model)
    schedule = load.schedule(optimizer, epochs * load.steps(data, 1))
    for epoch in range(epochs):
        state = None
        for batch in load.batches(data, epoch, 0, 1, seed):
            optimizer.zero_grad()
            loss, state = load.loss(model, batch, state)
            loss.backward()
            load.clip(model)
            optimizer.step()
            schedule.step()
    return model


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameter_count(name):
    with torch.device("meta"):
        model = find(name).build()
    assert sum(p.numel() for p in model.parameters()) == find(name).parameters


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_gives_the_same_weights_and_leaves_the_generator_alone(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = find(name).model(5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = find(name).model(5).state_dict(), find(name).model(6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("task", "data"), TASKS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_workers_have_equally_many_batches_and_no_sample_in_common(task, data, size):
    shards = [batches(task, data, rank, size) for rank in range(size)]
    assert {len(shard) for shard in shards} == {workload(task).steps(data, size)}
    assert len({batch.x.shape for shard in shards for batch in shard}) == 1
    seen = torch.cat([batch.y.flatten() for shard in shards for batch in shard])
    assert len(seen.unique()) == len(seen)
    total = len(data.train if isinstance(data, Text) else data.train_y)
    assert len(seen) > 0.75 * total


@pytest.mark.parametrize(("task", "data"), TASKS)
def test_batches_repeat_and_use_no_global_randomness(task, data):
    task = replace(task, augment=True) if isinstance(task, Classify) else task
    before = torch.get_rng_state()
    first = batches(task, data, 1, 2, epoch=3, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    for a, b in zip(first, batches(task, data, 1, 2, epoch=3, seed=4), strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert a.seed == b.seed
    assert len({batch.seed for batch in first}) == len(first)


@pytest.mark.parametrize(("task", "data"), [TASKS[0], TASKS[2]])
def test_every_epoch_and_seed_is_shuffled_anew(task, data):
    orders = [[b.y.tolist() for b in batches(task, data, epoch=e, seed=s)] for e, s in [(0, 0), (1, 0), (0, 1)]]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_images_keep_their_labels_and_are_normalised():
    for batch in batches(Classify((10.0,) * 3, (2.0,) * 3), NUMBERED):
        assert torch.equal(batch.x[:, 0, 0, 0] * 2 + 10, batch.y.float())
        assert batch.x.dtype == torch.float32


@pytest.mark.parametrize("task", [Streams(7), Windows(7)])
def test_the_answer_is_the_next_token(task):
    for batch in batches(task, COUNTING, 1, 3):
        assert batch.x.shape == (5, 7)
        assert torch.equal(batch.y, batch.x + 1)
        assert torch.equal(batch.x, batch.x[:, :1] + torch.arange(7))


def test_streams_go_on_where_they_stopped():
    text = torch.cat([batch.x for batch in batches(Streams(7), COUNTING, 1, 3)], 1)
    assert torch.equal(text, text[:, :1] + torch.arange(text.shape[1]))


def test_shift_and_mirror_against_a_loop():
    x = torch.randint(1, 255, (40, 3, 6, 6), dtype=torch.uint8)
    y = workloads.shift_and_mirror(x, 2, torch.Generator().manual_seed(0))
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, wanted in zip(padded, y, strict=True):
        crops = {(r, c): image[:, r : r + 6, c : c + 6] for r in range(5) for c in range(5)}
        found = [
            (key, m) for key, crop in crops.items() for m in (0, 1) if torch.equal(crop.flip(2) if m else crop, wanted)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 20


def test_the_learning_rate_rises_and_falls():
    load = replace(find("digits"), learning_rate=1.0, warmup=0.1)
    optimizer = load.optimizer(nn.Linear(1, 1))
    schedule = load.schedule(optimizer, 100)
    rates = []
    for _ in range(120):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] < 1e-3
    assert set(rates[100:]) == {0.0}


def test_clipping_shortens_the_gradient():
    model = nn.Linear(3, 1)
    model(torch.full((1, 3), 100.0)).sum().backward()
    find("digits").clip(model)
    assert float(model.weight.grad.norm()) > 100
    find("ptb-lstm").clip(model)
    assert float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()) == pytest.approx(0.25)


def test_dropout_comes_from_the_batch_and_not_from_the_global_generator():
    load = workload(Streams(7), build=lambda: models.WordLSTM(1000, 16, layers=2, dropout=0.5, spread=0.1))
    model = load.model(0)
    first, second, *_ = batches(Streams(7), COUNTING)
    before = torch.get_rng_state()
    losses = [load.loss(model, batch)[0].item() for batch in (first, first, replace(first, seed=second.seed))]
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1] != losses[2]


def test_the_state_is_carried_on_without_its_history():
    load = workload(Streams(7), build=lambda: models.WordLSTM(1000, 16, layers=2, dropout=0.0, spread=0.1))
    model = load.model(0)
    first, second, *_ = batches(Streams(7), COUNTING)
    _, state = load.loss(model, first)
    assert [part.requires_grad for part in state] == [False, False]
    with torch.no_grad():
        whole, _ = model(torch.cat([first.x, second.x], 1))
        wanted = nn.functional.cross_entropy(whole[:, 7:].flatten(0, 1), second.y.flatten())
    assert load.loss(model, second, state)[0].item() == pytest.approx(float(wanted), rel=1e-5)


class Constant(nn.Module):
    """Always the same scores."""

    def __init__(self, scores, shape):
        super().__init__()
        self.scores, self.shape = torch.tensor(scores), shape

    def forward(self, x, state=None):
        assert not self.training
        scores = self.scores.expand(*x.shape[: self.shape], -1)
        return scores if self.shape == 1 else (scores, None)


def test_accuracy_of_a_constant_answer():
    model = Constant([0.0] * 249 + [1.0], shape=1)
    assert workload(TASKS[0][0]).evaluate(model, NUMBERED) == 1 / 250
    assert model.training


@pytest.mark.parametrize("task", [Streams(7), Windows(7)])
@pytest.mark.parametrize(("right", "wanted"), [(0.0, 1000.0), (-1e4, math.inf)])
def test_perplexity_of_a_constant_answer(task, right, wanted):
    """Of a uniform guess it is the size of the vocabulary; that of a diverged network is infinite, not an error."""
    scores = [right] * 999 + [0.0]
    assert workload(task).evaluate(Constant(scores, shape=2), COUNTING) == pytest.approx(wanted, rel=1e-4)


def test_under_ddp():
    """The state passes through; evaluation wants the bare model."""
    load = workload(Streams(7), build=lambda: models.WordLSTM(1000, 16, layers=2, dropout=0.5, spread=0.1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(load.model(0))
        state = None
        for batch in batches(Streams(7), COUNTING)[:3]:
            loss, state = load.loss(model, batch, state)
            loss.backward()
        with pytest.raises(TypeError, match=r"Write workload.evaluate\(model.module, data\)"):
            load.evaluate(model, COUNTING)
    finally:
        dist.destroy_process_group()


def test_digits_learns():
    load = find("digits")
    data = load.load()
    assert load.evaluate(train(load, data, epochs=4), data) > 0.9


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match=r"no workload 'mnist'. Write one of: digits, fashion"):
        find("mnist")
    with pytest.raises(ValueError, match=r"rank 2 of 2 workers: ranks are 0 to 1"):
        workload(TASKS[0][0]).batches(NUMBERED, 0, 2, 2, 0)
    with pytest.raises(ValueError, match=r"digits on 99 workers: .* Use fewer workers"):
        workload(TASKS[0][0]).steps(NUMBERED, 99)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "digits"])
def test_a_fresh_network_guesses_on_real_data(name):
    load = replace(find(name), batch=2)
    source = SOURCES[load.read]
    if datasets.missing(source, DATA):
        pytest.skip(f"{source.title} is not in {DATA.name}/ of the project")
    data = load.load(DATA)
    loss, _ = load.loss(load.model(0), next(load.batches(data, 0, 1, 4, 0)))
    answers = data.vocabulary if isinstance(data, Text) else 10
    assert float(loss.detach()) == pytest.approx(math.log(answers), rel=0.5)
