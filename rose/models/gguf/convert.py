"""Write a Hugging Face folder from a GGUF file, one tensor at a time."""

import json
import math
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rose.models.errors import ConvertError
from rose.models.gguf.config import build_config, check_architecture
from rose.models.gguf.dimensions import read_dimensions
from rose.models.gguf.families import FAMILIES
from rose.models.gguf.reader import GgufFile
from rose.models.gguf.tensors import TensorPlan, bias_flags, is_tied, plan_tensors
from rose.models.gguf.tokenizer import eos_token_ids, special_ids, write_tokenizer

Progress = Callable[[int, int, str], None]

_DTYPES = {
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "float32": (torch.float32, "F32"),
}
_BLOCK_ELEMENTS = 1 << 22
_POOLING = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}  # gguf.PoolingType


def convert_gguf(
    source: Path,
    out: Path,
    dtype: str = "bfloat16",
    progress: Progress | None = None,
    *,
    tokenizer_from: Path | None = None,
) -> None:
    """Turn a GGUF file into a folder that ROSE and transformers can load.

    The folder appears under its name only when it is complete.

    Args:
        source: a GGUF file of one of `families.FAMILIES`, quantised or not.
        out: the folder to make; it must not exist yet.
        dtype: "bfloat16", "float16" or "float32": the type of the weights to write.
        progress: called as (tensors written, tensors in all, name of the tensor) along the way.
        tokenizer_from: a folder whose tokenizer is used instead of the file's own vocabulary;
            needed where that is not byte-level BPE.

    Raises:
        ConvertError: the file is not a GGUF, is damaged, or holds something that cannot be
            converted faithfully; or `out` exists. The message names the file.
        ImportError: the package gguf is not installed.
    """
    if dtype not in _DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if out.exists():
        raise ConvertError(f"{out}: exists already")
    gguf = GgufFile(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    unfinished.mkdir()
    try:
        _fill_folder(gguf, unfinished, dtype, progress, tokenizer_from)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _fill_folder(
    gguf: GgufFile, out: Path, dtype: str, progress: Progress | None, tokenizer_from: Path | None
) -> None:
    check_architecture(gguf)
    dims, tied = read_dimensions(gguf), is_tied(gguf)
    plans = plan_tensors(gguf, dims, tied=tied)
    config = build_config(gguf, dims, tied=tied, biases=bias_flags(gguf), dtype=dtype)
    write_tokenizer(gguf, out, tokenizer_from)
    _write_json(out / "config.json", config | _special_tokens(gguf))
    if not FAMILIES[gguf.architecture].is_encoder:
        _write_json(out / "generation_config.json", _special_tokens(gguf))
    _write_pooling(gguf, out, dims.hidden)
    _write_weights(gguf, plans, out / "model.safetensors", dtype, progress)


def _special_tokens(gguf: GgufFile) -> dict[str, Any]:
    ids = special_ids(gguf)
    tokens: dict[str, Any] = {
        f"{name}_id": ids[name] for name in ("bos_token", "pad_token") if name in ids
    }
    if ends := eos_token_ids(gguf):
        tokens["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return tokens


def _write_pooling(gguf: GgufFile, out: Path, hidden: int) -> None:
    """Write the module files of an embedder, if the file says that it is one.

    llama.cpp normalises the vectors of every such model, so this does too.
    """
    kind = gguf.get(gguf.own("pooling_type"), int, 0)
    if kind == 0:
        return
    if kind not in _POOLING:
        raise gguf.error(f"pooling type {kind} is not supported")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    classes = "sentence_transformers.models"
    _write_json(
        out / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"{classes}.{name}"}
            for i, (path, name) in enumerate(modules)
        ],
    )
    (out / "1_Pooling").mkdir()
    pooling = {f"pooling_mode_{name}": number == kind for number, name in _POOLING.items()}
    _write_json(
        out / "1_Pooling" / "config.json",
        {"word_embedding_dimension": hidden, "include_prompt": True} | pooling,
    )


def _write_weights(
    gguf: GgufFile, plans: list[TensorPlan], path: Path, dtype: str, progress: Progress | None
) -> None:
    """Write a safetensors file. Its header comes first, so each tensor can go straight to disk."""
    with path.open("wb") as file:
        _write_header(file, plans, dtype)
        for done, plan in enumerate(plans):
            if progress is not None:
                progress(done, len(plans), plan.target)
            _write_tensor(gguf, plan, file, _DTYPES[dtype][0])
    if progress is not None:
        progress(len(plans), len(plans), path.name)


def _write_header(file: BinaryIO, plans: list[TensorPlan], dtype: str) -> None:
    torch_dtype, name = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in plans:
        end = start + math.prod(plan.shape) * torch_dtype.itemsize
        header[plan.target] = {"dtype": name, "shape": plan.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(gguf: GgufFile, plan: TensorPlan, file: BinaryIO, dtype: torch.dtype) -> None:
    values = torch.from_numpy(np.ascontiguousarray(plan.change(gguf.read(plan.source, plan.index))))
    for block in values.flatten().split(_BLOCK_ELEMENTS):
        converted = block.to(dtype)
        if not torch.isfinite(converted).all():
            raise gguf.error(f"tensor {plan.source!r} holds values too large for {dtype}")
        file.write(converted.view(torch.uint8).numpy().data)


def _write_json(path: Path, content: dict[str, Any] | list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
