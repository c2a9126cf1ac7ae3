"""Finds the known layers of a model; an error if a trainable parameter belongs to none of them."""

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from tersegrad.per_sample import layers
from tersegrad.per_sample.layers import Layer
from tersegrad.per_sample.recurrent import Recurrents

INSTEAD = 'Write VGC(..., squares="microbatch"), which works with any model.'
LAYERS: tuple[Layer, ...] = (
    layers.Linears(),
    layers.Convolutions(),
    layers.TransposedConvolutions(),
    layers.Embeddings(),
    layers.LayerNorms(),
    layers.GroupNorms(),
    layers.InstanceNorms(),
    layers.BatchNorms(),
    layers.PReLUs(),
    Recurrents(),
)


@dataclass(frozen=True)
class Found:
    """A known layer with trainable parameters."""

    path: str
    module: nn.Module
    layer: Layer
    parameters: dict[str, nn.Parameter]  # the trainable ones


def scan(model: nn.Module) -> list[Found]:
    """All modules with trainable parameters; ValueError if some of them are not known layers."""
    found, problems = [], []
    for path, module in model.named_modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if not parameters:
            continue
        layer = _layer(module)
        problem = _problem(module, layer, parameters)
        if layer is None or problem is not None:
            problems.append(f"  {path or 'the model itself'} ({type(module).__name__}): {problem}")
        else:
            found.append(Found(path, module, layer, parameters))
    if problems:
        kinds = ", ".join(kind.__name__ for layer in LAYERS for kind in layer.kinds)
        raise ValueError(
            "Gradients per sample are not known for\n" + "\n".join(problems) + f"\n{INSTEAD} "
            f"Or freeze these parameters, or build the model of layers that are known: {kinds}."
        )
    return found


def _layer(module: nn.Module) -> Layer | None:
    """The ``Layer`` of a module, by the nearest known class whose ``own`` methods it does not override."""
    for base in type(module).__mro__:
        for layer in LAYERS:
            if base in layer.kinds:
                same = all(getattr(type(module), name) is getattr(base, name) for name in layer.own)
                return layer if same and not any(name in module.__dict__ for name in layer.own) else None
    return None


def _problem(module: nn.Module, layer: Layer | None, parameters: dict[str, nn.Parameter]) -> str | None:
    """The reason why a module cannot be handled; None if it can."""
    if any(isinstance(p, UninitializedParameter) for p in parameters.values()):
        return "its parameters have no shape yet; run one batch through the model first"
    if layer is None:
        return f"no known layer, but it owns {', '.join(parameters)}"
    if refusal := layer.refusal(module):
        return refusal
    if unknown := parameters.keys() - layer.names(module):
        return f"it owns {', '.join(sorted(unknown))}, which a layer of this kind does not have by itself"
    return None
