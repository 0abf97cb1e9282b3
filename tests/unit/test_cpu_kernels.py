"""The compiled CPU kernels against float64, and the ways in which they can be missing."""

import ctypes
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.activation import activate
from rose.kernels.cpu import build as cpu_build
from rose.kernels.cpu import library as cpu_library
from rose.kernels.cpu.build import BuildError, best_level, build, cache_folder, find_compiler
from rose.kernels.cpu.gemm import ACTIVATION_NUMBERS, PackedMatrix
from rose.kernels.cpu.library import LEVEL_SWITCH, SWITCH, CpuLibrary, load_library

ROWS = (1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 24, 25, 33, 70)
SIZES = ((1, 1), (7, 5), (33, 70), (64, 32), (130, 97))  # inputs, outputs
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    loaded = load_library()
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_layer(inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, inputs) / inputs**0.5, torch.randn(rows)


def linear_f64(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance


# --- linear layers ---


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_against_float64(library: CpuLibrary, size, biased):
    inputs, outputs = size
    weight, bias = make_layer(inputs, outputs)
    matrix = PackedMatrix(library, weight, bias if biased else None)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert_near(matrix(x), linear_f64(x, weight, bias if biased else None))


@pytest.mark.parametrize("activation", sorted(ACTIVATION_NUMBERS))
@pytest.mark.parametrize("gated", [True, False])
def test_activations_against_float64(library: CpuLibrary, activation, gated):
    inputs, outputs = 19, 37
    weight, bias = make_layer(inputs, 2 * outputs if gated else outputs)
    matrix = PackedMatrix(library, weight, bias, activation=activation, gated=gated)
    for rows in ROWS:
        x = 3 * torch.randn(rows, inputs)
        expected = linear_f64(x, weight, bias)
        if gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = activate(gate, activation) * up
        else:
            expected = activate(expected, activation)
        assert_near(matrix(x), expected, 3e-5)


def test_activations_over_their_range(library: CpuLibrary):
    x = torch.cat([torch.linspace(-20, 20, 40001), torch.linspace(-200, 200, 4001)])
    x = torch.cat([x, torch.logspace(-30, 1, 2000), -torch.logspace(-30, 1, 2000)])[:, None]
    for activation in ACTIVATION_NUMBERS:
        matrix = PackedMatrix(library, torch.ones(1, 1), activation=activation)
        expected = activate(x.double(), activation)
        error = (matrix(x).double() - expected).abs()
        assert (error <= 3e-6 * expected.abs().clamp(min=0.3)).all(), activation


def test_no_rows_and_more_dimensions(library: CpuLibrary):
    weight, bias = make_layer(8, 6)
    matrix = PackedMatrix(library, weight, bias)
    assert matrix(torch.randn(0, 8)).shape == (0, 6)
    x = torch.randn(2, 3, 8)
    assert torch.equal(matrix(x), matrix(x.flatten(0, 1)).view(2, 3, 6))
    wide = torch.randn(5, 20)
    assert torch.equal(matrix(wide[:, 4:12]), matrix(wide[:, 4:12].contiguous()))
    assert torch.equal(matrix(wide[:, :16:2]), matrix(wide[:, :16:2].contiguous()))


def test_rows_do_not_depend_on_each_other(library: CpuLibrary):
    weight, bias = make_layer(300, 130)
    matrix = PackedMatrix(library, weight, bias, activation="gelu")
    x = torch.randn(70, 300)
    together = matrix(x)
    for count in ROWS:
        assert torch.equal(matrix(x[:count]), together[:count])
        assert torch.equal(matrix(x[70 - count :]), together[70 - count :])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(matrix(x), together)
        torch.set_num_threads(4)
        assert torch.equal(matrix(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", sorted(ACTIVATION_NUMBERS))
def test_what_is_not_finite_stays_so_in_its_row(library: CpuLibrary, bad, activation):
    weight, bias = make_layer(33, 20)
    matrix = PackedMatrix(library, weight, bias, activation=activation)
    x = torch.randn(14, 33)
    good = matrix(x)
    x[3, 17] = bad
    out, expected = matrix(x), activate(F.linear(x, weight, bias), activation)
    others = torch.arange(14) != 3
    assert torch.equal(out[others], good[others])
    assert torch.equal(out[3].isfinite(), expected[3].isfinite())
    if bad != bad:
        assert out[3].isnan().all()


def test_rows_of_the_weights(library: CpuLibrary):
    weight, _ = make_layer(37, 70)
    ids = torch.randint(0, 70, (300,))
    assert torch.equal(PackedMatrix(library, weight).rows(ids), weight[ids])


def test_callers_on_many_threads(library: CpuLibrary):
    weight, bias = make_layer(256, 512)
    matrix = PackedMatrix(library, weight, bias)
    x = torch.randn(40, 256)
    expected = matrix(x)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(matrix, [x] * 200))
    assert all(torch.equal(result, expected) for result in results)


def test_a_forked_child_computes_too(library: CpuLibrary):
    code = (
        "import os, torch\n"
        "from rose.kernels.cpu import load_library\n"
        "from rose.kernels.cpu.gemm import PackedMatrix\n"
        "torch.set_num_threads(2)\n"
        "m, x = PackedMatrix(load_library(), torch.ones(512, 512)), torch.ones(64, 512)\n"
        "m(x)\n"
        "pid = os.fork()\n"
        "ok = bool((m(x) == 512).all())\n"
        "if pid == 0: os._exit(0 if ok else 1)\n"
        "assert ok and os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_other_instruction_sets_agree(library: CpuLibrary):
    """AVX2 and AVX-512 make the same fused multiply-adds in the same order."""
    if best_level() != "avx512":
        pytest.skip("this machine has one level of vectors at most")
    weight, bias = make_layer(70, 45)
    x = torch.randn(13, 70)
    narrow = CpuLibrary(build("avx2"))
    for activation in ("identity", "gelu", "silu"):
        expected = PackedMatrix(library, weight, bias, activation=activation)(x)
        out = PackedMatrix(narrow, weight, bias, activation=activation)(x)
        assert torch.equal(out, expected)


# --- the build and its cache ---


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no memory of what was loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(cpu_library, "_loaded", [])
    return tmp_path / "rose"


@pytest.fixture
def tiny(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with sources that take no time to compile."""
    sources = fresh.parent / "src"
    sources.mkdir()
    exported = '__attribute__((visibility("default")))'
    (sources / "tiny.cpp").write_text(f'extern "C" {exported} int answer() {{ return 42; }}\n')
    monkeypatch.setattr(cpu_build, "SOURCES", sources)
    return fresh


def answers(path: Path) -> bool:
    return ctypes.CDLL(str(path)).answer() == 42


def test_a_build_is_kept(library, tiny: Path):
    path = build("generic")
    written = path.stat().st_mtime_ns
    assert path.parent == tiny == cache_folder()
    assert build("generic") == path
    assert path.stat().st_mtime_ns == written
    assert sorted(file.suffix for file in tiny.iterdir()) == [".sha256", ".so"]
    assert answers(path)


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "no digest"])
def test_a_damaged_build_is_made_again(library, tiny: Path, damage: str):
    path = build("generic")
    content = path.read_bytes()
    path.unlink()  # another file: the old one may be loaded
    if damage == "no digest":
        path.write_bytes(content)
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[:5000], "garbage": b"\1" * 9000}[damage])
    assert build("generic") == path
    assert answers(path)


def test_builds_at_once(library, tiny: Path):
    code = (
        "import pathlib, sys\n"
        "from rose.kernels.cpu import build\n"
        "build.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(build.build('generic'))\n"
    )
    command = [sys.executable, "-c", code, str(cpu_build.SOURCES)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert paths == {str(build("generic"))}
    assert answers(Path(paths.pop()))
    assert len(list(tiny.iterdir())) == 2


def test_other_flags_or_sources_are_another_build(library, tiny: Path, monkeypatch):
    paths = {build("generic")}
    monkeypatch.setattr(cpu_build, "FLAGS", [*cpu_build.FLAGS, "-DOTHER"])
    paths.add(build("generic"))
    (cpu_build.SOURCES / "other.h").touch()
    paths.add(build("generic"))
    assert len(paths) == 3


def assert_torch_serves(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    with caplog.at_level(logging.INFO):
        assert load_library() is None
        assert load_library() is None
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert all(word in record.message for word in ("torch ops", *words))


def test_without_a_compiler(fresh: Path, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    assert_torch_serves(caplog, "no C++ compiler", "g++")


def test_with_a_compiler_that_fails(fresh: Path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "false")
    assert_torch_serves(caplog, "false failed")
    assert list(fresh.iterdir()) == []


def test_with_a_cache_that_cannot_be_written(fresh: Path, monkeypatch, caplog):
    fresh.write_text("a file where the folder should be")
    monkeypatch.setenv("CXX", "true")
    assert_torch_serves(caplog, str(fresh), "cannot be written")


def test_with_a_library_that_cannot_be_loaded(fresh: Path, monkeypatch, caplog):
    compiler = fresh.parent / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho nonsense > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    assert_torch_serves(caplog, ".so")


def test_switched_off(fresh: Path, monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, "off")
    with caplog.at_level(logging.INFO):
        assert load_library() is None
    assert not caplog.records
    assert not fresh.exists()


@pytest.mark.parametrize("name", [SWITCH, LEVEL_SWITCH])
def test_unknown_switches(fresh: Path, monkeypatch, name: str):
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"{name}='maybe'"):
        load_library()


def test_the_best_level_needs_its_features(monkeypatch):
    monkeypatch.setattr(cpu_build, "_cpu_features", lambda: {"avx2", "fma", "sse2"})
    assert best_level() == "avx2"
    monkeypatch.setattr(cpu_build, "_cpu_features", lambda: {"avx2", "avx512f"})
    assert best_level() == "generic"
