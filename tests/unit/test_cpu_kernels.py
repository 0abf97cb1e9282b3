"""The compiled CPU kernels against float64 and the torch functions that they stand for."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels import embedding, epilogue, heads, norm
from rose.kernels.activation import activate
from rose.kernels.cpu import memory, ops
from rose.kernels.cpu.build import BuildError, best_level, build, find_compiler
from rose.kernels.cpu.gemm import ACTIVATION_NUMBERS, PackedMatrix, Storage
from rose.kernels.cpu.library import CpuLibrary, load_library, replaced
from rose.kernels.dispatch import KERNELS, find_kernel
from rose.kernels.heads import HeadNorms
from rose.kernels.linear import TorchLinear, make_linear
from rose.kernels.pooling import POOLINGS

ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 14, 16, 25, 26, 27, 33, 70)
SIZES = ((1, 1), (7, 5), (33, 70), (64, 32), (130, 97))  # inputs, outputs
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    loaded = load_library()
    assert loaded is not None
    return loaded


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_layer(inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, inputs) / inputs**0.5, torch.randn(rows)


def linear_f64(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance


# --- linear layers ---


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_against_float64(library: CpuLibrary, size, biased):
    inputs, outputs = size
    weight, bias = make_layer(inputs, outputs)
    matrix = PackedMatrix(library, weight, bias if biased else None)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert_near(matrix(x), linear_f64(x, weight, bias if biased else None))


@pytest.mark.parametrize("activation", sorted(ACTIVATION_NUMBERS))
@pytest.mark.parametrize("gated", [True, False])
def test_activations_against_float64(library: CpuLibrary, activation, gated):
    inputs, outputs = 19, 37
    weight, bias = make_layer(inputs, 2 * outputs if gated else outputs)
    matrix = PackedMatrix(library, weight, bias, activation=activation, gated=gated)
    for rows in ROWS:
        x = 3 * torch.randn(rows, inputs)
        expected = linear_f64(x, weight, bias)
        if gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = activate(gate, activation) * up
        else:
            expected = activate(expected, activation)
        assert_near(matrix(x), expected, 3e-5)


def test_activations_over_their_range(library: CpuLibrary):
    x = torch.cat([torch.linspace(-20, 20, 40001), torch.linspace(-200, 200, 4001)])
    x = torch.cat([x, torch.logspace(-30, 1, 2000), -torch.logspace(-30, 1, 2000)])[:, None]
    for activation in ACTIVATION_NUMBERS:
        matrix = PackedMatrix(library, torch.ones(1, 1), activation=activation)
        expected = activate(x.double(), activation)
        error = (matrix(x).double() - expected).abs()
        assert (error <= 3e-6 * expected.abs().clamp(min=0.3)).all(), activation


def test_no_rows_and_more_dimensions(library: CpuLibrary):
    weight, bias = make_layer(8, 6)
    matrix = PackedMatrix(library, weight, bias)
    assert matrix(torch.randn(0, 8)).shape == (0, 6)
    x = torch.randn(2, 3, 8)
    assert torch.equal(matrix(x), matrix(x.flatten(0, 1)).view(2, 3, 6))
    wide = torch.randn(5, 20)
    assert torch.equal(matrix(wide[:, 4:12]), matrix(wide[:, 4:12].contiguous()))
    assert torch.equal(matrix(wide[:, :16:2]), matrix(wide[:, :16:2].contiguous()))


def test_rows_do_not_depend_on_each_other(library: CpuLibrary):
    weight, bias = make_layer(300, 130)
    matrix = PackedMatrix(library, weight, bias, activation="gelu")
    x = torch.randn(70, 300)
    together = matrix(x)
    for count in ROWS:
        assert torch.equal(matrix(x[:count]), together[:count])
        assert torch.equal(matrix(x[70 - count :]), together[70 - count :])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(matrix(x), together)
        torch.set_num_threads(4)
        assert torch.equal(matrix(x), together)
    finally:
        torch.set_num_threads(threads)


def fitting_halves(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_halves_give_the_same_bits(library: CpuLibrary, size, gated):
    inputs, outputs = size
    weight, bias = make_layer(inputs, 2 * outputs if gated else outputs)
    weight = fitting_halves(weight)
    settings = {"activation": "silu", "gated": gated}
    halves = PackedMatrix(library, weight, bias, **settings)
    floats = PackedMatrix(library, weight, bias, storage=Storage.FLOATS, **settings)
    assert (halves.storage, 2 * halves.nbytes) == (Storage.HALVES, floats.nbytes)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert torch.equal(halves(x), floats(x))
    if not gated:
        ids = torch.randint(0, outputs, (50,))
        assert torch.equal(halves.rows(ids), weight[ids])


def test_what_halves_would_cut_stays_float(library: CpuLibrary):
    weight = fitting_halves(torch.randn(40, 33))
    assert PackedMatrix(library, weight).storage is Storage.HALVES
    weight[39, 32] += 1e-6
    assert PackedMatrix(library, weight).storage is Storage.FLOATS
    weight[39, 32] = -0.0
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    weight[0, :4] = special
    matrix = PackedMatrix(library, weight)
    assert matrix.storage is Storage.HALVES
    out = matrix.rows(torch.tensor([0]))[0, :4]
    assert torch.equal(out.nan_to_num(7.0), special.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", sorted(ACTIVATION_NUMBERS))
def test_what_is_not_finite_stays_so_in_its_row(library: CpuLibrary, bad, activation):
    weight, bias = make_layer(33, 20)
    matrix = PackedMatrix(library, weight, bias, activation=activation)
    x = torch.randn(14, 33)
    good = matrix(x)
    x[3, 17] = bad
    out, expected = matrix(x), activate(F.linear(x, weight, bias), activation)
    others = torch.arange(14) != 3
    assert torch.equal(out[others], good[others])
    assert torch.equal(out[3].isfinite(), expected[3].isfinite())
    if bad != bad:
        assert out[3].isnan().all()


def test_rows_of_the_weights(library: CpuLibrary):
    weight, _ = make_layer(37, 70)
    ids = torch.randint(0, 70, (300,))
    assert torch.equal(PackedMatrix(library, weight).rows(ids), weight[ids])


def test_callers_on_many_threads(library: CpuLibrary):
    weight, bias = make_layer(256, 512)
    matrix = PackedMatrix(library, weight, bias)
    x = torch.randn(40, 256)
    expected = matrix(x)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(matrix, [x] * 200))
    assert all(torch.equal(result, expected) for result in results)


def test_a_forked_child_computes_too(library: CpuLibrary):
    code = (
        "import os, torch\n"
        "from rose.kernels.cpu import load_library\n"
        "from rose.kernels.cpu.gemm import PackedMatrix\n"
        "torch.set_num_threads(2)\n"
        "m, x = PackedMatrix(load_library(), torch.ones(512, 512)), torch.ones(64, 512)\n"
        "m(x)\n"
        "pid = os.fork()\n"
        "ok = bool((m(x) == 512).all())\n"
        "if pid == 0: os._exit(0 if ok else 1)\n"
        "assert ok and os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_other_instruction_sets_agree(library: CpuLibrary):
    """AVX2 and AVX-512 make the same fused multiply-adds in the same order."""
    if not best_level().startswith("avx512"):
        pytest.skip("this machine has one level of vectors at most")
    weight, bias = make_layer(70, 45)
    x = torch.randn(13, 70)
    wide, narrow = CpuLibrary(build("avx512")), CpuLibrary(build("avx2"))
    for activation in ("identity", "gelu", "silu"):
        for storage in (Storage.FLOATS, Storage.HALVES):
            settings = {"activation": activation, "storage": storage}
            expected = PackedMatrix(wide, weight, bias, **settings)(x)
            assert torch.equal(PackedMatrix(narrow, weight, bias, **settings)(x), expected)


# --- operations row by row ---

WIDTHS = (1, 7, 16, 33, 64, 384)


def agree(operation, ours, *args, tolerance: float = 5e-6, **kwargs):
    """Hold a kernel to the torch function that it stands for."""
    expected, out = operation.reference(*args, **kwargs), ours(*args, **kwargs)
    for one, other in zip(
        *((x if isinstance(x, tuple) else (x,)) for x in (out, expected)), strict=True
    ):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * max(1.0, other.abs().max().item())
    return out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms(library: CpuLibrary, width: int, rows: int):
    x, residual = 3 * torch.randn(rows, width) + 1, torch.randn(rows, width)
    weight, bias = torch.randn(width), torch.randn(width)
    for offset in (0.0, 1.0):
        for name, args in (("rms_norm", (x,)), ("add_rms_norm", (x, residual))):
            operation, ours = getattr(norm, name), getattr(ops, name)
            agree(operation, ours, *args, weight, 1e-5, weight_offset=offset)
    for shift in (bias, None):
        agree(norm.layer_norm, ops.layer_norm, x, weight, shift, 1e-5)
        for name in ("add_layer_norm", "add_layer_norm_with_sum"):
            operation, ours = getattr(norm, name), getattr(ops, name)
            agree(operation, ours, x, residual, weight, shift, 1e-5)
    alone = [
        ops.add_layer_norm(x[i : i + 1], residual[i : i + 1], weight, bias, 1e-5)
        for i in range(rows)
    ]
    assert torch.equal(torch.cat(alone), ops.add_layer_norm(x, residual, weight, bias, 1e-5))


@pytest.mark.parametrize(("dim", "rotary"), [(2, 2), (16, 16), (20, 10), (64, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads(library: CpuLibrary, dim: int, rotary: int, normed: bool):
    qkv = torch.randn(13, 8 * dim)  # queries, keys and values are views of one result
    q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split([4 * dim, 2 * dim, 2 * dim], 1))
    angles = torch.randn(13, rotary // 2).repeat(1, 2)
    rotation = (angles.cos(), angles.sin())
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-5, 1.0) if normed else None
    q_out, k_out = agree(heads.norm_and_rotate, ops.norm_and_rotate, q, k, rotation, norms)
    slots = torch.randperm(20)[:13]
    pages = [torch.full((5, 4, 2, dim), torch.nan) for _ in range(4)]
    assert torch.equal(
        ops.norm_rotate_and_store(q, k, v, rotation, norms, pages[0], pages[1], slots), q_out
    )
    assert torch.equal(pages[0].flatten(0, 1)[slots], k_out)
    assert torch.equal(pages[1].flatten(0, 1)[slots], v)
    assert int(pages[0].isnan().sum()) == 7 * 2 * dim
    ops.store_kv(k, v, pages[2], pages[3], slots)
    assert torch.equal(pages[2].flatten(0, 1)[slots], k)
    assert torch.equal(pages[3].flatten(0, 1)[slots], v)


@pytest.mark.parametrize("width", [5, 32, 50])
@pytest.mark.parametrize("typed", [True, False])
def test_embeddings(library: CpuLibrary, width: int, typed: bool):
    tables = [torch.randn(rows, width) for rows in (70, 40, 2)]
    ids, positions, types = (torch.randint(0, len(table), (23,)) for table in tables)
    weight, bias = torch.randn(width), torch.randn(width)
    agree(
        embedding.embed_and_norm,
        ops.embed_and_norm,
        *(ids, positions, types if typed else None),
        *(*tables, weight, bias, 1e-5),
    )


@pytest.mark.parametrize("mode", sorted(POOLINGS))
@pytest.mark.parametrize("lengths", [(5,), (3, 0, 7, 1), (1, 1, 1), (130, 2)], ids=str)
@pytest.mark.parametrize("skipped", [None, 2, 1000])
def test_pooling(library: CpuLibrary, mode: str, lengths: tuple[int, ...], skipped: int | None):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    starts = None if skipped is None else torch.tensor([min(skipped, n) for n in lengths]).int()
    for width, kept in ((16, 16), (17, 9), (33, 33), (64, 20)):
        x = torch.randn(sum(lengths), width)
        args = (x, cu_seqlens, starts, mode, kept, False)
        agree(epilogue.pool_and_finish, ops.pool_and_finish, *args)


def test_pooling_keeps_nan(library: CpuLibrary):
    x, cu_seqlens = torch.randn(6, 20), torch.tensor([0, 3, 6]).int()
    x[1, 4] = torch.nan
    for mode in ("mean", "max"):
        out = ops.pool_and_finish(x, cu_seqlens, None, mode, 20, False)
        assert out is not None
        assert out.isnan().nonzero().tolist() == [[0, 4]]


def test_operations_decline_what_they_do_not_know(library: CpuLibrary):
    x, weight = torch.randn(4, 32), torch.randn(32)
    cu_seqlens = torch.tensor([0, 4]).int()
    assert ops.rms_norm(x.bfloat16(), weight, 1e-5) is None
    assert ops.rms_norm(x.T.contiguous().T, weight, 1e-5) is None
    assert ops.layer_norm(x, weight.double(), None, 1e-5) is None
    assert ops.pool_and_finish(x, cu_seqlens, None, "mean", 32, True) is None
    assert ops.pool_and_finish(x, cu_seqlens.long(), None, "mean", 32, False) is None
    assert ops.pool_and_finish(x[:, :8].contiguous(), cu_seqlens, None, "mean", 8, False) is None
    with replaced(None):
        assert ops.rms_norm(x, weight, 1e-5) is None
        assert ops.layer_norm(x, weight, None, 1e-5) is None


def test_every_operation_of_the_table_has_a_kernel(library: CpuLibrary):
    for name in KERNELS["cpu"]:
        assert find_kernel(name, "cpu") is getattr(ops, name)


# --- dispatch ---


def test_linear_layers_are_packed_where_they_can_be(library: CpuLibrary):
    weight, bias = make_layer(20, 30)
    x = torch.randn(5, 20)
    assert isinstance(make_linear(weight, bias), PackedMatrix)
    for layer in (make_linear(weight.bfloat16()), make_linear(weight.double())):
        assert isinstance(layer, TorchLinear)
    with replaced(None):
        assert isinstance(make_linear(weight, bias), TorchLinear)
    for activation in ("tanh", "sigmoid", "silu"):
        for gated in (True, False):
            ours = make_linear(weight, bias, activation=activation, gated=gated)
            torchs = TorchLinear(weight, bias, activation, gated)
            torch.testing.assert_close(ours(x), torchs(x), atol=1e-5, rtol=1e-5)
    ids = torch.tensor([29, 0, 29])
    assert torch.equal(make_linear(weight, activation="tanh").rows(ids), weight[ids])


def test_packed_weights_lie_on_cache_lines(library: CpuLibrary, monkeypatch):
    monkeypatch.setattr(memory, "_rest", torch.empty(0))
    with torch.inference_mode():
        memory.empty(1)  # makes a block, which is for others too
    tensors = [memory.empty(n) for n in (1, 17, 1000, 3 << 20, 12 << 20, 5)]
    assert all(tensor.data_ptr() % memory.ALIGNMENT == 0 for tensor in tensors)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
