// What every view shares. base.py puts this file in front of a view's own and ends with
// `export default host(NameOfView)`. A view is a function of `ui` that builds its nodes once and returns
//   { state: ["token", ...],              model traits that the permalink holds, all integers
//     limits(key) { return [0, 9] },      the range a permalink may set
//     words: { section: ["K", "V"] },     optional: a word for each integer in the permalink
//     step: "step",                       optional: the trait that the arrow keys move
//     on: { byte() {} },                  optional: runs when that trait changes, before the redraw
//     draw() {},                          shows the model's state
//     another() {},                       optional: moves to a state with a question for predict mode
//     message(content) {},                optional: a message from the kernel; it is greeted with {do: "hello"}
//     update() {} }                       optional: takes a new ui.data; without it the view is built again

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const NUM_COLOURS = 8;

/** An element: node("div", {class: "x", onclick: f}, child, "text"); "svg:path" makes an SVG one. */
function node(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Sets text or an attribute only where it changes: an unchanged node costs no layout. */
function put(element, text, attributes = {}) {
  if (text !== null && element.textContent !== String(text)) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === false) element.removeAttribute(key);
    else if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
  }
  return element;
}

const FORMAT = new Intl.NumberFormat("en-US");
const number = (value) => FORMAT.format(value);
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const clamp = (value, [low, high]) => Math.min(Math.max(value, low), high);

/** A binary trait (DataView, or base64's bytes on a static page) as a typed array of its own. */
function typed(buffer, Kind) {
  if (!buffer) return new Kind(0);
  const bytes = new Uint8Array(buffer.buffer ?? buffer, buffer.byteOffset ?? 0, buffer.byteLength);
  return new Kind(bytes.slice().buffer);
}

/** The letter and the class of a sequence: index 0 is A, in the first colour, everywhere in the book. */
const letter = (index) => LETTERS[index % 26] + (index < 26 ? "" : Math.floor(index / 26) + 1);
const colour = (index) => `pl-own pl-seq-${index % NUM_COLOURS}`;
const tag = (index) => node("span", { class: `pl-tag ${colour(index)}` }, letter(index));

const message = (text) => node("div", { class: "pl-message", role: "note" }, text);

/** Arrow keys move the focus among `items()`, one tab stop for all of them. */
function roving(container, items, columns = () => 1) {
  container.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(event.target.closest("[data-item]"));
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : at + move;
    if (at < 0 || !all[to]) return;
    event.preventDefault();
    event.stopPropagation();
    all[at].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  });
}

/** Pointing at or focusing anything with a data-key lights all that carry the same key, and joins them. */
function lighting(root) {
  const wires = node("svg:svg", { class: "pl-wires", "aria-hidden": "true" });
  root.append(wires);
  let lit = null;
  let found = [];
  const light = (key) => {
    if (key === lit) return;
    lit = key;
    for (const old of found) old.classList.remove("pl-lit");
    wires.replaceChildren();
    found = [];
    if (!key) return;
    found = [...root.querySelectorAll(`[data-key="${CSS.escape(key)}"]`)].filter((it) => it.getClientRects().length);
    for (const it of found) it.classList.add("pl-lit");
    const box = root.getBoundingClientRect();
    const centre = (it) => {
      const r = it.getBoundingClientRect();
      return [r.left + r.width / 2 - box.left, r.top + r.height / 2 - box.top];
    };
    for (const it of found.slice(1)) {
      const [[x0, y0], [x1, y1]] = [centre(found[0]), centre(it)];
      const middle = (y0 + y1) / 2;
      wires.append(node("svg:path", { d: `M${x0},${y0}C${x0},${middle} ${x1},${middle} ${x1},${y1}` }));
    }
  };
  const key = (event) => event.target.closest?.("[data-key]")?.dataset.key ?? null;
  root.addEventListener("pointerover", (event) => light(key(event)));
  root.addEventListener("pointerleave", () => light(null));
  root.addEventListener("focusin", (event) => light(key(event)));
  root.addEventListener("focusout", () => light(null));
  return () => light(null);
}

