"""The engine: every text is what its request alone would say, and no block is lost or shared."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from fake_model import MAX_SEQ_LEN, NUM_LAYERS, VOCAB_SIZE, FakeModel, text_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedlab import (
    BlockPool,
    BlockTable,
    Engine,
    Llama,
    LlamaConfig,
    PagedKVCache,
    Tokenizer,
    checkpoint,
    reference,
)
from pagedlab.block_pool import OutOfBlocks
from pagedlab.engine import BlockEvent, SlotEvent, TokenEvent

torch.set_num_threads(1)
PROMPTS = [[5], [3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5, 8], [9, 7], [9, 3, 2, 3], [8, 4, 6]]
DRAWN = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "seed": 7}
SMALL = LlamaConfig(
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=61,
    max_seq_len=64,
)


def fake_engine(num_slots=2, num_blocks=None, *, block_size=4, model=None, **options) -> Engine:
    return Engine(model or FakeModel(), num_slots, num_blocks, block_size=block_size, **options)


def slot_actions(engine: Engine) -> list[tuple[str, int]]:
    return [(e.action, e.request) for e in engine.events if isinstance(e, SlotEvent)]


# One request


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_text_is_what_the_blocks_of_its_own_tokens_say(prompt, block_size):
    engine = fake_engine(block_size=block_size)
    request = engine.submit(prompt, max_new_tokens=11)
    assert request.state == "queued"
    engine.run()
    assert request.tokens == text_of(prompt, 11)
    assert (request.state, request.finish_reason) == ("finished", "length")
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_stream_callback_step_and_request_tell_the_same_tokens():
    called = []
    engine = fake_engine(on_token=lambda request, token: called.append((request.id, token)))
    first, second = engine.submit([1, 2, 3], 5), engine.submit([4], 3)
    assert list(engine.stream(second)) == second.tokens == text_of([4], 3)
    stepped = [(request.id, token) for _ in range(3) for request, token in engine.step()]
    assert stepped == [(0, token) for token in text_of([1, 2, 3], 5)[3:]]
    assert [token for owner, token in called if owner == 0] == first.tokens
    assert [token for owner, token in called if owner == 1] == second.tokens
    assert list(engine.stream(first)) == first.tokens


def test_streams_can_take_turns():
    engine = fake_engine()
    first, second = engine.submit([1, 2, 3], 6), engine.submit([4], 6)
    pairs = list(zip(engine.stream(first), engine.stream(second), strict=True))
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == [
        text_of([1, 2, 3], 6),
        text_of([4], 6),
    ]


def test_an_idle_engine_steps_to_nothing():
    engine = fake_engine()
    assert engine.step() == []
    engine.run()
    engine.check_integrity()


# Ends


def test_the_first_token_may_be_the_end():
    prompt = [1, 2, 3]
    (eos,) = text_of(prompt, 1)
    engine = fake_engine(model=FakeModel(eos_token_ids=(eos,)))
    request = engine.submit(prompt, 8)
    assert engine.step() == [(request, eos)]
    assert (request.tokens, request.finish_reason) == ([eos], "eos")
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("which", [0, 1])
def test_any_of_several_eos_ids_ends_the_text(which):
    prompt = [2, 7]
    text = text_of(prompt, 10)
    ends = [next(t for t in text if text.index(t) == at) for at in (3, 6)]
    never = next(t for t in range(VOCAB_SIZE) if t not in text)
    eos_token_ids = (never, ends[which])
    engine = fake_engine(model=FakeModel(eos_token_ids))
    request = engine.submit(prompt, 10)
    engine.run()
    assert request.tokens == text[: (4, 7)[which]]
    assert request.finish_reason == "eos"


def test_eos_as_the_last_allowed_token_counts_as_eos():
    text = text_of([2, 7], 4)
    engine = fake_engine(model=FakeModel(eos_token_ids=(text[3],)))
    request = engine.submit([2, 7], text.index(text[3]) + 1)
    engine.run()
    assert request.finish_reason == "eos"


@pytest.mark.parametrize("max_seq_len", [5, 8, 9, MAX_SEQ_LEN])
def test_the_context_limit_ends_the_text(max_seq_len):
    engine = fake_engine(max_seq_len=max_seq_len)
    request = engine.submit([1, 2, 3], 1000)
    engine.run()
    assert request.num_tokens == max_seq_len
    assert request.tokens == text_of([1, 2, 3], 1000, max_seq_len=max_seq_len)
    assert request.finish_reason == "context"


def test_a_finished_request_returns_its_blocks_in_the_same_step_and_its_slot_is_refilled():
    engine = fake_engine(num_slots=1, events=[])
    first, second = engine.submit([1] * 5, 2), engine.submit([2], 1)
    engine.step()
    assert engine.pool.num_free == engine.pool.num_blocks - 2 * NUM_LAYERS
    engine.step()
    assert first.finish_reason == "length"
    assert engine.pool.num_free == engine.pool.num_blocks
    assert [request for request, _ in engine.step()] == [second]
    assert slot_actions(engine) == [("admit", 0), ("finish", 0), ("admit", 1), ("finish", 1)]


def test_logits_that_are_no_numbers_end_their_own_request_only():
    engine = fake_engine()
    first, second = engine.submit([1, 2, 3], 8), engine.submit([4, 5], 8)
    engine.step()
    engine.cache.k_view()[engine.table.lookup(first.slot, 1, 0)] = torch.nan
    engine.run()
    assert (first.finish_reason, len(first.tokens)) == ("invalid", 1)
    assert second.tokens == text_of([4, 5], 8)
    engine.check_integrity()


# Many requests


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("settings_", [{}, DRAWN])
def test_slots_are_recycled_and_no_text_depends_on_slot_or_batch(num_slots, settings_):
    engine = fake_engine(num_slots)
    requests = [engine.submit(p, 3 + i, **settings_) for i, p in enumerate(PROMPTS)]
    most_running = 0
    while any(request.state != "finished" for request in requests):
        most_running = max(most_running, len(engine.step()))
        engine.check_integrity()
    assert most_running == min(num_slots, len(PROMPTS))
    for i, request in enumerate(requests):
        assert request.tokens == text_of(request.prompt, 3 + i, request.sampling)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_greedy_and_drawn_requests_share_a_batch():
    engine = fake_engine(3)
    all_settings = [{}, DRAWN, {"temperature": 0.7, "seed": 2**63 - 1}, {}]
    requests = [engine.submit([1, 2], 9, **settings_) for settings_ in all_settings]
    engine.run()
    for request in requests:
        assert request.tokens == text_of([1, 2], 9, request.sampling)
    assert requests[0].tokens == requests[3].tokens != requests[1].tokens


def test_seeds_give_different_texts_and_equal_seeds_equal_ones():
    engine = fake_engine()
    seeds = [1, 2, 1]
    requests = [engine.submit([1, 2], 12, temperature=1.0, seed=seed) for seed in seeds]
    engine.run()
    assert requests[0].tokens == requests[2].tokens != requests[1].tokens


def test_a_preempted_request_keeps_its_tokens_and_says_the_same_text():
    model = FakeModel()
    engine = fake_engine(3, 5 * NUM_LAYERS, model=model, events=[])
    requests = [engine.submit(p, 12, **DRAWN) for p in ([1, 2, 3], [4, 5, 6], [7, 8])]
    while engine.scheduler.queue or engine.scheduler.running:
        lengths = [len(request.tokens) for request in requests]
        engine.step()
        assert all(len(r.tokens) >= n for r, n in zip(requests, lengths, strict=True))
        engine.check_integrity()
    actions = Counter(slot_actions(engine))
    assert actions["preempt", 2] >= 1
    assert actions["preempt", 1] >= 1
    assert ("preempt", 0) not in actions
    assert model.num_prefills == sum(n for (action, _), n in actions.items() if action == "admit")
    for request in requests:
        assert request.tokens == text_of(request.prompt, 12, request.sampling)
    assert [r for a, r in slot_actions(engine) if a == "finish"] == [0, 1, 2]


def test_blocks_come_from_one_allocation_a_boundary_for_all_layers():
    class Counting(BlockPool):
        calls = ()

        def allocate(self, n):
            self.calls += (n,)
            return super().allocate(n)

    engine = fake_engine(pool=Counting(30))
    engine.submit([1] * 6, 7)  # 12 tokens are cached in the end: 2 blocks, then 1 more
    engine.step()
    assert engine.pool.calls == (NUM_LAYERS,) * 2
    engine.run()
    assert engine.pool.calls == (NUM_LAYERS,) * 3


# Refusals


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = fake_engine(num_blocks=3 * NUM_LAYERS + 2)
    accepted = engine.submit([1] * 5, 7)
    with pytest.raises(ValueError, match=r"at most 11 blocks, got ceil\(13 tokens / 4\) \* 3 lay"):
        engine.submit([1] * 5, 8)
    engine.run()
    assert accepted.tokens == text_of([1] * 5, 7)


def test_the_context_limit_bounds_what_a_request_can_need():
    engine = fake_engine(num_blocks=6 * NUM_LAYERS)  # MAX_SEQ_LEN tokens exactly
    request = engine.submit([1], 10**9)
    engine.run()
    assert request.num_tokens == MAX_SEQ_LEN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": []}, "ids: expected 1 to 23 tokens, got 0"),
        ({"ids": [1] * 24}, "ids: expected 1 to 23 tokens, got 24"),
        ({"ids": [1, 29]}, r"ids: expected token ids from 0 to 28, got \[29\]"),
        ({"ids": [-1, 1]}, r"ids: expected token ids from 0 to 28, got \[-1\]"),
        ({"ids": [1.0]}, r"ids: expected integers, got \[1.0\]"),
        ({"ids": "text"}, "ids: expected integers, got 'text'"),
        ({"ids": None}, "ids: expected integers, got None"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected max_new_tokens >= 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected an integer, got 2.5"),
        ({"temperature": -1}, "temperature: expected .*, got -1"),
        ({"top_k": -1}, "top_k: expected .*, got -1"),
        ({"top_p": 0}, "top_p: expected .*, got 0"),
        ({"seed": 2**63}, "seed: expected .*, got 9223372036854775808"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(arguments, message):
    engine = fake_engine(events=[])
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        engine.submit(**{"ids": [1, 2], "max_new_tokens": 5, **arguments})
    assert "\n" not in str(error.value)
    assert (engine.step(), engine.events) == ([], [])
    assert engine.submit([1], 1).id == 0


def test_ids_and_numbers_may_be_numpys_or_torchs():
    engine = fake_engine(events=[])
    settings_of = {"temperature": 2, "top_k": 3, "top_p": 1, "seed": 5}
    first = engine.submit([3, 4], 4, **settings_of)
    typed = {name: np.int8(value) for name, value in settings_of.items() if name != "temperature"}
    second = engine.submit(torch.tensor([3, 4]), np.int64(4), np.float32(2), **typed)
    engine.run()
    assert first.tokens == second.tokens
    assert second.prompt == [3, 4]
    json.dumps([event._asdict() for event in engine.events])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": MAX_SEQ_LEN + 1}, "max_seq_len: expected 2 <= max_seq_len < 25, got 25"),
        ({"max_seq_len": 9.5}, "max_seq_len: expected an integer, got 9.5"),
        ({"max_seq_len": 1}, "max_seq_len: expected 2 <= max_seq_len < 25, got 1"),
        ({"num_blocks": 0}, "num_blocks: expected num_blocks >= 1, got 0"),
        ({"num_slots": 0}, "num_slots: expected num_slots >= 1, got 0"),
        ({"table": BlockTable(2, 4, 9)}, "table: expected 3 layers, got 4"),
        ({"pool": BlockPool(9), "num_blocks": 8}, "pool: expected at most 8 blocks, got 9"),
        (
            {"cache": PagedKVCache(FakeModel().kv_layout(8).__class__(8, 2, 16, torch.float32), 9)},
            "cache: expected KVLayout.*, got KVLayout.*",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        fake_engine(**options)


def test_blocks_taken_by_somebody_else_are_an_error_and_not_a_hang():
    engine = fake_engine(num_blocks=3 * NUM_LAYERS)
    request = engine.submit([1] * 9, 2)
    taken = engine.pool.allocate(1)
    with pytest.raises(OutOfBlocks):
        engine.run()
    engine.pool.release(taken)
    engine.run()
    assert request.tokens == text_of([1] * 9, 2)


# Cancelling


def test_cancel_in_every_state():
    engine = fake_engine(num_slots=1)
    running, queued, kept = (engine.submit([i, 2], 9) for i in (1, 3, 4))
    engine.step()
    engine.cancel(running)
    engine.cancel(queued)
    assert (running.finish_reason, queued.finish_reason) == ("cancelled", "cancelled")
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.run()
    assert kept.tokens == text_of([4, 2], 9)
    engine.cancel(kept)
    assert kept.finish_reason == "length"
    assert running.tokens == text_of([1, 2], 1)
    assert (queued.tokens, list(engine.stream(queued))) == ([], [])
    engine.check_integrity()


def test_cancelling_a_preempted_request():
    engine = fake_engine(2, 5 * NUM_LAYERS, events=[])
    first, second = engine.submit([1, 2, 3, 4], 12), engine.submit([5, 6, 7, 8], 12)
    while ("preempt", 1) not in slot_actions(engine):
        engine.step()
    engine.cancel(second)
    engine.run()
    assert first.tokens == text_of(first.prompt, 12)
    assert second.tokens == text_of(second.prompt, 12)[: len(second.tokens)]
    engine.check_integrity()


def test_the_callback_may_cancel_and_submit():
    def stop_after_three(request, token):
        if len(request.tokens) == 3:
            engine.cancel(request)
            if request.id < 2:
                followers.append(engine.submit([token], 2))

    followers = []
    engine = fake_engine(on_token=stop_after_three)
    requests = [engine.submit([1, 2], 9), engine.submit([3], 9)]
    engine.run()
    for request in requests:
        assert request.tokens == text_of(request.prompt, 3)
        assert request.finish_reason == "cancelled"
    assert [follower.finish_reason for follower in followers] == ["length", "length"]
    engine.check_integrity()


@pytest.mark.parametrize("method", ["cancel", "stream"])
def test_a_request_of_another_engine_is_refused(method):
    mine, other = fake_engine(), fake_engine()
    request = other.submit([1], 5)
    mine.submit([2], 5)
    with pytest.raises(ValueError, match="request: expected one of this engine, got request 0"):
        list(getattr(mine, method)(request) or ())
    other.step()
    with pytest.raises(ValueError, match="request: expected one of this engine, got request 0"):
        list(getattr(mine, method)(request) or ())
    assert request.state == "running"
    with pytest.raises(ValueError, match="request: expected what submit gave, got 0"):
        list(getattr(mine, method)(0) or ())


# A step that raises


class FailsAt:
    """Raises at the n-th call, once; otherwise does what `function` does."""

    def __init__(self, function, n):
        self.function, self.calls_left = function, n

    def __call__(self, *args, **kwargs):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("failed on purpose")
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 15])
@pytest.mark.parametrize("where", ["attention", "prefill", "assign_layers"])
def test_a_step_that_raises_chooses_no_token_and_loses_no_block(where, n):
    model, table = FakeModel(), BlockTable(2, NUM_LAYERS, 6)
    attention = FailsAt(reference.gathered_attention, n if where == "attention" else 0)
    if where == "prefill":
        model.prefill = FailsAt(model.prefill, min(n, len(PROMPTS)))
    if where == "assign_layers":
        table.assign_layers = FailsAt(table.assign_layers, n)
    engine = fake_engine(num_blocks=8 * NUM_LAYERS, model=model, table=table, attention=attention)
    requests = [engine.submit(prompt, 8, **DRAWN) for prompt in PROMPTS]
    num_failures = 0
    while engine.scheduler.queue or engine.scheduler.running:
        before = [list(request.tokens) for request in requests]
        try:
            engine.step()
        except RuntimeError:
            num_failures += 1
            assert [request.tokens for request in requests] == before
        engine.check_integrity()
    assert num_failures == 1
    engine.check_integrity()
    for request in requests:
        assert request.tokens == text_of(request.prompt, 8, request.sampling)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_callback_that_raises_leaves_the_step_done():
    engine = fake_engine(on_token=FailsAt(lambda *_: None, 3))
    requests = [engine.submit([1, 2], 5), engine.submit([3], 5)]
    engine.step()
    with pytest.raises(RuntimeError):
        engine.step()
    assert [len(request.tokens) for request in requests] == [2, 2]
    engine.run()
    for request in requests:
        assert request.tokens == text_of(request.prompt, 5)


# Parts of one's own


class QueuePool:
    """A reader's pool: first in, first out."""

    def __init__(self, num_blocks):
        self.num_blocks, self.free_blocks = num_blocks, list(range(num_blocks))

    num_free = property(lambda self: len(self.free_blocks))

    def allocate(self, n):
        taken, self.free_blocks = self.free_blocks[:n], self.free_blocks[n:]
        return taken

    def release(self, blocks):
        self.free_blocks = self.free_blocks + list(blocks)

    def check_integrity(self):
        assert len(set(self.free_blocks)) == len(self.free_blocks)


