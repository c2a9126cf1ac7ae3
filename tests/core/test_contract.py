"""The contract of methods: the names it keeps, what hosts are asked for, and the nouns that all methods share."""

import sys
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch

from support.cases import cases, noted
from tersegrad.comm import threads
from tersegrad.core import (
    HEADER_NBYTES,
    Compressor,
    Layout,
    Needs,
    Pausing,
    Payload,
    Reducer,
    Spec,
    Step,
    Summable,
    Transformed,
    Wrapper,
    doc_of,
    needs_of,
    padded,
    param,
    reduce,
    remembers,
    settled,
)
from tersegrad.core import state as states
from tersegrad.reducers import Dense
from tersegrad.specs import parse, registry

CPU = torch.device("cpu")

# ---- names ---------------------------------------------------------------------------------------


def refusal(base, name):
    """What is said about a class with a parameter of that name."""
    with pytest.raises(TypeError) as caught:
        type(base)("_Mine", (base,), {"__annotations__": {name: int}, name: 100})
    return str(caught.value)


def test_a_reducer_whose_parameter_hides_a_member_is_refused_where_it_is_defined():
    with pytest.raises(TypeError) as caught:

        @dataclass(frozen=True, repr=False)
        class _Delayed(Reducer):
            start: int = 100

    assert str(caught.value) == (
        "_Delayed: a parameter called 'start' would hide 'start', which every reducer has. "
        "Give the parameter another name, e.g. start_value."
    )


def test_so_is_a_compressor():
    with pytest.raises(TypeError, match=r"_Coded: .* 'encode', which every compressor has.*e\.g\. encode_value"):

        @dataclass(frozen=True, repr=False)
        class _Coded(Compressor):
            encode: str = param("utf-8", "how")


def test_every_member_of_every_contract_is_protected():
    for base in (Spec, Compressor, Pausing, Summable, Transformed, Reducer, Wrapper):
        members = {name for name in vars(base) if not name.startswith("_")} - {"inner", "contract"}
        assert members <= base.contract, f"{base.__name__} has members that a parameter may hide"
        for name in base.contract - {"contract"}:
            assert f"{name!r} would hide {name!r}" in refusal(base, name), f"{base.__name__}.{name}"


def test_a_parameter_called_contract_is_refused_alike():
    assert "'contract' would hide 'contract'" in refusal(Reducer, "contract")


def test_a_class_variable_sets_a_member_and_hides_none():
    @dataclass(frozen=True, repr=False)
    class _Halves(Summable):
        examples: ClassVar[tuple[str, ...]] = ("_Halves()",)
        dtype: ClassVar[torch.dtype] = torch.float16

        def encode(self, x, state): ...  # never called

        def decode_add(self, payload, acc, scale): ...  # never called

    assert _Halves.dtype == torch.float16
    assert fields(_Halves) == ()


def test_all_other_names_are_free():
    @dataclass(frozen=True, repr=False)
    class _Free(Dense):
        squares: int = param(1, "a")
        finish: int = 2
        plain: bool = False
        ahead: float = 0.5
        sections: int = 3
        flush: int = 4
        reduce: int = 5

    free = _Free(finish=7)
    assert repr(free) == "_Free(finish=7)"
    assert (free.squares, free.finish, free.ahead, free.sections) == (1, 7, 0.5, 3)

    def work(comm):
        x = torch.full((3,), float(comm.rank))
        reduce(free, Step(Layout.flat(3)), x, x, free.init(Layout.flat(3), comm), comm)
        return x.tolist()

    assert threads.run(2, work) == [[0.5] * 3] * 2


def test_a_parameter_has_its_sentence_and_its_default():
    made = []

    @dataclass(frozen=True, repr=False)
    class _Documented(Dense):
        must: float = param(doc="has no default")
        may: int = param(3, "has one")
        fresh: dict = param(doc="is made anew", factory=lambda: made.append(1) or {})
        bare: int = 4

    spec = _Documented(0.5)
    assert (spec.must, spec.may, spec.fresh, spec.bare) == (0.5, 3, {}, 4)
    assert _Documented(0.5).fresh is not spec.fresh
    assert [doc_of(f) for f in fields(_Documented)] == ["has no default", "has one", "is made anew", ""]
    with pytest.raises(TypeError, match="must"):
        _Documented()


def test_every_parameter_of_every_registered_class_is_documented():
    for name, cls in registry().items():
        for f in fields(cls):
            doc = doc_of(f)
            assert doc.strip() == doc != "", f"{name}.{f.name} has no sentence"


# ---- what a host is asked for --------------------------------------------------------------------


