/** A kernel's source, variables and memory at one step. */
function KernelStepper(ui) {
  const { codes, variables, tokens, blocks, tree, softmax, panes } = ui.data;
  const trace = recordedTrace(ui);
  const { stream, last, when, assigned, pointsTo, statementOf } = trace;
  const tokenAt = (step) => Math.max(0, upTo(tokens, step) - 1);
  const blockAt = (token) => Math.max(0, upTo(blocks, token) - 1);

  const source = sourcePane(ui, trace);
  const memory = memoryPane(ui, trace);
  const drawn = {
    variables: variablesPane(ui, trace),
    lanes: tree && lanesPane(ui, trace),
    softmax: softmax && softmaxPane(ui, trace),
  };

  const caption = node("div", { class: "pl-caption", role: "status" });
  const position = node("div", { class: "pl-soft" });
  const statement = node("code");
  const results = node("div");
  caption.append(position, statement, results);
  ui.root.append(
    ...(ui.data.note ? [node("p", { class: "pl-kernel-note", role: "note" }, ui.data.note)] : []),
    caption,
    node("div", { class: "pl-debugger" },
      node("section", { class: "pl-source-pane" }, node("h4", {}, ui.data.file), source.node),
      node("div", { class: "pl-side" }, ...panes.map((name) => drawn[name].node), memory.node),
    ),
  );

  /** What this step computes, as a question; null where nothing is worth one. */
  const question = (step) => {
    const [, , changed] = codes[stream[step]];
    const text = statementOf(step);
    if (text.startsWith("for ") || /= -?[\d.]+$/.test(text)) return null;
    const access = memory.accessOf(step);
    if (access) {
      const [kind, argument, offset, live] = access;
      const verb = { load: "read", store: "write", atomic: "update" }[kind];
      return { id: `${step}`, question: `Which element of ${argument} does this line ${verb}${live > 1 ? " first" : ""}?`, answer: offset, hint: `Count elements from the start of ${argument}, with the variables as they stand before this line.` };
    }
    const hint = "Work it out from the variables, as they stand before this line.";
    const ask = (what, answer, id = `${step}`) => ({ id, question: `${text.length < 60 ? `${text} → ` : ""}${what}`, answer, hint });
    const lane = ui.get("lane");
    if (tree && changed.includes(tree.variable)) {
      const { index, done, beyond } = drawn.lanes.at(step);
      if (index < 0 || beyond) return null;
      if (done > 1) {
        const per = tree.lanes >> done;
        const side = Math.floor(lane / (tree.lanes / 2));
        return { id: `${step}.${lane}`, question: `Lane ${lane}, after adding what is ${plural(per, "lane")} apart: what is its partial sum?`, answer: drawn.lanes.value(index, done - 1, side * per + (lane % per)), hint: "Add the two numbers of the level above; the lanes pane lists them." };
      }
    }
    for (const variable of changed) {
      const { name, kind, bool } = variables[variable];
      const index = upTo(when[variable], step) - 1;
      if (kind === "pointer") return ask(`to which element does ${name} point?`, pointsTo(variable, index));
      const value = assigned(variable, index);
      if (kind === "text" || value === null) continue;
      const array = typeof value === "object" && value.shape.length ? value : null;
      const at = array ? laneOf(ui, array) ?? 0 : 0;
      const number = typeof value === "object" ? value.numbers[at] : value;
      if (!Number.isFinite(number)) continue;
      const place = !array ? "" : array.shape.length > 1 && at ? `, lane ${at}` : `[${array.shape.map((_, i, all) => (i === all.length - 1 ? at : 0)).join(", ")}]`;
      return ask(`${name}${place} = ?`, bool ? String(Boolean(number)) : number, array ? `${step}.${at}` : `${step}`);
    }
    return null;
  };

  return {
    state: ["step", "token", "block", "lane", "pane", "unsafe"],
    limits: (key) => [0, { step: last, token: Math.max(0, tokens.length - 1), block: Math.max(0, blocks.length - 1), lane: ui.data.num_lanes - 1, pane: panes.length - 1, unsafe: 1 }[key]],
    words: { pane: panes },
    step: "step",
    another() {
      const step = ui.get("step");
      for (let i = 1; i <= last; i++) {
        const next = (step + i) % (last + 1);
        if (question(next)) return ui.set({ step: next });
      }
    },
    on: {
      step() {
        const token = tokenAt(ui.get("step"));
        if (token !== ui.get("token") || blockAt(token) !== ui.get("block")) ui.set({ token, block: blockAt(token) });
      },
      token() {
        if (tokens.length && tokenAt(ui.get("step")) !== ui.get("token")) ui.set({ step: tokens[ui.get("token")] });
      },
      block() {
        if (blocks.length && blockAt(tokenAt(ui.get("step"))) !== ui.get("block")) ui.set({ step: tokens[blocks[ui.get("block")]] });
      },
    },
    draw() {
      const step = clamp(ui.get("step"), [0, last]);
      const pane = panes[ui.get("pane")] ?? panes[0];
      const [from, to, changed] = codes[stream[step]];
      const asked = question(step);
      const secret = ui.ask(asked);
      put(position, `step ${number(step + 1)} of ${number(last + 1)} · line ${from}${tokens.length && step >= tokens[0] ? ` · ${ui.data.token_is} ${ui.get("token")}` : ""}`, { "data-step": step, "data-line": from });
      put(statement, statementOf(step));
      const told = changed.map((i) => {
        const value = assigned(i, upTo(when[i], step) - 1);
        const short = value && typeof value === "object" ? showArray(ui, value, variables[i].bool) : value === null ? "an array" : showNumber(value, variables[i].bool);
        return `${variables[i].name} is now ${secret ? HIDDEN : short}`;
      });
      put(results, told.join(", ") || (step === last ? "The program ends." : " "));
      source.draw(from, to);
      for (const name of panes) drawn[name].node.hidden = name !== pane;
      drawn[pane].draw(step, secret, changed);
      memory.draw(step, secret);
    },
  };
}