class SlowTable(BlockTable):
    """A reader's table: one entry at a time."""

    def assign_layers(self, slot, logical_block, blocks):
        for layer, block in enumerate(blocks):
            self.assign(slot, layer, logical_block, block)


def own_attention(q, cache, table, seq_lens, active_slots, layer):
    """A reader's attention: the plain signature and nothing more."""
    return reference.gathered_attention(q, cache, table, seq_lens, active_slots, layer)


def test_a_readers_own_parts_say_the_same_text():
    model = Llama.random(SMALL, seed=1)
    texts = []
    for own in (False, True):
        parts = {}
        if own:
            cache = PagedKVCache(model.kv_layout(4), 24)
            table = SlowTable(3, SMALL.num_layers, 8)
            parts = {"pool": QueuePool(24), "table": table, "cache": cache}
            parts["attention"] = own_attention
        engine = Engine(model, 3, **parts) if own else Engine(model, 3, 24, block_size=4)
        requests = [engine.submit(prompt, 10) for prompt in PROMPTS]
        engine.run()
        engine.check_integrity()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_given_parts_decide_the_sizes():
    model = FakeModel()
    cache = PagedKVCache(model.kv_layout(2), 40)
    engine = fake_engine(cache=cache, table=BlockTable(5, NUM_LAYERS, 4))
    assert (engine.pool.num_blocks, engine.max_seq_len) == (40, 8)
    assert len(engine.scheduler.slots) == 5
    engine = fake_engine(pool=QueuePool(17))
    assert engine.cache.num_blocks == 17


