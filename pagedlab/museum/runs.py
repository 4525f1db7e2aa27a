"""What a visitor sees: real runs of a part, sound or broken, in a few lines (chapter 12)."""

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from pagedlab.block_pool import BlockPool
from pagedlab.block_table import BlockTable
from pagedlab.checkpoint import pick_device
from pagedlab.engine import Engine
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, KVLayout
from pagedlab.llama import Llama
from pagedlab.museum.checks import LAYOUT, make_batch, rows
from pagedlab.museum.prefix_cache import PrefixCache, Sequence
from pagedlab.stand_in import NeedsTriton
from pagedlab.tokenizer import Tokenizer

Attention = Callable[..., torch.Tensor]
QUESTION = "What is the capital of Japan?"
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,"  # 16 tokens
COUNT = "One, two, three, four, five, six, seven, eight,"  # 16 tokens


@lru_cache(maxsize=1)
def demo_model() -> tuple[Llama, Tokenizer]:
    """The demo model in float32, and its tokenizer."""
    return Llama.from_checkpoint(dtype=torch.float32), Tokenizer.from_checkpoint()


def numbers(tensor: torch.Tensor) -> str:
    """The first four of them."""
    return "  ".join(f"{float(x):.3f}" for x in tensor.flatten()[:4])


def first_blocks(addresses: Callable[..., list[int]]) -> str:
    """Where the first block handed out begins, in caches of two sizes."""
    lines = []
    for gib in (2, 4):
        block = LLAMA_3_2_1B.num_blocks(gib * 1024**3) - 1
        (byte,) = addresses(LLAMA_3_2_1B, [block], [0])
        lines.append(f"{gib} GiB: block {block:,} begins at byte {byte:,}")
    return "\n".join(lines)


def where_tokens_went(append: Callable[..., None]) -> str:
    """Token 17 of B goes to block 3, in caches of 16 and of 17 blocks; where is it found?"""
    layout, lines = KVLayout(16, num_kv_heads=2, head_dim=16, dtype=torch.float32), []
    for num_blocks in (16, 17):
        cache = PagedKVCache(layout, num_blocks, pick_device())
        cache.buffer.fill_(math.nan)
        table = BlockTable(2, 1, 5, pick_device())
        for logical_block, block in enumerate((6, 3)):
            table.assign(1, 0, logical_block, block)
        k = torch.ones(1, 2, 16, device=pick_device())
        append(cache, k, k, table, rows([18]), rows([1]), 0)
        byte = int((~cache.buffer.isnan()).nonzero()[0]) * layout.dtype.itemsize
        at = layout.locate(byte)
        lines.append(f"{num_blocks} blocks: block {at.physical_block}, token {at.token_in_block}")
    return "\n".join(lines)


def who_was_overwritten(write: Callable[..., None]) -> str:
    """A sequence that fills all of its table row writes one token more, in layer 1 of 3."""
    batch = make_batch([12])
    batch.cache.buffer.fill_(0.0)
    k = torch.ones(1, LAYOUT.num_kv_heads, LAYOUT.head_dim, device=pick_device())
    at = {"seq_lens": rows([13]), "active_slots": batch.active_slots}
    write(k, k, batch.cache.buffer, batch.table.device, 1, LAYOUT, **at)
    slot, lines = int(batch.active_slots[0]), []
    for layer in range(batch.table.num_layers):
        k, _ = batch.cache.gather(batch.table, slot, layer, 12)
        changed = (k != 0).flatten(1).any(1).nonzero().flatten().tolist()
        lines.append(
            f"layer {layer}: " + (f"token {changed[0]} changed" if changed else "unharmed")
        )
    return "\n".join(lines)


def with_a_missing_block(attention: Attention) -> str:
    """Seven tokens, all values 1, and no block for the last three; block 0 is full of 100."""
    batch = make_batch([7], seed=2)
    slot = int(batch.active_slots[0])
    table = BlockTable(*batch.table.host.shape, pick_device())
    table.assign(slot, 1, 0, batch.table.lookup(slot, 1, 0))
    batch.cache.v_view()[:] = 1.0
    batch.cache.k_view()[0], batch.cache.v_view()[0] = 0.0, 100.0
    try:
        return numbers(attention(*batch._replace(table=table)))
    except NeedsTriton:
        raise
    except ValueError as error:
        return f"refused: {error}"


