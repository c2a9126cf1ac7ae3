"""What every kernel computes, in plain torch and Python: slow, readable, on any device."""

# ruff: noqa: F403
from tersegrad.kernels.reference.add import *
from tersegrad.kernels.reference.bits import *
from tersegrad.kernels.reference.blockwise import *
from tersegrad.kernels.reference.checksum import *
from tersegrad.kernels.reference.gather import *
from tersegrad.kernels.reference.indices import *
from tersegrad.kernels.reference.largest_bins import *
from tersegrad.kernels.reference.moments import *
from tersegrad.kernels.reference.momentum import *
from tersegrad.kernels.reference.natural import *
from tersegrad.kernels.reference.powers import *
from tersegrad.kernels.reference.qsgd import *
from tersegrad.kernels.reference.range_float import *
from tersegrad.kernels.reference.sampling import *
from tersegrad.kernels.reference.select import *
from tersegrad.kernels.reference.signs import *
from tersegrad.kernels.reference.slices import *
from tersegrad.kernels.reference.sparse_sum import *
from tersegrad.kernels.reference.spectrum import *
from tersegrad.kernels.reference.squares import *
from tersegrad.kernels.reference.ternary import *
from tersegrad.kernels.reference.topk_of_sum import *
from tersegrad.kernels.reference.variance import *
