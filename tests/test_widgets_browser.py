"""The widgets in Chromium with no kernel: what they show is compared with the package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from conftest import serve
from fake_model import FakeModel
from playwright.sync_api import Page, expect
from widget_pages import (
    enter,
    numbers,
    panel,
    prepare,
    shown_stack,
    shown_table,
    value,
    write_charts,
    write_page,
)

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
)
from pagedlab.engine import BlockEvent, TokenEvent
from pagedlab.widgets.address import AddressView

pytestmark = pytest.mark.browser

SEED = random.randrange(2**32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HUGE = KVLayout(block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)


class Scene:
    """A table with three slots, two layers and shuffled blocks, random values in every block."""

    def __init__(self) -> None:
        draw = random.Random(SEED)
        self.layout = KVLayout(
            block_size=draw.choice((4, 8)),
            num_kv_heads=draw.choice((2, 3)),
            head_dim=draw.choice((16, 24)),
            dtype=draw.choice(DTYPES),
        )
        self.pool = BlockPool(40)
        draw.shuffle(self.pool.free_blocks)
        self.table = BlockTable(num_slots=3, num_layers=2, max_blocks_per_seq=6)
        self.cache = PagedKVCache(self.layout, 40)
        self.cache.buffer.copy_(torch.randn(self.cache.buffer.shape))
        self.lengths = [draw.randrange(18, 6 * self.layout.block_size), 3, 18]
        for slot, length in enumerate(self.lengths):
            for logical_block in range(self.layout.num_logical_blocks(length)):
                self.table.assign_layers(slot, logical_block, self.pool.allocate(2))


def recorded_run() -> tuple[Engine, DecodeExplorer]:
    """Five requests through two slots, their blocks recycled."""
    draw = random.Random(SEED)
    engine = Engine(FakeModel(), num_slots=2, num_blocks=36, block_size=4, events=[])
    for _ in range(5):
        prompt = [draw.randrange(29) for _ in range(draw.randrange(1, 12))]
        engine.submit(prompt, draw.randrange(3, 12))
    explorer = DecodeExplorer(engine, layer=1, name="run")
    return engine, explorer


@pytest.fixture(scope="module")
def scene() -> Scene:
    print(f"seed: {SEED}")
    return Scene()


@pytest.fixture(scope="module")
def run() -> dict:
    """The run's engine, and the page's data as Python sees it."""
    engine, explorer = recorded_run()
    states = {}
    while not explorer.recorder.idle:
        explorer.recorder.run(1)
        step = engine.scheduler.step
        running = engine.scheduler.running
        states[step] = {
            "table": engine.table.host.copy(),
            "free": list(engine.pool.free_blocks),
            "cached": {request.slot: request.num_cached for request in running},
            "buffer": engine.cache.buffer.clone(),
        }
    explorer.run()
    return {"engine": engine, "explorer": explorer, "states": states}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, scene: Scene, run: dict) -> Iterator[str]:
    folder = prepare(tmp_path_factory.mktemp("widgets"))
    events, explorer = run["engine"].events, run["explorer"]
    made = {
        "decode": [explorer],
        "address": [AddressCalculator(scene.layout, scene.table, scene.cache)],
        "huge": [AddressCalculator(HUGE, num_blocks=2**37)],
        "table": [BlockTableView(scene.table, scene.pool)],
        "timeline": [RecyclingTimeline(events, 36)],
        "several": [
            AddressCalculator(scene.layout, scene.table, name="first"),
            AddressCalculator(LLAMA_3_2_1B, name="second"),
            BlockTableView(scene.table, name="third"),
        ],
        "bad": [
            RecyclingTimeline([], 8),
            DecodeExplorer("no-such-recording"),
            RecyclingTimeline([["allocate", 0, 0, 0, 0, 0, "three"]], 8),
            RecyclingTimeline([["allocate", 0, 0, 0, 0, 0, 9]], 8),
            AddressCalculator(LLAMA_3_2_1B, lane=64),
        ],
    }
    for name, panels in made.items():
        write_page(folder, name, *panels)
    lines = go.Figure([go.Scatter(y=[1, 2, 4], name="paged"), go.Scatter(y=[4, 4, 4], name="not")])
    frames = {f"{count} tokens": [go.Bar(y=[count, 7])] for count in (1, 2, 3)}
    bars = Chart(go.Figure(go.Bar(y=[0, 7])), alt="Bars grow.", frames=frames, step="length")
    write_charts(folder, "charts", Chart(lines, alt="Paged memory grows."), bars)
    server, url = serve(folder)
    yield url
    server.shutdown()
    server.server_close()


def test_ten_thousand_addresses_equal_the_layouts(page: Page, pages: str) -> None:
    draw, cases, wanted = random.Random(SEED), [], []
    for _ in range(10_000):
        layout = KVLayout(
            block_size=2 ** draw.randrange(9),
            num_kv_heads=draw.randrange(1, 33),
            head_dim=draw.randrange(16, 257, 8),
            dtype=draw.choice(DTYPES),
        )
        last = 2**53 // layout.block_bytes
        block = draw.choice((draw.randrange(last), draw.randrange(2**17), last - 1))
        token, head, lane = map(
            draw.randrange, (layout.block_size, layout.num_kv_heads, layout.head_dim)
        )
        section = draw.randrange(2)
        address = (layout.k_address, layout.v_address)[section]
        inside = draw.randrange(layout.dtype.itemsize)
        wanted.append(address(block, token, head, lane))
        assert layout.locate(wanted[-1] + inside)[1:] == (block, token, head, lane, inside)
        sizes = {
            name: getattr(layout, name)
            for name in ("block_size", "kv_dim", "head_dim", "v_offset", "block_bytes")
        }
        cases.append(
            {
                "layout": sizes | {"itemsize": layout.dtype.itemsize},
                "at": {
                    "physical_block": block,
                    "section": section,
                    "token_in_block": token,
                    "kv_head": head,
                    "lane": lane,
                    "byte_in_element": inside,
                },
            }
        )
    assert sum(byte > 2**32 for byte in wanted) > 3000
    page.goto(f"{pages}/huge.html")
    bytes_, back = page.evaluate(
        """async ([esm, cases]) => {
            const text = esm + "\\nexport {address, locate};";
            const blob = new Blob([text], {type: "text/javascript"});
            const {address, locate} = await import(URL.createObjectURL(blob));
            const bytes = cases.map(({layout, at}) => address(layout, at).byte);
            const inside = cases.map(({at}, i) => bytes[i] + at.byte_in_element);
            return [bytes, cases.map(({layout}, i) => locate(layout, inside[i]))];
        }""",
        [AddressView._esm, cases],
    )
    assert bytes_ == wanted
    assert back == [case["at"] for case in cases]


def test_address_calculator_shows_what_the_cache_holds(
    page: Page, pages: str, scene: Scene
) -> None:
    page.goto(f"{pages}/address.html")
    widget, layout = panel(page), scene.layout
    draw = random.Random(SEED + 1)
    for _ in range(8):
        slot, layer = draw.randrange(3), draw.randrange(2)
        position = draw.randrange(scene.lengths[slot])
        head, lane = draw.randrange(layout.num_kv_heads), draw.randrange(layout.head_dim)
        section = draw.randrange(2)
        for label, number in (
            ("slot", slot),
            ("layer", layer),
            ("position", position),
            ("kv head", head),
            ("lane", lane),
        ):
            enter(widget, label, number)
        widget.get_by_role("button", name="KV"[section], exact=True).click()
        logical_block, token = divmod(position, layout.block_size)
        block = scene.table.lookup(slot, layer, logical_block)
        byte = (layout.k_address, layout.v_address)[section](block, token, head, lane)
        expect(widget.locator('[data-value="byte"]')).to_have_text(f"{'KV'[section]} byte {byte:,}")
        assert numbers(value(widget, "logical"))[2] == logical_block
        assert numbers(value(widget, "token"))[2] == token
        assert numbers(value(widget, "entry")) == [slot, layer, logical_block, block]
        raw = scene.cache.buffer.view(torch.uint8)[byte : byte + layout.dtype.itemsize].tolist()
        view = (scene.cache.k_view(), scene.cache.v_view())[section]
        stored, shown = value(widget, "stored"), value(widget, "view")
        assert f": {' '.join(f'{it:02x}' for it in raw)} = " in stored
        held = float(view[block, token, head, lane])
        assert float(stored.split("=")[1]) == held
        assert float(shown.split("=")[1].split()[0]) == held
        assert shown.endswith("✓ equal")
        owner = numbers(value(widget, "owner").split("→")[1])
        assert owner == [slot, layer, position]


def test_a_typed_byte_moves_the_controls_to_its_owner(page: Page, pages: str, scene: Scene) -> None:
    page.goto(f"{pages}/address.html")
    widget, layout = panel(page), scene.layout
    block = scene.table.lookup(2, 1, 1)
    byte = layout.v_address(block, 2, 1, 9) + 1
    enter(widget, "byte", byte)
    expect(widget.locator('[data-value="owner"]')).to_contain_text(
        f"→ slot 2, layer 1, position {layout.block_size + 2}"
    )
    expect(widget.locator('[data-value="owner"]')).to_contain_text("kv_head 1, lane 9 (byte 1 of")
    expect(widget.locator('[data-value="byte"]')).to_have_text(f"V byte {byte - 1:,}")
    free = scene.pool.free_blocks[0]
    enter(widget, "byte", free * layout.block_bytes)
    expect(widget.locator('[data-value="owner"]')).to_contain_text("nobody's")
    expect(widget.locator('[data-value="byte"]')).to_have_text(f"V byte {byte - 1:,}")


def test_an_unassigned_entry_is_explained_not_computed(page: Page, pages: str) -> None:
    page.goto(f"{pages}/address.html#slot=1&token=17")
    widget = panel(page)
    expect(widget.locator('[data-value="byte"]')).to_have_text("no byte")
    expect(widget.locator(".pl-address .pl-message")).to_contain_text("is −1")
    assert not widget.locator(".pl-scale").is_visible()


def test_blocks_beyond_four_gibibytes_are_right(page: Page, pages: str) -> None:
    page.goto(f"{pages}/huge.html")
    widget, draw = panel(page), random.Random(SEED + 2)
    for block in (131_071, 131_072, 2**37 - 1, draw.randrange(2**17, 2**37)):
        enter(widget, "physical block", block)
        byte = HUGE.k_address(block, 1, 0, 7)
        expect(widget.locator('[data-value="byte"]')).to_have_text(f"K byte {byte:,}")
        enter(widget, "byte", byte + 1 + HUGE.v_offset)
        expect(widget.locator('[data-value="owner"]')).to_contain_text(
            f"physical_block {block:,}, V, token_in_block 1, kv_head 0, lane 7 (byte 1 of 2)"
        )
        widget.get_by_role("button", name="K", exact=True).click()


def test_block_table_view_shows_table_pool_and_free_list(
    page: Page, pages: str, scene: Scene
) -> None:
    page.goto(f"{pages}/table.html")
    widget = panel(page)
    for layer in (1, 0):
        enter(widget, "layer", layer)
        expect(widget.locator(".pl-caption")).to_contain_text(f"block_table[0, {layer}, 0]")
        table = shown_table(widget)
        for (slot, logical_block), block in table.items():
            assert block == scene.table.lookup(slot, layer, logical_block)
        assigned = {int(block) for block in scene.table.host[:, layer].flat if block >= 0}
        assert {block for block in table.values() if block >= 0} == assigned
        assert -1 in table.values()
    assert shown_stack(widget) == scene.pool.free_blocks[::-1][:8]
    block = scene.table.lookup(2, 0, 1)
    widget.get_by_role("button", name="slot 2, layer 0, logical block 1").click()
    expect(widget.locator(".pl-caption")).to_contain_text(f"It holds physical block {block}.")
    assert widget.locator(".pl-pool .pl-here small").inner_text() == str(block)


def test_pointing_at_an_entry_lights_it_everywhere(page: Page, pages: str, scene: Scene) -> None:
    page.goto(f"{pages}/table.html")
    widget = panel(page)
    owned, free = scene.table.lookup(1, 0, 0), scene.pool.free_blocks[-1]
    widget.locator(f'.pl-table [data-key="b{owned}"]').hover()
    assert widget.locator(".pl-lit").count() == 2
    expect(widget.locator(".pl-pool .pl-lit")).to_contain_text(str(owned))
    widget.locator(f'.pl-pool [data-key="b{free}"]').hover()
    expect(widget.locator(".pl-stack .pl-lit")).to_contain_text(str(free))
    widget.locator(".pl-table [data-item]").first.focus()
    page.keyboard.press("ArrowRight")
    block = scene.table.lookup(0, 0, 1)
    expect(widget.locator(".pl-pool .pl-lit")).to_contain_text(str(block))


def test_timeline_equals_pool_and_table_at_random_steps(page: Page, pages: str, run: dict) -> None:
    page.goto(f"{pages}/timeline.html")
    widget, events = panel(page), run["engine"].events
    steps = sorted(run["states"])
    for step in random.Random(SEED + 3).sample(steps, 6):
        enter(widget, "step", step)
        expect(widget.locator(".pl-caption")).to_contain_text(f"Step {step}.")
        state = run["states"][step]
        assert shown_stack(widget) == state["free"][::-1][:8]
        owned = widget.locator(".pl-pool .pl-own small").all_inner_texts()
        assert sorted(map(int, owned)) == sorted(state["table"][state["table"] >= 0].tolist())
        taken = [
            event.physical_block
            for event in events
            if isinstance(event, BlockEvent)
            and (event.step, event.action, event.layer) == (step, "allocate", 0)
        ]
        caption = widget.locator(".pl-caption").inner_text()
        for block in taken:
            assert f"→ {block}" in caption


def test_decode_explorer_equals_the_engine_at_random_steps(
    page: Page, pages: str, run: dict
) -> None:
    page.goto(f"{pages}/decode.html")
    widget, engine = panel(page), run["engine"]
    layout = engine.cache.layout
    enter(widget, "layer", 1)
    draw = random.Random(SEED + 4)
    for step in draw.sample(sorted(run["states"]), 6):
        lane = draw.randrange(16)
        enter(widget, "step", step)
        enter(widget, "lane", lane)
        expect(widget.locator(".pl-caption")).to_contain_text(f"Step {step}.")
        state = run["states"][step]
        for (slot, logical_block), block in shown_table(widget).items():
            assert block == state["table"][slot, 1, logical_block]
        assert shown_stack(widget) == state["free"][::-1][:8]
        if not state["cached"]:
            continue
        slot, layer, logical_block, block = numbers(value(widget, "entry"))
        position = state["cached"][slot] - 1
        assert (layer, logical_block) == (1, position // 4)
        assert block == state["table"][slot, 1, logical_block]
        byte = layout.k_address(block, position % 4, 0, lane)
        assert value(widget, "byte") == f"K byte {byte:,}"
        held = float(state["buffer"][byte // 4])
        assert float(value(widget, "stored").split("=")[1]) == held
        assert value(widget, "view").endswith("✓ equal")
    enter(widget, "layer", 0)
    unknown = "The value at this address is not recorded."
    expect(widget.locator('[data-value="stored"]')).to_have_text(unknown)


def test_choosing_a_token_moves_step_table_and_address(page: Page, pages: str, run: dict) -> None:
    page.goto(f"{pages}/decode.html")
    widget = panel(page)
    chosen = random.Random(SEED + 5).choice(
        [event for event in run["engine"].events if isinstance(event, TokenEvent)]
    )
    position = chosen.position - 1  # cached from the step on in which the next token is chosen
    token = widget.locator(f'[data-request="{chosen.request}"][data-position="{position}"]')
    enter(widget, "step", run["engine"].scheduler.step)
    token.click()
    expect(widget.locator(".pl-caption")).to_contain_text(f"Step {chosen.step}.")
    assert numbers(value(widget, "logical"))[0] == position
    expect(token).to_have_attribute("aria-pressed", "true")
    here = widget.locator(".pl-table .pl-here")
    assert here.get_attribute("data-slot") == str(chosen.slot)
    assert here.get_attribute("data-logical") == str(position // 4)


def test_explorer_says_where_its_run_was_made_and_has_no_button_without_a_kernel(
    page: Page, pages: str
) -> None:
    page.goto(f"{pages}/decode.html")
    widget = panel(page)
    expect(widget.locator(".pl-origin")).to_contain_text("Run on ")
    assert not widget.get_by_role("button", name="Next token").is_visible()


def test_play_steps(page: Page, pages: str) -> None:
    page.goto(f"{pages}/timeline.html")
    widget = panel(page)
    widget.locator(".widget-play button").first.click()
    expect(widget.locator(".pl-caption")).to_contain_text("Step 3.", timeout=5000)


def test_predicting_hides_the_answer_and_checks_it(
    page: Page, pages: str, scene: Scene, run: dict
) -> None:
    page.goto(f"{pages}/address.html#slot=2&token=17&lane=7")
    widget, layout = panel(page), scene.layout
    logical_block, token = divmod(17, layout.block_size)
    byte = layout.k_address(scene.table.lookup(2, 0, logical_block), token, 0, 7)
    shown = widget.locator(".pl-view")
    expect(shown).to_contain_text(f"{byte:,}")
    widget.get_by_role("button", name="Predict").click()
    expect(shown).not_to_contain_text(f"{byte:,}")
    assert not any(
        box.input_value() == str(byte) for box in widget.locator("input").all() if box.is_visible()
    )
    field = widget.locator(".pl-bar input")
    field.fill("12345")
    field.press("Enter")
    expect(widget.locator(".pl-bar")).to_contain_text("Not 12345.")
    field.fill(str(byte))
    field.press("Enter")
    expect(widget.locator(".pl-bar")).to_contain_text(f"Right: {byte:,}.")
    expect(widget.locator('[data-value="byte"]')).to_have_text(f"K byte {byte:,}")

    step, block = next(
        (event.step, event.physical_block)
        for event in run["engine"].events
        if isinstance(event, BlockEvent) and event.action == "allocate" and event.step > 2
    )
    page.goto(f"{pages}/timeline.html#step={step}&predict=1")
    widget = panel(page)
    expect(widget.locator(".pl-bar")).to_contain_text("Which physical block does it get?")
    assert shown_stack(widget) == run["states"][step - 1]["free"][::-1][:8]
    widget.get_by_role("button", name="Show").click()
    expect(widget.locator(".pl-bar")).to_contain_text(f"It is: {block}.")
    assert shown_stack(widget) == run["states"][step]["free"][::-1][:8]


@pytest.mark.parametrize("name", ["address", "huge", "table", "timeline", "decode"])
def test_predict_mode_goes_from_question_to_question(page: Page, pages: str, name: str) -> None:
    page.goto(f"{pages}/{name}.html")
    widget = panel(page)
    widget.get_by_role("button", name="Predict").click()
    asked = set()
    for _ in range(4):
        question = widget.locator(".pl-bar label")
        expect(question).to_contain_text("?")
        asked.add(question.inner_text())
        field = widget.locator(".pl-bar input")
        field.fill("-9")
        field.press("Enter")
        expect(widget.locator(".pl-bar")).to_contain_text("Not -9.")
        widget.get_by_role("button", name="Show").click()
        expect(widget.locator(".pl-bar")).to_contain_text("It is: ")
        expect(widget.get_by_role("button", name="Next question")).to_be_focused()
        page.keyboard.press("Enter")
    assert len(asked) > 1


def test_state_is_in_the_address_and_comes_back(page: Page, pages: str, scene: Scene) -> None:
    page.goto(f"{pages}/several.html")
    enter(panel(page), "lane", 5)
    page.wait_for_function("location.hash.includes('first.lane=5')")
    enter(panel(page, 1), "lane", 40)
    page.wait_for_function("location.hash.includes('second.lane=40')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(panel(page).locator('[data-value="term-lane"]')).to_contain_text("5 × ")
    expect(panel(page, 1).locator('[data-value="term-lane"]')).to_contain_text("40 × 2")
    page.goto("about:blank")
    page.goto(f"{pages}/address.html#token=17&lane=7&section=V")
    block = scene.table.lookup(0, 0, 17 // scene.layout.block_size)
    byte = scene.layout.v_address(block, 17 % scene.layout.block_size, 0, 7)
    expect(panel(page).locator('[data-value="byte"]')).to_have_text(f"V byte {byte:,}")
    page.evaluate("location.hash = '#token=3'")
    expect(panel(page).locator('[data-value="logical"]')).to_contain_text("3 // ")
    for nonsense in ("#token=-5", "#token=1e99", "#token=x&lane=999", "#%%%", "#token="):
        page.goto("about:blank")
        page.goto(f"{pages}/address.html{nonsense}")
        expect(panel(page).locator('[data-value="logical"]')).to_contain_text("//")


def test_a_link_opens_the_page_at_its_widget(page: Page, pages: str) -> None:
    tops = "all => all.map(it => it.closest('.pagedlab').getBoundingClientRect().top)"
    widgets = page.locator(".pl-view")

    def open_at(state: str) -> list[float]:
        page.goto("about:blank")
        page.goto(f"{pages}/several.html{state}", wait_until="networkidle")
        panel(page, 2)
        return widgets.evaluate_all(tops)

    page.set_viewport_size({"width": 800, "height": 400})
    assert 0 <= open_at("")[0] < 200
    assert 0 <= open_at("#third.layer=1")[2] < 200
    assert 0 <= open_at("#third.layer=1&second.lane=3")[1] < 200
    assert 0 <= open_at("#lane=3")[0] < 200
    page.evaluate("location.hash = '#third.layer=1'")
    page.wait_for_function(
        "document.querySelectorAll('.pagedlab')[2].getBoundingClientRect().top < 200"
    )
    panel(page, 0).get_by_role("button", name="Copy link").click()
    page.wait_for_function("location.hash.endsWith('first.lane=3')")
    enter(panel(page, 1), "lane", 40)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_function("location.hash.endsWith('second.lane=40')")
    assert page.evaluate("scrollY") == 0  # what a reader does writes the address and moves nothing


def test_charts_step_by_keyboard_and_follow_the_theme(page: Page, pages: str) -> None:
    page.goto(f"{pages}/charts.html")
    plots = page.locator(".plotly-graph-div")
    heights = "it => it.data[0].y && [...it.data[0].y]"
    expect(page.locator("output")).to_have_text("1 tokens")
    page.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output")).to_have_text("2 tokens")
    assert plots.nth(1).evaluate(heights) == [2, 7]
    page.keyboard.press("End")
    expect(page.locator("output")).to_have_text("3 tokens")
    assert plots.nth(1).evaluate(heights) == [3, 7]
    title = "() => getComputedStyle(document.querySelector('.legendtext')).fill"
    light = page.evaluate(title)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.wait_for_function(f"before => ({title})() !== before", arg=light)
    expect(page.get_by_role("img", name="Paged memory grows.")).to_be_visible()


def test_bad_data_shows_a_readable_message(page: Page, pages: str) -> None:
    page.goto(f"{pages}/bad.html")
    for index, text in enumerate(
        (
            "at least one step",
            "got 'no-such-recording'",
            "expected a block, slot or token event",
            "block 9, which is not free",
            "expected 0 <= lane < 64, got 64",
        )
    ):
        message = panel(page, index).locator(".pl-message")
        expect(message).to_contain_text(text)
        assert "\n" not in message.inner_text().strip()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["address", "huge", "table", "timeline", "decode", "bad", "charts"]
)
def test_widgets_have_no_accessibility_violation(
    page: Page, pages: str, name: str, theme: str
) -> None:
    for predict in ("", "#predict=1"):
        page.goto("about:blank")
        page.goto(f"{pages}/{name}.html{predict}", wait_until="networkidle")
        page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        page.wait_for_timeout(250)
        violations = Axe().run(page, options={"preload": False}).response["violations"]
        assert not [
            (found["id"], node["html"], node["failureSummary"])
            for found in violations
            if found["impact"] in ("serious", "critical")
            for node in found["nodes"]
        ]


@pytest.mark.parametrize(
    "name", ["address", "huge", "table", "timeline", "decode", "bad", "charts"]
)
def test_widgets_fit_a_phone(new_page: Callable[..., Page], pages: str, name: str) -> None:
    page = new_page(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page.goto(f"{pages}/{name}.html", wait_until="networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_nothing_moves_where_motion_is_unwanted(new_page: Callable[..., Page], pages: str) -> None:
    durations = []
    for motion in ("no-preference", "reduce"):
        page = new_page(reduced_motion=motion)
        page.goto(f"{pages}/address.html")
        durations.append(
            panel(page)
            .locator(".pl-marker")
            .first.evaluate("it => getComputedStyle(it).transitionDuration")
        )
    assert durations[0].startswith("0.18s")
    assert durations[1] == "0s"


def test_widgets_work_from_disk(page: Page, scene: Scene, tmp_path: Path) -> None:
    name = write_page(prepare(tmp_path), "disk", BlockTableView(scene.table, scene.pool))
    page.goto((tmp_path / name).as_uri())
    enter(panel(page), "layer", 1)
    expect(panel(page).locator(".pl-caption")).to_contain_text("block_table[0, 1, 0]")


def test_widget_data_is_small(run: dict) -> None:
    view = run["explorer"].view
    assert len(view._esm) + len(view._css) < 60_000
    assert len(json.dumps(view.data)) < 100_000