/** Predict mode. In draw(), `ui.ask({id, question, answer})` is true while the answer must stay hidden. */
function predictor(ui) {
  const solved = new Set();
  let asked = null;
  let tries = 0;
  let [right, total] = [0, 0];
  const toggle = node("button", { type: "button", class: "pl-button", "aria-pressed": "false" }, "Predict");
  const question = node("label", {});
  const field = node("input", { class: "pl-input", inputmode: "decimal", autocomplete: "off", "data-lm-suppress-shortcuts": "true" });
  const verdict = node("span", { role: "status" });
  const score = node("span", { class: "pl-soft" });
  const buttons = [
    node("button", { type: "submit", class: "pl-button pl-main" }, "Check"),
    node("button", { type: "button", class: "pl-button", onclick: () => finish(false) }, "Show"),
  ];
  const another = node("button", { type: "button", class: "pl-button" }, "Next question");
  const form = node("form", { hidden: "" }, question, field, ...buttons, verdict, another, score);
  field.id = `pl-${Math.random().toString(36).slice(2)}`;
  question.htmlFor = field.id;

  const read = (text) => text.trim().replace(/[,_\s]/g, "").toUpperCase();
  const matches = (text, answer) =>
    typeof answer === "number"
      ? Math.abs(Number(read(text)) - answer) <= (Number.isInteger(answer) ? 0 : Math.max(0.005, Math.abs(answer) * 0.01))
      : read(text) === read(String(answer));
  const finish = (knew) => {
    total += 1;
    right += knew && tries === 0 ? 1 : 0;
    solved.add(asked.id);
    put(verdict, `${knew ? "Right" : "It is"}: ${typeof asked.answer === "number" ? number(asked.answer) : asked.answer}.`, { class: knew ? "pl-good" : "" });
    put(score, `${right} of ${total} at the first try`);
    ui.draw();
    another.focus();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!asked || solved.has(asked.id) || !read(field.value)) return;
    if (matches(field.value, asked.answer)) return finish(true);
    tries += 1;
    put(verdict, `Not ${field.value}. ${asked.hint ?? "Try again."}`, { class: "pl-bad" });
  });
  toggle.addEventListener("click", () => ui.set({ predict: !ui.get("predict") }));
  another.addEventListener("click", () => {
    for (let attempt = 0; attempt < 20; attempt++) {
      ui.another();
      ui.draw();
      if (asked && !solved.has(asked.id)) return field.focus();
    }
  });

  ui.ask = (next) => {
    if (!ui.get("predict")) return false;
    if (next?.id !== asked?.id || !next) {
      asked = next;
      tries = 0;
      field.value = "";
      put(question, next?.question ?? "Nothing to predict here.");
      field.inputMode = typeof next?.answer === "string" ? "text" : "decimal";
      put(verdict, next && solved.has(next.id) ? "You know this one." : "", { class: "pl-soft" });
    }
    return Boolean(next) && !solved.has(next.id);
  };
  return {
    nodes: [toggle, form],
    before() {
      const on = ui.get("predict");
      put(toggle, null, { "aria-pressed": on });
      form.hidden = !on;
    },
    after() {
      const open = Boolean(asked) && !solved.has(asked.id);
      for (const control of [field, ...buttons]) control.hidden = !open;
      another.hidden = open || !ui.another;
    },
  };
}

/** The state in the address: #token=17&lane=7, or #name.token=17 for one widget among several. */
function permalink(ui, view, name) {
  const keys = [...view.state, "predict"];
  const hash = () => new URLSearchParams(location.hash.slice(1));
  const word = (key, value) => (key === "predict" ? Number(value) : view.words?.[key]?.[value] ?? value);
  const restore = () => {
    const params = hash();
    const changes = {};
    for (const key of keys) {
      const text = params.get(`${name}.${key}`) ?? params.get(key);
      if (text === null) continue;
      const named = view.words?.[key]?.indexOf(text) ?? -1;
      const value = named >= 0 ? named : Number(text);
      if (text === "" || !Number.isInteger(value)) continue;
      changes[key] = key === "predict" ? value !== 0 : clamp(value, view.limits(key));
    }
    if (Object.keys(changes).length) ui.set(changes);
  };
  const write = () => {
    const params = location.hash.includes("=") ? hash() : new URLSearchParams();
    for (const key of keys) {
      params.delete(key);
      params.delete(`${name}.${key}`);
      if (key !== "predict" || ui.get(key)) params.set(`${name}.${key}`, word(key, ui.get(key)));
    }
    history.replaceState({ ...history.state, written: true }, "", `#${params}`);
  };
  /** Whether the address is a link that was followed, and its last key one of this widget's. */
  const names = (last) => keys.some((key) => last === key || last === `${name}.${key}`);
  const followed = () => {
    const last = [...hash().keys()].at(-1);
    return !history.state?.written && [...document.querySelectorAll(".pl-view")].find((it) => it.pagedlab?.names?.(last)) === ui.root;
  };
  const copy = node("button", { type: "button", class: "pl-button" }, "Copy link");
  copy.addEventListener("click", async () => {
    write();
    const text = location.href;
    const done = await (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => true, () => false);
    put(copy, done ? "Link copied" : "Link is in the address bar");
    setTimeout(() => put(copy, "Copy link"), 2000);
  });
  ui.names = names;
  return { restore, write, copy, followed };
}

