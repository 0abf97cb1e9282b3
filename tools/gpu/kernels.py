"""The Triton kernels: equal to torch over their cases, and how much of the bandwidth they get."""

import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from rose.kernels import activation, embedding, epilogue, heads, norm
from rose.kernels.dispatch import Operation
from tools.gpu import roofs
from tools.gpu.stage import Context
from tools.gpu.suites import parallel, run_tests

TOKENS = 4096
CASES = "tests/parity/triton_cases.py"
FEW = "test_declines or (test_gated and silu)"


def run(context: Context) -> None:
    """Run the cases, then time every kernel beside its torch version."""
    _check(context)
    rows = [_timed(context, name, operation, args) for name, operation, args in _loads(context)]
    columns = ["operation", "torch us", "kernel us", "speed-up", "share of the bandwidth"]
    context.report.table(f"Kernels over {_tokens(context)} tokens", columns, rows)


def _check(context: Context) -> None:
    errors = context.folder / "errors.json"
    environment = {"ROSE_ERRORS_FILE": str(errors)}
    if context.dry:  # in the interpreter, and a few
        run_tests(context, CASES, "-k", FEW, TRITON_INTERPRET="1", **environment)
    else:
        run_tests(context, CASES, *parallel(), **environment)
    if not errors.exists():
        return
    found: dict[str, dict[str, float]] = {}
    for line in errors.read_text().splitlines():  # one of each process
        for name, by_dtype in json.loads(line).items():
            known = found.setdefault(name, {})
            known |= {d: max(error, known.get(d, 0.0)) for d, error in by_dtype.items()}
    dtypes = ("float32", "bfloat16", "float16")
    rows = [
        [name, *(f"{by_dtype.get(dtype, 0.0):.1e}" for dtype in dtypes)]
        for name, by_dtype in sorted(found.items())
    ]
    title = "Largest error of the kernels, relative to the largest value of a result"
    context.report.table(title, ["operation", *dtypes], rows)


def _tokens(context: Context) -> int:
    return 8 if context.dry else TOKENS


Load = tuple[str, Operation, tuple[object, ...]]


def _loads(context: Context) -> list[Load]:
    """Every operation with arguments in the shape of a Qwen3 0.6B, or of MiniLM."""
    tokens, dtype = _tokens(context), getattr(torch, context.dtype)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device, dtype=dtype)

    def ints(limit: int) -> Tensor:
        return torch.arange(tokens, device=context.device) % limit

    q, k = rand(tokens, 16, 128), rand(tokens, 8, 128)
    angle = torch.rand(tokens, 128, device=context.device)
    norms = heads.HeadNorms(rand(128), rand(128), 1e-6)
    cu_seqlens = torch.tensor([0, tokens // 2, tokens], device=context.device, dtype=torch.int32)
    x, y, wide = rand(tokens, 1024), rand(tokens, 1024), rand(tokens, 6144)
    tables = (rand(30522, 384), rand(512, 384), rand(2, 384), rand(384), rand(384))
    embedded = (ints(30000), ints(512), None, *tables, 1e-12)
    return [
        ("add_rms_norm", norm.add_rms_norm, (x, y, rand(1024), 1e-6)),
        ("add_layer_norm", norm.add_layer_norm, (x, y, rand(1024), rand(1024), 1e-12)),
        ("gated", activation.gated, (wide, "silu")),
        ("norm_and_rotate", heads.norm_and_rotate, (q, k, (angle.cos(), angle.sin()), norms)),
        ("embed_and_norm", embedding.embed_and_norm, embedded),
        ("pool_and_finish", epilogue.pool_and_finish, (x, cu_seqlens, None, "mean", 1024, True)),
    ]


def _timed(
    context: Context, name: str, operation: Operation, args: tuple[object, ...]
) -> list[str]:
    runs = 2 if context.dry else 50

    def microseconds(call: Callable[..., object]) -> float:
        return 1e3 * statistics.median(context.milliseconds(lambda: call(*args), runs))

    plain, fused = microseconds(operation.reference), microseconds(operation)
    moved = _bytes(operation(*args)) + sum(map(_bytes, args if name != "embed_and_norm" else ()))
    share = moved / (fused * 1e-6) / roofs.read(context.folder).bytes
    return [name, f"{plain:.0f}", f"{fused:.0f}", f"{plain / fused:.1f}", f"{100 * share:.0f} %"]


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple) else 0
