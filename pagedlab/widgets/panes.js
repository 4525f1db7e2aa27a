// The panes that several widgets share. They show blocks and their owners; the only arithmetic is the address.

/** Byte of an element, with the term that each index adds. Exact up to 2**53, far beyond any cache. */
function address(layout, at) {
  const terms = {
    physical_block: at.physical_block * layout.block_bytes,
    section: at.section * layout.v_offset,
    token_in_block: at.token_in_block * layout.kv_dim * layout.itemsize,
    kv_head: at.kv_head * layout.head_dim * layout.itemsize,
    lane: at.lane * layout.itemsize,
  };
  return { terms, byte: Object.values(terms).reduce((sum, term) => sum + term, 0) };
}

/** The element that owns a byte: the inverse. The remainder is taken first, so every division is exact. */
function locate(layout, byte) {
  const split = (value, size) => [(value - (value % size)) / size, value % size];
  const [physical_block, in_block] = split(byte, layout.block_bytes);
  const [section, in_section] = split(in_block, layout.v_offset);
  const [element, byte_in_element] = split(in_section, layout.itemsize);
  const [token_in_block, in_token] = split(element, layout.kv_dim);
  const [kv_head, lane] = split(in_token, layout.head_dim);
  return { physical_block, section, token_in_block, kv_head, lane, byte_in_element };
}

/** The value that an element's bytes, lowest address first, stand for. */
function decode(dtype, bytes) {
  const wide = new DataView(new ArrayBuffer(4));
  if (dtype === "float32") bytes.forEach((byte, i) => wide.setUint8(i, byte));
  else if (dtype === "bfloat16") bytes.forEach((byte, i) => wide.setUint8(i + 2, byte));
  else {
    const bits = bytes[0] + 256 * bytes[1];
    const [sign, power, rest] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    if (power === 31) return rest ? NaN : sign * Infinity;
    return sign * (power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -24 * rest);
  }
  return wide.getFloat32(0, true);
}

/** Table, owners and free list. `free` ends with the block that is handed out next. */
class Memory {
  constructor(size) {
    this.size = size; // num_slots, num_layers, max_blocks_per_seq, num_blocks
    this.table = new Int32Array(size.num_slots * size.num_layers * size.max_blocks_per_seq).fill(-1);
    this.owners = new Map(); // physical block -> {sequence, slot, layer, logical_block}
    this.free = [];
  }
  index(slot, layer, logical_block) {
    return (slot * this.size.num_layers + layer) * this.size.max_blocks_per_seq + logical_block;
  }
  lookup(slot, layer, logical_block) {
    return this.table[this.index(slot, layer, logical_block)];
  }
  assign(physical_block, owner) {
    this.table[this.index(owner.slot, owner.layer, owner.logical_block)] = physical_block;
    this.owners.set(physical_block, owner);
  }
  unassign(physical_block, owner) {
    this.table[this.index(owner.slot, owner.layer, owner.logical_block)] = -1;
    this.owners.delete(physical_block);
  }
  /** A table as it stands, with a free list given as runs [first, count]. */
  static of(size, entries, runs) {
    const memory = new Memory(size);
    entries.forEach((physical_block, i) => {
      if (physical_block < 0) return;
      const logical_block = i % size.max_blocks_per_seq;
      const row = (i - logical_block) / size.max_blocks_per_seq;
      const layer = row % size.num_layers;
      const slot = (row - layer) / size.num_layers;
      memory.assign(physical_block, { sequence: slot, slot, layer, logical_block });
    });
    for (const [first, count] of runs ?? []) for (let i = 0; i < count; i++) memory.free.push(first + i);
    return memory;
  }
}

const anyOf = (list) => list[Math.floor(Math.random() * list.length)];

/** Makes a parent's children match `items`, reusing the nodes that are there. */
function fill(parent, items, make, show) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, i) => show(parent.children[i], item));
}

const HIDDEN = "?";

