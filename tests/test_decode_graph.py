"""The engine's fused decode, uncaptured and interpreted: the same texts, blocks and promises."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pagedlab import BlockPool, BlockTable, Engine, Llama, LlamaConfig, attention, decode_graph
from pagedlab.attention import AttentionPlan
from pagedlab.decode_graph import DecodeGraph
from pagedlab.engine import SlotEvent
from pagedlab.llama import Layer

torch.set_num_threads(1)
PROMPTS = [[5], [3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5, 8], [9, 7], [9, 3, 2, 3], [8, 4, 6]]
SETTINGS = [
    {},
    {"temperature": 0.8, "seed": 2**63 - 1},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "seed": 4},
]
CONFIG = LlamaConfig(
    hidden_size=40,
    intermediate_size=24,
    num_layers=2,
    num_q_heads=3,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=29,
    max_seq_len=64,
    tie_word_embeddings=True,
)


def unpacked(model):
    """The model with matrices that kernels can read, as they are on a GPU."""
    plain = (w.to_dense() if w.is_mkldnn else w for layer in model.layers for w in layer)
    model.layers = [Layer(*weights) for weights in zip(*[plain] * len(Layer._fields), strict=True)]
    model.head = model.head.to_dense() if model.head.is_mkldnn else model.head
    return model


@pytest.fixture(scope="module")
def model():
    return unpacked(Llama.random(CONFIG, seed=3))


class Uncaptured(DecodeGraph):
    """Runs its step where a graph would be replayed."""

    def _capture(self, size):
        self.graphs[size] = [SimpleNamespace(replay=lambda: self.run(size)), None]

    def run(self, size):
        self.graphs[size][1] = self._step(size)


def unchecked_plan(seq_lens, *_):
    return AttentionPlan(len(seq_lens), None, None)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    """A CPU's memory is pinned and its kernels are done when they are launched. As on a GPU, what
    does not fit is left to them: a row without blocks is NaN."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    for module in (attention, decode_graph):
        monkeypatch.setattr(module, "attention_plan", unchecked_plan)


def with_graph(model, num_slots, num_blocks=None, max_seq_len=64, **options):
    """An engine as `graphs=True` makes it, on a CPU; its table has a copy that must be kept up."""
    max_blocks = -(-max_seq_len // 4)
    table = BlockTable(num_slots, model.config.num_layers, max_blocks, shared=False)
    options |= {"block_size": 4, "max_seq_len": max_seq_len, "table": table}
    engine = Engine(model, num_slots, num_blocks, **options)
    engine.cache.buffer.fill_(torch.nan)
    engine.graph = Uncaptured(model, engine.cache, engine.table)
    engine.scheduler.ahead = 1
    return engine


def alone(model, prompt, max_new_tokens, **settings):
    engine = Engine(model, 1, block_size=4)
    request = engine.submit(prompt, max_new_tokens, **settings)
    engine.run()
    return request.tokens, request.finish_reason


@pytest.mark.parametrize("num_slots", [1, 3])
def test_each_text_is_what_the_eager_engine_says(model, num_slots):
    """Greedy, drawn and filtered requests share a batch; lengths differ, slots are reused."""
    engine = with_graph(model, num_slots)
    settings = [SETTINGS[i % 3] for i in range(len(PROMPTS))]
    requests = [engine.submit(p, 2 + i % 4, **settings[i]) for i, p in enumerate(PROMPTS)]
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        engine.check_integrity()
    for i, request in enumerate(requests):
        wanted = alone(model, PROMPTS[i], 2 + i % 4, **settings[i])
        assert (request.tokens, request.finish_reason) == wanted
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_step_is_launched_ahead_while_all_go_on_and_runs_once(model):
    engine = with_graph(model, 2)
    steps = []
    step = engine.graph._step
    engine.graph._step = lambda size: (steps.append(engine.scheduler.step), step(size))[1]
    requests = [engine.submit([1, 2], 6), engine.submit([3], 9)]
    engine.run()
    assert [len(request.tokens) for request in requests] == [6, 9]
    # the first prefills; the second launches itself and the third; the sixth ends a request, whose
    # row stays for the seventh; then a smaller graph suffices
    assert steps == [2, 2, 3, 4, 5, 6, 8, 8]
    assert len(steps) == engine.scheduler.step - 1


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
def test_rows_of_ended_requests_do_no_harm_while_others_wait_for_their_slots(model):
    """With together = 3 two slots stay free for some steps, and then others' blocks are in them."""
    engine = with_graph(model, 4, 11 * CONFIG.num_layers)
    engine.scheduler.together = 3
    lengths = [3, 5, 14, 20, 6, 9, 4, 13, 7]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(lengths))]
    launches, launch = [], engine.graph._launch
    engine.graph._launch = lambda rows: (launches.append(engine.scheduler.step), launch(rows))
    requests = [
        engine.submit(p, n, temperature=0.7 * (n % 2), seed=n)
        for p, n in zip(prompts, lengths, strict=True)
    ]
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        engine.check_integrity()
    assert len(launches) < engine.scheduler.step / 2
    for request, prompt, n in zip(requests, prompts, lengths, strict=True):
        assert request.tokens == alone(model, prompt, n, temperature=0.7 * (n % 2), seed=n)[0]


