"""The widgets' Python side: what they send to their views, and what they refuse."""

from __future__ import annotations

import json
import random

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from fake_model import FakeModel

from pagedlab import (
    LLAMA_3_2_1B,
    AddressCalculator,
    BlockPool,
    BlockTable,
    BlockTableView,
    Chart,
    DecodeExplorer,
    Engine,
    KVLayout,
    PagedKVCache,
    RecyclingTimeline,
    recordings,
)
from pagedlab.recordings import Recording
from pagedlab.run_recorder import RunRecorder
from pagedlab.widgets.base import View
from pagedlab.widgets.blocks import runs


@pytest.fixture
def engine():
    engine = Engine(FakeModel(), num_slots=2, num_blocks=36, block_size=4, events=[])
    for prompt in ([1, 2, 3], [4] * 9, [5]):
        engine.submit(prompt, 6)
    return engine


def error_of(panel):
    assert panel.controls == {}
    return panel.view.data["error"]


def test_address_calculator_starts_at_the_byte_it_names():
    layout = KVLayout(block_size=4, num_kv_heads=3, head_dim=24, dtype=torch.float16)
    table = BlockTable(2, 2, 6)
    table.assign(1, 1, 4, 9)
    start = {"slot": 1, "layer": 1, "token": 18, "kv_head": 2, "lane": 23}
    for section, address in enumerate((layout.k_address, layout.v_address)):
        panel = AddressCalculator(layout, table, **start, section=section)
        assert panel.view.byte == panel.controls["byte"].value == address(9, 2, 2, 23)
        for key, value in start.items():
            assert panel.controls[key].value == value
    assert AddressCalculator(layout, table).view.byte == 0  # unassigned: no byte


def test_address_calculator_sends_each_byte_twice():
    layout = KVLayout(block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    pool, table, cache = BlockPool(9), BlockTable(2, 2, 3), PagedKVCache(layout, 9)
    cache.buffer.normal_()
    for logical_block in range(2):
        table.assign_layers(1, logical_block, pool.allocate(2))
    view = AddressCalculator(layout, table, cache, seq_lens=[0, 7], layer=1).view
    places = view.data["stored"]["rows"]
    assert [(it["sequence"], it["layer"], it["count"]) for it in places] == [(1, 1, 7), (1, 0, 7)]
    raw = torch.frombuffer(bytearray(view.raw), dtype=torch.bfloat16).float()
    assert torch.equal(raw, torch.frombuffer(bytearray(view.values), dtype=torch.float32))
    k, v = cache.gather(table, 1, 1, 7)
    assert torch.equal(raw.view(-1, 2, 32)[:7], torch.stack([k, v], 1).flatten(2).float())


def test_a_large_cache_travels_in_part():
    table = BlockTable(1, 1, 64)
    cache = PagedKVCache(LLAMA_3_2_1B, 64)
    for logical_block in range(64):
        table.assign(0, 0, logical_block, logical_block)
    view = AddressCalculator(LLAMA_3_2_1B, table, cache).view
    assert 250 * 1024 < len(view.raw) + len(view.values) <= 256 * 1024
    assert view.data["stored"]["rows"][0]["count"] == 42


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"lane": 64}, "lane: expected 0 <= lane < 64, got 64"),
        ({"section": 2}, "section: expected 0 <= section < 2, got 2"),
        ({"physical_block": -1}, "physical_block: expected 0 <= physical_block < 65536, got -1"),
        ({"blocks": 1}, "got blocks"),
    ],
)
def test_address_calculator_says_what_is_out_of_range(state, text):
    assert text in error_of(AddressCalculator(LLAMA_3_2_1B, **state))


def test_addresses_that_javascript_cannot_hold_are_refused():
    largest = 2**53 // LLAMA_3_2_1B.block_bytes
    assert "2**53" in error_of(AddressCalculator(LLAMA_3_2_1B, num_blocks=largest + 1))
    assert AddressCalculator(LLAMA_3_2_1B, num_blocks=largest).controls


def test_block_table_view_sends_table_and_free_list():
    pool, table = BlockPool(65_536), BlockTable(2, 3, 4)
    for slot in range(2):
        table.assign_layers(slot, 0, pool.allocate(3))
    pool.release(table.release_slot(0))
    view = BlockTableView(table, pool, layer=2).view
    sent = np.frombuffer(view.table, np.int32).reshape(2, 3, 4)
    assert np.array_equal(sent, table.host)
    free = [first + i for first, count in view.data["free"] for i in range(count)]
    assert free == pool.free_blocks
    assert len(json.dumps(view.data)) < 300
    assert "layer: expected 0 <= layer < 3, got 3" in error_of(BlockTableView(table, layer=3))
    assert "slot, logical_block" in error_of(BlockTableView(table, depth=3))


def test_runs_hold_any_free_list():
    draw = random.Random(3)
    for _ in range(50):
        blocks = draw.sample(range(40), draw.randrange(40))
        spread = [first + i for first, count in runs(blocks) for i in range(count)]
        assert spread == blocks


