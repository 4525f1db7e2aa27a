"""Scheduling: who is admitted, who is preempted, and whose block is whose."""

import pytest

from pagedlab import BlockPool, BlockTable
from pagedlab.block_pool import OutOfBlocks
from pagedlab.scheduler import BlockEvent, Request, Scheduler, SlotEvent

NUM_LAYERS = 3


def make(num_blocks: int, num_slots: int = 2, block_size: int = 4) -> Scheduler:
    table = BlockTable(num_slots, NUM_LAYERS, 8)
    return Scheduler(BlockPool(num_blocks), table, block_size, [])


def enqueue(scheduler: Scheduler, *prompt_lengths: int) -> list[Request]:
    first = sum(request is not None for request in scheduler.slots) + len(scheduler.queue)
    new = [Request(first + i, [1] * n, 100) for i, n in enumerate(prompt_lengths)]
    scheduler.queue.extend(new)
    return new


def extend(request: Request, num_tokens: int) -> None:
    request.tokens += [2] * num_tokens


def actions(scheduler: Scheduler) -> list[tuple[str, int]]:
    return [(e.action, e.request) for e in scheduler.events if isinstance(e, SlotEvent)]


def test_requests_get_slots_in_the_order_they_came():
    scheduler = make(num_blocks=99)
    first, second, third = enqueue(scheduler, 3, 5, 1)
    assert scheduler.schedule() == [first, second]
    assert (first.slot, second.slot, third.state) == (0, 1, "queued")
    scheduler.finish(first, "eos")
    assert scheduler.schedule() == [second, third]
    assert third.slot == 0
    assert (first.state, second.state, third.state) == ("finished", "running", "running")


def test_a_prompt_waits_until_its_blocks_exist_although_a_slot_is_free():
    scheduler = make(num_blocks=4 * NUM_LAYERS)
    first, second = enqueue(scheduler, 9, 5)
    assert scheduler.schedule() == [first]
    assert scheduler.pool.num_free == NUM_LAYERS
    scheduler.finish(first, "length")
    assert scheduler.schedule() == [second]


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = make(num_blocks=4 * NUM_LAYERS)
    first, _large, _small = enqueue(scheduler, 9, 8, 1)
    assert scheduler.schedule() == [first]
    assert [request.id for request in scheduler.queue] == [1, 2]


def test_a_block_is_taken_when_the_first_token_needs_it_and_not_before():
    scheduler = make(num_blocks=99)
    (request,) = enqueue(scheduler, 3)
    owned = []
    for _ in range(7):
        scheduler.schedule()
        owned.append(request.num_blocks)
        extend(request, 1)
    # tokens, this step's included: 3 4 5 6 7 8 9
    assert owned == [1, 1, 2, 2, 2, 2, 3]


def test_every_layer_owns_a_block_of_its_own():
    scheduler = make(num_blocks=99)
    (request,) = enqueue(scheduler, 6)
    scheduler.schedule()
    entries = [scheduler.table.lookup(0, layer, b) for layer in range(NUM_LAYERS) for b in (0, 1)]
    assert len(set(entries)) == 2 * NUM_LAYERS
    assert min(entries) >= 0
    assert scheduler.table.lookup(0, 0, 2) == -1
    assert request.num_blocks == 2


def test_the_youngest_is_preempted_and_goes_to_the_head_of_the_queue():
    scheduler = make(num_blocks=3 * NUM_LAYERS, num_slots=3)
    first, second, third, fourth = enqueue(scheduler, 4, 4, 4, 1)
    assert scheduler.schedule() == [first, second, third]
    for request in (first, second, third):
        extend(request, 1)
    # the first needs a second block: the third gives its one; the second needs one too: it goes
    assert scheduler.schedule() == [first]
    assert list(scheduler.queue) == [second, third, fourth]
    assert actions(scheduler)[3:] == [("preempt", 2), ("preempt", 1)]
    assert (second.tokens, second.slot, second.num_blocks, second.num_cached) == ([2], -1, 0, 0)
    scheduler.pool.check_integrity()


