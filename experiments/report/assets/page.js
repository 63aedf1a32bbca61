// What the library leaves to the page: its theme, its tables, timelines on one scale, heat maps' choices.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, node = document) => [...node.querySelectorAll(selector)];
const digits = (value) => Number(value.toPrecision(5)).toString();

// ---- light and dark: charts read the style sheet's variables when they are painted ---------------

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  for (const view of Bokeh.index.roots) view.invalidate_layout?.();
}

// ---- tables: a click on a head sorts, again turns it round; empty cells go last either way -------

const valueOf = (cell) => cell.dataset.value ?? cell.textContent;
const natural = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  const order = Number(a) - Number(b);
  return Number.isNaN(order) ? natural.compare(a, b) : order;
}

function sort(table, head) {
  const down = head.ariaSort === "ascending";
  for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
  head.ariaSort = down ? "descending" : "ascending";
  const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[head.cellIndex]), row]);
  rows.sort(([a], [b]) => (a && b ? (down ? -1 : 1) * compare(a, b) : (a ? 0 : 1) - (b ? 0 : 1)));
  table.tBodies[0].replaceChildren(...rows.map(([, row]) => row));
  if (table.closest(".rows")) refresh(table.closest(".rows"));
}

// Of a long table the first rows alone are laid out, which takes a browser its time.
function refresh(card) {
  const wanted = card.querySelector("input").value.toLowerCase();
  const [most, rows] = [Number(card.dataset.most), all("tbody tr", card)];
  let found = 0;
  for (const row of rows) {
    const fits = row.textContent.toLowerCase().includes(wanted);
    found += fits;
    row.hidden = !fits || found > most;
  }
  card.querySelector("output").textContent = `${Math.min(found, most)} of ${found} rows`;
  card.querySelector(".more").hidden = found <= most;
}

// ---- timelines -----------------------------------------------------------------------------------

class Timeline {
  constructor(card) {
    this.card = card;
    this.unit = Number(card.dataset.unit);
    this.steps = JSON.parse(card.dataset.steps);
    this.seconds = this.steps[this.steps.length - 1];
    this.range = Bokeh.documents[0].get_model_by_name(card.querySelector(".chart").id).x_range;
    for (const button of all(".step", card)) button.addEventListener("click", () => this.toStep(Number(button.dataset.by)));
  }

  get view() { return [this.range.start * this.unit, this.range.end * this.unit]; }

  show([from, to]) { this.range.setv({ start: from / this.unit, end: to / this.unit }); }

  // Only the range that is shown is told in words: a chart's axis can't say it to everyone.
  tell() {
    const [from, to] = this.view.map((end) => digits(end / this.unit));
    this.card.querySelector("output").textContent = `${from} to ${to} of ${digits(this.seconds / this.unit)} ${this.card.dataset.unitName}`;
  }

  toStep(by) {
    const [from, to] = this.view;
    const now = this.steps.findLastIndex((start) => start <= from + (to - from) * 1e-6);
    const at = to - from > 0.99 * this.seconds ? (by > 0 ? 0 : this.steps.length - 2) : now + by;
    const next = Math.max(0, Math.min(this.steps.length - 2, at));
    this.show([this.steps[next], this.steps[next + 1]]);
  }
}

function linkTimelines(timelines, box) {
  let busy = false;
  const longest = Math.max(...timelines.map((one) => one.seconds));
  const link = () => {
    for (const one of timelines) {
      const limit = box?.checked ? longest : one.seconds;
      one.range.bounds = [0, limit / one.unit];
      one.range.reset_end = limit / one.unit;
      one.show([0, limit]);
    }
  };
  for (const one of timelines) {
    one.tell();
    one.range.change.connect(() => {
      one.tell();
      if (!box?.checked || busy) return;
      busy = true;
      for (const other of timelines) if (other !== one) other.show(one.view);
      busy = false;
    });
  }
  if (!box) return;
  // Side by side on one scale, unless one would be too small to see.
  box.checked = longest <= 12 * Math.min(...timelines.map((one) => one.seconds));
  box.addEventListener("change", link);
  link();
}

// ---- heat maps: from the rows of the table below -------------------------------------------------

