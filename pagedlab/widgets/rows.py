"""What views are told about layouts, tables and the bytes that a cache holds."""

from typing import Any

import torch

from pagedlab.block_table import BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import KVLayout

MAX_ROW_BYTES = 256 * 1024  # of cache bytes that travel with one widget


def layout_data(layout: KVLayout) -> dict[str, Any]:
    """The sizes that a view needs, as JSON; bytes except block_size, num_kv_heads, head_dim, kv_dim."""
    names = ("block_size", "num_kv_heads", "head_dim", "kv_dim", "v_offset", "block_bytes")
    sizes: dict[str, Any] = {name: getattr(layout, name) for name in names}
    sizes["itemsize"] = layout.dtype.itemsize
    sizes["dtype"] = str(layout.dtype).removeprefix("torch.")
    return sizes


def table_size(table: BlockTable, num_blocks: int) -> dict[str, int]:
    """A table's dimensions and the blocks of its pool, as JSON."""
    return {
        "num_slots": table.num_slots,
        "num_layers": table.num_layers,
        "max_blocks_per_seq": table.max_blocks_per_seq,
        "num_blocks": num_blocks,
    }


class CacheRows:
    """Copies of tokens' K and V, each read twice: as bytes at their address and through the tensor view.

    Attributes:
        index: where the copies of each (sequence, layer) begin: [{sequence, layer, start, count, row}].
        raw: [num_rows, 2 (K, V), kv_dim] elements as the cache's own bytes.
        values: the same elements as little-endian float32.
    """

    def __init__(self, cache: PagedKVCache, max_bytes: int = MAX_ROW_BYTES) -> None:
        self.cache = cache
        self.max_bytes = max_bytes
        self.index: list[dict[str, int]] = []
        self.raw = bytearray()
        self.values = bytearray()
        self._bytes = cache.buffer.view(torch.uint8)

    def add_slot(self, table: BlockTable, slot: int, layer: int, length: int | None = None) -> None:
        """Copy one layer of a slot from position 0, as far as its blocks and max_bytes go."""
        layout = self.cache.layout
        assigned = int((table.host[slot, layer] >= 0).sum()) * layout.block_size
        self.add(table, slot, layer, slot, 0, assigned if length is None else min(length, assigned))

    def add(
        self, table: BlockTable, slot: int, layer: int, sequence: int, start: int, stop: int
    ) -> None:
        """Copy positions start to stop - 1 of a slot as rows of `sequence`."""
        layout = self.cache.layout
        row_bytes = layout.kv_dim * layout.dtype.itemsize
        room = (self.max_bytes - len(self.raw)) // (2 * row_bytes)
        stop = min(stop, start + room)
        if stop <= start:
            return
        row = len(self.raw) // (2 * row_bytes)
        self.index.append(
            {"sequence": sequence, "layer": layer, "start": start, "count": stop - start, "row": row}
        )
        sections = (
            (layout.k_address, self.cache.k_view()),
            (layout.v_address, self.cache.v_view()),
        )
        for position in range(start, stop):
            logical_block, token_in_block = divmod(position, layout.block_size)
            block = table.lookup(slot, layer, logical_block)
            for address, view in sections:
                byte = address(block, token_in_block, 0, 0)
                self.raw += bytes(self._bytes[byte : byte + row_bytes].cpu().numpy())
                row_values = view[block, token_in_block].float().flatten().cpu().numpy()
                self.values += row_values.astype("<f4").tobytes()
