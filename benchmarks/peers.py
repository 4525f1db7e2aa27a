"""Other projects' kernels on the blocks of attention.py's setups, where they are installed.

Each function takes a Setup and returns a call that takes a layer and returns the output, [num_seqs,
num_q_heads, head_dim]. It raises ImportError where its project is missing.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

Call = Callable[[int], torch.Tensor]
WORKSPACE_BYTES = 256 * 2**20


def first_blocks(setup: Any) -> torch.Tensor:
    """Where each sequence's blocks begin in setup.block_ids[layer], and the end, [num_seqs + 1]."""
    blocks = (setup.seq_lens + setup.case.block_size - 1) // setup.case.block_size
    return pad(blocks.cumsum(0), (1, 0)).to(torch.int32)


@cache
def compiled_flex_attention() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_attention(setup: Any) -> Call:
    """torch's flex_attention over the whole cache, with a block mask made of the table.

    Two tensors that overlap are its keys and values: every section of the cache but the last, and
    all but the first. A sequence's last block goes to kv_indices, whose mask is evaluated, and the
    others to full_kv_indices. Both are as wide as the cache has sections, though few entries count:
    where the widths differ, compiled flex_attention reads the wrong blocks and says nothing.
    """
    from torch.nn.attention.flex_attention import BlockMask

    layout, table, device = setup.cache.layout, setup.table.device, setup.device
    block_size, num_seqs = layout.block_size, len(setup.seq_lens)
    sections = setup.cache.tokens.view(1, -1, layout.num_kv_heads, layout.head_dim).transpose(1, 2)
    k, v = sections[:, :, :-block_size], sections[:, :, block_size:]
    last = (setup.seq_lens - 1) // block_size
    filled = torch.full((2 * setup.cache.num_blocks,), block_size, device=device)
    for layer in range(setup.num_layers):
        ends = table[setup.active_slots, layer, last].long()
        filled[2 * ends] = (setup.seq_lens - last * block_size).long()
    q = setup.q[:, :, None]  # [num_seqs, num_q_heads, 1, head_dim]

    def holds_token(b: Any, h: Any, q_index: Any, kv_index: Any) -> Any:
        return kv_index % block_size < filled[kv_index // block_size]

    def mask(layer: int) -> BlockMask:
        blocks = 2 * table[:num_seqs, layer].clamp(min=0)  # in sections of the cache
        shape = (num_seqs, 1, 1, k.shape[2] // block_size)
        full = pad(blocks, (0, shape[3] - blocks.shape[1])).view(shape)
        part = torch.zeros_like(full)
        part[..., 0] = blocks.gather(1, last[:, None].long()).view(num_seqs, 1, 1)
        return BlockMask.from_kv_blocks(
            torch.ones(shape[:3], dtype=torch.int32, device=device),
            part,
            last.view(shape[:3]).contiguous(),
            full,
            BLOCK_SIZE=(128, block_size),
            mask_mod=holds_token,
            seq_lengths=(1, k.shape[2]),
            compute_q_blocks=False,
        )

    masks = [mask(layer) for layer in range(setup.num_layers)]
    run = compiled_flex_attention()
    k, v = k.expand(num_seqs, -1, -1, -1), v.expand(num_seqs, -1, -1, -1)
    return lambda layer: run(q, k, v, block_mask=masks[layer], enable_gqa=True)[:, :, 0]


def flash_infer(setup: Any) -> Call:
    """FlashInfer's decode wrapper on tensor cores, planned once a layer, outside of the time."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    case, device = setup.case, setup.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    last_page_len = (setup.seq_lens - 1) % case.block_size + 1
    wrappers = []
    for layer in range(setup.num_layers):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            first_blocks(setup),
            setup.block_ids[layer],
            last_page_len,
            case.num_q_heads,
            case.num_kv_heads,
            case.head_dim,
            case.block_size,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )
        wrappers.append(wrapper)
    return lambda layer: wrappers[layer].run(setup.q, setup.cache.blocks)


def flash_attention_3(setup: Any) -> Call:
    """FlashAttention 3 with a page table; it chooses its own splits."""
    from flash_attn_interface import flash_attn_with_kvcache

    q, k, v = setup.q[:, None], setup.cache.k_view(), setup.cache.v_view()
    tables = [setup.table.device[:, layer].contiguous() for layer in range(setup.num_layers)]
    options = {"cache_seqlens": setup.seq_lens, "causal": True}

    def call(layer: int) -> torch.Tensor:
        return flash_attn_with_kvcache(q, k, v, page_table=tables[layer], **options)[:, 0]

    return call


def vllm_flash_attention(setup: Any) -> Call:
    """The kernel that vLLM runs on Hopper: its own build of FlashAttention 3."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    num_seqs = len(setup.seq_lens)
    tables = [setup.table.device[:, layer].contiguous() for layer in range(setup.num_layers)]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=setup.device)
    options = {
        "max_seqlen_q": 1,
        "cu_seqlens_q": starts,
        "max_seqlen_k": max(setup.case.lengths),
        "seqused_k": setup.seq_lens,
        "causal": True,
        "fa_version": 3,
    }
    kv = setup.cache.k_view(), setup.cache.v_view()
    return lambda layer: flash_attn_varlen_func(setup.q, *kv, block_table=tables[layer], **options)


PEERS: dict[str, Callable[[Any], Call]] = {
    "flex_attention": flex_attention,
    "FlashInfer": flash_infer,
    "FlashAttention 3": flash_attention_3,
    "vLLM FlashAttention 3": vllm_flash_attention,
}
