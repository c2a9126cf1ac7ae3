"""Sums over samples of squared per-sample gradients, gathered in the ordinary backward pass of any module (for VGC).

The gradient of a parameter is a sum of contributions, one per sample of the batch; a mean loss puts a factor 1/B into
each of them, a sum loss puts 1. This package gathers, per element, the sum of the *squares* of those contributions:

    gradient = sum over z of c_z        squares = sum over z of c_z^2

so for a mean loss ``squares`` is the sum of (g_z / B)^2, and B need not be known. Backward passes add up until
``clear``.

``PerSample`` computes them exactly, layer by layer, for models made of known layers. ``PerBackward`` counts every
backward pass as one sample: coarser, nearly free, and for any model.
"""

from tersegrad.per_sample.recorder import PerSample
from tersegrad.per_sample.sums import PerBackward, SquaredGradients

__all__ = ["PerBackward", "PerSample", "SquaredGradients"]
