"""What all kernel backends share: names of the operations, layouts of their output, argument checks.

Nothing here computes on whole vectors. There is a module per family of operations, and all names are exported here.
"""

# ruff: noqa: F403
from tersegrad.kernels.ops.add import *
from tersegrad.kernels.ops.answers import *
from tersegrad.kernels.ops.bits import *
from tersegrad.kernels.ops.blockwise import *
from tersegrad.kernels.ops.checksum import *
from tersegrad.kernels.ops.floats import *
from tersegrad.kernels.ops.hashing import *
from tersegrad.kernels.ops.indices import *
from tersegrad.kernels.ops.largest_bins import *
from tersegrad.kernels.ops.moments import *
from tersegrad.kernels.ops.momentum import *
from tersegrad.kernels.ops.names import *
from tersegrad.kernels.ops.natural import *
from tersegrad.kernels.ops.powers import *
from tersegrad.kernels.ops.qsgd import *
from tersegrad.kernels.ops.range_float import *
from tersegrad.kernels.ops.sampling import *
from tersegrad.kernels.ops.select import *
from tersegrad.kernels.ops.signs import *
from tersegrad.kernels.ops.slices import *
from tersegrad.kernels.ops.sparse import *
from tersegrad.kernels.ops.spectrum import *
from tersegrad.kernels.ops.squares import *
from tersegrad.kernels.ops.ternary import *
from tersegrad.kernels.ops.variance import *
