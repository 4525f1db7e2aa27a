"""split_kv's plan and launch rule, and what its kernel compiles to."""

import pytest
import torch
from batches import TOLERANCE, make_batch

from pagedlab import KVLayout, compile_for
from pagedlab.kernels import plan, split_kv
from pagedlab.reference import gathered_attention

H200 = plan.Device(num_sms=132, shared_bytes=233472, has_dot=True, has_pdl=True)
LAYOUT = KVLayout(block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)


@pytest.fixture
def pretend(monkeypatch):
    """Make the launch rule believe in another device."""

    def set_device(device):
        for module in (plan, split_kv):
            monkeypatch.setattr(module, "device_facts", lambda _: device)

    return set_device


@pytest.mark.parametrize("num_sms", [1, 7, 132])
@pytest.mark.parametrize(
    "lengths",
    [
        [2048] * 32,
        [1 + 16384 * i // 30 for i in range(30)],
        [1000] * 10 + [40000] + [1] * 7,
        [0, 5, 300],
        [0],
        [65536],
    ],
)
def test_every_token_is_in_one_item_and_the_longest_come_first(pretend, num_sms, lengths):
    pretend(H200._replace(num_sms=num_sms))
    rows = torch.arange(len(lengths), dtype=torch.int32)
    table = torch.zeros(len(lengths), 1, 65536 // LAYOUT.block_size, dtype=torch.int32)
    work = plan.plan_work(torch.tensor(lengths, dtype=torch.int32), rows, table, LAYOUT)
    items = [tuple(item) for item in work.items.tolist() if item[0] >= 0]
    pieces = {row: [item[2:] for item in items if item[0] == row] for row in range(len(lengths))}
    for row, length in enumerate(lengths):
        ends = [0, *(end for _, end in pieces[row])]
        assert [first for first, _ in pieces[row]] == ends[:-1]
        assert ends[-1] == length
    row_lengths = [lengths[row] for row, *_ in items]
    assert row_lengths == sorted(row_lengths, reverse=True)
    split = [row for row in pieces if len(pieces[row]) > 1]
    num_parts = sum(len(pieces[row]) for row in split)
    assert work.counts.tolist() == [num_parts, len(split)]
    assert num_parts <= work.max_parts
    assert all(row in split for row, *_ in items[:num_parts])
    for row, first_item, count in work.merges[: len(split)].tolist():
        assert items[first_item : first_item + count] == [
            (row, row, *piece) for piece in pieces[row]
        ]


def test_a_row_that_does_not_fit_is_marked():
    lengths = torch.tensor([5, -1, 99, 7], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, 9], dtype=torch.int32)
    table = torch.zeros(3, 1, 4, dtype=torch.int32)
    items = plan.plan_work(lengths, slots, table, LAYOUT).items.tolist()
    assert items[0] == [0, 0, 0, 5]
    assert [(row, end) for row, _, _, end in items[1:4]] == [(1, -1), (2, -1), (3, -1)]


@pytest.mark.parametrize("num_q_heads", [2, 6, 32])  # 1, 3 and 16 q heads share a kv head
@pytest.mark.parametrize("num_sms", [40, 24, 6, 3, 2, 1])
def test_each_branch_of_the_launch_rule_is_right(pretend, num_sms, num_q_heads):
    """From few programs per SM to many; with 2 kv heads, the middle and the last take both."""
    pretend(plan.Device(num_sms=num_sms))
    layout = KVLayout(block_size=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    lengths = [300, 129, 1] if num_sms > 1 else [300, 129, 1, 0, 64, 65, 7]
    batch = make_batch(layout, lengths, num_q_heads=num_q_heads)
    out = torch.full_like(batch.q, float("nan"))
    tensors = (batch.cache.buffer, batch.table.device, batch.seq_lens, batch.active_slots)
    split_kv.split_kv(batch.q, *tensors, 1, layout, out, 64**-0.5)
    tolerance = TOLERANCE[torch.float16]
    expected = gathered_attention(*batch.args, 1)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_the_rule_fits_every_layout_on_every_gpu():
    """Workspace under 64 MB with up to 128 q heads; tiles fit shared memory; sizes are legal."""
    devices = [
        H200,
        plan.Device(40, 2**16, False),
        plan.Device(108, 167936),
        plan.Device(128, 102400),
    ]
    for device in devices:
        for head_dim in (16, 64, 80, 128, 256):
            for num_kv_heads in (1, 3, 8, 32):
                layout = KVLayout(16, num_kv_heads, head_dim, torch.float16)
                for num_active in [*range(1, 140), 256, 512]:
                    rule = plan.launch_rule(num_active, layout, device, device.has_dot)
                    parts = max(rule.pieces, rule.fine_pieces) * 4 // 3
                    assert parts * 128 * (head_dim + 1) * 4 <= 64 * 2**20
                    assert num_kv_heads % rule.kv_heads == 0
                    lanes = 1 << (head_dim - 1).bit_length()
                    tile_bytes = 4 * rule.tokens * rule.kv_heads * lanes
                    if device.has_dot:
                        assert (rule.num_stages - 1) * tile_bytes <= device.shared_bytes * 7 // 8
                        assert rule.tokens >= 16


def test_the_rule_gives_the_parameters_that_were_measured():
    shapes = {1: (66, 64, 1, 4), 8: (128, 32, 1, 4), 32: (33, 128, 2, 3), 256: (132, 64, 2, 2)}
    for num_active, expected in shapes.items():
        rule = plan.launch_rule(num_active, LAYOUT, H200)
        assert (rule.pieces, rule.tokens, rule.kv_heads, rule.num_stages) == expected


class Recorder:
    """Stands for a kernel and keeps the arguments of its launch."""

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.args, self.kwargs = args, kwargs

        return launch


def launch_arguments(monkeypatch, dtype):
    recorder = Recorder()
    monkeypatch.setattr(split_kv, "split_kv_kernel", recorder)
    monkeypatch.setattr(split_kv, "merge_kernel", Recorder())
    layout = KVLayout(block_size=16, num_kv_heads=8, head_dim=64, dtype=dtype)
    q = torch.zeros(2, 32, 64, dtype=dtype)
    rows, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 4, dtype=torch.int32)
    cache = torch.zeros(layout.block_bytes // dtype.itemsize, dtype=dtype)
    split_kv.split_kv(q, cache, table, rows, rows, 0, layout, q, 0.125)
    return recorder.kwargs


def test_an_old_gpu_gets_no_tl_dot_and_a_hopper_starts_early(monkeypatch, pretend):
    kernel = split_kv.split_kv_kernel
    pretend(plan.Device(num_sms=40, has_dot=False))
    compiled = compile_for(kernel, "sm_75", **launch_arguments(monkeypatch, torch.float16))
    assert "mma" not in compiled.ptx
    assert compiled.shared_bytes <= 2**16
    pretend(H200._replace(has_pdl=False))
    arguments = launch_arguments(monkeypatch, torch.bfloat16)
    ampere, hopper = compile_for(kernel, ["sm_80", "sm_90"], **arguments)
    assert "mma.sync" in ampere.ptx
    assert "griddepcontrol" not in ampere.ptx + hopper.ptx
    early = arguments | {"PDL": True, "TRIGGER_EARLY": True}
    ptx = compile_for(kernel, "sm_90", **early).ptx
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    assert "prefetch.global.L2" in before
    assert "cp.async" not in before  # keys and values are read after the wait
    assert "cp.async" in after
