"""Attention of packed sequences by its definition, for the stand-ins."""

import torch
from torch import Tensor


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    soft_cap: float,
) -> Tensor:
    """Attend in float32; the last query stands at the last key. A side of -1 is unlimited."""
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(ratio, dim=1) for x in (k, v))
    scores = torch.einsum("lhd,mhd->hlm", q.float(), keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if causal:
        hidden |= key > query
    if left >= 0:
        hidden |= key < query - left
    if right >= 0:
        hidden |= key > query + right
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", weights, values).to(q.dtype)


def attend_packed(
    q: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int], **facts: object
) -> Tensor:
    """Attend sequence by sequence; `starts` has the place of each one's queries, and the end."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(starts[i], starts[i + 1])
        if starts[i + 1] > starts[i]:
            out[rows] = attend_sequence(q[rows], k, v, **facts)
    return out


def read_pages(pages: Tensor, ids: list[int], length: int) -> Tensor:
    """The first `length` tokens of a sequence whose pages have these ids."""
    assert all(0 <= page < pages.shape[0] for page in ids), f"page ids {ids} of {pages.shape[0]}"
    return pages[torch.tensor(ids, dtype=torch.int64)].flatten(0, 1)[:length]


def is_index(tensor: object, *shape: int, device: str | None = None) -> None:
    """Hold an index tensor to int32, contiguous, of a shape, and on a device if one is named."""
    assert isinstance(tensor, Tensor), f"a tensor is needed, found {tensor!r}"
    assert tensor.dtype == torch.int32, f"int32 is needed, found {tensor.dtype}"
    assert tensor.is_contiguous()
    assert tuple(tensor.shape) == shape, f"shape {shape} is needed, found {tuple(tensor.shape)}"
    if device is not None:
        assert tensor.device.type == device, f"{device} is needed, found {tensor.device}"


def is_indptr(tensor: object, count: int | None = None, device: str | None = None) -> list[int]:
    """Hold a tensor to cumulated counts from 0; returns them."""
    assert isinstance(tensor, Tensor)
    is_index(tensor, len(tensor) if count is None else count + 1, device=device)
    values = tensor.tolist()
    assert values[0] == 0, f"cumulated counts start at {values[0]}"
    assert values == sorted(values), f"cumulated counts fall: {values}"
    return values


def is_heads(x: Tensor, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Hold queries, keys or values to a shape and a dtype, with the channels side by side."""
    assert tuple(x.shape) == (tokens, heads, dim), f"found {tuple(x.shape)}"
    assert x.dtype == dtype
    assert x.stride(-1) == 1, "channels have to lie side by side"
