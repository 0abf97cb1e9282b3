"""Weights of 8 and 4 bits: what they mean, and the kernels against that, with every instruction set."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.activation import activate
from rose.kernels.cpu.build import BuildError, available_levels, build
from rose.kernels.cpu.gemm import PackedMatrix
from rose.kernels.cpu.library import CpuLibrary, load_library, replaced
from rose.kernels.linear import make_linear
from rose.kernels.quantization import (
    BITS,
    GROUP,
    QuantizedWeight,
    encode_inputs,
    quantize,
    quantized_linear,
)

ROWS = (1, 2, 3, 4, 5, 6, 11, 12, 13, 16, 25, 37)
SIZES = ((1, 1), (7, 5), (33, 70), (64, 32), (130, 97), (256, 48))  # inputs, outputs


@pytest.fixture(scope="module", params=available_levels())
def library(request) -> CpuLibrary:
    try:
        return CpuLibrary(build(request.param))
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_layer(inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, inputs) / inputs**0.5, torch.randn(rows)


# --- what quantised weights and encoded inputs are ---


@pytest.mark.parametrize(("kind", "share"), [("int8", 1.6 / 254), ("int4", 0.2)])
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 100])
def test_weights_are_within_a_step_of_their_group(kind, share, inputs):
    weight = torch.randn(50, inputs) * torch.logspace(-3, 3, 50)[:, None]
    quantized = quantize(weight, kind)
    for facts in (quantized.scales, quantized.minima):
        if facts is not None:
            assert facts.shape == (50, -(-inputs // GROUP))
            assert torch.equal(facts, facts.bfloat16().float())
    for found, wanted in zip(
        quantized.dequantize().split(GROUP, 1), weight.split(GROUP, 1), strict=True
    ):
        most = wanted.abs().amax(1, keepdim=True)
        assert ((found - wanted).abs() <= share * most).all()


MATRICES = {
    "normal": lambda: torch.randn(200, 70),
    "bfloat16": lambda: torch.randn(40, 70).bfloat16(),
    "far from zero": lambda: 1 + 1e-3 * torch.randn(200, 64),
    "nearly one value": lambda: 1 + 1e-5 * torch.randn(200, 64),
    "two values": lambda: torch.randint(0, 2, (40, 70)) * 0.3 - 0.1,
    "few weights": lambda: torch.randn(40, 70) * (torch.rand(40, 70) < 0.05),
    "of all sizes": lambda: torch.randn(200, 70) * torch.logspace(-30, 30, 200)[:, None],
}


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_quantised_weights_stay_what_they_are(kind, matrix):
    once = quantize(MATRICES[matrix](), kind)
    again = quantize(once.dequantize(), kind)
    assert torch.equal(once.dequantize(), again.dequantize())
    assert once.codes.dtype == torch.int8
    least, most = (-127, 127) if kind == "int8" else (0, 15)
    assert least <= int(once.codes.min()) <= int(once.codes.max()) <= most


@pytest.mark.parametrize("least", [0, -8])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_on_a_grid_of_16_steps_are_kept(least, sign):
    """As those of files of 4 bits are, whether they have minima or a zero in the middle."""
    scales = sign * torch.rand(50, 3).bfloat16().float()
    minima = least * scales if least else torch.randn(50, 3).bfloat16().float()
    codes = torch.randint(0, 16, (50, 96), dtype=torch.int8)
    codes[:, ::GROUP] = 0  # but 15 does not have to be there
    weight = QuantizedWeight(codes, scales, 4, minima).dequantize()
    assert torch.equal(quantize(weight, "int4").dequantize(), weight)


def test_what_is_searched_loses_less_than_the_whole_range():
    weight = torch.randn(200, 320)
    low, high = weight.unflatten(1, (-1, GROUP)).aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    whole = (((weight.unflatten(1, (-1, GROUP)) - low) / step).round() * step + low).flatten(1)
    lost = [(x - weight).square().mean() for x in (quantize(weight, "int4").dequantize(), whole)]
    assert lost[0] < 0.83 * lost[1]


def test_a_row_is_rounded_alike_whatever_the_others_are():
    mixed = torch.randn(6, 64)
    mixed[::2] = quantize(mixed[::2], "int4").dequantize()  # these lie on grids
    whole = quantize(mixed, "int4")
    for row in range(6):
        alone = quantize(mixed[row : row + 1], "int4")
        assert torch.equal(alone.dequantize()[0], whole.dequantize()[row])


def test_large_matrices_are_cut_without_a_trace(monkeypatch):
    weight = torch.randn(90, 40)
    whole = quantize(weight, "int4")
    monkeypatch.setattr("rose.kernels.quantization._ELEMENTS", 7 * 40)
    parts = quantize(weight, "int4")
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.minima, whole.minima)


def test_groups_without_weights_are_zeros():
    weight = torch.randn(4, 96)
    weight[:, 32:64] = 0
    for kind in BITS:
        assert (quantize(weight, kind).dequantize()[:, 32:64] == 0).all()


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 100])
def test_inputs_are_rounded_to_steps_around_zero(inputs):
    x = torch.randn(20, inputs) + 1
    encoded = encode_inputs(x, 4)
    for found, wanted in zip(encoded.split(GROUP, 1), x.split(GROUP, 1), strict=True):
        most = wanted.abs().amax(1, keepdim=True)
        assert ((found - wanted).abs() <= most / 253).all()
        assert torch.equal(found.abs().amax(1, keepdim=True), most / 127 * 127)
    assert not encode_inputs(torch.zeros(2, inputs), 4).any()


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 100])
def test_inputs_are_rounded_to_steps_of_their_group(inputs):
    x = torch.randn(20, inputs) + 3
    encoded = encode_inputs(x, 8)
    for found, wanted in zip(encoded.split(GROUP, 1), x.split(GROUP, 1), strict=True):
        low, high = wanted.aminmax(dim=1, keepdim=True)
        assert ((found - wanted).abs() <= (high - low) / 509).all()
    same = torch.full((3, inputs), 1.7)
    assert torch.equal(encode_inputs(same, 8), same)


# --- the kernels ---


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_compute_what_is_meant(library: CpuLibrary, kind, size):
    inputs, outputs = size
    weight, bias = make_layer(inputs, outputs)
    quantized = quantize(weight, kind)
    matrix = PackedMatrix(library, quantized, bias)
    x = torch.randn(max(ROWS), inputs) * torch.logspace(-2, 2, max(ROWS))[:, None]
    together = matrix(x)
    meant = quantized_linear(x.double(), quantized, bias)
    # An input half-way between two steps may be encoded as either.
    steps = 2 * x.abs().amax(1)
    near = 2e-5 * (1 + meant.abs())
    bound = near + steps[:, None] / 255 * quantized.dequantize().abs().amax()
    assert ((together - meant).abs() <= bound).all()
    assert ((together - meant).abs() <= near).double().mean() > 0.99
    for rows in ROWS:
        assert torch.equal(matrix(x[:rows]), together[:rows])
        assert torch.equal(matrix(x[-rows:]), together[-rows:])


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gates_and_activations(library: CpuLibrary, kind, activation):
    weight, bias = make_layer(70, 2 * 37)
    quantized = quantize(weight, kind)
    matrix = PackedMatrix(library, quantized, bias, activation=activation, gated=True)
    x = torch.randn(14, 70)
    gate, up = quantized_linear(x, quantized, bias).chunk(2, -1)
    torch.testing.assert_close(matrix(x), activate(gate, activation) * up, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", BITS)
def test_rows_of_the_weights(library: CpuLibrary, kind):
    quantized = quantize(torch.randn(70, 37), kind)
    ids = torch.randint(0, 70, (300,))
    assert torch.equal(PackedMatrix(library, quantized).rows(ids), quantized.dequantize()[ids])


@pytest.mark.parametrize("kind", BITS)
def test_every_code_and_every_input_step(library: CpuLibrary, kind):
    """The largest sums that there are: nothing overflows or saturates."""
    least, most = (-127, 127) if kind == "int8" else (0, 15)
    minima = None if kind == "int8" else torch.full((40, 2), -8.0)
    for low, high in ((least, most), (least, least), (most, most)):
        codes = torch.full((40, 64), low, dtype=torch.int8)
        codes[:, ::2] = high
        quantized = QuantizedWeight(codes, torch.ones(40, 2), BITS[kind], minima)
        x = torch.zeros(3, 64)
        x[:, 1:] = 255.0 if kind == "int8" else 127.0  # so that steps are 1
        x[1] = -x[1]
        expected = F.linear(x.double(), quantized.dequantize().double()).float()
        assert torch.equal(PackedMatrix(library, quantized)(x), expected)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 32, 36])
def test_what_is_not_finite_spoils_its_row_alone(library: CpuLibrary, kind, bad, place):
    matrix = PackedMatrix(library, quantize(torch.randn(20, 37), kind))
    x = torch.randn(14, 37)
    good = matrix(x)
    x[3, place] = bad
    out, others = matrix(x), torch.arange(14) != 3
    assert torch.equal(out[others], good[others])
    assert not out[3].isfinite().any()


@pytest.mark.parametrize("kind", BITS)
def test_bits_do_not_depend_on_the_instruction_set(library: CpuLibrary, kind):
    best = load_library()
    assert best is not None
    weight, bias = make_layer(130, 70)
    quantized, x = quantize(weight, kind), torch.randn(15, 130)
    expected = PackedMatrix(best, quantized, bias)(x)
    out = PackedMatrix(library, quantized, bias)(x)
    if "generic" in library.path.name:  # perhaps without fused multiply-adds
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(out, expected)


# --- dispatch ---


def test_quantised_layers_are_near():
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    weight, bias = make_layer(576, 300)
    x = torch.randn(20, 576)
    for kind, least in (("int8", 0.9999), ("int4", 0.99)):
        for activation in ("tanh", "identity"):
            exact = make_linear(weight, bias, activation=activation)(x)
            out = make_linear(weight, bias, activation=activation, quantization=kind)(x)
            assert least < F.cosine_similarity(out, exact).min() < 1


def test_what_cannot_be_quantised_says_why():
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    weight = torch.randn(30, 20)
    with pytest.raises(ValueError, match=r"'int3' is unknown. Known: int8, int4"):
        make_linear(weight, quantization="int3")
    with pytest.raises(
        ValueError, match=r"'int8' needs dtype float32 on a CPU, .* bfloat16 on cpu"
    ):
        make_linear(weight.bfloat16(), quantization="int8")
    with replaced(None), pytest.raises(ValueError, match="is there a C"):
        make_linear(weight, quantization="int4")