def test_an_eos_wastes_the_step_ahead_and_nothing_else(model):
    texts = [alone(model, prompt, 12)[0] for prompt in PROMPTS[:3]]
    eos = texts[1][4]
    ending = unpacked(Llama.random(dataclasses.replace(CONFIG, eos_token_ids=(eos,)), seed=3))
    engine = with_graph(ending, 3)
    requests = [engine.submit(prompt, 12) for prompt in PROMPTS[:3]]
    follower = engine.submit(PROMPTS[3], 12)
    while engine.scheduler.queue or engine.scheduler.running:
        engine.step()
        engine.check_integrity()
    for request, text in zip(requests, texts, strict=True):
        assert request.tokens == text[: text.index(eos) + 1 if eos in text else None]
    assert follower.tokens == alone(ending, PROMPTS[3], 12)[0]


def test_preempted_and_cancelled_requests_leave_the_others_alone(model):
    """Just enough blocks for one long request; every kind of change between two steps."""
    engine = with_graph(model, 3, 7 * CONFIG.num_layers, events=[])
    requests = [engine.submit(p, 14, temperature=0.8, seed=i) for i, p in enumerate(PROMPTS)]
    while engine.scheduler.queue or engine.scheduler.running:
        if engine.scheduler.step == 9:
            engine.cancel(requests[1])
        engine.step()
        engine.check_integrity()
    assert "preempt" in {e.action for e in engine.events if isinstance(e, SlotEvent)}
    for i, request in enumerate(requests):
        text, _ = alone(model, PROMPTS[i], 14, temperature=0.8, seed=i)
        assert request.tokens == text[: len(request.tokens)]
        assert len(request.tokens) == 14 or request.finish_reason == "cancelled"
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("max_seq_len", [8, 9])
def test_the_context_limit_ends_a_text_at_a_full_block_and_after(model, max_seq_len):
    engine = with_graph(model, 1, max_seq_len=max_seq_len, num_blocks=3 * CONFIG.num_layers)
    request = engine.submit([1, 2, 3], 100)
    engine.run()
    assert request.num_tokens == max_seq_len
    assert request.finish_reason == "context"


def test_logits_that_are_no_numbers_end_their_own_request_only(model):
    engine = with_graph(model, 2)
    first, second = engine.submit([1, 2, 3], 8), engine.submit([4, 5], 8)
    engine.step()
    engine.cache.k_view()[engine.table.lookup(first.slot, 1, 0)] = torch.nan
    engine.run()
    assert (first.finish_reason, len(first.tokens)) == ("invalid", 1)
    assert second.tokens == alone(model, [4, 5], 8)[0]
    engine.check_integrity()


def test_a_step_that_raises_is_done_again(model):
    class Failing(BlockPool):
        calls = 0

        def allocate(self, n):
            self.calls += 1
            if self.calls == 6:
                raise RuntimeError("failed on purpose")
            return super().allocate(n)

    engine = with_graph(model, 2, pool=Failing(40))
    requests = [engine.submit(prompt, 12) for prompt in PROMPTS[1:3]]
    with pytest.raises(RuntimeError):
        engine.run()
    engine.check_integrity()
    engine.run()
    assert [request.tokens for request in requests] == [
        alone(model, prompt, 12)[0] for prompt in PROMPTS[1:3]
    ]


def test_its_logits_are_the_eager_models(model):
    """Batches of one row, which matvec takes, and of several; float16 in its tolerance."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
        typed = unpacked(Llama.random(CONFIG, seed=3, dtype=dtype))
        for prompts in ([[5, 6, 7]], [[5, 6, 7], [8], [9] * 11]):
            engine = with_graph(typed, len(prompts))
            requests = [engine.submit(prompt, 2) for prompt in prompts]
            engine.step()
            for request in requests:
                assert engine.scheduler.slots[request.slot] is request
            lengths = torch.tensor([r.num_tokens for r in requests], dtype=torch.int32)
            slots = torch.tensor([r.slot for r in requests], dtype=torch.int32)
            last = [request.tokens[-1] for request in requests]
            rows = (engine.cache, engine.table, lengths, slots)
            expected = typed.decode(last, *rows)
            engine.step()
            logits = engine.graph.graphs[len(prompts)][1].float()
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def test_graphs_need_a_gpu_and_the_packages_attention(model):
    with pytest.raises(ValueError, match=r"^graphs: expected a CUDA device and .*, got cpu"):
        Engine(model, graphs=True)


@pytest.mark.parametrize(
    ("num_slots", "sizes"),
    [(1, {1}), (2, {1, 2}), (6, {1, 2, 4, 6}), (64, {1, 2, 4, 8, 16, 32, 64})],
)
def test_batch_sizes_that_are_captured(model, num_slots, sizes):
    engine = Engine(model, num_slots, 8)
    graph = Uncaptured(model, engine.cache, engine.table)
    assert set(graph.graphs) == sizes
    assert all(graph._size(n) >= n for n in range(1, num_slots + 1))
