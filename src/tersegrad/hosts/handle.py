"""Handle: what the user holds of a running attachment."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tersegrad.core import Reducer
from tersegrad.core.memory_format import shaped
from tersegrad.engine import Engine
from tersegrad.hosts.parameter_shift import ParameterShift


class Handle:
    """A running attachment: metrics, state, close."""

    def __init__(
        self,
        engine: Engine,
        parameters: dict[str, Tensor],
        shift: ParameterShift | None,
        final_buckets: Callable[[], list[list[str]] | None],
        detach: Callable[["Handle"], None],
    ):
        self._engine = engine
        self._parameters = parameters
        self._shift = shift
        self._final_buckets = final_buckets
        self._detach = detach

    @property
    def spec(self) -> Reducer:
        """How gradients are averaged."""
        return self._engine.spec

    def metrics(self, norms: bool = True) -> dict[str, Any]:
        """Totals since attach, on this rank. Bytes are those that left this worker, headers and padding included.

        ``ratio`` compares with what a plain all-reduce of the same gradients would have sent. ``density`` is the
        fraction of elements that this rank's sparse methods sent in the last step; ``empty_sends`` counts the times a
        bucket had nothing to send; ``nonfinite_steps`` the steps that were rolled back; an uncompressed step has
        nothing to roll back. ``layers`` holds what a method says about single layers (GradiVeQ),
        ``decisions`` what Auto has measured and chosen by.

        Args:
            norms: False leaves out ``residual_norm``, which alone has to read as many numbers as there are parameters.

        Returns:
            Plain numbers, strings and dicts of them.
        """
        return self._engine.metrics(norms)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state keyed by parameter name: plain tensors and numbers.

        Returns:
            What ``load_state_dict`` takes. Save one file per rank next to the model checkpoint.
        """
        saved = self._engine.state_dict()
        saved["buckets"] = self._final_buckets() or saved["buckets"]
        return saved if self._shift is None else {**saved, "share": self._shift.share}

    def load_state_dict(self, saved: dict[str, Any] | Iterable[dict[str, Any]], strict: bool = True) -> None:
        """Takes up what ``state_dict`` saved, whatever the buckets were then. Nothing changes if it does not fit.

        Args:
            saved: What this rank saved; or, where the number of ranks has changed, the states of all ranks that saved
                one, in any order (a generator that loads one after the other will do): then every rank takes the mean
                of what they remembered, so that the mean over ranks stays what it was.
            strict: False leaves out entries that the model does not have or whose shapes differ; parameters without an
                entry begin anew.

        Raises:
            ValueError: The state is of another spec, rank or model; the message says which.
        """
        one = self._engine.load_state_dict(saved, strict)
        if self._shift is not None:
            self._shift.share = one.get("share", 1.0)

    def flush(self) -> None:
        """Puts the mean of all residuals into the parameters' ``.grad``, and clears them; all ranks call it.

        For the end of training, and before the learning rate drops. ``.grad`` is then as backward leaves it, scaled
        where attach was given a ``scaler``: what your loop does after backward (unscale, clip, step) applies it. What
        was in ``.grad`` is replaced. It goes out uncompressed, in float32: as many bytes as one plain step.
        """
        scale = self._engine.scale()
        self._engine.flush(lambda name, mean: self._put_gradient(name, mean.mul_(scale)))

    def _put_gradient(self, name: str, mean: Tensor) -> None:
        parameter = self._parameters[name]
        gradient = shaped(mean, parameter).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.copy_(gradient)

    def close(self) -> None:
        """Waits for the worker, frees its process group, and gives the model back to plain DDP. Harmless twice."""
        self._detach(self)
        if self._shift is not None:
            self._shift.close()
        self._engine.close()
