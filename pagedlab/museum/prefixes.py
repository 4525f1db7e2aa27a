"""The room of shared beginnings: blocks that are used again by the text in them (chapter 12)."""

from pagedlab.museum import runs
from pagedlab.museum.checks import check_prefixes
from pagedlab.museum.exhibit import Exhibit
from pagedlab.museum.prefix_cache import PrefixCache


class LongMemory(PrefixCache):
    def take(self):
        return self.free_blocks.pop()


class FullHit(PrefixCache):
    def num_reused(self, num_known, num_tokens):
        return num_known * self.block_size


class EarlyCount(PrefixCache):
    def schedule(self, sequence):
        num_scheduled = len(sequence.ids) - sequence.num_cached
        self.allocate(sequence)
        return range(sequence.num_cached, sequence.num_cached + num_scheduled)


ROOM = (
    Exhibit(
        id="long-memory",
        title="An answer to somebody else's question",
        broken=LongMemory,
        real=PrefixCache,
        run=runs.asked_again_later,
        check=check_prefixes,
        look="for every known block, compare the text it is known by with what was written last",
        cause="A block handed out for something new can still be found under its old text.",
        failure=r"K of token \d after \[.*\]: expected its own, got that of \[",
        source="GeeeekExplorer/nano-vllm#163",
        fix=(
            (
                "return self.free_blocks.pop()",
                "block = self.free_blocks.pop()\n"
                "        self.block_of.pop(self.text_in.pop(block, ()), None)\n"
                "        return block",
            ),
        ),
    ),
    Exhibit(
        id="full-hit",
        title="The same question twice",
        broken=FullHit,
        real=PrefixCache,
        run=runs.asked_twice,
        check=check_prefixes,
        look="print what schedule returns for a prompt of whole blocks, the first and second time",
        cause="With every token found, none is left to compute, and the logits are the last one's.",
        failure=r"tokens to compute, of \d+: expected one at least, got 0",
        source="GeeeekExplorer/nano-vllm#144",
        fix=(
            (
                "return num_known * self.block_size",
                "return min(num_known * self.block_size, num_tokens - 1)",
            ),
        ),
    ),
    Exhibit(
        id="early-count",
        title="Interrupted, and back too eagerly",
        broken=EarlyCount,
        real=PrefixCache,
        run=runs.back_after_preemption,
        check=check_prefixes,
        look="compare the last position that schedule returns with the sequence's length",
        cause="The tokens to compute are counted before allocation finds some of them computed.",
        failure=r"positions to compute, of \d+ tokens: expected \d to \d, got \d to \d+",
        source="GeeeekExplorer/nano-vllm#211",
        fix=(
            (
                "        num_scheduled = len(sequence.ids) - sequence.num_cached\n"
                "        self.allocate(sequence)\n",
                "        self.allocate(sequence)\n"
                "        num_scheduled = len(sequence.ids) - sequence.num_cached\n",
            ),
        ),
    ),
)
