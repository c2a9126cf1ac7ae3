"""Simulation: to the bit what real gloo processes compute, resumable, and clear about bad input."""

import copy
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import tersegrad
from support import simulate_cases as cases
from tersegrad.comm.torch import NetworkError
from tersegrad.comm.virtual import ring_sum
from tersegrad.hosts.training import make
from tersegrad.specs import PRESETS

STEPS = 50
AFTER_WARMUP = (  # what 50 steps of a preset do not reach
    "GradiVeQ(warmup=3, learn=4, compress=8, worst=None, tiny=0)",
    "GradiVeQ(warmup=3, learn=4, compress=8, order='filter', coefficients=Ring(Identity()), worst=None, linear=True)",
    "MomentumCorrection(Warmup(AllGather(TopK(0.01)), steps=20), momentum=0.7, clip=1.0)",
)


def _differing(specs, results, workers, **how):
    """The specs whose simulation has other weights, module buffers or bytes than the real processes."""
    wrong = []
    for place, spec in enumerate(specs):
        state, _, decisions = results[0][place]
        simulation = cases.virtual(spec, workers, STEPS, decisions=decisions or None, **how)
        mine = simulation.training.model.state_dict()
        sent = sum(rank[place][1] for rank in results[:workers]) / workers
        simulation.close()
        if any(not torch.equal(state[key], mine[key]) for key in state) or simulation.metrics()["bytes_sent"] != sent:
            wrong.append(spec)
    return wrong


SEVERAL_BUCKETS = ("none", "auto", "topk4", "vgc", "ahead", "powersgd", AFTER_WARMUP[0])


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_preset_is_to_the_bit_what_processes_compute(gloo4, workers, part):
    specs, how = [*PRESETS, *AFTER_WARMUP][part::2], {"wide": 50}
    assert _differing(specs, gloo4.run(cases.real, specs, workers, STEPS, **how), workers, **how) == []


def test_several_buckets_too(gloo4):
    specs = list(SEVERAL_BUCKETS)
    assert _differing(specs, gloo4.run(cases.real, specs, 4, STEPS), 4) == []


def test_all_gradients_in_one_vector_too(gloo4):
    specs, how = ["sidco-paper"], {"bucket_cap_mb": 100}
    assert _differing(specs, gloo4.run(cases.real, specs, 2, STEPS, **how), 2, **how) == []
    several, one = (cases.virtual("sidco-paper", 2, 2, bucket_cap_mb=cap) for cap in (None, 100))
    assert (several.metrics()["buckets"], one.metrics()["buckets"]) == (2, 1)


def test_accumulation_and_clipping_too(gloo4):
    specs = ["topk4", "vgc", "ahead", "powersgd"]
    how = {"accumulate": 3, "max_norm": 0.5, "wide": 50}
    assert _differing(specs, gloo4.run(cases.real, specs, 2, STEPS, **how), 2, **how) == []


def _sum(parts):
    torch.distributed.all_reduce(mine := parts[torch.distributed.get_rank()].clone())
    return mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_the_order_of_gloos_ring(gloo4, dtype):
    for numel in (1, 2, 7, 8, 9, 1001, 421_642, 3_000_001):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(4)]
        assert torch.equal(gloo4.run(_sum, parts)[0], ring_sum(parts)), numel


@pytest.mark.parametrize("spec", ["sidco", "vgc", "ahead", "dgc", "powersgd", "int8", AFTER_WARMUP[0]])
def test_a_loaded_state_goes_on_to_the_bit(spec, tmp_path):
    whole = cases.virtual(spec, 3, 47)
    done = 0
    for until in (1, 2, 29, 47):  # DDP makes new buckets after its first step
        second = cases.virtual(spec, 3, 0)
        if done:
            second.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
        for _ in range(until - done):
            second.step()
        torch.save(second.state_dict(), tmp_path / "state")
        second.close()
        done = until
    for key, value in whole.training.model.state_dict().items():
        assert torch.equal(value, second.training.model.state_dict()[key]), key
    assert whole.metrics()["bytes_sent"] == second.metrics()["bytes_sent"]
    assert whole.evaluate() == second.evaluate()


