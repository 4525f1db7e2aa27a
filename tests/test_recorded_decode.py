"""The recorded GPU decode, held against the package on a CPU."""

import base64
import hashlib

import numpy as np
import pytest
import torch

from pagedlab import BlockPool, BlockTable, KVLayout, Llama, PagedKVCache, Tokenizer, recordings
from pagedlab.engine import BlockEvent, TokenEvent

LOGIT_TOLERANCE = 0.6  # bfloat16 on a GPU against float32 on a CPU; logits reach 30
VALUE_TOLERANCE = 0.05  # of the largest value of a row


@pytest.fixture(scope="module")
def recording():
    return recordings.load("decode")


@pytest.fixture(scope="module")
def data(recording):
    return recording.data


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_it_was_made_on_an_nvidia_gpu_by_the_triton_kernels(recording):
    provenance = recording.provenance
    assert "NVIDIA" in provenance["device"]
    assert float(provenance["capability"]) >= 7.5
    assert provenance["versions"]["triton"][0].isdigit()
    assert recording.data["layout"]["dtype"] == "bfloat16"
    assert len(recording.provenance["commit"]) == 40


def test_it_is_under_a_megabyte():
    assert recordings.find("decode").stat().st_size < 1_000_000


def test_a_changed_kernel_marks_it_outdated(recording, monkeypatch):
    monkeypatch.setattr(recordings, "kernel_hash", lambda graphs=False: "0" * 16)
    assert recording.outdated
    assert "outdated" in recording.describe()
    made_with = recording.provenance["kernel_hash"]
    monkeypatch.setattr(recordings, "kernel_hash", lambda graphs=False: made_with)
    assert not recording.outdated


def test_its_events_replay_to_the_recorded_tables_and_free_lists(recording, data):
    size = data["size"]
    pool = BlockPool(size["num_blocks"])
    table = BlockTable(size["num_slots"], size["num_layers"], size["max_blocks_per_seq"])
    events = recording.events
    for step, recorded in enumerate(data["states"], start=1):
        released = []
        for event in [event for event in events if event.step == step]:
            if not isinstance(event, BlockEvent):
                continue
            place = event.slot, event.layer, event.logical_block
            if event.action == "allocate":
                assert pool.allocate(1) == [event.physical_block]
                table.assign(*place, event.physical_block)
            else:
                assert table.lookup(*place) == event.physical_block
                pool.release([event.physical_block])
                released.append(event)
                last = size["num_layers"] * (1 + max(e.logical_block for e in released))
                if len(released) == last:
                    blocks = [e.physical_block for e in released]
                    assert table.release_slot(event.slot) == blocks
                    released = []
        assert not released
        pool.check_integrity()
        assert pool.num_free == recorded["num_free"]
        assert pool.free_blocks[-4:][::-1] == recorded["next_free"]
        assert sha256(str(pool.free_blocks)) == recorded["free_blocks_sha256"]
        assert sha256(str(table.host.tolist())) == recorded["table_sha256"]
    assert pool.num_free == size["num_blocks"]


def test_three_prompts_ran_in_two_slots_and_one_slot_and_its_blocks_came_back(recording, data):
    events = recording.events
    assert len(data["prompts"]) == 3
    slots = {event.request: event.slot for event in events if isinstance(event, TokenEvent)}
    assert sorted(slots) == [0, 1, 2]
    assert len(set(slots.values())) == 2
    allocated = [e for e in events if isinstance(e, BlockEvent) and e.action == "allocate"]
    first, last = ({e.physical_block for e in allocated if e.request == r} for r in (0, 2))
    assert first & last


def test_its_tokens_are_its_text(data):
    tokenizer = Tokenizer.from_checkpoint()
    for number, (prompt, text) in enumerate(zip(data["prompts"], data["texts"], strict=True)):
        request = data["requests"][str(number)]
        assert request["prompt_ids"] == tokenizer.chat(prompt)
        assert tokenizer.decode(request["ids"]) == text
    assert data["texts"][0] == "The capital of Japan is Tokyo."


@pytest.fixture(scope="module")
def on_cpu(data):
    """Each request run again in float32 with the recorded tokens as its input.

    Returns: per request, logits [num_tokens, vocab_size] and the recorded layer's K and V
    [2, num_tokens, kv_dim].
    """
    model = Llama.from_checkpoint(device="cpu", dtype=torch.float32)
    results = {}
    for number, request in data["requests"].items():
        ids, start = request["prompt_ids"] + request["ids"], len(request["prompt_ids"])
        layout = model.kv_layout()
        num_blocks = layout.num_logical_blocks(len(ids)) * model.config.num_layers
        cache = PagedKVCache(layout, num_blocks)
        table = BlockTable(1, model.config.num_layers, layout.num_logical_blocks(len(ids)))
        pool = BlockPool(num_blocks)
        for logical_block in range(table.max_blocks_per_seq):
            table.assign_layers(0, logical_block, pool.allocate(model.config.num_layers))
        logits = [model.prefill(ids[:start], cache, table, 0)]
        slots = torch.tensor([0], dtype=torch.int32)
        for position in range(start, len(ids) - 1):
            lengths = torch.tensor([position + 1], dtype=torch.int32)
            logits.append(model.decode([ids[position]], cache, table, lengths, slots)[0])
        rows = cache.gather(table, 0, data["layer"], len(ids) - 1)
        results[number] = torch.stack(logits), torch.stack(rows).flatten(2)
    return results


def test_its_tokens_and_logits_agree_with_a_cpu(data, on_cpu):
    worst = 0.0
    for number, recorded in data["top_logits"].items():
        logits = on_cpu[number][0]
        ids = data["requests"][number]["ids"]
        assert len(recorded) == len(logits) == len(ids)
        for row, top, token in zip(logits, recorded, ids, strict=True):
            assert dict(zip(top["ids"], top["logits"], strict=True))[token] == top["logits"][0]
            assert row[token] > row.max() - LOGIT_TOLERANCE
            difference = (row[top["ids"]] - torch.tensor(top["logits"])).abs().max()
            worst = max(worst, float(difference))
    print(f"largest difference of a logit: {worst:.3f}")
    assert worst < LOGIT_TOLERANCE


def test_its_cache_bytes_agree_with_a_cpu(data, on_cpu):
    layout = data["layout"]
    raw = np.frombuffer(base64.b64decode(data["stored"]["raw"]), np.int16)
    stored = torch.from_numpy(raw.copy()).view(torch.bfloat16).float()
    stored = stored.view(-1, 2, layout["kv_dim"])
    compared = 0
    for entry in data["stored"]["rows"]:
        expected = on_cpu[str(entry["sequence"])][1]
        for i in range(entry["count"]):
            row, position = stored[entry["row"] + i], entry["start"] + i
            for section in range(2):
                theirs = expected[section, position]
                assert (row[section] - theirs).abs().max() < VALUE_TOLERANCE * theirs.abs().max()
                compared += 1
    assert compared > 200


def test_its_layout_is_the_models(data):
    layout = KVLayout(16, 3, 64, torch.bfloat16)
    names = ("block_size", "num_kv_heads", "head_dim", "kv_dim", "v_offset", "block_bytes")
    assert {name: data["layout"][name] for name in names} == {n: getattr(layout, n) for n in names}
