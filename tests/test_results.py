"""The benchmarks' own code on tiny inputs, and what they left in benchmarks/results."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from pagedlab import recordings
from pagedlab.recordings import PROVENANCE, Recording, provenance

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention  # noqa: E402
import copies  # noqa: E402
import figures  # noqa: E402
import peers  # noqa: E402
import record  # noqa: E402
import waste  # noqa: E402
from rows import save, slug  # noqa: E402

RECORDINGS = BENCHMARKS.parent / "book/recordings"
H200 = BENCHMARKS / "results/nvidia-h200"
RUNGS = ("by_token", "by_block", "grouped", "split_kv")


def load(name: str, folder: Path = H200) -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text())


def one_call(call, num_layers: int, calls: int) -> float:
    """A stand-in for the timer of CUDA graphs: one call, once a layer of the first two, in us."""
    start = time.perf_counter()
    for layer in range(min(2, num_layers)):
        call(layer)
    return (time.perf_counter() - start) * 1e6


@pytest.fixture(scope="module")
def ragged():
    case = attention.Case("2xragged", [5, 70], 6, 2, 16, 4, torch.float32)
    return attention.Setup(case, "cpu", rotated_bytes=0)


def test_every_rung_of_the_ladder_is_measured_and_right(ragged, capsys):
    rows = attention.measure(ragged, RUNGS, {}, one_call)
    assert [row["kernel"] for row in rows] == [*RUNGS, "append + split_kv in place"]
    assert all(row["rel_err"] < 1e-5 for row in rows)
    assert all(row["us"] > 0 and row["raw_read_us"] > 0 for row in rows)
    assert {"plan_us", "parameters"} <= set(rows[3])
    assert capsys.readouterr().out.count("2xragged") == len(rows)


def test_the_grouped_rung_splits_no_sequence(ragged):
    work = attention.whole_plan(ragged).work
    assert work.counts.tolist() == [0, 0]
    assert work.items.tolist() == [[0, 0, 0, 5], [1, 1, 0, 70]]


def test_torchs_attention_agrees_on_equal_lengths():
    setup = attention.Setup(attention.Case("2x8", [8, 8], 6, 2, 16, 4, torch.float32), "cpu", 0)
    for call in attention.sdpa_calls(setup).values():
        for layer in range(setup.num_layers):
            torch.testing.assert_close(call(layer).double(), setup.exact(layer), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_agrees_on_ragged_lengths_in_every_layer(ragged):
    case = ragged.case._replace(lengths=[33, 70, 16], num_q_heads=8, head_dim=64, block_size=16)
    setup = attention.Setup(case, "cpu", 0)
    try:
        call = peers.flex_attention(setup)
        out = [call(layer).double() for layer in range(setup.num_layers)]
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"flex_attention does not compile here: {error}"[:200])
    for layer, got in enumerate(out):
        torch.testing.assert_close(got, setup.exact(layer), rtol=0, atol=1e-5)


def test_a_peer_that_is_missing_or_fails_is_named(ragged, monkeypatch, capsys):
    def missing(setup):
        import no_such_project  # noqa: F401

    def refuses(setup):
        raise ValueError("expected pages of 64,\ngot 4")

    def wrong_later(setup):
        return lambda layer: 1 / 0

    made = {"none": missing, "refuses": refuses, "later": wrong_later}
    monkeypatch.setattr(attention, "PEERS", made)
    calls = attention.peer_calls(ragged)
    assert list(calls) == ["later"]
    rows = attention.measure(ragged, (), calls, one_call)
    assert [row["kernel"] for row in rows] == ["append + split_kv in place"]
    out = capsys.readouterr().out
    assert "none                        not installed" in out
    assert "refuses                     failed: ValueError: expected pages of 64,\n" in out
    assert "later                       failed: ZeroDivisionError: division by zero\n" in out


def test_first_blocks_are_where_each_sequence_begins(ragged):
    assert peers.first_blocks(ragged).tolist() == [0, 2, 20]


def test_each_way_of_copying_the_table_copies_the_bytes_it_says():
    rows = copies.measure("cpu", layer_bytes=4096, tables=((16, 8), (32, 8)), steps=5)
    sent = {(row["entries"], row["name"]): row["bytes_copied"] for row in rows}
    for num_slots in (16, 32):
        entries = num_slots * 16 * 8
        assert sent[entries, "no copy"] == 0
        assert sent[entries, "16 pageable copies, one a layer"] == 16 * 4 * entries
        assert sent[entries, "1 pageable copy"] == sent[entries, "1 pinned copy"] == 4 * entries
        changed = num_slots // 16 * 16  # one slot in 16 takes a block in each of 16 layers
        assert sent[entries, "changed entries"] == 16 * changed
    assert all(row["us"] > 0 for row in rows)


def test_a_table_keeps_growing_after_its_last_block():
    table = copies.BlockTable(2, 16, 3)
    for step in range(100):
        copies.grow(table, step)
    assert (table.host != -1).any()


def test_waste_counts_every_token_and_loses_none():
    load = waste.Load(num_requests=9, mean_prompt=5, mean_answer=7, max_seq_len=32, cache_tokens=96)
    requests = waste.draw_requests(load)
    assert [r.prompt for r in requests] == [r.prompt for r in waste.draw_requests(load)]
    assert all(len(r.prompt) + r.max_new_tokens <= 32 for r in requests)
    exact, *_, contiguous = (waste.play(load, size) for size in (1, 4, 32))
    assert (exact["cache"], contiguous["cache"]) == ("paged", "contiguous")
    assert exact["waste"] == exact["wasted_tokens"] == 0
    assert contiguous["running"] <= 3
    assert contiguous["preemptions"] == contiguous["recomputed"] == 0
    assert contiguous["steps"] > exact["steps"]
    alone = waste.play(load._replace(num_requests=1), 4)
    (request,) = waste.draw_requests(load._replace(num_requests=1))
    held = range(len(request.prompt), len(request.prompt) + request.max_new_tokens)
    owned = sum(-(-n // 4) * 4 for n in held)
    assert alone["waste"] == round(1 - sum(held) / owned, 5)
    assert alone["steps"] == request.max_new_tokens


def test_results_are_kept_by_device_with_their_provenance(tmp_path):
    run = provenance() | {"device": "NVIDIA H200"}
    path = save("some", [{"us": 1.5}], run, tmp_path)
    assert path == tmp_path / "nvidia-h200/some.json"
    assert json.loads(path.read_text()) == [{"us": 1.5} | run]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("results/*/*.json")), ids=str)
def test_every_row_says_where_it_was_made(path):
    for row in json.loads(path.read_text()):
        assert set(PROVENANCE) <= set(row)
        assert slug(row["device"]) == path.parent.name
        assert len(row["commit"]) == 40


def test_the_attention_rows_are_possible():
    for row in load("attention"):
        assert row["rel_err"] < 3e-3, row
        assert row["us"] > 0.97 * row["raw_read_us"], row  # GPUs of a name differ by 2 %


def test_the_waste_that_is_kept_is_what_is_counted_today():
    kept = load("waste", BENCHMARKS / "results/cpu-x86_64")
    assert [row["block_size"] for row in kept] == [*waste.BLOCK_SIZES, waste.Load().max_seq_len]
    for row in kept:
        if row["block_size"] in (16, 2048):
            counted = waste.play(waste.Load(), row["block_size"])
            assert counted == {name: row[name] for name in counted}
        assert {name: row[name] for name in waste.Load._fields} == waste.Load()._asdict()


TAKEN_OVER = [kind for kind in record.BENCHMARK_OF if (RECORDINGS / f"{kind}.json").exists()]


def test_the_book_has_the_ladder_and_the_waste():
    assert {"ladder", "waste"} <= set(TAKEN_OVER)


@pytest.mark.parametrize("kind", TAKEN_OVER)
def test_a_recording_is_what_its_benchmark_left(kind):
    taken = recordings.load(kind)
    folder = BENCHMARKS / "results" / slug(taken.provenance["device"])
    rows = load(record.BENCHMARK_OF[kind], folder)
    date = {"date": taken.provenance["date"]}  # of its last part
    assert [row | taken.provenance for row in taken.data["rows"]] == [row | date for row in rows]
    assert record.take_over(kind, folder) == taken
    assert recordings.find(kind).stat().st_size < 1_000_000
    assert "NVIDIA" in taken.provenance["device"] or kind == "waste"


@pytest.mark.parametrize("kind", TAKEN_OVER)
def test_a_changed_kernel_marks_it_outdated(kind, monkeypatch):
    taken = recordings.load(kind)
    made_with = taken.provenance["kernel_hash"]
    monkeypatch.setattr(recordings, "kernel_hash", lambda graphs=False: made_with)
    assert not taken.outdated
    monkeypatch.setattr(recordings, "kernel_hash", lambda graphs=False: made_with if graphs else "")
    assert not taken.outdated
    monkeypatch.setattr(recordings, "kernel_hash", lambda graphs=False: "0" * 16)
    assert taken.outdated
    assert "outdated" in taken.describe()


def test_rows_of_tiny_runs_become_recordings(ragged, tmp_path, monkeypatch):
    run = provenance()
    rows = {
        "attention": attention.measure(ragged, ("split_kv",), {}, one_call),
        "copies": copies.measure("cpu", layer_bytes=4096, tables=((16, 8),), steps=2),
        "waste": [waste.play(waste.Load(num_requests=3), 16)],
    }
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for kind, name in record.BENCHMARK_OF.items():
        if name in rows:
            save(name, rows[name], run, tmp_path)
            assert record.take_over(kind) == Recording(kind, {"rows": rows[name]}, run)
        else:
            with pytest.raises(ValueError, match=f"with {name}.json, got none"):
                record.take_over(kind)
    save("waste", rows["waste"], run | {"device": "NVIDIA H200"}, tmp_path)
    with pytest.raises(ValueError, match=r"waste.json, got cpu-.*, nvidia-h200"):
        record.take_over("waste")
    path = save("copies", rows["copies"], run, tmp_path)
    mixed = json.loads(path.read_text())
    mixed[0]["date"] = "2001-01-01T00:00:00Z"
    path.write_text(json.dumps(mixed))
    assert record.take_over("copies").provenance == run
    mixed[0]["commit"] = "0" * 40
    path.write_text(json.dumps(mixed))
    with pytest.raises(ValueError, match="one machine and commit"):
        record.take_over("copies")


@pytest.mark.parametrize("name", figures.DRAWN)
def test_a_measured_figure_shows_the_recorded_numbers(name):
    assert (figures.FIGURES / name).read_text("utf-8") == figures.DRAWN[name]()


def test_the_waste_figure_follows_its_recording(monkeypatch):
    taken = recordings.load("waste")
    for row in taken.data["rows"]:
        row["in_use"] = row["in_use"] / 2
    monkeypatch.setattr(recordings, "load", lambda name: taken)
    drawn = figures.waste_measured()
    assert ">49%<" in drawn and ">12%<" in drawn  # noqa: PT018


@pytest.mark.parametrize("page", ["book/intro.md", "README.md"])
def test_the_first_pages_show_the_measured_waste(page):
    assert "figures/waste_measured.svg" in (BENCHMARKS.parent / page).read_text("utf-8")
