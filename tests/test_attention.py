"""paged_attention against the reference: every kernel, every backend, every edge."""

import os
import subprocess
import sys
import time
from importlib import import_module

import numpy as np
import pytest
import torch
from batches import TOLERANCE, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedlab.attention
from pagedlab import KVLayout, attention_plan, check_batch, paged_attention
from pagedlab.reference import gathered_attention

KERNELS = pagedlab.attention.KERNELS
LENGTHS = [0, 1, 15, 16, 17, 63, 256]


def assert_matches(batch, out, layer=1):
    expected = gathered_attention(*batch.args, layer)
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=False)


@st.composite
def batches(draw, max_work, dtypes, head_dims, block_sizes):
    """A batch whose tokens x q heads stay under max_work, so that the interpreter is quick."""
    layout = KVLayout(
        block_size=draw(st.sampled_from(block_sizes)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(head_dims)),
        dtype=draw(st.sampled_from(dtypes)),
    )
    num_q_heads = layout.num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7]))
    lengths, work = [], 0
    for length in draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=5)):
        work += length * num_q_heads
        if work <= max_work:
            lengths.append(length)
    seed = draw(st.integers(0, 2**32))
    return make_batch(layout, lengths, num_q_heads=num_q_heads, seed=seed)


@given(
    batches(
        10**6,
        [torch.float32, torch.float16, torch.bfloat16],
        [16, 24, 64, 80, 128, 256],
        [1, 2, 16, 64, 256],
    )
)
@settings(max_examples=200, deadline=None)
def test_the_torch_backend_matches_the_reference(batch):
    assert_matches(batch, paged_attention(*batch.args, 1, backend="torch"))


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_each_kernel_matches_the_reference(kernel, data):
    by_token = kernel == "by_token"
    batch = data.draw(
        batches(
            100 if by_token else 400,
            [torch.float32, torch.float16],
            [16, 32, 64, 128] if by_token else [16, 24, 64, 80, 128],
            [1, 2, 16, 64] if by_token else [8, 16, 32, 256],
        )
    )
    assert_matches(batch, paged_attention(*batch.args, 1, kernel=kernel, backend="triton"))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_each_kernel_at_each_length(kernel, length):
    layout = KVLayout(block_size=16, num_kv_heads=1, head_dim=64, dtype=torch.float32)
    batch = make_batch(layout, [length], num_q_heads=2)
    out = paged_attention(*batch.args, 1, kernel=kernel, backend="triton")
    assert_matches(batch, out)
    if length == 0:
        assert (out == 0).all()


@pytest.fixture(params=[("torch", "auto"), *(("triton", kernel) for kernel in KERNELS)])
def backend(request):
    """Every way to compute: keyword arguments of paged_attention."""
    return {"backend": request.param[0], "kernel": request.param[1]}


@pytest.fixture
def batch():
    """Three rows, one of them empty; sizes pairwise different."""
    layout = KVLayout(block_size=8, num_kv_heads=3, head_dim=16, dtype=torch.float32)
    return make_batch(layout, [19, 0, 5], num_q_heads=6, layer=1, num_layers=4)


def test_out_may_be_q_itself(batch, backend):
    expected = paged_attention(*batch.args, 1, **backend)
    in_place = batch.q.clone()
    out = paged_attention(in_place, *batch.args[1:], 1, out=in_place, **backend)
    assert out is in_place
    assert torch.equal(out, expected)
    assert (out[1] == 0).all()


def test_q_and_out_may_be_slices_of_a_wider_buffer(batch, backend):
    expected = paged_attention(*batch.args, 1, **backend)
    wide = torch.full((3, 20, 16), float("nan"))
    q, out = wide[:, 2:8], wide[:, 8:14]
    q.copy_(batch.q)
    paged_attention(q, *batch.args[1:], 1, out=out, **backend)
    assert torch.equal(out, expected)
    assert wide[:, :2].isnan().all()
    assert wide[:, 14:].isnan().all()
    paged_attention(q, *batch.args[1:], 1, out=q, **backend)
    assert torch.equal(q, expected)