def test_the_oldest_is_never_preempted_and_the_preempted_come_back_in_order():
    scheduler = make(num_blocks=4 * NUM_LAYERS, num_slots=3)
    requests = enqueue(scheduler, 2, 3, 4)
    order = []
    for _ in range(100):
        running = scheduler.schedule()
        if not running:
            break
        assert running[0] is next(r for r in requests if r.state != "finished")
        for request in running:
            extend(request, 1)
            if len(request.tokens) == 8:
                scheduler.finish(request, "length")
                order.append(request.id)
    assert order == [0, 1, 2]
    assert scheduler.pool.num_free == 4 * NUM_LAYERS
    assert ("preempt", 0) not in actions(scheduler)
    assert ("preempt", 2) in actions(scheduler)


def test_a_preempted_request_is_not_admitted_again_in_the_same_step():
    scheduler = make(num_blocks=4 * NUM_LAYERS)
    first, second = enqueue(scheduler, 8, 8)
    scheduler.schedule()
    extend(first, 1)
    extend(second, 1)
    assert scheduler.schedule() == [first]
    assert actions(scheduler) == [("admit", 0), ("admit", 1), ("preempt", 1)]


def test_finishing_returns_slot_and_blocks_at_once():
    scheduler = make(num_blocks=20)
    first, second = enqueue(scheduler, 9, 5)
    scheduler.schedule()
    scheduler.finish(first, "eos")
    assert scheduler.pool.num_free == 20 - 2 * NUM_LAYERS
    assert scheduler.slots == [None, second]
    assert (scheduler.table.host[0] == -1).all()


def test_a_queued_request_can_be_finished_too():
    scheduler = make(num_blocks=20)
    first, second = enqueue(scheduler, 9, 5)
    scheduler.finish(second, "cancelled")
    assert list(scheduler.queue) == [first]
    assert scheduler.events == [SlotEvent(0, "cancel", 1, -1, 5)]


def test_events_say_who_got_and_gave_which_block():
    scheduler = make(num_blocks=2 * NUM_LAYERS)
    (request,) = enqueue(scheduler, 5)
    scheduler.schedule()
    scheduler.finish(request, "length")
    taken = [BlockEvent(1, "allocate", 0, 0, n % 3, n // 3, 5 - n) for n in range(6)]
    given = sorted(taken, key=lambda event: event.layer)
    assert scheduler.events == [
        SlotEvent(1, "admit", 0, 0, 5),
        *taken,
        SlotEvent(1, "finish", 0, 0, 5),
        *(event._replace(action="release") for event in given),
    ]


def test_without_an_event_list_nothing_is_logged():
    scheduler = make(num_blocks=20)
    scheduler.events = None
    enqueue(scheduler, 5)
    assert len(scheduler.schedule()) == 1


def test_blocks_taken_behind_its_back_stop_the_scheduler_instead_of_hanging_it():
    scheduler = make(num_blocks=2 * NUM_LAYERS)
    enqueue(scheduler, 5)
    scheduler.pool.allocate(1)
    with pytest.raises(OutOfBlocks, match=r"^pool: expected blocks for 5 tokens, got 5$"):
        scheduler.schedule()
    assert len(scheduler.queue) == 1


def test_a_table_that_refuses_costs_no_block():
    scheduler = make(num_blocks=4 * NUM_LAYERS)
    (request,) = enqueue(scheduler, 8)
    free_before = list(scheduler.pool.free_blocks)
    scheduler.table.assign(0, 1, 1, 777)
    with pytest.raises(ValueError, match="expected unassigned"):
        scheduler.schedule()
    assert request.num_blocks == 1
    assert scheduler.pool.free_blocks == free_before[:-NUM_LAYERS]
    scheduler.pool.check_integrity()


def test_of_a_long_queue_several_are_admitted_together_and_a_short_one_does_not_wait():
    scheduler = Scheduler(BlockPool(400), BlockTable(16, 1, 4), block_size=4)
    scheduler.together = 4
    scheduler.queue += [Request(i, [1, 2], 5) for i in range(24)]
    assert len(scheduler.schedule()) == 16
    for left in (15, 14, 13):
        scheduler.finish(scheduler.running[0], "length")
        assert len(scheduler.schedule()) == left
    scheduler.finish(scheduler.running[0], "length")
    assert [r.id for r in scheduler.schedule()[-4:]] == [16, 17, 18, 19]
    for _ in range(2):
        scheduler.finish(scheduler.queue[-1], "cancelled")
    scheduler.finish(scheduler.running[0], "length")
    assert len(scheduler.queue) == 2
    assert len(scheduler.schedule()) == 15
    scheduler.finish(scheduler.queue[-1], "cancelled")
    assert scheduler.schedule()[-1].id == 20
