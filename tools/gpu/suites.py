"""Runs files of tests for a stage and puts their outcome into the report."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tools.gpu.stage import Context

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Path(__file__).with_name("pytest.ini")


def parallel() -> list[str]:
    """Options that spread tests over processes, most of whose time goes into compiling."""
    return ["-n", "8"] if find_spec("xdist") else []


def run_tests(context: Context, *args: str, **environment: str) -> str:
    """Run pytest over `args`; a failure breaks a bound of the report. Returns what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-c", str(SETTINGS), "--rootdir", str(ROOT), *args]
    variables = os.environ | environment
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    found = re.search(r"(\d+) passed", lines[-1])
    name = ", ".join(Path(word).name for word in args if word.startswith("tests/"))
    context.report.check(
        f"tests of {name}", lines[-1].strip("= "), "no failure", done.returncode == 0 and found
    )
    if done.returncode:
        tail = "\n".join([*lines[-40:], *done.stderr.strip().splitlines()[-10:]])
        context.report.notes.append(f"```\n{tail}\n```")
    return done.stdout