def in_a_used_block(attention: Attention) -> str:
    """Five tokens; the rest of the last block holds what its last owner left, then NaN."""
    batch = make_batch([5])
    batch.cache.buffer.nan_to_num_(9.0)
    clean = attention(*batch)
    block = batch.table.lookup(int(batch.active_slots[0]), 1, 1)
    batch.cache.v_view()[block, 1:] = math.nan
    return f"old numbers behind: {numbers(clean)}\nNaN behind:         {numbers(attention(*batch))}"


def of_equal_values(attention: Attention) -> str:
    """The mean of ones, for lengths around a block's end."""
    lines = []
    for length in (3, 4, 5):
        batch = make_batch([length])
        batch.cache.v_view()[:] = 1.0
        lines.append(f"{length} tokens: {numbers(attention(*batch))}")
    return "\n".join(lines)


def with_low_scores(attention: Attention) -> str:
    """One query at growing distance from its keys; the values are 1, 2 and 3."""
    lines = []
    for size in (1.0, 10.0, 100.0):
        batch = make_batch([3], seed=1)
        block = batch.table.lookup(int(batch.active_slots[0]), 1, 0)
        batch.q.fill_(size)
        batch.cache.k_view()[block, :3] = -rows([201, 200, 202]).view(3, 1, 1) * size
        batch.cache.v_view()[block, :3] = rows([1, 2, 3]).view(3, 1, 1).float()
        score = -200 * size**2 * LAYOUT.head_dim**0.5
        lines.append(f"best score {score:12,.0f}: {numbers(attention(*batch))}")
    return "\n".join(lines)


def with_an_empty_row(attention: Attention) -> str:
    """A batch in which one row has no token."""
    batch = make_batch([5, 0, 1])
    lines = zip(batch.seq_lens.tolist(), attention(*batch), strict=True)
    return "\n".join(f"{length} tokens: {numbers(row)}" for length, row in lines)


def of_parts(merge: Callable[..., torch.Tensor]) -> str:
    """Two parts merged: both filled, one of them empty, both empty."""
    lines = []
    for first, second in (4, 4), (0, 4), (0, 0):
        maxima = torch.tensor([0.0 if n else -math.inf for n in (first, second)])
        sums = torch.tensor([float(first), float(second)])
        merged = merge(maxima, sums, sums[:, None].repeat(1, 16))
        lines.append(f"{first} and {second} tokens: {numbers(merged)}")
    return "\n".join(lines)


def released_in_one_call(pool_class: Callable[[int], BlockPool]) -> str:
    """Release the same block twice in one call, and let two requests have blocks."""
    pool = pool_class(4)
    (block,) = pool.allocate(1)
    try:
        pool.release([block, block])
    except ValueError as error:
        return f"refused: {error}"
    return f"A gets {pool.allocate(1)}, B gets {pool.allocate(1)}"


def after_it_moved_out(vacate: Callable[..., None]) -> str:
    """A leaves slot 0, B gets its block; then a padded row of the batch still names slot 0."""
    pool, table = BlockPool(1), BlockTable(2, 1, 1, pick_device())
    cache = PagedKVCache(LAYOUT, 1, pick_device())
    ones = torch.ones(1, LAYOUT.num_kv_heads, LAYOUT.head_dim, device=pick_device())
    table.assign(0, 0, 0, *pool.allocate(1))
    vacate(table, pool, 0)
    table.assign(1, 0, 0, *pool.allocate(1))
    cache.append(ones, ones, table, rows([1]), rows([1]), 0)
    try:
        cache.append(7 * ones, 7 * ones, table, rows([1]), rows([0]), 0)
    except ValueError as error:
        return f"refused: {error}"
    return f"B wrote 1 and reads {float(cache.gather(table, 1, 0, 1)[0][0, 0, 0]):.0f}"


