"""The build of the CPU kernels: its cache, and the ways in which it can be missing."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rose.kernels.cpu import build as cpu_build
from rose.kernels.cpu import library as cpu_library
from rose.kernels.cpu.build import BuildError, best_level, build, cache_folder, find_compiler
from rose.kernels.cpu.library import LEVEL_SWITCH, SWITCH, load_library


@pytest.fixture
def compiler() -> None:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


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


def test_a_build_is_kept(compiler, tiny: Path):
    path = build("generic")
    written = path.stat().st_mtime_ns
    assert path.parent == tiny == cache_folder()
    assert build("generic") == path
    assert path.stat().st_mtime_ns == written
    assert sorted(file.suffix for file in tiny.iterdir()) == [".sha256", ".so"]
    assert answers(path)


def test_without_a_home_folder_torch_serves(fresh: Path, monkeypatch, caplog):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("CXX", "true")
    assert_torch_serves(caplog, "home directory")


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "no digest"])
def test_a_damaged_build_is_made_again(compiler, tiny: Path, damage: str):
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


def test_builds_at_once(compiler, tiny: Path):
    code = (  # the module alone, which takes no torch and so no time
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('build', sys.argv[1])\n"
        "build = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(build)\n"
        "build.SOURCES = pathlib.Path(sys.argv[2])\n"
        "print(build.build('generic'))\n"
    )
    command = [sys.executable, "-c", code, cpu_build.__file__, str(cpu_build.SOURCES)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert paths == {str(build("generic"))}
    assert answers(Path(paths.pop()))
    assert len(list(tiny.iterdir())) == 2


def test_other_flags_or_sources_are_another_build(compiler, tiny: Path, monkeypatch):
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
