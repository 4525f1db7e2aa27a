"""Claims on how one score is made: shuffles, two warps, barriers, and the scale."""

from collections.abc import Callable
from typing import Any, cast

import torch

from pagedlab.kernels.by_token import by_token_kernel
from pagedlab.kernels.compile import Compiled, compile_for
from pagedlab.ledger import cuda
from pagedlab.ledger.claim import Claim, Evidence, close, refute_unless
from pagedlab.ledger.probes import one_sum
from pagedlab.ledger.scene import Scene, check_answer
from pagedlab.ledger.warps import Warp, every_order, three_barriers, two_barriers

LANES_PER_WARP = 32
Sum = Callable[[torch.Tensor], torch.Tensor]  # products [head_dim] -> their sum


def shuffle_down(x: torch.Tensor, offset: int) -> torch.Tensor:
    """What each lane of [..., 32] gets from the lane `offset` above, or from itself."""
    lane = torch.arange(LANES_PER_WARP, device=x.device)
    return x[..., torch.where(lane + offset < LANES_PER_WARP, lane + offset, lane)]


def warp_sum(x: torch.Tensor, offsets: tuple[int, ...] = (16, 8, 4, 2, 1)) -> torch.Tensor:
    """Lane 0 of [..., 32] after shuffling down by each offset and adding."""
    for offset in offsets:
        x = x + shuffle_down(x, offset)
    return x[..., 0]


def two_place_sum(products: torch.Tensor) -> torch.Tensor:
    """The engine's sum: a place for warp 0, one for warp 1, and what was there before."""
    places = torch.full((2,), float("nan"), device=products.device)
    sums = warp_sum(products.unflatten(0, (-1, LANES_PER_WARP)))
    places[: len(sums)] = sums[:2]
    return places[0] + places[1]


def a_place_per_warp(products: torch.Tensor) -> torch.Tensor:
    return warp_sum(products.unflatten(0, (-1, LANES_PER_WARP))).sum()


def first_place_only(products: torch.Tensor) -> torch.Tensor:
    return warp_sum(products[:LANES_PER_WARP])


def check_shuffles(reduce: Sum, device: str) -> Evidence:
    """Lane 0 holds the sum of 32 lanes, each counted once."""
    lanes = torch.eye(LANES_PER_WARP, device=device)
    counted = reduce(lanes)  # [32]: how often each lane is in the sum
    refute_unless((counted == 1).all(), f"lanes counted other than once: {(counted != 1).sum()}")
    return {"lanes added": LANES_PER_WARP, "shuffles": 5, "one at a time": LANES_PER_WARP - 1}


def check_two_warps(reduce: Sum, device: str) -> Evidence:
    """Right for 64 lanes, wrong for every other number of whole warps."""
    shares = {}
    for head_dim in (32, 64, 128, 256):
        products = torch.rand(head_dim, device=device) + 1
        share = float(reduce(products) / products.sum())
        right = abs(share - 1) < 1e-4
        refute_unless(right == (head_dim == 64), f"head_dim {head_dim}: {share:.2f} of the sum")
        missing = share != share
        shares[f"head_dim {head_dim}"] = "NaN" if missing else f"{round(4 * share) / 4:.0%}"
    return shares


def two_warps_on_gpu() -> Evidence:
    """The same in CUDA C++: two_warps.cu with 64 and with 128 threads."""
    if missing := cuda.missing_tools("nvcc"):
        return {"CUDA": missing}
    with cuda.in_folder("two_warps") as program:
        right, wrong = (cuda.run(program, head_dim, 3, 300, 64) for head_dim in (64, 128))
    differences = [run["relative_difference"] for run in (right, wrong)]
    refute_unless(differences[0] < 1e-4, f"64 threads: {differences[0]:.1e} off")
    refute_unless(not differences[1] < 1e-2, f"128 threads: only {differences[1]:.1e} off")
    return {"CUDA, 64 threads, off by": differences[0], "128 threads, off by": differences[1]}


SUMS = ([1.0, 2.0], [10.0, 20.0])  # what each warp has added up, for two tokens
SCORES = [11.0, 22.0]


def check_barriers(program: Warp, device: str) -> Evidence:
    """In some order that two barriers allow, a warp reads something else than the score."""
    orders = every_order(program, SUMS)
    wrong = [order for order in orders if order.scores != (SCORES, SCORES)]
    refute_unless(wrong, f"all {len(orders)} orders give the right scores")
    mended = every_order(three_barriers, SUMS)
    refute_unless(
        all(order.scores == (SCORES, SCORES) for order in mended), "three barriers do not mend it"
    )
    return {
        "orders": len(orders),
        "with a wrong score": len(wrong),
        "a third barrier": f"{len(mended)} orders, 0 wrong",
    }


def one_token_barriers(warp: int, sums: list[float], *shared_and_scores: Any) -> Any:
    """Two barriers and one token: nobody writes again, so nothing can go wrong."""
    yield from two_barriers(warp, sums[:1], *shared_and_scores)
    scores = shared_and_scores[1]
    scores.append(SCORES[1])


