"""Which physical blocks are free, and which are owned (chapter 7)."""

from collections.abc import Iterable

from pagedlab.layout import expect_in_range


class PoolError(ValueError):
    """A request that the block pool refuses; the pool is unchanged."""


class OutOfBlocks(PoolError):
    """More blocks were asked for than are free."""


class NotAllocated(PoolError):
    """A block was released that nobody owns: released twice, or never allocated."""


class UnknownBlock(PoolError):
    """A block id that this pool does not have."""


class BlockPool:
    """The free list: allocation pops blocks from its end, release pushes them back.

    Args:
        num_blocks: blocks of the cache; their ids are 0 to num_blocks - 1.

    Raises:
        ValueError: num_blocks is not a positive integer.

    Source: the tiny-vllm article, section on the life of a block. Its engine pops without
    asking whether a block is left; this pool refuses, and a refused call changes nothing.

    >>> pool = BlockPool(4)
    >>> pool.allocate(2)
    [3, 2]
    >>> pool.release([3])
    >>> pool.allocate(1), pool.num_free
    ([3], 2)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = expect_in_range("num_blocks", num_blocks, start=1)
        self.free_blocks = list(range(self.num_blocks))
        self._owned = bytearray(self.num_blocks)  # 1 where somebody owns the block

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self.free_blocks)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, the most recently released first: all of them or none.

        Raises:
            OutOfBlocks: fewer than n blocks are free.
        """
        try:
            n = expect_in_range("n", n)
        except ValueError as error:
            raise PoolError(str(error)) from None
        if n > self.num_free:
            raise OutOfBlocks(
                f"allocate: expected at most {self.num_free} (free of {self.num_blocks}), got {n}"
            )
        blocks = [self.free_blocks.pop() for _ in range(n)]
        for block in blocks:
            self._owned[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; the last one given is the next one allocated.

        Raises:
            UnknownBlock: an id outside 0 to num_blocks - 1.
            NotAllocated: a block that nobody owns, or one named twice.
        """
        try:
            blocks = [expect_in_range("block", block, self.num_blocks) for block in blocks]
        except TypeError:
            raise UnknownBlock(f"release: expected blocks, got {blocks!r}") from None
        except ValueError as error:
            raise UnknownBlock(str(error)) from None
        for block in blocks:
            if not self._owned[block]:
                raise NotAllocated(
                    f"release: expected an allocated block, got {block}, which is free"
                )
        if len(set(blocks)) < len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise NotAllocated(f"release: expected each block once, got {twice} twice")
        for block in blocks:
            self._owned[block] = 0
            self.free_blocks.append(block)

    def check_integrity(self) -> None:
        """Prove that free + owned = all blocks and that none is in the free list twice.

        Raises:
            PoolError: the first rule that does not hold.
        """
        free = set(self.free_blocks)
        if len(free) != self.num_free:
            raise PoolError(
                f"free_blocks: expected each block once, got {self.num_free - len(free)} twice"
            )
        for block in range(self.num_blocks):
            if (block in free) == bool(self._owned[block]):
                state = "both free and owned" if block in free else "neither free nor owned"
                raise PoolError(
                    f"free_blocks: expected every block free or owned, got {block} {state}"
                )
        if not free <= set(range(self.num_blocks)):
            raise PoolError(
                f"free_blocks: expected 0 <= block < {self.num_blocks}, got {max(free)}"
            )
