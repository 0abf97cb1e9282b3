"""Weights as whole numbers of 8 or 4 bits, with facts of every 32 inputs of an output.

Of 8 bits a group has a scale. Of 4 bits it has a scale and a minimum, what code 0 means: 16 codes
are too few to spend any beyond the group's least and greatest weight.

`quantize` makes them. `quantized_linear` says what a layer with such weights computes, in torch
ops: the kernels of `rose.kernels.cpu` compute the same, and faster. Its inputs are encoded too:
for weights of 8 bits each group of a row in 256 steps from its least number to its greatest, for
those of 4 bits in 255 steps around zero.

Shape letters: T tokens, I input channels, O output channels, G groups of inputs, K inputs of one.
"""

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs
BITS = {"int8": 8, "int4": 4}  # by the name of a quantization
_TOP = 15  # the greatest code of 4 bits
_ELEMENTS = 1 << 20  # of a matrix at a time: what is computed on the way takes several times that
# Of 4 bits: shares of a group's range to leave out at both ends, to try. Finer steps may fit the
# others better than the group's least and greatest weight. Then, twice, the scale and the minimum
# that fit the best codes best.
_CUTS = tuple(cuts for cuts in product((0.0, 0.04, 0.08), repeat=2) if any(cuts))
_REFINEMENTS = 2
_LEAST_WORTH = 0.01  # of an error, beside that of one that meets an input of the mean power
# The least scale beside the magnitude of the minimum, so that float32 holds every step.
_FINEST = 2.0**-14


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix: int8 codes [O, I], and float32 scales [O, G] that bfloat16 holds exactly.

    Of 4 bits codes are 0 to 15, and `minima` [O, G] are like scales; of 8 bits they are None.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    minima: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return what the codes mean: float32 [O, I]."""
        scaled_OI = self.codes * self._of_inputs(self.scales)
        return scaled_OI if self.minima is None else scaled_OI + self._of_inputs(self.minima)

    def _of_inputs(self, facts_OG: Tensor) -> Tensor:
        return facts_OG.repeat_interleave(GROUP, 1)[:, : self.codes.shape[1]]


def num_groups(inputs: int) -> int:
    """Return the groups of so many inputs; the last may be smaller."""
    return -(-inputs // GROUP)


def quantize(
    weight_OI: Tensor, quantization: str, power_I: Tensor | None = None
) -> QuantizedWeight:
    """Round a matrix to the nearest codes, with the scales that lose least.

    What a quantised matrix means, as float32, is quantised to the same meaning again.

    Args:
        weight_OI: of floating point, [O, I].
        quantization: one of `BITS`.
        power_I: mean squares of the inputs, float32 [I]: where 4 bits cannot hold every weight,
            those that meet large inputs count more. None: all count alike.

    Raises:
        ValueError: another quantization.
    """
    if quantization not in BITS:
        raise ValueError(f"quantization {quantization!r} is unknown. Known: {', '.join(BITS)}.")
    bits, inputs = BITS[quantization], weight_OI.shape[1]
    fit = _fit_bytes if bits == 8 else _fit_nibbles
    rows = max(1, _ELEMENTS // max(1, inputs))
    worth_1GK = _in_groups(_worth(power_I, inputs).unsqueeze(0))
    parts = [fit(_in_groups(part.float()), worth_1GK) for part in weight_OI.split(rows)]
    codes_OGK, scales_OG, minima_OG = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "scales", "minima")
    )
    codes_OI = codes_OGK.flatten(1)[:, :inputs].to(torch.int8).contiguous()
    return QuantizedWeight(codes_OI, scales_OG, bits, minima_OG if bits == 4 else None)


def _worth(power_I: Tensor | None, inputs: int) -> Tensor:
    """Return what a squared error of each input counts, never nothing: [I]."""
    mean = None if power_I is None else float(power_I.mean())
    if power_I is None or mean is None or not 0 < mean < math.inf:
        return torch.ones(inputs)
    return power_I / mean + _LEAST_WORTH


def _in_groups(x_OI: Tensor) -> Tensor:
    """Cut inputs into groups; the last is filled up with its last input: [O, G, K]."""
    missing = -x_OI.shape[1] % GROUP
    filled = torch.cat([x_OI, x_OI[:, -1:].expand(-1, missing)], 1) if missing else x_OI
    return filled.unflatten(1, (-1, GROUP))


@dataclass(frozen=True, slots=True)
class _Groups:
    """Weights [O, G, K], and what their squared errors count, [1, G, K]."""

    weights: Tensor
    worth: Tensor


@dataclass(slots=True)
class _Fit:
    """Codes of groups, with their scales and minima, and what they lose."""

    codes: Tensor  # [O, G, K]
    scales: Tensor  # [O, G]
    minima: Tensor
    lost: Tensor

    @classmethod
    def of(
        cls, groups: "_Groups", scales: Tensor, minima: Tensor, least: int = 0, most: int = _TOP
    ) -> "_Fit":
        """Choose the nearest codes for scales and minima, once bfloat16 has rounded these."""
        scales, minima = (x.bfloat16().float() for x in (scales, minima))
        scales = torch.where(scales.abs() < minima.abs() * _FINEST, 0.0, scales)
        scales_OG1, minima_OG1 = scales.unsqueeze(-1), minima.unsqueeze(-1)
        divisor_OG1 = torch.where(scales_OG1 == 0, 1.0, scales_OG1)
        codes_OGK = ((groups.weights - minima_OG1) / divisor_OG1).round_().clamp_(least, most)
        codes_OGK = (codes_OGK * (scales_OG1 != 0)).nan_to_num_(0.0)
        lost_OGK = torch.addcmul(minima_OG1, codes_OGK, scales_OG1).sub_(groups.weights)
        lost_OG = lost_OGK.square_().mul_(groups.worth).sum(-1)
        return cls(codes_OGK, scales, minima, lost_OG)

    def rows(self, rows_N: Tensor) -> "_Fit":
        """Return some rows."""
        facts = (self.scales, self.minima, self.lost)
        return _Fit(self.codes[rows_N], *(fact_OG[rows_N] for fact_OG in facts))

    def put(self, rows_N: Tensor, other: "_Fit") -> None:
        """Replace some rows."""
        self.codes[rows_N] = other.codes
        self.scales[rows_N], self.minima[rows_N] = other.scales, other.minima
        self.lost[rows_N] = other.lost

    def take(self, other: "_Fit", may_OG: Tensor | bool = True) -> None:
        """Take over what loses less in another fit, where it may."""
        better_OG = (other.lost < self.lost) & may_OG
        self.codes = torch.where(better_OG.unsqueeze(-1), other.codes, self.codes)
        self.scales = torch.where(better_OG, other.scales, self.scales)
        self.minima = torch.where(better_OG, other.minima, self.minima)
        self.lost = torch.where(better_OG, other.lost, self.lost)


def _fit_bytes(groups_OGK: Tensor, worth_1GK: Tensor) -> _Fit:
    scales_OG = groups_OGK.abs().amax(-1) / 127
    groups = _Groups(groups_OGK, worth_1GK)
    return _Fit.of(groups, scales_OG, torch.zeros_like(scales_OG), -127, 127)


def _fit_nibbles(groups_OGK: Tensor, worth_1GK: Tensor) -> _Fit:
    """Try scales and minima. Some weight always has code 0, so that all is found once more."""
    groups = _Groups(groups_OGK, worth_1GK)
    fit = _fit_range(groups)
    if not fit.lost.any():
        return fit
    on_grid_O = _on_grid(_Groups(groups_OGK[:, :1], worth_1GK[:, :1]))[:, 0]
    rows_N = (on_grid_O & fit.lost.any(1)).nonzero().flatten()
    if len(rows_N):
        fit.put(rows_N, _fit_grids(_Groups(groups_OGK[rows_N], worth_1GK), fit.rows(rows_N)))
        if not fit.lost.any():
            return fit
    for below, above in _CUTS:
        fit.take(_fit_range(groups, below, above))
    for _ in range(_REFINEMENTS):
        fit.take(refined := _refine(groups, fit.codes), (refined.codes == 0).any(-1))
    return fit


def _fit_grids(groups: _Groups, fit: _Fit) -> _Fit:
    """Try to find the steps of weights that are whole ones, if those of the whole range are not."""
    for steps in range(_TOP, 0, -1):
        for other in _on_grids(groups, steps):
            fit.take(other)
        if not fit.lost.any():
            break
    return fit


def _fit_range(groups: _Groups, below: float = 0.0, above: float = 0.0, steps: int = _TOP) -> _Fit:
    """Cut each group's range, without shares of it at both ends, into steps."""
    low_OG, high_OG = groups.weights.aminmax(dim=-1)
    range_OG = high_OG - low_OG
    minima_OG = (low_OG + below * range_OG).bfloat16()
    scales_OG = (high_OG - above * range_OG - minima_OG) / steps
    too_low_OG = low_OG - minima_OG > scales_OG / 2  # nothing would have code 0
    higher_OG = torch.nextafter(minima_OG, torch.full_like(minima_OG, torch.inf))
    minima_OG = torch.where(too_low_OG, higher_OG, minima_OG).float()
    scales_OG = ((high_OG - above * range_OG - minima_OG) / steps).clamp(min=0)
    return _Fit.of(groups, scales_OG, minima_OG)


