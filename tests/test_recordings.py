"""Recordings: what is saved comes back, and what is not a recording is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from fake_model import FakeModel

from pagedlab import Engine, recordings
from pagedlab.engine import BlockEvent, SlotEvent, TokenEvent
from pagedlab.recordings import Recording, RecordingError, decode_events, encode_events
from pagedlab.run_recorder import RunRecorder


@pytest.fixture
def engine():
    engine = Engine(FakeModel(), num_slots=2, num_blocks=36, block_size=4, events=[])
    draw = random.Random(5)
    for length in (3, 9, 1, 8):
        engine.submit([draw.randrange(29) for _ in range(length)], 6)
    return engine


@pytest.fixture
def recording(engine):
    recorder = RunRecorder(engine, layer=2)
    recorder.run()
    return Recording("decode", recorder.data())


def test_a_recording_comes_back_as_it_was(recording, engine, tmp_path):
    path = tmp_path / "run.json"
    recording.save(path)
    loaded = recordings.load(path)
    assert loaded == recording
    assert loaded.events == engine.events
    assert {type(event) for event in loaded.events} == {BlockEvent, SlotEvent, TokenEvent}
    first = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == first
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_provenance_says_where_when_and_with_what(recording):
    made = recording.provenance
    assert set(made) == set(recordings.PROVENANCE)
    assert made["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert made["kernel_hash"] == recordings.kernel_hash()
    assert made["device"] in recording.describe()
    assert made["date"][:10] in recording.describe()


def test_a_changed_kernel_marks_a_recording_outdated(recording, monkeypatch, tmp_path):
    assert not recording.outdated
    assert "outdated" not in recording.describe()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/by_token.py").write_text("a kernel")
    monkeypatch.setattr(recordings, "PACKAGE", tmp_path)
    assert recording.outdated
    assert "outdated" in recording.describe()
    first = recordings.kernel_hash()
    (tmp_path / "kernels/by_token.py").write_text("another kernel")
    second = recordings.kernel_hash()
    assert second != first
    for name in recordings.GRAPH_KERNELS:  # a run without CUDA graphs has nothing of them
        before = recordings.kernel_hash(graphs=True)
        (tmp_path / "kernels" / name).write_text("a kernel")
        assert recordings.kernel_hash(graphs=True) != before
    assert recordings.kernel_hash() == second


def test_the_kernels_of_graphs_are_there():
    kernels = Path(recordings.__file__).parent / "kernels"
    assert all((kernels / name).is_file() for name in recordings.GRAPH_KERNELS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content.pop("data"), "expected fields"),
        (lambda content: content.update(more=1), "expected fields"),
        (lambda content: content.update(format=99), "expected format 1, got 99"),
        (lambda content: content["provenance"].pop("device"), "provenance: expected fields"),
        (lambda content: content.update(provenance="a GPU"), "provenance: expected fields"),
        (lambda content: content["provenance"].update(date=5), "date: expected str, got int"),
        (
            lambda content: content["provenance"].update(commit=None),
            "commit: expected str, got None",
        ),
        (lambda content: content["provenance"].update(versions="3"), "versions: expected dict"),
        (lambda content: content.update(kind=[1]), "kind: expected str, got list"),
        (lambda content: content.update(data=None), "data: expected dict, got NoneType"),
    ],
)
def test_other_fields_are_refused_by_name(recording, tmp_path, change, text):
    path = tmp_path / "run.json"
    recording.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordingError, match=text) as caught:
        recordings.load(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(RecordingError, match="got 'nowhere'"):
        recordings.load("nowhere")
    for text in ("", "{", "[1, 2]", "null", 200_000 * "[" + 200_000 * "]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RecordingError, match=r"run\.json: expected"):
            recordings.load(tmp_path / "run.json")


def test_a_recording_that_is_not_finite_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Recording("times", {"ms": [float("nan")]}).save(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


def test_events_pass_through_json_unchanged(engine):
    engine.run()
    rows = json.loads(json.dumps(encode_events(engine.events)))
    assert decode_events(rows) == engine.events
    assert encode_events(rows) == rows


@pytest.mark.parametrize(
    "event",
    [
        "allocate",
        7,
        ["allocate", 0, 0],
        ["invent", 0, 0, 0, 0],
        ["token", 0, 0, 0, 1, "x"],
        {"step": 0, "action": "admit"},
        [],
    ],
)
def test_what_is_no_event_is_refused(event):
    with pytest.raises(RecordingError, match="expected a block, slot or token event"):
        encode_events([event])


def test_steps_that_run_backwards_are_refused():
    with pytest.raises(ValueError, match="steps in order, got 1 after 2"):
        encode_events([["admit", 2, 0, 0, 3], ["admit", 1, 1, 1, 3]])


def test_a_recorder_keeps_the_rows_that_the_cache_held(engine):
    recorder = RunRecorder(engine, layer=1)
    seen = {}
    while not recorder.idle:
        recorder.step()
        for request in engine.scheduler.running:
            k, v = engine.cache.gather(engine.table, request.slot, 1, request.num_cached)
            seen[request.id] = torch.stack([k, v], 1).flatten(2)
    values = torch.frombuffer(recorder.rows.values, dtype=torch.float32)
    raw = torch.frombuffer(recorder.rows.raw, dtype=torch.float32)
    assert torch.equal(values, raw)
    rows = values.view(-1, 2, 16)
    kept = {}
    for place in recorder.rows.index:
        assert place["layer"] == 1
        kept.setdefault(place["sequence"], []).append(
            rows[place["row"] : place["row"] + place["count"]]
        )
    assert len(seen) == 4
    for request, held in seen.items():
        assert torch.equal(torch.cat(kept[request]), held)
    assert len(recorder.step_ms) == engine.scheduler.step


def test_a_recorder_refuses_an_engine_that_does_not_log():
    with pytest.raises(ValueError, match="one that logs"):
        RunRecorder(Engine(FakeModel(), num_slots=1, block_size=4))
    with pytest.raises(ValueError, match="0 <= layer < 3, got 3"):
        RunRecorder(Engine(FakeModel(), num_slots=1, block_size=4, events=[]), layer=3)


def test_without_a_gpu_a_recording_is_loaded_not_run(recording, tmp_path, monkeypatch):
    recording.save(tmp_path / "run.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recordings.run_or_load(tmp_path / "run.json", lambda: pytest.fail("ran")) == recording
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert recordings.run_or_load("nowhere", lambda: recording) is recording
