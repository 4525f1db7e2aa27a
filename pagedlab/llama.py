"""The decoder: Llama in plain torch, its keys and values in paged blocks (chapter 8)."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pad_sequence

from pagedlab import checkpoint
from pagedlab.attention import attention_plan, paged_attention
from pagedlab.block_table import BlockTable
from pagedlab.checkpoint import LlamaConfig
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import KVLayout, expect, expect_in_range

Device = torch.device | str
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> attended values
Part = tuple[Tensor, int, int, bool]  # of a prompt: ids, slot, first position, whether it ends
CHUNK_SIZE = 2048  # tokens of a prefill that go through the model at a time


class Layer(NamedTuple):
    """One layer's weights, matrices packed; projections that read the same input are one matrix."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention_out: Tensor  # [hidden_size, num_q_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    down: Tensor  # [hidden_size, intermediate_size]


class Llama:
    """A Llama decoder that keeps keys and values in a PagedKVCache.

    Args:
        config: its sizes.
        read: gives each weight by its Hugging Face name and expected shape.
        device, dtype: where and in what it computes: float32, float16 or bfloat16.

    Source: Touvron et al. 2023 (Llama); Su et al. 2021 (RoPE); Ainslie et al. 2023 (GQA).

    >>> config = LlamaConfig(hidden_size=96, intermediate_size=128, num_layers=2, num_q_heads=6,
    ...                      num_kv_heads=2, head_dim=16, vocab_size=50, max_seq_len=64)
    >>> model = Llama.random(config)
    >>> layout = model.kv_layout(block_size=4)
    >>> cache, table = PagedKVCache(layout, num_blocks=4), BlockTable(1, config.num_layers, 2)
    >>> for logical_block in range(2):
    ...     table.assign_layers(0, logical_block, [2 * logical_block, 2 * logical_block + 1])
    >>> model.prefill([7, 8, 9, 10, 11], cache, table, slot=0).shape
    torch.Size([50])
    """

    def __init__(
        self,
        config: LlamaConfig,
        read: Callable[[str, tuple[int, ...]], Tensor],
        *,
        device: Device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def load(prefix: str, *columns: int, **rows: int) -> Tensor:
            parts = [read(f"{prefix}{name}.weight", (n, *columns)) for name, n in rows.items()]
            return torch.cat(parts).to(device, dtype)

        hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        q_dim, kv_dim = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
        self.config, self.dtype = config, dtype
        self.embedding = load("model.", hidden, embed_tokens=vocab)
        self.device = self.embedding.device
        self.layers = [
            Layer(
                load(name, input_layernorm=hidden),
                pack(load(f"{name}self_attn.", hidden, q_proj=q_dim, k_proj=kv_dim, v_proj=kv_dim)),
                pack(load(f"{name}self_attn.", q_dim, o_proj=hidden)),
                load(name, post_attention_layernorm=hidden),
                pack(load(f"{name}mlp.", hidden, gate_proj=inner, up_proj=inner)),
                pack(load(f"{name}mlp.", inner, down_proj=hidden)),
            )
            for name in (f"model.layers.{layer}." for layer in range(config.num_layers))
        ]
        self.norm = load("model.", norm=hidden)
        tied = config.tie_word_embeddings
        self.head = pack(self.embedding if tied else load("", hidden, lm_head=vocab))
        self.frequencies = rope_frequencies(config).to(device)

    @classmethod
    def from_checkpoint(
        cls,
        name: str | Path | None = None,
        *,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Llama":
        """Load a model: a folder, a hub id, or with no name the demo model.

        Args:
            device, dtype: by default checkpoint.pick_device and pick_dtype choose.

        Raises:
            ValueError: files missing, damaged, or of another kind of model.
        """
        device = checkpoint.pick_device() if device is None else device
        dtype = checkpoint.pick_dtype(device) if dtype is None else dtype
        folder = checkpoint.locate(name)
        weights = checkpoint.Weights(folder)
        model = cls(checkpoint.read_config(folder), weights.read, device=device, dtype=dtype)
        weights.expect_all_read()
        return model

    @classmethod
    def random(cls, config: LlamaConfig, *, seed: int = 0, **device_and_dtype: Any) -> "Llama":
        """A model with random weights, for tests and small examples."""
        generator = torch.Generator().manual_seed(seed)

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            random = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            return torch.ones(shape) if "norm" in name else random

        return cls(config, read, **device_and_dtype)

    def kv_layout(self, block_size: int = 16) -> KVLayout:
        """The layout of a cache block for this model."""
        return KVLayout(block_size, self.config.num_kv_heads, self.config.head_dim, self.dtype)

    @torch.no_grad()
    def prefill(
        self,
        ids: Sequence[int] | Tensor,
        cache: PagedKVCache,
        table: BlockTable,
        slot: int,
        *,
        start: int = 0,
    ) -> Tensor:
        """Run a prompt, or its part from position `start` on; its K and V go into blocks.

        Args:
            ids: [num_tokens] token ids, one at least.
            cache, table: blocks for positions 0 to start + num_tokens - 1 of `slot` are assigned
                in every layer; those before `start` are already written.
            start: position of the first id.

        Returns:
            float32 [vocab_size], the logits after the last token.

        Raises:
            ValueError: no ids, an id outside the vocabulary, a position beyond max_seq_len, or
                a missing block.
        """
        return self.prefill_batch([ids], cache, table, [slot], starts=[start])[0]

    @torch.no_grad()
    def prefill_batch(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        cache: PagedKVCache,
        table: BlockTable,
        slots: Sequence[int],
        *,
        starts: Sequence[int] | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> Tensor:
        """Run several prompts, each in its slot, side by side; otherwise as `prefill`.

        Args:
            chunk_size: tokens that go through the model at a time; a prompt that does not fit is
                cut, and its later parts read the earlier ones' K and V from their blocks.

        Returns:
            float32 [num_prompts, vocab_size], the logits after each prompt's last token.
        """
        chunk_size = expect_in_range("chunk_size", chunk_size, start=1)
        chunks: list[list[Part]] = [[]]
        room, rest = chunk_size, [self._token_ids(ids) for ids in prompts]
        starts = [0] * len(prompts) if starts is None else starts
        for ids, slot, start in zip(rest, slots, starts, strict=True):
            most = self.config.max_seq_len - start
            wanted = f"1 to {most} tokens at position {start}"
            expect(1 <= len(ids) <= most, "ids", wanted, len(ids))
            while len(ids):
                if room == 0:
                    chunks, room = [*chunks, []], chunk_size
                num_tokens = min(len(ids), room)
                chunks[-1].append((ids[:room], slot, start, num_tokens == len(ids)))
                ids, start, room = ids[room:], start + num_tokens, room - num_tokens
        return torch.cat([self._prefill(chunk, cache, table) for chunk in chunks])

    def _prefill(self, chunk: list[Part], cache: PagedKVCache, table: BlockTable) -> Tensor:
        """Run parts of prompts; the logits of those that end here, float32 [num, vocab_size]."""
        ids, slots, starts, ends = zip(*chunk, strict=True)
        lengths = [len(tokens) for tokens in ids]
        groups = [(part, x.to(self.device)) for part, x in side_by_side(lengths, starts)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(slots, starts, k.split(lengths), v.split(lengths), strict=True)
            for slot, start, own_k, own_v in parts:
                cache.write(own_k, own_v, table, slot, layer, start)
            attended = q.new_empty(len(q) + 1, *q.shape[1:])  # one more place, for the padding
            for part, (own, places) in groups:
                rows, keys, values = q[own], k[own], v[own]
                if start := starts[part]:
                    earlier = cache.gather(table, slots[part], layer, start + lengths[part])
                    keys, values = (x.unsqueeze(0) for x in earlier)
                causal = causal_lower_right(rows.shape[1], keys.shape[1])
                # scaled_dot_product_attention takes [batch, heads, num_tokens, head_dim]
                rows, keys, values = (x.transpose(1, 2) for x in (rows, keys, values))
                out = F.scaled_dot_product_attention(rows, keys, values, causal, enable_gqa=True)
                attended[places] = out.transpose(1, 2)
            return attended[:-1]

        positions = [torch.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
        x = self._decoder(torch.cat(ids), torch.cat(positions).to(self.device), attend)
        last = torch.tensor(lengths).cumsum(0) - 1
        return self._logits(x[last[torch.tensor(ends)]])

    @torch.no_grad()
    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        cache: PagedKVCache,
        table: BlockTable,
        seq_lens: Tensor,
        active_slots: Tensor,
        *,
        attention: Callable[..., Tensor] = paged_attention,
    ) -> Tensor:
        """Run one token of each active slot; earlier tokens are read from their blocks only.

        Args:
            token_ids: [num_active]; row i's token sits at position seq_lens[i] - 1.
            seq_lens: int32 [num_active], tokens including this one.
            active_slots: int32 [num_active], the slot of each row.
            attention: called as paged_attention(q, cache, table, seq_lens, active_slots, layer).

        Returns:
            float32 [num_active, vocab_size].

        Raises:
            ValueError: an id outside the vocabulary; what cache.append and attention refuse.
        """
        if getattr(attention, "func", attention) is paged_attention:
            plan = attention_plan(seq_lens, active_slots, table, cache)
            attention = partial(attention, plan=plan)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append(k, v, table, seq_lens, active_slots, layer)
            return attention(q, cache, table, seq_lens, active_slots, layer)

        x = self._decoder(self._token_ids(token_ids), seq_lens - 1, attend)
        return self._logits(x)

    def _token_ids(self, ids: Sequence[int] | Tensor) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        if tokens.device.type == "cpu" and len(tokens):
            low, high = (int(bound) for bound in tokens.aminmax())
            last = self.config.vocab_size - 1
            known = low >= 0 and high <= last
            expect(known, "ids", f"token ids from 0 to {last}", f"{low} to {high}")
        return tokens.to(self.device)

    def _decoder(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size]; attend(layer, q, k, v) owns the cache."""
        c = self.config
        norm = partial(F.rms_norm, normalized_shape=(c.hidden_size,), eps=c.rms_norm_eps)
        rotation = rope_rotation(positions, self.frequencies)
        x = F.embedding(tokens, self.embedding)  # [num_tokens, hidden_size]
        for layer, weights in enumerate(self.layers):
            own = partial(attend, layer)
            x = x + self._attention(norm(x, weight=weights.attention_norm), weights, rotation, own)
            x = x + mlp(norm(x, weight=weights.mlp_norm), weights)
        return norm(x, weight=self.norm)

    def _attention(
        self,
        x: Tensor,
        weights: Layer,
        rotation: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """A layer's attention, from its q, k and v to its output projection."""
        num_q_heads, num_kv_heads = self.config.num_q_heads, self.config.num_kv_heads
        heads = linear(x, weights.qkv).unflatten(1, (-1, self.config.head_dim))
        rotated, v = rotate(heads[:, :-num_kv_heads], *rotation), heads[:, -num_kv_heads:]
        attended = attend(rotated[:, :num_q_heads], rotated[:, num_q_heads:], v)
        return linear(attended.flatten(1), weights.attention_out)

    def _logits(self, x: Tensor) -> Tensor:
        return linear(x, self.head).float()


def side_by_side(lengths: list[int], starts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Parts of prompts that attention takes in one call: whole ones that are about equally long.

    A part that goes on (start > 0) is alone. Of each group the first part's number, and int64
    [2, num_parts, longest]: the tokens of the chunk that each row reads, padded with the row's own
    last (another's might be NaN), and where its results go, padded with the chunk's end.

    >>> [(part, places.tolist()) for part, places in side_by_side([3, 2], [0, 0])]
    [(0, [[[0, 1, 2], [3, 4, 4]], [[0, 1, 2], [3, 4, 5]]])]
    """
    first = [0, *accumulate(lengths)]  # of each part; the chunk's end

    def kind(part: int) -> tuple[int, int]:
        return (part + 1) * (starts[part] > 0), lengths[part].bit_length()

    for _, group in groupby(sorted(range(len(lengths)), key=kind), kind):
        parts = list(group)
        places = pad_sequence([torch.arange(*first[i : i + 2]) for i in parts], True, first[-1])
        own = places.minimum(torch.tensor([[first[i + 1] - 1] for i in parts]))
        yield parts[0], torch.stack((own, places))


def pack(weight: Tensor) -> Tensor:
    """A matrix [out, in] as linear reads it fastest: in float32 on a CPU in oneDNN's own order."""
    if weight.is_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight, 4)  # a few rows at a time
    return weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x [num_tokens, in] and a packed weight [out, in].

    >>> linear(torch.tensor([[1.0, 2.0]]), pack(torch.tensor([[3.0, 4.0]])))
    tensor([[11.]])
    """
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def mlp(x: Tensor, weights: Layer) -> Tensor:
    """A layer's MLP, silu(gate) * up and down again; the product takes the place of gate."""
    gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate, inplace=True).mul_(up), weights.down)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians by which each pair of lanes turns per token, float32 [head_dim / 2].

    With Llama 3's scaling, pairs that turn fewer than low_freq_factor times in the original
    context are slowed down by `factor`, those that turn more than high_freq_factor times are left
    alone, and those in between are blended.

    >>> config = LlamaConfig(hidden_size=64, intermediate_size=64, num_layers=1, num_q_heads=2,
    ...                      num_kv_heads=2, head_dim=4, vocab_size=8, max_seq_len=16)
    >>> rope_frequencies(config)
    tensor([1.0000, 0.0100])
    """
    lanes = torch.arange(0, config.head_dim, 2).float()
    frequencies = config.rope_theta ** -(lanes / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of each lane's angle: two float32 [num_tokens, 1, head_dim].

    Lane i turns together with lane i + head_dim / 2; the sine of the first half is negative.
    """
    angles = positions.unsqueeze(1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((-sin, sin), 1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn each pair of lanes (i, i + head_dim / 2) of x [num_tokens, heads, head_dim].

    >>> cos, sin = rope_rotation(torch.tensor([1]), torch.tensor([math.pi / 2]))
    >>> rotate(torch.tensor([[[3.0, 4.0]]]), cos, sin).round().tolist()
    [[[-4.0, 3.0]]]
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)  # x * cos + swapped * sin
