"""Specs: text <-> object. The text is the constructor expression; only constructors and literals are evaluated."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tersegrad.core import Compressor, Reducer, Spec

ENTRY_POINT_GROUP = "tersegrad"  # third parties name modules here; importing one defines its classes


@dataclass(frozen=True)
class Preset:
    """A one-word name for a spec."""

    group: str
    spec: str
    meaning: str


PLAIN, PAPERS, SPARSE, QUANTISED, LOW_RANK = (
    "Plain",
    "The four papers, as published",
    "Sparse",
    "Quantised",
    "Low rank",
)

PRESETS = {
    "none": Preset(PLAIN, "Dense()", "plain float32 all-reduce, as DDP does it"),
    "bf16": Preset(PLAIN, "AllReduce(BF16())", "half the bytes, summed in bfloat16; the strongest plain baseline"),
    "fp16": Preset(PLAIN, "AllReduce(FP16())", "half the bytes, summed in float16"),
    "auto": Preset(PLAIN, "Auto()", "tries methods in the first steps and keeps the fastest; dense where that is best"),
    "sidco": Preset(
        PAPERS,
        "ErrorFeedback(AllGather(SIDCo(ratio=0.01)))",
        "about 1 % above a fitted threshold (SIDCo-E), with error feedback",
    ),
    "vgc": Preset(PAPERS, "ErrorFeedback(VGC(alpha=1.5))", "an element when its samples agree; the rest waits"),
    "fft": Preset(
        PAPERS,
        "AllGather(PerTensor(FFT(theta=0.85)))",
        "the largest 15 % of each tensor's frequencies, in 10 bits",
    ),
    "gradiveq": Preset(
        PAPERS,
        "GradiVeQ(slice_size=4096, loss=0.01, order='position', learning=TwoShot(QSGD(bits=4)))",
        "slices of convolutions in a learnt basis, summed in it",
    ),
    "topk": Preset(
        SPARSE, "ErrorFeedback(AllGather(TopK(ratio=0.01)))", "the largest 1 % of each bucket, with error feedback"
    ),
    "topk8": Preset(
        SPARSE,
        "ErrorFeedback(AllGather(TopK(ratio=0.01, values=Blockwise())))",
        "as topk, with a byte for each value instead of four",
    ),
    "topk4": Preset(
        SPARSE,
        "ErrorFeedback(Schedule(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))), 'ratio', "
        "steps={0: 0.25, 200: 0.03}))",
        "the largest 3 % in four bits each, 25 % in the first 200 steps: fewer bytes than topk, nearer to plain",
    ),
    "ahead": Preset(
        SPARSE,
        "StepAhead(ErrorFeedback(Schedule(AllGather(TopK(ratio=0.01, values=RangeFloat(bits=4))), 'ratio', "
        "steps={0: 0.25, 200: 0.01})))",
        "the largest 1 % in four bits each after the same beginning, gradients taken a step ahead; needs optimizer=",
    ),
    "dgc": Preset(
        SPARSE,
        "MomentumCorrection(Schedule(AllGather(PerTensor(SampledTopK(ratio=0.001))), 'ratio', "
        "steps={0: 0.25, 400: 0.0625, 800: 0.015625, 1200: 0.004, 1600: 0.001}))",
        "momentum before sending, 25 % down to 0.1 %; for SGD without momentum of its own",
    ),
    "randomk": Preset(
        SPARSE,
        "ErrorFeedback(AllReduce(RandomK(ratio=0.01)))",
        "1 % drawn by lot, the same on all workers",
    ),
    "threshold": Preset(SPARSE, "ErrorFeedback(AllGather(Threshold(tau=0.01)))", "what exceeds a fixed threshold"),
    "redsync": Preset(
        SPARSE, "ErrorFeedback(AllGather(RedSync(ratio=0.01)))", "1 to 2 %, by a threshold that is found by halving"
    ),
    "gaussiank": Preset(
        SPARSE, "ErrorFeedback(AllGather(GaussianK(ratio=0.01)))", "about 1 %, by the threshold of a normal law"
    ),
    "strom": Preset(SPARSE, "ErrorFeedback(AllGather(Strom(tau=0.01)))", "signs of what exceeds a fixed threshold"),
    "qsgd": Preset(QUANTISED, "AllGather(QSGD(bits=4))", "stochastic rounding to 4 bits an element"),
    "signsgd": Preset(
        QUANTISED, "SignSGD()", "majority vote of signs, +-1: one bit each way; needs a small learning rate"
    ),
    "signum": Preset(QUANTISED, "SignSGD(momentum=0.9)", "majority vote of the signs of each worker's momentum, +-1"),
    "efsignsgd": Preset(
        QUANTISED,
        "ErrorFeedback(AllGather(PerTensor(ScaledSign())))",
        "signs times each tensor's mean magnitude, with error feedback",
    ),
    "onebit": Preset(
        QUANTISED, "ErrorFeedback(AllGather(OneBit()))", "signs with two means for every 1024 elements, error feedback"
    ),
    "terngrad": Preset(
        QUANTISED, "AllGather(PerTensor(TernGrad()))", "-s, 0 or s by chance, 1.6 bits an element, clipped at 2.5 sigma"
    ),
    "natural": Preset(QUANTISED, "AllGather(Natural())", "random rounding to powers of two, 9 bits an element"),
    "int8": Preset(
        QUANTISED, "ErrorFeedback(TwoShot(Blockwise()))", "8 bits an element in blocks of 2048, with error feedback"
    ),
    "powersgd": Preset(LOW_RANK, "ErrorFeedback(PowerSGD(rank=2))", "every matrix as a product of two thin ones"),
}


def registry() -> dict[str, type[Spec]]:
    """Every concrete compressor and reducer by name: the subclasses that exist, third parties' included."""
    _load_third_parties()
    found: dict[str, type[Spec]] = {}
    bases: tuple[type[Spec], ...] = (Compressor, Reducer)
    for base in bases:
        for cls in _concrete_subclasses(base):
            if cls.__name__.startswith("_"):
                continue  # private: an experiment, or a test's own
            other = found.setdefault(cls.__name__, cls)
            if other is not cls:
                raise ValueError(
                    f"two classes are called {cls.__name__}: {other.__module__} and {cls.__module__}. Rename one."
                )
    return dict(sorted(found.items()))