# Events


def replay(events, num_blocks, num_slots):
    """Yield (step, table, free list) after each step, from the events alone."""
    pool, table = BlockPool(num_blocks), BlockTable(num_slots, NUM_LAYERS, 6)
    for step in range(1, events[-1].step + 1):
        returned = []
        for event in (event for event in events if event.step == step):
            if isinstance(event, SlotEvent) and event.action != "admit" and event.slot != -1:
                places = {block: place for place, block in np.ndenumerate(table.host[event.slot])}
                blocks = table.release_slot(event.slot)
                pool.release(blocks)
                returned += [(event.slot, *places[block], block) for block in blocks]
            elif isinstance(event, BlockEvent) and event.action == "release":
                assert event[3:] == returned.pop(0)
            elif isinstance(event, BlockEvent):
                assert pool.allocate(1) == [event.physical_block]
                table.assign(*event[3:])
        assert not returned
        yield step, table.host.copy(), list(pool.free_blocks)


def test_events_replay_to_the_same_table_and_free_list_at_every_step():
    engine = fake_engine(3, 7 * NUM_LAYERS, events=[])
    requests = [engine.submit(prompt, 9) for prompt in PROMPTS]
    states = {}
    while engine.scheduler.queue or engine.scheduler.running:
        if engine.scheduler.step == 5:
            engine.cancel(requests[6])
        engine.step()
        state = engine.table.host.copy(), list(engine.pool.free_blocks)
        states[engine.scheduler.step] = state
    assert {"preempt", "cancel", "finish"} <= {action for action, _ in slot_actions(engine)}
    steps = 0
    for step, host, free_blocks in replay(engine.events, 7 * NUM_LAYERS, 3):
        assert (host == states[step][0]).all()
        assert free_blocks == states[step][1]
        steps += 1
    assert steps == len(states)


