"""A run as data, for recordings and widgets: events, text, times, one layer's cache bytes."""

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pagedlab.block_table import BlockTable
from pagedlab.engine import Engine, Request
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import KVLayout
from pagedlab.recordings import encode_events
from pagedlab.tokenizer import Detokenizer, Tokenizer

MAX_ROW_BYTES = 256 * 1024  # that travel with one widget or recording


class RunRecorder:
    """Steps an engine and keeps what happens.

    A step's K and V are read right after it, before their blocks can be reused; a request's last
    row is missing where its blocks were given back within the step that wrote it.

    Args:
        engine: one that logs its events (`Engine(..., events=[])`).
        requests: those to show the text of, where some are finished already.
        layer: the layer whose cache bytes are kept.

    Raises:
        ValueError: an engine without events, a layer that it does not have.
    """

    def __init__(self, engine: Engine, requests: Iterable[Request] = (), layer: int = 0) -> None:
        if engine.events is None:
            raise ValueError("engine: expected one that logs (Engine(..., events=[])), got none")
        if not 0 <= layer < engine.table.num_layers:
            raise ValueError(f"layer: expected 0 <= layer < {engine.table.num_layers}, got {layer}")
        self.engine, self.layer = engine, layer
        self.requests = {request.id: request for request in requests}
        self.rows = CacheRows(engine.cache)
        self.step_ms: list[float] = []
        self._kept: dict[int, int] = {}  # request -> positions whose rows are kept
        self._meet()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self.engine.scheduler.queue or self.engine.scheduler.running)

    def run(self, steps: int | None = None) -> None:
        """Step until idle, or `steps` times at most."""
        done = 0
        while not self.idle and done != steps:
            self.step()
            done += 1

    def step(self) -> None:
        """One step of the engine, timed, and the cache rows it wrote."""
        self._meet()
        start = time.perf_counter()
        self.engine.step()
        if self.engine.cache.buffer.is_cuda:
            torch.cuda.synchronize()
        self.step_ms.append(round((time.perf_counter() - start) * 1000, 3))
        for request in self.engine.scheduler.running:
            kept = self._kept.get(request.id, 0)
            if kept < request.num_cached:
                self.rows.add(
                    self.engine.table,
                    request.slot,
                    self.layer,
                    request.id,
                    kept,
                    request.num_cached,
                )
                self._kept[request.id] = request.num_cached

    def data(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """The run so far, as JSON: what DecodeExplorer shows and a "decode" recording holds.

        Without a tokenizer a token's piece of text is its id.
        """
        engine = self.engine
        return {
            "layout": layout_data(engine.cache.layout),
            "size": table_size(engine.table, engine.pool.num_blocks),
            "layer": self.layer,
            "events": encode_events(engine.events or ()),
            "step_ms": self.step_ms,
            "requests": {
                str(number): {
                    "prompt_ids": request.prompt,
                    "ids": request.tokens,
                    "prompt": pieces(tokenizer, request.prompt),
                    "tokens": pieces(tokenizer, request.tokens),
                    "finish_reason": request.finish_reason,
                }
                for number, request in sorted(self.requests.items())
            },
            "stored": {
                "rows": list(self.rows.index),
                "raw": base64.b64encode(self.rows.raw).decode(),
            },
        }

    def _meet(self) -> None:
        scheduler = self.engine.scheduler
        for request in (*scheduler.queue, *scheduler.running):
            self.requests.setdefault(request.id, request)


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """One piece of text per id: special tokens by name, "⋯" while a character is unfinished."""
    if tokenizer is None:
        return [f"⟨{token_id}⟩" for token_id in ids]
    detokenizer = Detokenizer(tokenizer)
    texts = []
    for token_id in ids:
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        texts.append(detokenizer.push(token_id) or ("⋯" if "\ufffd" in alone else alone))
    return texts


def layout_data(layout: KVLayout) -> dict[str, Any]:
    """The sizes that a view needs, as JSON: counts, then v_offset and what follows in bytes."""
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
    """Tokens' K and V, each read twice: as bytes at their address and through the tensor view.

    Attributes:
        index: where each stretch of positions begins: [{sequence, layer, start, count, row}].
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
            {
                "sequence": sequence,
                "layer": layer,
                "start": start,
                "count": stop - start,
                "row": row,
            }
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