@pytest.mark.parametrize("spec", ["none", "topk4", "vgc", "ahead"])
def test_several_processes_compute_the_same(spec):
    """And a run may go on in another number of them."""
    one, several = (cases.virtual(spec, 4, 0, wide=50, processes=processes) for processes in (1, 3))
    assert [one.step(weigh=True) for _ in range(6)] == [several.step(weigh=True) for _ in range(6)]
    assert one.waiting == several.waiting
    for simulation, saved in ((one, several.state_dict()), (several, one.state_dict())):
        simulation.load_state_dict(copy.deepcopy(saved))
    assert [one.step() for _ in range(20)] == [several.step() for _ in range(20)]
    for key, value in one.training.model.state_dict().items():
        assert torch.equal(value, several.training.model.state_dict()[key]), key
    assert one.metrics()["bytes_sent"] == several.metrics()["bytes_sent"]
    one.close()
    several.close()


def test_what_fails_in_another_process():
    def loss(model, batch):
        calls.append(1)
        if len(calls) == 3 and os.getpid() != here:
            raise KeyError("a broken sample")
        return cases.loss(model, batch)

    calls, here = [], os.getpid()
    made = cases.training("none")
    made.loss = loss
    simulation = tersegrad.Simulation(made, "topk", 2, processes=2)
    simulation.step()
    simulation.step()
    with pytest.raises(KeyError, match="a broken sample"):
        simulation.step()
    simulation.close()
    simulation = tersegrad.Simulation(cases.training("none"), "topk", 4, processes=2)
    simulation.step()
    os.kill(simulation._processes[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"gradients of workers \[1, 3\] has ended"):
        simulation.step()
    simulation.close()


def test_processes_that_cannot_be_had():
    with pytest.raises(ValueError, match="a whole number from 1"):
        tersegrad.Simulation(cases.training("none"), "topk", 2, processes=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="cannot use torch's threads"):
            tersegrad.Simulation(cases.training("none"), "topk", 2, processes=2)
    finally:
        torch.set_num_threads(threads)


def test_every_worker_has_generators_and_statistics_of_its_own():
    drawn = []

    def loss(model, batch):
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
        return functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate()
    made = cases.training("none")
    made.loss = loss
    simulation = tersegrad.Simulation(made, "none", 2, broadcast_buffers=False)
    torch.set_rng_state(before[0])
    for _ in range(3):
        simulation.step()
    assert len(set(drawn)) == 6
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    own = [local.module_buffers for local in simulation._gradients_here.values()]
    assert not torch.equal(own[0][0], own[1][0])
    assert torch.equal(made.model.norm.running_mean, own[0][0])


def test_what_waits_is_weighed():
    simulation = cases.virtual("topk", 2, 5)
    simulation.step(weigh=True)
    assert 0.2 < simulation.waiting < 1.0
    dense = cases.virtual("none", 2, 5)
    dense.step(weigh=True)
    assert dense.waiting == 0.0


def test_auto_follows_a_log_past_its_choice_and_beyond_the_end(gloo4):
    spec = "Auto({'topk': AllGather(TopK(0.1))}, warmup=1, trial=3, window=5, change=1e9)"
    how = {"wide": 50}
    (state, _, decisions), *_ = gloo4.run(cases.real, [spec], 2, 70, **how)[0]
    simulation = cases.virtual(spec, 2, 70, decisions=decisions, **how)
    assert all(torch.equal(state[key], value) for key, value in simulation.training.model.state_dict().items())
    for _ in range(30):
        simulation.step()
    assert simulation.metrics()["decisions"][: len(decisions)] == decisions
    assert len(simulation.metrics()["decisions"]) > len(decisions)
    with pytest.raises(ValueError, match="has no measurement of bucket"):
        cases.virtual(spec, 2, 20, decisions=decisions[1:], **how)
    with pytest.raises(ValueError, match="decisions of a real run"):
        cases.virtual(spec, 2, 1)


# ---- bad input -----------------------------------------------------------------------------------


def _with(**changes):
    made = cases.training("none")
    for key, value in changes.items():
        setattr(made, key, value)
    return tersegrad.Simulation(made, "none", 2)


def test_bad_workers():
    for workers in (0, -1, 2.0):
        with pytest.raises(ValueError, match="how many workers"):
            tersegrad.Simulation(cases.training("none"), "none", workers)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda model, batch: 1.0, "gave a float"),
        (lambda model, batch: model(batch[0]), "a tensor of shape"),
        (lambda model, batch: model(batch[0]).sum().detach(), "backward"),
        (lambda model, batch: model.inputs(batch[0]).sum(), "got no gradient"),
    ],
)
def test_a_bad_loss(loss, text):
    simulation = _with(loss=loss)
    with pytest.raises((TypeError, ValueError), match=text):
        simulation.step()
    simulation.close()  # does not hang


