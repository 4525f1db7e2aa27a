"""Decode steps as CUDA graphs: one launch a step, fused kernels inside (chapter 11)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedlab.attention import attention_plan, paged_attention
from pagedlab.block_table import BlockTable
from pagedlab.kernels import decode_ops
from pagedlab.kernels.choose import choose
from pagedlab.kv_cache import PagedKVCache
from pagedlab.llama import Llama, rope_rotation
from pagedlab.sampling import sample
from pagedlab.scheduler import Request


class DecodeGraph:
    """What Llama.decode and sample do for an engine, captured once per batch size and replayed.

    A replay depends on nothing that the host knows. Tokens, lengths, slots and settings come to
    the device in one copy, and each step leaves there what the next one needs: so as long as nobody
    joins, a step is launched before the tokens of the one before are read. Requests that end stay
    as rows whose tokens nobody asks for: once their slot's blocks are gone from the table they read
    and write nothing. Batches are padded to a captured size with rows of length 0, likewise.

    Args:
        model, cache, table: the engine's, on a CUDA device. All batch sizes, powers of two, are
            captured here, which compiles the kernels and takes seconds.
    """

    @torch.inference_mode(False)  # launches write into the tensors in any mode
    def __init__(self, model: Llama, cache: PagedKVCache, table: BlockTable) -> None:
        self.model, self.cache, self.table = model, cache, table
        num_rows = -(-table.num_slots // 4) * 4  # each column begins at a multiple of 16 bytes
        self.host = torch.zeros(6, num_rows, dtype=torch.int32).pin_memory()
        self.device = self.host.to(model.device, copy=True)
        self.chosen = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
        self.arrived = torch.cuda.Event()
        positions = torch.arange(table.max_blocks_per_seq * cache.layout.block_size)
        self.rope = rope_rotation(positions.to(model.device), model.frequencies)
        self.requests: list[Request] = []  # the rows on the device
        self.ahead: dict[Request, tuple[int, int]] = {}  # slot and length in a step launched ahead
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for size in sorted({self._size(n + 1) for n in range(table.num_slots)}, reverse=True):
            self._capture(size)

    @torch.inference_mode()
    def choose(self, decoding: list[Request], others: list[Tensor], goes_on: bool) -> list[int]:
        """A token for each of `decoding`, INVALID where logits are no numbers; then `others`.

        Args:
            decoding: requests with all tokens but the last in the cache, and blocks for one more
                than they have.
            others: int64 on the device, tokens that are read in the same copy.
            goes_on: whether the next step decodes no others; some may end or be preempted.
        """
        if any(self.ahead.get(r) != (r.slot, r.num_tokens) for r in decoding):
            self._launch(decoding)
        self.ahead = {}
        chosen = self.chosen[: len(self.requests)]
        if any(r.sampling.top_k or r.sampling.top_p < 1 for r in decoding):  # these need a sort
            settings, positions = zip(*((r.sampling, r.num_tokens) for r in decoding), strict=True)
            logits = self.graphs[self._size(len(chosen))][1]
            chosen, goes_on = sample(logits[: len(chosen)], settings, positions), False
        read = torch.cat((chosen, *others)).to("cpu", non_blocking=True)
        self.arrived.record()
        if goes_on and self._size(len(self.requests)) == self._size(len(decoding)):
            self._replay()
            self.ahead = {r: (r.slot, r.num_tokens + 1) for r in decoding}
        self.arrived.synchronize()
        tokens = read.tolist()
        of_request = dict(zip(self.requests, tokens, strict=False))
        return [of_request[r] for r in decoding] + tokens[len(self.requests) :]

    def _size(self, num_rows: int) -> int:
        """The captured batch size for a number of rows."""
        return min(1 << (num_rows - 1).bit_length(), self.table.num_slots)

    def _launch(self, requests: list[Request]) -> None:
        self.requests = requests
        rows = ((*r.sampling[::-3], r.tokens[-1], r.num_tokens, r.slot) for r in requests)
        self.host.zero_()
        for column, values in zip(columns(self.host), zip(*rows, strict=True), strict=True):
            column.numpy()[: len(requests)] = values
        self.device.copy_(self.host, non_blocking=True)
        self._replay()

    def _replay(self) -> None:
        self.table.sync()
        self.graphs[self._size(len(self.requests))][0].replay()

    def _capture(self, size: int) -> None:
        """Capture a step; all lengths are 0, so that it changes nothing."""
        self._step(size)  # compiles the kernels
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool):
            self.graphs[size] = graph, self._step(size)

    @torch.inference_mode()
    def _step(self, num_rows: int) -> Tensor:
        """Launch the kernels of one step; returns its logits [num_rows, vocab_size]."""
        model, cache, table = self.model, self.cache, self.table
        seeds, temperatures, tokens, seq_lens, slots = (x[:num_rows] for x in columns(self.device))
        linear = partial(decode_ops.linear, eps=model.config.rms_norm_eps)
        plan = attention_plan(seq_lens, slots, table, cache)
        attend = partial(paged_attention, backend="triton", plan=plan)
        where = (table.device, seq_lens, slots)
        x = F.embedding(tokens, model.embedding)  # [num_rows, hidden_size]
        for layer, weights in enumerate(model.layers):
            qkv = linear(x, weights.qkv, norm=weights.attention_norm)
            q = decode_ops.rope_append(qkv, self.rope, cache.buffer, *where, layer, cache.layout)
            attend(q, cache, table, seq_lens, slots, layer, out=q)
            linear(q.flatten(1), weights.attention_out, add_to=x)
            hidden = linear(x, weights.gate_up, norm=weights.mlp_norm, gated=True)
            linear(hidden, weights.down, add_to=x)
        logits = linear(x, model.head, norm=model.norm)
        choose(logits, temperatures, seeds, self.chosen[:num_rows], (tokens, seq_lens))
        return logits


def columns(rows: Tensor) -> tuple[Tensor, ...]:
    """Seeds (int64), temperatures (float32), tokens, lengths, slots: views of int32 [6, num_rows].

    >>> [column.dtype.itemsize for column in columns(torch.zeros(6, 3, dtype=torch.int32))]
    [8, 4, 4, 4, 4]
    """
    return rows[:2].flatten().view(torch.int64), rows[2].view(torch.float32), *rows[3:]
