"""How fast the widgets are in Chromium: `python benchmarks/widgets.py`.

Prints, for a sequence of 2,048 tokens: the median time of one step's redraw, from the change of the
step to the layout that follows it, and the time from loading the page to the first drawn widget.
"""

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "tools")]

from browser import find_browser
from conftest import CHROMIUM_FLAGS, serve
from widget_pages import panel, prepare, write_page

from pagedlab import (
    LLAMA_3_2_1B,
    AddressCalculator,
    BlockPool,
    BlockTable,
    BlockTableView,
    DecodeExplorer,
    RecyclingTimeline,
)
from pagedlab.engine import BlockEvent, SlotEvent, TokenEvent

NUM_TOKENS = LLAMA_3_2_1B.max_seq_len
NUM_LAYERS = LLAMA_3_2_1B.num_layers
NUM_STEPS = 200
REDRAW = """async ([index, key, values]) => {
    const times = [];
    for (const value of values) {
        const view = document.querySelectorAll(".pl-view")[index];
        const start = performance.now();
        view.pagedlab.set({ [key]: value });
        await Promise.resolve();
        view.getBoundingClientRect();
        times.push(performance.now() - start);
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    }
    return times;
}"""


def run_of(num_tokens: int) -> list[BlockEvent | SlotEvent | TokenEvent]:
    """One sequence that grows from a prompt of 16 tokens to `num_tokens`, in all layers."""
    pool = BlockPool(NUM_LAYERS * LLAMA_3_2_1B.num_logical_blocks(num_tokens))
    events: list[BlockEvent | SlotEvent | TokenEvent] = [SlotEvent(1, "admit", 0, 0, 16)]
    for step, length in enumerate(range(16, num_tokens), start=1):
        if step == 1 or (length - 1) % LLAMA_3_2_1B.block_size == 0:
            logical_block = (length - 1) // LLAMA_3_2_1B.block_size
            for layer, block in enumerate(pool.allocate(NUM_LAYERS)):
                events.append(BlockEvent(step, "allocate", 0, 0, layer, logical_block, block))
        events.append(TokenEvent(step, 0, 0, length, 1000 + length))
    return events


def measure(page: Page, index: int, key: str, stop: int) -> float:
    """Median milliseconds of a redraw: half the steps forward by one, half to anywhere."""
    draw = random.Random(0)
    near = list(range(stop - NUM_STEPS // 2, stop))
    values = near + [draw.randrange(1, stop) for _ in range(NUM_STEPS // 2)]
    return statistics.median(page.evaluate(REDRAW, [index, key, values]))


def main() -> None:
    events = run_of(NUM_TOKENS)
    num_blocks = NUM_LAYERS * LLAMA_3_2_1B.num_logical_blocks(NUM_TOKENS)
    table, pool = BlockTable(2, NUM_LAYERS, LLAMA_3_2_1B.max_blocks_per_seq), BlockPool(65_536)
    for logical_block in range(LLAMA_3_2_1B.max_blocks_per_seq):
        table.assign_layers(0, logical_block, pool.allocate(NUM_LAYERS))
    widgets = {
        "DecodeExplorer": (
            DecodeExplorer(events, layout=LLAMA_3_2_1B, num_blocks=num_blocks),
            "step",
            events[-1].step,
        ),
        "RecyclingTimeline": (RecyclingTimeline(events, num_blocks), "step", events[-1].step),
        "BlockTableView": (BlockTableView(table, pool), "logical_block", table.max_blocks_per_seq),
        "AddressCalculator": (AddressCalculator(LLAMA_3_2_1B, table), "token", NUM_TOKENS),
    }
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = prepare(Path(name))
        page_name = write_page(folder, "all", *(widget for widget, _, _ in widgets.values()))
        server, url = serve(folder)
        chromium = playwright.chromium.launch(executable_path=find_browser(), args=CHROMIUM_FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/{page_name}", wait_until="commit")
        page.wait_for_selector(".pl-view .pl-bar")
        first = page.evaluate("performance.now()")
        for index in range(len(widgets)):
            panel(page, index)
        results = {
            name: measure(page, index, key, stop)
            for index, (name, (_, key, stop)) in enumerate(widgets.items())
        }
        size = (folder / page_name).stat().st_size
        version = chromium.version
        server.shutdown()
        server.server_close()
        chromium.close()
    print(f"Chromium {version}, {NUM_TOKENS:,} tokens, {NUM_LAYERS} layers, page {size:,} bytes")
    print(f"first widget drawn after {first:.0f} ms")
    for name, median in results.items():
        print(f"{name:20} one redraw: median {median:6.1f} ms over {NUM_STEPS} steps")
    print(json.dumps({"first_ms": first, "redraw_ms": results}))


if __name__ == "__main__":
    main()
