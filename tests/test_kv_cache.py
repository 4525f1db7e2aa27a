"""Promises of the cache: a token's K and V lie where the table says, and nowhere else."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab import BlockTable, KVLayout, PagedKVCache
from pagedlab.kernels.write_kv import write_kv

layouts = st.builds(
    KVLayout,
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)


def make(layout, num_slots=3, num_layers=2, max_blocks=20, seed=0):
    """A cache full of NaN and a table whose every entry is assigned, blocks permuted."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_slots * num_layers * max_blocks + 2
    cache = PagedKVCache(layout, num_blocks)
    cache.buffer.fill_(float("nan"))
    table = BlockTable(num_slots, num_layers, max_blocks)
    blocks = torch.randperm(num_blocks, generator=generator).tolist()
    for slot in range(num_slots):
        for logical_block in range(max_blocks):
            table.assign_layers(slot, logical_block, [blocks.pop() for _ in range(num_layers)])
    return cache, table


def stored(cache, table, slot, layer, position):
    """K and V of one position, read by plain indexing."""
    logical_block, token = divmod(position, cache.layout.block_size)
    block = table.lookup(slot, layer, logical_block)
    return cache.k_view()[block, token], cache.v_view()[block, token]


def num_written(cache):
    """Tokens whose K (or V) holds something other than the poison."""
    return [int((~view.isnan()).all(-1).all(-1).sum()) for view in (cache.k_view(), cache.v_view())]


