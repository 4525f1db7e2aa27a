"""AddressCalculator: from a token to a byte of the cache and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets

from pagedlab.block_table import BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import KVLayout, ModelLayout
from pagedlab.run_recorder import MAX_ROW_BYTES, CacheRows, layout_data, table_size
from pagedlab.widgets.base import Panel, View, choice, complain, css, esm, number_box, slider

SECTIONS = ("K", "V")
MAX_EXACT = 2**53  # integers up to here are exact in JavaScript


class AddressView(View):
    """What AddressCalculator draws; its integer traits are the state."""

    _esm = esm("AddressCalculator", "panes", "address")
    _css = css("panes")
    table = traitlets.Bytes(b"").tag(sync=True)
    raw = traitlets.Bytes(b"").tag(sync=True)
    values = traitlets.Bytes(b"").tag(sync=True)
    slot = traitlets.Int(0).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(0).tag(sync=True)
    physical_block = traitlets.Int(0).tag(sync=True)
    token_in_block = traitlets.Int(0).tag(sync=True)
    section = traitlets.Int(0).tag(sync=True)
    kv_head = traitlets.Int(0).tag(sync=True)
    lane = traitlets.Int(0).tag(sync=True)
    byte = traitlets.Int(0).tag(sync=True)


class AddressCalculator(Panel):
    """Three substitutions from a token to a byte, the block to scale, and the inverse.

    With a table the reader chooses slot, layer and position; without one, a physical block.

    Args:
        layout: how a block lies in memory.
        table: the block table to look positions up in.
        cache: the cache whose bytes are shown at the address; needs a table. As much travels with
            the widget as fits into 256 KiB, the shown layer and slot first; elsewhere the value is
            "not recorded".
        seq_lens: tokens of each slot, int [num_slots]; by default whatever the table's blocks hold.
        num_blocks: blocks of the cache, where neither cache nor layout says.
        name: prefix in permalinks, when a page has several.
        predict: start with the byte hidden.
        **state: where to start: slot, layer, token, physical_block, token_in_block, section (0 K,
            1 V), kv_head, lane.

    >>> from pagedlab import LLAMA_3_2_1B
    >>> start = {"physical_block": 3, "token_in_block": 5, "kv_head": 2, "lane": 7}
    >>> AddressCalculator(LLAMA_3_2_1B, **start).view.byte
    103694
    """

    def __init__(
        self,
        layout: KVLayout,
        table: BlockTable | None = None,
        cache: PagedKVCache | None = None,
        *,
        seq_lens: Sequence[int] | None = None,
        num_blocks: int | None = None,
        name: str = "address",
        predict: bool = False,
        **state: int,
    ) -> None:
        try:
            view = _address_view(layout, table, cache, seq_lens, num_blocks, state)
        except ValueError as error:
            super().__init__(complain(error))
            return
        view.name, view.predict = name, predict
        super().__init__(view, _controls(view, layout))


def _address_view(
    layout: KVLayout,
    table: BlockTable | None,
    cache: PagedKVCache | None,
    seq_lens: Sequence[int] | None,
    num_blocks: int | None,
    state: Mapping[str, int],
) -> AddressView:
    if num_blocks is None:
        if cache is not None:
            num_blocks = cache.num_blocks
        elif isinstance(layout, ModelLayout):
            num_blocks = layout.num_blocks(layout.cache_bytes)
        else:
            num_blocks = max(64, 0 if table is None else int(table.host.max()) + 1)
    if num_blocks * layout.block_bytes > MAX_EXACT:
        raise ValueError(
            f"num_blocks: expected a cache of at most 2**53 bytes, got {num_blocks} blocks"
            f" of {layout.block_bytes}"
        )
    here = {"token": 17, "physical_block": 3, "token_in_block": 1, "lane": 7} | dict(state)
    data: dict[str, Any] = {
        "title": "address calculator",
        "layout": layout_data(layout),
        "num_blocks": num_blocks,
    }
    buffers: dict[str, bytes] = {}
    limits = {
        "section": 2,
        "kv_head": layout.num_kv_heads,
        "lane": layout.head_dim,
        "token_in_block": layout.block_size,
        "physical_block": num_blocks,
    }
    if table is not None:
        data["size"] = table_size(table, num_blocks)
        data["seq_lens"] = None if seq_lens is None else [int(length) for length in seq_lens]
        buffers["table"] = table.host.tobytes()
        limits |= {
            "slot": table.num_slots,
            "layer": table.num_layers,
            "token": table.max_blocks_per_seq * layout.block_size,
        }
        if cache is not None:
            itemsize = layout.dtype.itemsize
            rows = CacheRows(cache, MAX_ROW_BYTES * itemsize // (itemsize + 4))  # 4: of a float32
            for layer in first_to_last(here.get("layer", 0), table.num_layers):
                for slot in first_to_last(here.get("slot", 0), table.num_slots):
                    length = None if seq_lens is None else int(seq_lens[slot])
                    rows.add_slot(table, slot, layer, length)
            data["stored"] = {"rows": rows.index}
            buffers |= {"raw": bytes(rows.raw), "values": bytes(rows.values)}
    for key, value in here.items():
        if key not in limits and not (table is None and key in ("slot", "layer", "token")):
            raise ValueError(f"state: expected one of {', '.join(limits)}, got {key}")
        if key in limits and key in state and not 0 <= value < limits[key]:
            raise ValueError(f"{key}: expected 0 <= {key} < {limits[key]}, got {value}")
        here[key] = min(value, limits.get(key, 1) - 1)
    view = AddressView(data=data, **buffers, **here)
    view.byte = _byte(view, layout, table)
    return view


def first_to_last(first: int, stop: int) -> list[int]:
    """0 to stop - 1, `first` in front."""
    return sorted(range(stop), key=lambda number: number != first)


def _byte(view: AddressView, layout: KVLayout, table: BlockTable | None) -> int:
    block, token = view.physical_block, view.token_in_block
    if table is not None:
        logical_block, token = divmod(view.token, layout.block_size)
        block = table.lookup(view.slot, view.layer, logical_block)
    if block < 0:
        return 0
    locate = layout.v_address if view.section else layout.k_address
    return locate(block, token, view.kv_head, view.lane)


def _controls(view: AddressView, layout: KVLayout) -> dict[str, Any]:
    size = view.data.get("size")
    num_blocks = view.data["num_blocks"]
    if size is None:
        controls = {
            "physical_block": number_box(view, "physical_block", num_blocks, "physical block"),
            "token_in_block": slider(view, "token_in_block", layout.block_size, "token in block"),
        }
    else:
        capacity = size["max_blocks_per_seq"] * layout.block_size
        controls = {
            "slot": slider(view, "slot", size["num_slots"], "slot"),
            "layer": slider(view, "layer", size["num_layers"], "layer"),
            "token": slider(view, "token", capacity, "position", wide=True),
        }
    return controls | {
        "kv_head": slider(view, "kv_head", layout.num_kv_heads, "kv head"),
        "lane": slider(view, "lane", layout.head_dim, "lane"),
        "section": choice(view, "section", SECTIONS, "K or V"),
        "byte": number_box(view, "byte", num_blocks * layout.block_bytes, "byte"),
    }
