"""Claims on how scores become an output, and where the output goes."""

import math
from typing import Any

import torch

from pagedlab.kernels.by_token import by_token_kernel
from pagedlab.ledger.claim import Claim, Evidence, close, mutants, refute_unless
from pagedlab.ledger.scene import Scene, check_answer


def check_softmax(kernel: Any, device: str) -> Evidence:
    """Scores of up to hundreds, so that exp without the maximum overflows."""
    scene = Scene(device, spread=200.0)
    out, expected = scene.attend(kernel), scene.expected()
    largest = max(
        float((q.double() @ k.double()[:, 0].T).abs().max()) / q.shape[1] ** 0.5
        for q, k in zip(scene.q, scene.keys, strict=True)
    )
    refute_unless(largest > 100, f"no score is large: {largest:.0f}")
    refute_unless(close(out, expected, scene.tolerance), "differs from the softmax in float64")
    limit = math.ceil(math.log(torch.finfo(torch.float32).max))
    evidence = {"largest score": round(largest), "exp overflows at": limit}
    return evidence | check_answer(kernel, device)


def check_in_place(kernel: Any, device: str) -> Evidence:
    """Into q and apart, over and over: the same to the bit, and right."""
    scene = Scene(device)
    apart, runs = scene.attend(kernel), 1 if device == "cpu" else 500
    refute_unless(close(apart, scene.expected(), scene.tolerance), "the answer is wrong")
    for _ in range(runs):
        q = scene.q.clone()
        scene.attend(kernel, q=q, out=q)
        refute_unless(torch.equal(q, apart), "the answer in place is another")
    programs = scene.q.shape[0] * scene.q.shape[1]
    saved = scene.q.nbytes // len(scene.q)
    return {"programs": programs, "runs": runs, "equal": "to the bit", "bytes saved a row": saved}


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # running_max, d, acc of some tokens


def merge(first: Part, second: Part) -> Part:
    """Two parts' states as one: each is corrected to the larger maximum. No case for empty ones."""
    new_max = torch.maximum(first[0], second[0])
    corrections = [torch.exp(part[0] - new_max) for part in (first, second)]
    d = first[1] * corrections[0] + second[1] * corrections[1]
    acc = first[2] * corrections[0] + second[2] * corrections[1]
    return new_max, d, acc


def state_of(scores: torch.Tensor, values: torch.Tensor) -> Part:
    """The state after all of some scores [num_tokens] and values [num_tokens, head_dim]."""
    if not len(scores):
        return torch.tensor(-torch.inf).to(scores), scores.sum(), values.sum(0)
    weights = (scores - scores.max()).exp()
    return scores.max(), weights.sum(), weights @ values


def check_merge(merge_parts: Any, device: str) -> Evidence:
    """Merge every way to cut 20 tokens in two, one part empty included; then two empty parts."""
    scores = 30 * torch.randn(20, dtype=torch.float64, device=device)
    values = torch.randn(20, 8, dtype=torch.float64, device=device)
    for cut in range(21):
        parts = (state_of(scores[p], values[p]) for p in (slice(0, cut), slice(cut, 20)))
        _, d, acc = merge_parts(*parts)
        refute_unless(close(acc / d, scores.softmax(0) @ values, 1e-9), f"cut at {cut}: wrong")
    empty = state_of(scores[:0], values[:0])
    _, d, _ = merge_parts(empty, empty)
    refute_unless(d.isnan(), f"two empty parts give d = {float(d)}")
    whole = merge_parts(merge_parts(empty, empty), state_of(scores, values))
    refute_unless(whole[1].isnan(), "the NaN does not reach a third part")
    return {"cuts merged rightly": 21, "d of two empty parts": "NaN", "with a third part": "NaN"}


def merge_guarded(first: Part, second: Part) -> Part:
    if torch.maximum(first[0], second[0]) == -torch.inf:
        return first
    return merge(first, second)


def merge_uncorrected(first: Part, second: Part) -> Part:
    return torch.maximum(first[0], second[0]), first[1] + second[1], first[2] + second[2]


CLEARED = """lane = tl.arange(0, HEAD_DIM)
    first = out_ptr + active_slot * stride_out + q_head * HEAD_DIM + lane
    tl.store(first, tl.zeros([HEAD_DIM], out_ptr.dtype.element_ty))"""
CLAIMS = (
    Claim(
        "online_softmax",
        "Per token the maximum is raised, d and acc are corrected by exp(old - new), and acc / d "
        "is the softmax-weighted mean.",
        "online softmax",
        "holds",
        "also for scores where exp alone overflows",
        by_token_kernel,
        check_softmax,
        mutants(
            by_token_kernel,
            {
                "acc is not corrected": ("acc * correction +", "acc +"),
                "d is not corrected": ("d * correction +", "d +"),
                "no maximum": ("tl.maximum(running_max, score)", "score * 0"),
            },
        ),
    ),
    Claim(
        "in_place",
        "The output may overwrite q: each thread reads its own element first and writes only that "
        "one.",
        "in place",
        "holds",
        "programs share no element of q",
        by_token_kernel,
        check_in_place,
        mutants(
            by_token_kernel,
            {
                "the output cleared before q is read": ("lane = tl.arange(0, HEAD_DIM)", CLEARED),
                "q read from the next head's place": (
                    "stride_q + q_head * HEAD_DIM + lane",
                    "stride_q + (q_head ^ 1) * HEAD_DIM + lane",
                ),
                "written to the next head's place": (
                    "stride_out + q_head * HEAD_DIM + lane",
                    "stride_out + (q_head ^ 1) * HEAD_DIM + lane",
                ),
            },
        ),
        unverified=True,
    ),
    Claim(
        "merge",
        "Prefill's softmax merges two parts with the same correction, exp(old - new).",
        "online softmax",
        "holds only when",
        "one of the parts has a score; two empty ones give exp(-inf + inf), NaN",
        merge,
        check_merge,
        {"a case for two empty parts": merge_guarded, "no correction": merge_uncorrected},
    ),
)
