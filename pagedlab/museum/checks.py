"""The public checks: what every part must do, the package's own and the museum's (chapter 12)."""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from pagedlab.block_pool import BlockPool, NotAllocated, PoolError
from pagedlab.block_table import BlockTable
from pagedlab.checkpoint import pick_device
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, KVLayout
from pagedlab.llama import rope_rotation
from pagedlab.museum.prefix_cache import PrefixCache, Sequence
from pagedlab.reference import gathered_attention
from pagedlab.stand_in import NeedsTriton

LAYOUT = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
NUM_LAYERS, NUM_Q_HEADS = 3, 6


class Batch(NamedTuple):
    """What paged_attention takes, in its order; layer 1 is the one that holds tokens."""

    q: torch.Tensor
    cache: PagedKVCache
    table: BlockTable
    seq_lens: torch.Tensor
    active_slots: torch.Tensor
    layer: int


def demand(holds: bool, what: str, expected: object, got: object) -> None:
    """Raise a one-line AssertionError unless a condition holds."""
    if not holds:
        raise AssertionError(f"{what}: expected {expected}, got {got}")


def rows(values: Iterable[int]) -> torch.Tensor:
    """int32, one per row of a batch."""
    return torch.tensor(list(values), dtype=torch.int32, device=pick_device())


def make_batch(lengths: list[int], *, num_layers: int = NUM_LAYERS, seed: int = 0) -> Batch:
    """Rows of these lengths in slots and blocks of no order; NaN wherever no token is."""
    generator, device = torch.Generator().manual_seed(seed), pick_device()
    num_slots, max_blocks_per_seq = len(lengths) + 1, 3
    num_blocks = num_slots * max_blocks_per_seq * num_layers + 2
    cache = PagedKVCache(LAYOUT, num_blocks, device)
    cache.buffer.fill_(math.nan)
    table = BlockTable(num_slots, num_layers, max_blocks_per_seq, device)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    slots = torch.randperm(num_slots, generator=generator).tolist()[: len(lengths)]
    for slot, length in zip(slots, lengths, strict=True):
        for logical_block in range(LAYOUT.num_logical_blocks(length)):
            table.assign_layers(slot, logical_block, [free.pop() for _ in range(num_layers)])
        shape = length, LAYOUT.num_kv_heads, LAYOUT.head_dim
        k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
        cache.write(k, v, table, slot, layer=1, start=0)
    table.sync()
    q = torch.randn(len(lengths), NUM_Q_HEADS, LAYOUT.head_dim, generator=generator).to(device)
    return Batch(q, cache, table, rows(lengths), rows(slots), 1)


def check_attention(attention: Callable[..., torch.Tensor]) -> None:
    """As gathered_attention says, for lengths at the edges of blocks, an empty row, low scores."""
    batch = make_batch([5, 0, 1, 8])
    expect_rows(attention(*batch), gathered_attention(*batch), batch.seq_lens)

    low = make_batch([3], seed=1)  # scores of -131072 and below, every one exact
    low.q.fill_(64.0)
    block = low.table.lookup(int(low.active_slots[0]), 1, 0)
    low.cache.k_view()[block, :3] = -rows([513, 512, 514]).view(3, 1, 1).float()
    expect_rows(attention(*low), gathered_attention(*low), low.seq_lens)

    lost = make_batch([7], seed=2)  # its second block was never assigned
    table = BlockTable(*lost.table.host.shape, pick_device())
    slot = int(lost.active_slots[0])
    table.assign(slot, 1, 0, lost.table.lookup(slot, 1, 0))
    lost.cache.buffer.nan_to_num_(0.0)
    try:
        out = attention(*lost._replace(table=table))
    except NeedsTriton:
        raise
    except ValueError:
        return
    demand(bool(out.isnan().all()), "a row with -1 inside its length", "nan", f"{out[0, 0, 0]:.4f}")