@cases(
    "text needs",
    [
        ("Dense()", Needs(float32=False)),
        ("ErrorFeedback(Dense())", Needs()),
        ("ErrorFeedback(AllGather(TopK(0.1)))", Needs()),
        ("ErrorFeedback(VGC())", Needs(squares="samples")),
        ("StepAhead(ErrorFeedback(VGC(squares='microbatch')), by=2.0)", Needs("microbatch", lr=True, lookahead=2.0)),
        ("MomentumCorrection(Dense())", Needs(no_momentum=True)),
        ("MomentumCorrection(Dense(), momentum=0.0)", Needs()),
        ("ByName({'a': SignSGD(momentum=0.9)}, default=ErrorFeedback(VGC()))", Needs("samples", no_momentum=True)),
        ("Warmup(ErrorFeedback(VGC()), first=Dense())", Needs("samples")),
    ],
)
def test_needs_are_those_of_all_reducers_in_the_tree(text, needs):
    found = needs_of(parse(text))
    assert replace(found, float32=True) == replace(needs, float32=True)
    assert text != "Dense()" or found == needs


def test_the_outermost_reducer_decides_which_dtype_it_is_given():
    assert not needs_of(parse("Dense()")).float32
    assert needs_of(parse("ErrorFeedback(Dense())")).float32


def test_two_kinds_of_squares_cannot_be_had():
    two = parse("ByName({'a': ErrorFeedback(VGC())}, default=ErrorFeedback(VGC(squares='microbatch')))")
    with pytest.raises(ValueError, match=r"squares over microbatch and over samples are needed\. Choose one"):
        needs_of(two)
    assert (Needs("samples") | Needs("samples") | Needs()).squares == "samples"


def test_needs_merge_in_any_order():
    one, other = Needs("samples", lookahead=2.0), Needs(lr=True, no_momentum=True, lookahead=1.0, float32=False)
    assert one | other == other | one == Needs("samples", True, True, 2.0, True)


@cases(
    "text answer",
    [
        ("Dense()", False),
        ("AllGather(TopK(0.1))", False),
        ("ErrorFeedback(Dense())", True),
        ("ByName({'a': Every(Dense())})", True),
        ("StepAhead(LowMemory(Dense()))", True),
    ],
)
def test_what_has_a_residual_says_so(text, answer):
    assert remembers(parse(text)) is answer


# ---- what a reducer becomes ----------------------------------------------------------------------


@cases(
    "text end",
    [
        ("Dense()", "Dense()"),
        ("Warmup(AllGather(TopK(0.1)), steps=5)", "AllGather(TopK(0.1))"),
        ("ErrorFeedback(Warmup(AllGather(TopK(0.1))))", "ErrorFeedback(AllGather(TopK(0.1)))"),
        ("Warmup(Warmup(Dense()))", "Dense()"),
        ("Schedule(AllGather(TopK(0.1)), 'ratio', steps={0: 0.5, 9: 0.01})", "AllGather(TopK(0.01))"),
    ],
)
def test_settled_is_what_is_left_when_the_beginning_is_over(text, end):
    assert settled(parse(text)) == parse(end)
    assert settled(parse(text)) == parse(text).active(None, sys.maxsize)


def test_active_without_a_state_counts_every_step():
    warm = parse("Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=3)")
    inner = warm.inner
    assert [warm.active(None, number) == inner for number in range(5)] == [False, False, False, True, True]
    outer = parse("ErrorFeedback(Warmup(AllGather(TopK(0.1)), steps=3))")
    assert outer.active(None, 2) is outer
    assert outer.active(None, 3) == parse("ErrorFeedback(AllGather(TopK(0.1)))")


def test_active_with_a_state_counts_the_steps_that_were_committed():
    warm = parse("Warmup(AllGather(TopK(0.1)), steps=2)")
    layout = Layout.flat(100)

    def work(comm):
        state, seen = warm.init(layout, comm), []
        for number, good in enumerate((True, False, True, True)):
            seen.append(warm.active(state, number) == warm.inner)
            x = torch.ones(100)
            reduce(warm, Step(layout, number), x, x, state, comm)
            (states.commit if good else states.roll_back)(state)
        return seen

    assert threads.run(1, work) == [[False, False, False, True]]


# ---- layouts -------------------------------------------------------------------------------------

LAYOUT = Layout(("w", "b", "v"), ((2, 3), (4,), ()), seed=3)


def test_sizes_and_offsets():
    assert (LAYOUT.sizes, LAYOUT.offsets, LAYOUT.numel) == ((6, 4, 1), (0, 6, 10, 11), 11)
    assert LAYOUT.zeros().shape == (11,)
    assert Layout.flat(5) == Layout(("x",), ((5,),))


def test_a_subset_is_packed_and_keeps_the_seed():
    part = LAYOUT.subset([2, 0])
    assert part == Layout(("v", "w"), ((), (2, 3)), seed=3)
    assert part.offsets == (0, 1, 7)


