"""On a T4 (compute capability 7.5) the code computes in float16 and without tl.dot."""

import types

import pytest
import torch
from batches import TOLERANCE, make_batch

from pagedlab import KVLayout, checkpoint, paged_attention
from pagedlab.kernels import plan, split_kv
from pagedlab.reference import gathered_attention

T4 = types.SimpleNamespace(
    major=7, minor=5, multi_processor_count=40, shared_memory_per_multiprocessor=2**16
)


@pytest.fixture
def t4(monkeypatch):
    """What torch answers on a machine with a T4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: T4)
    return plan.device_facts.__wrapped__(torch.device("cuda"))  # the answer is not kept


def test_the_model_is_float16_and_the_kernels_get_no_dot(t4):
    assert checkpoint.pick_dtype(checkpoint.pick_device()) is torch.float16
    assert (t4.has_dot, t4.has_pdl, t4.num_sms) == (False, False, 40)


@pytest.mark.parametrize("group_size", [1, 3])
def test_what_a_t4_is_given_computes_the_same(t4, monkeypatch, group_size):
    monkeypatch.undo()  # the interpreter must see that there is no GPU
    for module in (plan, split_kv):
        monkeypatch.setattr(module, "device_facts", lambda device: t4)
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    batch = make_batch(layout, [1, 0, 9, 70], num_q_heads=2 * group_size)
    expected = gathered_attention(*batch.args, 1)
    with monkeypatch.context() as without_dot:
        without_dot.setattr(split_kv.tl, "dot", None)
        out = paged_attention(*batch.args, 1, backend="triton", kernel="split_kv")
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[torch.float16])
