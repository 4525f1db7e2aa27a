"""A model without weights: its text depends on all that it reads back from its blocks."""

from types import SimpleNamespace

import numpy as np
import torch

from pagedlab import KVLayout, paged_attention
from pagedlab.sampling import Sampling, sample

NUM_LAYERS, VOCAB_SIZE, MAX_SEQ_LEN = 3, 29, 24


def logits_after(seen: list[tuple[int, int, int]]) -> torch.Tensor:
    """Logits [VOCAB_SIZE] from a hash of (layer, position, token id) of all that was seen."""
    generator = torch.Generator().manual_seed(hash(tuple(seen)) % 2**63)
    return torch.randn(VOCAB_SIZE, generator=generator)


def text_of(
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    *,
    eos_token_ids: tuple[int, ...] = (),
    max_seq_len: int = MAX_SEQ_LEN,
) -> list[int]:
    """What a request must answer, worked out without cache, slots or batch."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new_tokens and len(tokens) < max_seq_len:
        seen = [(layer, *entry) for layer in range(NUM_LAYERS) for entry in enumerate(tokens)]
        tokens += sample(logits_after(seen)[None], [sampling], [len(tokens)]).tolist()
        if tokens[-1] in eos_token_ids:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """K holds the token id, V its position, in each layer; logits come from what blocks say."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, eos_token_ids: tuple[int, ...] = (), max_seq_len: int = MAX_SEQ_LEN):
        self.config = SimpleNamespace(
            num_layers=NUM_LAYERS,
            vocab_size=VOCAB_SIZE,
            max_seq_len=max_seq_len,
            eos_token_ids=eos_token_ids,
        )
        self.num_prefills = 0

    def kv_layout(self, block_size=16):
        return KVLayout(block_size, num_kv_heads=1, head_dim=16, dtype=self.dtype)

    def prefill(self, ids, cache, table, slot, *, start=0):
        self.num_prefills += 1
        for layer in range(NUM_LAYERS):
            k, v = self._rows(ids, range(start, start + len(ids)), layer)
            cache.write(k, v, table, slot, layer, start)
        return self._read(cache, table, slot, start + len(ids))

    def prefill_batch(self, prompts, cache, table, slots):
        rows = zip(prompts, slots, strict=True)
        return torch.stack([self.prefill(ids, cache, table, slot) for ids, slot in rows])

    def decode(self, token_ids, cache, table, seq_lens, active_slots, *, attention=paged_attention):
        for layer in range(NUM_LAYERS):
            k, v = self._rows(token_ids, seq_lens - 1, layer)
            cache.append(k, v, table, seq_lens, active_slots, layer)
            attention(torch.zeros_like(k), cache, table, seq_lens, active_slots, layer)
        rows = zip(active_slots.tolist(), seq_lens.tolist(), strict=True)
        return torch.stack([self._read(cache, table, *row) for row in rows])

    def _rows(self, ids, positions, layer):
        k = torch.as_tensor(ids, dtype=self.dtype) + 100 * layer
        v = torch.as_tensor(positions, dtype=self.dtype)
        return k[:, None, None].repeat(1, 1, 16), v[:, None, None].repeat(1, 1, 16)

    def _read(self, cache, table, slot, num_tokens):
        """Straight from the buffer, by the table: neither gather nor attention is trusted."""
        seen = []
        logical_blocks, tokens = np.divmod(np.arange(num_tokens), cache.layout.block_size)
        for layer in range(NUM_LAYERS):
            blocks = table.host[slot, layer, logical_blocks]
            k = cache.k_view()[blocks, tokens, 0, 7]
            v = cache.v_view()[blocks, tokens, 0, 7]
            if not k.isfinite().all():
                return torch.full((VOCAB_SIZE,), torch.nan)
            ids, positions = (k - 100 * layer).int().tolist(), v.int().tolist()
            seen += zip([layer] * num_tokens, positions, ids, strict=True)
        return logits_after(seen)
