"""Who runs in the next step: the queue, the slots, and the blocks each request owns (chapter 9)."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedlab.block_pool import BlockPool, OutOfBlocks
from pagedlab.block_table import UNASSIGNED, BlockTable
from pagedlab.sampling import Sampling


class BlockEvent(NamedTuple):
    """A block changed hands; action "allocate" or "release", `request` is a request's id."""

    step: int
    action: str
    request: int
    slot: int
    layer: int
    logical_block: int
    physical_block: int


class SlotEvent(NamedTuple):
    """A request got a slot ("admit") or left ("preempt", "finish", "cancel"), with its tokens.

    It precedes the block events that it causes. `slot` is -1 where a queued request is
    cancelled.
    """

    step: int
    action: str
    request: int
    slot: int
    num_tokens: int


@dataclass(eq=False)
class Request:
    """One prompt and its answer so far; made by `Engine.submit`.

    `tokens` are the answer's token ids, an EOS included. `finish_reason` is None until it is "eos",
    "length" (max_new_tokens), "context" (the engine's max_seq_len), "cancelled", or "invalid" (the
    logits were not numbers).
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = UNASSIGNED
    num_blocks: int = 0  # logical blocks owned in every layer
    num_cached: int = 0  # tokens whose K and V are in those blocks

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def state(self) -> str:
        """ "queued", "running" or "finished"."""
        if self.finish_reason is not None:
            return "finished"
        return "queued" if self.slot == UNASSIGNED else "running"


class Scheduler:
    """First come, first served, in `table.num_slots` slots.

    A request runs while it owns blocks for all of its tokens, in every layer. It is admitted when a
    slot and those blocks are free; when a running one cannot grow, the youngest is preempted: its
    blocks return to the pool, and it to the head of the queue, its tokens kept. So every running
    request is older than every queued one, and the oldest always gets on.

    Args:
        pool, table: who owns which block; nobody else allocates from them meanwhile.
        block_size: tokens per block.
        events: a list that BlockEvents and SlotEvents are appended to, or None.

    >>> scheduler = Scheduler(BlockPool(4), BlockTable(2, 1, 4), block_size=2)
    >>> scheduler.queue += [Request(0, [7, 8, 9], 5), Request(1, [7, 8, 9], 5)]
    >>> [request.id for request in scheduler.schedule()]
    [0, 1]
    >>> scheduler.queue.append(Request(2, [7], 1))
    >>> scheduler.slots[0].tokens += [4, 5]
    >>> [request.id for request in scheduler.schedule()], [r.id for r in scheduler.queue]
    ([0], [1, 2])

    Source: Kwon et al. 2023 (PagedAttention), section 4.5, preemption by recomputation.
    """

    def __init__(
        self, pool: BlockPool, table: BlockTable, block_size: int, events: list | None = None
    ) -> None:
        self.pool, self.table, self.block_size, self.events = pool, table, block_size, events
        self.ahead = 0  # tokens beyond its own for which a request owns blocks
        self.together = 1  # while so many wait, nobody is admitted until as many slots are free
        self.step = 0  # number of the step in progress, or of the last one
        self.queue: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * table.num_slots

    @property
    def running(self) -> list[Request]:
        """The requests that hold a slot, oldest first."""
        return sorted((r for r in self.slots if r is not None), key=lambda request: request.id)

    def schedule(self) -> list[Request]:
        """Begin a step: grow, preempt and admit; returns `running`, with blocks for every token.

        Raises:
            OutOfBlocks: nothing runs and the head of the queue does not fit: somebody else has
                taken blocks of the pool.
        """
        self.step += 1
        for request in self.running:
            while request.slot != UNASSIGNED and not self.fits(request):
                youngest = self.running[-1]
                self._vacate(youngest, "preempt")
                self.queue.appendleft(youngest)
            if request.slot != UNASSIGNED:
                self._grow(request)
        admitting = self.slots.count(None) >= min(self.together, len(self.queue))
        while admitting and self.queue and None in self.slots and self.fits(self.queue[0]):
            request = self.queue.popleft()
            request.slot = self.slots.index(None)
            self.slots[request.slot] = request
            self._log(SlotEvent, "admit", request, request.num_tokens)
            self._grow(request)
        if self.queue and not self.running:
            num_tokens, num_free = self.queue[0].num_tokens, self.pool.num_free
            raise OutOfBlocks(f"pool: expected blocks for {num_tokens} tokens, got {num_free}")
        return self.running

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is; its slot and blocks are free at once."""
        action = "cancel" if reason == "cancelled" else "finish"
        if request.slot == UNASSIGNED:
            self.queue.remove(request)
            self._log(SlotEvent, action, request, request.num_tokens)
        else:
            self._vacate(request, action)
        request.finish_reason = reason

    def fits(self, request: Request) -> bool:
        """Whether the pool has the blocks that all of a request's tokens still need."""
        num_tokens = request.num_tokens + self.ahead
        num_logical_blocks = -(-num_tokens // self.block_size) - request.num_blocks
        return num_logical_blocks * self.table.num_layers <= self.pool.num_free

    def _grow(self, request: Request) -> None:
        while request.num_blocks * self.block_size < request.num_tokens + self.ahead:
            blocks = self.pool.allocate(self.table.num_layers)
            try:
                self.table.assign_layers(request.slot, request.num_blocks, blocks)
            except BaseException:
                self.pool.release(blocks[::-1])
                raise
            for layer, block in enumerate(blocks):
                self._log(BlockEvent, "allocate", request, layer, request.num_blocks, block)
            request.num_blocks += 1

    def _vacate(self, request: Request, action: str) -> None:
        self._log(SlotEvent, action, request, request.num_tokens)
        blocks = self.table.release_slot(request.slot)
        self.pool.release(blocks)
        for i, block in enumerate(blocks):  # layer by layer, in logical order
            self._log(BlockEvent, "release", request, *divmod(i, request.num_blocks), block)
        self.slots[request.slot] = None
        request.slot, request.num_blocks, request.num_cached = UNASSIGNED, 0, 0

    def _log(self, kind: type, action: str, request: Request, *fields: int) -> None:
        if self.events is not None:
            self.events.append(kind(self.step, action, request.id, request.slot, *fields))
