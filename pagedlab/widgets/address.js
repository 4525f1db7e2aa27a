/** Slot, layer, position, kv head, lane, K or V to a byte; and a byte to its owner. */
function AddressCalculator(ui) {
  const { layout, num_blocks, size, seq_lens } = ui.data;
  const memory = size && Memory.of(size, typed(ui.get("table"), Int32Array));
  const stored = recorded(ui);
  const direct = !memory;
  const capacity = direct ? 0 : size.max_blocks_per_seq * layout.block_size;
  const state = direct
    ? ["physical_block", "token_in_block", "section", "kv_head", "lane"]
    : ["slot", "layer", "token", "section", "kv_head", "lane"];

  const pane = addressPane(ui, {
    pick(name, index) {
      if (name === "token_in_block") ui.set({ section: Math.floor(index / layout.block_size), ...position(index % layout.block_size) });
      else if (name !== "physical_block") ui.set({ [name]: index });
      else if (direct) ui.set({ physical_block: index });
      else if (memory.owners.has(index)) follow({ ...here(), physical_block: index });
    },
  });
  const position = (token_in_block) =>
    direct ? { token_in_block } : { token: here().logical_block * layout.block_size + token_in_block };
  const inverse = node("section", {}, node("h4", {}, "The inverse: whose byte is it?"), pane.inverse);
  ui.root.append(pane.node, inverse);

  const here = () => {
    const at = { section: ui.get("section"), kv_head: ui.get("kv_head"), lane: ui.get("lane") };
    if (direct) return { ...at, position: null, physical_block: ui.get("physical_block"), token_in_block: ui.get("token_in_block") };
    const [slot, layer, token] = [ui.get("slot"), ui.get("layer"), ui.get("token")];
    const logical_block = Math.floor(token / layout.block_size);
    return { ...at, slot, layer, position: token, logical_block, token_in_block: token % layout.block_size, physical_block: memory.lookup(slot, layer, logical_block) };
  };
  /** Moves the controls to a located element, if somebody owns it. */
  const follow = (at) => {
    const { section, kv_head, lane } = at;
    if (direct) return void ui.set({ physical_block: at.physical_block, token_in_block: at.token_in_block, section, kv_head, lane });
    const owner = memory.owners.get(at.physical_block);
    if (!owner) return;
    ui.set({ slot: owner.slot, layer: owner.layer, token: owner.logical_block * layout.block_size + at.token_in_block, section, kv_head, lane });
  };

  let shown = ""; // the state that `byte` belongs to
  let written = null; // the byte that draw() put into the box, to tell it from one that was typed
  const signature = () => state.map((key) => ui.get(key)).join();

  return {
    state,
    words: { section: ["K", "V"] },
    limits: (key) =>
      ({
        slot: [0, size?.num_slots - 1],
        layer: [0, size?.num_layers - 1],
        token: [0, capacity - 1],
        physical_block: [0, num_blocks - 1],
        token_in_block: [0, layout.block_size - 1],
        section: [0, 1],
        kv_head: [0, layout.num_kv_heads - 1],
        lane: [0, layout.head_dim - 1],
      })[key],
    another() {
      const at = {};
      for (const key of state) at[key] = Math.floor(Math.random() * (this.limits(key)[1] + 1));
      if (direct || !memory.owners.size) return ui.set(at);
      const { slot, layer, logical_block } = anyOf([...memory.owners.values()]);
      ui.set({ ...at, slot, layer, token: logical_block * layout.block_size + (at.token % layout.block_size) });
    },
    on: {
      byte() {
        const byte = ui.get("byte");
        if (byte === written) return;
        follow(locate(layout, byte));
        written = null;
        shown = `${signature()}.false`;
        ui.draw();
      },
    },
    draw() {
      const at = here();
      const end = (at.logical_block + 1) * layout.block_size - 1;
      const unassigned = at.physical_block < 0;
      const why = unassigned
        ? `block_table[${at.slot}, ${at.layer}, ${at.logical_block}] is −1: no physical block holds positions ${end + 1 - layout.block_size} to ${end} of slot ${at.slot} in layer ${at.layer}, so there is no byte to name. Used as a block, −1 would point ${number(layout.block_bytes)} bytes before the cache.`
        : null;
      const hidden = ui.ask(
        unassigned ? null : {
          id: signature(),
          question: `${"KV"[at.section]}, token_in_block ${at.token_in_block}, kv_head ${at.kv_head}, lane ${at.lane} of block ${at.physical_block}: which byte?`,
          answer: address(layout, at).byte,
          hint: "Add up the four bars: block, section and token, head, lane.",
        },
      );
      const beyond = seq_lens && at.position >= seq_lens[at.slot] ? `Position ${at.position} is beyond this sequence's ${plural(seq_lens[at.slot], "token")}: the byte exists, but no kernel reads it.` : null;
      const found = direct ? null : stored(at.slot, at);
      const byte = pane.draw(layout, num_blocks, at, { why, hidden, stored: beyond ?? found ?? (ui.data.stored ? "The value at this address is not recorded." : "") });
      const now = `${signature()}.${hidden}`;
      if (now !== shown) {
        shown = now;
        written = unassigned || hidden ? 0 : byte;
        ui.set({ byte: written });
      }
      const asked = written === null || (!unassigned && !hidden) ? ui.get("byte") : null;
      put(pane.value.owner, asked === null ? "Type a byte above." : sentence(asked));
    },
  };

  function sentence(byte) {
    const at = locate(layout, byte);
    const parts = `byte ${number(byte)} = physical_block ${number(at.physical_block)}, ${"KV"[at.section]}, token_in_block ${at.token_in_block}, kv_head ${at.kv_head}, lane ${at.lane} (byte ${at.byte_in_element} of ${layout.itemsize})`;
    if (direct) return parts;
    const owner = memory.owners.get(at.physical_block);
    return owner
      ? `${parts} → slot ${owner.slot}, layer ${owner.layer}, position ${number(owner.logical_block * layout.block_size + at.token_in_block)}`
      : `${parts} → nobody's: block ${number(at.physical_block)} is in no table entry`;
  }
}