def test_permuting_the_physical_blocks_changes_nothing(batch, backend):
    expected = paged_attention(*batch.args, 1, **backend)
    order = torch.randperm(batch.cache.num_blocks)
    batch.cache.blocks.copy_(batch.cache.blocks[order].clone())
    moved_to = torch.argsort(order).to(torch.int32)
    entries = batch.table.device
    entries[entries >= 0] = moved_to[entries[entries >= 0].long()]
    assert torch.equal(paged_attention(*batch.args, 1, **backend), expected)


def test_no_rows_is_legal(batch, backend):
    none = torch.empty(0, dtype=torch.int32)
    out = paged_attention(batch.q[:0], batch.cache, batch.table, none, none, 1, **backend)
    assert out.shape == (0, 6, 16)


def test_nan_inside_a_length_is_seen(batch, backend):
    block = batch.table.lookup(int(batch.active_slots[0]), 1, 2)
    batch.cache.v_view()[block, 2, 1, 7] = float("nan")  # position 18, the last one of row 0
    out = paged_attention(*batch.args, 1, **backend)
    expected = torch.zeros(3, 6, 16, dtype=torch.bool)
    expected[0, 2:4, 7] = True  # the two q heads of kv head 1
    assert torch.equal(out.isnan(), expected)


def test_the_scale_is_the_callers(batch, backend):
    out = paged_attention(*batch.args, 1, scale=0.0, **backend)
    torch.testing.assert_close(out[0, 0], batch.values[0][:, 0].mean(0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("seq_len", "slot", "block"),
    [
        (-1, None, None),
        (999, None, None),
        (None, -1, None),
        (None, 99, None),
        (None, None, -1),
        (None, None, 9999),
    ],
)
def test_an_invalid_row_is_nan_and_reads_nothing(batch, kernel, seq_len, slot, block):
    """What a CUDA caller gets who did not call check_batch: launchers do not check values."""
    expected = paged_attention(*batch.args, 1, backend="triton", kernel=kernel)
    seq_lens, active_slots, entries = (
        x.clone() for x in (batch.seq_lens, batch.active_slots, batch.table.device)
    )
    if seq_len is not None:
        seq_lens[0] = seq_len
    if slot is not None:
        active_slots[0] = slot
    if block is not None:
        entries[active_slots[0], 1, 1] = block
    q = batch.q.clone()
    launch(kernel, q, batch, entries, seq_lens, active_slots)
    assert q[0].isnan().all()
    assert torch.equal(q[1:], expected[1:])


def launch(kernel, q, batch, entries, seq_lens, active_slots):
    """Call a launcher as paged_attention does, in place, without its value checks."""
    launcher = getattr(import_module(f"pagedlab.kernels.{kernel}"), kernel)
    layout = batch.cache.layout
    scale = layout.head_dim**-0.5
    launcher(q, batch.cache.buffer, entries, seq_lens, active_slots, 1, layout, q, scale)


def test_a_plan_serves_every_layer_of_its_step():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [7, 3], num_q_heads=2, layer=0, num_layers=1)
    plan = attention_plan(batch.seq_lens, batch.active_slots, batch.table, batch.cache)
    assert torch.equal(paged_attention(*batch.args, 0, plan=plan), paged_attention(*batch.args, 0))
    rows = batch.seq_lens[:1], batch.active_slots[:1]
    with pytest.raises(ValueError, match="plan: expected one for 1 rows, got 2"):
        paged_attention(batch.q[:1], batch.cache, batch.table, *rows, 0, plan=plan)


def test_a_plan_is_no_way_around_the_checks(batch, backend):
    plan = attention_plan(*batch.args[3:], batch.table, batch.cache, slice(1, 2))
    batch.seq_lens[0] -= 1
    assert_matches(batch, paged_attention(*batch.args, 1, plan=plan, **backend))
    batch.table.release_slot(int(batch.active_slots[0]))
    with pytest.raises(ValueError, match=r"block_table\[., 1, 0\]: expected a block of the cache"):
        paged_attention(*batch.args, 1, plan=plan, **backend)


def test_no_gradient_is_recorded(batch, backend):
    expected = paged_attention(*batch.args, 1, **backend)
    q = batch.q.clone().requires_grad_()
    assert not paged_attention(q, *batch.args[1:], 1, **backend).requires_grad
    assert torch.equal(paged_attention(q, *batch.args[1:], 1, out=q, **backend), expected)


