"""`python -m cachefs.bench.crowd`: run the simulation and show what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from cachefs.bench.crowd import plot
from cachefs.bench.crowd.outcome import POLICIES, Outcome, Scene, simulate
from cachefs.bench.crowd.policies import Habits

VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    scene = Scene(
        calls=arguments.calls,
        processes=arguments.processes,
        budget=arguments.budget,
        latency=arguments.latency,
        habits=Habits(max_attempts=arguments.attempts),
        seed=arguments.seed,
    )
    outcomes = []
    if not arguments.json:
        print(_HEAD)
    for nodes in arguments.nodes:
        for policy in arguments.policies:
            outcomes.append(simulate(policy, nodes, scene))
            if not arguments.json:
                print(_row(outcomes[-1]), flush=True)
    if arguments.json:
        print(json.dumps(document(scene, outcomes), indent=2))
    return 0 if arguments.plot is None else _save(arguments.plot, scene, outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cachefs.bench.crowd",
        description="Simulate nodes that save to one prefix of a store at the same second.",
    )
    parser.add_argument("--nodes", type=_counts, default=[1, 10, 100, 1000, 2000], metavar="N,N")
    parser.add_argument("--policies", type=_policies, default=list(POLICIES), metavar="NAME,NAME")
    parser.add_argument("--calls", type=_count, default=60, help="parts that each node sends")
    parser.add_argument("--processes", type=_count, default=8, help="that share a node's parts")
    parser.add_argument("--budget", type=float, default=3500.0, help="requests/s of the store")
    parser.add_argument("--latency", type=float, default=0.05, help="mean seconds of an answer")
    parser.add_argument("--attempts", type=_count, default=10, help="max_attempts of boto3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    return parser


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(each) for each in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(POLICIES)}")
    return names


_HEAD = "policy    nodes   drain s  by ideal    503  errors   sent  jain  slowest/fastest  median s"


def _row(o: Outcome) -> str:
    return (
        f"{o.policy:9} {o.nodes:5} {o.drain_seconds:9.2f} {o.drain_by_ideal:9.2f} "
        f"{o.refused_share:6.1%} {o.errors:7} {o.sent_by_needed:6.2f} {o.jain:5.2f} "
        f"{o.slowest_by_fastest:16.2f} {o.median_seconds:9.2f}"
    )


def document(scene: Scene, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The result with stable keys; times in seconds, null for what was never done."""
    results = [
        {k: v if not isinstance(v, float) or isfinite(v) else None for k, v in asdict(o).items()}
        for o in outcomes
    ]
    return {"version": VERSION, "scene": asdict(scene), "results": results}


def _save(path: Path, scene: Scene, outcomes: Sequence[Outcome]) -> int:
    try:
        plot.save(path, scene, outcomes)
    except ImportError:
        print("--plot needs matplotlib: pip install 'cachefs[bench]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--plot: {path}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
