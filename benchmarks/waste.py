"""Count what a KV cache wastes: contiguous against paged, at several block sizes. Needs no GPU.

    python benchmarks/waste.py [--out FOLDER] [--commit HASH]

Requests with prompts and answers of random lengths pass through the package's own scheduler, pool
and table, without a model: every answer token is a zero. A contiguous cache is one whose blocks are
as long as the longest sequence. This is accounting, and the same on every machine; the rows say on
which one it was done. Results go to FOLDER/<device>/waste.json.
"""

import math
import random
from typing import Any, NamedTuple

from rows import begin_run, command_line, save

from pagedlab import BlockPool, BlockTable, Request
from pagedlab.scheduler import Scheduler

BLOCK_SIZES = (1, 4, 16, 32, 64, 128, 256)


class Load(NamedTuple):
    """What arrives, all at once, and the cache that it passes through.

    Lengths are log-normal with these means, which are those that Kwon et al. 2023 give for ShareGPT
    conversations; sigma is that of the logarithm.
    """

    num_requests: int = 512
    mean_prompt: int = 161
    mean_answer: int = 338
    sigma: float = 1.0
    seed: int = 0
    max_seq_len: int = 2048
    cache_tokens: int = 32 * 2048  # of one layer; in all layers of Llama-3.2-1B 2 GiB


def draw_requests(load: Load) -> list[Request]:
    """The requests, in order of arrival; prompts take at most half of max_seq_len."""
    rng = random.Random(load.seed)

    def length(mean: int, longest: int) -> int:
        drawn = rng.lognormvariate(math.log(mean) - load.sigma**2 / 2, load.sigma)
        return min(longest, max(1, round(drawn)))

    requests = []
    for id in range(load.num_requests):
        prompt = length(load.mean_prompt, load.max_seq_len // 2)
        answer = length(load.mean_answer, load.max_seq_len - prompt)
        requests.append(Request(id, [0] * prompt, answer))
    return requests


def play(load: Load, block_size: int) -> dict[str, Any]:
    """Run all requests to their ends; counts are over all steps unless they say otherwise.

    Returns:
        waste: the share of the owned blocks' places that hold no token;
        wasted_tokens: the same in tokens per running sequence;
        in_use: the share of the whole cache that holds tokens, while requests wait;
        running: sequences at a time, while requests wait;
        preemptions, and recomputed: the tokens of the preempted; steps.
    """
    pool = BlockPool(load.cache_tokens // block_size)
    table = BlockTable(load.num_requests, 1, -(-load.max_seq_len // block_size))
    events: list[Any] = []
    scheduler = Scheduler(pool, table, block_size, events)
    scheduler.queue.extend(draw_requests(load))
    held = owned = sequence_steps = busy_held = busy_running = busy_steps = 0
    while scheduler.queue or scheduler.running:
        running = scheduler.schedule()
        tokens = sum(request.num_tokens for request in running)
        held += tokens
        owned += (pool.num_blocks - pool.num_free) * block_size
        sequence_steps += len(running)
        if scheduler.queue:
            busy_held, busy_running = busy_held + tokens, busy_running + len(running)
            busy_steps += 1
        for request in running:
            request.tokens.append(0)
            if len(request.tokens) == request.max_new_tokens:
                scheduler.finish(request, "length")
    pool.check_integrity()
    preempted = [event.num_tokens for event in events if event.action == "preempt"]
    return {
        "cache": "contiguous" if block_size == load.max_seq_len else "paged",
        "block_size": block_size,
        "waste": round(1 - held / owned, 5),
        "wasted_tokens": round((owned - held) / sequence_steps, 2),
        "in_use": round(busy_held / max(1, busy_steps) / load.cache_tokens, 5),
        "running": round(busy_running / max(1, busy_steps), 2),
        "preemptions": len(preempted),
        "recomputed": sum(preempted),
        "steps": scheduler.step,
    }


def measure(load: Load) -> list[dict[str, Any]]:
    """A row for every block size, the contiguous cache last; each says what arrived."""
    told = {"method": "accounting: no GPU took part"} | load._asdict()
    return [play(load, size) | told for size in (*BLOCK_SIZES, load.max_seq_len)]


def main() -> None:
    """Count and write the results."""
    args = command_line(__doc__).parse_args()
    run = begin_run(args)
    rows = measure(Load())
    for row in rows:
        print(
            f"{row['cache']:10} {row['block_size']:5} tokens a block: {row['waste']:6.1%} wasted,"
            f" {row['wasted_tokens']:7.1f} tokens a sequence; {row['in_use']:6.1%} of the cache"
            f" in use, {row['running']:5.1f} sequences, {row['preemptions']:3} preemptions,"
            f" {row['steps']} steps"
        )
    print(save("waste", rows, run, args.out))


if __name__ == "__main__":
    main()
