"""What only a GPU can show. Where only torch, triton, numpy and pytest are installed:

PYTHONPATH=.:tests python -m pytest --noconftest -m gpu tests/test_gpu.py
"""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from batches import TOLERANCE, make_batch

from pagedlab import (
    BlockTable,
    Engine,
    KVLayout,
    Llama,
    LlamaConfig,
    PagedKVCache,
    attention_plan,
    paged_attention,
)
from pagedlab.attention import KERNELS
from pagedlab.block_table import SYNC_POLICIES
from pagedlab.kernels import decode_ops
from pagedlab.kernels.choose import choose
from pagedlab.llama import rope_rotation, rotate
from pagedlab.reference import gathered_attention
from pagedlab.sampling import Sampling, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]
LENGTHS = [0, 1, 15, 16, 17, 63, 256, 700]
NORM_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
NAN = float("nan")


def exact_attention(batch):
    """The answer in float64, from the keys and values that were written."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64, device=batch.q.device)
    for row, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        if len(k) == 0:
            continue
        group_size = batch.q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group_size, 1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", batch.q[row].double(), k) / batch.q.shape[2] ** 0.5
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), v)
    return out


def assert_exact(out, batch):
    expected = exact_attention(batch)
    assert not out.isnan().any()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < NORM_TOLERANCE[out.dtype], f"relative error {error:.1e}"
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def cuda_batch(layout, lengths, num_q_heads, **options):
    return make_batch(layout, lengths, num_q_heads=num_q_heads, device="cuda", **options)


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim", "num_q_heads"),
    [(16, 8, 64, 32), (4, 3, 80, 9), (256, 1, 128, 20), (1, 5, 32, 5)],
)
def test_each_kernel_is_right_in_each_dtype(
    kernel, dtype, block_size, num_kv_heads, head_dim, num_q_heads
):
    """Permuted slots and blocks, NaN in every other place, a poisoned output."""
    if kernel == "by_token" and head_dim == 80:
        head_dim = 16
    layout = KVLayout(block_size, num_kv_heads, head_dim, dtype)
    batch = cuda_batch(layout, LENGTHS, num_q_heads)
    out = torch.full_like(batch.q, NAN)
    assert paged_attention(*batch.args, 1, kernel=kernel, out=out) is out
    assert_exact(out, batch)
    assert (out[0] == 0).all()
    by_default = paged_attention(*batch.args, 1, backend="torch")
    torch.testing.assert_close(by_default, out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "lengths",
    [[5000], [900] * 40, [1 + 3 * i for i in range(300)], [100] * 70 + [20_000] + [50] * 9],
    ids=["one long", "40 alike", "300 ragged", "one long among many short"],
)
@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(32, 64), (64, 128), (8, 64)])
def test_split_kv_is_right_for_every_kind_of_batch(lengths, num_q_heads, head_dim):
    """Whatever the launch rule chooses; called twice, since the second call starts early."""
    batch = cuda_batch(KVLayout(16, 8, head_dim, torch.bfloat16), lengths, num_q_heads)
    plan = attention_plan(batch.seq_lens, batch.active_slots, batch.table, batch.cache)
    for _ in range(3):
        out = torch.full_like(batch.q, NAN)
        assert_exact(paged_attention(*batch.args, 1, plan=plan, out=out), batch)


def test_a_plan_on_dirty_memory_reads_nothing_outside():
    """The memory that a new plan takes may hold anything; programs that start early look at it."""
    batch = cuda_batch(KVLayout(16, 8, 64, torch.bfloat16), LENGTHS, 32)
    for garbage in (-(2**31), 2**31 - 1, -1, 7):
        dirty = [torch.full((2**18,), garbage, dtype=torch.int32, device="cuda") for _ in range(9)]
        del dirty
        assert_exact(paged_attention(*batch.args, 1), batch)


def test_a_table_uploaded_under_a_plan_is_waited_for():
    """Other blocks in the same slot, the lengths and the plan unchanged, many times in a row."""
    layout = KVLayout(16, 8, 64, torch.float16)
    batch = cuda_batch(layout, [500, 300], 32)
    plan = attention_plan(batch.seq_lens, batch.active_slots, batch.table, batch.cache)
    slots = batch.active_slots.tolist()
    num_blocks = layout.num_logical_blocks(300)
    blocks = [batch.table.lookup(slots[0], 1, block) for block in range(num_blocks)]
    batch.table.release_slot(slots[1])
    for turn in range(20):
        paged_attention(*batch.args, 1, plan=plan)
        batch.table.release_slot(slots[1])
        blocks = blocks[1:] + blocks[:1]
        for logical_block, block in enumerate(blocks):
            batch.table.assign(slots[1], 1, logical_block, block)
        out = paged_attention(*batch.args, 1, plan=plan)
        expected = gathered_attention(*batch.args, 1)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3, msg=f"turn {turn}")


def test_out_may_be_q_and_rows_may_be_slices(kernel):
    batch = cuda_batch(KVLayout(16, 2, 64, torch.float16), LENGTHS, 6)
    expected = paged_attention(*batch.args, 1, kernel=kernel)
    wide = torch.full((len(LENGTHS), 20, 64), NAN, dtype=torch.float16, device="cuda")
    for q in (batch.q.clone(), wide[:, 3:9]):
        q.copy_(batch.q)
        assert paged_attention(q, *batch.args[1:], 1, kernel=kernel, out=q) is q
        assert torch.equal(q, expected)
    assert wide[:, :3].isnan().all()
    assert wide[:, 9:].isnan().all()


@pytest.mark.parametrize("row", [1, 7])  # a short one, and one that split_kv splits
@pytest.mark.parametrize("what", ["length < 0", "length", "slot < 0", "slot", "block -1", "block"])
def test_an_invalid_row_is_nan_and_the_others_are_right(kernel, row, what):
    batch = cuda_batch(KVLayout(16, 2, 64, torch.bfloat16), LENGTHS, 8)
    expected = paged_attention(*batch.args, 1, kernel=kernel)
    seq_lens, active_slots = batch.seq_lens.clone(), batch.active_slots.clone()
    entry = (int(active_slots[row]), 1, 0)
    if what.startswith("length"):
        seq_lens[row] = -1 if "<" in what else 10**6
    elif what.startswith("slot"):
        active_slots[row] = -1 if "<" in what else 10**6
    else:
        batch.table.device[entry] = -1 if "-1" in what else 10**6
    out = paged_attention(*batch.args[:3], seq_lens, active_slots, 1, kernel=kernel)
    assert out[row].isnan().all()
    others = [other for other in range(len(LENGTHS)) if other != row]
    assert (out[others] - expected[others]).abs().max() <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_append_writes_what_prefill_writes(dtype):
    layout = KVLayout(16, 3, 80, dtype)
    batch = cuda_batch(layout, LENGTHS, 3)
    written = batch.cache.buffer.clone()
    last = [max(length - 1, 0) for length in LENGTHS]
    pick = [x[i] if len(x) else x.new_zeros(3, 80) for x, i in zip(batch.keys, last, strict=True)]
    k = torch.stack(pick)
    pick = [x[i] if len(x) else x.new_zeros(3, 80) for x, i in zip(batch.values, last, strict=True)]
    v = torch.stack(pick)
    for row, length in enumerate(LENGTHS):
        if length:
            block = batch.table.lookup(int(batch.active_slots[row]), 1, (length - 1) // 16)
            batch.cache.blocks[block, :, (length - 1) % 16] = NAN
    batch.cache.append(k, v, batch.table, batch.seq_lens, batch.active_slots, 1)
    torch.testing.assert_close(batch.cache.buffer, written, rtol=0, atol=0, equal_nan=True)


def test_append_writes_nothing_for_a_row_that_does_not_fit():
    batch = cuda_batch(KVLayout(16, 3, 64, torch.float16), LENGTHS, 3)
    before = batch.cache.buffer.clone()
    k = torch.zeros(4, 3, 64, dtype=torch.float16, device="cuda")
    rows = partial(torch.tensor, dtype=torch.int32, device="cuda")
    slots = rows([10**6, -1, int(batch.active_slots[1]), int(batch.active_slots[1])])
    batch.cache.append(k, k, batch.table, rows([5, 5, 10**6, 0]), slots, 1)
    batch.cache.append(k, k, batch.table, rows([-3, -1, 17, 0]), slots, 1)
    torch.testing.assert_close(batch.cache.buffer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gib", [2, 4, 64])
def test_blocks_beyond_32_bits_are_addressed_rightly(kernel, gib):
    layout = KVLayout(16, 8, 64, torch.bfloat16)
    num_blocks = gib * 2**30 // layout.block_bytes + 1000
    if gib * 2**30 > torch.cuda.get_device_properties(0).total_memory * 0.9:
        pytest.skip(f"this GPU does not hold {gib} GiB")
    cache = PagedKVCache(layout, num_blocks, "cuda")
    table = BlockTable(2, 1, 8, "cuda")
    for logical_block in range(7):
        table.assign(0, 0, logical_block, num_blocks - 1 - logical_block)
        table.assign(1, 0, logical_block, logical_block)
    k, v = torch.randn(2, 100, 8, 64, device="cuda").to(torch.bfloat16)
    cache.write(k, v, table, 0, 0, 0)
    cache.write(v, k, table, 1, 0, 0)
    rows = partial(torch.tensor, dtype=torch.int32, device="cuda")
    k_new, v_new = torch.randn(2, 2, 8, 64, device="cuda").to(torch.bfloat16)
    seq_lens, slots = rows([101, 101]), rows([0, 1])
    cache.append(k_new, v_new, table, seq_lens, slots, 0)
    assert torch.equal(cache.k_view()[num_blocks - 7, 4], k_new[0])
    assert torch.equal(cache.v_view()[num_blocks - 1, 0], v[0])
    q = torch.randn(2, 32, 64, device="cuda").to(torch.bfloat16)
    out = paged_attention(q, cache, table, seq_lens, slots, 0, kernel=kernel)
    expected = gathered_attention(q, cache, table, seq_lens, slots, 0)
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_sync_policies_give_the_same_table():
    num_layers, copied = 5, {}
    for policy in SYNC_POLICIES:
        table = BlockTable(3, num_layers, 7, "cuda", sync=policy)
        for step in range(4):
            table.assign_layers(1, step, range(5 * step, 5 * step + 5))
            if step == 2:
                table.release_slot(1)
            for layer in range(num_layers):
                table.sync(layer)
        assert torch.equal(table.device.cpu(), torch.from_numpy(table.host.copy()))
        copied[policy] = table.bytes_copied
    table_bytes = 4 * 3 * num_layers * 7
    assert copied["per_layer"] == 4 * num_layers * table_bytes
    assert copied["per_step"] == 4 * table_bytes
    # 5 entries in each of three steps, 3 x 5 that step 2 releases, as pairs of int64
    assert copied["changed_entries"] == (3 * 5 + 3 * 5) * 16


def test_append_and_attention_replay_in_a_cuda_graph():
    """One capture serves every length: plan, append and attention read them on the device."""
    layout, num_layers = KVLayout(16, 2, 64, torch.float16), 3
    cache = PagedKVCache(layout, 400, "cuda")
    cache.buffer.fill_(NAN)
    table = BlockTable(5, num_layers, 40, "cuda")
    blocks = iter(torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist())
    starts, slots = [0, 14, 300], [4, 0, 2]
    for slot, start in zip(slots, starts, strict=True):
        for logical_block in range(layout.num_logical_blocks(start + 40)):
            table.assign_layers(slot, logical_block, [next(blocks) for _ in range(num_layers)])
        for layer in range(num_layers):
            k, v = torch.randn(2, start, 2, 64, device="cuda").half()
            cache.write(k, v, table, slot, layer, 0)
    rows = partial(torch.tensor, dtype=torch.int32, device="cuda")
    seq_lens, active_slots = rows(starts), rows(slots)
    qkv = torch.randn(num_layers, 3, 8, 64, device="cuda").half()
    outs = [torch.full((3, 4, 64), NAN, device="cuda").half() for _ in range(num_layers)]

    def step():
        seq_lens.add_(1)
        plan = attention_plan(seq_lens, active_slots, table, cache)
        for layer in range(num_layers):
            q, k, v = qkv[layer].split([4, 2, 2], 1)
            cache.append(k, v, table, seq_lens, active_slots, layer)
            args = (q, cache, table, seq_lens, active_slots, layer)
            paged_attention(*args, out=outs[layer], plan=plan)

    step()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(30):
        qkv.normal_()
        graph.replay()
        for layer in range(num_layers):
            args = (qkv[layer, :, :4], cache, table, seq_lens, active_slots, layer)
            expected = gathered_attention(*args)
            torch.testing.assert_close(outs[layer], expected, rtol=2e-3, atol=2e-3)
    assert seq_lens.tolist() == [start + 31 for start in starts]


def test_both_backends_decode_the_same_text():
    """A random model of Llama-3.2-1B's shape, float32; where they part, two logits nearly tie."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_seq_len=2048,
        rope_theta=500000.0,
    )
    assert not torch.backends.cuda.matmul.allow_tf32
    model = Llama.random(config, device="cuda", dtype=torch.float32)
    prompts = [list(range(7, 40)), list(range(900, 1000)), [5]]
    texts, gaps = {}, {}
    for backend in ("triton", "torch"):
        cache = PagedKVCache(model.kv_layout(), 16 * 3 * 9, "cuda")
        table = BlockTable(3, 16, 9, "cuda")
        for slot in range(3):
            for block in range(9):
                first = 16 * (9 * slot + block)
                table.assign_layers(slot, block, range(first, first + 16))
        logits = [model.prefill(ids, cache, table, slot) for slot, ids in enumerate(prompts)]
        logits = torch.stack(logits)
        seq_lens = torch.tensor([len(ids) for ids in prompts], dtype=torch.int32, device="cuda")
        slots = torch.arange(3, dtype=torch.int32, device="cuda")
        tokens, gap = [], []
        for _ in range(32):
            best, ids = logits.topk(2)
            tokens.append(ids[:, 0].tolist())
            gap.append((best[:, 0] - best[:, 1]).tolist())
            seq_lens += 1
            attention = partial(paged_attention, backend=backend)
            logits = model.decode(ids[:, 0], cache, table, seq_lens, slots, attention=attention)
        texts[backend], gaps[backend] = tokens, gap
    for row in range(3):
        for step in range(32):
            if texts["triton"][step][row] != texts["torch"][step][row]:
                assert gaps["torch"][step][row] < 1e-3
                break


