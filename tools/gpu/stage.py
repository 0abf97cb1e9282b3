"""Stages of the GPU check. On a GPU each has a process of its own, since a fault of the device ends
all that use it; a dry run has one for all.

    python -m tools.gpu.stage NAME [NAME ...] --folder FOLDER [--dry-run]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch

from tools.gpu.names import STAGES
from tools.report import Report


@dataclass(frozen=True)
class Context:
    """What a stage is told: with `dry` everything is tiny and runs on the CPU."""

    dry: bool
    folder: Path
    report: Report

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> str:
        """Dtype of the models."""
        return "float32" if self.dry else "bfloat16"

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], runs: int) -> list[float]:
        """Time a call, device work included, after three calls that warm up."""
        times = []
        for number in range(runs + 3):
            self.synchronize()
            began = time.perf_counter()
            call()
            self.synchronize()
            if number >= 3:
                times.append(1e3 * (time.perf_counter() - began))
        return times


def percentiles(times: Iterable[float]) -> list[str]:
    """p50, p90, p99 and the largest, as cells of a table."""
    ordered = sorted(times)
    picks = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.9, 0.99)]
    return [f"{x:.2f}" for x in (statistics.median(ordered), *picks, ordered[-1])]


def main() -> int:
    """Run the stages that the command line names; each leaves its part of the report in a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=STAGES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.dry_run:
        torch.set_num_threads(1)  # everything is tiny: threads would only wait for each other
    for name in options.names:
        report = Report("gpu_check", "", "")
        import_module(f"tools.gpu.{name}").run(Context(options.dry_run, options.folder, report))
        part = json.dumps(asdict(report), default=str)
        (options.folder / f"{name}.json").write_text(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
