"""Claims on how a kernel gets from a length to bytes, tried on our re-creation, by_token."""

from typing import Any

import torch

from pagedlab.kernels.by_token import by_token_kernel
from pagedlab.layout import LLAMA_3_2_1B
from pagedlab.ledger.claim import Claim, Evidence, close, mutants, refute_unless
from pagedlab.ledger.probes import mark_blocks
from pagedlab.ledger.scene import Scene, check_answer, exact_attention


def check_tail(kernel: Any, device: str) -> Evidence:
    """Nothing behind the last token is read: NaN there reaches no answer, nor do other numbers."""
    evidence = check_answer(kernel, device)
    scene = Scene(device)
    before = scene.attend(kernel)
    scene.cache.buffer.nan_to_num_(nan=100.0)
    refute_unless(torch.equal(before, scene.attend(kernel)), "what lies behind the length counts")
    block_size = scene.layout.block_size
    partly = sum(length % block_size > 0 for length in scene.seq_lens.tolist())
    return {"rows whose last block is filled in part": partly} | evidence


def check_new_token(kernel: Any, device: str) -> Evidence:
    """Append, then attend over the length that counts the new token."""
    scene = Scene(device)
    rows, layout = range(len(scene.keys)), scene.layout
    k, v = torch.randn(2, len(rows), layout.num_kv_heads, layout.head_dim).to(scene.q)
    scene.seq_lens += 1
    for row in rows:
        length, slot = int(scene.seq_lens[row]), int(scene.active_slots[row])
        if (length - 1) % layout.block_size == 0:
            scene.seq_lens[row] -= 1  # it would need a block of its own: leave that row as it is
            k[row], v[row] = scene.keys[row][-1], scene.values[row][-1]
            continue
        block = scene.table.lookup(slot, scene.layer, (length - 1) // layout.block_size)
        refute_unless(block >= 0, "no block for the new token")
        scene.keys[row] = torch.cat((scene.keys[row], k[row : row + 1]))
        scene.values[row] = torch.cat((scene.values[row], v[row : row + 1]))
    scene.cache.append(k, v, scene.table, scene.seq_lens, scene.active_slots, scene.layer)
    out = scene.attend(kernel)
    refute_unless(close(out, scene.expected(), scene.tolerance), "the new token is not in the sum")
    without = scene.expected([max(1, len(keys) - 1) for keys in scene.keys])
    changed = sum(not close(out[row], without[row], scene.tolerance) for row in rows)
    refute_unless(changed, "a length without it gives the same")
    return {"rows": len(rows), "rows that a length without it would change": changed}


def check_no_mask(attend_rows: Any, device: str) -> Evidence:
    """One new token a row needs no mask; several at once do."""
    scene = Scene(device)
    row = 1  # a short one, so that each token counts
    q, k, v = scene.q[row], scene.keys[row], scene.values[row]
    last = attend_rows(scene, row, [len(k)])[0]
    causal = exact_attention(q, k, v)
    refute_unless(close(last, causal, scene.tolerance), "the last token differs from a masked one")
    both = attend_rows(scene, row, [len(k) - 1, len(k)])
    masked = exact_attention(q, k[:-1], v[:-1])
    refute_unless(close(both[1], causal, scene.tolerance), "the later of two tokens is wrong")
    refute_unless(
        not close(both[0], masked, scene.tolerance), "the earlier of two does not see the later"
    )
    return {"one token": "as masked", "two tokens at once": "the earlier one sees the later"}


def one_length_per_slot(scene: Scene, row: int, positions: list[int]) -> torch.Tensor:
    """Queries of one slot that end at `positions`, all with one length, as in the engine."""
    length = torch.full((len(positions),), positions[-1]).to(scene.seq_lens)
    q = scene.q[row].expand(len(positions), -1, -1).contiguous()
    slots = scene.active_slots[row].expand(len(positions)).contiguous()
    return scene.attend(by_token_kernel, q=q, seq_lens=length, active_slots=slots)


def own_lengths(scene: Scene, row: int, positions: list[int]) -> torch.Tensor:
    """As one_length_per_slot, but each query has a length of its own: that is a mask."""
    outs = [one_length_per_slot(scene, row, [position])[0] for position in positions]
    return torch.stack(outs)


def one_token_early(scene: Scene, row: int, positions: list[int]) -> torch.Tensor:
    return one_length_per_slot(scene, row, [position - 1 for position in positions])


def check_scattered(kernel: Any, device: str) -> Evidence:
    """Moving every block elsewhere changes no bit of the answer."""
    scene = Scene(device)
    before = scene.attend(kernel)
    order = torch.randperm(scene.cache.num_blocks).to(device)
    scene.cache.blocks[order] = scene.cache.blocks.clone()
    table = scene.table.device
    table.copy_(torch.where(table >= 0, order[table.long().clamp(min=0)], -1).to(torch.int32))
    moved = scene.attend(kernel)
    same = torch.equal(before.nan_to_num(), moved.nan_to_num())
    refute_unless(same, "the answer depends on where the blocks are")
    refute_unless(close(moved, scene.expected(), scene.tolerance), "the answer is wrong")
    return {"blocks moved": scene.cache.num_blocks, "answers equal": "to the bit"}


GIB = 1024**3


def check_int32(kernel: Any, device: str) -> Evidence:
    """Block times BLOCK_BYTES: the last block of 2 GiB, the first beyond, the last of 4 GiB."""
    layout = LLAMA_3_2_1B
    beyond = layout.num_blocks(2 * GIB)
    blocks = torch.tensor([beyond - 1, beyond, 2 * beyond - 1], dtype=torch.int32, device=device)
    offsets = torch.zeros(3, dtype=torch.int64, device=device)
    kernel[(3,)](blocks, blocks, offsets, BLOCK_BYTES=layout.block_bytes, MARK=False)
    got = offsets.tolist()
    right = [int(block) * layout.block_bytes for block in blocks]
    refute_unless(got[0] == right[0], f"block {beyond - 1:,} at byte {got[0]:,}")
    refute_unless(got[1] == right[1] - 4 * GIB, f"block {beyond:,} does not wrap: {got[1]:,}")
    refute_unless(got[2] == right[2] - 4 * GIB, f"the last of 4 GiB does not wrap: {got[2]:,}")
    names = (f"byte of block {int(block):,}" for block in blocks)
    return dict(zip(names, got, strict=True)) | {"to spare in 2 GiB": 2**31 - 1 - got[0]}


def int32_on_gpu() -> Evidence:
    """Mark the first byte of block 65,536 in a cache that has 2 GiB of other memory before it."""
    layout = LLAMA_3_2_1B
    beyond = layout.num_blocks(2 * GIB)
    memory = torch.zeros(4 * GIB + layout.block_bytes, dtype=torch.uint8, device="cuda")
    blocks = torch.tensor([beyond], dtype=torch.int32, device="cuda")
    offsets = torch.zeros(1, dtype=torch.int64, device="cuda")
    cache = memory[2 * GIB :]
    mark_blocks[(1,)](cache, blocks, offsets, BLOCK_BYTES=layout.block_bytes, MARK=True)
    refute_unless(int(cache[2 * GIB]) == 0, "the byte was written where it belongs")
    refute_unless(int(memory[0]) == 1, "the byte was not written 2 GiB before the cache")
    return {"written, from the cache's start": int(offsets), "the right byte": "untouched"}


CLAIMS = (
    Claim(
        "num_blocks",
        "A sequence is read in ceil(length / 16) blocks.",
        "addresses",
        "holds",
        "rounding down loses the last block",
        by_token_kernel,
        check_answer,
        mutants(
            by_token_kernel,
            {
                "rounded down": (
                    "(seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE",
                    "seq_len // BLOCK_SIZE",
                ),
                "always one more": (
                    "(seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE",
                    "seq_len // BLOCK_SIZE + 1",
                ),
            },
        ),
    ),
    Claim(
        "tail_block",
        "In the last block only the tokens that the sequence has are read: the smaller of rest "
        "and block size.",
        "addresses",
        "holds",
        "what lies behind the length is never read",
        by_token_kernel,
        check_tail,
        mutants(
            by_token_kernel,
            {
                "every block read to its end": (
                    "tl.minimum(seq_len - logical_block * BLOCK_SIZE, BLOCK_SIZE)",
                    "BLOCK_SIZE",
                ),
            },
        ),
    ),
    Claim(
        "new_token",
        "The length counts the token whose K and V were written just before.",
        "addresses",
        "holds",
        "append first, then attend",
        by_token_kernel,
        check_new_token,
        mutants(
            by_token_kernel,
            {
                "a length without the new token": (
                    "seq_len = tl.where(valid, seq_len, 0)",
                    "seq_len = tl.where(valid, seq_len - 1, 0)",
                ),
            },
        ),
    ),
    Claim(
        "no_mask",
        "Decode needs no causal mask: the loop ends before the future.",
        "addresses",
        "holds only when",
        "each sequence brings one token; of two, the earlier would see the later",
        one_length_per_slot,
        check_no_mask,
        {"a length for each query": own_lengths, "one token too few": one_token_early},
    ),
    Claim(
        "byte_address",
        "K lies at block start + token x KV_DIM + KV head x HEAD_DIM + lane, V an offset behind.",
        "addresses",
        "holds",
        "every K and V is found",
        by_token_kernel,
        check_answer,
        mutants(
            by_token_kernel,
            {
                "blocks without room for V": ("* (2 * V_OFFSET)", "* V_OFFSET"),
                "V read where K is": ("offset + V_OFFSET + lane", "offset + lane"),
                "tokens HEAD_DIM apart": ("token_in_block * KV_DIM", "token_in_block * HEAD_DIM"),
            },
        ),
    ),
    Claim(
        "scattered",
        "Whether blocks lie scattered or side by side makes no difference to the kernel.",
        "addresses",
        "holds",
        "not a bit changes",
        by_token_kernel,
        check_scattered,
        mutants(
            by_token_kernel,
            {
                "the first block's neighbours": (
                    "tl.load(row_ptr + logical_block).to(tl.int64)",
                    "tl.load(row_ptr).to(tl.int64) + logical_block",
                ),
            },
        ),
    ),
    Claim(
        "int32",
        "The byte of a block is its number, an int, times BLOCK_BYTES, an int.",
        "addresses",
        "holds only when",
        "the cache has at most 2 GiB; one block more and the product wraps to before the cache",
        mark_blocks,
        check_int32,
        mutants(
            mark_blocks,
            {
                "the block in 64 bits": (
                    "tl.load(blocks_ptr + tl.program_id(0))",
                    "tl.load(blocks_ptr + tl.program_id(0)).to(tl.int64)",
                ),
                "counted in elements of 2 bytes": (
                    "block * BLOCK_BYTES",
                    "block * (BLOCK_BYTES // 2)",
                ),
            },
        ),
        int32_on_gpu,
    ),
)
