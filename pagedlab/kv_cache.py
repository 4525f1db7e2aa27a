"""One flat buffer of blocks, and how tokens are written into it (chapter 3)."""

from typing import Any

import torch

from pagedlab.block_table import BlockTable
from pagedlab.layout import KVLayout, expect, expect_in_range
from pagedlab.stand_in import has_triton


def expect_tensor(name: str, x: object) -> None:
    """Raise ValueError unless x is a torch tensor."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")


def expect_rows(
    seq_lens: torch.Tensor, active_slots: torch.Tensor, num_active: int, device: torch.device
) -> None:
    """Raise ValueError unless both are contiguous int32 [num_active] on `device`."""
    for name, rows in (("seq_lens", seq_lens), ("active_slots", active_slots)):
        expect_tensor(name, rows)
        if rows.shape != (num_active,) or rows.dtype != torch.int32 or not rows.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous int32 [{num_active}],"
                f" got {rows.dtype} {list(rows.shape)} with stride {rows.stride()}"
            )
        if rows.device != device:
            raise ValueError(f"{name}: expected device {device}, got {rows.device}")


class PagedKVCache:
    """`num_blocks` blocks of keys and values in one buffer.

    `buffer` is flat, num_blocks * block_bytes / itemsize elements of layout.dtype; the byte
    addresses of KVLayout count from its start. `blocks` is the same memory seen as
    [num_blocks, 2 (K, V), block_size, num_kv_heads, head_dim].

    Args:
        layout: how a block lies in memory.
        num_blocks: physical blocks.
        device: where the buffer lives.

    Raises:
        ValueError: num_blocks is not a positive integer.

    Source: the tiny-vllm article, section on what one block holds.

    >>> layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    >>> cache = PagedKVCache(layout, num_blocks=3)
    >>> cache.k_view().shape, cache.buffer.nbytes == 3 * layout.block_bytes
    (torch.Size([3, 4, 2, 16]), True)
    """

    @torch.inference_mode(False)  # the buffer is written in any mode
    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        num_blocks = expect_in_range("num_blocks", num_blocks, start=1)
        elements = num_blocks * layout.block_bytes // layout.dtype.itemsize
        buffer = torch.zeros(elements, dtype=layout.dtype, device=device)
        self.__setstate__((layout, num_blocks, buffer))

    def __getstate__(self) -> tuple:
        return self.layout, self.num_blocks, self.buffer

    def __setstate__(self, state: tuple) -> None:
        """Also what a copied or unpickled cache gets: views of its own buffer."""
        self.layout, self.num_blocks, self.buffer = state
        layout = self.layout
        self.blocks = self.buffer.view(
            self.num_blocks, 2, layout.block_size, layout.num_kv_heads, layout.head_dim
        )
        self.rows = self.buffer.view(2 * self.num_blocks, -1)  # one row per K or V section
        self.tokens = self.buffer.view(-1, layout.kv_dim)  # one row per token's K or V

    def k_view(self) -> torch.Tensor:
        """K of every block, a view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.blocks[:, 0]

    def v_view(self) -> torch.Tensor:
        """V of every block, a view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.blocks[:, 1]

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        slot: int,
        layer: int,
        start: int,
    ) -> None:
        """Write the K and V of consecutive tokens of one slot (prefill).

        Args:
            k, v: [num_tokens, num_kv_heads, head_dim], layout.dtype, on the cache's device; the
                last two dimensions dense, row stride free.
            table: its entries for these tokens must be assigned.
            start: position of the first token.

        Raises:
            ValueError: a shape, dtype, device, slot, layer or position that does not fit, or a
                logical block that is unassigned; nothing is written.
        """
        self._expect_tokens(k, v, table)
        layer = expect_in_range("layer", layer, table.num_layers)
        slot = expect_in_range("slot", slot, table.num_slots)
        capacity = table.max_blocks_per_seq * self.layout.block_size
        start = expect_in_range("start", start, capacity + 1)
        end = start + k.shape[0]
        blocks = self._blocks(table, slot, layer, start, end)
        if self.buffer.is_cuda and has_triton():
            from pagedlab.kernels.write_kv import write_kv

            if end > start:
                table.sync(layer)
                write_kv(
                    k, v, self.buffer, table.device, layer, self.layout, slot=slot, start=start
                )
            return
        k, v = k.detach(), v.detach()
        token_in_block = start % self.layout.block_size
        for block in blocks:
            room = self.layout.block_size - token_in_block
            stop = token_in_block + min(room, k.shape[0])
            self.blocks[block, 0, token_in_block:stop] = k[:room]
            self.blocks[block, 1, token_in_block:stop] = v[:room]
            k, v, token_in_block = k[room:], v[room:], 0

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        table: BlockTable,
        seq_lens: torch.Tensor,
        active_slots: torch.Tensor,
        layer: int,
    ) -> None:
        """Write one token per active slot, at position seq_len - 1 (decode); length 0: nothing.

        Args:
            k, v: [num_active, num_kv_heads, head_dim], as for write.
            seq_lens: int32 [num_active], tokens including this one.
            active_slots: int32 [num_active], the slot of each row.

        Raises:
            ValueError: as write. On CUDA values are not read: a row that does not fit writes
                nothing.
        """
        self._expect_tokens(k, v, table)
        layer = expect_in_range("layer", layer, table.num_layers)
        expect_rows(seq_lens, active_slots, k.shape[0], self.buffer.device)
        if self.buffer.is_cuda and has_triton():
            from pagedlab.kernels.write_kv import write_kv

            if k.shape[0] == 0:
                return
            if not torch.cuda.is_current_stream_capturing():
                table.sync(layer)
            batch: dict[str, Any] = {"seq_lens": seq_lens, "active_slots": active_slots}
            write_kv(k, v, self.buffer, table.device, layer, self.layout, **batch)
            return
        block_size = self.layout.block_size
        alive, k_rows = [], []  # rows of the batch, and where in `tokens` their K goes
        rows = zip(seq_lens.tolist(), active_slots.tolist(), strict=True)
        for row, (seq_len, slot) in enumerate(rows):
            position = seq_len - 1 if seq_len else 0
            for block in self._blocks(table, slot, layer, position, seq_len):
                alive.append(row)
                k_rows.append(2 * block * block_size + position % block_size)
        if not alive:
            return
        if len(alive) < k.shape[0]:
            k, v = k[alive], v[alive]
        places = torch.tensor([k_rows, [row + block_size for row in k_rows]]).to(k.device)
        both = torch.cat((k.detach(), v.detach())).flatten(1)  # [2 * num_tokens, kv_dim]
        self.tokens.index_copy_(0, places.flatten(), both)

    def gather(
        self, table: BlockTable, slot: int, layer: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first num_tokens tokens of a slot, [num_tokens, num_kv_heads, head_dim].

        Raises:
            ValueError: a slot, layer or length outside the table, or an unassigned block.
        """
        layer = expect_in_range("layer", layer, table.num_layers)
        capacity = table.max_blocks_per_seq * self.layout.block_size
        num_tokens = expect_in_range("num_tokens", num_tokens, capacity + 1)
        blocks = self._blocks(table, slot, layer, 0, num_tokens)
        k, v = self.gather_blocks(torch.tensor(blocks, dtype=torch.int64).to(self.buffer.device))
        return k[:num_tokens], v[:num_tokens]

    def gather_blocks(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of physical blocks in the given order, [tokens, num_kv_heads, head_dim] each."""
        k_rows = 2 * blocks.long()
        both = self.rows.index_select(0, torch.cat((k_rows, k_rows + 1)))
        k, v = both.view(2, -1, self.layout.num_kv_heads, self.layout.head_dim)
        return k, v

    def _expect_tokens(self, k: torch.Tensor, v: torch.Tensor, table: BlockTable) -> None:
        heads, head_dim = self.layout.num_kv_heads, self.layout.head_dim
        for name, x in (("k", k), ("v", v)):
            expect_tensor(name, x)
            if x.dim() != 3 or x.shape[1:] != (heads, head_dim) or x.shape != k.shape:
                raise ValueError(
                    f"{name}: expected [num_tokens, {heads}, {head_dim}], the same for k and v,"
                    f" got {list(x.shape)}"
                )
            if x.dtype != self.layout.dtype:
                raise ValueError(f"{name}: expected {self.layout.dtype}, got {x.dtype}")
            if x.device != self.buffer.device:
                raise ValueError(f"{name}: expected device {self.buffer.device}, got {x.device}")
            if x.shape[0] and not x[0].is_contiguous():
                raise ValueError(
                    f"{name}: expected dense last two dimensions, got stride {x.stride()}"
                )
        here, there = self.buffer.device, table.device.device
        expect(here == there, "table", f"device {here}", there)

    def _blocks(self, table: BlockTable, slot: int, layer: int, start: int, end: int) -> list[int]:
        """The physical blocks that hold positions start to end - 1 of a slot, each one checked."""
        capacity = table.max_blocks_per_seq * self.layout.block_size
        slot = expect_in_range("slot", slot, table.num_slots)
        if start < 0 or end > capacity:
            outside = start if start < 0 else end - 1
            raise ValueError(f"position: expected 0 <= position < {capacity}, got {outside}")
        if end == start:
            return []
        first = start // self.layout.block_size
        blocks = table.host[slot, layer, first : -(-end // self.layout.block_size)].tolist()
        for logical_block, block in enumerate(blocks, start=first):
            if not 0 <= block < self.num_blocks:
                raise ValueError(
                    f"block_table[{slot}, {layer}, {logical_block}]: expected a block of the cache"
                    f" (0 to {self.num_blocks - 1}), got {block}"
                )
        return blocks
