"""Many requests through one model and one cache: prefill, decode, streaming (chapter 9)."""

import operator
from collections.abc import Callable, Iterable, Iterator
from reprlib import repr as shortened
from typing import NamedTuple

import numpy as np
import torch

from pagedlab.attention import paged_attention
from pagedlab.block_pool import BlockPool
from pagedlab.block_table import UNASSIGNED, BlockTable
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, expect, expect_in_range
from pagedlab.llama import Llama
from pagedlab.sampling import INVALID, Sampling, sample
from pagedlab.scheduler import BlockEvent, Request, Scheduler, SlotEvent

__all__ = ["BlockEvent", "Engine", "Request", "SlotEvent", "TokenEvent"]


class TokenEvent(NamedTuple):
    """A token was chosen; `position` is the place in the text that it takes."""

    step: int
    request: int
    slot: int
    position: int
    token: int


class Engine:
    """Decodes many requests at once, their keys and values in the blocks of one cache.

    Every step gives each running request one token: the newly admitted are prefilled, the others
    decode together. A finished request's blocks and slot are free before `step` returns. A step
    that raises (in an attention of your own, say) has chosen no token and lost no block; the next
    one does its work again.

    Args:
        model: a Llama, or anything with its config, device, kv_layout, prefill_batch and decode.
        num_slots: requests that run at the same time; the table's if one is given.
        num_blocks: physical blocks; by default the cache's, the pool's, or what full slots need,
            but at most 2 GiB.
        block_size: tokens per block; the cache's if one is given.
        max_seq_len: the context limit, tokens of prompt and answer together; by default the
            model's. A given table may hold fewer.
        pool, table, cache, attention: your own, in place of the package's.
        events: a list that gets the BlockEvents, SlotEvents and TokenEvents, in order. Step 1 is
            the first; an event between two steps bears the earlier one's number.
        on_token: called as on_token(request, token) for each token, at the end of its step.
        graphs: decode by replaying CUDA graphs of fused kernels (DecodeGraph), for a model on a
            CUDA device and the package's attention. Takes some seconds to begin; a sequence gets
            its next block one token earlier, and of a long queue an eighth of the slots is admitted
            at a time, since prompts are prefilled without graphs and best together.

    Raises:
        ValueError: sizes that do not fit each other.

    Source: Yu et al. 2022 (Orca), continuous batching; Kwon et al. 2023 (PagedAttention).

    >>> from pagedlab import LlamaConfig
    >>> config = LlamaConfig(hidden_size=96, intermediate_size=128, num_layers=2, num_q_heads=6,
    ...                      num_kv_heads=2, head_dim=16, vocab_size=50, max_seq_len=64)
    >>> engine = Engine(Llama.random(config), num_blocks=8, block_size=4)
    >>> request = engine.submit([7, 8, 9], max_new_tokens=5)
    >>> len(list(engine.stream(request))), request.finish_reason, engine.pool.num_free
    (5, 'length', 8)
    >>> engine.submit([7, 8, 9], max_new_tokens=15)
    Traceback (most recent call last):
    ValueError: request: expected at most 8 blocks, got ceil(18 tokens / 4) * 2 layers = 10
    """

    def __init__(
        self,
        model: Llama,
        num_slots: int = 2,
        num_blocks: int | None = None,
        *,
        block_size: int = LLAMA_3_2_1B.block_size,
        max_seq_len: int | None = None,
        pool: BlockPool | None = None,
        table: BlockTable | None = None,
        cache: PagedKVCache | None = None,
        attention: Callable[..., torch.Tensor] = paged_attention,
        events: list | None = None,
        on_token: Callable[[Request, int], object] | None = None,
        graphs: bool = False,
    ) -> None:
        self.model, self.attention, self.on_token = model, attention, on_token
        num_layers, limit = model.config.num_layers, model.config.max_seq_len
        max_seq_len = limit if max_seq_len is None else max_seq_len
        max_seq_len = expect_in_range("max_seq_len", max_seq_len, limit + 1, start=2)
        layout = model.kv_layout(block_size) if cache is None else cache.layout
        if table is None:
            max_blocks_per_seq = layout.num_logical_blocks(max_seq_len)
            table = BlockTable(num_slots, num_layers, max_blocks_per_seq, model.device)
        if num_blocks is None:
            most = min(table.host.size, layout.num_blocks(LLAMA_3_2_1B.cache_bytes))
            num_blocks = cache.num_blocks if cache else pool.num_blocks if pool else most
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self.cache = PagedKVCache(layout, num_blocks, model.device) if cache is None else cache
        self.table, self.events, self.num_blocks = table, events, self.pool.num_free
        wanted = model.kv_layout(layout.block_size)
        expect(layout == wanted, "cache", f"{wanted}", layout)
        expect(table.num_layers == num_layers, "table", f"{num_layers} layers", table.num_layers)
        most = self.cache.num_blocks
        expect(self.num_blocks <= most, "pool", f"at most {most} blocks", self.num_blocks)
        self.max_seq_len = min(max_seq_len, table.max_blocks_per_seq * layout.block_size)
        self.scheduler = Scheduler(self.pool, table, layout.block_size, events)
        self.num_submitted = 0
        self.graph = None
        if graphs:
            fits = model.device.type == "cuda" and attention is paged_attention
            expect(fits, "graphs", "a CUDA device and no attention of your own", model.device)
            from pagedlab.decode_graph import DecodeGraph  # needs Triton

            self.graph = DecodeGraph(model, self.cache, table)
            self.scheduler.ahead, self.scheduler.together = 1, max(1, table.num_slots // 8)

    def submit(
        self,
        ids: Iterable[int],
        max_new_tokens: int,
        temperature: float = 0,
        top_k: int = 0,
        top_p: float = 1,
        seed: int = 0,
    ) -> Request:
        """Queue a prompt; its tokens appear in the Request as steps choose them.

        Args:
            ids: token ids, 1 to max_seq_len - 1 of them.
            max_new_tokens: tokens to answer with at most.
            temperature: 0 is greedy.
            top_k: draw from the k likeliest tokens; 0 is all.
            top_p: draw from the likeliest tokens that together reach this probability; 1 is all.
            seed: the answer depends on it and on the prompt, not on what else is running.

        Raises:
            ValueError: any of these out of range, or a request that the pool can never hold:
                ceil((prompt + max_new_tokens) / block_size) * num_layers > num_blocks.
        """
        try:
            prompt = [operator.index(token_id) for token_id in ids]
        except TypeError:
            raise ValueError(f"ids: expected integers, got {shortened(ids)}") from None
        last, most = self.model.config.vocab_size - 1, self.max_seq_len - 1
        outside = [token_id for token_id in prompt if not 0 <= token_id <= last]
        expect(not outside, "ids", f"token ids from 0 to {last}", outside[:1])
        expect(1 <= len(prompt) <= most, "ids", f"1 to {most} tokens", len(prompt))
        max_new_tokens = expect_in_range("max_new_tokens", max_new_tokens, start=1)
        sampling = Sampling(temperature, top_k, top_p, seed).check()
        block_size, num_layers = self.scheduler.block_size, self.table.num_layers
        longest = min(len(prompt) + max_new_tokens, self.max_seq_len)
        needed = -(-longest // block_size) * num_layers
        got = f"ceil({longest} tokens / {block_size}) * {num_layers} layers = {needed}"
        expect(needed <= self.num_blocks, "request", f"at most {self.num_blocks} blocks", got)
        request = Request(self.num_submitted, prompt, max_new_tokens, sampling)
        self.num_submitted += 1
        self.scheduler.queue.append(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Schedule, run the model once, and choose one token for each running request.

        Returns:
            the tokens, oldest request first; empty when there is nothing to do.
        """
        running = self.scheduler.schedule()
        if not running:
            return []
        positions = [request.num_tokens for request in running]
        token_ids = self._choose(running)
        chosen = []
        for request, position, token in zip(running, positions, token_ids, strict=True):
            if token != INVALID:
                if self.events is not None:
                    step = self.scheduler.step
                    self.events.append(TokenEvent(step, request.id, request.slot, position, token))
                request.tokens.append(token)
                request.num_cached = position
                chosen.append((request, token))
            if reason := self._finish_reason(request, token):
                self.scheduler.finish(request, reason)
        if self.on_token is not None:
            for request, token in chosen:
                self.on_token(request, token)
        return chosen

    def run(self) -> None:
        """Step until every request is finished."""
        while self.scheduler.queue or self.scheduler.running:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """The request's tokens as they come, from its first; steps the engine when it needs to."""
        self._expect_own(request)
        num_sent = 0
        while num_sent < len(request.tokens) or request.finish_reason is None:
            if num_sent == len(request.tokens):
                self.step()
            else:
                yield request.tokens[num_sent]
                num_sent += 1

    def cancel(self, request: Request) -> None:
        """End a request, queued or running; its blocks are free at once. Finished: nothing."""
        self._expect_own(request)
        if request.finish_reason is None:
            self.scheduler.finish(request, "cancelled")

    def check_integrity(self) -> None:
        """Prove that every block is free or in one place of the table, and that it belongs there.

        Raises:
            ValueError: the first rule that does not hold.
        """
        self.pool.check_integrity()
        host, logical_blocks = self.table.host, np.arange(self.table.max_blocks_per_seq)
        for slot, request in enumerate(self.scheduler.slots):
            num_blocks = request.num_blocks if request else 0
            agrees = ((host[slot] != UNASSIGNED) == (logical_blocks < num_blocks)).all()
            expect(
                bool(agrees), f"slot {slot}", f"{num_blocks} blocks a layer", host[slot].tolist()
            )
        blocks = sorted([*host[host != UNASSIGNED].tolist(), *self.pool.free_blocks])
        wanted = f"each of {self.num_blocks} blocks free or in one entry"
        expect(len(set(blocks)) == len(blocks) == self.num_blocks, "blocks", wanted, blocks)

    @torch.inference_mode()
    def _choose(self, running: list[Request]) -> list[int]:
        """A token for each request, INVALID where its logits are no numbers."""
        model, cache, table = self.model, self.cache, self.table
        decoding = [request for request in running if request.num_cached]
        logits: list[torch.Tensor] = []
        if decoding and self.graph is None:
            last = [request.tokens[-1] for request in decoding]
            lengths, slots = zip(*((r.num_tokens, r.slot) for r in decoding), strict=True)
            rows = torch.tensor([lengths, slots], dtype=torch.int32, device=model.device)
            logits.append(model.decode(last, cache, table, *rows, attention=self.attention))
        if admitted := running[len(decoding) :]:  # the youngest
            prompts = [request.prompt + request.tokens for request in admitted]
            new_slots = [request.slot for request in admitted]
            logits.append(model.prefill_batch(prompts, cache, table, new_slots))
        chosen = []
        if logits:
            both = logits[0] if len(logits) == 1 else torch.cat(logits)
            pairs = ((r.sampling, r.num_tokens) for r in running[-len(both) :])
            chosen.append(sample(both, *zip(*pairs, strict=True)))
        if self.graph is None:
            return chosen[0].tolist()
        ends = [min(len(r.prompt) + r.max_new_tokens, self.max_seq_len) for r in decoding]
        go_on = any(r.num_tokens + 1 < end for r, end in zip(decoding, ends, strict=True))
        return self.graph.choose(decoding, chosen, go_on and not admitted)

    def _finish_reason(self, request: Request, token: int) -> str | None:
        if token == INVALID:
            return "invalid"
        if token in self.model.config.eos_token_ids:
            return "eos"
        if len(request.tokens) == request.max_new_tokens:
            return "length"
        return "context" if request.num_tokens == self.max_seq_len else None

    def _expect_own(self, request: Request) -> None:
        expect(isinstance(request, Request), "request", "what submit gave", repr(request))
        known = request in self.scheduler.slots or request in self.scheduler.queue
        known = known or request.finish_reason is not None
        expect(known, "request", "one of this engine", f"request {request.id} of another")
