"""The room of owners: every block has one, or is free (chapter 12)."""

from pagedlab.block_pool import BlockPool, NotAllocated
from pagedlab.museum import runs
from pagedlab.museum.checks import check_pool, check_vacate
from pagedlab.museum.exhibit import Exhibit


class AskingPool(BlockPool):
    def release(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            if not self._owned[block]:
                raise NotAllocated(f"release: expected an allocated block, got {block}")
        for block in blocks:
            self._owned[block] = 0
            self.free_blocks.append(block)


def vacate_slot(table, pool, slot):
    """What a scheduler does with the slot of a finished request."""
    blocks = table.host[slot]
    pool.release(blocks[blocks >= 0].tolist())


def release_slot(table, pool, slot):
    """The same with the package's table, which forgets what it gives away."""
    pool.release(table.release_slot(slot))


ROOM = (
    Exhibit(
        id="two-owners",
        title="A pool that asks first",
        broken=AskingPool,
        real=BlockPool,
        run=runs.released_in_one_call,
        check=check_pool,
        look="check_integrity after every release, one with a block named twice among them",
        cause="Every block is asked for before any is marked: named twice in one call, it passes.",
        failure=r"release\(\[3, 2, 3\]\): expected NotAllocated, got no error",
        source="vllm-project/vllm#42571",
        fix=(
            (
                "        for block in blocks:\n            self._owned[block] = 0",
                "        if len(set(blocks)) < len(blocks):\n"
                '            raise NotAllocated(f"release: expected each once, got {blocks}")\n'
                "        for block in blocks:\n            self._owned[block] = 0",
            ),
        ),
    ),
    Exhibit(
        id="old-address",
        title="Moved out, and still on the doorbell",
        broken=vacate_slot,
        real=release_slot,
        run=runs.after_it_moved_out,
        check=check_vacate,
        look="BlockTableView: is a block both in the table and in the free list?",
        cause="The blocks went back to the pool, and the table still says whose they were.",
        failure=r"block_table\[0, 0, 0\]: expected a block that is not free, got \d+",
        source="vllm-project/vllm#42273",
        fix=(
            (
                "    blocks = table.host[slot]\n    pool.release(blocks[blocks >= 0].tolist())",
                "    pool.release(table.release_slot(slot))",
            ),
        ),
    ),
)
