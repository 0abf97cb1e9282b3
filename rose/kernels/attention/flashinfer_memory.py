"""How much memory FlashInfer's plans take, after the scheduler of version 0.6.11."""

ALIGNMENT = 16
INT_SLACK = 4096  # bytes for alignment and single numbers
SM90_WORK_ARRAYS = 7
MAX_SHARED_WORKS = 4096  # works of a head from which all heads share one schedule
DECODE_BLOCKS_PER_SM = 16  # 2,048 threads of an SM by at least 128 of a block


def query_tile(packed_len: int, head_dim: int) -> int:
    """Return the rows of fa2's query tile: `packed_len` is tokens times heads of a group."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def split_rows(
    tokens: int, sequences: int, heads: int, kv_heads: int, head_dim: int, sms: int
) -> int:
    """Return the rows of partial results that fa2 may hold when it splits keys, per query head."""
    group = heads // kv_heads
    tile = query_tile(max(1, tokens - sequences + 1) * group, head_dim)
    tiles = -(-tokens * group // tile) + sequences - 1
    return max(2 * sms // kv_heads, tiles) * tile


def float_workspace_bytes(
    tokens: int, sequences: int, heads: int, kv_heads: int, head_dim: int, sms: int
) -> int:
    """Return the float workspace that fa2 needs in a graph of so many tokens and sequences.

    A batch outside a graph needs no more than `eager_workspace_bytes`.
    """
    rows = split_rows(tokens, sequences, heads, kv_heads, head_dim, sms)
    return heads * rows * (head_dim + 1) * 4 + 2 * ALIGNMENT


def eager_workspace_bytes(heads: int, kv_heads: int, head_dim: int, sms: int) -> int:
    """Return the float workspace of a batch outside a graph, which splits what fits the SMs."""
    return heads * (2 * sms // kv_heads + 1) * 128 * (head_dim + 1) * 4 + 2 * ALIGNMENT


def decode_workspace_bytes(
    heads: int, kv_heads: int, head_dim: int, sequences: int, sms: int
) -> int:
    """Return the float workspace of decode steps of up to `sequences` sequences."""
    rows = max(sequences, DECODE_BLOCKS_PER_SM * sms // kv_heads)
    by_cores = heads * rows * (head_dim + 1) * 4
    return max(
        by_cores, float_workspace_bytes(sequences, sequences, heads, kv_heads, head_dim, sms)
    )


def int_workspace_bytes(tokens: int, sequences: int, heads: int, kv_heads: int, sms: int) -> int:
    """Return the int workspace of a graph of so many tokens and sequences, for any kernel."""
    group = heads // kv_heads
    tiles = max(2 * sms, DECODE_BLOCKS_PER_SM * sms) // kv_heads
    tiles = max(tiles, -(-tokens * group // 16) + sequences)
    fa2 = 4 * (3 * tiles + 2 * sequences + tokens + 2) + tiles
    works = -(-tokens // 128) + sequences
    works *= 1 if works > MAX_SHARED_WORKS else heads
    fa3 = 4 * (SM90_WORK_ARRAYS * works + sms + 1)
    return max(fa2, fa3) + INT_SLACK