def test_a_worker_that_fails_releases_the_others():
    def loss(model, batch):
        calls.append(1)
        if len(calls) == 6:
            raise KeyError("a broken sample")
        return cases.loss(model, batch)

    calls = []
    made = cases.training("none")
    made.loss = loss
    simulation = tersegrad.Simulation(made, "topk", 4)
    simulation.step()
    with pytest.raises(KeyError, match="a broken sample"):
        simulation.step()
    with pytest.raises(NetworkError, match="broken sample"):
        simulation.step()
    simulation.close()


def test_bad_batches():
    for batches, text in [
        (lambda worker, workers, epoch: 3, "gave a int"),
        (lambda worker, workers, epoch: [], "no batch at all"),
        (lambda worker, workers, epoch: cases.batches(worker, workers, epoch, 2 + worker), "the same number"),
    ]:
        made = cases.training("none")
        made.batches = batches
        simulation = tersegrad.Simulation(made, "none", 2)
        with pytest.raises((TypeError, ValueError), match=text):
            [simulation.step() for _ in range(4)]
        simulation.close()


def test_batches_that_are_not_the_same_again():
    made = cases.training("none")
    epochs = iter(range(1000))
    made.batches = lambda worker, workers, epoch: (
        [torch.rand(()), *cases.batches(worker, workers, epoch)][1:] if next(epochs) < 2 else cases.batches(0, 1, 0)
    )
    simulation = tersegrad.Simulation(made, "none", 2)
    simulation.step()
    with pytest.raises(ValueError, match="did not draw the same random numbers"):
        simulation.load_state_dict(copy.deepcopy(simulation.state_dict()))


def test_an_evaluation_that_changes_the_model():
    def evaluate(model):
        model.outputs.bias.add_(1.0)
        return 0.5

    with pytest.raises(ValueError, match=r"changed outputs\.bias"):
        _with(evaluate=evaluate).evaluate()
    with pytest.raises(TypeError, match="must return one number"):
        _with(evaluate=lambda model: None).evaluate()
    simulation = _with(evaluate=lambda model: float(model.training) + float(torch.rand(()) > 2))
    simulation.training.model.norm.eval()
    state = torch.get_rng_state()
    assert simulation.evaluate() == 0.0
    assert simulation.training.model.training
    assert not simulation.training.model.norm.training
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_trainings():
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="not parameters of the model"):
        tersegrad.Training(copy.deepcopy(model), sgd, cases.batches, cases.loss)
    with pytest.raises(ValueError, match="does not hold bias"):
        tersegrad.Training(model, torch.optim.SGD([model.weight], 0.1), cases.batches, cases.loss)
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="has no shape yet"):
        tersegrad.Training(lazy, torch.optim.SGD(lazy.parameters(), 0.1), cases.batches, cases.loss)
    with pytest.raises(TypeError, match="write a function"):
        tersegrad.Training(model, sgd, [1, 2], cases.loss)
    with pytest.raises(ValueError, match="higher_is_better"):
        tersegrad.Training(model, sgd, cases.batches, cases.loss, metric="bleu")
    with pytest.raises(TypeError, match="is a list"):
        tersegrad.Training([model], sgd, cases.batches, cases.loss)


def test_a_factory_is_given_what_it_asks_for():
    made = make(lambda seed: cases.training("none", seed), seed=3, workers=2, steps=10, spec="none")
    assert isinstance(made, tersegrad.Training)
    with pytest.raises(TypeError, match="wants folder"):
        make(lambda folder: None, seed=0, workers=2, steps=10, spec="none")
    with pytest.raises(TypeError, match="must return"):
        make(lambda: (1, 2), seed=0, workers=2, steps=10, spec="none")
