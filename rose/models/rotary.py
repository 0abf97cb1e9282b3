"""Rotary position embedding: the cosines and sines of a batch's positions.

They are computed per batch in float32 from the positions, for all layers at once, so there is no
table to size or grow. Shape letters: T tokens, R rotary channels.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rose.models.rope import RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines for `apply_rope`."""

    inv_freq: Tensor
    long_inv_freq: Tensor  # longrope's, for sequences beyond the original positions

    def __init__(self, config: "RopeConfig") -> None:
        """Work out the inverse frequencies, float32 [R / 2]."""
        super().__init__()
        self.config = config
        inv_freq, self.scale = inverse_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        if config.long_factor is not None:
            long_inv_freq = inv_freq_by_factors(config, config.long_factor)
            self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, float32 [T, R]; both halves of a row are equal."""
        inv_freq = self.inv_freq
        if self.config.kind == "dynamic":
            inv_freq = _dynamic_frequencies(self.config, positions_T, inv_freq)
        elif self.config.kind == "longrope":
            is_long_T = _sequence_lengths(positions_T) > self.config.original_positions
            inv_freq = torch.where(is_long_T.unsqueeze(1), self.long_inv_freq, inv_freq)
        angles_T = positions_T.to(torch.float32).unsqueeze(1) * inv_freq
        angles_TR = torch.cat((angles_T, angles_T), dim=-1)
        if self.scale == 1.0:
            return angles_TR.cos(), angles_TR.sin()
        return angles_TR.cos() * self.scale, angles_TR.sin() * self.scale


def inverse_frequencies(config: "RopeConfig") -> tuple[Tensor, float]:
    """Return the inverse frequencies, float32 [dim / 2], and what cosines and sines scale by.

    Dynamic rope is plain up to the positions that the model was made for; longrope is here as it is
    up to the original positions.
    """
    plain = 1.0 / config.theta ** _exponents(config.dim)
    if config.kind == "linear":
        assert config.factor is not None
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config)
    if config.kind == "longrope":
        assert config.short_factor is not None
        return inv_freq_by_factors(config, config.short_factor), _longrope_scale(config)
    return plain, 1.0


def inv_freq_by_factors(config: "RopeConfig", factors: "tuple[float, ...]") -> Tensor:
    """Return inverse frequencies, each divided by a factor (LongRoPE; Ding et al., 2024)."""
    return 1.0 / (torch.tensor(factors) * config.theta ** _exponents(config.dim))


def _longrope_scale(config: "RopeConfig") -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    factor = config.factor or config.max_positions / config.original_positions
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(config.original_positions))


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _llama3(config: "RopeConfig", plain: Tensor) -> Tensor:
    """Slow long waves down by the factor, leave short ones, blend in between (Llama 3.1)."""
    factor, low, high = config.factor, config.low_freq_factor, config.high_freq_factor
    assert factor is not None
    assert low is not None
    assert high is not None
    turns = config.original_positions * plain / (2 * math.pi)  # of each wave in the old context
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / factor + share * plain


def _yarn(config: "RopeConfig") -> tuple[Tensor, float]:
    """Interpolate long waves, extrapolate short ones, and scale attention (Peng et al., 2023)."""
    factor = config.factor or config.max_positions / config.original_positions
    plain = 1.0 / config.theta ** _exponents(config.dim)
    low, high = _yarn_range(config)
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0, 1)
    inv_freq = plain / factor * interpolated + plain * (1 - interpolated)
    return inv_freq, _yarn_scale(config, factor)


def _yarn_range(config: "RopeConfig") -> tuple[float, float]:
    """Return the channels between which the kind of scaling changes."""

    def channel(turns: float) -> float:
        waves = config.original_positions / (turns * 2 * math.pi)
        return config.dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = channel(config.beta_fast or 32.0), channel(config.beta_slow or 1.0)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_scale(config: "RopeConfig", factor: float) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _dynamic_frequencies(config: "RopeConfig", positions_T: Tensor, plain: Tensor) -> Tensor:
    """Return each token's frequencies, [T, R / 2], by the length of its own sequence.

    A sequence longer than the model's positions turns more slowly.
    """
    assert config.factor is not None
    lengths_T = _sequence_lengths(positions_T)
    stretch_T = lengths_T.clamp(min=config.max_positions) / config.max_positions
    growth_T = (config.factor * stretch_T - (config.factor - 1)) ** (config.dim / (config.dim - 2))
    return 1.0 / (config.theta * growth_T.unsqueeze(1)) ** _exponents(config.dim).to(plain.device)


def _sequence_lengths(positions_T: Tensor) -> Tensor:
    """Return the length of each token's sequence, read from where positions start again at 0.

    With a cache they do not start at 0: there, a sequence must not be so long that it matters, see
    `RopeConfig.fixed_positions`.
    """
    starts_T = (positions_T == 0).cumsum(0)
    longest = positions_T.new_zeros(len(positions_T) + 1)
    longest = longest.scatter_reduce(0, starts_T, positions_T + 1, "amax")
    return longest[starts_T]
