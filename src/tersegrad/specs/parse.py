"""Text <-> spec. The text is the constructor expression; only constructors and literals are evaluated."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from tersegrad.core import Reducer, Spec
from tersegrad.specs.presets import PRESETS
from tersegrad.specs.registry import registry


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
