/** The table of one layer, the physical blocks and the free list; one entry is chosen. */
function BlockTableView(ui) {
  const { size, free, titles } = ui.data;
  const memory = Memory.of(size, typed(ui.get("table"), Int32Array), free);
  const table = tablePane(ui, { pick: (slot, logical_block) => ui.set({ slot, logical_block }) });
  const pool = poolPane();
  const stack = freePane();
  const caption = node("p", { class: "pl-caption", role: "status" });
  const left = node("div", { class: "pl-wide" }, table.node, caption, pool.node);
  ui.root.append(node("div", { class: "pl-columns" }, left, ...(free ? [stack.node] : [])));

  return {
    state: ["layer", "slot", "logical_block"],
    limits: (key) => [0, { layer: size.num_layers, slot: size.num_slots, logical_block: size.max_blocks_per_seq }[key] - 1],
    another() {
      const owners = [...memory.owners.values()].filter(({ layer }) => layer === ui.get("layer"));
      if (!owners.length) return;
      const { slot, logical_block } = anyOf(owners);
      ui.set({ slot, logical_block });
    },
    draw() {
      const [layer, slot, logical_block] = [ui.get("layer"), ui.get("slot"), ui.get("logical_block")];
      const block = memory.lookup(slot, layer, logical_block);
      const entry = `block_table[${slot}, ${layer}, ${logical_block}]`;
      const index = memory.index(slot, layer, logical_block);
      const hidden = ui.ask(
        block < 0 ? null : {
          id: index,
          question: `${entry} = ?`,
          answer: block,
          hint: `Look among the physical blocks for ${letter(slot)}${logical_block}.`,
        },
      );
      table.draw(memory, layer, { slot, logical_block }, (it) => it, (s, i) => hidden && s === slot && i === logical_block);
      pool.draw(memory, layer, hidden ? null : block);
      if (free) stack.draw(memory);
      const place = `${titles?.[slot] ? `${titles[slot]}: ` : ""}${entry} is entry ${slot} × ${size.num_layers * size.max_blocks_per_seq} + ${layer} × ${size.max_blocks_per_seq} + ${logical_block} of the flat array`;
      put(caption, hidden ? `${place}. Which physical block does it hold?` : block < 0 ? `${place}. It is −1: unassigned.` : `${place}. It holds physical block ${number(block)}.`);
    },
  };
}