def test_events_tell_tokens_with_their_positions_and_are_json():
    engine = fake_engine(events=[])
    requests = [engine.submit([1, 2, 3], 4), engine.submit([4], 2)]
    engine.run()
    tokens = [event for event in engine.events if isinstance(event, TokenEvent)]
    for request in requests:
        own = [event for event in tokens if event.request == request.id]
        assert [event.token for event in own] == request.tokens
        first = len(request.prompt)
        assert [event.position for event in own] == [*range(first, first + len(own))]
    assert [event.step for event in tokens] == [1, 1, 2, 2, 3, 4]
    records = [event._asdict() for event in engine.events]
    assert json.loads(json.dumps(records)) == records


def test_events_are_off_unless_a_list_is_given():
    engine = fake_engine()
    engine.submit([1], 3)
    engine.run()
    assert engine.events is None


# Integrity


def lose_a_block(engine):
    engine.pool.allocate(1)


def share_a_block(engine):
    engine.table.device[1, 0, 0] = engine.table.device[0, 0, 0]


def free_a_block_in_use(engine):
    engine.pool.release([engine.table.lookup(0, 1, 0)])


def forget_a_layer(engine):
    engine.table.device[0, 2, 0] = -1


def leave_a_finished_row(engine):
    engine.scheduler.slots[1] = None