/** ipywidgets leaves slider handles and Play's buttons without a name: give each its label's. */
function nameControls(panel) {
  for (const control of panel.querySelectorAll(".noUi-handle, .ui-slider-handle, .widget-readout, .widget-play button, .widget-text input")) {
    if (control.getAttribute("aria-label")) continue;
    const label = control.closest(".jupyter-widgets")?.querySelector(".widget-label")?.textContent;
    const icon = { play: "Play", pause: "Pause", stop: "Stop", "redo-alt": "Repeat", retweet: "Repeat", repeat: "Repeat" };
    const drawn = Object.keys(icon).find((it) => control.querySelector(`.fa-${it}`) || control.classList.contains(`fa-${it}`));
    const text = label || icon[drawn] || control.title;
    if (text) control.setAttribute("aria-label", text);
  }
}

/** Wraps a view as an anywidget module. */
function host(create) {
  function render({ model, el }) {
    const root = node("div", { class: "pl-view", role: "group", "data-lm-suppress-shortcuts": "true" });
    el.append(root);
    const listening = new AbortController();
    let waiting = false;
    let touched = false;
    let timer = 0;
    let parts;

    const ui = {
      model,
      root,
      get data() { return model.get("data"); },
      get: (key) => model.get(key),
      set(changes) {
        for (const [key, value] of Object.entries(changes)) model.set(key, value);
        model.save_changes();
      },
      /** Redraws at once. */
      draw() {
        parts.unlight();
        parts.predictor.before();
        parts.view.draw();
        parts.predictor.after();
      },
    };
    root.pagedlab = ui; // for scripts of the page: element.pagedlab.set({ token: 17 })
    const soon = () => {
      if (touched) {
        clearTimeout(timer);
        timer = setTimeout(parts.link.write, 300); // browsers limit how often the address may change
      }
      if (waiting) return;
      waiting = true;
      queueMicrotask(() => {
        waiting = false;
        if (parts) guarded(ui.draw);
      });
    };
    const guarded = (action) => {
      try {
        action();
      } catch (error) {
        parts = undefined;
        root.replaceChildren(message(`This widget cannot show its data: ${error.message}`));
      }
    };
    const watched = [];
    const watch = (event, action) => {
      model.on(event, action);
      watched.push([event, action]);
    };
    const unwatch = () => {
      for (const [event, action] of watched.splice(0)) model.off(event, action);
    };
    const build = () => {
      unwatch();
      watch("change:data", changed);
      root.replaceChildren();
      parts = undefined;
      if (ui.data.error) return void root.append(message(ui.data.error));
      const view = create(ui);
      ui.another = view.another && (() => view.another());
      const ask = predictor(ui);
      const link = permalink(ui, view, model.get("name"));
      put(root, null, { "aria-label": ui.data.title ?? "interactive figure", tabindex: view.step ? 0 : null });
      root.prepend(node("div", { class: "pl-bar" }, ...ask.nodes, link.copy));
      parts = { view, predictor: ask, link, unlight: lighting(root) };
      for (const [key, action] of Object.entries(view.on ?? {})) watch(`change:${key}`, () => guarded(action));
      for (const key of [...view.state, "predict"]) watch(`change:${key}`, soon);
      link.restore();
      ui.draw();
      if (!view.message) return;
      watch("msg:custom", (content) => view.message(content));
      model.send({ do: "hello" }); // a static page has nobody who could answer
    };
    const changed = () => {
      if (!parts?.view.update || ui.data.error) return guarded(build);
      guarded(() => parts.view.update());
      soon();
    };
    guarded(build);

    root.addEventListener("keydown", (event) => {
      if (event.target !== root || !parts?.view.step) return;
      const key = parts.view.step;
      const [low, high] = parts.view.limits(key);
      const to = { ArrowRight: ui.get(key) + 1, ArrowLeft: ui.get(key) - 1, Home: low, End: high }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      ui.set({ [key]: clamp(to, [low, high]) });
    });
    /** A link opens the page at its widget. */
    const arrive = () => parts?.link.followed() && (root.closest(".pagedlab") ?? root).scrollIntoView({ behavior: "instant" });
    window.addEventListener(
      "hashchange",
      () => {
        parts?.link.restore();
        arrive();
      },
      { signal: listening.signal },
    );

    let observer;
    const attached = () => {
      if (listening.signal.aborted) return;
      if (!root.isConnected) return void requestAnimationFrame(attached);
      const panel = root.closest(".pagedlab") ?? root;
      for (const kind of ["pointerdown", "keydown"]) panel.addEventListener(kind, () => { touched = Boolean(parts); }, { capture: true, signal: listening.signal });
      observer = new MutationObserver((records) => records.every((it) => root.contains(it.target)) || nameControls(panel));
      observer.observe(panel, { childList: true, subtree: true });
      nameControls(panel);
      arrive();
    };
    attached();
    return () => {
      listening.abort();
      observer?.disconnect();
      clearTimeout(timer);
      unwatch();
    };
  }
  return { render };
}