@cache
def _load_third_parties() -> None:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        entry.load()


_loaded: dict[str, None] = {}


def load_module(name: str) -> None:
    """Imports a module, or runs a file, whose classes shall be known to specs. Twice is once."""
    if name in _loaded:
        return
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {name} to import methods from.")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module  # dataclasses look their module up
        found.loader.exec_module(module)
        name = str(path)
    else:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--import {name}: {error}. Name an installed module, or a file that ends in .py."
            ) from None
    _loaded[name] = None


def loaded_modules() -> tuple[str, ...]:
    """What ``load_module`` has loaded here, for processes that shall know the same classes."""
    return tuple(_loaded)


def _concrete_subclasses(base: type[Spec]) -> list[type[Spec]]:
    found = [] if inspect.isabstract(base) else [base]
    for sub in base.__subclasses__():
        found += _concrete_subclasses(sub)
    return found


def parse(text: str | Spec) -> Spec:
    """The spec that a text stands for: a preset's name or a constructor expression.

    >>> parse("ErrorFeedback(AllGather(TopK(0.01)))")
    ErrorFeedback(AllGather(TopK(ratio=0.01)))
    >>> parse("bf16")
    AllReduce(BF16())
    """
    if isinstance(text, Spec):
        return text
    if text in PRESETS:
        text = PRESETS[text].spec
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a spec: {error.msg}. {_HOW}") from None
    value = _build(tree, text)
    if not isinstance(value, Spec):
        raise ValueError(f"{text!r} is {value!r}, not a spec. {_HOW}")
    return value


_HOW = 'Write a preset such as "topk" or an expression such as "ErrorFeedback(AllGather(TopK(ratio=0.01)))".'


def _build(node: ast.expr, text: str) -> Any:
    """The value of an expression made of known constructors and literals."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _construct(node, node.func.id, text)
    if isinstance(node, ast.Name):
        raise ValueError(_unknown(node.id, text, called=False))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_build(k, text): _build(v, text) for k, v in zip(node.keys, node.values, strict=True) if k}
    if isinstance(node, ast.List | ast.Tuple):
        kind: Callable[[list[Any]], Any] = list if isinstance(node, ast.List) else tuple
        return kind([_build(element, text) for element in node.elts])
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)!r} in {text!r} is neither a constructor nor a literal. {_HOW}") from None


def _construct(node: ast.Call, name: str, text: str) -> Spec:
    classes = registry()
    if name not in classes:
        raise ValueError(_unknown(name, text, called=True))
    if any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords):
        raise ValueError(f"{text!r}: arguments are written out one by one in a spec; * and ** are not allowed.")
    args = [_build(arg, text) for arg in node.args]
    kwargs = {k.arg: _build(k.value, text) for k in node.keywords if k.arg is not None}
    signature = inspect.signature(classes[name])
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{name} in {text!r}: {error}. Its parameters are {name}{_parameters(signature)}.") from None
    return classes[name](*args, **kwargs)


def _parameters(signature: inspect.Signature) -> str:
    return str(signature.replace(return_annotation=inspect.Signature.empty))


def _unknown(name: str, text: str, called: bool) -> str:
    classes = list(registry())
    if name in classes and not called:
        return f"{name} in {text!r} is not called. Write {name}(...)."
    lower = {c.lower(): c for c in classes}
    hint = f" Did you mean {lower[name.lower()]}?" if name.lower() in lower else ""
    return f"{name!r} in {text!r} is unknown.{hint} Presets: {', '.join(PRESETS)}. Classes: {', '.join(classes)}."


def parse_reducer(text: str | Spec) -> Reducer:
    """A spec that can be attached to a model; a compressor alone cannot."""
    spec = parse(text)
    if not isinstance(spec, Reducer):
        raise TypeError(
            f"{spec!r} is a compressor: it makes bytes and sends them to nobody. "
            f"Write AllGather({spec!r}), or ErrorFeedback(AllGather({spec!r})) to keep what is not sent."
        )
    return spec
