import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from rose.kernels import norm, pooling
from rose.kernels.activation import ACTIVATIONS, activate, gated
from rose.kernels.normalize import l2_normalize
from rose.kernels.registry import UnknownNameError
from rose.kernels.rope import apply_rope

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (1, 7), (3, 33), (17, 384)]
# Relative to the largest result: a few roundings of the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors here are tiny: waiting for a second thread on a busy machine takes most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype):
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[dtype] * max(1.0, expected.double().abs().max().item())


# --- norms ---


def rms_norm_f64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def layer_norm_f64(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight.double()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_against_float64(size, dtype, offset):
    x, weight = (3 * torch.randn(size)).to(dtype), torch.randn(size[1]).to(dtype)
    out = norm.rms_norm(x, weight, 1e-6, weight_offset=offset)
    assert out.dtype == dtype
    assert_near(out, rms_norm_f64(x, weight.double() + offset, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_llama(dtype):
    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(41, 96).to(dtype)
    out = norm.rms_norm(x, module.weight.detach(), 1e-5)
    assert_near(out, module(x).detach(), dtype)
    assert (out != module(x)).float().mean() <= 0.02 or dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_offset_is_that_of_gemma(dtype):
    module = Gemma2RMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(41, 96).to(dtype)
    out = norm.rms_norm(x, module.weight.detach(), 1e-5, weight_offset=1.0)
    assert_near(out, module(x).detach(), dtype)
    assert (out != module(x)).float().mean() <= 0.02 or dtype == torch.float32


def test_rms_norm_has_float32_statistics():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square overflows float16
    out = norm.rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6)
    assert torch.equal(out, torch.ones_like(out))


def test_rms_norm_of_heads():
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    assert_near(norm.rms_norm(x, weight, 1e-6), rms_norm_f64(x, weight, 1e-6), torch.float32)


def test_norms_leave_their_inputs_alone():
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    before = [t.clone() for t in (x, residual, weight)]
    norm.rms_norm(x, weight, 1e-6)
    norm.rms_norm(x, weight, 1e-6, weight_offset=1.0)
    norm.add_rms_norm(x, residual, weight, 1e-6)
    norm.add_layer_norm(x, residual, weight, None, 1e-6)
    norm.add_layer_norm_with_sum(x, residual, weight, weight, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, weight), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((9, 33), (9, 33), (33,)))
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_near(out, rms_norm_f64(total, weight, 1e-6), dtype)
    out, _ = norm.add_rms_norm(x, residual, weight, 1e-6, weight_offset=1.0)
    assert_near(out, rms_norm_f64(total, weight.double() + 1, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm_against_float64(size, dtype, with_bias):
    x, weight = (2 + torch.randn(size)).to(dtype), torch.randn(size[1]).to(dtype)
    bias = torch.randn(size[1]).to(dtype) if with_bias else None
    out = norm.layer_norm(x, weight, bias, 1e-12)
    assert out.dtype == dtype
    if size[1] > 1:  # one channel alone is rounding noise divided by rounding noise
        assert_near(out, layer_norm_f64(x, weight, bias, 1e-12), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm(dtype):
    x, residual, weight, bias = (torch.randn(s).to(dtype) for s in ((9, 33), (9, 33), 33, 33))
    expected = layer_norm_f64(x + residual, weight, bias, 1e-5)
    assert_near(norm.add_layer_norm(x, residual, weight, bias, 1e-5), expected, dtype)
    out, total = norm.add_layer_norm_with_sum(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(out, expected, dtype)


# --- rope ---


def rope_tables(tokens: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, rotary // 2) * 6
    return torch.cat([angle, angle], -1).cos().to(dtype), torch.cat([angle, angle], -1).sin().to(
        dtype
    )


def rope_f64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs as complex numbers."""
    half = cos.shape[-1] // 2
    x, cos, sin = x.double(), cos.double()[:, None, :half], sin.double()[:, None, :half]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(2, 2), (16, 16), (16, 8), (20, 10), (64, 2)])
@pytest.mark.parametrize("tokens", [1, 13])
def test_rope_against_complex_rotation(dtype, dim, rotary, tokens):
    q, k = torch.randn(tokens, 6, dim).to(dtype), torch.randn(tokens, 2, dim).to(dtype)
    cos, sin = rope_tables(tokens, rotary, dtype)
    before = q.clone()
    for x, out in zip((q, k), apply_rope(q, k, cos, sin), strict=True):
        assert out.dtype == dtype
        assert_near(out, rope_f64(x, cos, sin), dtype)
        assert torch.equal(out[..., rotary:], x[..., rotary:])
    assert torch.equal(q, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_that_of_transformers(dtype):
    q, k = torch.randn(11, 6, 16).to(dtype), torch.randn(11, 2, 16).to(dtype)
    cos, sin = rope_tables(11, 16, dtype)
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    for out, other in zip(apply_rope(q, k, cos, sin), expected, strict=True):
        assert_near(out, other[0].transpose(0, 1), dtype)


def test_rope_takes_halves_as_they_are():
    """Tables whose halves differ (as some long-context scalings have) are applied half by half."""
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    cos, sin = torch.randn(5, 8), torch.randn(5, 8)
    expected, _ = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    out, _ = apply_rope(q, k, cos, sin)
    assert_near(out, expected[0].transpose(0, 1), torch.float32)


def test_rope_with_wider_tables_rounds_once():
    q, k = torch.randn(7, 2, 16).bfloat16(), torch.randn(7, 2, 16).bfloat16()
    cos, sin = rope_tables(7, 16, torch.float32)
    out, _ = apply_rope(q, k, cos, sin)
    assert out.dtype == torch.bfloat16
    exact = rope_f64(q, cos, sin)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_rope_of_views_of_a_fused_projection():
    qkv = torch.randn(9, (4 + 2 + 2) * 8)
    q, k, _ = (x.unflatten(1, (-1, 8)) for x in qkv.split([32, 16, 16], dim=1))
    cos, sin = rope_tables(9, 8, torch.float32)
    for x, out in zip((q, k), apply_rope(q, k, cos, sin), strict=True):
        assert_near(out, rope_f64(x, cos, sin), torch.float32)


# --- activations ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) & set(ACT2FN)))
def test_activations_are_those_of_transformers(name, dtype):
    x = (4 * torch.randn(7, 33)).to(dtype)
    assert_near(activate(x, name), ACT2FN[name](x), dtype)


def test_which_activations_of_transformers_are_missing():
    assert set(ACT2FN) - set(ACTIVATIONS) == {"prelu", "xielu"}  # they have weights


def test_identity():
    x = torch.randn(3)
    assert activate(x, "identity") is x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_takes_the_gate_first(name, dtype):
    gate, up = torch.randn(5, 21).to(dtype), torch.randn(5, 21).to(dtype)
    out = gated(torch.cat([gate, up], dim=-1), name)
    assert out.dtype == dtype
    assert_near(out, ACT2FN[name](gate.double()) * up.double(), dtype)


def test_unknown_activation_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown activation 'gleu'\. Did you mean 'gelu'"):
        gated(torch.randn(2, 4), "gleu")


# --- pooling ---

ST_NAMES = {
    "cls": "cls",
    "last": "lasttoken",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
}
LENGTHS = [5, 1, 12, 3, 3, 40]


def packed(lengths: list[int], channels: int, dtype: torch.dtype = torch.float32):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.randn(sum(lengths), channels).to(dtype), cu_seqlens


def pool_f64(x: Tensor, mode: str, start: int) -> Tensor:
    """Pool one sequence."""
    x, weight = x.double()[start:], torch.arange(1, len(x) + 1).double()[start:, None]
    if not len(x):
        return x.new_zeros(x.shape[1])
    return {
        "cls": lambda: x[0],
        "last": lambda: x[-1],
        "max": lambda: x.max(0).values,
        "mean": lambda: x.sum(0) / len(x),
        "mean_sqrt_len": lambda: x.sum(0) / math.sqrt(len(x)),
        "weightedmean": lambda: (x * weight).sum(0) / weight.sum(),
    }[mode]()


def test_every_mode_is_tested():
    assert set(ST_NAMES) == set(pooling.POOLINGS)


@pytest.mark.parametrize("mode", sorted(ST_NAMES))
@pytest.mark.parametrize("prompt", [0, 1, 3])
def test_pooling_is_that_of_sentence_transformers(mode, prompt):
    lengths = [n + prompt for n in LENGTHS]
    x, cu_seqlens = packed(lengths, 24)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    padded = torch.full((len(lengths), max(lengths), 24), 1e3)
    padded[mask.bool()] = x
    features = {"token_embeddings": padded, "attention_mask": mask, "prompt_length": prompt}
    module = Pooling(24, pooling_mode=ST_NAMES[mode], include_prompt=False)
    starts = torch.full((len(lengths),), prompt) if prompt else None
    out = pooling.POOLINGS[mode](x, cu_seqlens, starts)
    assert_near(out, module(features)["sentence_embedding"], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", sorted(ST_NAMES))
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_pooling_against_float64(mode, dtype, lengths, data):
    starts = data.draw(
        st.none() | st.tuples(*(st.integers(0, n + 1) for n in lengths)).map(list), label="starts"
    )
    x, cu_seqlens = packed(lengths, 3, dtype)
    out = pooling.POOLINGS[mode](x, cu_seqlens, None if starts is None else torch.tensor(starts))
    assert out.dtype == torch.float32
    expected = [
        pool_f64(rows, mode, start)
        for rows, start in zip(x.split(lengths), starts or [0] * len(lengths), strict=True)
    ]
    assert_near(out, torch.stack(expected), torch.float32)


@pytest.mark.parametrize("mode", sorted(ST_NAMES))
@pytest.mark.parametrize("with_starts", [False, True])
def test_pooled_bits_do_not_depend_on_neighbours(mode, with_starts):
    x, cu_seqlens = packed(LENGTHS, 130)
    starts = torch.tensor([1, 0, 5, 0, 2, 9], dtype=torch.int32) if with_starts else None
    batch = pooling.POOLINGS[mode](x, cu_seqlens, starts)
    for i, rows in enumerate(x.split(LENGTHS)):
        alone = pooling.POOLINGS[mode](
            rows, torch.tensor([0, len(rows)]), None if starts is None else starts[i : i + 1]
        )
        assert torch.equal(alone[0], batch[i])


@pytest.mark.parametrize("mode", sorted(ST_NAMES))
def test_pooling_keeps_faults_to_their_sequence(mode):
    x, cu_seqlens = packed(LENGTHS, 8)
    clean = pooling.POOLINGS[mode](x, cu_seqlens, None)
    x[cu_seqlens[2] : cu_seqlens[3]] = torch.nan
    out = pooling.POOLINGS[mode](x, cu_seqlens, None)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("mode", ["mean", "weightedmean"])
def test_long_means_are_accurate(mode):
    x, cu_seqlens = packed([8192, 3], 16)
    x += 10
    out = pooling.POOLINGS[mode](x, cu_seqlens, None)
    expected = torch.stack([pool_f64(rows, mode, 0) for rows in x.split([8192, 3])])
    assert (out - expected).abs().max() <= 2e-4


# --- normalise ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_l2_normalize_against_float64(size, dtype):
    x = torch.randn(size).to(dtype)
    out = l2_normalize(x)
    assert out.dtype == torch.float32
    assert_near(out, x.double() / x.double().norm(dim=-1, keepdim=True), torch.float32)


def test_zero_rows_stay_zero():
    x = torch.randn(4, 6)
    x[1] = 0
    out = l2_normalize(x)
    assert torch.equal(out[1], torch.zeros(6))
    assert torch.allclose(out[[0, 2, 3]].norm(dim=-1), torch.ones(3))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-12, 1e25, 3e38])
def test_any_finite_row_gets_length_one(magnitude):
    out = l2_normalize(torch.tensor([[1.0, -1.0, 0.5]]) * magnitude)
    assert out.norm() == pytest.approx(1.0, abs=2e-3 if magnitude < 1e-38 else 1e-6)


def test_non_finite_rows_are_not_hidden():
    out = l2_normalize(torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [3.0, 4.0]]))
    assert not out[0].isfinite().all()
    assert not out[1].isfinite().all()
    assert torch.allclose(out[2], torch.tensor([0.6, 0.8]))
