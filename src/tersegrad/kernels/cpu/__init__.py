"""Kernels for the CPU, in Numba: no compiler at install, the GIL released, machine code cached on disk."""

# ruff: noqa: F403
from tersegrad.kernels.cpu._cache import *  # first: it sets where the machine code of all others is cached
from tersegrad.kernels.cpu.add import *
from tersegrad.kernels.cpu.bits import *
from tersegrad.kernels.cpu.blockwise import *
from tersegrad.kernels.cpu.checksum import *
from tersegrad.kernels.cpu.gather import *
from tersegrad.kernels.cpu.indices import *
from tersegrad.kernels.cpu.largest_bins import *
from tersegrad.kernels.cpu.moments import *
from tersegrad.kernels.cpu.momentum import *
from tersegrad.kernels.cpu.natural import *
from tersegrad.kernels.cpu.powers import *
from tersegrad.kernels.cpu.qsgd import *
from tersegrad.kernels.cpu.range_float import *
from tersegrad.kernels.cpu.sampling import *
from tersegrad.kernels.cpu.select import *
from tersegrad.kernels.cpu.signs import *
from tersegrad.kernels.cpu.slices import *
from tersegrad.kernels.cpu.sparse_sum import *
from tersegrad.kernels.cpu.spectrum import *
from tersegrad.kernels.cpu.squares import *
from tersegrad.kernels.cpu.ternary import *
from tersegrad.kernels.cpu.topk_of_sum import *
from tersegrad.kernels.cpu.variance import *
