"""The engine's GPU benchmark: its parts on a CPU, on a tiny model without graphs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from pagedlab import Engine, LlamaConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONFIG = LlamaConfig(
    hidden_size=40,
    intermediate_size=24,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=53,
    max_seq_len=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))  # for its neighbours
    spec = importlib.util.spec_from_file_location("bench_engine", BENCHMARKS / "engine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(bench):
    return bench.random_llama(CONFIG, "cpu", torch.float32)


def test_a_steady_rate_counts_every_slot(bench, model):
    engine = Engine(model, num_slots=3, max_seq_len=32)
    assert bench.steady_rate(engine, rounds=1, start=5, steps=20, temperature=1.0) > 0
    assert engine.num_submitted == 2 * 3
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_load_ends_and_its_blocks_are_counted(bench, model):
    load = bench.Load(num_requests=9, mean_prompt=5, mean_answer=16, max_seq_len=32)
    engine = Engine(model, num_slots=4, num_blocks=2 * 9, block_size=4, max_seq_len=32)
    row = bench.measure_load(engine, load, steady=1e9)
    assert {"name", "batch", "context", "tokens_per_s"} <= set(row)
    assert row["num_tokens"] == sum(r.max_new_tokens for r in bench.draw_requests(load))
    assert 1 < row["running"] <= 4
    assert 0 < row["blocks_in_use"] <= 1
    assert 0 <= row["wasted_tokens"] < 4
    assert row["contiguous_running"] == 1
    assert row["preemptions"] > 0


def test_texts_under_load_are_held_against_each_alone(bench, model):
    prompts = [bench.random_ids(53, 3 + i, seed=i) for i in range(6)]
    engine = Engine(model, num_slots=3, num_blocks=2 * 9, block_size=4, max_seq_len=24)
    row = bench.check_texts(engine, prompts, 12)
    assert (row["requests"], row["near_ties"]) == (6, 0)
    other = bench.random_llama(dataclasses.replace(CONFIG, rope_theta=3.0), "cpu", torch.float32)
    engine = Engine(model, num_slots=3, block_size=4, max_seq_len=24)
    engine.model, whole = other, engine.run
    engine.run = lambda: (whole(), setattr(engine, "model", model))  # another model under load
    with pytest.raises(SystemExit, match=r"request \d+: token \d+: expected \d+, got \d+; the log"):
        bench.check_texts(engine, prompts, 12)


def test_rows_of_other_parts_are_kept(bench, tmp_path):
    path = tmp_path / "engine.json"
    old = [bench.row("a", 1, 5.0), bench.row("a", 64, 5.0), bench.row("b", 1, 5.0)]
    path.write_text(json.dumps(old))
    merged = bench.merge([bench.row("a", 1, 6.0)], path)
    assert [(row["name"], row["batch"], row["tokens_per_s"]) for row in merged] == [
        ("a", 64, 5.0),
        ("b", 1, 5.0),
        ("a", 1, 6.0),
    ]


def test_its_shape_is_llama_3_2_1b_s(bench):
    c = bench.LLAMA_CONFIG
    head = c.vocab_size * c.hidden_size
    q_dim, kv_dim = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (2 * q_dim + 2 * kv_dim + 3 * c.intermediate_size + 2)
    assert 2 * (head + c.num_layers * layer + c.hidden_size) == pytest.approx(2.472e9, rel=1e-3)
