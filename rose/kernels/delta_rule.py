"""The gated delta rule (Yang et al., 2024): linear attention whose state forgets and corrects.

Each head keeps a matrix S that maps keys to values. A token lets it decay, reads what it holds for
the token's key, writes a share `beta` of the difference to the token's value, and asks it:

    S = exp(decay) S;  S = S + k (beta (v - k S));  out = q S

`recurrent` does just that, token by token. `Chunks` and `chunked` do many tokens at once: within a
chunk the corrections form a triangular system, and only whole chunks follow one another.

Everything is in float32. Shape letters: T tokens of the batch, N sequences, L tokens of each, M
chunks, C tokens of a chunk, G key heads, H value heads (those of a state), K channels of a key, V
channels of a value.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens
L2_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """What the rule takes of each token; leading dimensions are tokens, however arranged.

    Queries are scaled, queries and keys normed, and there are as many of them as values.
    """

    q: Tensor  # [..., H, K]
    k: Tensor  # [..., H, K]
    v: Tensor  # [..., H, V]
    decay: Tensor  # [..., H], logarithms, at most 0
    beta: Tensor  # [..., H], from 0 to 1


def prepare_inputs(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor
) -> DeltaInputs:
    """Norm queries and keys, scale queries by 1 / sqrt(K), and give each value head its key head.

    Args:
        q_TGK: queries; each serves H / G value heads that lie side by side.
        k_TGK: keys.
        v_THV: values.
        decay_TH: logarithms of what is left of the state.
        beta_TH: how much of a difference is corrected.

    Returns:
        All of it in float32.
    """
    repeats = v_THV.shape[1] // q_TGK.shape[1]
    q, k = _unit(q_TGK) * q_TGK.shape[-1] ** -0.5, _unit(k_TGK)
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1)
    return DeltaInputs(q, k, v_THV.float(), decay_TH.float(), beta_TH.float())


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def recurrent(inputs: DeltaInputs, state_NHKV: Tensor) -> Tensor:
    """Apply the rule token by token; inputs are [N, L, H, ...], all of them real.

    Args:
        inputs: of the tokens.
        state_NHKV: states before the first token; they become those after the last.

    Returns:
        Outputs, [N, L, H, V].
    """
    outputs = []
    for q, k, v, decay, beta in zip(*(x.unbind(1) for x in inputs), strict=True):
        state_NHKV.mul_(decay.exp()[..., None, None])
        held = (k.unsqueeze(-2) @ state_NHKV).squeeze(-2)
        change = (v - held) * beta.unsqueeze(-1)
        state_NHKV.addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
        outputs.append((q.unsqueeze(-2) @ state_NHKV).squeeze(-2))
    return torch.stack(outputs, dim=1)


class Chunks:
    """How sequences of any length are cut into chunks: host facts and indices of a batch.

    Chunks are ordered by their number within their sequence, then by sequence, longest first. So
    the chunks that can be computed side by side lie side by side, and the sequences that still go
    on are the first ones.
    """

    def __init__(
        self, starts: Sequence[int], lengths: Sequence[int], tokens: int, device: torch.device
    ) -> None:
        """Cut sequences that start at `starts` among the batch's `tokens` tokens."""
        count = len(lengths)
        self.order = sorted(range(count), key=lambda i: -lengths[i])
        self.size = min(CHUNK, 1 << (max(lengths) - 1).bit_length())
        self.active: list[int] = []  # sequences that have a chunk of each number
        places = []
        for first in range(0, max(lengths), self.size):
            going = [i for i in self.order if lengths[i] > first]
            self.active.append(len(going))
            places += [(starts[i] + first, starts[i] + lengths[i]) for i in going]
        begin_M, end_M = torch.tensor(places).unsqueeze(-1).unbind(1)
        token_MC = begin_M + torch.arange(self.size)
        real_MC = token_MC < end_M
        # Behind a sequence's end everything is 0: nothing decays, nothing is written.
        self._gather = torch.where(real_MC, token_MC, tokens).flatten().to(device)
        self._real = real_MC.flatten().nonzero().squeeze(1).to(device)
        self._token = token_MC[real_MC].to(device)

    def take(self, x: Tensor) -> Tensor:
        """Bring the chunks' tokens of [T, H, ...] together: [M, H, C, ...]."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        return padded.index_select(0, self._gather).unflatten(0, (-1, self.size)).transpose(1, 2)

    def put(self, x_MHCV: Tensor, out_THV: Tensor) -> None:
        """Write results to their tokens."""
        rows = x_MHCV.transpose(1, 2).flatten(0, 1).index_select(0, self._real)
        out_THV.index_copy_(0, self._token, rows)


def chunked(inputs: DeltaInputs, chunks: Chunks, state_NHKV: Tensor, out_THV: Tensor) -> None:
    """Apply the rule to sequences chunk by chunk.

    Args:
        inputs: of all tokens of the batch, [T, H, ...].
        chunks: where the sequences' tokens are.
        state_NHKV: states before the first token, in the order of `chunks.order`; they become
            those after the last.
        out_THV: takes the outputs of the sequences' tokens.
    """
    q, k, v, decay, beta = (chunks.take(x) for x in inputs)
    total = decay.cumsum(-1)  # of the decays from the start of the chunk on
    k_beta = k * beta.unsqueeze(-1)
    pairs = _pair_decays(total)
    # Each token's correction rests on those before it: a unit triangular system, solved for the
    # values and for the part of them that the state before the chunk decides.
    system = (k_beta @ k.transpose(-1, -2)) * pairs
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = (q @ k.transpose(-1, -2)) * pairs
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for first, count in zip(accumulate(chunks.active, initial=0), chunks.active, strict=False):
        now = slice(first, first + count)
        state = state_NHKV[:count]
        change = own[now] - from_state[now] @ state
        out[now] = q[now] @ state + within[now] @ change
        state_NHKV[:count] = state * kept[now] + k[now].transpose(-1, -2) @ change
    chunks.put(out, out_THV)


def _pair_decays(total_MHC: Tensor) -> Tensor:
    """Return what is left at a row's token of what was there at a column's, [M, H, C, C]."""
    size = total_MHC.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total_MHC.device).triu(1)
    differences = total_MHC.unsqueeze(-1) - total_MHC.unsqueeze(-2)
    return differences.masked_fill(later, float("-inf")).exp()


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, places_T: Tensor, history_RC: Tensor, history_places_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own weights over a token and the W - 1 before it.

    Args:
        x_TC: packed tokens.
        weight_CW: the last column is the token's own.
        places_T: where each token lies among tokens and history.
        history_RC: the W - 1 inputs before each sequence's first token, one sequence after another.
        history_places_R: where these lie.

    Returns:
        [T, C] in the dtype of `x_TC`, computed in float32, and the inputs with their history.
    """
    width = weight_CW.shape[1]
    joined_JC = x_TC.new_empty(len(x_TC) + len(history_RC), x_TC.shape[1])
    joined_JC.index_copy_(0, places_T, x_TC)
    joined_JC.index_copy_(0, history_places_R, history_RC)
    exact_JC, weight_WC = joined_JC.float(), weight_CW.float().t()
    count = len(joined_JC) - width + 1
    out_JC = exact_JC[:count] * weight_WC[0]
    for offset in range(1, width):
        out_JC.addcmul_(exact_JC[offset : offset + count], weight_WC[offset])
    return out_JC.index_select(0, places_T - (width - 1)).to(x_TC.dtype), joined_JC
