"""The references against torch's own functions, and against each other."""

import pytest
import torch
from batches import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab import KVLayout
from pagedlab.reference import (
    dense_attention,
    gathered_attention,
    online_softmax,
    tree_reduction,
)


@given(
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([16, 24, 64]),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_dense_attention_is_torchs(num_tokens, num_kv_heads, group_size, head_dim, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_kv_heads * group_size, head_dim, generator=generator)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator)
    expected = torch.zeros_like(q)
    for q_head in range(len(q)):
        kv_head = q_head // group_size
        expected[q_head] = torch.nn.functional.scaled_dot_product_attention(
            q[q_head, None], k[:, kv_head], v[:, kv_head]
        )[0]
    if num_tokens:
        torch.testing.assert_close(dense_attention(q, k, v), expected)
    else:
        assert (dense_attention(q, k, v) == 0).all()


@given(st.integers(0, 60), st.floats(0.1, 200), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_online_softmax_is_softmax_also_where_exp_would_overflow(num_tokens, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, generator=generator) * spread
    values = torch.randn(num_tokens, 8, generator=generator)
    expected = scores.softmax(0) @ values
    torch.testing.assert_close(online_softmax(scores, values), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [1, 16, 32, 64, 128, 256])
def test_the_tree_sums_every_lane_once(head_dim):
    partial = torch.randn(head_dim, dtype=torch.float64)
    levels = tree_reduction(partial)
    assert levels[-1].shape == ()
    torch.testing.assert_close(levels[-1], partial.sum())
    for level in levels:
        torch.testing.assert_close(level.sum(), partial.sum())


def test_the_trees_first_level_adds_lanes_16_apart_in_each_warp():
    partial = torch.arange(64.0)
    _, first, *_ = tree_reduction(partial)
    assert first[0, 0] == partial[0] + partial[16]
    assert first[1, 15] == partial[47] + partial[63]


def test_a_tree_of_48_lanes_is_refused():
    with pytest.raises(ValueError, match=r"partial: expected \[a power of two\], got \[48\]"):
        tree_reduction(torch.ones(48))


def test_gathered_attention_reads_each_rows_own_tokens():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [5, 0, 9], num_q_heads=6)
    out = gathered_attention(*batch.args, layer=1)
    for row in range(3):
        expected = dense_attention(batch.q[row], batch.keys[row], batch.values[row])
        torch.testing.assert_close(out[row], expected)
    assert (out[1] == 0).all()


def test_gathered_attention_marks_a_row_that_does_not_exist():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [5, 7, 9], num_q_heads=2)
    batch.seq_lens[0] = 999
    batch.active_slots[2] = -1
    out = gathered_attention(*batch.args, layer=1)
    assert out[[0, 2]].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("block_size", [1, 4])
def test_gathered_attention_takes_a_negative_length_for_no_length(block_size):
    layout = KVLayout(block_size, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [5, 7], num_q_heads=2)
    batch.seq_lens[0] = -1
    out = gathered_attention(*batch.args, layer=1)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


def test_gathered_attention_refuses_a_layer_that_does_not_exist():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [5], num_q_heads=2, num_layers=3)
    with pytest.raises(ValueError, match="layer: expected 0 <= layer < 3, got 3"):
        gathered_attention(*batch.args, layer=3)
