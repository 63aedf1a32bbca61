// Timelines with their controls: buttons, wheel, drag, keys; linked to one scale if wanted.

const NARROWEST = 1e-8; // seconds

class Timeline {
  constructor(trace, group) {
    this.group = group;
    this.lanes = new LaneCanvas(trace);
    this.trace = trace;
    this.range = el("span", { class: "range grow", "aria-live": "polite" });
    this.told = el("div", { class: "chosen-span", "aria-live": "polite" }, "Point at a span, or choose one with the keys.");
    this.thumb = el("div");
    this.names = this.lanes.lanes.map((lane) => {
      const name = el("div", { title: lane.name }, lane.name);
      name.style.top = `${lane.top + lane.tall / 2 - 9}px`;
      return name;
    });
    this.stage = el("div", {
      class: "stage", tabindex: 0, role: "application",
      "aria-label": `Lanes of ${trace.name}: ${this.lanes.lanes.map((lane) => lane.name).join(", ")}. ` +
        "Left and right pan, plus and minus zoom, 0 shows all, brackets go to steps, " +
        "up and down choose a lane, comma and full stop a span, Enter zooms to it.",
    }, this.lanes.canvas);
    this.listen();
  }

  node() {
    const button = (text, label, action) =>
      el("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);
    const many = this.trace.steps.length > 1;
    const column = el("div", { class: "names" }, this.names);
    const widest = Math.max(...this.lanes.lanes.map((lane) => lane.name.length));
    column.style.width = `${Math.min(210, 14 + 7 * widest)}px`;
    return el("article", { class: "card trace", "aria-label": `Timeline of ${this.trace.name}` },
      el("div", { class: "bar" }, el("h3", {}, this.trace.name), sourceBadge(this.trace.source), this.range,
        button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)),
        button("◀", "Earlier", () => this.pan(-0.4)), button("▶", "Later", () => this.pan(0.4)),
        many ? button("‹ step", "Step before", () => this.toStep(-1)) : null,
        many ? button("step ›", "Next step", () => this.toStep(1)) : null,
        button("whole", "Show everything", () => this.show([0, this.lanes.limit]))),
      el("div", { class: "lanes" }, column, this.stage,
        el("div", { class: "overview", "aria-hidden": "true" }, this.thumb)),
      this.told, this.drawnNote(), this.figures());
  }

  drawnNote() {
    const { num_spans: all, num_drawn: drawn, num_hidden: hidden, resolution } = this.trace;
    const parts = [];
    if (resolution) {
      parts.push(`${plural(all, "span")} are drawn as ${drawn.toLocaleString("en")} blocks: those shorter than ` +
        `${time(resolution, 3)} are merged with their neighbours, and paler where the lane was idle between them.`);
    }
    if (hidden) parts.push(`${plural(hidden, "span")} lie too deep in calls and are not drawn.`);
    if (parts.length) parts.push("The figures below count every span.");
    return parts.length ? el("div", { class: "keys" }, parts.join(" ")) : null;
  }

  figures() {
    const rows = this.trace.lanes.flatMap((lane) => [
      [el("strong", {}, lane.name), "busy", "", time(lane.busy_seconds), share(lane.busy_share),
        lane.num_bytes ? bytes(lane.num_bytes) : "", lane.num_bytes ? rate(lane.busy_seconds ? lane.num_bytes / lane.busy_seconds : null) : ""],
      ...lane.by_name.map(([name, count, seconds, moved]) => ["", name, count.toLocaleString("en"), time(seconds),
        share(seconds / (this.trace.seconds || 1)), moved ? bytes(moved) : "", moved && seconds ? rate(moved / seconds) : ""]),
    ]);
    return el("details", {}, el("summary", {}, "Figures of the lanes"), tableOf(
      [{ name: "lane", text: true }, { name: "span", text: true }, "spans", "seconds", "of the time", "bytes", "while busy"],
      rows, `${this.trace.path}: ${time(this.trace.seconds)} in all`));
  }

  // ---- what moves the view ---------------------------------------------------------------------

  show([from, to], isFollower = false) {
    const { limit } = this.lanes;
    const span = Math.min(limit, Math.max(to - from, Math.min(NARROWEST, limit)));
    const left = Math.max(0, Math.min(limit - span, from));
    this.lanes.view = [left, left + span];
    this.stage.dataset.from = left;
    this.stage.dataset.to = left + span;
    this.thumb.style.left = `${(left / limit) * 100}%`;
    this.thumb.style.width = `${(span / limit) * 100}%`;
    this.range.textContent = `${time(left)} to ${time(left + span)} of ${time(this.trace.seconds)}`;
    this.lanes.paint();
    if (!isFollower) this.group.follow(this);
  }

  zoom(factor, around) {
    const [from, to] = this.lanes.view;
    const fixed = around === undefined ? (from + to) / 2 : around;
    this.show([fixed - (fixed - from) * factor, fixed + (to - fixed) * factor]);
  }

  pan(part) {
    const [from, to] = this.lanes.view;
    this.show([from + (to - from) * part, to + (to - from) * part]);
  }

  toStep(direction) {
    const { steps, seconds } = this.trace;
    if (!steps.length) return;
    const ends = [...steps.slice(1).map(([, start]) => start), seconds];
    const [from, to] = this.lanes.view;
    const isWhole = to - from > 0.99 * this.lanes.limit;
    const now = steps.findIndex(([, start], at) => start <= from + (to - from) * 0.02 + 1e-12 && ends[at] > from + (to - from) * 0.02);
    const next = isWhole ? (direction > 0 ? 0 : steps.length - 1) : now + direction;
    const at = Math.max(0, Math.min(steps.length - 1, next));
    this.show([steps[at][1], ends[at]]);
  }

  // ---- what is chosen --------------------------------------------------------------------------

  choose(found) {
    this.lanes.chosen = found;
    this.names.forEach((name, at) =>
      name.classList.toggle("chosen", Boolean(found) && this.lanes.lanes[at] === found[0]));
    this.told.textContent = found ? describeSpan(found).split("\n").join("; ") : "";
    this.lanes.paint();
  }

  chooseLane(direction) {
    const lanes = this.lanes.lanes;
    const now = this.lanes.chosen ? lanes.indexOf(this.lanes.chosen[0]) : direction > 0 ? -1 : lanes.length;
    const lane = lanes[Math.max(0, Math.min(lanes.length - 1, now + direction))];
    const middle = this.lanes.chosen ? this.lanes.chosen[1].from : this.lanes.view[0];
    const near = lane.spans.find((span) => span.to >= middle) || lane.spans[lane.spans.length - 1];
    this.choose(near ? [lane, near] : null);
  }

  chooseSpan(direction) {
    if (!this.lanes.chosen) { this.chooseLane(1); return; }
    const [lane, span] = this.lanes.chosen;
    const next = lane.spans[lane.spans.indexOf(span) + direction];
    if (!next) return;
    const [from, to] = this.lanes.view;
    if (next.from < from || next.to > to) {
      const middle = (next.from + next.to) / 2;
      this.show([middle - (to - from) / 2, middle + (to - from) / 2]);
    }
    this.choose([lane, next]);
  }

  zoomToChosen() {
    if (!this.lanes.chosen) return;
    const [, span] = this.lanes.chosen;
    const room = (span.to - span.from || NARROWEST) * 0.5;
    this.show([span.from - room, span.to + room]);
  }

  // ---- events ----------------------------------------------------------------------------------

  listen() {
    const keys = {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
      ArrowUp: () => this.chooseLane(-1), ArrowDown: () => this.chooseLane(1),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6),
      0: () => this.show([0, this.lanes.limit]), Home: () => this.show([0, this.lanes.limit]),
      "[": () => this.toStep(-1), "]": () => this.toStep(1),
      ",": () => this.chooseSpan(-1), ".": () => this.chooseSpan(1),
      Enter: () => this.zoomToChosen(), Escape: () => this.choose(null),
    };
    this.stage.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    this.stage.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.listenToPointers();
  }

  onWheel(event) {
    const [from, to] = this.lanes.view;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    const isWhole = to - from >= this.lanes.limit * (1 - 1e-9);
    // A page that scrolls past goes on scrolling; so does one whose lanes can't be zoomed out more.
    if (!event.ctrlKey && Timeline.isScrolling()) return;
    if (!sideways && event.deltaY > 0 && isWhole) return;
    event.preventDefault();
    if (sideways) this.pan(sideways / this.lanes.width);
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.0025))), this.lanes.at(this.place(event)[0]));
  }

  static isScrolling() { return performance.now() - Timeline.scrolled < 250; }

  place(event) {
    const frame = this.lanes.canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  listenToPointers() {
    const down = new Map();
    let moved = false;
    this.stage.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      down.set(event.pointerId, this.place(event)[0]);
      moved = false;
      this.stage.setPointerCapture(event.pointerId);
    });
    this.stage.addEventListener("pointermove", (event) => {
      const [x, y] = this.place(event);
      if (!down.has(event.pointerId)) {
        const found = this.lanes.find(x, y);
        if (found) Tip.show(describeSpan(found), event.clientX, event.clientY);
        else Tip.hide();
        return;
      }
      Tip.hide();
      const before = down.get(event.pointerId);
      if (Math.abs(x - before) > 2) moved = true;
      if (!moved) return;
      this.stage.classList.add("dragging");
      if (down.size === 2) {
        const [other] = [...down].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
        if (x !== other) this.zoom(Math.abs((before - other) / (x - other)), this.lanes.at(other));
      } else this.pan((before - x) / this.lanes.width);
      down.set(event.pointerId, x);
    });
    const up = (event) => {
      if (down.has(event.pointerId) && !moved && event.type === "pointerup") this.choose(this.lanes.find(...this.place(event)));
      down.delete(event.pointerId);
      this.stage.classList.remove("dragging");
    };
    this.stage.addEventListener("pointerup", up);
    this.stage.addEventListener("pointercancel", up);
    this.stage.addEventListener("pointerleave", () => Tip.hide());
    this.stage.addEventListener("dblclick", (event) => this.zoom(0.4, this.lanes.at(this.place(event)[0])));
  }
}

