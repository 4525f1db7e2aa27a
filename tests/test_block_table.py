"""Promises of the block table: three dimensions, -1, all or nothing, a copy that follows."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlab import BlockTable

POLICIES = ("changed_entries", "per_step", "per_layer")


def test_an_entry_is_found_by_slot_layer_and_logical_block():
    table = BlockTable(num_slots=2, num_layers=3, max_blocks_per_seq=5)
    table.assign(slot=1, layer=2, logical_block=4, physical_block=77)
    flat = table.host.reshape(-1)
    assert flat[1 * 3 * 5 + 2 * 5 + 4] == 77
    assert (flat != -1).sum() == 1
    assert table.lookup(1, 2, 4) == 77
    assert table.lookup(0, 2, 4) == -1


def test_release_slot_returns_layer_by_layer_and_leaves_other_slots():
    table = BlockTable(2, 2, 3)
    table.assign_layers(0, 0, [10, 20])
    table.assign_layers(0, 1, [11, 21])
    table.assign_layers(1, 0, [90, 91])
    assert table.release_slot(0) == [10, 11, 20, 21]
    assert (table.host[0] == -1).all()
    assert table.lookup(1, 1, 0) == 91
    assert table.release_slot(0) == []


def test_the_host_array_is_read_only_and_the_device_tensor_never_moves():
    table = BlockTable(2, 2, 3)
    address = table.device.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        table.host[0, 0, 0] = 1
    table.assign(0, 0, 0, 5)
    assert table.device[0, 0, 0] == 5
    assert table.device.dtype == torch.int32
    assert table.host.dtype == np.int32
    assert table.device.data_ptr() == address


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.assign(2, 0, 0, 1), "slot: expected 0 <= slot < 2, got 2"),
        (lambda t: t.assign(0, 3, 0, 1), "layer: expected 0 <= layer < 3, got 3"),
        (lambda t: t.assign(0, 0, 4, 1), "logical_block: expected 0 <= logical_block < 4, got 4"),
        (lambda t: t.assign(0, 0, -1, 1), "logical_block: expected 0 <= logical_block < 4, got -1"),
        (lambda t: t.assign(0, 0, 0, -1), "physical_block: expected 0 <= physical_block <"),
        (lambda t: t.assign(0, 0, 0, 2**31), "physical_block: expected 0 <= physical_block <"),
        (lambda t: t.assign(1, 1, 1, 9), r"block_table\[1, 1, 1\]: expected unassigned"),
        (lambda t: t.assign_layers(0, 0, [1, 2]), r"blocks: expected one per layer \(3\), got 2"),
        (lambda t: t.assign_layers(0, 0, [1, 2, -1]), "physical_block: expected 0 <="),
        (lambda t: t.assign_layers(1, 1, [1, 2, 3]), r"block_table\[1, 1, 1\]: expected unassig"),
        (lambda t: t.assign_layers(0, 4, [1, 2, 3]), "logical_block: expected 0 <="),
        (lambda t: t.lookup(0, 0, 4), "logical_block: expected 0 <="),
        (lambda t: t.release_slot(-1), "slot: expected 0 <= slot < 2, got -1"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_refused_call_names_what_came_and_changes_nothing(call, message, shared):
    table = BlockTable(2, 3, 4, shared=shared)
    table.assign(1, 1, 1, 7)
    table.sync()
    before = table.host.copy()
    with pytest.raises(ValueError, match=message):
        call(table)
    assert (table.host == before).all()
    assert table.sync(layer=1) == 0  # nothing is waiting to be copied


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 2.0)])
def test_a_table_needs_sizes(sizes):
    with pytest.raises(ValueError, match=r"^\w+: expected (\w+ >= 1|an integer), got"):
        BlockTable(*sizes)


def test_an_unknown_sync_policy_is_refused():
    with pytest.raises(
        ValueError, match="sync: expected one of changed_entries, per_step, per_lay"
    ):
        BlockTable(1, 1, 1, sync="sometimes")


def test_the_copy_is_stale_until_it_is_synced():
    table = BlockTable(2, 2, 3, shared=False)
    table.assign(0, 1, 2, 8)
    assert table.device[0, 1, 2] == -1
    table.sync()
    assert table.device[0, 1, 2] == 8


def test_the_policies_copy_the_bytes_they_say():
    table_bytes = 2 * 3 * 4 * 4  # slots, layers, logical blocks, int32
    pair_bytes = 2 * 8  # one changed entry: int64 index, int64 block
    expected = {"per_layer": 3 * table_bytes, "per_step": table_bytes, "changed_entries": 3 * 16}
    assert expected["changed_entries"] == 3 * pair_bytes
    for policy in POLICIES:
        table = BlockTable(2, 3, 4, sync=policy, shared=False)
        table.assign_layers(0, 0, [1, 2, 3])
        assert sum(table.sync(layer) for layer in range(3)) == expected[policy]
        assert table.bytes_copied == expected[policy]
        assert BlockTable(2, 3, 4, sync=policy).sync(0) == 0  # shared memory: nothing to copy


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_policy_leaves_the_same_table_on_the_device(data):
    tables = [BlockTable(3, 2, 5, sync=policy, shared=False) for policy in POLICIES]
    for step in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 6))):
            slot = data.draw(st.integers(0, 2))
            if data.draw(st.booleans()):
                for table in tables:
                    table.release_slot(slot)
            else:
                logical_block = data.draw(st.integers(0, 4))
                blocks = data.draw(st.tuples(st.integers(0, 999), st.integers(0, 999)))
                for table in tables:
                    if table.lookup(slot, 0, logical_block) == -1:
                        table.assign_layers(slot, logical_block, blocks)
        for layer in range(2):
            for table in tables:
                table.sync(layer)
                assert (table.device.numpy() == tables[0].host).all(), (step, table.sync_policy)


def test_more_changes_than_one_staging_buffer_holds():
    table = BlockTable(2, 90, 120, shared=False)  # 10,800 entries a slot, 4,096 pairs a buffer
    for logical_block in range(120):
        table.assign_layers(1, logical_block, range(logical_block * 90, logical_block * 90 + 90))
    table.sync()
    assert (table.device.numpy() == table.host).all()
    assert table.lookup(1, 89, 119) == 119 * 90 + 89


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_is_a_table_of_its_own(copied, shared):
    table = BlockTable(2, 3, 4, sync="per_step", shared=shared)
    table.assign(1, 2, 3, 7)
    twin = copied(table)
    twin.assign(0, 1, 2, 9)
    twin.sync()
    assert twin.sync_policy == "per_step"
    assert twin.lookup(1, 2, 3) == 7
    assert twin.host[0, 1, 2] == twin.device[0, 1, 2] == 9
    assert torch.equal(twin.device, torch.tensor(twin.host))
    assert not twin.host.flags.writeable
    assert table.lookup(0, 1, 2) == -1


def test_a_small_integer_type_does_not_wrap():
    table = BlockTable(np.int64(200), 30, 64, shared=False)
    table.assign(np.uint8(199), np.uint8(29), np.uint8(63), np.uint8(5))
    table.sync()
    assert table.release_slot(np.uint8(199)) == [5]
    table.sync()
    assert (table.device == -1).all()


@pytest.mark.parametrize("blocks", [5, None, [1, 2, None], [1, 2, 3.0], torch.ones(3)])
def test_blocks_that_are_no_integers_are_refused(blocks):
    table = BlockTable(2, 3, 4)
    with pytest.raises(ValueError, match=r"^(blocks|physical_block): expected "):
        table.assign_layers(0, 0, blocks)
    assert (table.host == -1).all()
    table.assign_layers(0, 0, torch.tensor([3, 4, 5]))
    assert table.host[0, :, 0].tolist() == [3, 4, 5]