def _on_grids(groups: _Groups, steps: int) -> tuple[_Fit, _Fit]:
    """Cut each group's range into steps from its least weight up, and from its greatest down."""
    up = _fit_range(groups, steps=steps)
    down = _fit_range(_Groups(-groups.weights, groups.worth), steps=steps)
    return up, _Fit(down.codes, -down.scales, -down.minima, down.lost)


def _on_grid(groups: _Groups) -> Tensor:
    """Return whether groups are whole steps from a weight at an end: [O, G]."""
    fits = [fit for steps in range(1, _TOP + 1) for fit in _on_grids(groups, steps)]
    return torch.stack([fit.lost == 0 for fit in fits]).any(0)


def _refine(groups: _Groups, codes_OGK: Tensor) -> _Fit:
    """Fit the line from codes to weights that loses least, and choose codes for that."""
    share_1GK = groups.worth / groups.worth.sum(-1, keepdim=True)
    weight_OG = (share_1GK * groups.weights).sum(-1)
    code_OG = (share_1GK * codes_OGK).sum(-1)
    apart_OGK = codes_OGK - code_OG.unsqueeze(-1)
    worth_OGK = apart_OGK * share_1GK
    scales_OG = (worth_OGK * groups.weights).sum(-1) / (worth_OGK * apart_OGK).sum(-1)
    scales_OG = scales_OG.clamp(min=0)
    return _Fit.of(groups, scales_OG, weight_OG - scales_OG * code_OG)


