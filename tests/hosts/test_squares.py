"""Squares of single samples in whole trainings: models with unknown layers, and estimates, in real processes."""

import pytest
import torch

import tersegrad
from support import squares_cases as cases

STEPS = 30


@pytest.mark.parametrize("squares", ["samples", "sampled"])
def test_a_transformer_trains_in_processes_as_in_a_simulation(gloo4, squares, caplog):
    spec = f"ErrorFeedback(VGC(alpha=1.0, squares={squares!r}))"
    results = gloo4.run(cases.real, spec, STEPS)
    made = cases.training()
    simulation = tersegrad.Simulation(made, spec, 4)
    losses = [simulation.step() for _ in range(STEPS)]
    for state, _ in results:
        for key, value in made.model.state_dict().items():
            assert torch.equal(value, state[key]), key
    metrics = simulation.metrics()
    assert metrics["bytes_sent"] == sum(sent for _, sent in results) / 4
    assert 0 < metrics["bytes_sent"] < metrics["dense_bytes"] / 2
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    simulation.close()
    assert len(caplog.records) == 2, "scale and attention together, and then the attention's projection"


def test_estimates_go_on_to_the_bit_after_a_restart():
    spec = "ErrorFeedback(VGC(alpha=1.0, squares='sampled'))"
    whole = tersegrad.Simulation(cases.training(), spec, 2)
    losses = [whole.step() for _ in range(20)]
    first, second = (tersegrad.Simulation(cases.training(), spec, 2) for _ in range(2))
    for _ in range(11):
        first.step()
    second.load_state_dict(first.state_dict())
    assert [second.step() for _ in range(9)] == losses[11:]
    for simulation in (whole, first, second):
        simulation.close()
