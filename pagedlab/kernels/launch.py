"""The arguments that every attention kernel takes, read off its tensors in one place."""

from typing import Any

import torch

from pagedlab.layout import KVLayout

# integers that must not compile a kernel anew when their divisibility changes
SIZES = ("layer", "num_slots", "num_blocks", "max_blocks_per_seq")
STRIDES = ("stride_q", "stride_out", "stride_k", "stride_v", "stride_slot", "stride_layer")
RUNTIME_INTEGERS = [*SIZES, *STRIDES]


def attention_arguments(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    active_slots: torch.Tensor,
    layer: int,
    layout: KVLayout,
    out: torch.Tensor,
    scale: float,
) -> dict[str, Any]:
    """A launcher's arguments as its kernel's, by name: pointers, sizes, strides, constexprs."""
    return {
        "q_ptr": q,
        "cache_ptr": cache,
        "table_ptr": block_table,
        "seq_lens_ptr": seq_lens,
        "active_slots_ptr": active_slots,
        "out_ptr": out,
        "layer": layer,
        "scale": scale,
        "num_slots": block_table.shape[0],
        "num_blocks": cache.nbytes // layout.block_bytes,
        "max_blocks_per_seq": block_table.shape[2],
        "stride_q": q.stride(0),
        "stride_out": out.stride(0),
        "stride_slot": block_table.stride(0),
        "stride_layer": block_table.stride(1),
        "BLOCK_SIZE": layout.block_size,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "GROUP_SIZE": q.shape[1] // layout.num_kv_heads,
    }