def fill_a_row_too_far(engine):
    engine.table.assign_layers(0, 3, engine.pool.allocate(NUM_LAYERS))


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        share_a_block,
        free_a_block_in_use,
        forget_a_layer,
        leave_a_finished_row,
        fill_a_row_too_far,
    ],
)
def test_check_integrity_sees(damage):
    engine = fake_engine()
    engine.submit([1, 2], 5)
    engine.submit([3, 4], 5)
    engine.step()
    engine.check_integrity()
    damage(engine)
    with pytest.raises(ValueError, match=r"expected .*, got"):
        engine.check_integrity()


class EngineMachine(RuleBasedStateMachine):
    """Random submit, step and cancel in a pool so small that requests are often preempted."""

    def __init__(self):
        super().__init__()
        self.engine = fake_engine(3, 4 * NUM_LAYERS + 1, block_size=2, events=[])
        self.requests = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
        max_new_tokens=st.integers(1, 4),
        drawn=st.booleans(),
        seed=st.integers(0, 2**63 - 1),
    )
    def submit(self, prompt, max_new_tokens, drawn, seed):
        options = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": seed} if drawn else {}
        self.requests.append(self.engine.submit(prompt, max_new_tokens, **options))

    @rule(length=st.integers(1, 8))
    def refuse(self, length):
        with pytest.raises(ValueError, match="request: expected at most 13 blocks"):
            self.engine.submit([1] * length, 9 - length)

    @rule()
    def step(self):
        self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        self.engine.cancel(self.requests[choice % len(self.requests)])

    @invariant()
    def blocks_are_free_or_owned_once(self):
        self.engine.check_integrity()

    @invariant()
    def the_running_are_older_than_the_queued(self):
        running = [request.id for request in self.engine.scheduler.running]
        queued = [request.id for request in self.engine.scheduler.queue]
        assert running + queued == sorted(running + queued)

    def teardown(self):
        self.engine.run()
        self.engine.check_integrity()
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        for request in self.requests:
            text = text_of(request.prompt, request.max_new_tokens, request.sampling)
            if request.finish_reason == "cancelled":
                text = text[: len(request.tokens)]
            assert request.tokens == text


