"""A model's files: a folder with config.json, model.safetensors and tokenizer.json (chapter 8)."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pagedlab import demo_model
from pagedlab.layout import DTYPES, expect

# Fields of config.json that would change the computation, each with the only value computed here.
LLAMA_ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "layer_types": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "quantization_config": None,
}


class RopeScaling(NamedTuple):
    """Llama 3's slowing of the slow rotary frequencies, for contexts beyond the original one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants of a Llama decoder.

    Args:
        rope_scaling: None for plain rotary embeddings.
        bos_token_ids, eos_token_ids: none, one or several.

    Raises:
        ValueError: sizes that do not fit each other.

    >>> config = LlamaConfig(hidden_size=96, intermediate_size=128, num_layers=2, num_q_heads=6,
    ...                      num_kv_heads=2, head_dim=16, vocab_size=50, max_seq_len=64)
    >>> config.num_q_heads // config.num_kv_heads
    3
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        divides = self.num_q_heads % self.num_kv_heads == 0
        wanted = f"a divisor of the {self.num_q_heads} q heads"
        expect(divides, "num_kv_heads", wanted, self.num_kv_heads)
        expect(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)


def pick_device() -> torch.device:
    """The GPU when torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(device: torch.device | str) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU that computes in it, float16 on an older GPU.

    Emulated bfloat16, which a T4 offers, does not count.

    >>> pick_dtype("cpu")
    torch.float32
    """
    if torch.device(device).type == "cpu":
        return torch.float32
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float16


def locate(name: str | Path | None = None) -> Path:
    """The folder that holds a model.

    Args:
        name: a folder; or a hub id like "owner/model", the only case in which the hub is used; or
            None for the demo model, converted once into the user's cache.

    Raises:
        ValueError: no such model, or no way to fetch or store it; the line says what to do.
    """
    if name is None:
        return demo_model.folder()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)) is not None
    expect(is_id, "model", "a folder or a hub id like 'owner/model'", name)
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except ImportError:
        reason = "no huggingface_hub; run: pip install huggingface_hub"
    except Exception as error:  # the hub's own errors, and those of whichever HTTP client it uses
        reason = " ".join(str(error).split())
    raise ValueError(f"model: expected a folder or one that the hub gives, got {name}: {reason}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON file, got {error}") from error
    expect(isinstance(value, dict), path, "a JSON object", type(value).__name__)
    return value


def read_config(folder: Path) -> LlamaConfig:
    """The LlamaConfig in config.json; generation_config.json, if there, may add BOS and EOS ids.

    Fields that do not concern the computation are ignored.

    Raises:
        ValueError: a field is missing or malformed, or asks for what this decoder does not compute.
    """
    path, generation_path = folder / "config.json", folder / "generation_config.json"
    config = read_json(path)
    generation = read_json(generation_path) if generation_path.exists() else {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}

    expect(isinstance(rope, dict), path, "rope_scaling to be an object", rope)
    fields = config | rope

    def check(holds: bool, name: str, wanted: object, got: object) -> None:
        expect(holds, path, f"{name} to be {wanted}", repr(got))

    def number(name: str, default: float | None = None, kind: type = int) -> Any:
        value: Any = default if fields.get(name) is None else fields[name]
        is_kind = type(value) is int or (kind is float and type(value) is float)
        check(is_kind and 0 < value < math.inf, name, f"a positive {kind.__name__}", value)
        return kind(value)

    def token_ids(name: str) -> tuple[int, ...]:
        ids: list[Any] = []
        for value in (config.get(name), generation.get(name)):
            ids += value if isinstance(value, list) else [] if value is None else [value]
        check(all(type(i) is int and i >= 0 for i in ids), name, "token ids", ids)
        return tuple(dict.fromkeys(ids))

    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    check(architectures == ["LlamaForCausalLM"], "architectures", "LlamaForCausalLM", architectures)
    for name, only in LLAMA_ONLY.items():
        check(fields.get(name) in (None, only), name, repr(only), fields.get(name))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check(rope_type in ("default", "llama3"), "rope_type", "default or llama3", rope_type)
    tied = config.get("tie_word_embeddings", False)
    check(isinstance(tied, bool), "tie_word_embeddings", "true or false", tied)
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(
            factor=number("factor", kind=float),
            low_freq_factor=number("low_freq_factor", kind=float),
            high_freq_factor=number("high_freq_factor", kind=float),
            original_max_seq_len=number("original_max_position_embeddings"),
        )
    hidden_size, num_q_heads = number("hidden_size"), number("num_attention_heads")
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=number("num_key_value_heads", num_q_heads),
        head_dim=number("head_dim", hidden_size // num_q_heads),
        vocab_size=number("vocab_size"),
        max_seq_len=number("max_position_embeddings"),
        rope_theta=number("rope_theta", 10000.0, float),
        rope_scaling=scaling,
        rms_norm_eps=number("rms_norm_eps", kind=float),
        tie_word_embeddings=tied,
        bos_token_ids=token_ids("bos_token_id"),
        eos_token_ids=token_ids("eos_token_id"),
    )


class Weights:
    """The tensors of a folder's model.safetensors, or of the shards its index names.

    The files are memory-mapped: a tensor is read when it is asked for, and not before.

    Raises:
        ValueError: a file is missing, truncated or not in the safetensors format.
    """

    def __init__(self, folder: Path) -> None:
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        paths = [single]
        if index.exists() and not single.exists():
            shards: Any = read_json(index).get("weight_map")
            named = isinstance(shards, dict) and all(isinstance(s, str) for s in shards.values())
            expect(named, index, "a weight_map object of file names", shards)
            paths = [folder / name for name in sorted(set(shards.values()))]
        self.folder = folder
        self.unread: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path}: expected a whole safetensors file, got {error}"
                ) from None
            self.unread |= dict.fromkeys(file.keys(), file)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name, as stored; each is read once.

        Raises:
            ValueError: it is missing, or its shape or dtype is not what the config asks for.
        """
        expect(name in self.unread, self.folder, f"a tensor {name} {list(shape)}", "none")
        file = self.unread.pop(name)
        stored = file.get_slice(name).get_shape()
        expect(stored == list(shape), self.folder, f"{name} to be {list(shape)}", stored)
        tensor = file.get_tensor(name)
        expect(tensor.dtype in DTYPES, self.folder, f"{name} in {DTYPES}", tensor.dtype)
        return tensor

    def expect_all_read(self) -> None:
        """Raise ValueError if a tensor was left over: the config describes another model."""
        harmless = ("rotary_emb.inv_freq", "lm_head.weight")  # recomputed; tied
        left = [name for name in self.unread if not name.endswith(harmless)]
        expect(not left, self.folder, "only tensors of a Llama as configured", left[:1])
