"""Each model in the form that a peer reads, with the same weights.

`CONVERSIONS` says what is made where. Run as `python -m tools.peers.conversions KIND SOURCE
TARGET`, by the interpreter of an environment that has the converters, the module makes one.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.peers.environments import Home

MAX_LEN = 512
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Conversion:
    """A model in another form: who makes it, of what, by which function."""

    environment: str | None
    source: str
    kind: str


# By the name of the folder or file that is made. The sources "embedder" and "llm" are the
# checkpoints; other sources are made by conversions above.
CONVERSIONS = {
    "minilm": Conversion(None, "embedder", "long"),
    "minilm-onnx": Conversion("onnx", "minilm", "onnx"),
    "minilm-onnx-o2": Conversion("onnx", "minilm-onnx", "fused"),
    "minilm-ct2": Conversion("onnx", "minilm", "ct2"),
    "minilm-f32.gguf": Conversion("onnx", "minilm", "gguf"),
    "infinity-onnx": Conversion(None, "minilm", "infinity"),
    "smollm2-ct2": Conversion("onnx", "llm", "ct2"),
    "smollm2-f32.gguf": Conversion("onnx", "llm", "gguf"),
    "smollm2-bf16.gguf": Conversion("onnx", "llm", "gguf"),
    "smollm2-q8_0.gguf": Conversion("llama", "smollm2-bf16.gguf", "rounded-gguf"),
    "smollm2-q4_1.gguf": Conversion("llama", "smollm2-bf16.gguf", "rounded-gguf"),
    "smollm2-openvino": Conversion("openvino", "llm", "openvino"),
    "smollm2-openvino-int8": Conversion("openvino", "llm", "openvino"),
}
NEEDS = {"minilm-onnx-o2": ("minilm-onnx",), "infinity-onnx": ("minilm-onnx",)}


def make(home: "Home", target: str, checkpoints: dict[str, Path]) -> None:
    """Make a converted model, and what it is made of, unless it is there.

    Raises:
        InstallError: a converter is not to be had, or it failed.
    """
    conversion = CONVERSIONS[target]
    path = home.models / target
    if path.exists():
        return
    for name in (conversion.source, *NEEDS.get(target, ())):
        if name not in checkpoints:
            make(home, name, checkpoints)
    if conversion.environment:
        home.install(conversion.environment)
    if conversion.kind == "gguf":
        home.install("llama")
    source = checkpoints.get(conversion.source, home.models / conversion.source)
    half = path.with_name("half-made-" + path.name)
    _remove(half)
    command = [str(home.python(conversion.environment)), "-m", "tools.peers.conversions"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    home.models.mkdir(parents=True, exist_ok=True)
    words = [conversion.kind, str(source.resolve()), str(half), str(home.llama_source)]
    home.run(f"convert-{target}", [*command, *words], variables)
    half.rename(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _long(source: Path, target: Path) -> None:
    """The checkpoint itself, for texts of 512 tokens, which its model takes."""
    shutil.copytree(source, target)
    settings = target / "sentence_bert_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_seq_length": MAX_LEN}))


def _onnx(source: Path, target: Path) -> None:
    from optimum.onnxruntime import ORTModelForFeatureExtraction

    ORTModelForFeatureExtraction.from_pretrained(source, export=True).save_pretrained(target)
    shutil.copy(source / "tokenizer.json", target)


def _fused(source: Path, target: Path) -> None:
    """Attention, gelu and layer norms of an exported graph fused, all in float32."""
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import OptimizationConfig

    level = OptimizationConfig(optimization_level=2, enable_gelu_approximation=False)
    ORTOptimizer.from_pretrained(source).optimize(level, save_dir=target)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        # as they are in the checkpoint: an exported graph comes with another limit of tokens
        shutil.copy(source.parent / "minilm" / name, target)


def _infinity(source: Path, target: Path) -> None:
    """A checkpoint with an exported graph beside its weights, where infinity looks for it."""
    shutil.copytree(source, target)
    (target / "onnx").mkdir()
    shutil.copy(target.parent / "minilm-onnx" / "model.onnx", target / "onnx" / "model.onnx")


def _ct2(source: Path, target: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(target), quantization="float32")


def _openvino(source: Path, target: Path) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(
        source, export=True, load_in_8bit="int8" in target.name, compile=False
    )
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(target)
    both = convert_tokenizer(tokenizer, with_detokenizer=True)
    for part, name in zip(both, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(part, str(target / f"openvino_{name}.xml"))


def _gguf(source: Path, target: Path) -> None:
    """By llama.cpp's own script, whose packages come with its source."""
    vendored = Path(sys.argv[4]) / "vendor" / "llama.cpp"
    os.environ["PYTHONPATH"] = str(vendored / "gguf-py")
    kind = "bf16" if "bf16" in target.name else "f32"
    script = str(vendored / "convert_hf_to_gguf.py")
    os.execv(
        sys.executable,
        [sys.executable, script, str(source), "--outtype", kind, "--outfile", str(target)],
    )


def _rounded_gguf(source: Path, target: Path) -> None:
    """By llama.cpp's library, through its Python binding, which comes with its source."""
    llama = Path(sys.argv[4])
    os.environ["LLAMA_CPP_LIB_PATH"] = str(llama.parent / "build" / "bin")
    sys.path.insert(0, str(llama))
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    kind = "Q4_1" if "q4_1" in target.name else "Q8_0"
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 1  # blocks for the others that use the machine
    names = str(source).encode(), str(target).encode()
    if llama_cpp.llama_model_quantize(*names, params) != 0:
        raise RuntimeError(f"llama.cpp did not round {source}")


_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "long": _long,
    "onnx": _onnx,
    "fused": _fused,
    "infinity": _infinity,
    "ct2": _ct2,
    "openvino": _openvino,
    "gguf": _gguf,
    "rounded-gguf": _rounded_gguf,
}

if __name__ == "__main__":
    _KINDS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