EngineMachine.TestCase.settings = settings(
    max_examples=80,  # of which some never submit
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestEngineStateful = EngineMachine.TestCase


# Real models


def test_a_random_llama_says_the_same_alone_together_and_preempted():
    model = Llama.random(SMALL, seed=3)
    alone = []
    for i, prompt in enumerate(PROMPTS):
        engine = Engine(model, 1, block_size=4)
        request = engine.submit(prompt, 16, temperature=0.8, seed=i)
        engine.run()
        alone.append(request.tokens)
    engine = Engine(model, 3, 8 * SMALL.num_layers, block_size=4, events=[])
    together = [engine.submit(p, 16, temperature=0.8, seed=i) for i, p in enumerate(PROMPTS)]
    engine.run()
    assert "preempt" in {action for action, _ in slot_actions(engine)}
    assert [request.tokens for request in together] == alone
    engine.check_integrity()


@pytest.mark.parametrize("layer", range(SMALL.num_layers))
@pytest.mark.parametrize("view", ["k_view", "v_view"])
def test_a_nan_in_one_live_block_changes_the_answer(layer, view):
    model = Llama.random(SMALL, seed=3)
    answers = []
    for poison in (False, True):
        engine = Engine(model, 1, 20, block_size=4)
        request = engine.submit([1, 2, 3, 4, 5], 9)
        engine.step()
        if poison:
            block = engine.table.lookup(request.slot, layer, 0)
            getattr(engine.cache, view)()[block, 2, 0, 7] = torch.nan
        engine.run()
        answers.append(request.tokens)
    assert answers[0] != answers[1]


def test_nan_in_every_free_block_changes_nothing():
    model = Llama.random(SMALL, seed=3)
    answers = []
    for poison in (0.0, torch.nan):
        engine = Engine(model, 2, 24, block_size=4)
        engine.cache.buffer.fill_(poison)
        requests = [engine.submit(prompt, 9) for prompt in PROMPTS]
        engine.run()
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]
    assert {len(tokens) for tokens in answers[1]} == {9}