@given(layouts, st.integers(0, 20), st.integers(0, 40), st.integers(0, 2), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_write_puts_consecutive_tokens_where_the_table_says(layout, start, num_tokens, slot, layer):
    cache, table = make(layout, max_blocks=-(-60 // layout.block_size))
    fused = torch.randn(num_tokens, 3, layout.num_kv_heads, layout.head_dim).to(layout.dtype)
    k, v = fused[:, 0], fused[:, 2]  # rows are dense, the stride between them is not
    cache.write(k, v, table, slot, layer, start)
    for token in range(num_tokens):
        stored_k, stored_v = stored(cache, table, slot, layer, start + token)
        assert torch.equal(stored_k, k[token])
        assert torch.equal(stored_v, v[token])
    assert num_written(cache) == [num_tokens, num_tokens]
    if start == 0:
        gathered_k, gathered_v = cache.gather(table, slot, layer, num_tokens)
        assert torch.equal(gathered_k, k)
        assert torch.equal(gathered_v, v)


lengths_and_slots = st.permutations(range(5)).flatmap(
    lambda slots: st.lists(st.sampled_from([0, 1, 15, 16, 17, 33]), max_size=5).map(
        lambda lengths: (lengths, slots[: len(lengths)])
    )
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@given(layout=layouts, batch=lengths_and_slots, layer=st.integers(0, 1))
@settings(max_examples=200, deadline=None)
def test_append_writes_each_rows_token_and_nothing_else(backend, layout, batch, layer):
    lengths, slots = batch
    cache, table = make(layout, num_slots=5, max_blocks=-(-33 // layout.block_size))
    k = torch.randn(len(lengths), layout.num_kv_heads, layout.head_dim).to(layout.dtype)
    v = torch.randn_like(k)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    active_slots = torch.tensor(slots, dtype=torch.int32)
    if backend == "torch":
        cache.append(k, v, table, seq_lens, active_slots, layer)
    elif lengths:
        rows = {"seq_lens": seq_lens, "active_slots": active_slots}
        write_kv(k, v, cache.buffer, table.device, layer, layout, **rows)
    alive = [row for row, length in enumerate(lengths) if length]
    for row in alive:
        stored_k, stored_v = stored(cache, table, slots[row], layer, lengths[row] - 1)
        assert torch.equal(stored_k, k[row])
        assert torch.equal(stored_v, v[row])
    assert num_written(cache) == [len(alive), len(alive)]


@pytest.mark.parametrize("start", [0, 3, 16])
def test_the_prefill_kernel_writes_what_torch_writes(start):
    layout = KVLayout(block_size=8, num_kv_heads=3, head_dim=24, dtype=torch.float32)
    k, v = torch.randn(2, 21, 3, 24)
    by_torch, table = make(layout)
    by_torch.write(k, v, table, 2, 1, start)
    by_triton, _ = make(layout)
    write_kv(k, v, by_triton.buffer, table.device, 1, layout, slot=2, start=start)
    assert torch.equal(by_torch.buffer.nan_to_num(7), by_triton.buffer.nan_to_num(7))


@pytest.mark.parametrize(
    ("seq_len", "slot", "block"),
    [(-1, 0, 0), (41, 0, 0), (5, -1, 0), (5, 3, 0), (5, 1, -1), (5, 1, 2**20)],
)
def test_a_row_that_does_not_fit_writes_nothing(seq_len, slot, block):
    layout = KVLayout(block_size=8, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache, table = make(layout, max_blocks=5)
    device_table = table.device.clone()
    device_table[1, 1, 0] = block
    write_kv(
        torch.ones(1, 2, 16),
        torch.ones(1, 2, 16),
        cache.buffer,
        device_table,
        1,
        layout,
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        active_slots=torch.tensor([slot], dtype=torch.int32),
    )
    assert cache.buffer.isnan().all()


def rows(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, t, k: c.write(k, k[:1], t, 0, 0, 0), r"v: expected \[num_tokens, 2, 16\]"),
        (lambda c, t, k: c.write(k[0], k[0], t, 0, 0, 0), r"k: expected \[num_tokens, 2, 16\]"),
        (
            lambda c, t, k: c.write(k.half(), k, t, 0, 0, 0),
            "k: expected torch.float32, got torch.f",
        ),
        (
            lambda c, t, k: c.write(k.to("meta"), k, t, 0, 0, 0),
            "k: expected device cpu, got meta",
        ),
        (
            lambda c, t, k: c.write(torch.ones(2, 16, 2).mT, k, t, 0, 0, 0),
            "k: expected dense last two dimensions, got stride",
        ),
        (lambda c, t, k: c.write(k, k, t, 3, 0, 0), "slot: expected 0 <= slot < 3, got 3"),
        (lambda c, t, k: c.write(k, k, t, 0, 2, 0), "layer: expected 0 <= layer < 2, got 2"),
        (
            lambda c, t, k: c.write(k, k, t, 0, 0, 19),
            "position: expected 0 <= position < 20, got 20",
        ),
        (lambda c, t, k: c.write(k, k, t, 0, 0, -1), "start: expected 0 <= start < 21, got -1"),
        (lambda c, t, k: c.write(k, k, t, 2, 0, 3), r"block_table\[2, 0, 1\]: expected a block of"),
        (
            lambda c, t, k: c.append(k, k, t, rows(1, 21), rows(0, 1), 0),
            "position: expected 0 <= position < 20, got 20",
        ),
        (
            lambda c, t, k: c.append(k, k, t, rows(1, 1), rows(0, 3), 0),
            "slot: expected 0 <= slot < 3",
        ),
        (
            lambda c, t, k: c.append(k, k, t, rows(1), rows(0, 1), 0),
            r"seq_lens: expected contiguous",
        ),
        (
            lambda c, t, k: c.append(k, k, t, rows(1, 1), rows(0, 1).long(), 0),
            r"active_slots: expected contiguous int32 \[2\], got torch.int64",
        ),
        (
            lambda c, t, k: c.append(k, k, t, rows(1, 6), rows(0, 2), 0),
            r"block_table\[2, 0, 1\]: exp",
        ),
        (
            lambda c, t, k: c.gather(t, 0, 0, 21),
            "num_tokens: expected 0 <= num_tokens < 21, got 21",
        ),
        (
            lambda c, t, k: c.gather(t, 0, 0, -1),
            "num_tokens: expected 0 <= num_tokens < 21, got -1",
        ),
        (
            lambda c, t, k: c.append(k, k, t, rows(0, 0), rows(0, 99), 0),
            "slot: expected 0 <= slot < 3, got 99",
        ),
        (
            lambda c, t, k: c.write(k.numpy(), k, t, 0, 0, 0),
            "k: expected a tensor, got ndarray",
        ),
    ],
)
def test_a_refused_call_names_what_came_and_writes_nothing(call, message):
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache, table = make(layout, max_blocks=5)
    table.release_slot(2)
    table.assign_layers(2, 0, [0, 1])
    with pytest.raises(ValueError, match=message):
        call(cache, table, torch.ones(2, 2, 16))
    assert cache.buffer.isnan().all()


def test_a_cache_needs_blocks():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="num_blocks: expected num_blocks >= 1, got 0"):
        PagedKVCache(layout, 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copys_views_are_views_of_its_own_buffer(copied):
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache = PagedKVCache(layout, 3)
    twin = copied(cache)
    twin.k_view()[1, 2, 1, 7] = 5
    assert twin.buffer.sum() == twin.rows.sum() == 5
    assert cache.buffer.sum() == 0


def test_the_cache_is_no_part_of_a_gradient():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache, table = make(layout, max_blocks=5)
    k = torch.ones(2, 2, 16, requires_grad=True)
    cache.write(k, k, table, 0, 0, 0)
    cache.append(k, k, table, rows(3, 3), rows(0, 1), 0)
    assert not cache.buffer.requires_grad


def test_a_cache_made_in_inference_mode_can_be_written_outside():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    with torch.inference_mode():
        cache = PagedKVCache(layout, 40)
        _, table = make(layout, max_blocks=5)
    k = torch.ones(1, 2, 16)
    cache.write(k, k, table, 0, 0, 0)
    assert cache.buffer.sum() == 2 * 32


@pytest.mark.parametrize("integer", [np.int8, torch.tensor, bool])
def test_places_may_be_any_kind_of_integer(integer):
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache, table = make(layout, max_blocks=5)
    k = torch.randn(3, 2, 16)
    cache.write(k, k, table, integer(1), integer(0), integer(1))
    assert torch.equal(cache.gather(table, integer(1), integer(0), 4)[0][1:], k)
