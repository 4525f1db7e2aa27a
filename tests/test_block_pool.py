"""Promises of the block pool: no block is lost, shared, or handed out twice."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pagedlab import BlockPool, NotAllocated, OutOfBlocks, PoolError, UnknownBlock


def test_the_last_block_is_handed_out_first_and_the_last_released_comes_back_first():
    pool = BlockPool(5)
    assert pool.allocate(3) == [4, 3, 2]
    pool.release([4, 2])
    assert pool.allocate(2) == [2, 4]
    assert pool.free_blocks == [0, 1]


def test_allocate_zero_blocks_is_legal():
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    pool.release([])
    assert pool.num_free == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.allocate(3), OutOfBlocks, r"expected at most 2 \(free of 4\), got 3"),
        (lambda p: p.allocate(-1), PoolError, "n: expected n >= 0, got -1"),
        (lambda p: p.release([3, 4]), UnknownBlock, "expected 0 <= block < 4, got 4"),
        (lambda p: p.release([3, -1]), UnknownBlock, "expected 0 <= block < 4, got -1"),
        (lambda p: p.release([3, 2.0]), UnknownBlock, "block: expected an integer, got 2.0"),
        (lambda p: p.release([3, 0]), NotAllocated, "expected an allocated block, got 0"),
        (lambda p: p.release([3, 2, 3]), NotAllocated, "expected each block once, got 3 twice"),
    ],
)
def test_a_refused_call_names_what_came_and_changes_nothing(call, error, message):
    pool = BlockPool(4)
    pool.allocate(2)
    before = list(pool.free_blocks)
    with pytest.raises(error, match=message):
        call(pool)
    assert pool.free_blocks == before
    pool.check_integrity()
    pool.release([3, 2])
    assert pool.num_free == 4


def test_a_double_release_is_refused():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(NotAllocated, match="got 3, which is free"):
        pool.release(blocks)
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [0, -1, 2.5])
def test_a_pool_needs_blocks(num_blocks):
    with pytest.raises(ValueError, match=r"num_blocks: expected (num_blocks >= 1|an integer), got"):
        BlockPool(num_blocks)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: p.free_blocks.append(p.free_blocks[0]), "expected each block once"),
        (lambda p: p.free_blocks.append(3), "got 3 both free and owned"),
        (lambda p: p.free_blocks.pop(), "got 1 neither free nor owned"),
        (lambda p: p.free_blocks.append(9), "expected 0 <= block < 4, got 9"),
    ],
)
def test_check_integrity_sees_a_broken_pool(break_it, message):
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_integrity()
    break_it(pool)
    with pytest.raises(PoolError, match=message):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Random allocate and release against a set of owned blocks."""

    owned_blocks = Bundle("owned_blocks")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(13)
        self.owned = set()

    @rule(target=owned_blocks, n=st.integers(0, 15))
    def allocate(self, n):
        if n > 13 - len(self.owned):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return multiple()
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n
        assert not self.owned & set(blocks)
        self.owned |= set(blocks)
        return multiple(*blocks)

    @rule(block=consumes(owned_blocks))
    def release(self, block):
        self.pool.release([block])
        self.owned.remove(block)
        assert self.pool.free_blocks[-1] == block

    @rule(block=st.integers(-2, 14))
    def release_what_nobody_owns(self, block):
        if block not in self.owned:
            with pytest.raises((NotAllocated, UnknownBlock)):
                self.pool.release([block])

    @invariant()
    def nothing_is_lost(self):
        self.pool.check_integrity()
        assert self.pool.num_free == 13 - len(self.owned)
        assert not set(self.pool.free_blocks) & self.owned


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_blocks_may_come_in_an_array(array):
    pool = BlockPool(array(4))
    assert pool.allocate(array(3)) == [3, 2, 1]
    with pytest.raises(NotAllocated, match="expected each block once, got 2 twice"):
        pool.release(array([3, 2, 2]))
    with pytest.raises(UnknownBlock, match="block: expected an integer"):
        pool.release(array([[3, 2], [1, 1]]))
    pool.release(array([3, 2]))
    assert pool.free_blocks == [0, 3, 2]
    pool.check_integrity()


def test_one_block_in_place_of_several_is_refused():
    with pytest.raises(UnknownBlock, match="release: expected blocks, got 3"):
        BlockPool(4).release(3)