CHATS = [
    "What is the capital of Japan?",
    "Write a haiku about the sea.",
    "Name three primary colours.",
    "Explain in one sentence why the sky is blue.",
    "What is 12 times 12?",
    "Tell me a short story about a dog and a robot.",
]
MAX_NEW_TOKENS = 32


@pytest.fixture(scope="module")
def demo():
    return Llama.from_checkpoint(device="cpu"), Tokenizer.from_checkpoint()


@pytest.fixture(scope="module")
def golden(demo):
    """Greedy texts of transformers, in float32, one prompt at a time."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint.locate(), dtype=torch.float32)
    texts = []
    for chat in CHATS:
        ids = demo[1].chat(chat)
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "pad_token_id": 2}
        output = model.generate(torch.tensor([ids]), attention_mask=mask, **options)
        texts.append(output[0, len(ids) :].tolist())
    return texts


@pytest.mark.parametrize("way", ["one at a time", "two slots", "preempted"])
def test_the_demo_model_says_what_transformers_says(demo, golden, way):
    model, tokenizer = demo
    # For "preempted": blocks for the longest request, not for two of them.
    num_blocks = 6 * model.config.num_layers if way == "preempted" else None
    num_slots = 1 if way == "one at a time" else 2
    engine = Engine(model, num_slots, num_blocks, max_seq_len=256, events=[])
    requests = [engine.submit(tokenizer.chat(chat), MAX_NEW_TOKENS) for chat in CHATS]
    engine.run()
    assert [request.tokens for request in requests] == golden
    assert ("preempt" in {action for action, _ in slot_actions(engine)}) == (way == "preempted")
    engine.check_integrity()
    assert tokenizer.decode(requests[0].tokens) == "The capital of Japan is Tokyo."
