"""The fused steps of a decode, against torch; interpreted, and compiled for GPUs not here."""

import re
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from batches import make_batch

from pagedlab import KVLayout, compile_for
from pagedlab.kernels import decode_ops
from pagedlab.kernels.choose import PART, choose, choose_kernel, mix
from pagedlab.llama import rope_rotation, rotate
from pagedlab.portable import capture_launch
from pagedlab.sampling import Sampling, _mix, sample

triton, tl = (import_module(name) for name in ("triton", "triton.language"))

NVIDIA = ["sm_75", "sm_80", "sm_89", "sm_90"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
EPS = 1e-5
NAN = float("nan")


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(actual, expected):
    tolerance = TOLERANCE[actual.dtype]
    expected = expected.to(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def poisoned(monkeypatch):
    """Make every tensor that a launcher allocates NaN, so that what is not written shows."""

    def poison(function):
        def allocate(*args, **kwargs):
            x = function(*args, **kwargs)
            return x.fill_(NAN) if x.is_floating_point() else x

        return allocate

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("num_columns", "num_outputs"), [(48, 16), (64, 3), (576, 37), (2048, 6), (2056, 5), (1, 1)]
)
@pytest.mark.parametrize("what", ["plain", "norm", "norm and gate", "add"])
def test_linear_is_torchs_with_norm_gate_and_sum(
    monkeypatch, dtype, num_rows, num_columns, num_outputs, what
):
    """From one row, which matvec_kernel takes, to several; sizes that are no powers of two."""
    poisoned(monkeypatch)
    x = random(num_rows, num_columns, dtype=dtype)
    gated = "gate" in what
    weight = random((1 + gated) * num_outputs, num_columns, dtype=dtype) / num_columns**0.5
    norm = random(num_columns, dtype=dtype) if "norm" in what else None
    add_to = random(num_rows, num_outputs, dtype=dtype, seed=9) if what == "add" else None
    exact = x.double()
    if norm is not None:
        exact = F.rms_norm(exact, (num_columns,), norm.double(), EPS)
    exact = exact @ weight.double().t()
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    if add_to is not None:
        exact += add_to
    out = decode_ops.linear(x, weight, norm=norm, eps=EPS, gated=gated, add_to=add_to)
    assert out.shape == (num_rows, num_outputs)
    assert out is add_to or add_to is None
    assert_near(out, exact)


@pytest.mark.parametrize("what", ["x", "norm", "weight"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_linear_hides_no_nan(num_rows, what):
    tensors = {"x": random(num_rows, 80), "norm": random(80), "weight": random(24, 80)}
    tensors[what].view(-1)[-1] = NAN
    x, norm, weight = tensors.values()
    out = decode_ops.linear(x, weight, norm=norm, eps=EPS, gated=True)
    assert out[-1].isnan().sum() == (1 if what == "weight" else 12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_active", [0, 1, 3])
@pytest.mark.parametrize(
    ("head_dim", "num_q_heads", "num_kv_heads", "block_size"),
    [(16, 6, 2, 4), (64, 4, 1, 16), (80, 3, 3, 1), (256, 2, 1, 8), (24, 9, 3, 2)],
)
def test_rope_append_rotates_as_the_model_and_writes_as_append(
    monkeypatch, dtype, num_active, head_dim, num_q_heads, num_kv_heads, block_size
):
    """Length 0, a block's first and last token; NaN everywhere else in the cache stays."""
    poisoned(monkeypatch)
    layout = KVLayout(block_size, num_kv_heads, head_dim, dtype)
    lengths = [2 * block_size + 1, 0, 2 * block_size][:num_active]
    fused, plain = (make_batch(layout, lengths, num_q_heads=num_q_heads) for _ in range(2))
    num_heads = num_q_heads + 2 * num_kv_heads
    qkv = random(num_active, num_heads * head_dim, dtype=dtype)
    frequencies = torch.logspace(0, -3, head_dim // 2)
    positions = fused.table.max_blocks_per_seq * block_size
    rope = rope_rotation(torch.arange(positions), frequencies)
    layer = 1
    rows = (fused.table.device, fused.seq_lens, fused.active_slots, layer, layout)
    q = decode_ops.rope_append(qkv, rope, fused.cache.buffer, *rows)

    heads = qkv.view(num_active, num_heads, head_dim)
    cos, sin = rope_rotation(plain.seq_lens - 1, frequencies)
    rotated = rotate(heads[:, : num_q_heads + num_kv_heads], cos, sin)
    alive = [row for row, length in enumerate(lengths) if length]
    assert_near(q[alive], rotated[alive, :num_q_heads])
    assert not q.isnan().any()
    k, v = rotated[:, num_q_heads:], heads[:, num_q_heads + num_kv_heads :]
    plain.cache.append(k, v, plain.table, plain.seq_lens, plain.active_slots, layer)
    torch.testing.assert_close(
        fused.cache.buffer, plain.cache.buffer, rtol=1e-3, atol=1e-3, equal_nan=True
    )


@pytest.mark.parametrize("what", ["length < 0", "length", "slot < 0", "slot", "block -1", "block"])
def test_rope_append_writes_nothing_for_a_row_that_does_not_fit(what):
    layout = KVLayout(4, 2, 16, torch.float32)
    batch = make_batch(layout, [5, 6], num_q_heads=4)
    seq_lens, active_slots = batch.seq_lens.clone(), batch.active_slots.clone()
    slot = int(active_slots[0])
    if what.startswith("length"):
        seq_lens[0] = -1 if "<" in what else 10**6
    elif what.startswith("slot"):
        active_slots[0] = -1 if "<" in what else 10**6
    else:
        batch.table.device[slot, 1, 1] = -1 if "-1" in what else 10**6
    other = batch.table.lookup(int(active_slots[1]), 1, 1)
    qkv, rope = random(2, 8 * 16), rope_rotation(torch.arange(12), torch.ones(8))
    written = [batch.cache.buffer.clone() for _ in range(2)]
    rows = (batch.table.device, seq_lens, active_slots, 1, layout)
    decode_ops.rope_append(qkv, rope, batch.cache.buffer, *rows)
    changed = (batch.cache.blocks != written[0].view_as(batch.cache.blocks)) & (
        ~batch.cache.blocks.isnan()
    )
    places = changed.nonzero()
    assert set(map(tuple, places[:, [0, 2]].tolist())) == {(other, 1)}


def choose_tokens(logits, settings, positions):
    """What choose writes, and that it readies the next step."""
    temperatures, *_, seeds = zip(*settings, strict=True)
    temperatures = torch.tensor(temperatures)
    chosen = torch.full((len(logits),), -7)
    inputs = torch.full((len(logits),), -7, dtype=torch.int32)
    seq_lens = torch.tensor(positions, dtype=torch.int32)
    choose(logits, temperatures, torch.tensor(seeds), chosen, (inputs, seq_lens))
    assert inputs.tolist() == chosen.clamp(min=0).tolist()
    assert seq_lens.tolist() == [position + (position > 0) for position in positions]
    return chosen


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vocab_size", [5, PART, PART + 1, 4 * PART + 7])
def test_choose_takes_the_token_that_sample_takes(dtype, vocab_size):
    """Greedy and drawn; not a number, infinite, and tokens of logit minus infinity; equal ones."""
    logits = 3 * random(24, vocab_size, dtype=dtype)
    logits[3, 2], logits[4, 1], logits[5] = NAN, torch.inf, -torch.inf
    logits[6, 3:] = -torch.inf
    logits[7:9] = 1.5
    logits[10, -1] = NAN
    settings = [
        Sampling(0.7 * (i % 3), seed=(2**63 - 1 - 123456789012 * i) if i % 2 else i)
        for i in range(24)
    ]
    positions = [2**20 * i + i for i in range(24)]
    expected = sample(logits.float(), settings, positions)
    assert expected.tolist().count(-1) == 4
    assert choose_tokens(logits, settings, positions).tolist() == expected.tolist()


def test_choose_finds_the_largest_noise_where_all_logits_are_equal():
    """Here the noise decides alone, and float32 must not lose the best of many close ones."""
    logits, settings = torch.zeros(60, 3 * PART + 5), [Sampling(1.0, seed=i) for i in range(60)]
    expected = sample(logits, settings, [9] * 60)
    assert choose_tokens(logits, settings, [9] * 60).tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:overflow")
def test_choose_draws_at_any_temperature_and_depends_on_no_other_row():
    logits = random(1, PART + 9).expand(6, -1).contiguous()
    settings = [Sampling(t, seed=4) for t in (1e-300, 1e-5, 1.0, 1e5, 1e300, 0.0)]
    together = choose_tokens(logits, settings, [7] * 6)
    assert together.tolist() == sample(logits, settings, [7] * 6).tolist()
    for row in range(6):
        alone = choose_tokens(logits[row : row + 1], settings[row : row + 1], [7])
        assert alone.tolist() == together[row : row + 1].tolist()


def test_the_hash_is_sampling_s_bit_for_bit():
    words = torch.cat((torch.arange(500), 2**32 - torch.arange(1, 500), torch.tensor([2**31])))
    out = torch.empty(1024, dtype=torch.int64)
    padded = F.pad(words, (0, 1024 - len(words)))
    mixed_kernel[(1,)](padded, out, 1024)
    assert out[: len(words)].tolist() == _mix(words).tolist()


@triton.jit
def mixed_kernel(words_ptr, out_ptr, WIDTH: tl.constexpr):
    lane = tl.arange(0, WIDTH)
    word = tl.load(words_ptr + lane).to(tl.uint32)
    tl.store(out_ptr + lane, mix(word).to(tl.int64))


def launches(dtype):
    """(kernel, args, kwargs) of each kernel, at the sizes of Llama 3.2 1B, without data."""
    empty = torch.empty
    one, many = (empty(n, 2048, dtype=dtype, device="meta") for n in (1, 64))
    norm = empty(2048, dtype=dtype, device="meta")
    gate_up = empty(16384, 2048, dtype=dtype, device="meta")
    down = empty(2048, 8192, dtype=dtype, device="meta")
    yield "matvec", capture_launch(decode_ops.linear, one, gate_up, norm=norm, eps=EPS, gated=True)
    inner = empty(1, 8192, dtype=dtype, device="meta")
    yield "matvec", capture_launch(decode_ops.linear, inner, down, add_to=one)
    yield "silu_mul", capture_launch(decode_ops.linear, many, gate_up, gated=True)
    layout = KVLayout(16, 8, 64, dtype)
    rope = [empty(2048, 1, 64, device="meta")] * 2
    table = empty(64, 16, 128, dtype=torch.int32, device="meta")
    rows = empty(64, dtype=torch.int32, device="meta")
    cache = empty(2**20, dtype=dtype, device="meta")
    qkv = empty(64, 3072, dtype=dtype, device="meta")
    logits = empty(64, 128256, dtype=dtype, device="meta")
    temperatures = empty(64, device="meta")
    seeds = empty(64, dtype=torch.int64, device="meta")
    yield (
        "score",
        capture_launch(choose, logits, temperatures, seeds, seeds, (rows, rows)),
    )
    scores = empty(64, 126, dtype=torch.float64, device="meta")
    yield "choose", (choose_kernel, None, (scores, rows, seeds, rows, rows, 126, 128), {})
    yield (
        "rope_append",
        capture_launch(decode_ops.rope_append, qkv, rope, cache, table, rows, rows, 3, layout),
    )


@pytest.mark.parametrize(
    ("dtype", "targets"),
    [
        (torch.float32, ["sm_90"]),
        (torch.float16, ["sm_75"]),
        (torch.bfloat16, ["sm_80", "sm_89", "sm_90"]),
    ],
    ids=str,
)
def test_every_kernel_compiles_and_reads_sixteen_bytes_at_a_time(dtype, targets):
    for name, (kernel, _, args, kwargs) in launches(dtype):
        for compiled in compile_for(kernel, targets, *args, **kwargs):
            assert "EXIT" in compiled.sass, (name, compiled.target)
            assert not compiled.lines(r"STL|LDL"), "registers spilled to memory"
            assert "griddepcontrol" not in compiled.ptx
            wide = re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", compiled.ptx)
            assert wide or name not in ("matvec", "silu_mul")


def test_a_hopper_loads_weights_before_it_waits():
    for name, (kernel, _, args, kwargs) in launches(torch.bfloat16):
        if name not in ("matvec", "rope_append"):
            continue
        compiled = compile_for(kernel, "sm_90", *args, **kwargs | {"PDL": True})
        before, after = compiled.ptx.split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before
        assert "st.global" not in before
        assert bool(re.search(r"ld\.global\S*\.v4", before)) == (name == "matvec")
        assert "st.global" in after
