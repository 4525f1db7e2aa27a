/** Text, table, address and free list of one run; a step or a token moves them all. */
function DecodeExplorer(ui) {
  const { layout, size } = ui.data;
  const replay = new Replay(size, ui.data.events, Object.keys(ui.data.texts));
  let stored = recorded(ui);
  const caption = node("p", { class: "pl-caption", role: "status" });
  const text = node("div", { class: "pl-texts" });
  const table = tablePane(ui, { pick: (slot, logical_block) => choose(slot, logical_block * layout.block_size) });
  const stack = freePane();
  const pool = poolPane();
  const pane = addressPane(ui, {
    pick(name, index) {
      if (name === "token_in_block") {
        const logical_block = Math.floor(ui.get("token") / layout.block_size);
        ui.set({ section: Math.floor(index / layout.block_size) });
        choose(ui.get("slot"), logical_block * layout.block_size + (index % layout.block_size));
      } else if (name === "physical_block") {
        const owner = replay.owners.get(index);
        if (owner?.layer === ui.get("layer")) choose(owner.slot, owner.logical_block * layout.block_size);
      } else ui.set({ [name]: index });
    },
  });
  const origin = node("p", { class: "pl-soft pl-origin" });
  const next = node("button", { type: "button", class: "pl-button pl-main", hidden: "" }, "Next token");
  next.addEventListener("click", () => ui.model.send({ do: "next token" }));
  ui.root.append(
    next,
    text,
    caption,
    node("div", { class: "pl-columns" }, node("div", { class: "pl-wide" }, table.node, pool.node), stack.node),
    pane.node,
    origin,
  );

  const capacity = size.max_blocks_per_seq * layout.block_size;
  const choose = (slot, token) => ui.set({ slot, token: clamp(token, [0, capacity - 1]) });
  const requests = new Map(); // request -> {card, state, body, tokens: [{node, step}], prompt, known}
  let marked = null; // the chosen token
  let stop = text; // what the tab key reaches among the tokens
  roving(text, () => [...text.querySelectorAll("[data-item]:not(.pl-future)")]);
  text.addEventListener("click", (event) => {
    const at = event.target.closest("[data-item]:not(.pl-future)");
    if (at) chooseToken(Number(at.dataset.request), Number(at.dataset.position));
  });

  /** One card per request: its prompt, then its tokens, each known from the step it was sampled in. */
  const buildText = () => {
    replay.meet(Object.keys(ui.data.texts));
    for (const [request, sequence] of replay.sequences) {
      if (requests.has(request)) continue;
      const head = node("div", { class: "pl-text-head" }, tag(sequence), " ", node("span", { class: "pl-soft" }));
      const body = node("div", { class: "pl-text-body", tabindex: 0, role: "group", "aria-label": "text" });
      const card = node("div", { class: `pl-text pl-seq-${sequence % NUM_COLOURS}` }, head, body);
      text.append(card);
      const entry = { card, state: head.lastChild, body, tokens: [], prompt: 0, known: 0 };
      requests.set(request, entry);
      const prompt = ui.data.texts[request]?.prompt ?? [];
      prompt.forEach((piece) => addToken(request, entry, piece, -1));
      entry.prompt = prompt.length;
    }
    for (const [action, step, request, , position, id] of replay.events) {
      if (action !== "token") continue;
      const entry = requests.get(request);
      while (entry.tokens.length < position) addToken(request, entry, "·", -1);
      if (entry.tokens.length > position) continue;
      addToken(request, entry, ui.data.texts[request]?.tokens[position - entry.prompt] ?? `⟨${id}⟩`, step);
    }
  };
  const addToken = (request, entry, piece, step) => {
    const position = entry.tokens.length;
    const it = node(
      "span",
      { class: `pl-token pl-future${step < 0 ? " pl-prompt" : ""}`, role: "button", tabindex: -1, "data-item": "", "data-request": request, "data-position": position, "aria-label": `position ${position}: ${piece}` },
      piece.replaceAll("\n", "↵"),
    );
    entry.body.append(it);
    entry.tokens.push({ node: it, step });
  };
  const admitted = (request) => replay.events.find((event) => event[0] === "admit" && event[2] === request)?.[1] ?? Infinity;

  let picked = null; // a request whose token was chosen, where it has left its slot by then
  /** A token's K and V are in the cache from the step in which the next one was sampled. */
  const chooseToken = (request, position) => {
    const slot = replay.slots.indexOf(request);
    if (slot >= 0 && position < replay.cached.get(request)) return choose(slot, position);
    const written = replay.events.find((event) => event[0] === "token" && event[2] === request && event[4] > position);
    const last = written ?? replay.events.findLast((event) => event[0] === "token" && event[2] === request);
    if (!last) return;
    ui.set({ step: last[1], slot: last[3], token: position });
    picked = request;
  };
  const newest = (slot) => Math.max((replay.cached.get(replay.slots[slot]) ?? 0) - 1, 0);
  let seen = ui.get("step");
  buildText();

  return {
    state: ["step", "slot", "token", "layer", "section", "kv_head", "lane"],
    step: "step",
    another: () => ui.set({ step: nextAllocation(replay, ui.get("step"), ui.get("layer")) }),
    words: { section: ["K", "V"] },
    limits: (key) =>
      ({
        step: [0, replay.last],
        slot: [0, size.num_slots - 1],
        token: [0, capacity - 1],
        layer: [0, size.num_layers - 1],
        section: [0, 1],
        kv_head: [0, layout.num_kv_heads - 1],
        lane: [0, layout.head_dim - 1],
      })[key],
    on: {
      step() {
        const step = ui.get("step");
        if (step === seen) return;
        seen = step;
        picked = null;
        replay.to(step);
        const busy = replay.slots.findIndex((request) => request !== null);
        const slot = replay.slots[ui.get("slot")] === null && busy >= 0 ? busy : ui.get("slot");
        ui.set({ slot, token: newest(slot) });
      },
    },
    message({ live }) {
      next.hidden = !live;
    },
    update() {
      replay.events = ui.data.events;
      stored = recorded(ui);
      buildText();
    },
    draw() {
      const [step, slot, token, layer] = ["step", "slot", "token", "layer"].map(ui.get);
      const hidden = ui.ask(nextBlock(replay, step, layer));
      replay.to(hidden ? step - 1 : step);
      const taken = hidden ? replay.at(step).filter((it) => it[0] === "allocate" && it[4] === layer) : [];
      const logical_block = Math.floor(token / layout.block_size);
      const block = replay.lookup(slot, layer, logical_block);
      table.draw(replay, layer, { slot, logical_block }, (it) => replay.sequence(it), (s, i) => taken.some((it) => it[3] === s && it[5] === i));
      pool.draw(replay, layer, block);
      stack.draw(replay);
      drawText(step, replay.slots[slot] ?? picked, token);
      drawAddress(slot, layer, token, logical_block, block, hidden);
      const say = (request, position, id) => `“${requests.get(request)?.tokens[position]?.node.textContent ?? id}”`;
      put(caption, `Step ${number(step)}. ${hidden ? "Predict the block before it is shown." : narrate(replay, step, layer, say)}`);
      put(origin, ui.data.origin);
    },
  };

  function drawText(step, request, token) {
    for (const [it, entry] of requests) {
      const started = admitted(it) <= step;
      const slot = replay.slots.indexOf(it);
      const status = { finish: "finished", preempt: "preempted, waits to be recomputed", cancel: "cancelled" }[replay.status.get(it)];
      put(entry.state, slot >= 0 ? `slot ${slot}, ${plural(replay.cached.get(it) ?? 0, "token")} cached` : status ?? "waiting");
      entry.card.classList.toggle("pl-idle", slot < 0);
      if (entry.body.hidden === started) entry.body.hidden = !started;
      // the sampled ones are a prefix: only what lies between the old and the new end of it changes
      const known = started ? entry.tokens.filter(({ step: since }) => since <= step).length : 0;
      const [low, high] = [Math.min(known, entry.known), Math.max(known, entry.known)];
      for (const { node: at } of entry.tokens.slice(low, high)) at.classList.toggle("pl-future", entry.known > known);
      entry.known = known;
    }
    const tokens = requests.get(request)?.tokens;
    const now = tokens?.[token]?.node ?? null;
    if (now !== marked) {
      if (marked) put(marked, null, { "aria-pressed": false }).classList.remove("pl-here");
      if (now) put(now, null, { "aria-pressed": true }).classList.add("pl-here");
      marked = now;
    }
    if (!text.contains(document.activeElement)) {
      stop.tabIndex = -1;
      stop = now ?? text.querySelector("[data-item]") ?? text;
      stop.tabIndex = stop === text ? -1 : 0;
    }
    if (!now) return;
    const body = now.parentElement; // scrolls by itself; the page stays where it is
    const [top, height] = [now.offsetTop, body.clientHeight];
    if (top < body.scrollTop || top + now.offsetHeight > body.scrollTop + height) body.scrollTop = top - height / 2;
  }

  function drawAddress(slot, layer, token, logical_block, block, hidden) {
    const request = replay.slots[slot];
    const cached = replay.cached.get(request) ?? 0;
    const at = { slot, layer, position: token, logical_block, token_in_block: token % layout.block_size, physical_block: block, section: ui.get("section"), kv_head: ui.get("kv_head"), lane: ui.get("lane") };
    const why = hidden
      ? "The table entry is hidden until you have predicted its block."
      : request === null
        ? `Slot ${slot} is free at the end of this step: its table row is all −1.`
        : block < 0
          ? `block_table[${slot}, ${layer}, ${logical_block}] is −1: position ${token} has no block yet.`
          : token >= cached
            ? `Position ${token} is not in the cache yet: a token's K and V are written in the step after it was sampled.`
            : null;
    const found = why ? null : stored(request, at);
    pane.draw(layout, size.num_blocks, at, { why, secret: hidden, stored: found ?? "The value at this address is not recorded." });
  }
}
