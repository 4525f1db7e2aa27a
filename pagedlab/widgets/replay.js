/** Memory at any step of an event list: events are applied forwards, and taken back in reverse order. */
class Replay extends Memory {
  constructor(size, events, requests = []) {
    super(size);
    for (let block = 0; block < size.num_blocks; block++) this.free.push(block);
    this.slots = Array.from({ length: size.num_slots }, () => null); // the request in each slot
    this.cached = new Map(); // request -> positions whose K and V are in the cache
    this.status = new Map(); // request -> last action on it
    this.events = events;
    this.done = 0;
    this.trail = []; // how to take each applied event back
    this.sequences = new Map(); // request -> index that gives its letter and colour
    this.meet(requests);
  }
  /** Gives each request its letter: the named ones first, then the others as they appear. */
  meet(requests) {
    for (const request of [...requests.map(Number), ...this.events.map((event) => event[2])])
      if (!this.sequences.has(request)) this.sequences.set(request, this.sequences.size);
  }
  get last() {
    return this.events.length ? this.events[this.events.length - 1][1] : 0;
  }
  to(step) {
    while (this.done < this.events.length && this.events[this.done][1] <= step) this.trail.push(this.apply(this.events[this.done++]));
    while (this.done > 0 && this.events[this.done - 1][1] > step) {
      this.trail.pop()();
      this.done -= 1;
    }
  }
  apply([action, , request, slot, ...rest]) {
    const keep = (map, key, value) => {
      const [had, old] = [map.has(key), map.get(key)];
      map.set(key, value);
      return () => (had ? map.set(key, old) : map.delete(key));
    };
    if (action === "allocate" || action === "release") {
      const [layer, logical_block, block] = rest;
      const owner = { sequence: this.sequences.get(request), slot, layer, logical_block };
      if (action === "release") {
        this.unassign(block, owner);
        this.free.push(block);
        return () => {
          this.free.pop();
          this.assign(block, owner);
        };
      }
      const at = this.free.lastIndexOf(block);
      if (at < 0) throw new Error(`step events hand out block ${block}, which is not free`);
      this.free.splice(at, 1);
      this.assign(block, owner);
      return () => {
        this.unassign(block, owner);
        this.free.splice(at, 0, block);
      };
    }
    if (action === "token") return keep(this.cached, request, rest[0]);
    const before = this.slots[slot];
    const undo = [keep(this.status, request, action), keep(this.cached, request, action === "admit" ? rest[0] : 0)];
    this.slots[slot] = action === "admit" ? request : null;
    return () => {
      this.slots[slot] = before;
      undo.forEach((it) => it());
    };
  }
  /** The letter's index of the request in a slot, null where the slot is free. */
  sequence(slot) {
    return this.slots[slot] === null ? null : this.sequences.get(this.slots[slot]);
  }
  at(step) {
    return this.events.filter((event) => event[1] === step);
  }
}

/** The steps' events in words, blocks of one layer only. */
function narrate(replay, step, layer, token = (request, position, id) => String(id)) {
  const name = (request) => letter(replay.sequences.get(request));
  const parts = [];
  const blocks = { allocate: new Map(), release: new Map() };
  for (const [action, , request, slot, ...rest] of replay.at(step)) {
    if (blocks[action]) {
      const per = blocks[action].get(request) ?? { count: 0, here: [] };
      per.count += 1;
      if (rest[0] === layer) per.here.push(`${rest[1]} → ${rest[2]}`);
      blocks[action].set(request, per);
    } else if (action === "admit") parts.push(`${name(request)} enters slot ${slot} with ${plural(rest[0], "token")}.`);
    else if (action === "token") parts.push(`${name(request)} gets ${token(request, rest[0], rest[1])} for position ${rest[0]}.`);
    else parts.push({ finish: `${name(request)} is finished and leaves slot ${slot}.`, preempt: `${name(request)} is preempted: it leaves slot ${slot} and waits again.`, cancel: `${name(request)} is cancelled and leaves slot ${slot}.` }[action]);
  }
  for (const [request, { count, here }] of blocks.release) parts.push(`${name(request)} gives back ${plural(count, "block")}${here.length ? ` (layer ${layer}: ${here.join(", ")})` : ""}.`);
  for (const [request, { count, here }] of blocks.allocate) parts.push(`${name(request)} takes ${plural(count, "block")} from the free list${here.length ? ` (layer ${layer}: ${here.join(", ")})` : ""}.`);
  return parts.join(" ") || "No block changes hands.";
}

/** The first step after `step` that hands out a block in a layer, from the start again after the last. */
function nextAllocation(replay, step, layer) {
  const steps = replay.events.filter(([action, , , , of]) => action === "allocate" && of === layer).map((event) => event[1]);
  return steps.find((other) => other > step) ?? steps[0] ?? step;
}

/** The block that the step hands out first in a layer, as a question; null where it hands out none. */
function nextBlock(replay, step, layer) {
  const events = replay.at(step);
  const found = events.find(([action, , , , of]) => action === "allocate" && of === layer);
  if (!found) return null;
  const [, , request, slot, , logical_block, block] = found;
  const order = events.filter(([action]) => action === "allocate").indexOf(found);
  const releases = events.some(([action]) => action === "release");
  return {
    id: `${step}.${layer}`,
    question: `Step ${step}: ${letter(replay.sequences.get(request))} in slot ${slot} needs logical block ${logical_block} in layer ${layer}. Which physical block does it get?`,
    answer: block,
    hint: `${releases ? "Blocks given back in this step are put on top first. " : ""}${order ? `${plural(order, "block")} are taken before it. ` : ""}Look at the top of the free list.`,
  };
}