Timeline.scrolled = -Infinity;
addEventListener("scroll", () => { Timeline.scrolled = performance.now(); }, { passive: true });

class TimelineGroup {
  constructor(traces) {
    this.timelines = traces.map((trace) => new Timeline(trace, this));
    const lengths = traces.map((trace) => trace.seconds);
    this.longest = Math.max(...lengths);
    // Side by side on one scale, unless one would be too small to see.
    this.linked = traces.length > 1 && this.longest <= 12 * Math.min(...lengths);
  }

  link(linked) {
    this.linked = linked;
    for (const one of this.timelines) {
      one.lanes.limit = linked ? this.longest : one.trace.seconds;
      one.show([0, one.lanes.limit], true);
    }
  }

  follow(leader) {
    if (!this.linked) return;
    for (const one of this.timelines) if (one !== leader) one.show(leader.lanes.view, true);
  }

  fit() { this.timelines.forEach((one) => one.lanes.fit()); }

  node() {
    const names = new Map();
    for (const one of this.timelines) {
      for (const lane of one.lanes.lanes) {
        for (const span of lane.spans) {
          const key = span.isStall ? "stall" : span.name;
          if (DATA.colours.spans[key] || span.isStall) names.set(key, span.colour);
        }
      }
    }
    const order = [...Object.keys(DATA.colours.spans), "stall"].filter((name) => names.has(name));
    const box = el("input", { type: "checkbox", id: "linked", onchange: (event) => this.link(event.target.checked) });
    box.checked = this.linked;
    return el("div", {},
      el("div", { class: "bar" },
        el("div", { class: "legend grow" }, order.map((name) => el("span", {}, el("i", { back: names.get(name) }), name === "stall" ? "stall: the device waits" : name))),
        this.timelines.length > 1 ? el("label", {}, box, "all on one scale, moving together") : null),
      this.timelines.map((one) => one.node()),
      el("p", { class: "keys" }, "Wheel zooms, drag pans, a click keeps a span. Keys: ",
        [["←", "→", "pan"], ["+", "−", "zoom"], ["0", "whole"], ["[", "]", "steps"], ["↑", "↓", "lane"], [",", ".", "span"], ["Enter", "zoom to it"]]
          .map((list) => [list.slice(0, -1).map((key) => [el("kbd", {}, key), " "]), `${list[list.length - 1]}   `])));
  }
}
