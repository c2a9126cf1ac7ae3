"""The command line's options, and which function runs each command."""

import argparse
import math
import traceback
from pathlib import Path
from typing import Any

import torch

import tersegrad
from tersegrad.cli import inspect, listing


def make_parser() -> argparse.ArgumentParser:
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
    for add in (
        _add_list,
        _add_inspect,
        _add_check,
        _add_bench,
        _add_train,
        _add_simulate,
        _add_report,
        _add_map,
        _add_plan,
        _add_demo,
        _add_warm,
    ):
        add(commands)
    return parser


def _add_list(commands: Any) -> None:
    command = commands.add_parser("list", help="every method with its meaning and parameters")
    command.set_defaults(run=listing.run)


def _add_inspect(commands: Any) -> None:
    look = commands.add_parser("inspect", help="what a spec does to a vector: bytes, ratio, error, beside torch.topk")
    look.add_argument("spec", metavar="SPEC", nargs="+", help="presets or expressions, one line each in the answer")
    _add_vector_options(look, "1M")
    look.set_defaults(run=inspect.run)


def _add_check(commands: Any) -> None:
    check = commands.add_parser("check", help="whether a method keeps every law, in one call (tersegrad.testing)")
    check.add_argument("spec", metavar="SPEC", nargs="+", help="compressors or reducers, yours or ours")
    check.set_defaults(run=_check)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="time of encode and accumulate, bytes and error, beside torch.topk and a copy"
    )
    bench.add_argument("spec", metavar="SPEC", nargs="+", help="presets or expressions; all take turns in every round")
    _add_vector_options(bench, "25M")
    bench.add_argument("--threads", type=_count, default=1, help="threads that torch may use (default: 1)")
    bench.add_argument("--rounds", type=_count, default=11, help="rounds of the interleaved run (default: 11)")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write one row per measurement to this file")
    bench.set_defaults(run=_bench)


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="real training over a slow link, one run per spec, kept in a folder")
    train.add_argument(
        "spec", metavar="SPEC", nargs="+", help='specs, "none" (plain DDP), or torch:bf16, torch:topk, ...'
    )
    _add_run_options(train)
    train.add_argument("--bandwidth", help="of every worker's link, e.g. 100Mbit (default: not limited)")
    train.add_argument("--epochs", type=_count, help="passes over the data (default: the workload's own)")
    train.add_argument("--seconds", type=float, help="stop after this much training time")
    train.add_argument("--seeds", type=_seeds, default=(0,), help="comma-separated, one run each (default: 0)")
    train.add_argument(
        "--learning-rate", type=_rate, help="the highest of the run, after its warm-up (default: the workload's own)"
    )
    train.add_argument("--bucket-cap-mb", type=_count, help=_BUCKET_CAP)
    evaluate = train.add_mutually_exclusive_group()
    evaluate.add_argument("--eval-every", type=_count, metavar="STEPS", help="accuracy also every so many steps")
    evaluate.add_argument("--no-eval", action="store_true", help="do not measure accuracy; for timing")
    train.set_defaults(run=_train)


_BUCKET_CAP = "DDP's, in MiB; larger than the model: all gradients in one vector (default: 25)"


def _add_simulate(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate", help="will it hurt my model? N virtual workers in one process, to the bit what real ones compute"
    )
    simulate.add_argument("spec", metavar="SPEC", nargs="+", help='what to compare, "none" (plain) among them')
    simulate.add_argument("--model", metavar="MODULE:FACTORY", help="your own: a function that returns a Training")
    simulate.add_argument("--workload", help="instead of a model: digits, fashion, cifar-resnet20, ...")
    simulate.add_argument("--workers", type=_count, default=4, help="virtual workers (default: 4)")
    length = simulate.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_count, help="of every run")
    length.add_argument("--epochs", type=_count, help="instead of steps, for a workload (default: its own)")
    simulate.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (default: 0)")
    simulate.add_argument("--bandwidth", help="of every worker's link, e.g. 100Mbit, for predicted times")
    simulate.add_argument("--latency", help="one way, e.g. 20ms, for predicted times")
    simulate.add_argument("--compute", help="time of a step without communication, e.g. 250ms (default: as here)")
    simulate.add_argument("--eval-every", type=_count, metavar="STEPS", help="(default: a twentieth of the run)")
    simulate.add_argument("--until", metavar="CONDITION", help="end a run early, e.g. 'accuracy >= 0.9'")
    simulate.add_argument("--bucket-cap-mb", type=_count, help=_BUCKET_CAP)
    simulate.add_argument("--jobs", type=_count, default=1, help="runs at a time (default: 1)")
    simulate.add_argument("--threads", type=_count, default=1, help="threads of every run (default: 1)")
    simulate.add_argument("--processes", type=_count, help="that compute gradients in a run (default: cores / jobs)")
    simulate.add_argument(
        "--snapshot", default="180s", metavar="TIME", help="between two snapshots, from which a killed run goes on"
    )
    simulate.add_argument(
        "--replay", type=Path, metavar="FILE", help="for auto: the .jsonl of its real run, whose decisions it follows"
    )
    simulate.add_argument("--batch", type=_count, help="samples of each worker in a step, of a workload")
    simulate.add_argument("--learning-rate", type=_rate, help="the highest of the run, of a workload")
    simulate.add_argument("--data", type=Path, metavar="DIR", help="folder with the data sets of the workloads")
    simulate.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the runs and the report")
    simulate.set_defaults(run=_simulate)


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="a page with plots and tables out of a folder of runs")
    report.add_argument("folder", type=Path, metavar="DIR", help="what --out of train or map was")
    report.set_defaults(run=_report)


