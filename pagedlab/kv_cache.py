"""One flat buffer of blocks, and how tokens are written into it (chapter 3)."""

from functools import cache as cached
from importlib.util import find_spec

import numpy as np
import torch

from pagedlab.block_table import BlockTable
from pagedlab.layout import KVLayout, expect_in_range


@cached
def has_triton() -> bool:
    """Whether triton is installed (Linux only)."""
    return find_spec("triton") is not None


def expect_rows(
    seq_lens: torch.Tensor, active_slots: torch.Tensor, num_active: int, device: torch.device
) -> None:
    """Raise ValueError unless both are contiguous int32 [num_active] on `device`."""
    for name, rows in (("seq_lens", seq_lens), ("active_slots", active_slots)):
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

    Source: the seed article, section on what one block holds.

    >>> layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    >>> cache = PagedKVCache(layout, num_blocks=3)
    >>> cache.k_view().shape, cache.buffer.nbytes == 3 * layout.block_bytes
    (torch.Size([3, 4, 2, 16]), True)
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise ValueError(f"num_blocks: expected a positive integer, got {num_blocks!r}")
        self.layout = layout
        self.num_blocks = num_blocks
        elements = num_blocks * layout.block_bytes // layout.dtype.itemsize
        self.buffer = torch.zeros(elements, dtype=layout.dtype, device=device)
        self.blocks = self.buffer.view(
            num_blocks, 2, layout.block_size, layout.num_kv_heads, layout.head_dim
        )
        self.rows = self.buffer.view(2 * num_blocks, -1)  # one row per K or V section

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
        self._expect_tokens(k, v, table, layer)
        expect_in_range("start", start, table.max_blocks_per_seq * self.layout.block_size + 1)
        slots = np.full(k.shape[0], slot)
        blocks, tokens = self._places(table, slots, layer, start + np.arange(k.shape[0]))
        if k.shape[0] == 0:
            return
        if self.buffer.is_cuda and has_triton():
            from pagedlab.kernels.write_kv import write_kv

            table.sync(layer)
            write_kv(k, v, self.buffer, table.device, layer, self.layout, slot=slot, start=start)
        else:
            self._scatter(k, v, blocks, tokens)

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
        self._expect_tokens(k, v, table, layer)
        expect_rows(seq_lens, active_slots, k.shape[0], self.buffer.device)
        if self.buffer.is_cuda and has_triton():
            from pagedlab.kernels.write_kv import write_kv

            if k.shape[0] == 0:
                return
            if not torch.cuda.is_current_stream_capturing():
                table.sync(layer)
            write_kv(
                k,
                v,
                self.buffer,
                table.device,
                layer,
                self.layout,
                seq_lens=seq_lens,
                active_slots=active_slots,
            )
            return
        lengths, slots = seq_lens.cpu().numpy(), active_slots.cpu().numpy()
        if not lengths.all():
            alive = torch.from_numpy(lengths != 0).to(k.device)
            k, v, lengths, slots = k[alive], v[alive], lengths[lengths != 0], slots[lengths != 0]
        self._scatter(k, v, *self._places(table, slots, layer, lengths - 1))

    def gather(
        self, table: BlockTable, slot: int, layer: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first num_tokens tokens of a slot, [num_tokens, num_kv_heads, head_dim].

        Raises:
            ValueError: a slot, layer or length outside the table, or an unassigned block.
        """
        expect_in_range("layer", layer, table.num_layers)
        capacity = table.max_blocks_per_seq * self.layout.block_size
        expect_in_range("num_tokens", num_tokens, capacity + 1)
        first_tokens = np.arange(0, num_tokens, self.layout.block_size)
        blocks, _ = self._places(table, np.full(len(first_tokens), slot), layer, first_tokens)
        k, v = self.gather_blocks(blocks.to(self.buffer.device))
        return k[:num_tokens], v[:num_tokens]

    def gather_blocks(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of physical blocks in the given order, [tokens, num_kv_heads, head_dim] each."""
        k_rows = 2 * blocks.long()
        both = self.rows.index_select(0, torch.cat((k_rows, k_rows + 1)))
        k, v = both.view(2, -1, self.layout.num_kv_heads, self.layout.head_dim)
        return k, v

    def _expect_tokens(
        self, k: torch.Tensor, v: torch.Tensor, table: BlockTable, layer: int
    ) -> None:
        heads, head_dim = self.layout.num_kv_heads, self.layout.head_dim
        for name, x in (("k", k), ("v", v)):
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
        if table.device.device != self.buffer.device:
            raise ValueError(
                f"table: expected device {self.buffer.device}, got {table.device.device}"
            )
        expect_in_range("layer", layer, table.num_layers)

    def _places(
        self, table: BlockTable, slots: np.ndarray, layer: int, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical block and token in block of each (slot, position), every one of them checked."""
        capacity = table.max_blocks_per_seq * self.layout.block_size
        for name, values, stop in (
            ("slot", slots, table.num_slots),
            ("position", positions, capacity),
        ):
            outside = values[(values < 0) | (values >= stop)]
            if outside.size:
                raise ValueError(f"{name}: expected 0 <= {name} < {stop}, got {outside[0]}")
        logical_blocks, tokens = np.divmod(positions, self.layout.block_size)
        blocks = table.host[slots, layer, logical_blocks].astype(np.int64)
        bad = np.flatnonzero((blocks < 0) | (blocks >= self.num_blocks))
        if bad.size:
            entry = f"{slots[bad[0]]}, {layer}, {logical_blocks[bad[0]]}"
            raise ValueError(
                f"block_table[{entry}]: expected a block of the cache (0 to {self.num_blocks - 1}),"
                f" got {blocks[bad[0]]}"
            )
        return torch.from_numpy(blocks), torch.from_numpy(tokens.astype(np.int64))

    def _scatter(
        self, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        blocks, tokens = blocks.to(self.buffer.device), tokens.to(self.buffer.device)
        self.blocks[blocks, 0, tokens] = k
        self.blocks[blocks, 1, tokens] = v
