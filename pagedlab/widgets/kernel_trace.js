// A recorded trace, unpacked: which statement each step ran, what it assigned, which memory it touched.

/** How many of the sorted numbers are at most x. */
const upTo = (sorted, x) => {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
};

/** Scrolls a box, and never the page, so that some of its rows are well in view. */
const reveal = (box, shown) => {
  if (!shown.length || box.scrollHeight <= box.clientHeight) return;
  const [top, bottom] = [shown[0].offsetTop, shown.at(-1).offsetTop + shown.at(-1).offsetHeight];
  const room = box.clientHeight / 4;
  if (top - room < box.scrollTop || bottom + room > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
};

const showNumber = (value, bool = false) => {
  if (typeof value !== "number") return value;
  if (bool) return value ? "true" : "false";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? number(value) : value.toExponential(5);
  const text = Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7 ? value.toExponential(4) : String(Number(value.toPrecision(6)));
  return text.replace("-", "−");
};
const numeral = (name) => node("span", { class: "pl-num", "data-value": name });
const putNumber = (element, value, bool) => put(element, value === undefined ? "·" : showNumber(value, bool), {
  "data-number": typeof value === "number" ? value : null,
  class: `pl-num${typeof value === "number" && !bool && !Number.isFinite(value) ? " pl-odd" : ""}`,
});
const putHidden = (element) => put(element, HIDDEN, { "data-number": null, class: "pl-num pl-hidden-value" });

/** The lane that is followed, where the numbers are one per lane; else null. */
const laneOf = (ui, { numbers }) => (numbers.length > 1 && numbers.length === ui.data.num_lanes ? ui.get("lane") : null);

/** An array in a few words: its shape, and the lane that is followed or the first numbers. */
const showArray = (ui, value, bool) => {
  const { shape, numbers } = value;
  if (!shape.length) return showNumber(numbers[0], bool);
  const lane = laneOf(ui, value);
  const words = (lane === null ? [...numbers.subarray(0, 3)] : [numbers[lane]]).map((x) => showNumber(x, bool)).join(", ");
  return `[${shape.join("×")}] ${lane === null ? "" : `lane ${lane}: `}${words}${lane === null && numbers.length > 3 ? ", …" : ""}`;
};

/** The trace in ui.data and its buffer. Every number in it was recorded by the debugger. */
function recordedTrace(ui) {
  const { codes, variables, lines, first_line } = ui.data;
  const raw = typed(ui.get("buffer"), Uint8Array);
  const column = (index) => {
    const [kind, start, length] = ui.data.columns[index];
    return new { u1: Uint8Array, f4: Float32Array, f8: Float64Array }[kind](raw.buffer, start, length);
  };
  const stream = column(ui.data.stream);
  const offsets = column(ui.data.offsets);
  const last = stream.length - 1;

  // which steps assign each variable, and how many memory accesses come before each step
  const when = variables.map((it) => (it.argument ? [-1] : []));
  const before = new Int32Array(stream.length + 1);
  stream.forEach((code, step) => {
    for (const variable of codes[code][2]) if (when[variable].at(-1) !== step) when[variable].push(step);
    before[step + 1] = before[step] + codes[code][3].length;
  });

  const values = variables.map((it) => {
    if (it.column === undefined) return null;
    const numbers = column(it.column);
    if (it.kind !== "array") return numbers;
    let at = 0;
    return new Map(it.kept.map(([index, shape]) => {
      const size = Math.min(it.most, shape.reduce((product, n) => product * n, 1));
      at += size;
      return [index, { shape, numbers: numbers.subarray(at - size, at) }];
    }));
  });
  /** The variable's value after its assignment number `index`: a number, {shape, numbers}, text, null. */
  const assigned = (variable, index) => {
    const { kind, into, texts } = variables[variable];
    if (kind === "number") return values[variable][index];
    if (kind === "array") return values[variable].get(index) ?? null;
    if (kind === "text") return texts[Math.min(index, texts.length - 1)];
    const [low, high] = values[variable].subarray(2 * index, 2 * index + 2);
    return low === high ? `${into}[${number(low)}]` : `${into}[${number(low)} … ${number(high)}]`;
  };
  /** The first element that a pointer points to after its assignment number `index`. */
  const pointsTo = (variable, index) => values[variable][2 * index];
  /** A statement without its comments, on one line. */
  const text = (from, to) => lines.slice(from - first_line, to - first_line + 1)
    .map((pieces) => pieces.filter(([kind]) => !/^c[1hm]?$/.test(kind)).map(([, part]) => part).join("").trim())
    .filter(Boolean)
    .join(" ");
  const statementOf = (step) => text(...codes[stream[step]].slice(0, 2));

  return { column, stream, offsets, last, when, before, assigned, pointsTo, statementOf };
}