def test_timeline_spans_the_run(engine):
    engine.run()
    panel = RecyclingTimeline(engine.events, 36)
    assert (panel.controls["step"].min, panel.controls["step"].max) == (1, engine.scheduler.step)
    assert panel.view.data["size"]["num_layers"] == 3
    assert "at least one step" in error_of(RecyclingTimeline([], 36))
    assert "token event" in error_of(RecyclingTimeline([object()], 36))


def test_explorer_of_a_live_engine_appends_to_the_same_list(engine):
    panel = DecodeExplorer(engine)
    assert panel.view.data["events"] == []
    sent = []
    panel.view.send = lambda content, buffers=None: sent.append(content)
    panel._on_message(panel.view, {"do": "hello"}, [])
    panel._on_message(panel.view, {"do": "next token"}, [])
    assert sent == [{"live": True}, {"live": True}]
    assert engine.scheduler.step == panel.view.step == panel.controls["step"].value == 1
    assert panel.view.data["events"] == recordings.encode_events(engine.events)
    panel.run()
    assert sent[-1] == {"live": False}
    assert panel.recorder.idle
    assert panel.controls["step"].max == engine.scheduler.step
    assert panel.view.data["texts"]["1"]["prompt"] == ["⟨4⟩"] * 9
    assert len(panel.view.data["texts"]["1"]["tokens"]) == 6


def test_explorer_shows_the_same_from_engine_and_recording(engine, tmp_path):
    recorder = RunRecorder(engine, layer=1)
    recorder.run()
    Recording("decode", recorder.data()).save(tmp_path / "run.json")
    shown = DecodeExplorer(tmp_path / "run.json").view
    live = DecodeExplorer(engine, requests=recorder.requests.values()).view
    assert shown.data["events"] == live.data["events"]
    assert shown.data["texts"] == live.data["texts"]
    assert shown.values == bytes(recorder.rows.values)
    assert "Recorded on" in shown.data["origin"]
    assert "Run on" in live.data["origin"]


def test_explorer_says_what_is_wrong_with_its_source(engine, tmp_path):
    assert "got 'nowhere'" in error_of(DecodeExplorer("nowhere"))
    assert "one step" in error_of(DecodeExplorer([], layout=LLAMA_3_2_1B, num_blocks=4))
    assert "layout= and num_blocks=" in error_of(DecodeExplorer([["admit", 0, 0, 0, 3]]))
    assert "got none" in error_of(DecodeExplorer(Recording("decode", {"events": []})))
    assert "one that logs" in error_of(DecodeExplorer(Engine(FakeModel(), block_size=4)))
    path = tmp_path / "run.json"
    path.write_text('{"format": 1, "surprise": 2}')
    assert "run.json: expected fields" in error_of(DecodeExplorer(path))
    assert "0 <= layer < 3, got 9" in error_of(DecodeExplorer(engine, layer=9))
    with pytest.raises(ValueError, match="expected a live engine"):
        DecodeExplorer("nowhere").run()


def test_a_view_takes_finite_json_only():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            View(data={"value": value})


def test_controls_are_linked_in_the_front_end(engine):
    engine.run()
    for panel in (AddressCalculator(LLAMA_3_2_1B), RecyclingTimeline(engine.events, 36)):
        models = ipywidgets.Widget.get_manager_state()["state"].values()
        links = [model["state"] for model in models if model["model_name"] == "LinkModel"]
        linked = {
            (link["source"][0], link["target"][1])
            for link in links
            if link["target"][0] == f"IPY_MODEL_{panel.view.model_id}"
        }
        assert linked == {
            (f"IPY_MODEL_{control.model_id}", "step" if key == "play" else key)
            for key, control in panel.controls.items()
        }


def test_chart_carries_its_text_and_its_frames():
    bars = [go.Bar(y=[number, 1]) for number in range(3)]
    frames = {str(number): [bar] for number, bar in enumerate(bars)}
    chart = Chart(go.Figure(bars[:1]), alt="Bars </script> grow", frames=frames, step="tokens")
    html = chart._repr_html_()
    assert html.count("</script>") == 2
    assert 'max="2"' in html
    assert html == chart._repr_html_()
    bundle = chart._repr_mimebundle_()
    assert len(bundle["application/vnd.plotly.v1+json"]["layout"]["sliders"][0]["steps"]) == 3
    assert bundle["text/plain"] == "Bars </script> grow"


def test_chart_leaves_the_figure_as_it_was_and_refuses_bad_ones():
    figure = go.Figure([go.Scatter(y=[1, 2]), go.Scatter(y=[2, 1])])
    before = figure.to_json()
    chart = Chart(figure, alt="two lines")
    assert figure.to_json() == before
    assert [trace.line.dash for trace in chart.figure.data] == ["solid", "dash"]
    with pytest.raises(ValueError, match="alt: expected"):
        Chart(figure, alt=" ")
    with pytest.raises(ValueError, match="alt: expected"):
        Chart(figure, alt=None)
    with pytest.raises(ValueError, match="height: expected height >= 10, got 0"):
        Chart(figure, alt="two lines", height=0)
    with pytest.raises(ValueError, match="at least one trace"):
        Chart(go.Figure(), alt="nothing")
    with pytest.raises(ValueError, match="expected 2 traces, got 1"):
        Chart(figure, alt="two lines", frames={"1": [go.Scatter(y=[1])]})