def test_a_slice_is_flat_where_a_tensor_is_split_within_a_row():
    every_element = [name for name, size in zip(LAYOUT.names, LAYOUT.sizes, strict=True) for _ in range(size)]
    for start in range(12):
        for stop in range(start, 12):
            part = LAYOUT.slice(start, stop)
            with noted(start=start, stop=stop):
                assert [n for n, s in zip(part.names, part.sizes, strict=True) for _ in range(s)] == every_element[
                    start:stop
                ]
                whole = [(n, s) for n, s in zip(LAYOUT.names, LAYOUT.shapes, strict=True) if n in part.names]
                kept = dict(zip(part.names, part.shapes, strict=True))
                for name, shape in whole:
                    size = part.sizes[part.names.index(name)]
                    assert kept[name] in (shape, (size,)) or kept[name][1:] == shape[1:]
                assert part.seed == LAYOUT.seed


def test_ids_tell_buckets_and_slices_apart_and_nothing_else():
    assert LAYOUT.id == Layout(LAYOUT.names, LAYOUT.shapes, seed=99).id
    others = [LAYOUT.subset([0, 1]), LAYOUT.subset([1, 0, 2]), Layout(LAYOUT.names, ((3, 2), (4,), ()))]
    slices = [Layout.flat(100).slice(10 * i, 10 * i + 10) for i in range(10)]
    assert len({layout.id for layout in (LAYOUT, *others, *slices, Layout.flat(10))}) == 15
    assert Layout.flat(100).slice(10, 20).id == slices[1].id
    assert LAYOUT.slice(3, 8).subset([1]).id == Layout(("b",), ((2,),)).id, "a subset is no slice any more"


def test_a_step_on_another_bucket_is_the_same_step():
    squares = torch.ones(7)
    step = Step(LAYOUT, 5, 0.1, torch.ones(11)).on(LAYOUT.subset([0, 2]), squares)
    assert (step.number, step.lr, step.layout.names) == (5, 0.1, ("w", "v"))
    assert step.squares is squares
    assert Step(LAYOUT, 5, 0.1, squares).on(LAYOUT).squares is None


# ---- payloads ------------------------------------------------------------------------------------


def test_a_frame_has_meta_and_body_in_place_and_copies_no_body():
    for meta in (b"", b"12345", b"12345678", b"123456789"):
        state = {}
        payload = Payload.empty(5, 100, state, CPU, meta)
        payload.body.copy_(torch.arange(5))
        frame = payload.frame()
        front = HEADER_NBYTES + padded(len(meta))
        assert frame.numel() == payload.nbytes == front + 5
        assert bytes(frame[HEADER_NBYTES:].tolist()) == meta.ljust(padded(len(meta)), b"\0") + bytes(range(5))
        assert frame[front:].data_ptr() == payload.body.data_ptr()


def test_a_payload_without_memory_in_front_is_copied_into_its_frame():
    payload = Payload(torch.arange(5, dtype=torch.uint8), 100, b"abc")
    assert bytes(payload.frame()[HEADER_NBYTES:].tolist()) == b"abc\0\0\0\0\0" + bytes(range(5))
    assert payload.frame().data_ptr() != payload.body.data_ptr()


def test_meta_may_be_replaced_by_a_shorter_one():
    payload = Payload.empty(3, 10, {}, CPU, bytes(20))
    payload.body.copy_(torch.tensor([7, 8, 9]))
    payload.meta = b"ab"
    assert payload.nbytes == HEADER_NBYTES + 8 + 3
    assert bytes(payload.frame()[HEADER_NBYTES:].tolist()) == b"ab\0\0\0\0\0\0\x07\x08\x09"


def test_trim_keeps_the_front():
    payload = Payload.empty(10, 10, {}, CPU, b"meta")
    payload.body.copy_(torch.arange(10))
    short = payload.trim(4)
    assert (short.numel, short.meta, short.finite, short.nbytes) == (10, b"meta", True, HEADER_NBYTES + 8 + 4)
    assert bytes(short.frame()[HEADER_NBYTES:].tolist()) == b"meta\0\0\0\0\x00\x01\x02\x03"
    assert short.frame().data_ptr() == payload.frame().data_ptr(), "no byte of the body moved"
    assert bytes(Payload(payload.body, 10).trim(2).frame()[HEADER_NBYTES:].tolist()) == b"\x00\x01"


def test_scratch_is_used_again_and_a_nonfinite_payload_is_empty():
    state = {}
    first = Payload.empty(100, 10, state, CPU).body.data_ptr()
    assert Payload.empty(50, 10, state, CPU).body.data_ptr() == first
    nothing = Payload.nonfinite(10, state, CPU)
    assert (nothing.finite, nothing.numel, nothing.meta, nothing.nbytes) == (False, 10, b"", HEADER_NBYTES)
