"""Text <-> object, and errors that teach."""

import pytest

from support.cases import cases
from support.registered import REDUCERS
from tersegrad import AllGather, AllReduce, ByName, Dense, ErrorFeedback, PerTensor, TopK, parse
from tersegrad.compressors import BF16, FP16, Identity
from tersegrad.core import Reducer, settled
from tersegrad.specs import PRESETS, parse_reducer, registry
from tersegrad.wrappers import Schedule, Warmup


def test_repr_leaves_defaults_out_and_nested_specs_unnamed():
    assert repr(ErrorFeedback(AllGather(TopK(0.01)))) == "ErrorFeedback(AllGather(TopK(ratio=0.01)))"
    assert repr(TopK(0.1, values=BF16())) == "TopK(ratio=0.1, values=BF16())"
    spec = ByName({"*.bias": Dense()}, AllGather(TopK(0.5)), tiny=3)
    assert repr(spec) == "ByName({'*.bias': Dense()}, AllGather(TopK(ratio=0.5)), tiny=3)"


def test_a_default_in_front_keeps_later_fields_named():
    assert parse(repr(ByName({"x": Dense()}, tiny=7))) == ByName({"x": Dense()}, tiny=7)


def test_fingerprint_sees_every_parameter():
    prints = {s.fingerprint() for s in (TopK(0.1), TopK(0.2), TopK(0.1, values=FP16()), TopK(0.1, values=BF16()))}
    assert len(prints) == 4


def test_presets_are_reducers():
    for name in PRESETS:
        assert isinstance(parse_reducer(name), Reducer)


@cases(spec=REDUCERS)
def test_what_is_settled_stays_so(spec):
    end = settled(spec)
    assert isinstance(end, Reducer)
    assert settled(end) == end
    if not any(isinstance(part, Warmup | Schedule) for part in spec.walk()):
        assert end == spec


@cases(
    "text end",
    [
        ("topk4", "ErrorFeedback(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))))"),
        ("ahead", "StepAhead(ErrorFeedback(AllGather(TopK(ratio=0.01, values=RangeFloat(bits=4)))))"),
        ("Schedule(AllGather(TopK(0.1)), 'ratio', steps={9: 0.3, 0: 0.2})", "AllGather(TopK(ratio=0.3))"),
    ],
)
def test_beginnings_are_left_out_wherever_they_are(text, end):
    assert settled(parse(text)) == parse(end)


def test_beginnings_are_left_out_inside_policies():
    text = "ByName({'a': Warmup(SignSGD())}, default=Warmup(Dense()))"
    assert settled(parse(text)) == parse("ByName({'a': SignSGD()}, Dense())")


def test_a_law_of_the_learning_rate_never_settles():
    spec = parse("Schedule(AllGather(TopK(0.1)), 'ratio', drops={1.0: 0.1, 0.3: 1.0})")
    assert settled(spec) == spec


def test_an_object_is_taken_as_it_is():
    spec = AllReduce(BF16())
    assert parse(spec) is spec


@cases(
    "text says",
    [
        ("topkk", "'topkk' in 'topkk' is unknown. Presets: "),
        ("AllGather(Topk(0.1))", "Did you mean TopK?"),
        ("AllGather(TopK)", r"is not called. Write TopK\(...\)"),
        ("AllGather(TopK(0.1)", "is not a spec"),
        ("0.5", "is 0.5, not a spec"),
        ("AllGather(TopK(rate=0.1))", "Its parameters are TopK"),
        ("AllGather(TopK(__import__('os')))", "unknown"),
        ("AllGather(TopK(1+1))", "neither a constructor nor a literal"),
        ("AllGather(*[1])", r"\* and \*\* are not allowed"),
        ("().__class__", "neither a constructor nor a literal"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


@cases(
    "make error says",
    [
        (lambda: TopK(0.0), ValueError, r"above 0 and at most 1. 1 % is TopK\(ratio=0.01\)"),
        (lambda: TopK(1.5), ValueError, "above 0 and at most 1"),
        (lambda: TopK(float("nan")), ValueError, "above 0 and at most 1"),
        (
            lambda: AllReduce(TopK(0.1)),
            ValueError,
            r"cannot be added before decoding. Use AllGather\(TopK\(ratio=0.1\)\)",
        ),
        (lambda: AllGather(Dense()), TypeError, "compressor must be a compressor"),
        (
            lambda: ErrorFeedback(TopK(0.1)),
            TypeError,
            r"Write ErrorFeedback\(AllGather\(TopK\(ratio=0.1\)\)\)",
        ),
        (lambda: ErrorFeedback(ErrorFeedback(Dense())), ValueError, "applied twice"),
        (lambda: ErrorFeedback(ByName({}, default=ErrorFeedback(Dense()))), ValueError, "applied twice"),
        (lambda: TopK(0.1, values=TopK(0.1)), ValueError, "drop values after they were selected"),
        (lambda: TopK(0.1, values=0.5), TypeError, "values must be a compressor"),
        (lambda: PerTensor(PerTensor(Identity())), ValueError, "Write it once"),
        (lambda: ByName({"*": TopK(0.1)}), TypeError, "A rule is a pattern and a reducer"),
        (lambda: ByName({}, tiny=-1), ValueError, "must not be negative"),
    ],
)
def test_illegal_combinations_fail_at_construction(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_compressor_alone_cannot_be_attached():
    with pytest.raises(TypeError, match=r"Write AllGather\(TopK\(ratio=0.01\)\), or ErrorFeedback"):
        parse_reducer("TopK(0.01)")


def test_private_classes_are_not_registered():
    class _Hidden(Dense):
        pass

    assert "_Hidden" not in registry()
    assert "Dense" in registry()