def racecheck_on_gpu() -> Evidence:
    """compute-sanitizer's racecheck on two_warps.cu, with two barriers and with three."""
    if missing := cuda.missing_tools("nvcc", "compute-sanitizer"):
        return {"racecheck": missing}
    evidence: Evidence = {}
    with cuda.in_folder("two_warps") as program:
        for barriers in (2, 3):
            hazards = cuda.racecheck(program, 64, barriers, 64, 8)
            off = cuda.run(program, 64, barriers, 300, 512)["relative_difference"]
            evidence[f"racecheck, {barriers} barriers"] = hazards.summary
            evidence[f"hazards, {barriers} barriers"] = hazards.found
            evidence[f"outputs off by, {barriers} barriers"] = off
            if barriers == 2:
                refute_unless(hazards.found, f"racecheck reports nothing: {hazards.text}")
                evidence["report"] = hazards.text
            else:
                refute_unless(not hazards.found, f"racecheck reports: {hazards.text}")
    return evidence


WARP_WIDTH = {"sm_75": 32, "sm_90": 32, "gfx942": 64}


def check_mask(width: dict[str, int], device: str) -> Evidence:
    """64 lanes, compiled with room for two warps: does one hold them, or do two need memory?"""
    chips = compile_for(one_sum, [*width], torch.empty(64), torch.empty(1), 64, num_warps=2)
    for chip in cast(list[Compiled], chips):
        wanted = 0 if width[chip.target] == 64 else 2 * 4  # bytes: a float32 for each of two warps
        got = chip.shared_bytes
        refute_unless(got == wanted, f"{chip.target}: {got} bytes of shared memory")
        if chip.ptx:
            shuffles, masked = (chip.ptx.count(text) for text in ("shfl", ", -1;"))
            refute_unless(shuffles == masked == 6, f"{chip.target}: {masked} masks of 32 ones")
    return {f"lanes a warp, {target}": lanes for target, lanes in width.items()}


def check_scale(scale: Callable[[int], float], device: str) -> Evidence:
    """The factor of the scores: at head_dim 64 the article's, elsewhere another."""
    scene = Scene(device)
    head_dim = scene.layout.head_dim
    refute_unless(scale(64) == 1 / 8, f"head_dim 64: {scale(64)}, not an eighth")
    refute_unless(scale(128) == 1 / 8, "the factor follows head_dim")
    wanted = 1 / head_dim**0.5
    q = scene.q * (scale(head_dim) / wanted)  # by_token scales by the root: replace its factor
    out = scene.attend(by_token_kernel, q=q.to(scene.q.dtype))
    right = close(out, scene.expected(), scene.tolerance)
    refute_unless(right == (head_dim == 64), f"head_dim {head_dim} is {'right' * right}")
    return {"factor at 64": scale(64), f"right at head_dim {head_dim}": right} | check_answer(
        by_token_kernel, device
    )


CLAIMS = (
    Claim(
        "shuffles",
        "Shuffling down by 16, 8, 4, 2 and 1 leaves the sum of 32 lanes in lane 0.",
        "one score",
        "holds",
        "each lane is in it once",
        warp_sum,
        check_shuffles,
        {
            "without the last step": lambda x: warp_sum(x, (16, 8, 4, 2)),
            "one lane too far": lambda x: warp_sum(x, (17, 8, 4, 2, 1)),
        },
    ),
    Claim(
        "two_warps",
        "Two places in shared memory, filled by threads 0 and 32 and added by thread 0, are the "
        "sum of 64 lanes and of no other number.",
        "one score",
        "holds only when",
        "head_dim is 64; at 128 half of the lanes are forgotten",
        two_place_sum,
        check_two_warps,
        {"a place per warp": a_place_per_warp, "only the first place": first_place_only},
        two_warps_on_gpu,
        unverified=True,
    ),
    Claim(
        "barriers",
        "Two barriers a token let both warps read the same score.",
        "one score",
        "wrong",
        "a fast warp can write the next token's sum before the slow one has read the score",
        two_barriers,
        check_barriers,
        {"three barriers": three_barriers, "a single token": one_token_barriers},
        racecheck_on_gpu,
    ),
    Claim(
        "warp_mask",
        "The mask of a full warp has 32 bits in CUDA and 64 in HIP.",
        "one score",
        "holds",
        "compiled for AMD, 64 lanes are one wavefront and need no shared memory",
        WARP_WIDTH,
        check_mask,
        {
            "32 everywhere": dict.fromkeys(WARP_WIDTH, 32),
            "64 everywhere": dict.fromkeys(WARP_WIDTH, 64),
        },
    ),
    Claim(
        "scale",
        "The score is divided by 8, which is the root of HEAD_DIM.",
        "one score",
        "holds only when",
        "head_dim is 64",
        lambda head_dim: 1 / 8,
        check_scale,
        {
            "the root of every head_dim": lambda head_dim: head_dim**-0.5,
            "no root": lambda head_dim: 1 / head_dim,
        },
    ),
)