def expect_rows(got: torch.Tensor, expected: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Every row and query head as expected, NaN nowhere; the first that is not is named."""
    close = torch.isclose(got, expected, rtol=1e-4, atol=1e-5)
    for row, head, lane in (~close).nonzero().tolist()[:1]:
        what = f"row of {int(seq_lens[row])} tokens, query head {head}, lane {lane}"
        x, y = (f"{float(tensor[row, head, lane]):.4f}" for tensor in (expected, got))
        demand(False, what, x, y)


def check_append(append: Callable[..., None]) -> None:
    """PagedKVCache.append: every row's token is found again, in a cache with odd sizes."""
    batch = make_batch([5, 2, 1, 8])
    k, v = torch.randn(2, 4, LAYOUT.num_kv_heads, LAYOUT.head_dim, device=pick_device())
    append(batch.cache, k, v, batch.table, batch.seq_lens, batch.active_slots, 1)
    for row, (length, slot) in enumerate(zip(*(x.tolist() for x in batch[3:5]), strict=True)):
        stored = torch.stack(batch.cache.gather(batch.table, slot, 1, length))[:, -1]
        holds = torch.equal(stored, torch.stack((k[row], v[row])))
        demand(holds, f"token {length - 1} of slot {slot}", "its own K and V", "others")


def check_write(write: Callable[..., None]) -> None:
    """write_kv: each row's token at its place; a row that does not fit writes nothing."""
    batch = make_batch([12, 9, 12])
    capacity = batch.table.max_blocks_per_seq * LAYOUT.block_size
    k, v = torch.randn(2, 3, LAYOUT.num_kv_heads, LAYOUT.head_dim, device=pick_device())
    before = batch.cache.buffer.clone()
    seq_lens = rows(
        [12, 9, capacity + 1]
    )  # the last row's position is one beyond its slot's blocks
    at = {"seq_lens": seq_lens, "active_slots": batch.active_slots}
    write(k, v, batch.cache.buffer, batch.table.device, 1, LAYOUT, **at)
    for row in range(2):
        slot, length = int(batch.active_slots[row]), int(seq_lens[row])
        stored = batch.cache.gather(batch.table, slot, 1, length)[0][-1]
        holds = torch.equal(stored, k[row])
        demand(holds, f"token {length - 1} of slot {slot}", "its own K", "another")
    old, new = (
        x.view(batch.cache.blocks.shape).nan_to_num(7.0) for x in (before, batch.cache.buffer)
    )
    changed = (old != new).any(-1).any(-1).any(1).nonzero().tolist()
    demand(len(changed) == 2, "tokens written by two rows that fit", 2, len(changed))


def check_addresses(addresses: Callable[..., list[int]]) -> None:
    """KVLayout.k_address, `addresses(layout, blocks, tokens)`, below and beyond 2**31 bytes."""
    for block, token in [(0, 0), (3, 1), (65_535, 15), (65_536, 0), (131_071, 0), (131_072, 5)]:
        expected = LLAMA_3_2_1B.k_address(block, token, 0, 0)
        (got,) = addresses(LLAMA_3_2_1B, [block], [token])
        demand(got == expected, f"block {block}, token {token}", f"byte {expected}", got)


def check_pool(pool_class: Callable[[int], BlockPool]) -> None:
    """BlockPool: no block has two owners, whatever is released, and check_integrity agrees."""
    for again in ([3], [3, 2, 3], [2, 2]):
        pool = pool_class(5)
        owned = pool.allocate(2)  # 4 and 3
        owned += pool.allocate(1)  # 2
        if again == [3]:
            pool.release([3])
        try:
            pool.release(again)
        except NotAllocated:
            pass
        else:
            raise AssertionError(f"release({again}): expected NotAllocated, got no error")
        try:
            pool.check_integrity()
        except PoolError as error:
            raise AssertionError(str(error)) from None


def check_vacate(vacate: Callable[..., None]) -> None:
    """`vacate(table, pool, slot)`: what is free stands in no row of the table, and all are kept."""
    pool, table = BlockPool(12), BlockTable(num_slots=2, num_layers=2, max_blocks_per_seq=3)
    for slot, num_blocks in (0, 3), (1, 2):
        for logical_block in range(num_blocks):
            table.assign_layers(slot, logical_block, pool.allocate(2))
    kept = table.host[1].copy()
    vacate(table, pool, 0)
    pool.check_integrity()
    for place in np.argwhere(table.host >= 0).tolist():
        block = table.lookup(*place)
        free = block in pool.free_blocks
        demand(not free, f"block_table{place}", "a block that is not free", block)
    demand((table.host[1] == kept).all(), "slot 1", "what it had", table.host[1].tolist())
    demand(pool.num_free == 12 - 4, "free blocks", 8, pool.num_free)


def check_merge(merge: Callable[..., torch.Tensor]) -> None:
    """`merge(maxima, sums, accs)` [.., 2] of two parts: the softmax mean of both, zeros of none."""
    generator = torch.Generator().manual_seed(0)
    for first, second in (3, 4), (0, 4), (3, 0), (0, 0):
        scores = torch.randn(first + second, generator=generator) * 9
        values = torch.randn(first + second, LAYOUT.head_dim, generator=generator)
        got = merge(*partials(scores, values, first))
        expected = scores.softmax(0) @ values
        what = f"parts of {first} and {second} tokens"
        close = torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
        demand(close, what, f"{float(expected[0]):.4f}", f"{float(got[0]):.4f}")


def partials(scores: torch.Tensor, values: torch.Tensor, at: int) -> list[torch.Tensor]:
    """Maxima [2], sums [2] and accs [2, head_dim] of the tokens before `at`, and from it on."""
    parts = []
    for part, v in (scores[:at], values[:at]), (scores[at:], values[at:]):
        largest = part.max() if len(part) else torch.tensor(-math.inf)
        weights = torch.exp(part - largest)
        parts.append((largest, weights.sum(), weights @ v))
    return [torch.stack(states) for states in zip(*parts, strict=True)]


def check_rotation(rotate: Callable[..., torch.Tensor]) -> None:
    """llama.rotate: lane i and lane i + head_dim / 2 turn together, as prefill turned the keys."""
    frequencies = torch.tensor([1.0, 0.3, 0.01, 0.002])
    x = torch.arange(1.0, 17.0).view(2, 1, 8)
    positions = torch.tensor([0, 17])
    got = rotate(x, *rope_rotation(positions, frequencies))
    turn = torch.polar(torch.ones(2, 1, 4), (positions[:, None] * frequencies)[:, None])
    turned = torch.complex(x[..., :4], x[..., 4:]) * turn
    expected = torch.cat((turned.real, turned.imag), -1)
    for row, head, lane in (~torch.isclose(got, expected)).nonzero().tolist()[:1]:
        wanted, came = (f"{float(tensor[row, head, lane]):.4f}" for tensor in (expected, got))
        demand(False, f"position {int(positions[row])}, lane {lane}", wanted, came)


def check_generate(generate: Callable[..., list[int]]) -> None:
    """`generate(model, ids, num_tokens, cache, table)`: one position per token, and no gap."""
    from pagedlab.checkpoint import LlamaConfig
    from pagedlab.llama import Llama

    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_layers=2,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=50,
        max_seq_len=40,
    )
    lengths: list[int] = []

    class Watched(Llama):
        def decode(
            self, token_ids: Any, cache: Any, table: Any, seq_lens: Any, *rest: Any, **kw: Any
        ):  # type: ignore[no-untyped-def]
            lengths.extend(seq_lens.tolist())
            return super().decode(token_ids, cache, table, seq_lens, *rest, **kw)

    model, ids = Watched.random(config), [7, 8, 9, 10, 11, 12]
    cache, table = PagedKVCache(LAYOUT, 20), BlockTable(1, 2, max_blocks_per_seq=10)
    for logical_block in range(10):
        table.assign_layers(0, logical_block, [2 * logical_block, 2 * logical_block + 1])
    answer = generate(model, ids, 4, cache, table)
    for step, length in enumerate(lengths):
        expected = len(ids) + step + 1
        demand(length == expected, f"length in decode step {step}", expected, length)
    for at, token in enumerate(answer):
        expected = int(model.prefill([*ids, *answer[:at]], cache, table, 0).argmax())
        demand(token == expected, f"token {at}", expected, token)