/** One row of entries per slot, for one layer: logical block above, physical block below. */
function tablePane(ui, { pick }) {
  const body = node("div", { class: "pl-table" });
  const rows = [];
  const cell = () => node("button", { type: "button", class: "pl-cell", tabindex: -1, "data-item": "" }, node("small"), node("b"));
  const items = () => [...body.querySelectorAll("[data-item]")];
  roving(body, items);
  body.addEventListener("click", (event) => {
    const at = event.target.closest("[data-item]");
    if (at) pick(Number(at.dataset.slot), Number(at.dataset.logical));
  });
  return {
    node: node("section", {}, node("h4", {}, "Block table"), body),
    /** here: {slot, logical_block}; sequence(slot): index or null; hidden(slot, logical): show "?" */
    draw(memory, layer, here, sequence, hidden = () => false) {
      const { num_slots, max_blocks_per_seq } = memory.size;
      while (rows.length < num_slots) {
        const row = { head: node("div", { class: "pl-row-head" }), cells: node("div", { class: "pl-cells" }), more: node("span", { class: "pl-soft" }) };
        body.append(node("div", { class: "pl-row" }, row.head, row.cells, row.more));
        rows.push(row);
      }
      let stop = null;
      rows.forEach(({ head, cells, more }, slot) => {
        let used = 0;
        for (let i = 0; i < max_blocks_per_seq; i++) if (memory.lookup(slot, layer, i) >= 0 || hidden(slot, i)) used = i + 1;
        const shown = Math.min(max_blocks_per_seq, Math.max(used + 2, here.slot === slot ? here.logical_block + 1 : 0));
        const owner = sequence(slot);
        if (head.dataset.owner !== String(owner)) {
          head.dataset.owner = owner;
          head.replaceChildren(`slot ${slot} `, owner === null ? "" : tag(owner));
        }
        fill(cells, Array.from({ length: shown }, (_, i) => i), cell, (it, i) => {
          const block = memory.lookup(slot, layer, i);
          const secret = hidden(slot, i);
          const at = here.slot === slot && here.logical_block === i;
          put(it.firstChild, i);
          put(it.lastChild, secret ? HIDDEN : block < 0 ? "−1" : block);
          put(it, null, {
            class: `pl-cell ${block < 0 || owner === null ? "pl-none" : colour(owner)}${at ? " pl-here" : ""}`,
            "data-key": block < 0 || secret ? null : `b${block}`,
            "data-slot": slot,
            "data-logical": i,
            "aria-label": `slot ${slot}, layer ${layer}, logical block ${i}: ${secret ? "hidden" : block < 0 ? "-1, unassigned" : `physical block ${block}`}`,
            "aria-pressed": at,
          });
          if (at) stop = it;
        });
        put(more, shown < max_blocks_per_seq ? `… ${number(max_blocks_per_seq - shown)} more −1` : "");
      });
      if (!body.contains(document.activeElement)) for (const it of items()) it.tabIndex = it === (stop ?? body.querySelector("[data-item]")) ? 0 : -1;
    },
  };
}

const POOL_CELLS = 128;

/** The physical blocks in order; in a large pool, runs that are free or another layer's shrink to one cell. */
function poolPane() {
  const cells = node("div", { class: "pl-pool", role: "img" });
  const heading = node("h4");
  const cell = () => node("div", {}, node("b"), node("small"));
  const listed = (memory, layer) => {
    const { num_blocks } = memory.size;
    if (num_blocks <= POOL_CELLS) return Array.from({ length: num_blocks }, (_, block) => ({ block, count: 1 }));
    const items = [];
    const add = (block, count, sequence) => {
      const last = items[items.length - 1];
      if (last && last.sequence === sequence && sequence !== undefined) last.count += count;
      else items.push({ block, count, sequence });
    };
    let next = 0;
    for (const block of [...memory.owners.keys()].sort((a, b) => a - b)) {
      if (block > next) add(next, block - next, null);
      const owner = memory.owners.get(block);
      add(block, 1, owner.layer === layer ? undefined : owner.sequence);
      next = block + 1;
    }
    if (next < num_blocks) add(next, num_blocks - next, null);
    return items;
  };
  return {
    node: node("section", {}, heading, cells),
    draw(memory, layer, here) {
      const { num_blocks, num_layers } = memory.size;
      put(heading, `Physical blocks, ${number(num_blocks)} of them`);
      put(cells, null, { "aria-label": `${plural(memory.owners.size, "block")} owned, ${number(num_blocks - memory.owners.size)} free.${num_layers > 1 ? ` Bright blocks belong to layer ${layer}.` : ""}` });
      fill(cells, listed(memory, layer), cell, (it, { block, count }) => {
        const owner = memory.owners.get(block);
        const dim = owner && owner.layer !== layer;
        const run = count > 1;
        put(it.firstChild, owner && !dim ? letter(owner.sequence) + owner.logical_block : owner ? letter(owner.sequence) : run ? "free" : "");
        put(it.lastChild, run ? `${block}–${block + count - 1}` : block);
        put(it, null, {
          class: `pl-cell ${owner ? colour(owner.sequence) : "pl-none"}${dim ? " pl-dim" : ""}${run ? " pl-gap" : ""}${block === here ? " pl-here" : ""}`,
          "data-key": run ? null : `b${block}`,
        });
      });
    },
  };
}

