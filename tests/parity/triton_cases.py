"""The Triton kernels against their torch versions over a grid of shapes and dtypes.

`test_triton_kernels` runs this file in a process of its own, in Triton's interpreter: that has to be
chosen before Triton is imported. On a machine with a GPU it runs as it is, with compiled kernels:

    python -m pytest tests/parity/triton_cases.py
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rose.kernels import activation, embedding, epilogue, heads, kv_store, norm
from rose.kernels.dispatch import KERNELS, Operation, find_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (
        norm.rms_norm,
        norm.add_rms_norm,
        norm.layer_norm,
        norm.add_layer_norm,
        norm.add_layer_norm_with_sum,
        activation.gated,
        heads.norm_and_rotate,
        heads.norm_rotate_and_store,
        kv_store.store_kv,
        embedding.embed_and_norm,
        epilogue.pool_and_finish,
    )
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Error in units of the dtype's last place at the largest value of a result. The interpreter truncates
# where it stores bfloat16, at every rounding of the torch version.
UNITS = {torch.float32: 24, torch.float16: 4, torch.bfloat16: 6 if INTERPRETED else 3}
ROWS_AND_CHANNELS = [(1, 1), (3, 7), (17, 100), (5, 384), (33, 64), (2, 1000), (2, 2560)]
STRICT = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # sigmoid of -100


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype)[6:])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def check() -> Iterator["Checker"]:
    """The checker of all cases. ROSE_ERRORS_FILE names a file for the largest errors.

    Every process that runs cases adds a line to it.
    """
    checker = Checker()
    yield checker
    if path := os.environ.get("ROSE_ERRORS_FILE"):
        with Path(path).open("a") as file:
            file.write(json.dumps(checker.errors) + "\n")


class Checker:
    """Runs an operation both ways, and notes the largest error of each dtype."""

    def __init__(self) -> None:
        self.errors: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, *args: object, units: int | None = None, **more: object) -> None:
        operation = OPERATIONS[name]
        kernel = find_kernel(name, "cuda")
        assert kernel is not None
        ours = [move(arg) for arg in args]
        actual, expected = kernel(*ours, **more), operation.reference(*args, **more)
        assert actual is not None, "the kernel declined"
        inputs = next(arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        for one, wanted in zip(as_tuple(actual), as_tuple(expected), strict=True):
            self.compare(name, inputs.dtype, one, wanted, units)

    def compare(
        self, name: str, kind: torch.dtype, actual: Tensor, expected: Tensor, units: int | None
    ) -> None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        if not actual.numel():
            return
        error = (actual.cpu().double() - expected.double()).abs().max().item()
        error /= max(1.0, expected.double().abs().max().item())
        known = self.errors.setdefault(name, {})
        known[str(kind)[6:]] = max(error, known.get(str(kind)[6:], 0.0))
        limit = (units or UNITS[expected.dtype]) * torch.finfo(expected.dtype).eps
        assert error <= limit, f"{name}: {error / limit:.2f} of what is allowed"


def move(arg: object) -> object:
    """Bring an argument to the device; what is written in place is a copy."""
    if isinstance(arg, Tensor):
        same = arg.to(DEVICE)
        return same.clone() if same is arg and arg.is_contiguous() else same
    if isinstance(arg, heads.HeadNorms):
        return heads.HeadNorms(move(arg.q_weight), move(arg.k_weight), *arg[2:])
    return tuple(move(part) for part in arg) if isinstance(arg, tuple) else arg


def as_tuple(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def rand(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1
) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def test_the_table_of_kernels_is_tested_here():
    assert OPERATIONS.keys() == KERNELS["cuda"].keys()


@pytest.mark.parametrize(("rows", "channels"), ROWS_AND_CHANNELS)
def test_rms_norm(check: Checker, dtype: torch.dtype, rows: int, channels: int):
    x, weight = rand(rows, channels, dtype=dtype), rand(channels, dtype=dtype)
    residual = rand(rows, channels, dtype=dtype, seed=1, scale=3)
    for offset in (0.0, 1.0):
        check("rms_norm", x, weight, 1e-6, weight_offset=offset)
        check("add_rms_norm", x, residual, weight, 1e-6, weight_offset=offset)


@pytest.mark.parametrize(("rows", "channels"), ROWS_AND_CHANNELS[1:])
def test_layer_norm(check: Checker, dtype: torch.dtype, rows: int, channels: int):
    x, weight = rand(rows, channels, dtype=dtype, scale=2), rand(channels, dtype=dtype)
    residual = rand(rows, channels, dtype=dtype, seed=1)
    for bias in (None, rand(channels, dtype=dtype, seed=2)):
        check("layer_norm", x, weight, bias, 1e-12)
        check("add_layer_norm", x, residual, weight, bias, 1e-5)
        check("add_layer_norm_with_sum", x, residual, weight, bias, 1e-5)


def test_norms_take_other_shapes(check: Checker, dtype: torch.dtype):
    x = rand(3, 4, 40, dtype=dtype)
    check("rms_norm", x, rand(40, dtype=dtype), 1e-6)
    fused = rand(5, 60, dtype=dtype)
    check("rms_norm", fused[:, 10:50], rand(40, dtype=dtype), 1e-6)
    check("layer_norm", fused[:, 10:50], rand(40, dtype=dtype), None, 1e-6)
    for empty in (rand(0, 40, dtype=dtype),):
        check("rms_norm", empty, rand(40, dtype=dtype), 1e-6)
        check("add_layer_norm", empty, empty, rand(40, dtype=dtype), None, 1e-6)


def test_norm_of_large_and_small_numbers(check: Checker):
    for scale in (1e-12, 1e-3, 1e12):
        x = rand(3, 100, scale=scale)
        check("rms_norm", x, torch.ones(100), 1e-6)
        check("layer_norm", x, torch.ones(100), None, 1e-12)


# Of those that the kernel computes, one name each.
GATED = ["gelu", "gelu_pytorch_tanh", "identity", "quick_gelu", "relu", "sigmoid", "silu", "tanh"]


@STRICT
@pytest.mark.parametrize("name", GATED)
def test_gated(check: Checker, dtype: torch.dtype, name: str):
    units = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 24}[
        dtype
    ]  # torch rounds between
    for rows, width in ((3, 1), (2, 77), (1, 1500)):
        x = rand(rows, 2 * width, dtype=dtype, scale=3)
        check("gated", x, name, units=units)
    edges = torch.tensor([[-100.0, -1e-3, 0.0, 1e-3, 50.0, 2.0] * 2], dtype=dtype)
    check("gated", edges, name, units=units)


HEADS = [(1, 1, 2, 2), (6, 2, 20, 12), (4, 4, 32, 32), (16, 8, 128, 128), (9, 3, 80, 20)]


@pytest.mark.parametrize(("heads_", "kv_heads", "dim", "rotary"), HEADS)
@pytest.mark.parametrize("kind", ["plain", "norm", "norm+1"])
def test_heads(check: Checker, dtype: torch.dtype, heads_, kv_heads, dim, rotary, kind: str):
    fused = rand(3, heads_ + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = fused.split([heads_, kv_heads, kv_heads], dim=1)
    angle = rand(3, rotary // 2, scale=10).repeat(1, 2)
    rotation = (angle.cos(), angle.sin())
    norms = None
    if kind != "plain":
        weights = [rand(dim, dtype=dtype, seed=seed) for seed in (1, 2)]
        norms = heads.HeadNorms(*weights, 1e-6, float(kind == "norm+1"))
    check("norm_and_rotate", q, k, rotation, norms)
    keys, values = (torch.zeros(4, 3, kv_heads, dim, dtype=dtype) for _ in range(2))
    slots = torch.tensor([7, 3, 11])
    check("norm_rotate_and_store", q, k, v, rotation, norms, keys, values, slots)
    check("store_kv", k, v, keys.zero_(), values.zero_(), slots)


def test_keys_and_values_land_in_their_slots(dtype: torch.dtype):
    q, k, v = (rand(3, n, 16, dtype=dtype) for n in (4, 2, 2))
    angle = torch.zeros(3, 16)
    keys, values = (torch.zeros(3, 4, 2, 16, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.tensor([9, 4, 6], device=DEVICE)
    kernel = find_kernel("norm_rotate_and_store", "cuda")
    assert kernel is not None
    rotation = move((angle.cos(), angle.sin()))
    kernel(*map(move, (q, k, v)), rotation, None, keys, values, slots)
    for pages, new in ((keys, k), (values, v)):
        flat = pages.flatten(0, 1).cpu()
        assert torch.equal(flat[slots.cpu()], new)
        assert int(flat.any(-1).any(-1).sum()) == 3


@pytest.mark.parametrize("channels", [5, 384, 768])
@pytest.mark.parametrize("typed", [False, True])
def test_embed_and_norm(check: Checker, dtype: torch.dtype, channels: int, typed: bool):
    tables = [rand(n, channels, dtype=dtype, seed=n) for n in (50, 20, 2)]
    ids, places = torch.tensor([3, 49, 0, 7, 7]), torch.tensor([0, 1, 2, 19, 0])
    types = torch.tensor([0, 1, 1, 0, 1]) if typed else None
    weight, bias = rand(channels, dtype=dtype), rand(channels, dtype=dtype, seed=1)
    check("embed_and_norm", ids, places, types, *tables, weight, bias, 1e-12)
    check("embed_and_norm", ids, places, types, *tables, weight, None, 1e-5)


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len", "cls", "last"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pool_and_finish(check: Checker, dtype: torch.dtype, mode: str, normalize: bool):
    cu_seqlens = torch.tensor([0, 1, 1, 40, 47], dtype=torch.int32)
    x = rand(47, 100, dtype=dtype)
    starts = torch.tensor([0, 0, 38, 7], dtype=torch.int32)
    check("pool_and_finish", x, cu_seqlens, None, mode, 100, normalize)
    check("pool_and_finish", x, cu_seqlens, starts, mode, 63, normalize)


def test_normalisation_keeps_zeros_and_shows_nan():
    kernel = find_kernel("pool_and_finish", "cuda")
    assert kernel is not None
    x = torch.tensor([[0.0, 0.0], [3e38, 3e38], [1e-38, 0.0], [torch.nan, 1.0]], device=DEVICE)
    cu_seqlens = torch.arange(5, dtype=torch.int32, device=DEVICE)
    out = kernel(x, cu_seqlens, None, "cls", 2, True).cpu()
    assert out[0].tolist() == [0, 0]
    assert out[1].tolist() == pytest.approx([0.5**0.5] * 2, rel=1e-6)
    assert out[2].tolist() == [1, 0]
    assert out[3].isnan().all()


def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype):
    x, weight = rand(9, 48, dtype=dtype).to(DEVICE), rand(48, dtype=dtype).to(DEVICE)
    kernel = find_kernel("rms_norm", "cuda")
    assert kernel is not None
    together = kernel(x, weight, 1e-6)
    assert all(torch.equal(kernel(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in range(9))


def test_declines_what_it_does_not_cover():
    x = torch.zeros(2, 4, dtype=torch.float64, device=DEVICE)
    half = torch.ones(4, dtype=torch.float16, device=DEVICE)
    wide = torch.zeros(1, 20000, device=DEVICE)
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)

    def run(name: str, *args: object) -> object:
        kernel = find_kernel(name, "cuda")
        assert kernel is not None
        return kernel(*args)

    assert run("rms_norm", x, x[0], 1e-6) is None
    assert run("rms_norm", x.float(), half, 1e-6) is None
    assert run("rms_norm", wide, wide[0], 1e-6) is None
    assert run("layer_norm", x, x[0], None, 1e-6) is None
    assert run("gated", x, "silu") is None
    assert run("gated", x.float(), "no such name") is None
    assert run("pool_and_finish", x, cu_seqlens, None, "mean", 4, False) is None
    assert run("pool_and_finish", x.float(), cu_seqlens, None, "max", 4, False) is None