def random_on_gpu(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_close(out, exact):
    error = (out.double() - exact).norm() / exact.norm()
    assert error < max(1e-5, NORM_TOLERANCE[out.dtype]), f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 64])
@pytest.mark.parametrize(("num_columns", "num_outputs"), [(2048, 3072), (8192, 2048), (576, 1536)])
@pytest.mark.parametrize("what", ["plain", "norm", "norm and gate", "add"])
def test_linear_is_right_and_every_output_is_written(
    dtype, num_rows, num_columns, num_outputs, what
):
    """Chained calls, each with what the one before wrote, since kernels start early."""
    gated = "gate" in what
    weight = random_on_gpu((1 + gated) * num_outputs, num_columns, dtype=dtype) / num_columns**0.5
    norm = random_on_gpu(num_columns, dtype=dtype) if "norm" in what else None
    for turn in range(8):
        x = random_on_gpu(num_rows, num_columns, dtype=dtype, seed=turn)
        add_to = random_on_gpu(num_rows, num_outputs, dtype=dtype) if what == "add" else None
        exact = x.double()
        if norm is not None:
            exact = F.rms_norm(exact, (num_columns,), norm.double(), 1e-5)
        exact = exact @ weight.double().t()
        if gated:
            gate, up = exact.chunk(2, dim=1)
            exact = F.silu(gate) * up
        if add_to is not None:
            exact = exact + add_to
        torch.full((num_rows, num_outputs), NAN, dtype=dtype, device="cuda")  # what out may get
        out = decode_ops.linear(x, weight, norm=norm, eps=1e-5, gated=gated, add_to=add_to)
        assert_close(out, exact)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_columns", [8, 1000, 1536])
