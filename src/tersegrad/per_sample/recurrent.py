"""RNN, LSTM and GRU: torch's fused modules do not expose the gradients of their gates, so they are recomputed.

A recurrent layer is two dense layers per time step, ``from_input = W_ih x + b_ih`` and ``from_state = W_hh h + b_hh``,
and a cell that computes the next state. Once the gradients of the module's outputs are known, the forward pass is
replayed step by step and differentiated with respect to both, at all time steps; with those gradients the weights are
dense layers on a sequence. This costs about one more forward and backward pass of the module.

Dropout between layers is replayed too, from the state of torch's generator when the module was called.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tersegrad.per_sample.layers import Kept, Layer, Use, outer, position_sums
from tersegrad.per_sample.terms import Term

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class Recurrents(Layer):
    """RNN, LSTM and GRU with any number of layers, both directions, dropout; without projections or packed batches."""

    kinds = (nn.RNN, nn.LSTM, nn.GRU)
    looks_ahead = True

    def names(self, module: Any) -> set[str]:
        """Up to four parameters for each layer and direction."""
        return {f"{part}_{end}" for part in PARTS for end in _ends(module)}

    def refusal(self, module: Any) -> str | None:
        """Projections are not replayed."""
        return "it has a proj_size" if module.proj_size else None

    def before(self, module: Any) -> Tensor | None:
        """The state of the generator, if dropout will draw from it."""
        if not (module.training and module.dropout and module.num_layers > 1):
            return None
        if next(module.parameters()).device.type != "cpu":
            raise ValueError(
                f"Dropout inside a {type(module).__name__} can be replayed on the CPU only. Use several of one "
                'layer with nn.Dropout between them, or VGC(..., squares="microbatch").'
            )
        return torch.get_rng_state()

    def keep(self, names: set[str], x: Any, state: Any) -> tuple[Tensor, ...]:
        """The input and the initial state."""
        return (x, *_flat(state))

    def outputs(self, output: Any) -> tuple[Tensor, ...]:
        """The last layer's states at all time steps, and all layers' final states."""
        if not isinstance(output[0], Tensor):
            raise ValueError(
                f"Gradients per sample of a recurrent layer need a padded batch, and this is a "
                f'{type(output[0]).__name__}. Pad it, or use VGC(..., squares="microbatch").'
            )
        return (output[0], *_flat(output[1]))

    def term(self, use: Use, name: str) -> Term:
        """From the replay, which is done once for all parameters."""
        if not use.memo:
            use.memo = _replay(use)
        term: Term = use.memo[name]
        return term


@dataclass
class _Steps:
    """All time steps of one layer in one direction, in the order of time."""

    end: str  # suffix of its parameters' names
    x: Tensor  # (time, samples, features)
    before: list[Tensor]  # h at the start of each step: (samples, features)
    after: list[State]
    from_input: Tensor  # (time, samples, gates)
    from_state: list[Tensor]  # (samples, gates)

    def terms(self, delta_input: Tensor, *delta_state: Tensor) -> dict[str, Term]:
        """Two dense layers on a sequence, given the gradients of ``from_input`` and ``from_state``."""
        by_input, by_state = delta_input.transpose(0, 1), torch.stack(delta_state, 1)
        return {
            f"weight_ih_{self.end}": outer(by_input, self.x.detach().transpose(0, 1)),
            f"weight_hh_{self.end}": outer(by_state, torch.stack(self.before, 1).detach()),
            f"bias_ih_{self.end}": position_sums(by_input),
            f"bias_hh_{self.end}": position_sums(by_state),
        }


def _replay(use: Use) -> dict[str, Term]:
    """Run forward again, then differentiate with respect to the inputs of the cells."""
    x, *initial = _time_first(use, use.kept)
    deltas = _time_first(use, use.deltas)
    reached = [i for i, delta in enumerate(deltas) if delta is not None]
    with torch.enable_grad(), _generator_at(use.before):
        layers, outputs = _forward(use.module, x, initial, use.training)
        parts = [part for steps in layers for part in (steps.from_input, *steps.from_state)]
        targets = [outputs[i] for i in reached], parts, [deltas[i] for i in reached]
        found = torch.autograd.grad(*targets, materialize_grads=True)
    each = 1 + x.shape[0]
    terms = [steps.terms(*found[i * each : (i + 1) * each]) for i, steps in enumerate(layers)]
    return {name: term for some in terms for name, term in some.items()}


def _forward(module: Any, x: Tensor, initial: list[Tensor], training: bool) -> tuple[list[_Steps], list[Tensor]]:
    """All layers, and the module's outputs: the sequence, then the stacks of final states."""
    layers: list[_Steps] = []
    finals: list[State] = []
    ends, directions = _ends(module), 1 + module.bidirectional
    if not initial:
        initial = [x.new_zeros(len(ends), x.shape[1], module.hidden_size)] * (2 if isinstance(module, nn.LSTM) else 1)
    for first in range(0, len(ends), directions):
        if first > 0:
            x = functional.dropout(x, module.dropout, training)
        for index in range(first, first + directions):
            backwards = index > first
            steps = _run(module, ends[index], x, tuple(start[index] for start in initial), backwards)
            layers.append(steps)
            finals.append(steps.after[0 if backwards else -1])
        x = torch.cat([torch.stack([state[0] for state in steps.after]) for steps in layers[first:]], 2)
    return layers, [x, *(torch.stack(stack) for stack in zip(*finals, strict=True))]