def check_prefixes(prefix_class: type[PrefixCache]) -> None:
    """PrefixCache: what is used again is the sequence's own, and the rest is computed, no more.

    A token's K and V depend on all tokens before it, so the whole text stands for them here.
    """
    draw = random.Random(0)
    prefixes, stored = prefix_class(num_blocks=8, block_size=2), [[()] * 2 for _ in range(8)]
    running: list[Sequence] = []
    for _ in range(300):
        if len(running) == 2 or (running and draw.random() < 0.4):
            preempted = running.pop(draw.randrange(len(running)))
            prefixes.release(preempted)
            if draw.random() < 0.5:
                continue
            sequence = preempted  # comes back with the tokens it has
        else:
            sequence = Sequence([draw.randrange(2) for _ in range(draw.randint(1, 8))])
        positions = prefixes.schedule(sequence)
        running.append(sequence)
        ids, text = sequence.ids, lambda position, ids=sequence.ids: tuple(ids[: position + 1])
        what = f"tokens to compute, of {len(ids)}"
        demand(len(positions) > 0, what, "one at least", 0)
        expected = f"{sequence.num_cached} to {len(ids) - 1}"
        got = f"{positions.start} to {positions.stop - 1}"
        demand(got == expected, f"positions to compute, of {len(ids)} tokens", expected, got)
        for position in positions:
            logical_block, token = divmod(position, 2)
            stored[sequence.blocks[logical_block]][token] = text(position)
        for owner in running:
            for position in range(len(owner.ids)):
                found = stored[owner.blocks[position // 2]][position % 2]
                holds = found == tuple(owner.ids[: position + 1])
                what = f"K of token {position} after {owner.ids[:position]}"
                demand(holds, what, "its own", f"that of {list(found)}")
        blocks = [*prefixes.free_blocks, *{b for owner in running for b in owner.blocks}]
        demand(sorted(blocks) == [*range(8)], "blocks free or owned", [*range(8)], sorted(blocks))
