"""PerSample: hooks that turn an ordinary backward pass into sums of squared per-sample gradients.

The sequence:

1. A known layer is called with gradients enabled. A forward hook keeps the call's input and puts a hook on the output.
2. Backward reaches the output: the hook takes its gradient. Together they are one *use* of the layer's parameters.
3. Autograd has summed the gradients of all uses of a parameter and added them to ``.grad``: a hook on the parameter
   then turns the uses into squares. At that moment all uses of this pass have their gradients, and DDP, whose own hook
   runs right after, does not yet know that the parameter is ready. A weight with several uses (tied, or in a layer that
   is called twice) needs no special care: its uses are summed sample by sample before squaring.

Only the graph owns the kept tensors: a forward pass whose outputs are dropped leaves nothing behind. They are saved as
autograd saves tensors, so activation checkpointing (``use_reentrant=False``) frees this memory too.
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tersegrad.core import mix_seed
from tersegrad.per_sample.layers import Kept, Use
from tersegrad.per_sample.scan import INSTEAD, Found, scan
from tersegrad.per_sample.sums import SquaredGradients, add_whole
from tersegrad.per_sample.terms import Term, Together, chunks

_log = logging.getLogger("tersegrad")

TOLERANCE = 0.02  # relative to the gradient's norm: far above rounding even in bfloat16, far below a missed use
ROUNDING = (
    1e-6  # relative to the norm without cancellation: a gradient may be rounding error only (a bias before a norm)
)


COARSE = "every backward pass counts as one sample, which is coarser"


class PerSample(SquaredGradients):
    """Exact squares per sample, for parameters of known layers (``tersegrad.per_sample.layers`` lists them).

    For other parameters, and those that are used otherwise than by calling their layer, a whole backward pass counts
    as one sample, as in ``PerBackward``. They are named once, in a warning of the logger "tersegrad".

    A sample is an index along the first dimension of a layer's input, or along ``batch_dim`` in layers that leave a
    choice: ``batch_dim=1`` is for models whose dense, norm and embedding layers see (time, samples, ...). It does not
    apply to inputs with a single batch dimension, to layers with channels, nor to recurrent layers, which have their
    own ``batch_first``.

    In one backward pass all layers must see as many samples as the last one does. So an embedding of positions must be
    called with indices for every sample, and a dense layer must not get samples and time in one dimension. This is
    checked, but a mistake that leaves the numbers equal (as many time steps as samples) cannot be detected.

    In addition to the sums it needs a workspace of about 4 MB, or that of one sample if that is larger: its gradient of
    one parameter, and the patches of one convolution. The first backward pass takes longer, as everything is checked.

    Copies of the module are not recorded. Make the PerSample of a module before it is compiled and first runs.

    With ``sampled`` a random eighth of the samples (at least 4) stands for all of them, but where all are nearly free
    (dense layers on vectors, embeddings): right on average, at an eighth of the cost. Which ones is drawn from the bits
    of the last layer's gradient and input, so the same pass gives the same squares, in any process and after a restart.

    Args:
        module: the model.
        batch_dim: dimension of the samples, 0 or 1.
        sampled: estimate where that is cheaper.

    Raises:
        ValueError: if ``batch_dim`` is neither, or a parameter has no shape yet, or sparse gradients.
    """

    def __init__(self, module: nn.Module, batch_dim: int = 0, sampled: bool = False):
        if batch_dim not in (0, 1):
            raise ValueError(f"PerSample(batch_dim={batch_dim!r}): samples are in dimension 0, or in 1, after time.")
        self._found, unknown = scan(module)
        known = {id(p) for found in self._found for p in found.parameters.values()}
        self._coarse = {id(p) for p in module.parameters() if p.requires_grad and id(p) not in known}
        if unknown:
            _log.warning("%s", f"For these, {COARSE}:\n" + "\n".join(unknown))
        self._batch_dim = batch_dim
        self._sampled = sampled
        self._anchor = torch.empty(0, requires_grad=True)
        self._passes: dict[int, _Pass] = {}  # running backward passes, by autograd's id
        self._checked: set[tuple[int, int]] = set()  # (parameter, number of uses)
        self._before: dict[int, Any] = {}  # by running module: the result of ``Layer.before``
        super().__init__(module)

    def _watch(self, module: nn.Module) -> None:
        for found in self._found:
            if found.layer.looks_ahead:
                ahead = _Hook(partial(self._about_to_be_called, found))
                self._handles.append(found.module.register_forward_pre_hook(ahead))
            called = _Hook(partial(self._called, found))
            self._handles.append(found.module.register_forward_hook(called, with_kwargs=True))
        for key, (_, p) in self._parameters.items():
            self._handles.append(p.register_hook(partial(self._check, key)))
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._accumulated, key)))

    def clear(self) -> None:
        """Set all sums to zero; call it between backward passes."""
        with self._lock:
            super().clear()
            self._passes.clear()  # left by passes that ended in an exception

    def close(self) -> None:
        """Remove all hooks; the sums stay readable."""
        super().close()
        self._passes.clear()

    # ---- forward ---------------------------------------------------------------------------------

    def _about_to_be_called(self, found: Found, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._before[id(module)] = found.layer.before(module)

    def _called(self, found: Found, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = self._before.pop(id(module), None)
        if not torch.is_grad_enabled():
            return
        outputs = found.layer.outputs(output)
        if not any(y.requires_grad for y in outputs):
            return
        named = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        kept = found.layer.keep(set(found.parameters), named["input"], named.get("hx"))
        before = found.layer.after(output, before)
        call = _Call(found, module.training, before, _keep(self._anchor, kept))
        for i, y in enumerate(outputs):
            if y.requires_grad:
                _on_gradient(y, partial(self._arrived, call, i, len(outputs)))

    # ---- backward --------------------------------------------------------------------------------

    def _arrived(self, call: "_Call", output: int, outputs: int, delta: Tensor) -> None:
        """The gradient of a layer's output is known."""
        if not self._handles:
            return  # closed after the forward pass
        if call.kept is None:
            raise ValueError(
                f"{call.found.path}: a second backward pass through the same graph (retain_graph=True); what gradients "
                f"per sample need is gone after the first. Add the losses and call backward once. {INSTEAD}"
            )
        with self._lock:
            current = self._running_pass()
            if self._sampled and current.seed is None:
                current.seed = _seed(delta, *call.kept())
            current.add(call, output, outputs, delta.detach(), self._batch_dim)

    def _running_pass(self) -> "_Pass":
        number = torch._C._current_graph_task_id()
        if number not in self._passes:
            self._passes[number] = _Pass()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number))
        return self._passes[number]

    def _accumulated(self, key: int, parameter: Tensor) -> None:
        """The gradient of a parameter is complete, and so are all uses that contribute to it."""
        with self._lock, torch.no_grad(), _full_precision(parameter.device):
            current = self._passes.get(torch._C._current_graph_task_id())
            if key in self._coarse:
                if current is not None:
                    current.done(key)
                return
            term = self._term(key)
            assert term is not None, "_check was called first"
            assert current is not None
            sums = self._sums[key]
            target = sums if sums.is_contiguous() else torch.zeros_like(sums, memory_format=torch.contiguous_format)
            if current.seed is None:
                term.add_squares(target)
            else:
                term.add_estimate(target, current.seed % term.samples if term.samples else 0)
            if target is not sums:  # channels last
                sums += target
            current.done(key)

    def _check(self, key: int, gradient: Tensor) -> None:
        """The gradient of a parameter is known, and will be accumulated next."""
        if (key, self._uses(key)) in self._checked:
            return
        with self._lock, torch.no_grad(), _full_precision(gradient.device):
            if key not in self._coarse and (reason := self._objection(key, gradient.detach())):
                self._coarse.add(key)
                self._checked -= {case for case in self._checked if case[0] == key}
                self._running_pass().coarse.setdefault(reason, []).append(self._parameters[key][0])
            if key in self._coarse:
                add_whole(self._sums[key], gradient, self._parameters[key][0])

    def _objection(self, key: int, gradient: Tensor) -> str | None:
        """Why the squares of a parameter cannot be had; None if they can.

        Once for each parameter and number of uses: the samples' contributions must add up to the gradient.
        """
        case = key, self._uses(key)
        if not case[1]:
            return (
                "received a gradient, but none of it through a call of the layer that owns it. It is used by a "
                "function, as in functional.linear(x, layer.weight), or the model was compiled and run before "
                "this was attached."
            )
        try:
            term = self._term(key)
        except _Unequal as reason:
            return str(reason)
        assert term is not None
        explained = _explained(term, gradient)
        if explained is False:
            return (
                "what the calls of its layer contribute does not add up to its gradient. It is also used by a "
                "function, as in functional.linear(x, layer.weight), or a hook changes the layer's output or the "
                "gradient, or second derivatives are taken. For a tied weight, call a layer that shares it: "
                "decoder.weight = embedding.weight."
            )
        if explained:
            self._checked.add(case)
        return None

    def _uses(self, key: int) -> int:
        """How many calls contribute to a parameter in the running pass."""
        current = self._passes.get(torch._C._current_graph_task_id())
        return len(current.uses.get(key, ())) if current else 0

    def _end(self, number: int) -> None:
        """A backward pass has ended: drop uses whose gradients were not accumulated, and say what is coarse now."""
        ended = self._passes.pop(number, None)
        for reason, names in (ended.coarse if ended else {}).items():
            _log.warning("%s", f"{', '.join(names)}: {reason} From now on, {COARSE}.")

    def _term(self, key: int) -> Term | None:
        """The sum of all uses of a parameter in the running pass."""
        current = self._passes.get(torch._C._current_graph_task_id())
        terms = current.terms(key) if current else []
        return Together(terms) if len(terms) > 1 else terms[0] if terms else None