@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_layer_and_scale_may_be_numpys_or_torchs(batch, backend, number):
    expected = paged_attention(*batch.args, 1, scale=0.5, **backend)
    layer = number(1).astype(np.int8) if number is np.float32 else number(1)
    assert torch.equal(paged_attention(*batch.args, layer, scale=number(0.5), **backend), expected)


@pytest.mark.parametrize("name", ["q", "seq_lens", "active_slots"])
def test_what_is_no_tensor_is_refused(batch, name):
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got ndarray$"):
        paged_attention(*changed(batch, **{name: np.zeros(3)}), 1)


def test_in_place_in_the_cache_or_in_rows_that_overlap_is_refused(batch):
    q = batch.cache.buffer[: batch.q.numel()].view(batch.q.shape)
    q.copy_(batch.q)
    with pytest.raises(ValueError, match="out: expected q itself or memory of its own, got part"):
        paged_attention(q, *batch.args[1:], 1, out=q)
    q = batch.q[:1].expand(3, -1, -1)
    with pytest.raises(ValueError, match="out: expected rows that do not overlap"):
        paged_attention(q, *batch.args[1:], 1, out=q)


def changed(batch, **changes):
    names = ("q", "cache", "table", "seq_lens", "active_slots")
    return tuple(changes.get(name, value) for name, value in zip(names, batch.args, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: {"q": b.q[:, :4]},
            r"q: expected \[num_active, a multiple of 3, 16\], got \[3, 4",
        ),
        (lambda b: {"q": b.q[..., :8]}, r"q: expected \[num_active, a multiple of 3, 16\]"),
        (
            lambda b: {"q": b.q[0]},
            r"q: expected \[num_active, a multiple of 3, 16\], got \[6, 16\]",
        ),
        (lambda b: {"q": b.q.half()}, "q: expected the cache's torch.float32, got torch.float16"),
        (lambda b: {"q": b.q.to("meta")}, "q: expected the cache's device cpu, got meta"),
        (
            lambda b: {"q": torch.ones(3, 16, 6).mT},
            r"q: expected dense last two dimensions, got stride \(96, 1, 6\)",
        ),
        (lambda b: {"seq_lens": b.seq_lens.long()}, r"seq_lens: expected contiguous int32 \[3\]"),
        (
            lambda b: {"seq_lens": b.seq_lens[:2]},
            r"seq_lens: expected .*\[3\], got torch.int32 \[2",
        ),
        (
            lambda b: {"active_slots": b.active_slots.to("meta")},
            "active_slots: expected device cpu",
        ),
        (
            lambda b: {"active_slots": b.active_slots + 9},
            r"active_slots\[0\]: expected 0 to 4, got",
        ),
        (lambda b: {"seq_lens": b.seq_lens - 1}, r"seq_lens\[1\]: expected 0 to 32 tokens, got -1"),
        (
            lambda b: {"seq_lens": b.seq_lens + 14},
            r"seq_lens\[0\]: expected 0 to 32 tokens, got 33",
        ),
        (
            lambda b: {"seq_lens": b.seq_lens + 4},
            r"block_table\[., 1, 0\]: expected a block of the",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, backend, change, message):
    with pytest.raises(ValueError, match="^" + message):
        paged_attention(*changed(batch, **change(batch)), 1, **backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 4}, "layer: expected 0 <= layer < 4, got 4"),
        ({"layer": -1}, "layer: expected 0 <= layer < 4, got -1"),
        ({"backend": "cuda"}, "backend: expected one of auto, triton, torch, got 'cuda'"),
        ({"kernel": "fast"}, "kernel: expected one of auto, by_token, by_block.*got 'fast'"),
        (
            {"backend": "torch", "kernel": "by_block"},
            "kernel: expected auto with the torch backend, got 'by_block'",
        ),
    ],
)
def test_an_unknown_choice_is_refused(batch, arguments, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*batch.args, **({"layer": 1} | arguments))


