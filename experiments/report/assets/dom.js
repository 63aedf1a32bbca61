// Elements, numbers with units, colours, the tooltip. Text from data is set as text, never parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "colour") node.style.color = value;
    else if (key === "paint") node.style.fill = value;
    else if (key === "stroke") node.style.stroke = value;
    else if (key === "back") node.style.background = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// ---- numbers ---------------------------------------------------------------------------------

function digits(value, most = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= 7 || size < -4) return value.toExponential(most - 1);
  return value.toLocaleString("en", {
    maximumFractionDigits: Math.max(0, Math.min(20, most - 1 - size)),
  });
}

function scaled(value, scales, most) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const [factor, unit] = scales.find(([least]) => size >= least) || scales[scales.length - 1];
  return `${digits(value / factor, most)} ${unit}`;
}

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const time = (value, most = 4) => (value === 0 ? "0 s" : scaled(value, TIMES, most));
const bytes = (value, most = 3) => (value === 0 ? "0 B" : scaled(value, SIZES, most));
const rate = (value) => (value === null ? "–" : `${bytes(value)}/s`);
const share = (value, places = 1) =>
  value === null || value === undefined ? "–" : `${(value * 100).toFixed(places)}%`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// Round values inside [low, high], about `count` of them.
function ticks(low, high, count = 6) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / count;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

// Labels of ticks, all in one unit.
function labels(values, scales) {
  if (!scales) return values.map((value) => digits(value, 6));
  const largest = Math.max(...values.map(Math.abs));
  const [factor, unit] = scales.find(([least]) => largest >= least) || scales[scales.length - 1];
  return values.map((value) => (value === 0 ? "0" : `${digits(value / factor, 7)} ${unit}`));
}

// ---- colours ---------------------------------------------------------------------------------

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function luminance(colour) {
  const [red, green, blue] = channels(colour).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function mixed(colour, other, part) {
  const ends = channels(other);
  return "#" + channels(colour)
    .map((value, at) => Math.round(value + (ends[at] - value) * part))
    .map((value) => value.toString(16).padStart(2, "0")).join("");
}

// The colour, moved towards white or black until lines of it stand out (WCAG asks for 3 to 1).
function readable(colour, back) {
  const behind = luminance(back);
  const goal = behind < 0.2 ? "#ffffff" : "#000000";
  for (let part = 0; part < 1; part += 0.1) {
    const tried = mixed(colour, goal, part);
    const [dark, light] = [luminance(tried), behind].sort((a, b) => a - b);
    if ((light + 0.05) / (dark + 0.05) >= 3) return tried;
  }
  return goal;
}

const onColour = (colour) => (luminance(colour) > 0.3 ? "#1d2430" : "#ffffff");

const Theme = {
  listeners: [],
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  back() { return this.dark ? "#1a1f28" : "#ffffff"; },
  set(dark) {
    this.dark = dark;
    document.documentElement.classList.toggle("dark", dark);
    const style = document.documentElement.style;
    style.setProperty("--stall", DATA.colours.stall);
    DATA.colours.runs.forEach((colour, place) =>
      style.setProperty(`--run-${place}`, readable(colour, this.back())));
    this.listeners.forEach((listener) => listener());
  },
};

const runColour = (place) => `var(--run-${place})`;

// ---- tooltip ---------------------------------------------------------------------------------

const Tip = {
  node: el("div", { class: "tip", role: "tooltip", hidden: true }),
  show(text, x, y) {
    this.node.textContent = text;
    this.node.hidden = false;
    const { width, height } = this.node.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    const top = y + 16 + height > innerHeight ? y - 12 - height : y + 16;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() { this.node.hidden = true; },
};

const DATA = JSON.parse(document.getElementById("data").textContent);

const sourceBadge = (source) =>
  el("span", { class: /^measured$|profiler/i.test(source) ? "badge" : "badge made-up" }, source);

function tableOf(heads, rows, caption) {
  // A head is a name, or {name, text: true}; a cell is what is shown, or {long: text}.
  return el("div", { class: "scroll" }, el("table", {},
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, heads.map((head) =>
      el("th", { scope: "col", class: head.text ? "text" : null }, head.name || head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, place) =>
      cell !== null && typeof cell === "object" && !(cell instanceof Node)
        ? el("td", { class: "long" }, cell.long)
        : el("td", { class: heads[place].text ? "text" : null }, cell)))))));
}
