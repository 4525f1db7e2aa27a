"""Random decode batches that several test files share."""

from dataclasses import dataclass

import torch

from pagedlab import BlockTable, KVLayout, PagedKVCache

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Batch:
    """What paged_attention takes, and the keys and values that were written, row by row."""

    cache: PagedKVCache
    table: BlockTable
    seq_lens: torch.Tensor
    active_slots: torch.Tensor
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def args(self) -> tuple:
        return self.q, self.cache, self.table, self.seq_lens, self.active_slots


def make_batch(
    layout: KVLayout,
    lengths: list[int],
    *,
    num_q_heads: int,
    layer: int = 1,
    num_layers: int = 3,
    seed: int = 0,
    device: str = "cpu",
    poison: float = float("nan"),
) -> Batch:
    """Rows of the given lengths in permuted slots and blocks; `poison` wherever no token is."""
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(lengths) + 2
    needed = sum(layout.num_logical_blocks(length) for length in lengths)
    cache = PagedKVCache(layout, needed + 3, device)
    cache.buffer.fill_(poison)
    max_blocks = max([layout.num_logical_blocks(length) for length in lengths], default=0) + 1
    table = BlockTable(num_slots, num_layers, max_blocks, device)
    free = torch.randperm(needed + 3, generator=generator).tolist()
    slots = torch.randperm(num_slots, generator=generator)[: len(lengths)].tolist()
    keys, values = [], []
    for slot, length in zip(slots, lengths, strict=True):
        for logical_block in range(layout.num_logical_blocks(length)):
            table.assign(slot, layer, logical_block, free.pop())
        shape = (length, layout.num_kv_heads, layout.head_dim)
        k = torch.randn(shape, generator=generator).to(device, layout.dtype)
        v = torch.randn(shape, generator=generator).to(device, layout.dtype)
        cache.write(k, v, table, slot, layer, 0)
        keys.append(k)
        values.append(v)
    q = torch.randn(len(lengths), num_q_heads, layout.head_dim, generator=generator)
    return Batch(
        cache,
        table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        q.to(device, layout.dtype),
        keys,
        values,
    )