class HeatMap {
  constructor(sweep) {
    this.sweep = sweep;
    this.table = sweep.querySelector("table");
    this.chart = Bokeh.documents[0].get_model_by_name(sweep.querySelector(".heat .chart").id);
    this.names = all("th", this.table).map((head) => head.textContent);
    this.rows = all("tbody tr", this.table).map((row) => [...row.cells].map(valueOf));
    for (const select of all("select", sweep)) select.addEventListener("change", () => this.draw());
    this.draw();
  }

  chosen(name) { return this.sweep.querySelector(`.${name}`).value; }

  levels(column) {
    const found = [...new Set(this.rows.map((row) => row[column]))];
    return found.every((level) => !Number.isNaN(Number(level))) ? found.sort(compare) : found;
  }

  draw() {
    const [x, y, value] = ["across", "up", "colour"].map((name) => this.names.indexOf(this.chosen(name)));
    const held = all(".held", this.sweep);
    for (const select of held) select.parentNode.hidden = [this.chosen("across"), this.chosen("up")].includes(select.dataset.column);
    const fixed = held.filter((select) => !select.parentNode.hidden && select.selectedIndex)
      .map((select) => [this.names.indexOf(select.dataset.column), select.value]);
    const cells = new Map();
    for (const row of this.rows) {
      if (row[value] === "" || fixed.some(([column, level]) => row[column] !== level)) continue;
      const key = JSON.stringify([row[x], row[y]]);
      cells.set(key, [...(cells.get(key) ?? []), Number(row[value])]);
    }
    const how = this.chosen("how");
    const one = { least: (list) => Math.min(...list), largest: (list) => Math.max(...list), mean: (list) => list.reduce((sum, item) => sum + item) / list.length }[how];
    this.paint([...cells].map(([key, list]) => [...JSON.parse(key), one(list), list.length]), this.levels(x), this.levels(y));
    const most = Math.max(0, ...[...cells.values()].map((list) => list.length));
    this.sweep.querySelector(".told").textContent = `${this.chosen("colour")} by ${this.chosen("across")} and ${this.chosen("up")}: ` +
      (most > 1 ? `each cell is the ${how} of up to ${most} rows.` : "each cell is one row.");
  }

  paint(cells, xs, ys) {
    const values = cells.map(([, , value]) => value);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    // Values that hardly differ get colours that hardly differ; decades differ more than a linear scale shows.
    const room = Math.max(0, 0.1 * Math.max(Math.abs(low), Math.abs(high)) - (high - low)) / 2;
    [low, high] = [low - room, high + room];
    const logs = low > 0 && high / low > 50;
    const part = (value) => (logs ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    const [{ glyph, data_source: source }, bar] = [this.chart.renderers[0], this.chart.right[0]];
    const mapper = new (Bokeh.Models.get(logs ? "LogColorMapper" : "LinearColorMapper"))({ palette: bar.color_mapper.palette, low, high });
    this.chart.x_range.factors = xs;
    this.chart.y_range.factors = ys;
    this.chart.below[0].axis_label = new (Bokeh.Models.get("PlainText"))({ text: this.chosen("across") });
    this.chart.left[0].axis_label = new (Bokeh.Models.get("PlainText"))({ text: this.chosen("up") });
    glyph.fill_color = { field: "value", transform: mapper };
    bar.color_mapper = mapper;
    source.data = {
      x: cells.map((cell) => cell[0]), y: cells.map((cell) => cell[1]), value: values, count: cells.map((cell) => cell[3]),
      text: values.map((value) => (xs.length <= 14 ? Number(value.toPrecision(3)).toString() : "")),
      ink: values.map((value) => (part(value) > 0.65 ? "#1d2430" : "#ffffff")),
    };
  }
}

// ---- the page ------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", () => setTheme(dark.matches));
document.getElementById("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
for (const table of all(".sortable")) {
  for (const head of table.tHead.rows[0].cells) {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(table, head));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(table, head); });
  }
}
for (const card of all(".rows")) {
  card.querySelector("input").addEventListener("input", () => refresh(card));
  card.querySelector(".more").addEventListener("click", () => { card.dataset.most *= 5; refresh(card); });
}
Bokeh.logger.set_level("error");
Bokeh.embed.embed_items(data.documents, data.places).then(() => {
  linkTimelines(all(".timeline").map((card) => new Timeline(card)), document.getElementById("linked"));
  for (const sweep of all(".sweep")) if (sweep.querySelector(".heat")) new HeatMap(sweep);
});
