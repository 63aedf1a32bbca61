// The lanes of one trace on a canvas. A view is [from, to] in seconds from the trace's start.

const LANES = { steps: 17, axis: 20, single: 28, row: 15, gap: 7 };
const OTHER_COLOURS = ["#7aa6c2", "#c2a878", "#8fb98b", "#b596c4", "#c98f8f", "#86b8b1", "#a9a9c9", "#b5b58a"];

function spanColour(name, isStall) {
  if (isStall) return DATA.colours.stall;
  if (DATA.colours.spans[name]) return DATA.colours.spans[name];
  if (/DtoH/.test(name)) return DATA.colours.spans.grads;
  if (/HtoD/.test(name)) return DATA.colours.spans.params;
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return OTHER_COLOURS[hash % OTHER_COLOURS.length];
}

// Columns of differences and defaults back to spans.
function spansOf(lane) {
  const { columns, names } = lane;
  let [start, step] = [0, 0];
  return columns.start.map((difference, at) => {
    start += difference;
    step += columns.step[at];
    const get = (key, missing) => (columns[key] ? columns[key][at] : missing);
    const count = get("count", 1);
    const isStall = Boolean(get("stall", 0));
    const name = names[columns.name[at]];
    return {
      name, step, count, isStall, row: get("row", 0), bytes: get("bytes", 0),
      from: start / 1e9, to: (start + columns.length[at]) / 1e9,
      busy: (count > 1 ? get("busy", 0) : columns.length[at]) / 1e9,
      colour: spanColour(name, isStall),
    };
  });
}

class LaneCanvas {
  constructor(trace) {
    this.trace = trace;
    this.view = [0, trace.seconds];
    this.limit = trace.seconds;
    this.chosen = null;
    let top = LANES.steps;
    this.lanes = trace.lanes.map((lane) => {
      const tall = lane.rows === 1 ? LANES.single : lane.rows * LANES.row;
      const placed = { name: lane.name, rows: lane.rows, top, tall, spans: spansOf(lane) };
      top += tall + LANES.gap;
      return placed;
    });
    this.height = top + LANES.axis;
    this.canvas = el("canvas", { height: this.height });
    this.canvas.style.height = `${this.height}px`;
    this.width = 0;
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const sharp = devicePixelRatio || 1;
    this.width = width;
    this.canvas.width = Math.round(width * sharp);
    this.canvas.height = Math.round(this.height * sharp);
    this.pen = this.canvas.getContext("2d");
    this.pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    this.paint();
  }

  x(seconds) { return ((seconds - this.view[0]) / (this.view[1] - this.view[0])) * this.width; }
  at(x) { return this.view[0] + (x / this.width) * (this.view[1] - this.view[0]); }

  paint() {
    if (!this.pen) return;
    const style = getComputedStyle(document.documentElement);
    const [soft, grid, text] = ["--soft", "--grid", "--text"].map((name) => style.getPropertyValue(name).trim());
    this.font = getComputedStyle(document.body).fontFamily;
    const pen = this.pen;
    pen.clearRect(0, 0, this.width, this.height);
    pen.fillStyle = grid;
    const end = Math.min(this.width, this.x(this.trace.seconds));
    for (const lane of this.lanes) {
      pen.globalAlpha = 0.45;
      pen.fillRect(Math.max(0, this.x(0)), lane.top, Math.max(0, end), lane.tall);
      pen.globalAlpha = 1;
    }
    this.paintSteps(soft);
    for (const lane of this.lanes) {
      this.paintSpans(lane, lane.spans.filter((span) => !span.isStall));
      // Waits lie inside forward and step spans, so they are drawn over them.
      this.paintSpans(lane, lane.spans.filter((span) => span.isStall));
    }
    this.paintAxis(soft, grid);
    if (this.chosen) this.outline(this.chosen, text);
  }

  box(lane, span) {
    const row = lane.rows === 1 || span.isStall ? 0 : span.row;
    const tall = lane.rows === 1 ? lane.tall : LANES.row - 1;
    const from = this.x(span.from);
    return { from, wide: this.x(span.to) - from, top: lane.top + row * LANES.row, tall };
  }