class _Unequal(Exception):  # noqa: N818 - it is a reason, not an error
    """The layers of a model do not see the same number of samples."""


class _Hook:
    """A hook of a module that does nothing in copies of the module, deep or pickled."""

    def __init__(self, action: Callable[..., None]):
        self._action = action

    def __call__(self, *args: Any) -> None:
        self._action(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


class _Call:
    """One call of a layer, owned by the graph of its output only."""

    __slots__ = ("__weakref__", "before", "found", "kept", "training")

    def __init__(self, found: Found, training: bool, before: Any, kept: Callable[[], Kept]):
        self.found = found
        self.training = training
        self.before = before
        self.kept: Callable[[], Kept] | None = kept  # None after it was used and freed


@dataclass
class _Arrival:
    """A call whose gradients are coming in."""

    call: _Call
    batch_dim: int
    deltas: list[Tensor | None]
    waiting: set[str]  # parameters whose squares have not been added yet
    use: Use | None = None

    def term(self, name: str) -> Term:
        """The contribution of this use to a parameter."""
        if self.use is None:
            assert self.call.kept is not None
            module, training = self.call.found.module, self.call.training
            kept, deltas = self.call.kept(), tuple(self.deltas)
            self.use = Use(module, training, self.batch_dim, kept, deltas, self.call.before)
        return self.call.found.layer.term(self.use, name)


@dataclass
class _Pass:
    """A running backward pass."""

    arrivals: dict[_Call, _Arrival] = field(default_factory=dict)
    uses: dict[int, list[tuple[_Arrival, str]]] = field(default_factory=dict)  # by parameter
    samples: tuple[int, str] | None = None  # number of samples in the first layer, and its path
    seed: int | None = None  # of the choice of samples; None where all are looked at
    coarse: dict[str, list[str]] = field(default_factory=dict)  # parameters that became so, by the reason

    def add(self, call: _Call, output: int, outputs: int, delta: Tensor, batch_dim: int) -> None:
        """Add the gradient of one of a call's outputs."""
        arrival = self.arrivals.get(call)
        if arrival is None:
            parameters = call.found.parameters
            arrival = self.arrivals[call] = _Arrival(call, batch_dim, [None] * outputs, set(parameters))
            for name, p in parameters.items():
                self.uses.setdefault(id(p), []).append((arrival, name))
        arrival.deltas[output] = delta

    def terms(self, key: int) -> list[Term]:
        """One term for each use of a parameter; ``_Unequal`` unless all have the same number of samples."""
        terms = []
        for arrival, name in self.uses.get(key, ()):
            term, path = arrival.term(name), arrival.call.found.path
            if self.samples is None:
                self.samples = term.samples, path
            if term.samples != self.samples[0]:
                raise _Unequal(
                    f"{path} sees {term.samples} samples, and {self.samples[1]} sees {self.samples[0]} in the same "
                    "backward pass. Samples must be in the first dimension everywhere (batch_dim=1: in the second, "
                    "behind the time), never together with time, and an embedding of positions needs indices for each "
                    "sample: positions.expand(samples, -1)."
                )
            terms.append(term)
        return terms

    def done(self, key: int) -> None:
        """The squares of a parameter were added: free calls that are no longer needed."""
        for arrival, name in self.uses.pop(key, ()):
            arrival.waiting.discard(name)
            if not arrival.waiting:
                arrival.call.kept = None
                del self.arrivals[arrival.call]


def _seed(*tensors: Tensor | None) -> int:
    """A number made of the bits of tensors: no two batches have the same gradients and inputs of the last layer."""
    bits = (t.detach().float().contiguous().view(torch.int32).sum() for t in tensors if t is not None)
    return mix_seed(*(int(number) for number in bits))


class _Saved(torch.autograd.Function):
    """Saves tensors as autograd does, so that checkpointing and offloading work; it is never differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing depends on this")


def _keep(anchor: Tensor, kept: tuple[Tensor, ...]) -> Callable[[], Kept]:
    """Save these tensors with the graph of ``anchor``; return a function that gives them back."""
    if not kept:
        return tuple
    node: Any = _Saved.apply(anchor, *(tensor.detach() for tensor in kept)).grad_fn
    return lambda: tuple(node.saved_tensors)


def _on_gradient(y: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with the gradient of the present value of ``y``, even if ``y`` is modified in place afterwards.

    A hook on a tensor does that, unless the tensor is a view, such as the output of a dense layer on sequences: then an
    in-place change gives its base a new history. So the hook is put on the base.
    """
    base = y._base
    if (
        base is None
        or base.grad_fn is None
        or not (y.is_contiguous() and base.is_contiguous())
        or base.numel() != y.numel()
    ):
        y.register_hook(hook)
    else:
        shape = y.shape
        base.register_hook(lambda gradient: hook(gradient.reshape(shape)))


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast, even if backward was called under it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _explained(term: Term, gradient: Tensor) -> bool | None:
    """Whether the contributions add up to the gradient; None if they are not finite."""
    total = torch.zeros_like(gradient, dtype=torch.float32)
    squares = 0.0
    for first, last in chunks(term.samples, term.workspace):
        part = term.gradients(first, last)
        total += part.sum(0)
        squares += float(part.square().sum())
    size = squares**0.5 + float(gradient.norm())
    allowed = TOLERANCE * size + ROUNDING * term.reach()
    return float((total - gradient).norm()) <= allowed if math.isfinite(allowed) else None
