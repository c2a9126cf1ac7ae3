"""The nouns and the one law; this docstring is the specification that everything else obeys.

**Payload**: what one worker sends for one vector. ``meta``: what a receiver must know before it reads numbers (host
memory). ``body``: the numbers (where the vector lives).

**Compressor**: a codec for *one* flat float32 vector. It sends nothing and owns no memory.

- ``init(layout, seed)`` makes a fresh state.
- ``encode(x, state)`` makes a payload, valid until the next ``encode`` with the same state. It does not change ``x``.
- ``decode_add(payload, acc, scale)`` does ``acc += scale * decoded(payload)``, from the payload alone. Summing N
  workers' payloads, decoding one (on zeros) and subtracting one's own (``scale=-1``) are this one call.
- ``traits()`` says what else is true of it.

A ``Pausing`` compressor needs numbers from the device to encode (a count, whether all is finite). It has ``encoding``,
which yields the kernels' answers where it needs them, and ``encode`` follows: several encodings share one read. A
``Summable`` compressor's bodies may be added as they are. A ``Transformed`` one sums in another domain and comes back
once. Faster ways to the same bits are registered per class: ``encode_sum`` (encode a + b in the pass that adds),
``decode_sum`` (decode N payloads in one pass), ``subtract`` (take out what was just encoded).

**Layout**: one contiguous gradient buffer: names, shapes and offsets of its tensors, its device. **Step**: a layout
in one training step: its number, the learning rate, the sum over samples of squared gradients, and the tensors that
this worker has no gradient of (``idle``): a memory offers zeros for these, and keeps what it remembers of them.

**Comm**: the only way out of the process.

**Reducer**: how N workers turn N buckets into one mean. ``start(step, x, out, state, comm)`` sends and returns a
function ``finish``; ``finish()`` waits, writes the mean into ``out`` (the same bits on every worker) and leaves in
``x`` what was not sent. ``reduce(...)`` is ``start(...)()``. The law:

    mean over workers of (x before - x after) == out

A reducer with a memory obeys it with the memory counted in: what left ``x`` and was not sent is its ``residual``. A
reducer that throws something away on purpose states how much (``loses``). ``out`` may be the very tensor ``x``: then
the caller does not want the rest, and nothing is left. ``x`` may be a ``Sum`` that is still to be added up: then
``x.total`` holds what was not sent.

``finish`` sends nothing, so all workers send in the order in which buckets are started, whenever each of them
finishes. It returns True or False if the method knows whether ``out`` is finite, and None otherwise; the caller then
looks at ``out``.

If any worker's ``x`` holds a NaN or an infinity, ``out`` is non-finite on every worker and ``x`` is unspecified.

A ``Composite`` is made of reducers and starts what they start. A ``Wrapper`` is one around a single reducer, its
``inner``, and passes a ``Sum`` on to it. A ``Memory`` is a wrapper with a residual; there is at most one in a chain.

**State** is a plain dict of tensors, numbers and states, owned by the caller. Its rules:

- ``start``, ``finish`` and ``encode`` do not change what is saved. Updates are staged with ``stage()``. After the
  step the caller commits them if every mean is finite and rolls them back otherwise. As all workers see the same
  means, they decide alike with no further message, and a step with a NaN in any of its buckets leaves no trace.
- Keys that begin with ``_`` are scratch: never saved, may be dropped at any time between two steps.
- State and scratch live on ``layout.device``.
- A tensor in the state of a bucket with several tensors is flat and has one entry per element of the bucket.
- A nested state that covers only some of the bucket's tensors lists them under ``names``. In a state that covers a
  single tensor, tensors may have any shape.
- A number belongs to the bucket.

So a state can be split by tensor name and merged in another order, whatever the method.

Compressors and reducers are *specs*: frozen dataclasses whose ``repr`` is the expression that makes them. Their
hyper-parameters are fields (``param`` gives one a sentence), and none may have the name of a member of the contract.
"""

from tersegrad.core.comm import Buffers, Comm, Pending
from tersegrad.core.compressor import (
    Compressor,
    Pausing,
    Sum,
    Summable,
    Traits,
    Transformed,
    Vector,
    accumulate,
    added,
    adds_in_place,
    decode_sum,
    encode,
    encode_sum,
    encoding,
    require_length,
    sections,
    subtract,
)
from tersegrad.core.layout import Layout, Step, mix_seed
from tersegrad.core.pausing import Paused
from tersegrad.core.payload import HEADER_NBYTES, Payload, padded
from tersegrad.core.reducer import (
    Composite,
    Finish,
    Memory,
    Needs,
    Reducer,
    Wrapper,
    contribution,
    needs_of,
    nothing_left,
    phases,
    reduce,
    refuse_memory,
    remembers,
    settled,
    why_uncompressed,
)
from tersegrad.core.signer import UNSIGNED, Signer
from tersegrad.core.spec import Spec, doc_of, param, require, require_fraction
from tersegrad.core.state import State, back_buffer, report, reserve, scratch, stage, staged

__all__ = [
    "HEADER_NBYTES",
    "UNSIGNED",
    "Buffers",
    "Comm",
    "Composite",
    "Compressor",
    "Finish",
    "Layout",
    "Memory",
    "Needs",
    "Paused",
    "Pausing",
    "Payload",
    "Pending",
    "Reducer",
    "Signer",
    "Spec",
    "State",
    "Step",
    "Sum",
    "Summable",
    "Traits",
    "Transformed",
    "Vector",
    "Wrapper",
    "accumulate",
    "added",
    "adds_in_place",
    "back_buffer",
    "contribution",
    "decode_sum",
    "doc_of",
    "encode",
    "encode_sum",
    "encoding",
    "mix_seed",
    "needs_of",
    "nothing_left",
    "padded",
    "param",
    "phases",
    "reduce",
    "refuse_memory",
    "remembers",
    "report",
    "require",
    "require_fraction",
    "require_length",
    "reserve",
    "scratch",
    "sections",
    "settled",
    "stage",
    "staged",
    "subtract",
    "why_uncompressed",
]