@pytest.mark.parametrize(
    ("make_out", "message"),
    [
        (lambda b, wide: wide[1:4, :6], "out: expected q itself or memory of its own, got part of"),
        (lambda b, wide: wide[:3, 1:7], "out: expected q itself or memory of its own"),
        (
            lambda b, wide: b.cache.buffer[: 3 * 96].view(3, 6, 16),
            "out: expected q itself or memory of its own, got part of the cache",
        ),
        (lambda b, wide: torch.empty(3, 3, 16), r"out: expected q's shape \[3, 6, 16\]"),
        (lambda b, wide: torch.empty(3, 6, 16).half(), "out: expected the cache's torch.float32"),
        (lambda b, wide: torch.empty(1, 6, 16).expand(3, 6, 16), "out: expected rows that do not"),
    ],
)
def test_an_out_that_would_be_overwritten_while_read_is_refused(batch, make_out, message):
    wide = torch.zeros(5, 8, 16)
    q = wide[:3, :6]
    before = batch.cache.buffer.clone().nan_to_num(7)
    with pytest.raises(ValueError, match="^" + message):
        paged_attention(q, *batch.args[1:], 1, out=make_out(batch, wide))
    assert torch.equal(batch.cache.buffer.nan_to_num(7), before)


def test_bfloat16_in_the_interpreter_is_refused():
    layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    batch = make_batch(layout, [5], num_q_heads=1)
    with pytest.raises(ValueError, match="Triton's interpreter computes bfloat16 wrongly"):
        paged_attention(*batch.args, 1, backend="triton")


@pytest.mark.parametrize("late", [False, True])
def test_kernels_that_triton_has_fixed_to_its_compiler_are_refused_on_a_cpu(late):
    """Triton imported before pagedlab, the variable not set, or set too late."""
    code = f"""
import os, triton, torch
if {late}: os.environ["TRITON_INTERPRET"] = "1"
from pagedlab import BlockTable, KVLayout, PagedKVCache, paged_attention
cache = PagedKVCache(KVLayout(4, 1, 16, torch.float32), 1)
row = torch.zeros(1, dtype=torch.int32)
paged_attention(torch.ones(1, 1, 16), cache, BlockTable(1, 1, 1), row, row, 0, backend="triton")
"""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "ValueError: backend: expected a CUDA tensor, or TRITON_INTERPRET=1 set" in done.stderr


def test_by_token_wants_a_power_of_two():
    layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=24, dtype=torch.float32)
    batch = make_batch(layout, [5], num_q_heads=1)
    with pytest.raises(ValueError, match="by_token: expected head_dim a power of two, got 24"):
        paged_attention(*batch.args, 1, backend="triton", kernel="by_token")


def test_check_batch_wants_int32_rows():
    batch = make_batch(
        KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32), [5], num_q_heads=1
    )
    for wrong in (batch.seq_lens.float(), batch.seq_lens[0], batch.seq_lens.long()):
        with pytest.raises(ValueError, match=r"^seq_lens: expected contiguous int32 \[1\], got"):
            check_batch(batch.table, wrong, batch.active_slots)
    with pytest.raises(ValueError, match=r"^seq_lens: expected a tensor, got list$"):
        check_batch(batch.table, [5], batch.active_slots)


def test_check_batch_looks_at_every_layer():
    layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    batch = make_batch(layout, [5], num_q_heads=1, layer=1, num_layers=2)
    slot = int(batch.active_slots[0])
    with pytest.raises(ValueError, match=rf"block_table\[{slot}, 0, 0\]: expected a block"):
        check_batch(batch.table, batch.seq_lens, batch.active_slots, block_size=4)
    batch.table.assign(slot, 0, 0, 0)
    batch.table.assign(slot, 0, 1, 1)
    assert check_batch(batch.table, batch.seq_lens, batch.active_slots, block_size=4) == (
        [5],
        [slot],
    )


@pytest.mark.serial
def test_the_metadata_checks_take_about_ten_microseconds(batch):
    out = torch.empty_like(batch.q)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(200):
            pagedlab.attention.check_metadata(*batch.args, 1, out)
        best = min(best, (time.perf_counter() - start) / 200)
    print(f"metadata checks: {best * 1e6:.1f} us")
    assert best < 30e-6  # 10 us on an idle machine; three times that on a shared one