  // Spans too narrow to tell apart become one rectangle, as long as nothing lies between them:
  // edges inside a pixel would show as stripes that are not there.
  paintSpans(lane, spans) {
    const open = new Map();
    const close = ({ colour, left, right, top, tall }) => {
      this.pen.fillStyle = colour;
      this.pen.fillRect(left, top, Math.max(right - left, 0.35), tall);
    };
    for (const span of spans) {
      const { from, wide, top, tall } = this.box(lane, span);
      if (from > this.width || from + wide < 0) continue;
      const before = open.get(top);
      if (wide < 4 && span.count === 1) {
        if (before && before.colour === span.colour && from - before.right < 0.05) {
          before.right = Math.max(before.right, from + wide);
          continue;
        }
        if (before) close(before);
        // What is thinner than a pixel covers a part of it, so a busy stretch and a sparse one differ.
        open.set(top, { colour: span.colour, left: from, right: from + wide, top, tall });
        continue;
      }
      if (before) {
        close(before);
        open.delete(top);
      }
      this.paintSpan(lane, span, { from, wide, top, tall });
    }
    open.forEach(close);
  }

  paintSpan(lane, span, { from, wide, top, tall }) {
    const pen = this.pen;
    pen.fillStyle = span.colour;
    const left = Math.max(-2, from);
    const right = Math.min(this.width + 2, from + Math.max(wide, 0.35));
    const merged = span.count > 1;
    if (merged) pen.globalAlpha = Math.max(0.25, Math.min(1, span.busy / (span.to - span.from || 1)));
    pen.fillRect(left, top, right - left - (wide > 3 ? 0.6 : 0), tall);
    pen.globalAlpha = 1;
    if (right - left < 26) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, right - left - 3, tall);
    pen.clip();
    pen.font = `${tall > 20 ? 11.5 : 10}px ${this.font}`;
    pen.fillStyle = merged ? onColour("#888888") : onColour(span.colour);
    pen.textBaseline = "middle";
    pen.fillText(merged ? `${span.count} × ${span.name}` : span.name, Math.max(left, 0) + 5, top + tall / 2 + 0.5);
    pen.restore();
  }

  paintSteps(soft) {
    const pen = this.pen;
    pen.strokeStyle = soft;
    pen.fillStyle = soft;
    pen.lineWidth = 0.5;
    pen.font = `10.5px ${this.font}`;
    pen.textBaseline = "alphabetic";
    let free = -Infinity;
    for (const [step, start] of this.trace.steps) {
      const x = this.x(start);
      if (x < -1 || x > this.width) continue;
      const text = `${step}`;
      if (x < free) continue;
      pen.globalAlpha = 0.6;
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, this.height - LANES.axis);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.fillText(text, x + 3, 11);
      free = x + pen.measureText(text).width + 12;
    }
  }

  paintAxis(soft, grid) {
    const pen = this.pen;
    const base = this.height - LANES.axis;
    const found = ticks(this.view[0], this.view[1], Math.max(2, this.width / 120));
    pen.font = `11px ${this.font}`;
    pen.fillStyle = soft;
    pen.strokeStyle = grid;
    pen.lineWidth = 1;
    labels(found, TIMES).forEach((text, at) => {
      const x = this.x(found[at]);
      pen.fillRect(x, base, 1, 4);
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.max(0, Math.min(this.width - 2 * half, x - half)), base + 15);
    });
  }

  outline([lane, span], colour) {
    const { from, wide, top, tall } = this.box(lane, span);
    this.pen.strokeStyle = colour;
    this.pen.lineWidth = 2;
    this.pen.strokeRect(from, top + 1, Math.max(wide, 2), tall - 2);
  }

  // The lane and span at a place on the canvas; waits lie on top.
  find(x, y) {
    const lane = this.lanes.find((one) => y >= one.top && y < one.top + one.tall);
    if (!lane) return null;
    const slack = (this.view[1] - this.view[0]) / this.width;
    const seconds = this.at(x);
    const row = lane.rows === 1 ? 0 : Math.floor((y - lane.top) / LANES.row);
    let best = null;
    for (const span of lane.spans) {
      if (span.from > seconds + slack) break;
      if (span.to < seconds - slack || (lane.rows > 1 && !span.isStall && span.row !== row)) continue;
      const inside = span.from <= seconds && seconds <= span.to;
      const rank = (inside ? 4 : 0) + (span.isStall && row === 0 ? 2 : 0);
      if (!best || rank >= best.rank) best = { rank, span };
    }
    return best ? [lane, best.span] : null;
  }
}

function describeSpan([lane, span]) {
  const lines = [
    span.count > 1
      ? `${plural(span.count, "short span")}, mostly ${span.name}, merged`
      : span.name,
    `lane ${lane.name}` + (span.step ? `, step ${span.step}` : ""),
    `start ${time(span.from, 6)}, duration ${time(span.to - span.from)}`,
  ];
  if (span.count > 1) lines.push(`busy ${time(span.busy)} of it`);
  if (span.bytes) {
    const pace = span.busy > 0 ? `, ${rate(span.bytes / span.busy)}` : "";
    lines.push(`${bytes(span.bytes, 4)} moved${pace}`);
  }
  return lines.join("\n");
}
