// A sweep: its table (sorted, searched, page by page) and its heat map.

const ROWS_PER_PAGE = 25;

const cellsOf = (column) => (column.levels ? column.index.map((at) => column.levels[at]) : column.values);
const shownCell = (value, name = "") => {
  if (value === null) return "";
  if (typeof value !== "number") return String(value);
  return /_bytes$/.test(name) ? bytes(value, 4) : digits(value, 6);
};
const natural = new Intl.Collator("en", { numeric: true });

function ordered(a, b) {
  if (a === null || b === null) return a === b ? 0 : null; // empty cells go last either way
  return typeof a === "number" && typeof b === "number" ? a - b : natural.compare(String(a), String(b));
}

// Numbers ascend; names keep the order in which the sweep had them.
function levelsOf(column) {
  const found = [...new Set(column.cells)];
  return column.number ? found.sort((a, b) => ordered(a, b) ?? (a === null ? 1 : -1)) : found;
}

class SweepTable {
  constructor(table) {
    this.table = table;
    this.columns = table.columns.map((column) => ({ ...column, cells: cellsOf(column) }));
    this.rows = Array.from({ length: table.num_shown }, (_, row) => row);
    this.sorted = { column: null, down: false };
    this.page = 0;
    this.body = el("tbody");
    this.heads = this.columns.map((column, at) => el("th", { scope: "col", class: column.number ? null : "text", "aria-sort": "none" },
      el("button", { type: "button", title: column.meaning ? `${column.meaning}\nClick to sort` : "Click to sort", onclick: () => this.sort(at) }, column.name, el("span", {}, ""))));
    this.where = el("span", { "aria-live": "polite" });
    this.search = el("input", { type: "search", placeholder: "filter rows", "aria-label": "Show only rows that contain this text", oninput: () => { this.page = 0; this.refresh(); } });
    this.back = el("button", { type: "button", onclick: () => { this.page -= 1; this.refresh(); } }, "before");
    this.next = el("button", { type: "button", onclick: () => { this.page += 1; this.refresh(); } }, "next");
  }

  sort(at) {
    this.sorted = { column: at, down: this.sorted.column === at && !this.sorted.down };
    const { cells } = this.columns[at];
    const sign = this.sorted.down ? -1 : 1;
    this.rows.sort((a, b) => {
      const order = ordered(cells[a], cells[b]);
      return order === null ? (cells[a] === null ? 1 : -1) : sign * order || a - b;
    });
    this.heads.forEach((head, place) => {
      head.setAttribute("aria-sort", place === at ? (this.sorted.down ? "descending" : "ascending") : "none");
      head.querySelector("span").textContent = place === at ? (this.sorted.down ? " ▼" : " ▲") : "";
    });
    this.page = 0;
    this.refresh();
  }

  refresh() {
    const wanted = this.search.value.toLowerCase();
    const rows = !wanted ? this.rows : this.rows.filter((row) =>
      this.columns.some(({ cells, name }) => shownCell(cells[row], name).toLowerCase().includes(wanted)));
    const pages = Math.max(1, Math.ceil(rows.length / ROWS_PER_PAGE));
    this.page = Math.max(0, Math.min(pages - 1, this.page));
    const first = this.page * ROWS_PER_PAGE;
    const shown = rows.slice(first, first + ROWS_PER_PAGE);
    this.body.replaceChildren(...shown.map((row) => el("tr", {}, this.columns.map((column) =>
      el("td", { class: column.number ? null : "text" }, shownCell(column.cells[row], column.name))))));
    this.where.textContent = rows.length ? `rows ${first + 1} to ${first + shown.length} of ${rows.length.toLocaleString("en")}` : "no row contains that";
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page === pages - 1;
  }

