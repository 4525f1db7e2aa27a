"""pagedlab: a paged KV cache from the block to the model, as the book builds it.

Every public name imports from here; what is heavy is imported when it is first used.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import Any

import torch

from pagedlab import stand_in

__version__ = "0.1.0"

_MODULE_OF = {
    "KVLayout": "layout",
    "ModelLayout": "layout",
    "Location": "layout",
    "LLAMA_3_2_1B": "layout",
    "BlockPool": "block_pool",
    "PoolError": "block_pool",
    "OutOfBlocks": "block_pool",
    "NotAllocated": "block_pool",
    "UnknownBlock": "block_pool",
    "BlockTable": "block_table",
    "PagedKVCache": "kv_cache",
    "AttentionPlan": "attention",
    "attention_plan": "attention",
    "check_batch": "attention",
    "paged_attention": "attention",
    "compile_for": "kernels.compile",
    "step": "trace",
    "step_launch": "trace",
    "Trace": "trace",
    "Llama": "llama",
    "LlamaConfig": "llama",
    "Tokenizer": "tokenizer",
    "Detokenizer": "tokenizer",
    "Engine": "engine",
    "Request": "engine",
    "show": "source",
    "AddressCalculator": "widgets",
    "BlockTableView": "widgets",
    "KernelStepper": "widgets",
    "RecyclingTimeline": "widgets",
    "DecodeExplorer": "widgets",
    "Chart": "widgets",
}
_SUBMODULES = {module.split(".")[0] for module in _MODULE_OF.values()} | {
    "checkpoint",
    "demo_model",
    "exercises",
    "ledger",
    "museum",
    "recordings",
    "reference",
    "sampling",
    "scheduler",
}
_TRITON = {"triton": "triton", "tl": "triton.language"}  # in its interpreter if there is no GPU
__all__ = sorted(_MODULE_OF)

if not stand_in.has_triton():
    stand_in.install()
elif not torch.cuda.is_available() and "triton" not in sys.modules:
    # Triton reads this when it is first imported: without a GPU kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"pagedlab.{_MODULE_OF[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"pagedlab.{name}")
    if name in _TRITON:
        if not stand_in.has_triton():
            return stand_in.MODULES[_TRITON[name]]
        if os.environ.get("TRITON_INTERPRET") == "1":
            portable = import_module("pagedlab.portable")
            versions = (import_module(module).__version__ for module in ("triton", "numpy"))
            if fault := portable.interpreter_fault(*versions):
                warnings.warn(fault, stacklevel=2)
        return import_module(_TRITON[name])
    raise AttributeError(f"module 'pagedlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES, *_TRITON})
