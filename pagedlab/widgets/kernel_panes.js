// The debugger's panes. Each draws one step of a trace; where `secret`, what the step assigns stays hidden.

/** The source; a click on a line goes to the next time it runs. */
function sourcePane(ui, { stream }) {
  const { codes, lines, first_line } = ui.data;
  const runs = new Map(); // line -> steps whose statement begins there
  stream.forEach((code, step) => {
    const line = codes[code][0];
    if (!runs.has(line)) runs.set(line, []);
    runs.get(line).push(step);
  });
  const rows = lines.map((pieces, i) => {
    const line = first_line + i;
    const code = node("code", {}, ...pieces.map(([kind, part]) => (kind ? node("span", { class: `pl-t-${kind}` }, part) : part)));
    const inside = [node("span", { class: "pl-line-number" }, line), code];
    if (!runs.has(line)) return node("div", { class: "pl-line" }, ...inside);
    return node("button", { type: "button", class: "pl-line", tabindex: -1, "data-item": "", "data-line": line, title: "Go to the next time this line runs" }, ...inside);
  });
  const listing = node("div", { class: "pl-listing pl-source" }, ...rows);
  const stops = [...listing.querySelectorAll("[data-item]")];
  roving(listing, () => stops);
  stops[0].tabIndex = 0;
  listing.addEventListener("click", (event) => {
    const line = Number(event.target.closest("[data-item]")?.dataset.line);
    if (!runs.has(line)) return;
    const steps = runs.get(line);
    ui.set({ step: steps[upTo(steps, ui.get("step"))] ?? steps[0] });
  });
  let marked = [];
  const drawSource = (from, to) => {
    for (const row of marked) put(row, null, { "aria-current": null });
    marked = rows.slice(from - first_line, to - first_line + 1);
    for (const row of marked) put(row, null, { "aria-current": "step" });
    reveal(listing, marked);
  };

  return { node: listing, draw: drawSource };
}

