"""Claims that reach beyond attention: rotated keys, and a real model on the whole."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pagedlab.attention import paged_attention
from pagedlab.checkpoint import LlamaConfig, RopeScaling
from pagedlab.engine import Engine
from pagedlab.ledger.claim import Claim, Evidence, refute_unless
from pagedlab.llama import Llama, rope_frequencies, rope_rotation, rotate
from pagedlab.tokenizer import Tokenizer

LLAMA = LlamaConfig(  # the article's model, as far as RoPE is concerned
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_seq_len=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
)
Rotate = Callable[[torch.Tensor, int], torch.Tensor]  # (x [1, 1, head_dim], position)


def halves(x: torch.Tensor, position: int, config: LlamaConfig = LLAMA) -> torch.Tensor:
    """RoPE as prefill does it: lane i turns with lane i + head_dim / 2."""
    frequencies = rope_frequencies(config).to(x)
    return rotate(x, *rope_rotation(torch.tensor([position]).to(x.device), frequencies))


def pairs(x: torch.Tensor, position: int, config: LlamaConfig = LLAMA) -> torch.Tensor:
    """RoPE on neighbouring lanes: lane 2i turns with lane 2i + 1."""
    head_dim = x.shape[-1]
    order = torch.arange(head_dim, device=x.device).view(2, -1).T.flatten()  # 0, 32, 1, 33, ...
    back = order.argsort()
    return halves(x[..., back], position, config)[..., order]


UNSCALED = replace(LLAMA, rope_scaling=None)


def engine_decode(x: torch.Tensor, position: int) -> torch.Tensor:
    """Our re-creation of what the engine's decode does to a query: pairs, and no scaling."""
    return pairs(x, position, UNSCALED)


def drift(decode: Rotate, device: str) -> float:
    """How much a score moves at most while query and key keep their distance.

    The key is rotated as prefill does, the query by `decode`; both have length 1.
    """
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 64, generator=generator, dtype=torch.float64).to(device)
    q, k = q / q.norm(), k / k.norm()
    starts, distance = range(0, 4000, 100), 17
    scores = [float((decode(q, at + distance) * halves(k, at)).sum()) for at in starts]
    return max(scores) - min(scores)


def check_rope(decode: Rotate, device: str) -> Evidence:
    """A score may depend on the distance alone; with the engine's two rotations it does not."""
    agreed, moved = drift(halves, device), drift(decode, device)
    refute_unless(agreed < 1e-2 * moved, f"the score moves by {moved:.1e}, as where both agree")
    scaling_only = drift(partial(halves, config=UNSCALED), device)
    refute_unless(scaling_only > 100 * agreed, "the missing scaling alone moves nothing")
    return {
        "score moves, same rotation": agreed,
        "other pairs, no scaling": moved,
        "the same pairs, no scaling": scaling_only,
    }


def check_model(attention: Callable[..., torch.Tensor], device: str) -> Evidence:
    """The demo model decodes from blocks what prefill, which reads no block, finds likeliest."""
    model = Llama.from_checkpoint(device=device, dtype=torch.float32)
    tokenizer = Tokenizer.from_checkpoint()
    prompt = tokenizer.chat("What is the capital of France?")
    engine = Engine(model, num_slots=1, max_seq_len=64, attention=attention)
    request = engine.submit(prompt, max_new_tokens=8)
    engine.run()
    again = Engine(model, num_slots=1, max_seq_len=64)
    for count, token in enumerate(request.tokens):
        alone = again.submit(prompt + request.tokens[:count], max_new_tokens=1)
        again.run()
        refute_unless(alone.tokens == [token], f"token {count} is another without blocks")
    return {"tokens": len(request.tokens), "text": tokenizer.decode(request.tokens)}


def without_the_new_token(
    q: torch.Tensor, cache: object, table: object, seq_lens: torch.Tensor, *rest: object
) -> torch.Tensor:
    return paged_attention(q, cache, table, seq_lens - 1, *rest)  # type: ignore[arg-type]


def heads_in_reverse(q: torch.Tensor, *rest: object) -> torch.Tensor:
    return paged_attention(q.flip(1).contiguous(), *rest).flip(1)  # type: ignore[arg-type]


CLAIMS = (
    Claim(
        "rope",
        "Decode's RoPE takes an input, a position and a size.",
        "the kernel",
        "silent",
        "it must pair the lanes as prefill's does and scale alike; the engine's does neither",
        engine_decode,
        check_rope,
        {"as prefill": halves},
    ),
    Claim(
        "real_model",
        "Running it on a real model is left for later.",
        "limits",
        "silent",
        "SmolLM2-135M, a small Llama, says the same from blocks as without",
        paged_attention,
        check_model,
        {"the new token left out": without_the_new_token, "heads in reverse": heads_in_reverse},
        unverified=True,
    ),
)
