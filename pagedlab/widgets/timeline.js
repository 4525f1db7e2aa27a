/** Who owned which block, step after step, and the free list at the chosen one. */
function RecyclingTimeline(ui) {
  const { size, events, first } = ui.data;
  const replay = new Replay(size, events);
  const stack = freePane();
  const pool = poolPane();
  const chart = node("div", { class: "pl-chart", role: "img" });
  const cursor = node("i", { class: "pl-cursor pl-moves" });
  const cover = node("i", { class: "pl-cover" });
  const labels = node("div", { class: "pl-chart-labels", "aria-hidden": "true" });
  const axis = node("div", { class: "pl-chart-axis pl-soft", "aria-hidden": "true" });
  const slots = node("p", { class: "pl-slots" });
  const caption = node("p", { class: "pl-caption", role: "status" });
  const heading = node("h4", {}, "Blocks over time");
  const frame = node("div", { class: "pl-chart-frame" }, labels, chart, node("span"), axis);
  ui.root.append(caption, slots, node("div", { class: "pl-columns" }, node("div", { class: "pl-wide" }, heading, frame, pool.node), stack.node));

  const steps = replay.last - first + 1;
  const x = (step) => ((step - first) / steps) * 100;
  const width = (from, to) => ((to - from) / steps) * 100;
  let drawn = null;

  /** One row per block that the layer ever owned, one bar per ownership. */
  const spans = (layer) => {
    const open = new Map();
    const all = [];
    for (const [action, step, request, slot, of, logical_block, block] of events) {
      if (of !== layer || !(action === "allocate" || action === "release")) continue;
      if (action === "allocate") {
        const span = { block, request, slot, logical_block, from: step, to: replay.last + 1 };
        open.set(block, span);
        all.push(span);
      } else if (open.has(block)) open.get(block).to = step;
    }
    return all;
  };
  const drawChart = (layer) => {
    const all = spans(layer);
    const rows = [...new Set(all.map((span) => span.block))].sort((a, b) => b - a);
    const height = rows.length > 40 ? 6 : 18;
    frame.style.setProperty("--row", `${height}px`);
    labels.replaceChildren(...rows.map((block) => node("span", { "data-key": `b${block}` }, height > 10 ? block : "")));
    chart.style.height = `${rows.length * height}px`;
    const bars = all.map((span) => {
      const sequence = replay.sequences.get(span.request);
      const text = letter(sequence) + span.logical_block;
      return node(
        "i",
        {
          class: `pl-span ${colour(sequence)}`,
          style: `left:${x(span.from)}%;width:${width(span.from, span.to)}%;top:${rows.indexOf(span.block) * height}px`,
          "data-key": `b${span.block}`,
          title: `block ${span.block}: ${text}, steps ${span.from} to ${span.to - 1}`,
        },
        height > 10 ? text : "",
      );
    });
    chart.replaceChildren(...bars, cover, cursor);
    axis.replaceChildren(node("span", {}, `step ${number(first)}`), node("span", {}, number(replay.last)));
    put(chart, null, { "aria-label": `Layer ${layer}: ${plural(rows.length, "block")} served ${plural(all.length, "logical block")} in ${plural(steps, "step")}.` });
    put(heading, `Blocks over time, layer ${layer}: ${plural(rows.length, "physical block")} for ${plural(all.length, "logical block")}`);
  };

  return {
    state: ["step", "layer"],
    step: "step",
    another: () => ui.set({ step: nextAllocation(replay, ui.get("step"), ui.get("layer")) }),
    limits: (key) => (key === "step" ? [first, replay.last] : [0, size.num_layers - 1]),
    draw() {
      const [step, layer] = [ui.get("step"), ui.get("layer")];
      if (drawn !== layer) drawChart((drawn = layer));
      const hidden = ui.ask(nextBlock(replay, step, layer));
      replay.to(hidden ? step - 1 : step);
      pool.draw(replay, layer, null);
      stack.draw(replay);
      cursor.style.left = `${x(step)}%`;
      cursor.style.width = `${width(0, 1)}%`;
      cover.style.left = `${x(hidden ? step : step + 1)}%`;
      cover.hidden = !ui.get("predict");
      slots.replaceChildren(...replay.slots.flatMap((request, slot) => [`slot ${slot} `, request === null ? "free" : tag(replay.sequence(slot)), " "]));
      put(caption, `Step ${number(step)}. ${hidden ? "Predict the block before it is shown." : narrate(replay, step, layer)}`);
    },
  };
}
