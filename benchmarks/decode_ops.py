"""Time a decode step's fused kernels on a GPU: matrix products beside torch's, and the choice.

    python benchmarks/decode_ops.py [--out FOLDER] [--commit HASH]

Calls are chained in a CUDA graph, each with another copy of the weight, so that none is in the L2
cache. The bytes are the weight's. "matvec N" takes N elements of the weight per
program; the package's own choice is MATVEC_ELEMENTS. Results go to FOLDER/<gpu>/decode_ops.json,
a list of rows.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attention import time_us
from engine import LLAMA_CONFIG
from rows import begin_run, command_line, expect_gpu, save

from pagedlab.kernels import choose, decode_ops

C = LLAMA_CONFIG
KV_DIM = C.num_kv_heads * C.head_dim
PRODUCTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # outputs, inputs, what is fused
    "qkv": (C.hidden_size + 2 * KV_DIM, C.hidden_size, {"norm": True}),
    "attention_out": (C.hidden_size, C.hidden_size, {"add_to": True}),
    "gate_up": (2 * C.intermediate_size, C.hidden_size, {"norm": True, "gated": True}),
    "down": (C.hidden_size, C.intermediate_size, {"add_to": True}),
    "head": (C.vocab_size, C.hidden_size, {"norm": True}),
}
ELEMENTS = (4096, 8192, 16384, 32768)
COPIED_BYTES = 2**28  # of weights, several times the L2 cache
CALLS = 64


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def measure_product(name: str, num_rows: int) -> list[dict[str, Any]]:
    """One product with what is fused to it, by matvec or torch's own, and the bare product."""
    num_outputs, num_inputs, flags = PRODUCTS[name]
    num_bytes = 2 * num_outputs * num_inputs
    copies = max(2, math.ceil(COPIED_BYTES / num_bytes))
    weights = [random(num_outputs, num_inputs) / num_inputs**0.5 for _ in range(copies)]
    x = random(num_rows, num_inputs)
    options: dict[str, Any] = {"eps": C.rms_norm_eps, "gated": "gated" in flags}
    if "norm" in flags:
        options["norm"] = random(num_inputs)
    if "add_to" in flags:
        options["add_to"] = random(num_rows, num_outputs)

    def row(kernel: str, call: Callable[[int], Any]) -> dict[str, Any]:
        us = time_us(call, copies, copies * max(1, round(CALLS / copies)))
        gb_per_s = round(num_bytes / us / 1000, 1)
        print(
            f"{name:14} {num_rows:3} rows {kernel:22} {us:8.2f} us {gb_per_s:8.1f} GB/s", flush=True
        )
        return {"product": name, "rows": num_rows, "kernel": kernel, "us": round(us, 3),
                "bytes": num_bytes, "gb_per_s": gb_per_s}  # fmt: skip

    rows = [row("torch, product alone", lambda i: F.linear(x, weights[i]))]
    if num_rows > 1:
        return [*rows, row("fused", lambda i: decode_ops.linear(x, weights[i], **options))]
    chosen = decode_ops.MATVEC_ELEMENTS
    for elements in ELEMENTS:
        decode_ops.MATVEC_ELEMENTS = elements
        rows.append(
            row(f"matvec {elements}", lambda i: decode_ops.linear(x, weights[i], **options))
        )
    decode_ops.MATVEC_ELEMENTS = chosen
    return rows


def measure_choose(num_rows: int, temperature: float) -> dict[str, Any]:
    """The choice of tokens from logits, greedy or drawn."""
    logits = random(num_rows, C.vocab_size)
    temperatures = torch.full((num_rows,), temperature, device="cuda")
    seeds = torch.arange(num_rows, device="cuda")
    lengths = torch.ones(num_rows, dtype=torch.int32, device="cuda")
    rows, chosen = (lengths.clone(), lengths), seeds.clone()
    us = time_us(lambda _: choose.choose(logits, temperatures, seeds, chosen, rows), 1, CALLS)
    name = f"choose, temperature {temperature:g}"
    print(f"{name:22} {num_rows:3} rows {us:8.2f} us", flush=True)
    return {"product": name, "rows": num_rows, "kernel": "choose", "us": round(us, 3),
            "bytes": logits.nbytes, "gb_per_s": round(logits.nbytes / us / 1000, 1)}  # fmt: skip


def main() -> None:
    """Measure and write the results."""
    args = command_line(__doc__).parse_args()
    expect_gpu()
    run = begin_run(args, graphs=True)
    rows = [row for n in (1, 64) for name in PRODUCTS for row in measure_product(name, n)]
    rows += [measure_choose(n, temperature) for n in (1, 64) for temperature in (0.0, 1.0)]
    print(save("decode_ops", rows, run, args.out))


if __name__ == "__main__":
    main()