  node() {
    this.refresh();
    const { constants, path, num_rows: all, question, answer } = this.table;
    const fixed = Object.entries(constants).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${shownCell(value, name)}`);
    return el("article", { class: "sweep" },
      question ? el("h3", {}, question) : null,
      answer.length ? el("ul", { class: "answer" }, answer.map((sentence) => el("li", {}, sentence))) : null,
      this.heat(),
      el("div", { class: "card" },
        el("div", { class: "bar" }, el("h3", { class: "grow" }, path), this.search),
        fixed.length ? el("p", { class: "keys" }, `The same in all ${all.toLocaleString("en")} rows: ${fixed.join(", ")}`) : null,
        el("div", { class: "scroll" }, el("table", { class: "sortable" }, el("thead", {}, el("tr", {}, this.heads)), this.body)),
        el("div", { class: "pages" }, this.back, this.next, this.where)));
  }

  // ---- heat map --------------------------------------------------------------------------------

  heat() {
    const axes = this.columns.filter((column) => column.axis);
    const values = this.columns.filter((column) => column.number && !column.axis);
    if (axes.length < 2 || !values.length) return null;
    const best = values.find((column) => /goodput|tokens/.test(column.name)) && !values.some((column) => column.name === "step_seconds")
      ? values.find((column) => /goodput|tokens/.test(column.name)) : values.find((column) => column.name === "step_seconds") || values[0];
    const picker = (label, from, chosen) => {
      const select = el("select", { "aria-label": label, onchange: () => this.drawHeat() },
        from.map((column) => el("option", {}, column.name)));
      select.selectedIndex = Math.max(0, from.indexOf(chosen));
      return { select, column: () => from[select.selectedIndex], node: el("label", {}, label, select) };
    };
    // A strategy is rather compared than run through, so numbers come first.
    const numbers = [...axes].sort((a, b) => b.number - a.number);
    this.axes = axes;
    this.hold = new Map(axes.map((column) => [column, el("select", { "aria-label": `${column.name} held at`, onchange: () => this.drawHeat() },
      ["any", ...levelsOf(column).map((level) => shownCell(level))].map((name) => el("option", {}, name)))]));
    this.holders = el("div", { class: "bar" });
    this.pick = {
      value: picker("value", values, best), x: picker("across", axes, numbers[0]), y: picker("up", axes, numbers[1]),
      how: el("select", { "aria-label": "of several rows", onchange: () => this.drawHeat() },
        ["least", "largest", "mean"].map((name) => el("option", {}, name))),
    };
    this.map = el("div", { class: "scroll" });
    this.told = el("p", { class: "keys" });
    this.drawHeat();
    return el("div", { class: "card trace" }, el("div", { class: "bar" }, el("h3", { class: "grow" }, "Heat map"),
      this.pick.value.node, this.pick.x.node, this.pick.y.node, el("label", {}, "of several rows, the", this.pick.how)),
    this.holders, this.told, this.map);
  }

  // The rows that the heat map is of: those at the values at which other axes are held.
  heldRows(others) {
    const held = others.map((column) => [column, this.hold.get(column).selectedIndex])
      .filter(([, at]) => at > 0).map(([column, at]) => [column, levelsOf(column)[at - 1]]);
    return this.rows.filter((row) => held.every(([column, level]) => column.cells[row] === level));
  }

  drawHeat() {
    const [x, y, value] = [this.pick.x.column(), this.pick.y.column(), this.pick.value.column()];
    if (x === y) {
      this.told.textContent = "Choose two different axes.";
      this.map.replaceChildren();
      return;
    }
    const others = this.axes.filter((column) => column !== x && column !== y);
    this.holders.replaceChildren(...others.map((column) => el("label", {}, `${column.name}:`, this.hold.get(column))));
    const [xs, ys] = [levelsOf(x), levelsOf(y).reverse()];
    const [xAt, yAt] = [xs, ys].map((list) => new Map(list.map((level, at) => [level, at])));
    const groups = new Map();
    this.heldRows(others).forEach((row) => {
      const cell = value.cells[row];
      const key = `${xAt.get(x.cells[row])},${yAt.get(y.cells[row])}`;
      if (!groups.has(key)) groups.set(key, []);
      if (cell !== null) groups.get(key).push(cell);
    });
    const how = this.pick.how.value;
    const one = { least: (list) => Math.min(...list), largest: (list) => Math.max(...list), mean: (list) => list.reduce((sum, cell) => sum + cell, 0) / list.length }[how];
    const cells = new Map([...groups].map(([key, list]) => [key, { value: list.length ? one(list) : null, count: list.length }]));
    const most = Math.max(1, ...[...cells.values()].map((cell) => cell.count));
    const text = most > 1 ? `each cell is the ${how} of up to ${most} rows` : "each cell is one row";
    const free = others.filter((column) => this.hold.get(column).selectedIndex === 0).map((column) => column.name);
    this.told.textContent = `${value.name}: ${text}` + (most > 1 && free.length ? `, which differ in ${free.join(", ")}.` : ".") + " Grey: no value.";
    this.map.replaceChildren(heatMap({ x: x.name, y: y.name, value: value.name, xs: xs.map(shownCell), ys: ys.map(shownCell), cells, how: text }));
  }
}
