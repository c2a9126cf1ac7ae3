"""The command line: ``tersegrad list | inspect | check | bench | plan | train | report | map | demo``."""

import argparse
import inspect
import math
import sys
import traceback
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tersegrad
from tersegrad.comm.units import show_bytes
from tersegrad.core import HEADER_NBYTES, Compressor, Spec
from tersegrad.engine.roundtrip import compressor_of, roundtrip
from tersegrad.specs.parse import PRESETS, load_module, registry

_GROUPS = {
    "compressors": "Compressors: make bytes of one vector",
    "reducers": "Reducers: N workers agree on one mean",
    "wrappers": "Wrappers: reducers around reducers",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command; errors that a user can mend come without a traceback."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        for module in args.modules:
            load_module(module)
        code: int = args.run(args)
    except ModuleNotFoundError as error:
        print(f"tersegrad {args.command} needs {error.name}: pip install 'tersegrad[lab]'", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"tersegrad {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntersegrad {args.command}: stopped. The same command goes on from here.", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tersegrad",
        description="Data-parallel PyTorch training on slow networks, by sending few bytes per step.",
        epilog='A SPEC is a preset ("topk") or an expression ("ErrorFeedback(AllGather(TopK(ratio=0.01)))").',
    )
    parser.add_argument("--version", action="version", version=f"tersegrad {tersegrad.__version__}")
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module or a .py file with methods of your own, for all commands; may be repeated",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="every method with its meaning and parameters")
    listing.set_defaults(run=_list)

    look = commands.add_parser("inspect", help="what one spec does to one vector: bytes, ratio, error")
    look.add_argument("spec", metavar="SPEC", nargs="+", help="presets or expressions, one line each in the answer")
    _add_vector_options(look, "1M")
    look.set_defaults(run=_inspect)

    check = commands.add_parser("check", help="whether a method keeps every law, in one call (tersegrad.testing)")
    check.add_argument("spec", metavar="SPEC", nargs="+", help="compressors or reducers, yours or ours")
    check.set_defaults(run=_check)

    bench = commands.add_parser(
        "bench", help="time of encode and accumulate, bytes and error, beside torch.topk and a copy"
    )
    bench.add_argument("spec", metavar="SPEC", nargs="+", help="presets or expressions; all take turns in every round")
    _add_vector_options(bench, "25M")
    bench.add_argument("--threads", type=_count, default=1, help="threads that torch may use (default: 1)")
    bench.add_argument("--rounds", type=_count, default=11, help="rounds of the interleaved run (default: 11)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write one row per measurement to this file")
    bench.set_defaults(run=_bench)

    train = commands.add_parser("train", help="real training over a slow link, one run per spec, kept in a folder")
    train.add_argument(
        "spec", metavar="SPEC", nargs="+", help='specs, "none" (plain DDP), or torch:fp16, torch:bf16, ...'
    )
    _add_run_options(train)
    train.add_argument("--bandwidth", help="of every worker's link, e.g. 100Mbit (default: not limited)")
    train.add_argument("--epochs", type=_count, help="passes over the data (default: the workload's own)")
    train.add_argument("--seconds", type=float, help="stop after this much training time")
    train.add_argument("--seeds", type=_seeds, default=(0,), help="comma-separated, one run each (default: 0)")
    train.add_argument(
        "--learning-rate", type=_rate, help="the highest of the run, after its warm-up (default: the workload's own)"
    )
    evaluate = train.add_mutually_exclusive_group()
    evaluate.add_argument("--eval-every", type=_count, metavar="STEPS", help="accuracy also every so many steps")
    evaluate.add_argument("--no-eval", action="store_true", help="do not measure accuracy; for timing")
    train.set_defaults(run=_train)

    report = commands.add_parser("report", help="a page with plots and tables out of a folder of runs")
    report.add_argument("folder", type=Path, metavar="DIR", help="what --out of train or map was")
    report.set_defaults(run=_report)

    chart = commands.add_parser("map", help="step time over bandwidth and spec: where compression wins, where it loses")
    chart.add_argument("spec", metavar="SPEC", nargs="+", help="specs to compare, at least one dense among them")
    _add_run_options(chart)
    chart.add_argument("--bandwidths", default="10Mbit,100Mbit,1Gbit,10Gbit", help="comma-separated rates")
    chart.set_defaults(run=_map)

    plan = commands.add_parser("plan", help="whether to compress, and with what: predicted step time of every spec")
    plan.add_argument("spec", metavar="SPEC", nargs="*", help="what to compare (default: one of each kind)")
    plan.add_argument("--model", metavar="MODULE:FACTORY", help="gives a model, or a model and a function for its loss")
    plan.add_argument("--params", type=_count, help="instead of a model: how many parameters it has, e.g. 25.6M")
    plan.add_argument("--workers", help="how many; a range, as 4..1024, draws how each spec scales")
    plan.add_argument("--bandwidth", help="of every worker's link, e.g. 1Gbit (default: as measured, or unlimited)")
    plan.add_argument("--latency", help="of a message, one way, e.g. 0.1ms (default: as measured, or none)")
    plan.add_argument("--compute", help="time of a step without communication, e.g. 120ms")
    plan.add_argument("--profile", type=Path, metavar="FILE", help="what python -m tersegrad.plan.probe has measured")
    plan.add_argument("--picture", type=Path, default=Path("plan.png"), help="of a range (default: plan.png)")
    plan.set_defaults(run=_advise)

    demo = commands.add_parser("demo", help="train a small real model over an emulated slow link, plain and compressed")
    demo.add_argument("spec", metavar="SPEC", nargs="*", help="what to compare (default: one of each kind)")
    demo.add_argument("--workers", type=_count, default=4, help="worker processes (default: 4)")
    demo.add_argument("--bandwidth", default="100Mbit", help="of the emulated link (default: 100Mbit)")
    demo.add_argument("--latency", default="0.2ms", help="of the emulated link, one way (default: 0.2ms)")
    demo.add_argument("--epochs", type=_count, help="passes over the data per spec (default: the workload's own)")
    demo.add_argument("--out", type=Path, default=Path("demo-results"), help="folder for the picture and the numbers")
    demo.set_defaults(run=_demo)
    return parser


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workload", required=True, help="what to train: digits, fashion, cifar-resnet20, ...")
    command.add_argument("--workers", type=_count, default=4, help="worker processes (default: 4)")
    command.add_argument("--latency", help="one way, e.g. 1ms; emulated where the kernel cannot delay packets")
    command.add_argument(
        "--network",
        choices=("auto", "netns", "throttled", "none"),
        default="auto",
        help="real namespaces, an emulated link, or loopback as it is (default: namespaces where they can be made)",
    )
    command.add_argument("--steps", type=_count, help="stop after so many steps")
    command.add_argument("--batch", type=_count, help="samples of each worker in a step (default: the workload's own)")
    command.add_argument("--data", type=Path, metavar="DIR", help="folder with the data sets")
    command.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the results")


def _rate(text: str) -> float:
    """A positive number, as 0.05."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no learning rate. Write a number above 0, like 0.05.")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _add_vector_options(command: argparse.ArgumentParser, numel: str) -> None:
    command.add_argument(
        "--numel", type=_count, default=numel, help=f"length of the Gaussian vector (default: {numel})"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the vector (default: 0)")
    command.add_argument(
        "--gradient", type=Path, metavar="FILE", help="use this gradient instead: .pt, .npy or .npz (see --key)"
    )
    command.add_argument("--key", help="which array of an .npz or which entry of a .pt dict (default: the first)")


def _count(text: str) -> int:
    """A positive whole number, as 4096, 250k or 25M."""
    scale = {"k": 1e3, "m": 1e6}.get(text[-1:].lower(), 1)
    try:
        value = round(float(text[:-1] if scale > 1 else text) * scale)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number. Write it like 4096, 250k or 25M.")
    return value


# ---- list ----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    print("Presets: one word for a whole spec")
    for preset_group in dict.fromkeys(preset.group for preset in PRESETS.values()):
        print(f"\n {preset_group}")
        for name, preset in PRESETS.items():
            if preset.group == preset_group:
                print(f"  {name:<10} {preset.meaning}\n{'':<13}{preset.spec}")
    classes = list(registry().values())
    for group, title in _GROUPS.items():
        print(f"\n{title}")
        for cls in classes:
            if _group(cls) == group:
                print(_described(cls))
    return 0


def _group(cls: type[Spec]) -> str:
    if issubclass(cls, Compressor):
        return "compressors"
    has_reducers = any("Reducer" in str(f.type) for f in fields(cls))  # type: ignore[arg-type]
    return "wrappers" if has_reducers else "reducers"


def _described(cls: type[Spec]) -> str:
    """The class with its one-line meaning, then a line for each parameter with the comment beside it in the source."""
    lines = [f"  {cls.__name__:<15} {(cls.__doc__ or '').splitlines()[0]}"]
    comments = _field_comments(cls)
    for f in fields(cls):  # type: ignore[arg-type]
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        shown = f.name if default is MISSING else f"{f.name}={default!r}"
        lines.append(f"{'':<18}{shown:<20} {comments.get(f.name, '')}".rstrip())
    return "\n".join(lines)


def _field_comments(cls: type[Spec]) -> dict[str, str]:
    """Field name -> the comment that follows it in the source, which says which way the knob turns."""
    comments: dict[str, str] = {}
    for line in inspect.getsource(cls).splitlines():
        declaration, _, comment = line.partition("  # ")
        name, colon, _ = declaration.strip().partition(":")
        if colon and comment and name.isidentifier():
            comments.setdefault(name, comment.strip())
    return comments


# ---- check ----------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    from tersegrad import testing

    failed = 0
    for text in args.spec:
        try:
            testing.check(text)
        except AssertionError as error:
            failed += 1
            print(f"{text}: breaks a law: {error}")
        except Exception:  # a mistake in somebody's method: where it is, is what they want to know
            failed += 1
            print(f"{text}: raised\n{traceback.format_exc()}")
        else:
            print(f"{text}: keeps every law")
    return 1 if failed else 0


# ---- inspect -------------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> int:
    x = _vector(args)
    for text in args.spec:
        _inspect_one(text, x)
    return 0


def _vector(args: argparse.Namespace) -> Tensor:
    if args.gradient is None:
        x = torch.randn(args.numel, generator=torch.Generator().manual_seed(args.seed))
        print(f"Gaussian vector of {x.numel()} elements, {show_bytes(4 * x.numel())} in float32")
    else:
        x = load_gradient(args.gradient, args.key)
        print(f"{args.gradient}: {x.numel()} elements, {show_bytes(4 * x.numel())} in float32")
    return x


def _inspect_one(text: str, x: Tensor) -> None:
    compressor = compressor_of(text)
    decoded, payload = roundtrip(compressor, x, seed=0)
    sections = {"header": HEADER_NBYTES, **compressor.sections(payload)}
    error = float((decoded - x).norm() / x.norm()) if float(x.norm()) else 0.0
    sent = int((decoded != 0).sum())
    print(f"\n{compressor!r}")
    print(f"  payload  {show_bytes(payload.nbytes)} = {' + '.join(f'{k} {v}' for k, v in sections.items())} bytes")
    print(f"  ratio    {4 * x.numel() / payload.nbytes:.1f}x fewer bytes than float32")
    print(f"  sent     {sent} of {x.numel()} elements are non-zero after decoding ({sent / max(1, x.numel()):.3%})")
    if sent and "indices" in sections:
        print(f"  indices  {8 * sections['indices'] / sent:.2f} bits each")
    print(f"  error    {error:.4f} = |decoded - x| / |x|")


def load_gradient(path: Path, key: str | None) -> Tensor:
    """A flat float32 vector out of a .pt, .npy or .npz file."""
    if path.suffix == ".npy":
        import numpy as np

        return torch.from_numpy(np.load(path)).float().reshape(-1)
    if path.suffix == ".npz":
        import numpy as np

        arrays = np.load(path)
        numeric = {name: arrays[name] for name in arrays.files if arrays[name].dtype.kind == "f"}
        return torch.from_numpy(_pick(numeric, key, path)).float().reshape(-1)
    if path.suffix == ".pt":
        loaded = torch.load(path, weights_only=True)
        tensor = _pick(loaded, key, path) if isinstance(loaded, dict) else loaded
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor. Name one with --key.")
        return tensor.float().reshape(-1)
    raise ValueError(f"{path}: a gradient is read from .pt, .npy or .npz files.")


def _pick(items: dict, key: str | None, path: Path):  # type: ignore[no-untyped-def,type-arg]
    if not items:
        raise ValueError(f"{path} holds no floating-point array.")
    if key is None:
        return next(iter(items.values()))
    if key not in items:
        raise ValueError(f"{path} has no {key!r}. It has: {', '.join(map(str, items))}.")
    return items[key]


# ---- bench --------------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> int:
    from tersegrad.cli import bench, timing

    torch.set_num_threads(args.threads)
    for text in args.spec:
        compressor_of(text)  # a mistake is told before anything is timed
    x = _vector(args)
    results, baselines = bench.run(args.spec, x, args.rounds)
    print(bench.show(results, baselines, x.numel()))
    if args.json is not None:
        timing.write_rows(args.json, bench.rows(results, baselines, x.numel()))
    return 0


# ---- the laboratory -----------------------------------------------------------------------------


def _plan(args: argparse.Namespace, **more: object) -> Any:
    from tersegrad.lab.train import Plan, command_line

    common = {
        key: getattr(args, key)
        for key in ("workload", "workers", "network", "latency", "steps", "data", "out", "batch")
    }
    return Plan(specs=tuple(args.spec), command=command_line(), **{**common, **more})


def _train(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tersegrad.lab import train

    own = ("bandwidth", "epochs", "seconds", "seeds", "eval_every", "learning_rate")
    more = {key: getattr(args, key) for key in own}
    return train.train(_plan(args, **more, evaluate=not args.no_eval), Console())


def _report(args: argparse.Namespace) -> int:
    from tersegrad.lab import report

    print(report.write_report(args.folder))
    return 0


def _map(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tersegrad.lab import map as maps

    steps = args.steps or 24
    more = {"bandwidth": None, "epochs": None, "seconds": None, "seeds": (0,), "steps": steps, "evaluate": False}
    return maps.draw(_plan(args, **more), args.bandwidths.split(","), Console())


# ---- plan ----------------------------------------------------------------------------------------


def _advise(args: argparse.Namespace) -> int:
    from tersegrad.plan import command

    torch.set_num_threads(1)
    asked = {key: getattr(args, key) for key in ("model", "params", "bandwidth", "latency", "compute", "profile")}
    workers = command.parse_workers(args.workers) if args.workers else ()
    print(command.run(command.Request(tuple(args.spec), workers=workers, picture=args.picture, **asked)))
    return 0


# ---- demo ----------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from tersegrad.lab import demo

    return demo.run(args.spec, args.workers, args.bandwidth, args.latency, args.epochs, args.out)


if __name__ == "__main__":
    sys.exit(main())