const STACK_CELLS = 8;

/** The free list as a stack: the block on top is handed out next, a released one is put on top. */
function freePane() {
  const cells = node("ol", { class: "pl-stack" });
  const heading = node("h4");
  const more = node("div", { class: "pl-soft" });
  return {
    node: node("section", {}, heading, cells, more),
    draw(memory) {
      const top = memory.free.slice(-STACK_CELLS).reverse();
      put(heading, `Free list, ${plural(memory.free.length, "block")}`);
      fill(cells, top, () => node("li", { class: "pl-cell pl-none" }, node("b"), node("small")), (it, block) => {
        put(it.firstChild, block);
        put(it.lastChild, block === top[0] ? "next" : "");
        put(it, null, { "data-key": `b${block}` });
      });
      const rest = memory.free.length - top.length;
      put(more, rest > 0 ? `… ${number(rest)} below` : top.length ? "" : "Empty: the next request for a block is refused.");
    },
  };
}

/** The three substitutions, the byte in four bars drawn to scale, and the value stored there. */
function addressPane(ui, { pick }) {
  const text = (name) => node("span", { class: "pl-num", "data-value": name });
  const value = {};
  for (const name of ["logical", "token", "entry", "byte", "stored", "view", "owner"]) value[name] = text(name);
  const why = node("div", { class: "pl-message", role: "note" });
  const cards = node(
    "ol",
    { class: "pl-cards" },
    node("li", {}, node("h4", {}, "position → logical block"), value.logical, node("br"), value.token),
    node("li", {}, node("h4", {}, "table → physical block"), value.entry),
    node("li", {}, node("h4", {}, "block → byte"), value.byte),
  );

  const strip = (name) => {
    const marker = node("i", { class: "pl-marker pl-moves" });
    const bar = node("div", { class: `pl-strip pl-strip-${name}` }, marker);
    const term = text(`term-${name}`);
    const zoom = node("svg:svg", { class: "pl-zoom", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, node("svg:path"));
    const what = [node("b"), node("span", { class: "pl-soft" })];
    let cells = 1;
    const choose = (event) => {
      const box = bar.getBoundingClientRect();
      pick(name, clamp(Math.floor(((event.clientX - box.left) / box.width) * cells), [0, cells - 1]));
    };
    bar.addEventListener("pointerdown", (event) => {
      bar.setPointerCapture(event.pointerId);
      choose(event);
    });
    bar.addEventListener("pointermove", (event) => event.buttons === 1 && choose(event));
    return {
      node: node("div", { class: "pl-level" }, node("div", { class: "pl-term" }, node("span", {}, ...what), term), bar, zoom),
      bar,
      draw(index, num_cells, formula, label, of) {
        cells = num_cells;
        const left = (index / num_cells) * 100;
        bar.style.setProperty("--n", num_cells <= 256 ? num_cells : 1);
        marker.style.left = `min(${left}%, 100% - 3px)`;
        marker.style.width = `${100 / num_cells}%`;
        put(zoom.firstChild, null, { d: `M${left},0H${left + 100 / num_cells}L100,10H0Z` });
        put(term, formula);
        put(what[0], label);
        put(what[1], ` ${of}`);
      },
    };
  };
  const bars = {
    physical_block: strip("physical_block"),
    token_in_block: strip("token_in_block"),
    kv_head: strip("kv_head"),
    lane: strip("lane"),
  };
  bars.token_in_block.bar.prepend(node("span", { class: "pl-half pl-half-k" }, "K"), node("span", { class: "pl-half pl-half-v" }, "V"));
  const scale = node("div", { class: "pl-scale", role: "img" }, ...Object.values(bars).map((bar) => bar.node));
  const sum = node("p", { class: "pl-sum" });
  const read = node("div", { class: "pl-read" }, node("h4", {}, "The value there"), value.stored, node("br"), value.view);
  const inverse = node("p", { class: "pl-inverse" }, value.owner);

  return {
    node: node("section", { class: "pl-address" }, cards, why, scale, sum, read),
    inverse,
    value,
    /**
     * at: slot, layer, position (null when a block is chosen directly), logical_block, token_in_block,
     * physical_block, section, kv_head, lane; why: text where there is no byte; stored: {bytes, view} or
     * a text; hidden: the byte is asked for; secret: the block is.
     */
    draw(layout, num_blocks, at, { why: reason, stored, hidden = false, secret = false }) {
      const { terms, byte } = address(layout, at);
      const known = !reason && !hidden;
      const direct = at.position === null;
      cards.children[0].hidden = direct;
      put(value.logical, direct ? "" : `${number(at.position)} // ${layout.block_size} = ${at.logical_block}  logical_block`);
      put(value.token, direct ? "" : `${number(at.position)} % ${layout.block_size} = ${at.token_in_block}  token_in_block`);
      put(value.entry, direct ? `${number(at.physical_block)}, chosen by you` : `block_table[${at.slot}, ${at.layer}, ${at.logical_block}] = ${secret ? HIDDEN : at.physical_block < 0 ? "−1" : number(at.physical_block)}`, { "data-key": secret || direct || at.physical_block < 0 ? null : `b${at.physical_block}` });
      put(value.byte, reason ? "no byte" : hidden ? HIDDEN : `${"KV"[at.section]} byte ${number(byte)}`);
      why.hidden = !reason;
      put(why, reason ?? "");
      scale.hidden = sum.hidden = read.hidden = Boolean(reason);
      if (reason) return byte;
      put(scale, null, { "aria-label": hidden ? "The byte is hidden: predict it." : `Block ${at.physical_block} of ${num_blocks}; in it ${"KV"[at.section]}, token ${at.token_in_block}; in it kv head ${at.kv_head}; in it lane ${at.lane}.` });
      const equals = (value) => (known ? ` = ${number(value)}` : "");
      bars.physical_block.draw(
        at.physical_block, num_blocks, `${number(at.physical_block)} × ${number(layout.block_bytes)}${equals(terms.physical_block)}`,
        `physical_block ${number(at.physical_block)}`, `of ${number(num_blocks)} in the cache`,
      );
      bars.token_in_block.draw(
        at.section * layout.block_size + at.token_in_block, 2 * layout.block_size,
        `${at.section ? `${number(layout.v_offset)} + ` : ""}${at.token_in_block} × ${number(layout.kv_dim * layout.itemsize)}${equals(terms.section + terms.token_in_block)}`,
        `${"KV"[at.section]}, token_in_block ${at.token_in_block}`, `of ${layout.block_size} in the block`,
      );
      bars.token_in_block.bar.classList.toggle("pl-early", at.token_in_block < layout.block_size / 2);
      bars.kv_head.draw(
        at.kv_head, layout.num_kv_heads, `${at.kv_head} × ${layout.head_dim * layout.itemsize}${equals(terms.kv_head)}`,
        `kv_head ${at.kv_head}`, `of ${layout.num_kv_heads} in the token`,
      );
      bars.lane.draw(
        at.lane, layout.head_dim, `${at.lane} × ${layout.itemsize}${equals(terms.lane)}`,
        `lane ${at.lane}`, `of ${layout.head_dim} in the head`,
      );
      put(sum, hidden ? "" : `${[terms.physical_block, terms.section + terms.token_in_block, terms.kv_head, terms.lane].map(number).join(" + ")} = ${number(byte)}`);
      read.hidden ||= stored === "";
      const text = typeof stored === "string" ? stored : null;
      put(value.view, "");
      if (text !== null) return put(value.stored, text), byte;
      const hex = [...stored.bytes].map((it) => it.toString(16).padStart(2, "0")).join(" ");
      const found = decode(layout.dtype, stored.bytes);
      const same = Object.is(found, stored.view) || (Number.isNaN(found) && Number.isNaN(stored.view));
      put(value.stored, `${hidden ? "bytes there" : `bytes ${number(byte)} to ${number(byte + layout.itemsize - 1)}`}: ${hex} = ${found}`);
      put(value.view, `${stored.name} = ${stored.view} ${same ? "✓ equal" : "✗ differs"}`, { class: `pl-num ${same ? "" : "pl-bad"}` });
      return byte;
    },
  };
}

/** The values that travel with a widget: rows of [K, V] x kv_dim for some positions of some layers. */
function recorded(ui) {
  const { rows = [] } = ui.data.stored ?? {};
  const { layout } = ui.data;
  const raw = typed(ui.get("raw"), Uint8Array);
  const values = typed(ui.get("values"), Float32Array);
  return (sequence, at) => {
    const found = rows.find((it) => it.sequence === sequence && it.layer === at.layer && at.position >= it.start && at.position < it.start + it.count);
    if (!found) return null;
    const element = ((found.row + at.position - found.start) * 2 + at.section) * layout.kv_dim + at.kv_head * layout.head_dim + at.lane;
    const name = `cache.${"kv"[at.section]}_view()[${at.physical_block}, ${at.token_in_block}, ${at.kv_head}, ${at.lane}]`;
    return { bytes: raw.subarray(element * layout.itemsize, (element + 1) * layout.itemsize), view: values[element], name };
  };
}
