"""A decode batch to try a kernel on: rows of several lengths in shuffled slots and blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagedlab import checkpoint
from pagedlab.block_table import BlockTable
from pagedlab.kernels.launch import attention_arguments
from pagedlab.kv_cache import PagedKVCache
from pagedlab.layout import LLAMA_3_2_1B, KVLayout
from pagedlab.ledger.claim import Evidence, close, refute_unless

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Scene:
    """K and V of a few sequences in a paged cache, NaN wherever no token is.

    On a CPU the sizes are small and differ pairwise, so that no two can be mistaken for each other;
    on a GPU they are the article's, in bfloat16 where it has that.

    Attributes:
        layout, cache, table: with the tokens written at `layer`.
        q: [num_active, num_q_heads, head_dim].
        seq_lens, active_slots: int32 [num_active].
        keys, values: per row, [num_tokens, num_kv_heads, head_dim].
    """

    def __init__(
        self, device: str = "cpu", lengths: Sequence[int] = (), *, spread: float = 1.0
    ) -> None:
        small = device == "cpu"
        dtype = checkpoint.pick_dtype(device)
        self.layout = KVLayout(4, 2, 16, dtype) if small else replace(LLAMA_3_2_1B, dtype=dtype)
        num_q_heads, num_layers = (6, 8) if small else (32, 16)
        lengths = list(lengths) or ([1, 3, 4, 5, 9] if small else [1, 15, 16, 17, 63, 256, 700])
        num_slots, self.layer, layout = len(lengths) + 2, 5, self.layout
        needed = sum(layout.num_logical_blocks(length) for length in lengths)
        self.cache = PagedKVCache(layout, needed + 3, device)
        self.cache.buffer.fill_(float("nan"))
        max_blocks = max(map(layout.num_logical_blocks, lengths)) + 7
        self.table = BlockTable(num_slots, num_layers, max_blocks, device)
        generator = torch.Generator().manual_seed(1)
        free = torch.randperm(needed + 3, generator=generator).tolist()
        slots = torch.randperm(num_slots, generator=generator)[: len(lengths)].tolist()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for slot, length in zip(slots, lengths, strict=True):
            for logical_block in range(layout.num_logical_blocks(length)):
                self.table.assign(slot, self.layer, logical_block, free.pop())
            shape = (2, length, layout.num_kv_heads, layout.head_dim)
            k, v = torch.randn(shape, generator=generator).to(device, layout.dtype)
            self.cache.write(k, v, self.table, slot, self.layer, 0)
            self.keys.append(k)
            self.values.append(v)
        shape_q = (len(lengths), num_q_heads, layout.head_dim)
        q = torch.randn(shape_q, generator=generator) * spread
        self.q = q.to(device, layout.dtype)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.active_slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.tolerance = TOLERANCE[layout.dtype]
        self.table.sync()

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """by_token_kernel's arguments; `changes` replace attributes, or `out`, which is NaN."""
        names = ("q", "cache", "table", "seq_lens", "active_slots", "layer")
        q, cache, table, *rows = [changes.get(name, getattr(self, name)) for name in names]
        seq_lens, active_slots, layer = rows
        out, layout = changes.get("out"), self.layout
        out = torch.full_like(q, float("nan")) if out is None else out
        scale = layout.head_dim**-0.5
        named = attention_arguments(
            q, cache.buffer, table.device, seq_lens, active_slots, layer, layout, out, scale
        )
        return named | {
            "HALVINGS": layout.head_dim.bit_length() - 1,
            "num_warps": max(1, layout.head_dim // 32),
        }

    def attend(
        self, kernel: Any, *, grid: tuple[int, int] | None = None, **changes: Any
    ) -> torch.Tensor:
        """Launch a kernel that takes `arguments(**changes)`, and return its output."""
        arguments = self.arguments(**changes)
        kernel[grid or arguments["q_ptr"].shape[:2]](**arguments)
        return arguments["out_ptr"]

    def expected(self, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """The answer in float64, from the keys and values that were written."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        for row, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            length = len(k) if lengths is None else lengths[row]
            out[row] = exact_attention(self.q[row], k[:length], v[:length])
        return out


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of q [num_q_heads, head_dim] over k, v [num_tokens, num_kv_heads, head_dim]."""
    group_size = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group_size, 1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(1), v)


def check_answer(kernel: Any, device: str) -> Evidence:
    """Every row and head agrees with attention in float64."""
    scene = Scene(device)
    out, expected = scene.attend(kernel), scene.expected()
    refute_unless(close(out, expected, scene.tolerance), "rows or heads differ from float64")
    error = (out.double() - expected).norm() / expected.norm()
    return {"programs": out.shape[0] * out.shape[1], "relative error": float(error)}