def says(model: Llama, tokenizer: Tokenizer, question: str = QUESTION, **parts: Any) -> str:
    """What the demo model answers through an engine with these parts."""
    engine = Engine(model, 1, max_seq_len=64, **parts)
    request = engine.submit(tokenizer.chat(question), max_new_tokens=8)
    engine.run()
    return repr(tokenizer.decode(request.tokens))


def says_with_attention(attention: Attention) -> str:
    """The demo model's answer, its decode steps through this attention."""
    model, tokenizer = demo_model()
    return says(model, tokenizer, attention=attention)


def says_with_decode_rotation(rotate: Callable[..., torch.Tensor]) -> str:
    """The demo model's answer, its prompt rotated as ever and its decode steps by this."""
    model, tokenizer = demo_model()
    turned = copy.copy(model)

    def decode(*args: Any, **kwargs: Any) -> torch.Tensor:
        with mock.patch("pagedlab.llama.rotate", rotate):
            return model.decode(*args, **kwargs)

    turned.decode = decode  # type: ignore[method-assign]
    return says(turned, tokenizer)


def says_with_generate(generate: Callable[..., list[int]]) -> str:
    """How the demo model goes on, in a slot that has held the days of the week before."""
    model, tokenizer = demo_model()
    num_layers = model.config.num_layers
    table = BlockTable(1, num_layers, 8, model.device)
    for logical_block in range(8):
        first = logical_block * num_layers
        table.assign_layers(0, logical_block, range(first, first + num_layers))
    cache = PagedKVCache(model.kv_layout(), 8 * num_layers, model.device)
    model.prefill(tokenizer.encode(f"{DAYS} {COUNT} " * 3), cache, table, slot=0)
    begun = "The capital of Japan is"
    tokens = generate(model, tokenizer.encode(begun), 12, cache, table)
    return repr(begun + tokenizer.decode(tokens))


class Shop:
    """The demo model behind a prefix cache: one question at a time, in whole blocks of 8 tokens."""

    def __init__(self, prefix_class: Callable[[int, int], PrefixCache], num_blocks: int) -> None:
        self.model, self.tokenizer = demo_model()
        self.prefixes = prefix_class(num_blocks, 8)
        layers = self.model.config.num_layers
        self.cache = PagedKVCache(self.model.kv_layout(8), num_blocks * layers, self.model.device)

    def answer(self, text: str) -> str:
        """The likeliest next token after this text, and how many tokens were computed for it."""
        sequence, layers = Sequence(self.tokenizer.encode(text)), self.model.config.num_layers
        positions = self.prefixes.schedule(sequence)
        table = BlockTable(1, layers, len(sequence.blocks), self.model.device)
        for logical_block, block in enumerate(sequence.blocks):  # one block, in every layer
            table.assign_layers(0, logical_block, range(block * layers, (block + 1) * layers))
        new = [sequence.ids[position] for position in positions]
        logits = self.model.prefill(new, self.cache, table, 0, start=positions.start)
        self.prefixes.release(sequence)
        token = self.tokenizer.decode([int(logits.argmax())])
        return f"{token!r} ({len(new)} of {len(sequence.ids)} tokens computed)"

    def answers(self, *texts: str) -> str:
        """An answer per text, or the error in its place."""
        lines = []
        for text in texts:
            try:
                lines.append(f"...{text[-20:]} {self.answer(text)}")
            except (ValueError, IndexError) as error:
                lines.append(f"...{text[-20:]} {type(error).__name__}: {error}")
        return "\n".join(lines)


def asked_again_later(prefix_class: Callable[[int, int], PrefixCache]) -> str:
    """A question; another one that needs all of the blocks; the first one again."""
    return Shop(prefix_class, 2).answers(DAYS, COUNT, DAYS)


def asked_twice(prefix_class: Callable[[int, int], PrefixCache]) -> str:
    """A question of two whole blocks, twice."""
    return Shop(prefix_class, 4).answers(DAYS, DAYS)


def back_after_preemption(prefix_class: Callable[[int, int], PrefixCache]) -> str:
    """A sequence is computed, loses its blocks, and is scheduled again."""
    return Shop(prefix_class, 4).answers(COUNT[:-8], COUNT[:-8])