def _add_map(commands: Any) -> None:
    chart = commands.add_parser("map", help="step time over bandwidth and spec: where compression wins, where it loses")
    chart.add_argument("spec", metavar="SPEC", nargs="+", help="specs to compare, at least one dense among them")
    _add_run_options(chart)
    chart.add_argument("--bandwidths", default="10Mbit,100Mbit,1Gbit,10Gbit", help="comma-separated rates")
    chart.set_defaults(run=_map)


def _add_plan(commands: Any) -> None:
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


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small real model over an emulated slow link, plain and compressed")
    demo.add_argument("spec", metavar="SPEC", nargs="*", help="what to compare (default: one of each kind)")
    demo.add_argument("--workers", type=_count, default=4, help="worker processes (default: 4)")
    demo.add_argument("--bandwidth", default="100Mbit", help="of the emulated link (default: 100Mbit)")
    demo.add_argument("--latency", default="0.2ms", help="of the emulated link, one way (default: 0.2ms)")
    demo.add_argument("--epochs", type=_count, help="passes over the data per spec (default: the workload's own)")
    demo.add_argument("--out", type=Path, default=Path("demo-results"), help="folder for the picture and the numbers")
    demo.set_defaults(run=_demo)


def _add_warm(commands: Any) -> None:
    warm = commands.add_parser("warm", help="compile what specs need now, e.g. while an image is built")
    warm.add_argument("spec", metavar="SPEC", nargs="+", help="presets or expressions")
    warm.set_defaults(run=_warm)


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
    command.add_argument(
        "--shape",
        type=_shape,
        help="of the tensor, e.g. 256x256x3x3, for methods that see shapes (default: 3x3 filters)",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the vector (default: 0)")
    command.add_argument(
        "--gradient", type=Path, metavar="FILE", help="use this gradient instead: .pt, .npy or .npz (see --key)"
    )
    command.add_argument("--key", help="which array of an .npz or which entry of a .pt dict (default: the first)")


def _shape(text: str) -> tuple[int, ...]:
    """Lengths, as 256x256x3x3."""
    parts = text.split("x")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape. Write it like 4096 or 256x256x3x3.")
    return tuple(map(int, parts))


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


# ---- bench --------------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> int:
    from tersegrad.cli import bench
    from tersegrad.lab import timing

    torch.set_num_threads(args.threads)
    x, gradients = inspect.vector_of(args)
    results, baselines = bench.run(args.spec, x, args.rounds, gradients)
    print(bench.show(results, baselines, x.numel(), gradients))
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

    own = ("bandwidth", "epochs", "seconds", "seeds", "eval_every", "learning_rate", "bucket_cap_mb")
    more = {key: getattr(args, key) for key in own}
    return train.train(_plan(args, **more, evaluate=not args.no_eval), Console())


def _simulate(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tersegrad.lab import simulate

    return simulate.run(simulate.from_arguments(args), Console())


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
    print(command.run(command.Request(tuple(args.spec), workers=workers, picture=args.picture, **asked), _draw_curves))
    return 0


def _draw_curves(*args: Any) -> None:
    from tersegrad.lab import curves  # needs matplotlib

    curves.draw(*args)


# ---- demo ----------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from tersegrad.lab import demo

    return demo.run(args.spec, args.workers, args.bandwidth, args.latency, args.epochs, args.out)


def _warm(args: argparse.Namespace) -> int:
    from tersegrad.cli import warm

    return warm.run(args)
