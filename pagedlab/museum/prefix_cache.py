"""A minimal prefix cache: blocks found again by the tokens that they hold (chapter 12)."""

from dataclasses import dataclass, field

from pagedlab.block_pool import OutOfBlocks


@dataclass(eq=False)
class Sequence:
    """Token ids, the blocks that hold their K and V, and how many tokens are in there already."""

    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0


class PrefixCache:
    """Who has which block, and which full blocks can be used again.

    K and V of a token depend on all tokens before it. So a block is known by the whole text up to
    its end, and it can be found as long as nobody has written something else into it: also when it
    is free again, which is when it is most useful.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens per block.

    >>> prefixes = PrefixCache(num_blocks=4, block_size=2)
    >>> first, second = Sequence([5, 6, 7]), Sequence([5, 6, 8, 9])
    >>> prefixes.schedule(first), first.blocks
    (range(0, 3), [3, 2])
    >>> prefixes.release(first)
    >>> prefixes.schedule(second), second.blocks
    (range(2, 4), [3, 2])
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.num_owners = [0] * num_blocks
        self.block_of: dict[tuple[int, ...], int] = {}  # text up to a block's end -> block
        self.text_in: dict[int, tuple[int, ...]] = {}  # the inverse

    def schedule(self, sequence: Sequence) -> range:
        """Give a sequence blocks for all its tokens; returns the positions still to compute."""
        self.allocate(sequence)
        return range(sequence.num_cached, len(sequence.ids))

    def allocate(self, sequence: Sequence) -> None:
        """Find the blocks of its longest known prefix, and take free ones for the rest.

        Raises:
            OutOfBlocks: too few are free; the sequence has none then.
        """
        known = self.known_blocks(sequence.ids)
        needed = -(-len(sequence.ids) // self.block_size) - len(known)
        if needed > len(set(self.free_blocks) - set(known)):
            raise OutOfBlocks(f"schedule: expected {needed} free blocks, got too few")
        for block in known:
            if block in self.free_blocks:
                self.free_blocks.remove(block)
        sequence.blocks = known + [self.take() for _ in range(needed)]
        for block in sequence.blocks:
            self.num_owners[block] += 1
        sequence.num_cached = self.num_reused(len(known), len(sequence.ids))

    def known_blocks(self, ids: list[int]) -> list[int]:
        """The blocks of the longest prefix, in full blocks, that somebody has computed."""
        blocks: list[int] = []
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            if tuple(ids[:end]) not in self.block_of:
                break
            blocks.append(self.block_of[tuple(ids[:end])])
        return blocks

    def num_reused(self, num_known: int, num_tokens: int) -> int:
        """Tokens that need not be computed; the last one must be, for its logits."""
        return min(num_known * self.block_size, num_tokens - 1)

    def take(self) -> int:
        """A free block for something new; whatever it held cannot be found any more."""
        block = self.free_blocks.pop()
        self.block_of.pop(self.text_in.pop(block, ()), None)
        return block

    def release(self, sequence: Sequence) -> None:
        """Give its blocks back, all of its tokens computed; full ones can be found from now on."""
        for logical_block, block in enumerate(sequence.blocks):
            end = (logical_block + 1) * self.block_size
            text = tuple(sequence.ids[:end])
            if len(text) == end and text not in self.block_of:
                self.block_of[text], self.text_in[block] = block, text
            self.num_owners[block] -= 1
            if self.num_owners[block] == 0:
                self.free_blocks.append(block)
        sequence.blocks, sequence.num_cached = [], 0
