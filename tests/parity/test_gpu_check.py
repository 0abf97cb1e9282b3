"""The GPU check without a GPU: every stage runs, tiny, and what goes wrong shows in the exit code."""

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tools.gpu.names import STAGES
from tools.report import Report

ROOT = Path(__file__).parents[2]
TABLES = (
    "Limits of the machine",
    "Largest error of the kernels",
    "Kernels over",
    "Architectures by torch_sdpa",
    "Architectures by the libraries",
    "Two steps in flight",
    "Attention back ends",
    "Replays of one captured graph",
    "Decoding, qwen3",
    "Latency of one text, minilm",
    "Scoring batches",
    "Throughput, qwen3",
    "Single requests",
)


@pytest.fixture
def tool() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(ROOT / "tools" / "gpu_check"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_dry_run_walks_every_stage(tmp_path):
    page = tmp_path / "page.md"
    command = [
        sys.executable,
        str(ROOT / "tools" / "gpu_check"),
        "--dry-run",
        "--report",
        str(page),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = page.read_text()
    for title in TABLES:
        assert f"**{title}" in text
    for stage in STAGES:
        assert f"stage {stage}" in text
    assert "stand-in" in text
    assert "dry run" in text
    assert "step 0 |" in text


@pytest.mark.parametrize("kept", [True, False])
def test_a_bound_that_a_stage_breaks_breaks_the_check(tool, tmp_path, kept):
    check = {"name": "cosine", "value": "0.9", "bound": "at least 0.999", "kept": kept}
    part = {"checks": [check], "tables": [], "notes": ["a note"]}
    file = tmp_path / "graphs.json"
    file.write_text(json.dumps(part))
    report = Report("gpu_check", "", "")
    tool.add_part("graphs", file, report, "ended")
    assert report.kept is kept
    assert report.notes == ["a note"]


def test_a_stage_that_does_not_end_breaks_the_check(tool, tmp_path):
    report = Report("gpu_check", "", "")
    tool.add_part("graphs", tmp_path / "graphs.json", report, "exit code -11 in 3 s")
    assert not report.kept
    assert report.checks[0].value == "exit code -11 in 3 s"


def test_a_stage_that_is_too_slow_is_stopped(tool, tmp_path):
    report = Report("gpu_check", "", "")
    tool.run_stages(["environment"], tmp_path, report, 0.0, dry=True)
    assert not report.kept
    assert report.checks[0].value.startswith("stopped after")


def test_stages_are_chosen_by_name(tool):
    assert tool.stages(None) == list(STAGES)
    assert tool.stages(["graphs"]) == ["environment", "roofs", "graphs"]
    with pytest.raises(SystemExit, match="no stage 'graph'"):
        tool.stages(["graph"])
