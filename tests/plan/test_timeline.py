"""The timeline, against a simulation that goes from event to event."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.plan.timeline import Compute, Service, simulate


def by_events(backward, ready, phases, contention):
    """Backward and the worker as two processes: whatever happens next is the next event. Returns when both are done.

    ``phases`` lists for every bucket (seconds, whether the worker works in them).
    """
    clock = position = 0.0
    filled, queue, running = 0, [], []
    while True:
        while filled < len(ready) and ready[filled] <= position + 1e-12:
            queue.append(list(phases[filled]))
            filled += 1
        while not running and queue:
            running = queue.pop(0)
        if running and running[0][0] <= 1e-12:
            running.pop(0)
            continue
        if not running and filled == len(ready) and position >= backward - 1e-12:
            return clock
        speed = 1.0 - contention if running and running[0][1] else 1.0
        goal = ready[filled] if filled < len(ready) else backward
        until_goal = math.inf if speed == 0 or position >= goal else (goal - position) / speed
        advance = min(until_goal, running[0][0] if running else math.inf)
        clock += advance
        position += advance * speed
        if advance == until_goal:
            position = goal
        if running:
            running[0] = (running[0][0] - advance, running[0][1])


times = st.floats(0, 5).map(lambda value: round(value, 3))
bucket = st.tuples(times, times, times, times)  # until it is ready, encode, wait, decode


@given(st.lists(bucket, max_size=8), times, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_against_events(buckets, tail, contention):
    ready, so_far = [], 0.0
    for pause, *_ in buckets:
        so_far += pause
        ready.append(so_far)
    backward = so_far + tail
    phases = [((encode, True), (wait, False), (decode, True)) for _, encode, wait, decode in buckets]
    services = [Service(encode + wait + decode, encode + decode) for _, encode, wait, decode in buckets]
    step = simulate(Compute(1.0, backward, 0.5, tuple(ready)), services, contention)
    assert step.seconds == pytest.approx(1.5 + by_events(backward, ready, phases, contention), abs=1e-6)
    assert step.exposed == pytest.approx(step.seconds - 1.5 - backward, abs=1e-9)


def test_by_hand():
    compute = Compute(forward=10.0, backward=20.0, optimizer=1.0, ready=(5.0, 10.0, 20.0))
    hidden = simulate(compute, [Service(4.0), Service(4.0), Service(0.0)])
    assert (hidden.seconds, hidden.exposed) == (31.0, 0.0)
    queued = simulate(compute, [Service(8.0), Service(9.0), Service(3.0)])
    assert queued.started == (5.0, 13.0, 22.0)
    assert queued.ended == (13.0, 22.0, 25.0)
    assert queued.seconds == 10.0 + 25.0 + 1.0
    contended = simulate(compute, [Service(4.0, work=4.0), Service(4.0, work=4.0), Service(0.0)], contention=1.0)
    assert contended.seconds == 10.0 + 28.0 + 1.0
    paced = simulate(dataclasses.replace(compute, pace=2.0), [Service(4.0), Service(4.0), Service(0.0)])
    assert (paced.seconds, paced.exposed) == (33.0, 2.0)


@given(st.lists(bucket, min_size=1, max_size=6), st.integers(0, 5), times)
def test_a_faster_bucket_never_makes_a_longer_step(buckets, which, less):
    ready = tuple(sum(b[0] for b in buckets[: i + 1]) for i in range(len(buckets)))
    compute = Compute(0.0, ready[-1], 0.0, ready)
    services = [Service(sum(b[1:])) for b in buckets]
    before = simulate(compute, services).seconds
    i = which % len(services)
    services[i] = Service(max(0.0, services[i].seconds - less))
    assert simulate(compute, services).seconds <= before + 1e-9