def test_silu_mul_is_right_for_rows_that_no_product_wrote(dtype, num_columns):
    """As linear calls it; initcheck does not see what some of torch's products store."""
    gate_up = random_on_gpu(5, 2 * num_columns, dtype=dtype)
    out = torch.full((5, num_columns), NAN, dtype=dtype, device="cuda")
    grid, options = (5, -(-num_columns // 1024)), decode_ops.launch_options(gate_up)
    decode_ops.silu_mul_kernel[grid](gate_up, out, num_columns, 1024, **options)
    gate, up = gate_up.double().chunk(2, 1)
    assert_close(out, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_rope_append_is_rotate_and_append(dtype, head_dim):
    layout = KVLayout(16, 3, head_dim, dtype)
    fused, plain = (cuda_batch(layout, LENGTHS, 9) for _ in range(2))
    qkv = random_on_gpu(len(LENGTHS), 15 * head_dim, dtype=dtype)
    frequencies = torch.logspace(0, -4, head_dim // 2, device="cuda")
    capacity = fused.table.max_blocks_per_seq * 16
    rope = rope_rotation(torch.arange(capacity, device="cuda"), frequencies)
    rows = (fused.table.device, fused.seq_lens, fused.active_slots, 1, layout)
    fused.table.sync()
    q = decode_ops.rope_append(qkv, rope, fused.cache.buffer, *rows)
    heads = qkv.view(len(LENGTHS), 15, head_dim)
    cos, sin = rope_rotation(plain.seq_lens - 1, frequencies)
    rotated, v = rotate(heads[:, :12], cos, sin), heads[:, 12:]
    plain.cache.append(rotated[:, 9:], v, plain.table, plain.seq_lens, plain.active_slots, 1)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "equal_nan": True}
    alive = [row for row, length in enumerate(LENGTHS) if length]
    torch.testing.assert_close(q[alive], rotated[alive, :9], **tolerance)
    torch.testing.assert_close(fused.cache.buffer, plain.cache.buffer, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_choose_takes_the_tokens_that_sample_takes_on_a_cpu(dtype):
    logits = 3 * random_on_gpu(64, 128256, dtype=dtype)
    logits[3, 70_000], logits[4, 128_255], logits[5] = NAN, torch.inf, -torch.inf
    settings = [Sampling(0.4 * (i % 4), seed=2**63 - 1 - i**9 if i % 2 else i) for i in range(64)]
    positions = [2**16 * i + 1 for i in range(64)]
    temperatures, _, _, seeds = (
        torch.tensor(x, device="cuda") for x in zip(*settings, strict=True)
    )
    chosen = torch.full((64,), -7, device="cuda")
    rows = [torch.tensor(positions, dtype=torch.int32, device="cuda") for _ in range(2)]
    choose(logits, temperatures, seeds, chosen, rows)
    expected = sample(logits.cpu().float(), settings, positions)
    assert expected.tolist().count(-1) == 3
    assert chosen.tolist() == expected.tolist()
    assert rows[0].tolist() == expected.clamp(min=0).tolist()
    assert rows[1].tolist() == [position + 1 for position in positions]


MIDDLE = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=4,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=3001,
    max_seq_len=2400,
)


def texts(model, prompts, num_tokens, settings, num_slots, num_blocks=None, **options):
    engine = Engine(model, num_slots, num_blocks, max_seq_len=400, **options)
    requests = [
        engine.submit(ids, num_tokens + i % 5, **settings[i % len(settings)])
        for i, ids in enumerate(prompts)
    ]
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
    return [request.tokens for request in requests]


@pytest.mark.parametrize("num_slots", [1, 3, 24])
def test_graphs_say_what_the_eager_engine_says_of_each_request_alone(num_slots):
    """Float32; greedy, drawn and filtered; so few blocks that requests are preempted."""
    model = Llama.random(MIDDLE, device="cuda", dtype=torch.float32)
    prompts = [[(7 * i + j) % 3001 for j in range(1 + 5 * i % 90)] for i in range(2 + num_slots)]
    settings = [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.1, "top_k": 40}, {}]
    alone = [
        texts(model, [ids], 40 + i % 5, [settings[i % 4]], 1)[0] for i, ids in enumerate(prompts)
    ]
    num_blocks = max(9, 4 * num_slots) * MIDDLE.num_layers
    assert texts(model, prompts, 40, settings, num_slots, num_blocks, graphs=True) == alone


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 5, 40])
def test_a_graphs_logits_are_the_eager_models(dtype, batch):
    model = Llama.random(MIDDLE, device="cuda", dtype=dtype)
    engine = Engine(model, batch, max_seq_len=400, graphs=True)
    requests = [engine.submit(list(range(1 + i, 40 + 3 * i)), 5) for i in range(batch)]
    engine.step()
    rows = [[r.num_tokens for r in requests], [r.slot for r in requests]]
    rows = torch.tensor(rows, dtype=torch.int32, device="cuda")
    last = [r.tokens[-1] for r in requests]
    expected = model.decode(last, engine.cache, engine.table, *rows)
    engine.step()
    # the third step was launched ahead: run the second again, alone
    engine.graph.ahead = {}
    for request in requests:
        request.tokens.pop()
    engine.graph._launch(requests)
    logits = engine.graph.graphs[engine.graph._size(batch)][1][:batch].float()
    error = (logits - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


def test_a_steady_step_waits_once_and_allocates_nothing():
    model = Llama.random(MIDDLE, device="cuda", dtype=torch.bfloat16)
    engine = Engine(model, 8, max_seq_len=400, graphs=True)
    for i in range(8):
        engine.submit([5 + i] * 30, 200, temperature=i % 2, seed=i)
    for _ in range(20):
        engine.step()
    reserved, num_steps = torch.cuda.memory_reserved(), 64
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(num_steps):
            engine.step()
    names = [event.name for event in profile.events()]
    calls = {name: names.count(name) for name in set(names) if name.startswith("cu")}
    print(calls)
    assert not [name for name in calls if "Malloc" in name or "HostAlloc" in name]
    waits = {name: n for name, n in calls.items() if "Synchronize" in name}
    waits.pop("cudaDeviceSynchronize", None)  # the profiler's own
    staged = num_steps // 16 + 1  # before a table upload: its buffer has arrived long ago
    assert num_steps <= sum(waits.values()) <= num_steps + staged, waits
    assert calls["cudaGraphLaunch"] <= num_steps + 1
    assert torch.cuda.memory_reserved() == reserved


def test_random_requests_leave_the_device_table_like_the_hosts():
    model = Llama.random(MIDDLE, device="cuda", dtype=torch.bfloat16)
    engine = Engine(model, 6, 6 * 9 * MIDDLE.num_layers, max_seq_len=200, graphs=True)
    draw = random.Random(1)
    for step in range(10_000):
        if draw.random() < 0.2:
            ids = [draw.randrange(3001) for _ in range(draw.randint(1, 100))]
            engine.submit(ids, draw.randint(1, 60), temperature=draw.choice([0, 1.0]), seed=step)
        running = engine.scheduler.running
        if running and draw.random() < 0.05:
            engine.cancel(draw.choice(running))
        engine.step()
        if step % 100 == 0:
            engine.check_integrity()
            engine.table.sync()
            host = torch.from_numpy(engine.table.host.copy())
            assert torch.equal(engine.table.device.cpu(), host)
    engine.run()
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_size", [1000, 2048])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole_on_a_gpu(dtype, chunk_size):
    """Later chunks attend to gathered blocks, by flash attention where the dtype has it."""
    model = Llama.random(MIDDLE, device="cuda", dtype=dtype)
    prompts = [[(3 * j) % 3001 for j in range(n)] for n in (2300, 17)]
    logits = []
    for size in (chunk_size, 5000):
        cache = PagedKVCache(model.kv_layout(), 4 * 2 * 150, "cuda")
        cache.buffer.fill_(NAN)
        table = BlockTable(2, 4, 150, "cuda")
        for slot in range(2):
            for block in range(150):
                first = 4 * (150 * slot + block)
                table.assign_layers(slot, block, range(first, first + 4))
        logits.append(model.prefill_batch(prompts, cache, table, [1, 0], chunk_size=size))
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