/** Every variable that has a value, the ones just assigned marked. */
function variablesPane(ui, { when, assigned }) {
  const { variables } = ui.data;
  const spark = () => node("svg:svg", { class: "pl-spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, node("svg:path"), node("svg:rect", { y: 0, height: 20 }));
  const drawSpark = (svg, numbers, lane) => {
    const finite = numbers.filter(Number.isFinite);
    const most = finite.reduce((max, x) => Math.max(max, Math.abs(x)), 0) || 1;
    const width = 100 / numbers.length;
    const floor = finite.some((x) => x < 0) ? 10 : 20;
    let d = "";
    numbers.forEach((x, i) => {
      if (x) d += `M${(i * width).toFixed(2)},${floor}h${(width * 0.85).toFixed(2)}V${(floor - ((Number.isFinite(x) ? x : most) / most) * floor).toFixed(2)}h${(-width * 0.85).toFixed(2)}z`;
    });
    put(svg.firstChild, null, { d });
    put(svg.lastChild, null, { x: (lane ?? 0) * width, width: lane === null ? 0 : width });
  };
  const table = variables.map((it) => {
    const row = node("div", { class: "pl-variable" }, node("b", {}, it.name), numeral(it.name));
    if (it.kind === "array") row.append(spark());
    return row;
  });
  const local = table.filter((_, i) => !variables[i].argument || when[i].length > 1);
  const fixed = table.filter((row) => !local.includes(row));
  const variablePane = node(
    "section", { class: "pl-variables", tabindex: 0, "aria-label": "variables" },
    ...local,
    ...(fixed.length ? [node("details", {}, node("summary", {}, "arguments and constants"), ...fixed)] : []),
  );
  const drawVariables = (step, secret, changed) => {
    table.forEach((row, i) => {
      const count = upTo(when[i], step);
      row.hidden = !count;
      if (!count) return put(row, null, { "data-new": null });
      const isNew = changed.includes(i);
      const value = assigned(i, count - 1);
      put(row, null, { "data-new": isNew ? "" : null });
      const cell = row.children[1];
      if (isNew && secret) return putHidden(cell);
      if (variables[i].kind !== "array") return putNumber(cell, value, variables[i].bool);
      const drawn = row.children[2];
      drawn.toggleAttribute("hidden", !value || value.numbers.length < 2);
      if (!value) return put(cell, "not recorded here", { "data-number": null, class: "pl-num pl-soft" });
      const { shape, numbers } = value;
      if (!shape.length) return putNumber(cell, numbers[0], variables[i].bool);
      const lane = laneOf(ui, value);
      put(cell, showArray(ui, value, variables[i].bool), { "data-number": lane === null ? null : numbers[lane], class: "pl-num" });
      if (row.dataset.drawn !== `${count}.${lane}`) {
        row.dataset.drawn = `${count}.${lane}`;
        drawSpark(drawn, numbers, lane);
      }
    });
    reveal(variablePane, changed.map((i) => table[i]));
  };

  return { node: variablePane, draw: drawVariables };
}

/** What the step reads or writes: a KV block drawn by token and head, or the place in an argument. */
function memoryPane(ui, { stream, offsets, before }) {
  const { codes, layout, shapes } = ui.data;
  const memoryTitle = node("h4");
  const memoryText = node("p", { class: "pl-memory-text" });
  const halves = layout
    ? ["K", "V"].map((name) => {
        const [columns, height] = [layout.num_kv_heads, layout.block_size];
        const grid = node("svg:svg", { viewBox: `0 0 ${columns} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
        for (let row = 0; row < height; row++) for (let head = 0; head < columns; head++) grid.append(node("svg:rect", { x: head, y: row, width: 1, height: 1 }));
        return { grid, node: node("div", { class: `pl-half-grid pl-half-grid-${name.toLowerCase()}` }, node("b", {}, name), grid) };
      })
    : [];
  const blockDrawing = node("div", { class: "pl-block-drawing" }, node("span", { class: "pl-soft" }, "tokens ↓, kv heads →"), ...halves.map((half) => half.node));
  const marker = node("i", { class: "pl-marker pl-moves" });
  const strip = node("div", { class: "pl-strip", role: "img" }, marker);
  const pane = node("section", { class: "pl-memory" }, memoryTitle, memoryText, blockDrawing, strip);
  const verbs = { load: ["reads", "read"], store: ["writes", "wrote"], atomic: ["updates", "updated"] };
  const accessAt = (index) => {
    const step = upTo(before, index) - 1;
    return { step, offset: offsets[index], access: codes[stream[step]][3][index - before[step]] };
  };
  const extent = ([, , dims]) => (dims ?? []).reduce((sum, [count, stride]) => sum + (count - 1) * stride, 0);
  /** The cells [token, kv head] of one section that an access touches. */
  const cells = ({ offset, access }) => {
    let starts = [offset];
    for (const [count, stride] of access[2] ?? []) if (stride !== 1) starts = starts.flatMap((at) => Array.from({ length: count }, (_, i) => at + i * stride));
    const heads = access[2]?.find(([, stride]) => stride === 1)?.[0] ?? 1;
    return starts.flatMap((at) => Array.from({ length: Math.ceil(heads / layout.head_dim) }, (_, i) => locate(layout, at + i * layout.head_dim)));
  };
  /** A step's first access that touches anything: [kind, argument, offset, live elements]; or undefined. */
  const accessOf = (step) => {
    for (let i = before[step]; i < before[step + 1]; i++) {
      const { access: [kind, argument, , live], offset } = accessAt(i);
      if (live) return [kind, argument, offset, live];
    }
  };
  const drawMemory = (step, secret) => {
    const end = before[step + 1];
    pane.hidden = end === 0;
    if (!end) return;
    const now = before[step + 1] > before[step];
    const current = Array.from({ length: now ? end - before[step] : 1 }, (_, i) => accessAt(end - 1 - i));
    const [{ access, offset, step: at }] = current;
    const [kind, argument, dims, live, total] = access;
    put(pane, null, { "data-now": now ? "" : null });
    const high = offset + extent(access);
    const where = `${argument}[${high > offset ? `${number(offset)} … ${number(high)}` : number(offset)}]`;
    put(memoryTitle, now ? `This line ${current.map((it) => verbs[it.access[0]][0]).at(-1)} memory` : `Memory that line ${codes[stream[at]][0]} ${verbs[kind][1]}, ${plural(step - at, "step")} ago`);
    const counted = live === total ? plural(live, "element") : `${number(live)} of ${plural(total, "element")}, the others masked`;
    if (secret && now) {
      blockDrawing.hidden = strip.hidden = true;
      return void put(memoryText, `${argument}[${HIDDEN}], ${counted}`, { "data-offset": null });
    }
    const inBlock = layout && argument === ui.data.cache && live > 0;
    blockDrawing.hidden = !inBlock;
    strip.hidden = Boolean(inBlock) || !shapes[argument];
    if (inBlock) {
      const found = locate(layout, offset);
      const touched = cells(current[0]);
      put(memoryText, `${where}, ${counted}: physical block ${number(found.physical_block)}, ${"KV"[found.section]}, ${touched.length > 1 ? `tokens ${found.token_in_block} to ${touched.at(-1).token_in_block}` : `token ${found.token_in_block}`}, kv head ${found.kv_head}`, { "data-offset": offset });
      const key = (section, it) => `${section}.${it.token_in_block}.${it.kv_head}`;
      const seen = new Set();
      for (let i = end - 1, budget = 4 * layout.block_size; i >= 0 && budget > 0; i--, budget--) {
        const past = accessAt(i);
        if (past.access[1] !== argument || !past.access[3]) continue;
        const its = cells(past);
        if (its[0].physical_block !== found.physical_block) break;
        for (const it of its) seen.add(key(it.section, it));
      }
      const hot = new Set(touched.map((it) => key(it.section, it)));
      halves.forEach(({ grid }, section) => {
        [...grid.children].forEach((rect, i) => {
          const id = key(section, { token_in_block: Math.floor(i / layout.num_kv_heads), kv_head: i % layout.num_kv_heads });
          put(rect, null, { class: hot.has(id) ? "pl-hot" : seen.has(id) ? "pl-seen" : null });
        });
      });
      return;
    }
    put(memoryText, `${where}, ${counted}${dims ? "" : ", scattered"}${shapes[argument] ? `; ${argument} is [${shapes[argument].join(", ")}]` : ""}`, { "data-offset": offset });
    if (strip.hidden) return;
    const size = shapes[argument].reduce((product, n) => product * n, 1) || 1;
    put(strip, null, { "aria-label": `element ${offset} of ${size}` });
    strip.style.setProperty("--n", size <= 64 ? size : 1);
    marker.style.left = `min(${(offset / size) * 100}%, 100% - 3px)`;
    marker.style.width = `${((high - offset + 1) / size) * 100}%`;
  };

  return { node: pane, draw: drawMemory, accessOf };
}

/** A reduction by halves: its levels, and the sums on the way of one lane. */
function lanesPane(ui, { when, assigned, statementOf }) {
  const { tree } = ui.data;
  const width = tree.lanes / 2;
  const group = tree.lanes === 64 ? "warp" : "half";
  const ROW = 26;
  const height = tree.levels * ROW;
  const drawing = node("svg:svg", { class: "pl-lanes", viewBox: `0 0 ${2 * width + 2} ${height}`, preserveAspectRatio: "none", role: "img" });
  const wires = node("svg:g", { class: "pl-lane-wires" });
  const levels = Array.from({ length: tree.levels }, (_, level) =>
    Array.from({ length: tree.lanes >> level }, (_, i) => {
      const per = width >> level;
      const rect = node("svg:rect", { x: (i < per ? 0 : width + 2) + (i % per), y: level * ROW, width: 0.86, height: 13, rx: 0.2 });
      drawing.append(rect);
      return rect;
    }),
  );
  drawing.append(wires);
  drawing.addEventListener("click", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * (2 * width + 2);
    ui.set({ lane: clamp(Math.floor(x < width + 1 ? x : x - 2), [0, tree.lanes - 1]) });
  });
  const labels = node("div", { class: "pl-lane-labels" }, node("span", {}, `${group} 0`), node("span", {}, `${group} 1`));
  const list = node("ol", { class: "pl-lane-sums", start: 0 });
  const items = Array.from({ length: tree.levels + 1 }, () => node("li", {}, node("span", { class: "pl-soft" }), numeral("partial")));
  list.append(...items);
  const why = node("div", { class: "pl-message", role: "note" });
  const key = node("p", { class: "pl-lane-key" }, "Blue is positive, orange negative, stronger is larger. Click a lane to follow it.");
  const body = node("div", {}, labels, drawing, key, list);
  return {
    node: node("section", { class: "pl-lanes-pane" }, why, body),
    /** Index of the reduction that runs or ran last at a step, and how many levels it has done. */
    at(step) {
      const count = upTo(when[tree.variable], step);
      const index = upTo(tree.starts, count - 1) - 1;
      return { index, done: index < 0 ? 0 : Math.min(count - tree.starts[index], tree.levels), beyond: count - tree.starts[Math.max(index, 0)] > tree.levels };
    },
    value(index, level, i) {
      return assigned(tree.variable, tree.starts[index] + level)?.numbers[i];
    },
    draw(step, secret, changed) {
      const { index, done, beyond } = this.at(step);
      const reason = index < 0 ? "The reduction has not begun: step on." : beyond ? `Lanes are recorded for the first ${plural(tree.starts.length, ui.data.token_is)} only.` : "";
      why.hidden = !reason;
      body.hidden = Boolean(reason);
      put(why, reason);
      if (reason) return;
      const lane = ui.get("lane");
      const [side, within] = [Math.floor(lane / width), lane % width];
      const all = assigned(tree.variable, tree.starts[index]).numbers;
      const most = all.reduce((max, x) => Math.max(max, Math.abs(x)), 0) || 1;
      const x = (level, i) => (i < width >> level ? 0 : width + 2) + (i % (width >> level)) + 0.43;
      let d = "";
      const path = [];
      for (let level = 0; level < tree.levels; level++) {
        const per = width >> level;
        const known = level < done && !(secret && level === done - 1 && changed.includes(tree.variable));
        const here = side * per + (within % per);
        const inputs = level ? [side * 2 * per + (within % per), side * 2 * per + (within % per) + per] : [];
        path.push({ level, here, inputs, known, reached: level < done });
        levels[level].forEach((rect, i) => {
          const value = known ? this.value(index, level, i) : 0;
          const strength = known ? Math.min(1, Math.abs(value) / most) : 0;
          put(rect, null, {
            class: `${known ? (value < 0 ? "pl-minus" : "pl-plus") : "pl-later"}${i === here ? " pl-path" : ""}`,
            "fill-opacity": known ? (0.12 + 0.88 * strength).toFixed(3) : null,
          });
        });
        if (level && level < done) for (const input of inputs) d += `M${x(level - 1, input)},${(level - 1) * ROW + 13}L${x(level, here)},${level * ROW}`;
      }
      wires.replaceChildren(node("svg:path", { d, "vector-effect": "non-scaling-stroke" }));
      for (const { level, here, inputs, known, reached } of path) {
        const [label, value] = items[level].children;
        items[level].hidden = !reached;
        if (!reached) continue;
        const operands = inputs.map((i) => showNumber(this.value(index, level - 1, i)));
        put(label, level ? `${plural(width >> level, "lane")} apart: ${operands.join(" + ")} = ` : `lane ${lane}: `);
        if (known) putNumber(value, this.value(index, level, here));
        else putHidden(value);
        put(items[level], null, { "data-level": level });
      }
      const [label, value] = items[tree.levels].children;
      const ended = when[tree.variable][tree.starts[index] + tree.levels - 1];
      const result = tree.result === null ? 0 : upTo(when[tree.result], step);
      const there = done === tree.levels && tree.result !== null && result > 0 && when[tree.result][result - 1] > ended;
      items[tree.levels].hidden = !there;
      if (there) {
        const [left, right] = [0, 1].map((i) => showNumber(this.value(index, tree.levels - 1, i)));
        put(label, `across the ${group === "warp" ? "warps" : "halves"}, from ${left} and ${right}: ${statementOf(when[tree.result][result - 1])} = `);
        if (secret && when[tree.result][result - 1] === step) putHidden(value);
        else putNumber(value, assigned(tree.result, result - 1));
      }
      put(drawing, null, { "aria-label": `${done} of ${tree.levels} levels done. Lane ${lane} is followed; its sums are listed below.` });
    },
  };
}

/** The online softmax at one token, next to the plain one and to one without the maximum. */
function softmaxPane(ui, { column, when, assigned }) {
  const { softmax, tokens } = ui.data;
  const data = Object.fromEntries(Object.entries(softmax.columns).map(([name, index]) => [name, column(index)]));
  const count = data.scores.length;
  const finite = data.scores.filter(Number.isFinite);
  const [low, high] = [finite.reduce((a, b) => Math.min(a, b), 0), finite.reduce((a, b) => Math.max(a, b), 0.001)];
  const y = (value) => (Number.isFinite(value) ? 58 - ((value - low) / (high - low || 1)) * 54 : 60);
  const x = (i) => ((i + 0.5) / count) * 100;
  const chart = node("svg:svg", { class: "pl-soft-chart", viewBox: "0 0 100 60", preserveAspectRatio: "none", role: "img" });
  const scoreLine = node("svg:path", { class: "pl-soft-scores", "vector-effect": "non-scaling-stroke", d: [...data.scores].map((value, i) => `M${x(i).toFixed(3)},${y(0).toFixed(2)}V${y(value).toFixed(2)}`).join("") });
  const maxLine = node("svg:path", { class: "pl-soft-max", "vector-effect": "non-scaling-stroke" });
  const cover = node("svg:rect", { class: "pl-soft-cover", y: 0, height: 60 });
  const cursor = node("svg:path", { class: "pl-soft-cursor", "vector-effect": "non-scaling-stroke" });
  chart.append(scoreLine, maxLine, cover, cursor);
  const maxima = softmax.roles.new_max;
  const maxPoints = [];
  if (maxima) {
    for (let i = 0; i < tokens.length; i++) {
      const value = assigned(maxima[0], maxima[1] + i * maxima[2]);
      const [from, to] = [i ? data.stops[i - 1] : 0, data.stops[i]];
      if (to > from) maxPoints.push(`${maxPoints.length ? "L" : "M"}${((from / count) * 100).toFixed(3)},${y(value).toFixed(2)}H${((to / count) * 100).toFixed(3)}`);
    }
    put(maxLine, null, { d: maxPoints.join("") });
  }
  const labels = { score: "score", new_max: "max so far", correction: "correction of d and acc", weight: "weight", d: "d", acc: "acc" };
  const online = Object.fromEntries(Object.keys(labels).filter((role) => softmax.roles[role]).map((role) => [role, numeral(`online-${role}`)]));
  const plain = { max: numeral("plain-max"), sum: numeral("plain-sum"), weight: numeral("plain-weight") };
  const wide = Object.fromEntries(["wide", "exp", "sum", "unsafe", "safe"].map((name) => [name, numeral(`unsafe-${name}`)]));
  const row = (label, value) => node("div", { class: "pl-variable" }, node("span", {}, label), value);
  const roleLabels = new Map();
  const onlineBox = node("section", {}, node("h4", {}, "online, as the kernel goes"), ...Object.entries(online).map(([role, value]) => {
    const made = row(labels[role], value);
    roleLabels.set(role, made.firstChild);
    return made;
  }));
  const plainBox = node("section", {}, node("h4", {}, "plain softmax, all scores first"), row("max of all", plain.max), row("sum of all exp(score − max)", plain.sum), row("softmax weight", plain.weight));
  const wideBox = node("section", {}, node("h4", {}, softmax.gain > 1 ? `without the max, scores × ${softmax.gain}` : "without the max"), row("score", wide.wide), row("exp(score)", wide.exp), row("sum so far", wide.sum), row("exp / final sum", wide.unsafe), row("softmax with the max", wide.safe));
  const toggle = node("button", { type: "button", class: "pl-button", onclick: () => ui.set({ unsafe: 1 - ui.get("unsafe") }) }, "Without the max");
  const heading = node("h4");
  return {
    node: node("section", { class: "pl-softmax" }, heading, chart, node("div", { class: "pl-twice" }, onlineBox, plainBox, wideBox), toggle),
    draw(step, secret) {
      const token = ui.get("token");
      const unsafe = ui.get("unsafe") === 1;
      const stop = data.stops[token];
      const from = token ? data.stops[token - 1] : 0;
      const started = step >= tokens[token];
      const ready = (role, of = token) => {
        const [variable, base, stride] = softmax.roles[role];
        const index = base + of * stride;
        return when[variable][index] <= step ? { variable, index } : null;
      };
      const scored = softmax.roles.score && ready("score");
      const hidden = secret && ["score", "new_max"].some((role) => {
        const at = softmax.roles[role] && ready(role);
        return at && when[at.variable][at.index] === step;
      });
      const seen = scored && !hidden ? stop : from;
      put(heading, `${ui.data.token_is} ${token} of ${tokens.length}: scores (bars) and the running max (line)`);
      put(cover, null, { x: (seen / count) * 100, width: 100 - (seen / count) * 100 });
      put(cursor, null, { d: started ? `M${((from + Math.max(1, stop - from) / 2) / count) * 100},0V60` : "" });
      put(chart, null, { "aria-label": `${plural(seen, "score")} of ${number(count)} seen` });
      plainBox.hidden = unsafe;
      wideBox.hidden = !unsafe;
      put(toggle, null, { "aria-pressed": unsafe });
      for (const [role, element] of Object.entries(online)) {
        const early = !ready(role) && token > 0 && ["new_max", "d", "acc"].includes(role); // still the last token's
        const at = ready(role, early ? token - 1 : token);
        let value = at ? assigned(at.variable, at.index) : undefined;
        if (value && typeof value === "object") {
          const lane = value.numbers.length === 1 ? 0 : Math.min(ui.get("lane"), value.numbers.length - 1);
          put(roleLabels.get(role), `${labels[role]}${value.numbers.length > 1 ? `[${lane}]` : ""}`);
          value = value.numbers[lane];
        }
        if (at && secret && when[at.variable][at.index] === step) putHidden(element);
        else if (value === null) put(element, "not recorded here", { "data-number": null, class: "pl-num pl-soft" });
        else putNumber(element, value);
        element.classList.toggle("pl-soft", early);
      }
      const one = stop - from === 1 && scored && !hidden;
      putNumber(plain.max, data.max[0]);
      putNumber(plain.sum, data.total[0]);
      putNumber(plain.weight, one ? data.plain[from] : undefined);
      for (const name of Object.keys(wide)) putNumber(wide[name], one || (name === "sum" && scored) ? data[name][name === "sum" ? stop - 1 : from] : undefined);
    },
  };
}
