"""The room of positions: how a key knows where it stood (chapter 12)."""

import torch

from pagedlab.llama import rotate
from pagedlab.museum import runs
from pagedlab.museum.checks import check_generate, check_rotation
from pagedlab.museum.exhibit import Exhibit


def rotate_neighbours(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., half:]
    first, second = x[..., 0::2], x[..., 1::2]
    turned = first * cos - second * sin, first * sin + second * cos
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)


def generate(model, ids, num_tokens, cache, table):
    """Prefill, then one token at a time into slot 0."""
    slot = torch.zeros(1, dtype=torch.int32, device=model.device)
    logits, answer, seq_len = model.prefill(ids, cache, table, slot=0), [], len(ids)
    while len(answer) < num_tokens - 1:
        answer.append(int(logits.argmax()))
        seq_len += len(ids)
        ids = answer[-1:]
        seq_lens = torch.full_like(slot, seq_len)
        logits = model.decode(ids, cache, table, seq_lens, slot)[0]
    return [*answer, int(logits.argmax())]


def generate_with_engine(model, ids, num_tokens, cache, table):
    """The same by the package's engine, in a table of its own."""
    from pagedlab.engine import Engine

    engine = Engine(model, 1, block_size=cache.layout.block_size)
    request = engine.submit(ids, num_tokens)
    engine.run()
    return request.tokens


ROOM = (
    Exhibit(
        id="other-neighbours",
        title="Perfect in prefill, babble in decode",
        broken=rotate_neighbours,
        real=rotate,
        run=runs.says_with_decode_rotation,
        check=check_rotation,
        look="rotate lanes 0, 1, 2, ... at one position with both, and see which lanes mix",
        cause="Two conventions pair lanes differently, and keys and queries must use the same one.",
        failure=r"position 17, lane \d: expected -?\d.*, got -?\d",
        source="jmaczan/tiny-vllm#4",
        fix=(
            (
                "first, second = x[..., 0::2], x[..., 1::2]",
                "first, second = x[..., :half], x[..., half:]",
            ),
            (
                "return torch.stack(turned, -1).flatten(-2).to(x.dtype)",
                "return torch.cat(turned, -1).to(x.dtype)",
            ),
        ),
    ),
    Exhibit(
        id="wide-step",
        title="The first word is right",
        broken=generate,
        real=generate_with_engine,
        run=runs.says_with_generate,
        check=check_generate,
        look="print `seq_len` in each step: by how much may it grow?",
        cause="The length grows by what was fed last: in the first step by the prompt once more.",
        failure=r"length in decode step 0: expected 7, got 12",
        source="skyzh/tiny-llm#46",
        fix=(
            (
                "        seq_len += len(ids)\n        ids = answer[-1:]\n",
                "        ids = answer[-1:]\n        seq_len += len(ids)\n",
            ),
        ),
    ),
)
