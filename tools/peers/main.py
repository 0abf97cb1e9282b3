"""The command line of `tools/bench_peers`."""

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from tools.peers import conversions
from tools.peers.embedders import EMBEDDERS
from tools.peers.environments import Home
from tools.peers.generators import QUANTIZED
from tools.peers.measuring import PEERS, Bench, Outcome
from tools.peers.page import make_report
from tools.peers.plots import draw
from tools.peers.workloads import WORKLOADS, Inputs
from tools.report import MODELS, PAGES, add_output_options, cores

HOME = Path.home() / ".cache" / "rose" / "peers"
QUICK_TURNS = 3


def main(about: str) -> int:
    """Run the tool."""
    options = _options(about)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # engines go with it
    home = Home(options.home.resolve())
    checkpoints = {"embedder": options.embedder, "llm": options.llm}
    home.path.mkdir(parents=True, exist_ok=True)
    inputs = Inputs.draw(options.embedder, options.llm, options.seed)
    inputs.write(home.path / "inputs.json")
    outcomes = stored(home)
    if not options.show:
        outcomes = (outcomes if not options.quick else {}) | measure(
            options, home, checkpoints, inputs
        )
    report = make_report(outcomes, inputs, checkpoints, options.threads)
    if options.write_page:
        PAGES.mkdir(parents=True, exist_ok=True)
        report.notes += draw(outcomes, PAGES)
    return report.finish(options)


def measure(
    options: argparse.Namespace, home: Home, checkpoints: dict[str, Path], inputs: Inputs
) -> dict[str, Outcome]:
    """Run the workloads that are wanted; figures are kept unless they are quick ones."""
    console = Console(stderr=True)
    conversions.make(home, "minilm", checkpoints)
    outcomes = {}
    with console.status("peers") as status:
        bench = Bench(
            home=home,
            checkpoints=checkpoints,
            inputs=inputs,
            names=chosen(options.peers),
            threads=options.threads,
            turns=min(options.turns, QUICK_TURNS) if options.quick else options.turns,
            limit_s=options.time_limit,
            say=status.update,
        )
        for name in options.workloads:
            workload = WORKLOADS[name].quick() if options.quick else WORKLOADS[name]
            outcome = Outcome(name, time.strftime("%Y-%m-%d"), options.threads)
            try:
                bench.run(workload, outcome)
            finally:
                for engine, reason in outcome.measured.failed.items():
                    console.print(f"{name}: {engine} is left out: {reason}", markup=False)
                if outcome.measured.rows and not options.quick:
                    outcome.write(home.path / "results" / f"{name}.json")
            outcomes[name] = outcome
    return outcomes


def chosen(names: list[str]) -> list[str]:
    """The engines to run: ROSE, and ROSE in the ways that peers are compared with."""
    text = any(name in EMBEDDERS and EMBEDDERS[name].reads == "text" for name in names)
    widths = {QUANTIZED[name].width: None for name in names if name in QUANTIZED}
    own = ["ROSE", *(["ROSE, from text"] if text else []), *(f"ROSE, {w}" for w in widths)]
    return [*own, *names]


def stored(home: Home) -> dict[str, Outcome]:
    """What was measured before, in the order of the workloads."""
    paths = {name: home.path / "results" / f"{name}.json" for name in WORKLOADS}
    return {name: Outcome.read(path) for name, path in paths.items() if path.exists()}


def _options(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, works = list(PEERS), list(WORKLOADS)
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="PEER",
                        help=f"of: {', '.join(map(repr, names))} (default: all)")  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=works, default=works, metavar="WORKLOAD",
                        help=f"of: {', '.join(works)} (default: all)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=7, help="of each row (default 7)")
    parser.add_argument(
        "--time-limit", type=float, default=1800, metavar="SECONDS",
        help="for the turns of a workload, beyond three of each row (default 1800)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few turns of the least costly rows")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is kept")
    parser.add_argument("--threads", type=int, default=min(2, cores()), help="of each (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="other texts and prompts (default 0)")
    parser.add_argument("--home", type=Path, default=HOME, help=f"folder (default {HOME})")
    parser.add_argument("--embedder", type=Path, default=MODELS / "all-MiniLM-L6-v2")
    parser.add_argument("--llm", type=Path, default=MODELS / "SmolLM2-135M-Instruct")
    add_output_options(parser)
    return parser.parse_args()
