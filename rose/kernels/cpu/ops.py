"""The operations of `rose.kernels.dispatch` that the CPU kernels compute, for float32.

Each takes the arguments of the torch function of its name, and returns None for what it does not
know: another dtype, or tensors that do not lie side by side. Shape letters: T tokens, C channels,
H query heads, K key/value heads, D head size or pooled channels, R rotary channels, P pages,
S slots of a page, B sequences.
"""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.kernels.cpu.library import HeadsStruct, load_library

if TYPE_CHECKING:
    from rose.kernels.heads import HeadNorms, Rotation

# Names of `rose.kernels.pooling.POOLINGS`, by their number in C++.
POOLING_NUMBERS = {
    "mean": 0,
    "mean_sqrt_len": 1,
    "weightedmean": 2,
    "max": 3,
    "cls": 4,
    "last": 5,
}
MIN_POOLED = 16  # channels; pooling works with whole vectors


def rms_norm(
    x_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0
) -> Tensor | None:
    """Divide by the root mean square and scale."""
    library = load_library()
    if library is None or not _are_plain(x_TC, weight_C):
        return None
    y_TC, width = torch.empty_like(x_TC), x_TC.shape[-1]
    library.rms_norm(
        x_TC.data_ptr(),
        None,
        weight_C.data_ptr(),
        weight_offset,
        y_TC.data_ptr(),
        None,
        x_TC.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return y_TC


def add_rms_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor] | None:
    """Return `(rms_norm(x + residual), x + residual)`."""
    library = load_library()
    if library is None or not _are_plain(x_TC, residual_TC, weight_C):
        return None
    y_TC, total_TC, width = torch.empty_like(x_TC), torch.empty_like(x_TC), x_TC.shape[-1]
    library.rms_norm(
        x_TC.data_ptr(),
        residual_TC.data_ptr(),
        weight_C.data_ptr(),
        weight_offset,
        y_TC.data_ptr(),
        total_TC.data_ptr(),
        x_TC.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return y_TC, total_TC


def layer_norm(x_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float) -> Tensor | None:
    """Subtract the mean, divide by the standard deviation, scale and shift."""
    y_TC = torch.empty_like(x_TC)
    return y_TC if _layer_norm(x_TC, None, weight_C, bias_C, eps, y_TC, None) else None


def add_layer_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> Tensor | None:
    """Return `layer_norm(x + residual)`."""
    y_TC = torch.empty_like(x_TC)
    return y_TC if _layer_norm(x_TC, residual_TC, weight_C, bias_C, eps, y_TC, y_TC) else None


def add_layer_norm_with_sum(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return `(layer_norm(x + residual), x + residual)`."""
    y_TC, total_TC = torch.empty_like(x_TC), torch.empty_like(x_TC)
    done = _layer_norm(x_TC, residual_TC, weight_C, bias_C, eps, y_TC, total_TC)
    return (y_TC, total_TC) if done else None


def _layer_norm(
    x_TC: Tensor,
    residual_TC: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor | None,
    eps: float,
    y_TC: Tensor,
    total_TC: Tensor | None,
) -> bool:
    """Norm x, or x + residual, which goes to `total_TC`; says whether it could."""
    library, width = load_library(), x_TC.shape[-1]
    tensors = [t for t in (x_TC, residual_TC, weight_C, bias_C) if t is not None]
    if library is None or not _are_plain(*tensors):
        return False
    library.layer_norm(
        x_TC.data_ptr(),
        None if residual_TC is None else residual_TC.data_ptr(),
        weight_C.data_ptr(),
        None if bias_C is None else bias_C.data_ptr(),
        y_TC.data_ptr(),
        None if total_TC is None else total_TC.data_ptr(),
        x_TC.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return True


def norm_and_rotate(
    q_THD: Tensor, k_TKD: Tensor, rotation: "Rotation", norms: "HeadNorms | None"
) -> tuple[Tensor, Tensor] | None:
    """Norm the heads where there are norms, then rotate them."""
    k_out_TKD = torch.empty_like(k_TKD, memory_format=torch.contiguous_format)
    q_out_THD = _norm_and_rotate(q_THD, k_TKD, None, rotation, norms, k_out_TKD, None, None)
    return None if q_out_THD is None else (q_out_THD, k_out_TKD)


def norm_rotate_and_store(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rotation: "Rotation",
    norms: "HeadNorms | None",
    keys_PSKD: Tensor,
    values_PSKD: Tensor,
    slots_T: Tensor,
) -> Tensor | None:
    """Do `norm_and_rotate` and `store_kv` at once; returns the queries."""
    if not (_has_dense_heads(v_TKD) and _are_plain(keys_PSKD, values_PSKD)):
        return None
    return _norm_and_rotate(q_THD, k_TKD, v_TKD, rotation, norms, keys_PSKD, values_PSKD, slots_T)


def _norm_and_rotate(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor | None,
    rotation: "Rotation",
    norms: "HeadNorms | None",
    k_out: Tensor,
    v_out: Tensor | None,
    slots_T: Tensor | None,
) -> Tensor | None:
    """Return the queries, or None if it cannot; the rest goes to k_out and v_out."""
    library, (cos_TR, sin_TR) = load_library(), rotation
    weights = () if norms is None else (norms.q_weight, norms.k_weight)
    if library is None or not (
        _has_dense_heads(q_THD, k_TKD) and _are_plain(cos_TR, sin_TR, *weights)
    ):
        return None
    q_out_THD = q_THD.new_empty(q_THD.shape)
    heads = HeadsStruct(
        q_THD.shape[1],
        k_TKD.shape[1],
        q_THD.shape[2],
        cos_TR.shape[1],
        *(
            (None, None)
            if norms is None
            else (norms.q_weight.data_ptr(), norms.k_weight.data_ptr())
        ),
        0.0 if norms is None else norms.weight_offset,
        0.0 if norms is None else norms.eps,
    )
    library.norm_and_rotate(
        ctypes.addressof(heads),
        q_THD.data_ptr(),
        q_THD.stride(0),
        k_TKD.data_ptr(),
        k_TKD.stride(0),
        None if v_TKD is None else v_TKD.data_ptr(),
        0 if v_TKD is None else v_TKD.stride(0),
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
        None if slots_T is None else slots_T.data_ptr(),
        q_out_THD.data_ptr(),
        k_out.data_ptr(),
        None if v_out is None else v_out.data_ptr(),
        q_THD.shape[0],
        torch.get_num_threads(),
    )
    return q_out_THD


def embed_and_norm(
    ids_T: Tensor,
    positions_T: Tensor,
    types_T: Tensor | None,
    words_VC: Tensor,
    positions_PC: Tensor,
    types_KC: Tensor,
    weight_C: Tensor,
    bias_C: Tensor | None,
    eps: float,
) -> Tensor | None:
    """Return layer_norm(word + segment + position)."""
    library = load_library()
    floats = [words_VC, positions_PC, types_KC, weight_C, *([] if bias_C is None else [bias_C])]
    ids = [ids_T, positions_T, *([] if types_T is None else [types_T])]
    if library is None or not (_are_plain(*floats) and _are_ids(*ids)):
        return None
    y_TC = words_VC.new_empty((ids_T.shape[0], words_VC.shape[1]))
    library.embed_and_norm(
        ids_T.data_ptr(),
        positions_T.data_ptr(),
        None if types_T is None else types_T.data_ptr(),
        words_VC.data_ptr(),
        positions_PC.data_ptr(),
        types_KC.data_ptr(),
        weight_C.data_ptr(),
        None if bias_C is None else bias_C.data_ptr(),
        y_TC.data_ptr(),
        *y_TC.shape,
        eps,
        torch.get_num_threads(),
    )
    return y_TC


def pool_and_finish(
    x_TC: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor | None,
    mode: str,
    width: int,
    normalize: bool,
) -> Tensor | None:
    """Pool each sequence and keep the first `width` channels; float32 [B, width]."""
    library, channels = load_library(), x_TC.shape[1]
    indices = [cu_seqlens] if starts is None else [cu_seqlens, starts]
    if library is None or normalize or mode not in POOLING_NUMBERS or channels < MIN_POOLED:
        return None
    if not (_are_plain(x_TC) and all(_is_int32(t) for t in indices)):
        return None
    sequences = cu_seqlens.shape[0] - 1
    y_BD = x_TC.new_empty((sequences, min(width, channels)))
    library.pool(
        x_TC.data_ptr(),
        cu_seqlens.data_ptr(),
        None if starts is None else starts.data_ptr(),
        POOLING_NUMBERS[mode],
        y_BD.data_ptr(),
        sequences,
        channels,
        y_BD.shape[1],
        torch.get_num_threads(),
    )
    return y_BD


def store_kv(
    k_TKD: Tensor, v_TKD: Tensor, keys_PSKD: Tensor, values_PSKD: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Write keys and values into their slots; returns the pages, changed in place."""
    library = load_library()
    if library is None or not (
        _has_dense_heads(k_TKD, v_TKD) and _are_plain(keys_PSKD, values_PSKD) and _are_ids(slots_T)
    ):
        return None
    library.store_rows(
        k_TKD.data_ptr(),
        k_TKD.stride(0),
        v_TKD.data_ptr(),
        v_TKD.stride(0),
        slots_T.data_ptr(),
        slots_T.shape[0],
        k_TKD.shape[1] * k_TKD.shape[2],
        keys_PSKD.data_ptr(),
        values_PSKD.data_ptr(),
        torch.get_num_threads(),
    )
    return keys_PSKD, values_PSKD


def _are_plain(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _are_ids(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.int64 and t.is_contiguous() for t in tensors)


def _has_dense_heads(*tensors: Tensor) -> bool:
    """Say whether the heads of each token lie side by side; tokens may be apart."""
    return all(
        t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == t.shape[2] for t in tensors
    )


def _is_int32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int32 and tensor.is_contiguous()
