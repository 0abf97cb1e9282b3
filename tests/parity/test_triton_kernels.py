"""The Triton kernels: their cases in the interpreter, compilation for sm_90, and the dispatch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rose.kernels import dispatch, norm
from rose.kernels.dispatch import KERNELS, find_kernel
from rose.kernels.triton import activation, embedding, heads, pooling
from rose.kernels.triton import norm as norm_kernels

ROOT = Path(__file__).parents[2]
CASES = "tests/parity/triton_cases.py"
Errors = dict[str, dict[str, float]]  # operation -> dtype -> largest relative error


def run_pytest(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of their own, with the interpreter in place of a GPU."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    unused = ("cacheprovider", "schemathesis", "langsmith_plugin", "anyio")  # slow to import
    options = [word for name in unused for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *options, *args]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Run all cases; returns the largest errors. Fails here if a case does."""
    report = tmp_path_factory.mktemp("triton") / "errors.json"
    done = run_pytest(CASES, ROSE_ERRORS_FILE=str(report))
    assert done.returncode == 0, done.stdout[-3000:]
    found: Errors = json.loads(report.read_text())
    return found


# Largest error relative to the largest value of a result; the table in docs/design.md.
BOUNDS = {"float32": 1e-6, "bfloat16": 3e-2, "float16": 1e-3}


@pytest.mark.parametrize("operation", sorted(KERNELS["cuda"]))
def test_interpreted_kernel_equals_torch(errors: Errors, operation: str):
    assert errors[operation].keys() >= BOUNDS.keys()
    for dtype, bound in BOUNDS.items():
        assert errors[operation][dtype] <= bound, (operation, dtype)


POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
# Arguments that are no pointers to the kernel's own dtype.
OTHER_ARGUMENTS = {
    **dict.fromkeys(("num_rows", "num_tokens", "width", "C", "D"), "i32"),
    **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32"),
    **dict.fromkeys(("eps", "offset"), "fp32"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("ids", "positions", "types", "slots"), "*i64"),
    **dict.fromkeys(("cu_seqlens", "starts"), "*i32"),
}
QWEN3 = {"H": 16, "K": 8, "D": 128, "R": 128, "BLOCK_H": 8, "BLOCK_R": 64, "BLOCK_D": 1}
COMPILED = [
    (norm_kernels.rms_norm_kernel, {"C": 1024, "ADD": True, "OFFSET": False}),
    (norm_kernels.rms_norm_kernel, {"C": 100, "ADD": False, "OFFSET": True}),
    (norm_kernels.layer_norm_kernel, {"C": 384, "ADD": True, "KEEP": False, "BIAS": True}),
    (norm_kernels.layer_norm_kernel, {"C": 2560, "ADD": True, "KEEP": True, "BIAS": False}),
    (embedding.embed_kernel, {"C": 384, "TYPES": True, "BIAS": True}),
    (embedding.embed_kernel, {"C": 1000, "TYPES": False, "BIAS": False}),
    (heads.heads_kernel, QWEN3 | {"NORM": True, "OFFSET": False, "STORE": True}),
    (heads.heads_kernel, QWEN3 | {"NORM": False, "OFFSET": False, "STORE": False}),
    (heads.heads_kernel, QWEN3 | {"NORM": True, "OFFSET": True, "STORE": False, "R": 32, "BLOCK_R": 16, "BLOCK_D": 128}),
    (heads.store_kernel, {"SIZE": 1024}),
    *((activation.gated_kernel, {"KIND": kind, "BLOCK_I": 1024}) for kind in ("silu", "gelu", "gelu_tanh")),
    *((pooling.pool_kernel, {"MODE": mode, "STARTS": True}) for mode in pooling.MODES),
]  # fmt: skip


def blocks_of(kernel: triton.JITFunction, constants: dict[str, object]) -> dict[str, object]:
    """Block sizes as the launchers choose them, where the constants do not say."""
    names, chosen = kernel.arg_names, dict(constants)
    if "BLOCK_C" in names and "C" in constants:
        from rose.kernels.triton.launch import row_blocks

        rows, channels, _ = row_blocks(constants["C"])
        chosen |= {"BLOCK_T": rows, "BLOCK_C": channels}
    elif "BLOCK_C" in names:
        chosen |= {"BLOCK_T": pooling.BLOCK_T, "BLOCK_C": pooling.BLOCK_C}
    if "BLOCK_V" in names:
        chosen["BLOCK_V"] = heads.BLOCK_V
    return chosen


def compile_for_hopper(
    kernel: triton.JITFunction, constants: dict[str, object], pointer: str, **fixed: str
) -> bytes:
    chosen = blocks_of(kernel, constants)
    kinds = OTHER_ARGUMENTS | fixed
    signature = {
        name: "constexpr" if name in chosen else kinds.get(name, pointer)
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4}).asm["cubin"]


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", POINTERS)
def test_compiles_for_hopper(dtype: str):
    for kernel, constants in COMPILED if dtype == "bfloat16" else COMPILED[::3]:
        fixed = {"out": "*fp32"} if kernel is pooling.pool_kernel else {}
        assert compile_for_hopper(kernel, constants, POINTERS[dtype], **fixed)
    if dtype == "float32":
        constants = {"D": 1000, "BLOCK_D": 1024}
        assert compile_for_hopper(pooling.normalize_kernel, constants, "*fp32")


def test_every_kernel_is_compiled_here():
    compiled = {kernel.fn.__name__ for kernel, _ in COMPILED} | {"normalize_kernel"}
    written = {
        name
        for module in (norm_kernels, embedding, heads, activation, pooling)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    assert compiled == written


def test_a_device_without_kernels_computes_by_torch():
    assert find_kernel("rms_norm", "meta") is None
    assert norm.rms_norm(torch.empty(3, 8, device="meta"), torch.empty(8), 1e-6).shape == (3, 8)


def test_the_switch_chooses(monkeypatch: pytest.MonkeyPatch):
    assert find_kernel("rms_norm", "cuda") is norm_kernels.rms_norm
    monkeypatch.setenv(dispatch.SWITCH, "torch")
    assert find_kernel("rms_norm", "cuda") is None
    monkeypatch.setenv(dispatch.SWITCH, "triton")
    assert find_kernel("rms_norm", "cpu") is norm_kernels.rms_norm
    assert find_kernel("no such operation", "cpu") is None
    monkeypatch.setenv(dispatch.SWITCH, "cuda")
    with pytest.raises(
        ValueError, match=r"ROSE_KERNELS='cuda' is unknown\. Known: auto, torch, triton"
    ):
        find_kernel("rms_norm", "cpu")


def test_a_kernel_that_declines_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def decline(x: torch.Tensor, name: str) -> None:
        calls.append(name)

    monkeypatch.setattr(dispatch, "find_kernel", lambda *_: decline)

    @dispatch.operation
    def doubled(x: torch.Tensor, name: str) -> torch.Tensor:
        """Say so."""
        return 2 * x

    assert doubled.__doc__ == "Say so."
    assert doubled(torch.ones(2), "a").tolist() == [2, 2]
    assert calls == ["a"]


def test_every_entry_names_a_kernel():
    for name in KERNELS["cuda"]:
        assert callable(find_kernel(name, "cuda"))


MODELS = (
    "tests/parity/test_encoders.py::test_ragged_batched_and_single[bert]",
    "tests/parity/test_decoders.py::test_ragged_batched_and_single[qwen3]",
)


def test_models_equal_transformers_with_interpreted_kernels():
    done = run_pytest(*MODELS, ROSE_KERNELS="triton")
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(MODELS)} passed" in done.stdout
