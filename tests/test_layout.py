"""Promises of the block layout: every address is the storage's own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedlab import LLAMA_3_2_1B, KVLayout, PagedKVCache

layouts = st.builds(
    KVLayout,
    block_size=st.sampled_from([1, 2, 8, 16, 256]),
    num_kv_heads=st.integers(1, 9),
    head_dim=st.sampled_from([16, 24, 64, 80, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)


def test_the_seeds_numbers_come_out_of_one_layout():
    assert LLAMA_3_2_1B.kv_dim == 512
    assert LLAMA_3_2_1B.v_offset == 16_384
    assert LLAMA_3_2_1B.block_bytes == 32_768
    assert LLAMA_3_2_1B.num_blocks(LLAMA_3_2_1B.cache_bytes) == 65_536
    assert LLAMA_3_2_1B.max_blocks_per_seq == 128
    assert LLAMA_3_2_1B.table_entries == 4_096


def test_the_readmes_addresses():
    assert LLAMA_3_2_1B.k_address(3, 5, 2, 7) == 103_694
    assert LLAMA_3_2_1B.v_address(3, 5, 2, 7) == 120_078


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim"), [(1, 1, 16), (4, 3, 24), (8, 2, 16)]
)
def test_every_address_is_the_storages_own(dtype, block_size, num_kv_heads, head_dim):
    layout = KVLayout(block_size, num_kv_heads, head_dim, dtype)
    cache = PagedKVCache(layout, num_blocks=3)
    start = cache.buffer.data_ptr()
    seen = set()
    for view, address in ((cache.k_view(), layout.k_address), (cache.v_view(), layout.v_address)):
        for block in range(3):
            for token in range(block_size):
                for head in range(num_kv_heads):
                    for lane in range(head_dim):
                        byte = address(block, token, head, lane)
                        assert view[block, token, head, lane].data_ptr() - start == byte
                        seen.add(byte)
    assert seen == set(range(0, cache.buffer.nbytes, dtype.itemsize))


@given(layouts, st.data())
def test_locate_inverts_both_addresses_also_beyond_4_gib(layout, data):
    place = (
        data.draw(st.integers(0, 2**31 - 1), label="physical_block"),
        data.draw(st.integers(0, layout.block_size - 1), label="token_in_block"),
        data.draw(st.integers(0, layout.num_kv_heads - 1), label="kv_head"),
        data.draw(st.integers(0, layout.head_dim - 1), label="lane"),
    )
    inner = data.draw(st.integers(0, layout.dtype.itemsize - 1), label="byte_in_element")
    assert layout.locate(layout.k_address(*place) + inner) == ("K", *place, inner)
    assert layout.locate(layout.v_address(*place) + inner) == ("V", *place, inner)


@given(layouts, st.integers(0, 2**45))
def test_every_byte_has_one_owner(layout, byte):
    owner = layout.locate(byte)
    address = {"K": layout.k_address, "V": layout.v_address}[owner.section]
    assert address(*owner[1:5]) + owner.byte_in_element == byte


@given(layouts, st.integers(0, 5000))
def test_logical_blocks_are_the_ceiling_of_tokens(layout, num_tokens):
    blocks = layout.num_logical_blocks(num_tokens)
    assert (blocks - 1) * layout.block_size < num_tokens <= blocks * layout.block_size or (
        blocks == num_tokens == 0
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 12}, "block_size: expected a power of two from 1 to 256, got 12"),
        ({"block_size": 512}, "block_size: expected a power of two from 1 to 256, got 512"),
        ({"head_dim": 20}, "head_dim: expected a multiple of 8 from 16 to 256, got 20"),
        ({"head_dim": 264}, "head_dim: expected a multiple of 8 from 16 to 256, got 264"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected num_kv_heads >= 1, got 0"),
        ({"dtype": torch.int8}, "dtype: expected float32, float16 or bfloat16, got torch.int8"),
    ],
)
def test_a_layout_outside_the_limits_is_refused(change, message):
    sizes = {"block_size": 16, "num_kv_heads": 8, "head_dim": 64, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="^" + message + "$"):
        KVLayout(**(sizes | change))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((-1, 0, 0, 0), "physical_block: expected physical_block >= 0, got -1"),
        ((0, 16, 0, 0), "token_in_block: expected 0 <= token_in_block < 16, got 16"),
        ((0, 0, 8, 0), "kv_head: expected 0 <= kv_head < 8, got 8"),
        ((0, 0, 0, -1), "lane: expected 0 <= lane < 64, got -1"),
        ((0, 0, 0, 1.5), "lane: expected an integer, got 1.5"),
    ],
)
def test_an_address_outside_the_block_is_refused(place, message):
    for address in (LLAMA_3_2_1B.k_address, LLAMA_3_2_1B.v_address):
        with pytest.raises(ValueError, match="^" + message + "$"):
            address(*place)
    with pytest.raises(ValueError, match="byte: expected byte >= 0, got -1"):
        LLAMA_3_2_1B.locate(-1)


@pytest.mark.parametrize("integer", [np.int32, np.int64, torch.tensor])
def test_numpys_and_torchs_integers_do_not_overflow(integer):
    """As block_table.host[...] and tensors hold them; 131,071 * 32,768 is beyond int32."""
    place = tuple(integer(index) for index in (131071, 5, 2, 7))
    address = LLAMA_3_2_1B.k_address(*place)
    assert type(address) is int
    assert address == 131071 * 32768 + (5 * 512 + 2 * 64 + 7) * 2
    assert type(LLAMA_3_2_1B.locate(integer(9)).lane) is int
    sizes = (integer(size) for size in (16, 8, 64))
    layout = KVLayout(*sizes, torch.bfloat16)
    assert layout == KVLayout(16, 8, 64, torch.bfloat16)
    assert type(layout.block_bytes) is int


@pytest.mark.parametrize("wrong", [2.0, "2", None, np.arange(2), torch.tensor([1, 2])])
def test_what_is_no_integer_is_refused_in_one_line(wrong):
    calls = (
        lambda: KVLayout(wrong, 8, 64, torch.bfloat16),
        lambda: LLAMA_3_2_1B.k_address(wrong, 0, 0, 0),
        lambda: LLAMA_3_2_1B.locate(wrong),
        lambda: LLAMA_3_2_1B.num_blocks(wrong),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^\w+: expected an integer, got .+$"):
            call()