def encode_inputs(x_TI: Tensor, bits: int) -> Tensor:
    """Return what is left of inputs once each group of a row is rounded to steps: [T, I].

    Args:
        x_TI: floating point, [T, I].
        bits: of the weights that they are multiplied with.
    """
    inputs = x_TI.shape[1]
    last = inputs % GROUP or GROUP
    parts = [x_TI[:, : inputs - last].unflatten(1, (-1, GROUP)), x_TI[:, None, inputs - last :]]
    rounding = _round_to_steps if bits == 8 else _round_around_zero
    return torch.cat([rounding(part).flatten(1) for part in parts], 1)


def _round_around_zero(x_TGK: Tensor) -> Tensor:
    step_TG1 = x_TGK.abs().amax(-1, keepdim=True) / 127
    divisor_TG1 = torch.where(step_TG1 == 0, 1.0, step_TG1)
    return (x_TGK / divisor_TG1).round() * step_TG1


def _round_to_steps(x_TGK: Tensor) -> Tensor:
    low_TG1, high_TG1 = x_TGK.aminmax(dim=-1, keepdim=True)
    step_TG1 = (high_TG1 - low_TG1) / 255
    divisor_TG1 = torch.where(step_TG1 == 0, 1.0, step_TG1)
    return ((x_TGK - low_TG1) / divisor_TG1).round() * step_TG1 + low_TG1


def quantized_linear(x_TI: Tensor, weight: QuantizedWeight, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b for encoded inputs: [T, O] of the dtype of x."""
    bias_O = None if bias_O is None else bias_O.to(x_TI.dtype)
    return F.linear(encode_inputs(x_TI, weight.bits), weight.dequantize().to(x_TI.dtype), bias_O)
