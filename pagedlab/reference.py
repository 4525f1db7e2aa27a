"""The specification of the kernels in plain torch, float32 inside, easy to read and slow."""

import math

import torch

from pagedlab.block_table import BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import expect_in_range


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Attention of one query token over contiguous keys and values.

    Args:
        q: [num_q_heads, head_dim].
        k, v: [num_tokens, num_kv_heads, head_dim]; num_q_heads / num_kv_heads consecutive q heads
            read the same kv head.
        scale: factor of the scores, 1 / sqrt(head_dim) by default.

    Returns:
        float32 [num_q_heads, head_dim]; zeros when there are no tokens.

    Source: Ainslie et al. 2023 (GQA) for the heads.

    >>> k = v = torch.ones(3, 1, 16)
    >>> dense_attention(torch.ones(2, 16), k, v).sum(1)
    tensor([16., 16.])
    """
    if k.shape[0] == 0:
        return torch.zeros(q.shape, device=q.device)
    group_size = q.shape[0] // k.shape[1]
    k = k.float().repeat_interleave(group_size, 1)  # [num_tokens, num_q_heads, head_dim]
    v = v.float().repeat_interleave(group_size, 1)
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    scores = torch.einsum("hd,thd->ht", q.float(), k) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(1), v)


@torch.no_grad()
def gathered_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: BlockTable,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What paged_attention must return: each row's blocks gathered, then dense attention.

    The arguments are those of paged_attention. A row whose slot, length or blocks do not exist is
    NaN; a row of length 0 is zeros.
    """
    layer = expect_in_range("layer", layer, table.num_layers)
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = zip(active_slots.tolist(), seq_lens.tolist(), strict=True)
    for row, (slot, seq_len) in enumerate(rows):
        try:
            k, v = cache.gather(table, slot, layer, seq_len)
            result[row] = dense_attention(q[row], k, v, scale)
        except ValueError:
            result[row] = math.nan
    return result if out is None else out.copy_(result)


def online_softmax(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(scores) @ values, one token at a time, with a running maximum.

    Args:
        scores: float32 [num_tokens].
        values: float32 [num_tokens, head_dim].

    Returns:
        float32 [head_dim]; zeros when there are no tokens.

    Source: Milakov and Gimelshein 2018; the tiny-vllm article, section on online softmax.

    >>> online_softmax(torch.tensor([0.0, 1000.0]), torch.tensor([[1.0], [2.0]]))
    tensor([2.])
    """
    running_max, d, acc = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(values.shape[1])
    for score, value in zip(scores, values, strict=True):
        new_max = torch.maximum(running_max, score)
        correction = torch.exp(running_max - new_max)
        weight = torch.exp(score - new_max)
        d = d * correction + weight
        acc = acc * correction + weight * value
        running_max = new_max
    return acc / d if len(scores) else acc


def tree_reduction(partial: torch.Tensor) -> list[torch.Tensor]:
    """Every level of the article's reduction: lanes 16, 8, 4, 2, 1 apart, then across the warps.

    Args:
        partial: float32 [head_dim], a power of two; one product q[lane] * k[lane] per lane.

    Returns:
        the values of the lanes that still count after each level, [num_warps, lanes], and last a
        scalar: the score before scaling.

    Source: the tiny-vllm article, section on one score; Harris 2007, parallel reduction.

    >>> [tuple(level.shape) for level in tree_reduction(torch.ones(64))]
    [(2, 32), (2, 16), (2, 8), (2, 4), (2, 2), (2, 1), ()]
    """
    if partial.dim() != 1 or partial.numel().bit_count() != 1:
        raise ValueError(f"partial: expected [a power of two], got {list(partial.shape)}")
    lanes = partial.reshape(-1, min(32, partial.numel()))  # [num_warps, 32]
    levels = [lanes]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
        levels.append(lanes)
    return [*levels, lanes.sum()]
