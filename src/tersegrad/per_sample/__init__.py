"""Sums over samples of squared per-sample gradients, gathered in the ordinary backward pass of any module (for VGC).

The gradient of a parameter is a sum of contributions, one per sample of the batch; a mean loss puts a factor 1/B into
each of them, a sum loss puts 1. What is gathered here, per element, is the sum of the *squares* of those contributions:

    gradient = sum over z of c_z        squares = sum over z of c_z^2

so for a mean loss ``squares`` is the sum of (g_z / B)^2, and nothing needs to know B. Backward passes add up until
``clear``.

``PerSample`` finds them exactly, layer by layer, for models made of known layers. ``PerBackward`` takes every backward
pass for one sample: coarser, nearly free, and for any model.
"""

from tersegrad.per_sample.recorder import PerSample
from tersegrad.per_sample.sums import PerBackward, SquaredGradients

__all__ = ["PerBackward", "PerSample", "SquaredGradients"]
