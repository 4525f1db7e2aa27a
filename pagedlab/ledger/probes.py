"""Small Triton kernels that checks launch, each one line of the article's arithmetic."""

from pagedlab import tl, triton


@triton.jit
def read_entries(
    table_ptr,  # [num_slots, num_layers, max_blocks_per_seq] int32, flat
    out_ptr,  # [max_blocks_per_seq, num_layers, num_slots]: another order, so that none is copied
    num_layers,
    max_blocks_per_seq,
    LANES: tl.constexpr,  # max_blocks_per_seq, padded to a power of two
):
    slot, layer = tl.program_id(0), tl.program_id(1)
    logical_block = tl.arange(0, LANES)
    mask = logical_block < max_blocks_per_seq
    index = slot * num_layers * max_blocks_per_seq + layer * max_blocks_per_seq + logical_block
    block = tl.load(table_ptr + index, mask=mask)
    out_index = (logical_block * num_layers + layer) * tl.num_programs(0) + slot
    tl.store(out_ptr + out_index, block, mask=mask)


@triton.jit
def mark_blocks(cache_ptr, blocks_ptr, offsets_ptr, BLOCK_BYTES: tl.constexpr, MARK: tl.constexpr):
    block = tl.load(blocks_ptr + tl.program_id(0))  # int32, as in the table
    offset = block * BLOCK_BYTES  # int32 as well, as in C
    tl.store(offsets_ptr + tl.program_id(0), offset)
    if MARK:
        tl.store(cache_ptr + offset, 1)


@triton.jit
def one_sum(x_ptr, out_ptr, LANES: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, LANES)), 0))