def _run(module: Any, end: str, x: Tensor, state: State, backwards: bool) -> _Steps:
    """One layer in one direction."""
    w_ih, w_hh, b_ih, b_hh = (_weight(module, f"{part}_{end}") for part in PARTS)
    from_input = functional.linear(x, w_ih, b_ih).requires_grad_()
    before, after, from_state = [], [], []
    for now in reversed(from_input.unbind()) if backwards else from_input.unbind():
        before.append(state[0])
        from_state.append(functional.linear(state[0], w_hh, b_hh).requires_grad_())
        state = _cell(module, now, from_state[-1], state)
        after.append(state)
    order = -1 if backwards else 1
    return _Steps(end, x, before[::order], after[::order], from_input, from_state[::order])


def _weight(module: Any, name: str) -> Any:
    """A parameter as a constant; None for a bias that is not there."""
    return getattr(module, name).detach().float() if name in module._parameters else None


def _cell(module: Any, from_input: Tensor, from_state: Tensor, state: State) -> State:
    """The next state, as torch defines it."""
    if isinstance(module, nn.LSTM):
        enter, forget, new, leave = (from_input + from_state).chunk(4, -1)
        c = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * c.tanh(), c
    if isinstance(module, nn.GRU):
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        update = (update_x + update_h).sigmoid()
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        return ((1 - update) * new + update * state[0],)
    total = from_input + from_state
    return (total.relu() if module.nonlinearity == "relu" else total.tanh(),)


def _flat(state: Any) -> State:
    """The state as a tuple: (), (h,) or (h, c)."""
    if state is None:
        return ()
    return (state,) if isinstance(state, Tensor) else tuple(state)


def _ends(module: Any) -> list[str]:
    """The suffixes of the parameters' names of each layer and direction, in the order of the stacked states."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


def _time_first(use: Use, tensors: Kept) -> list[Any]:
    """A sequence and states as (time, samples, features) and (layers, samples, features), in float32."""
    single = use.kept[0] is not None and use.kept[0].dim() == 2
    tensors = tuple(t[:, None] if single and t is not None else t for t in tensors)
    sequence = tensors[0]
    if sequence is not None and use.module.batch_first and not single:
        sequence = sequence.transpose(0, 1)
    return [None if tensor is None else tensor.float() for tensor in (sequence, *tensors[1:])]


@contextmanager
def _generator_at(state: Tensor | None) -> Iterator[None]:
    """Set torch's global generator to ``state`` inside the block, and restore it afterwards."""
    if state is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)
