"""From a small kernel of the museum to the part that it stands for: who launches it, on what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagedlab.attention import check_batch
from pagedlab.checkpoint import pick_device
from pagedlab.layout import KVLayout


def attention_with(kernel: Any, *, checked: bool = True) -> Callable[..., torch.Tensor]:
    """A kernel over (row, query head) as a function with paged_attention's arguments.

    It refuses what check_batch refuses, unless it is not `checked`.
    """

    def attention(q, cache, table, seq_lens, active_slots, layer):
        at, out = cache.layout, torch.empty_like(q)
        if checked:
            only = slice(layer, layer + 1)
            check_batch(table, seq_lens, active_slots, block_size=at.block_size, layers=only)
        table.sync(layer)
        batch = q, cache.buffer, table.device, seq_lens, active_slots, out
        table_sizes = layer, table.num_layers, table.max_blocks_per_seq
        sizes = at.block_size, at.num_kv_heads, at.head_dim, q.shape[1] // at.num_kv_heads
        with np.errstate(all="ignore"):  # a NaN in the interpreter is an answer, no warning
            kernel[q.shape[:2]](*batch, *table_sizes, at.head_dim**-0.5, *sizes)
        return out

    return attention


def write_with(kernel: Any) -> Callable[..., None]:
    """A kernel over rows as a function with write_kv's arguments, those of decode."""

    def write(k, v, cache, block_table, layer, layout, *, seq_lens, active_slots):
        rows = seq_lens, active_slots
        sizes = *block_table.shape[1:], layout.block_size, layout.kv_dim
        kernel[(k.shape[0],)](k, v, cache, block_table, *rows, layer, *sizes)

    return write


def addresses_with(kernel: Any) -> Callable[..., list[int]]:
    """A kernel over entries as `addresses(layout, blocks, tokens)`, a byte for each pair."""

    def addresses(layout: KVLayout, blocks: list[int], tokens: list[int]) -> list[int]:
        pairs = torch.tensor([blocks, tokens], dtype=torch.int32, device=pick_device())
        out = torch.empty(len(blocks), dtype=torch.int64, device=pick_device())
        token_bytes = layout.kv_dim * layout.dtype.itemsize
        with np.errstate(all="ignore"):
            kernel[(len(blocks),)](*pairs, out, layout.block_bytes, token_bytes)
        return out.tolist()

    return addresses


def merge_with(kernel: Any) -> Callable[..., torch.Tensor]:
    """A kernel of one program as `merge(maxima, sums, accs)`."""

    def merge(maxima: torch.Tensor, sums: torch.Tensor, accs: torch.Tensor) -> torch.Tensor:
        states = [state.to(pick_device()) for state in (maxima, sums, accs)]
        out = torch.empty_like(states[2][0])
        with np.errstate(all="ignore"):
            kernel[(1,)](*states, out, out.numel())
        return out.cpu()

    return merge
