"""Where every byte of a paged KV cache lies: blocks and their address arithmetic (chapter 1)."""

import operator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Location(NamedTuple):
    """The owner of one byte: which section, block, token, head and lane it belongs to."""

    section: str  # "K" or "V"
    physical_block: int
    token_in_block: int
    kv_head: int
    lane: int
    byte_in_element: int


def expect(holds: bool, what: str | Path, wanted: str, got: object) -> None:
    """Raise a one-line ValueError unless a condition holds."""
    if not holds:
        raise ValueError(f"{what}: expected {wanted}, got {got}")


def expect_integer(name: str, value: Any) -> int:
    """An integer, NumPy's and torch's included, as Python's, which cannot overflow later."""
    try:
        return operator.index(value)
    except TypeError:
        got = " ".join(repr(value).split())
        raise ValueError(f"{name}: expected an integer, got {got}") from None


def expect_in_range(name: str, value: Any, stop: int | None = None, start: int = 0) -> int:
    """`value` as a Python int; ValueError unless it is an integer with start <= value < stop."""
    number = expect_integer(name, value)
    if number < start or (stop is not None and number >= stop):
        wanted = f"{name} >= {start}" if stop is None else f"{start} <= {name} < {stop}"
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number


@dataclass(frozen=True)
class KVLayout:
    """How keys and values lie inside one block; block `p` starts at byte `p * block_bytes`.

    A block holds `block_size` tokens of one layer of one sequence: the K of all its tokens first,
    then, `v_offset` bytes later, their V.

    Args:
        block_size: tokens per block, a power of two from 1 to 256.
        num_kv_heads: key/value heads per token.
        head_dim: lanes (elements) per head, a multiple of 8 from 16 to 256.
        dtype: torch.float32, torch.float16 or torch.bfloat16.

    Raises:
        ValueError: a size or dtype outside those limits.

    Source: the tiny-vllm article, section on what one block holds; Kwon et al. 2023.

    >>> layout = KVLayout(block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    >>> layout.kv_dim, layout.v_offset, layout.block_bytes
    (512, 16384, 32768)
    >>> layout.k_address(physical_block=3, token_in_block=5, kv_head=2, lane=7)
    103694
    >>> layout.locate(103694)
    Location(section='K', physical_block=3, token_in_block=5, kv_head=2, lane=7, byte_in_element=0)
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {self.dtype}")
        for name in (field.name for field in fields(self) if field.name != "dtype"):
            object.__setattr__(self, name, expect_in_range(name, getattr(self, name), start=1))
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(
                f"block_size: expected a power of two from 1 to 256, got {self.block_size}"
            )
        if self.head_dim not in range(16, 257, 8):
            raise ValueError(
                f"head_dim: expected a multiple of 8 from 16 to 256, got {self.head_dim}"
            )

    @cached_property
    def kv_dim(self) -> int:
        """Elements of one token's K (or V), all heads side by side."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def v_offset(self) -> int:
        """Bytes from a block's start to its V section."""
        return self.block_size * self.kv_dim * self.dtype.itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block, its K section and its V section."""
        return 2 * self.v_offset

    def num_blocks(self, cache_bytes: int) -> int:
        """Whole blocks that fit into `cache_bytes` bytes."""
        return expect_in_range("cache_bytes", cache_bytes) // self.block_bytes

    def num_logical_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one layer fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def k_address(self, physical_block: int, token_in_block: int, kv_head: int, lane: int) -> int:
        """Byte of one K element, counted from the cache's start."""
        block_start = expect_in_range("physical_block", physical_block) * self.block_bytes
        element = expect_in_range("token_in_block", token_in_block, self.block_size) * self.kv_dim
        element += expect_in_range("kv_head", kv_head, self.num_kv_heads) * self.head_dim
        element += expect_in_range("lane", lane, self.head_dim)
        return block_start + element * self.dtype.itemsize

    def v_address(self, physical_block: int, token_in_block: int, kv_head: int, lane: int) -> int:
        """Byte of one V element: the K address plus `v_offset`."""
        return self.k_address(physical_block, token_in_block, kv_head, lane) + self.v_offset

    def locate(self, byte: int) -> Location:
        """The element that owns a byte of the cache; inverts `k_address` and `v_address`."""
        physical_block, in_block = divmod(expect_in_range("byte", byte), self.block_bytes)
        is_v, in_section = divmod(in_block, self.v_offset)
        element, byte_in_element = divmod(in_section, self.dtype.itemsize)
        token_in_block, in_token = divmod(element, self.kv_dim)
        kv_head, lane = divmod(in_token, self.head_dim)
        return Location("KV"[is_v], physical_block, token_in_block, kv_head, lane, byte_in_element)


@dataclass(frozen=True)
class ModelLayout(KVLayout):
    """A KVLayout with the sizes that one model and one server add to it.

    Args:
        num_q_heads: query heads, a multiple of num_kv_heads.
        num_layers: decoder layers; each owns its own blocks.
        max_seq_len: tokens per sequence at most.
        num_slots: sequences that decode at the same time.
        cache_bytes: bytes of the whole cache.

    >>> LLAMA_3_2_1B.max_blocks_per_seq, LLAMA_3_2_1B.table_entries
    (128, 4096)
    >>> LLAMA_3_2_1B.num_blocks(LLAMA_3_2_1B.cache_bytes)
    65536
    """

    num_q_heads: int
    num_layers: int
    max_seq_len: int
    num_slots: int
    cache_bytes: int

    @cached_property
    def max_blocks_per_seq(self) -> int:
        """Logical blocks per sequence and layer."""
        return self.num_logical_blocks(self.max_seq_len)

    @cached_property
    def table_entries(self) -> int:
        """Entries of the block table, slots x layers x logical blocks."""
        return self.num_slots * self.num_layers * self.max_blocks_per_seq


LLAMA_3_2_1B = ModelLayout(
    block_size=16,
    num_kv_heads=8,
    head_dim=64,
    dtype=torch.bfloat16,
    num_q_heads=32,
    num_layers=16,
    max_seq_len=2048,
    num_slots=2,
    cache_bytes=2 * 1024**3,
)
