// Charts in SVG: lines, bars, heat maps. Each says in its label what it shows, and has a tooltip.

const WIDE = 620;
let clips = 0;

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || value === undefined) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : [0, 1];
}

function padded([low, high], fromZero, part = 0.06) {
  if (fromZero) low = Math.min(0, low);
  const span = high - low || Math.abs(high) || 1;
  return [fromZero && low === 0 ? 0 : low - span * part, high + span * part];
}

const within = (low, high, from, to) => (value) =>
  from + ((value - low) / (high - low || 1)) * (to - from);

function path(points, step) {
  let [text, pen] = ["", false];
  for (const [x, y] of points) {
    if (y === null) { pen = false; continue; }
    if (pen && step) text += `H${x.toFixed(1)}`;
    text += `${pen ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
    pen = true;
  }
  return text;
}

// options: title, x, y (labels), xScale, yScale (units), series, height, fromZero, guides, step
// series: {name, colour, points: [[x, y]], dots, dashed, step, faint}
function lineChart(options) {
  const height = options.height || 280;
  const box = { left: 62, right: 14, top: 14, bottom: 42 };
  const all = options.series.flatMap((one) => one.points);
  let [left, right] = extent(all.map(([x]) => x));
  if (left === right) [left, right] = [left - 1, right + 1];
  const [low, high] = options.range || padded(extent(all.map(([, y]) => y)), options.fromZero);
  const x = within(left, right, box.left, WIDE - box.right);
  const y = within(low, high, height - box.bottom, box.top);
  const chart = draw("svg", {
    class: "chart", viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label":
      `${options.title}: ${options.y} over ${options.x}, for ` +
      options.series.map((one) => one.name).filter(Boolean).join(", "),
  });
  const [across, up] = [ticks(left, right, 7), ticks(low, high, 5)];
  labels(up, options.yScale).forEach((text, at) => chart.append(
    draw("line", { class: "grid", x1: box.left, x2: WIDE - box.right, y1: y(up[at]), y2: y(up[at]) }),
    draw("text", { x: box.left - 7, y: y(up[at]) + 4, "text-anchor": "end" }, text)));
  labels(across, options.xScale).forEach((text, at) => chart.append(
    draw("text", { x: x(across[at]), y: height - box.bottom + 17, "text-anchor": "middle" }, text)));
  chart.append(
    draw("line", { class: "axis", x1: box.left, x2: WIDE - box.right, y1: height - box.bottom, y2: height - box.bottom }),
    draw("text", { x: (box.left + WIDE) / 2, y: height - 6, "text-anchor": "middle" }, options.x));
  for (const at of options.guides || []) {
    chart.append(draw("line", { class: "guide", x1: x(at), x2: x(at), y1: box.top, y2: height - box.bottom }));
  }
  const clip = `clip-${(clips += 1)}`;
  chart.append(draw("clipPath", { id: clip }, draw("rect", {
    x: box.left, y: 0, width: WIDE - box.left, height: height - box.bottom + 1 })));
  const inside = chart.appendChild(draw("g", { "clip-path": `url(#${clip})` }));
  for (const one of options.series) {
    const placed = one.points.map(([a, b]) => [x(a), b === null ? null : y(b)]);
    if (!one.onlyDots) {
      inside.append(draw("path", {
        d: path(placed, one.step), fill: "none", stroke: one.colour,
        "stroke-width": one.faint ? 1 : 1.8, "stroke-opacity": one.faint ? 0.6 : 1,
        "stroke-dasharray": one.dashed ? "5 4" : null, "stroke-linejoin": "round" }));
    }
    if (one.dots || one.onlyDots) {
      inside.append(draw("g", {}, placed.filter(([, b]) => b !== null).map(([a, b]) =>
        draw("circle", { cx: a.toFixed(1), cy: b.toFixed(1), r: 3, paint: one.colour }))));
    }
  }
  hover(chart, options, x);
  const named = options.series.filter((one) => one.name);
  return el("div", { class: "card" }, el("div", { class: "bar" }, el("h3", {}, options.title)),
    options.note ? el("div", { class: "keys" }, options.note) : null,
    named.length > 1 || options.legend ? el("div", { class: "legend" }, named.map((one) =>
      el("span", {}, el("i", { back: one.colour }), one.name))) : null,
    chart);
}

// The nearest point of each series to the pointer, as text.
function hover(chart, options, x) {
  const guide = chart.appendChild(draw("line", { class: "guide", y1: 14, y2: (options.height || 280) - 42, visibility: "hidden" }));
  chart.addEventListener("pointermove", (event) => {
    const frame = chart.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * WIDE;
    const lines = [];
    let place = null;
    for (const one of options.series) {
      if (!one.name && !one.tip) continue;
      let best = null;
      for (const point of one.points) {
        if (point[1] !== null && (!best || Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at))) best = point;
      }
      if (!best || Math.abs(x(best[0]) - at) > 40) continue;
      if (place === null) place = best[0];
      lines.push(`${one.name || one.tip}: ${options.yScale ? scaled(best[1], options.yScale, 4) : digits(best[1], 5)}`);
    }
    if (place === null) return;
    guide.setAttribute("x1", x(place));
    guide.setAttribute("x2", x(place));
    guide.setAttribute("visibility", "visible");
    const where = options.xScale ? scaled(place, options.xScale, 4) : digits(place, 6);
    Tip.show([`${options.x} ${where}`, ...lines].join("\n"), event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", () => {
    guide.setAttribute("visibility", "hidden");
    Tip.hide();
  });
}

// options: title, rows: [{name, note, parts: [[value, colour, name]], text}], scale, note
function barChart(options) {
  const [row, gap, name] = [30, 26, 168];
  const height = options.rows.length * (row + 4) + gap;
  const sums = options.rows.map((one) => one.parts.reduce((sum, [value]) => sum + (value || 0), 0));
  const most = Math.max(...sums, 1e-12);
  const x = within(0, most, name, WIDE - 134);
  const chart = draw("svg", {
    class: "chart", viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label":
      `${options.title}. ` + options.rows.map((one) => `${one.name}: ${one.text}`).join("; "),
  });
  const at = ticks(0, most, 4);
  labels(at, options.scale).forEach((text, place) => chart.append(
    draw("line", { class: "grid", x1: x(at[place]), x2: x(at[place]), y1: 0, y2: height - gap }),
    draw("text", { x: x(at[place]), y: height - 8, "text-anchor": "middle" }, text)));
  options.rows.forEach((one, place) => {
    const top = place * (row + 4) + 4;
    const group = chart.appendChild(draw("g", {
      onpointermove: (event) => Tip.show([`${one.name} (${one.source})`,
        ...one.parts.map(([value, , part]) => `${part}: ${scaled(value, options.scale, 4)}`)].join("\n"),
      event.clientX, event.clientY),
      onpointerleave: () => Tip.hide(),
    }));
    const shown = one.name.length > 24 ? `${one.name.slice(0, 23)}…` : one.name;
    group.append(
      draw("text", { class: "strong", x: name - 8, y: top + (one.tag ? 10 : 16), "text-anchor": "end" }, shown));
    if (one.tag) {
      group.append(draw("text", { x: name - 8, y: top + 23, "text-anchor": "end", "font-size": "10" }, one.tag));
    }
    let from = 0;
    for (const [value, colour] of one.parts) {
      if (!value) continue;
      group.append(draw("rect", { x: x(from), y: top, width: Math.max(0.5, x(from + value) - x(from)), height: row - 8, rx: 2, paint: colour }));
      from += value;
    }
    group.append(draw("text", { x: x(from) + 6, y: top + 16 }, one.text));
  });
  return el("div", { class: "card" }, el("div", { class: "bar" }, el("h3", {}, options.title)),
    options.note ? el("div", { class: "keys" }, options.note) : null,
    options.legend ? el("div", { class: "legend" }, options.legend.map(([text, colour]) =>
      el("span", {}, el("i", { back: colour }), text))) : null, chart);
}

// Viridis in nine points; its ends are told apart without colour vision too.
const HEAT = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

// From end to end of a heat map's colours, of the largest value.
const LEAST_RANGE = 0.1;

function heatColour(part) {
  const at = Math.max(0, Math.min(1, part)) * (HEAT.length - 1);
  const low = Math.min(HEAT.length - 2, Math.floor(at));
  return mixed(HEAT[low], HEAT[low + 1], at - low);
}

// options: x, y, xs, ys, value, cells: Map "i,j" -> {value, count}, how
function heatMap(options) {
  const { xs, ys } = options;
  const left = Math.min(190, 26 + 7 * Math.max(...ys.map((y) => String(y).length), options.y.length / 2));
  const wide = Math.max(26, Math.min(96, (900 - left) / xs.length));
  const tall = Math.max(22, Math.min(38, 520 / ys.length));
  const [width, height] = [left + wide * xs.length + 84, tall * ys.length + 62];
  const values = [...options.cells.values()].map((cell) => cell.value).filter((value) => value !== null);
  let [low, high] = extent(values);
  // Values that hardly differ get colours that hardly differ.
  const room = Math.max(0, LEAST_RANGE * (Math.max(Math.abs(low), Math.abs(high)) || 1) - (high - low)) / 2;
  [low, high] = [low - room, high + room];
  // Decades differ more than a linear scale shows.
  const logs = low > 0 && high / low > 50;
  const part = logs ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low || 1);
  const chart = draw("svg", {
    class: "chart heat", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${options.value} by ${options.x} and ${options.y}, from ${digits(low)} to ${digits(high)}; ${options.how}`,
  });
  chart.style.maxWidth = `${width * 1.15}px`;
  ys.forEach((y, j) => chart.append(draw("text", { x: left - 7, y: 8 + tall * (j + 0.5) + 4, "text-anchor": "end" }, String(y))));
  xs.forEach((x, i) => chart.append(draw("text", { x: left + wide * (i + 0.5), y: 8 + tall * ys.length + 16, "text-anchor": "middle" }, String(x).slice(0, Math.max(4, wide / 6)))));
  chart.append(
    draw("text", { class: "strong", x: left + (wide * xs.length) / 2, y: height - 14, "text-anchor": "middle" }, options.x),
    draw("text", { class: "strong", transform: `translate(12 ${8 + (tall * ys.length) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.y));
  ys.forEach((y, j) => xs.forEach((x, i) => {
    const cell = options.cells.get(`${i},${j}`);
    const known = cell && cell.value !== null;
    const colour = known ? heatColour(part(cell.value)) : null;
    chart.append(draw("g", {
      onpointermove: (event) => Tip.show(`${options.x} ${x}, ${options.y} ${y}\n${options.value}: ` +
        (known ? `${digits(cell.value, 5)}\n${plural(cell.count, "row")}` : "no value"), event.clientX, event.clientY),
      onpointerleave: () => Tip.hide(),
    },
    draw("rect", { x: left + wide * i + 1, y: 9 + tall * j, width: wide - 2, height: tall - 2, rx: 2, paint: colour || "var(--grid)" }),
    known && wide >= 40 ? draw("text", { x: left + wide * (i + 0.5), y: 8 + tall * (j + 0.5) + 4, "text-anchor": "middle", paint: onColour(colour) }, digits(cell.value)) : null));
  }));
  const side = left + wide * xs.length + 16;
  for (let at = 0; at < 40; at += 1) {
    chart.append(draw("rect", { x: side, y: 9 + ((tall * ys.length - 2) * at) / 40, width: 13, height: (tall * ys.length - 2) / 40 + 0.6, paint: heatColour(1 - at / 39) }));
  }
  chart.append(draw("text", { x: side + 18, y: 18 }, digits(high)), draw("text", { x: side + 18, y: 6 + tall * ys.length }, digits(low)),
    logs ? draw("text", { x: side, y: 8 + tall * ys.length + 16 }, "log scale") : null);
  return chart;
}
