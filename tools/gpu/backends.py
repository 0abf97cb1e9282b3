"""The attention back ends: which can serve here, why not the others, their tests and times."""

import statistics

import torch

from rose.kernels.attention import BACKENDS
from rose.kernels.attention.base import AttentionBackend, AttentionSpec, RaggedLayout
from tools.gpu.stage import Context
from tools.gpu.suites import parallel, run_tests

LENGTHS = {"32 x 128": (128,) * 32, "8 x 512": (512,) * 8, "1 x 4096": (4096,)}
HEADS = {"16/8 x 128": (16, 8, 128), "12/12 x 32": (12, 12, 32)}


def run(context: Context) -> None:
    """List the back ends, run their tests, and time them without a KV cache."""
    rows = [[name, _standing(name, context)] for name in BACKENDS]
    context.report.table("Attention back ends, 16/8 heads of 128", ["name", "here"], rows)
    few = {"ROSE_FEW_SHAPES": "1"}
    tests = ["tests/parity/test_gpu_backends.py"]
    if context.dry:
        run_tests(context, *tests, "-k", "alternate or decode_steps or test_empty", **few)
    else:
        run_tests(context, *tests, **few)
        tests = ["tests/parity/test_attention_backends.py"]
        run_tests(context, *tests, "-k", "torch_sdpa", *parallel(), ROSE_TEST_DEVICES="cuda")
    _time(context)


def spec_of(heads: int, kv_heads: int, dim: int, *, causal: bool = True) -> AttentionSpec:
    """A layer of one model's shape."""
    return AttentionSpec(0, heads, kv_heads, dim, dim**-0.5, causal)


def _standing(name: str, context: Context) -> str:
    dtype = getattr(torch, context.dtype)
    reasons = BACKENDS.load(name)().unsupported(spec_of(16, 8, 128), dtype, context.device)
    return "; ".join(reasons) or "can serve"


def _time(context: Context) -> None:
    dtype = getattr(torch, context.dtype)
    rows = []
    for shape, (heads, kv_heads, dim) in HEADS.items():
        spec = spec_of(heads, kv_heads, dim, causal=kv_heads != heads)
        for name in BACKENDS:
            backend = BACKENDS.load(name)()
            if not backend.unsupported(spec, dtype, context.device):
                times = [_milliseconds(context, backend, spec, n) for n in LENGTHS.values()]
                rows.append([shape, name, *(f"{t:.3f}" for t in times)])
    columns = ["heads", "back end", *(f"{name} tokens, ms" for name in LENGTHS)]
    context.report.table("One layer of attention without a KV cache", columns, rows)


def _milliseconds(
    context: Context, backend: AttentionBackend, spec: AttentionSpec, lengths: tuple[int, ...]
) -> float:
    if context.dry:
        lengths = tuple(-(-n // 64) for n in lengths[:2])
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths], device=context.device).cumsum(0).int()
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    dtype = getattr(torch, context.dtype)
    q, k, v = (
        torch.randn(tokens, n, spec.head_dim, device=context.device, dtype=dtype) for n in heads
    )
    batch = backend.plan_ragged(RaggedLayout(ends, lengths))
    runs = 2 if context.dry else 20
    return statistics.median(context.milliseconds(lambda: batch.attend(q, k, v, spec), runs))
