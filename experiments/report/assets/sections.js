// The page's sections, from the data to elements.

const COST = (one) => one.figures.mean_step_seconds;

function fact(name, value) {
  return value === "–" || value === null || value === undefined || value === "" ? null
    : [el("dt", {}, name), el("dd", {}, value)];
}

function card(place, name, path, source, big, small, stalled, facts, about = []) {
  const node = el("div", { class: "card run" },
    el("div", { class: "name" }, name), el("div", { class: "path" }, path), sourceBadge(source),
    el("div", { class: "big" }, big, " ", el("small", {}, small)),
    stalled === null || stalled === undefined ? null : [
      el("div", { class: "keys" }, `${share(stalled)} stalled`),
      el("div", { class: "meter", role: "img", "aria-label": `${share(stalled)} of the time stalled` }, el("div"))],
    el("dl", { class: "facts" }, facts),
    about.some(Boolean) ? el("p", { class: "about" }, about.filter(Boolean).join(" · ")) : null);
  if (place !== null) node.style.setProperty("--mark", runColour(place));
  const meter = node.querySelector(".meter > div");
  if (meter) meter.style.width = share(stalled);
  return node;
}

function summarySection() {
  const cards = DATA.runs.map((run, place) => {
    const f = run.figures;
    const loss = f.eval_loss ?? null;
    return card(place, run.name, run.path, run.source, time(f.mean_step_seconds, 3), "per step", f.stall_fraction, [
      fact("steps", f.planned_steps && f.planned_steps > f.steps ? `${f.steps} of ${f.planned_steps}` : digits(f.steps, 7)),
      fact("tokens/s", digits(f.tokens_per_second, 4)),
      fact("to the host, a step", bytes(f.d2h_bytes_per_step)), fact("to the device, a step", bytes(f.h2d_bytes_per_step)),
      fact("loss, training", digits(f.final_train_loss, 4)), fact("loss, held-out", digits(loss, 4)),
      fact("accuracy", f.eval_accuracy === null || f.eval_accuracy === undefined ? "–" : share(f.eval_accuracy)),
      fact("host bytes/parameter", digits(f.host_bytes_per_param)),
      fact("captured energy", share(f.captured_energy)), fact("largest staleness", f.max_staleness === null || f.max_staleness === undefined ? "–" : plural(f.max_staleness, "step")),
    ], [
      f.model, f.num_params ? `${digits(f.num_params / 1e6)}M parameters` : null, f.data, f.device, f.dtype,
      f.seed === null || f.seed === undefined ? null : `seed ${f.seed}`,
      run.link ? `emulated link ${rate(run.link.d2h_bytes_per_second)} down, ${rate(run.link.h2d_bytes_per_second)} up` : null,
    ]);
  });
  for (const trace of DATA.traces) {
    const known = trace.step_seconds !== null;
    cards.push(card(null, trace.name, trace.path, trace.source, time(known ? trace.step_seconds : trace.seconds, 3),
      known ? "per step" : "in all", trace.stall_fraction, [
        fact("length", time(trace.seconds)), fact("steps", trace.num_steps ? String(trace.num_steps) : null),
        ...Object.entries(trace.bytes_per_step).map(([lane, moved]) => fact(`${lane} per step`, bytes(moved))),
        fact("strategy", trace.facts.strategy ?? null), fact("model", trace.facts.model ?? null),
        fact("step of", trace.work || null), fact("machine", trace.facts.machine ?? null),
      ]));
  }
  for (const table of DATA.tables) {
    cards.push(card(null, table.path.split("/").slice(-2).join("/"), table.path, table.source, table.num_rows.toLocaleString("en"), table.num_rows === 1 ? "row" : "rows", null, [
      fact("axes", table.columns.filter((column) => column.axis).map((column) => column.name).join(", ")),
      fact("columns", String(table.columns.length + Object.keys(table.constants).length))]));
  }
  return el("div", { class: "cards" }, cards);
}

// ---- comparison --------------------------------------------------------------------------------

// Runs, and traces that belong to no run; each keeps saying where its figures are from.
function compared() {
  return [
    ...DATA.runs.map((run, place) => ({
      name: run.name, source: run.source, work: run.work, colour: runColour(place), step: COST(run), stall: run.figures.stall_fraction,
      down: run.figures.d2h_bytes_per_step, up: run.figures.h2d_bytes_per_step, figures: run.figures })),
    ...DATA.traces.filter((trace) => trace.step_seconds !== null).map((trace) => ({
      name: trace.name, source: trace.source, work: trace.work, colour: "var(--soft)", step: trace.step_seconds, stall: trace.stall_fraction,
      down: trace.bytes_per_step.d2h ?? null, up: trace.bytes_per_step.h2d ?? null, figures: {} })),
  ];
}

function lossChart(against) {
  const series = [];
  const shown = DATA.runs.map((run, place) => [run, place]).filter(([run]) => run.curves);
  for (const [run, place] of shown) {
    const { curves } = run;
    const at = against === "steps" ? curves.step : curves.elapsed;
    series.push({ name: null, tip: `${run.name}, training`, colour: runColour(place), faint: true, points: smooth(curves.loss).map((loss, i) => [at[i], loss]) });
    series.push({ name: run.name, colour: runColour(place), dots: true, points: curves.held_out.map(([step, seconds, loss]) => [against === "steps" ? step : seconds, loss]) });
  }
  // The first steps fall from ln(vocabulary); what differs between strategies comes after.
  const late = shown.map(([run]) => smooth(run.curves.loss)).flatMap((list) => list.slice(Math.floor(list.length / 20)));
  const held = shown.flatMap(([run]) => run.curves.held_out.map(([, , loss]) => loss));
  return lineChart({
    title: `Loss against ${against === "steps" ? "steps" : "time"}`, x: against === "steps" ? "step" : "seconds of training", y: "loss",
    series, range: padded(extent([...late, ...held])), legend: true, xScale: null,
    note: "Thin: training, a running mean. Dots: held-out.",
  });
}

// A running mean over about a thirtieth of the run, and 5 points at least.
function smooth(values) {
  const most = 1 - 1 / Math.max(5, values.length / 30);
  let [mean, count] = [null, 0];
  return values.map((value) => {
    if (value === null) return null;
    const past = Math.min(most, count / (count + 1));
    mean = mean === null ? value : past * mean + (1 - past) * value;
    count += 1;
    return mean;
  });
}

// One chart for all, unless figures of one kind would make those of another too small to see.
function kinds(all, value) {
  const sizes = all.map(value).filter((size) => size > 0);
  if (Math.max(...sizes) <= 12 * Math.min(...sizes)) return all.length ? [all] : [];
  const groups = new Map();
  for (const one of all) groups.set(one.source, [...(groups.get(one.source) || []), one]);
  // A single bar says no more than the table.
  return [...groups.values()].filter((group) => group.length > 1);
}

function kindOf(group, title) {
  const sources = new Set(group.map((one) => one.source));
  if (sources.size === 1) return { title: `${title}, ${group[0].source}`, tag: () => null, note: null };
  const note = "The figures are not all of one kind: each bar says where its own are from.";
  return { title, tag: (one) => one.source, note };
}

function stepChart(group) {
  const { title, tag, note } = kindOf(group, "Time of a step");
  return barChart({
    title, note, scale: TIMES, legend: [["stalled", "var(--stall)"], ["not stalled", "#4a90c4"]],
    rows: group.map((one) => {
      const isKnown = one.stall !== null && one.stall !== undefined;
      return { name: one.name, source: one.source, tag: tag(one), parts: [
        [one.step * (1 - (one.stall || 0)), isKnown ? "#4a90c4" : "#8a93a3", isKnown ? "not stalled" : "stall unknown"],
        [one.step * (one.stall || 0), "var(--stall)", "stalled"]],
      text: `${time(one.step, 3)}, ${isKnown ? `${share(one.stall, 0)} stalled` : "stall unknown"}` };
    }),
  });
}

function bytesChart(group) {
  const { title, tag, note } = kindOf(group, "Bytes over the link in a step");
  const { grads, params } = DATA.colours.spans;
  return barChart({
    title, note, scale: SIZES, legend: [["to the host", grads], ["to the device", params]],
    rows: group.map((one) => ({ name: one.name, source: one.source, tag: tag(one),
      parts: [[one.down, grads, "to the host"], [one.up, params, "to the device"]],
      text: bytes((one.down || 0) + (one.up || 0)) })),
  });
}

function comparisonSection() {
  const all = compared();
  const charts = [];
  for (const group of kinds(all.filter((one) => one.step), (one) => one.step)) charts.push(stepChart(group));
  const moving = all.filter((one) => one.down !== null && one.down !== undefined);
  for (const group of kinds(moving, (one) => one.down + one.up)) charts.push(bytesChart(group));
  if (DATA.runs.some((run) => run.curves)) charts.push(lossChart("time"), lossChart("steps"));
  // Speeds of different kinds of figures, or of different work, are not compared.
  const alike = (one) => all.filter((other) => other.step && other.source === one.source && other.work === one.work);
  const speed = (one) => one.step && alike(one).length > 1 ? `${digits(Math.max(...alike(one).map((other) => other.step)) / one.step)}×` : "–";
  const rows = all.map((one) => [one.name, one.source, one.work || "–", time(one.step, 4), time(one.figures.p95_step_seconds ?? null, 4), share(one.stall),
    speed(one), bytes(one.down), bytes(one.up), digits(one.figures.tokens_per_second, 5),
    digits(one.figures.final_train_loss, 5), digits(one.figures.eval_loss, 5)]);
  return el("div", {}, el("div", { class: "charts" }, charts), el("div", { class: "card", id: "comparison-table" }, tableOf(
    [{ name: "name", text: true }, { name: "figures are", text: true }, { name: "step of", text: true }, "mean step", "95% of steps within", "stalled", "speed, slowest of its kind and work = 1", "down/step", "up/step", "tokens/s", "training loss", "held-out loss"], rows)));
}

// ---- tuning ------------------------------------------------------------------------------------

const KNOBS = { update_interval: "S", topk_ratio: "k", lag: "lag", select_interval: "select_interval" };

function knobChart(run, place, knob) {
  const { tuning, curves } = run;
  const last = curves ? curves.step[curves.step.length - 1] : Math.max(0, ...tuning.windows.map((window) => window.step));
  const logged = tuning.knobs.map(([step, knobs]) => [step, knobs[knob]]);
  // Zen-auto moves S between decisions of the log, so the steps' own record goes first.
  const own = knob === "update_interval" && curves && curves.interval.some((value) => value !== null);
  const points = own ? curves.step.map((step, at) => [step, curves.interval[at]]) : [...logged, [last, logged[logged.length - 1][1]]];
  return lineChart({
    title: `${KNOBS[knob]} over the run`, x: "step", y: KNOBS[knob], height: 200, fromZero: true,
    guides: tuning.decisions.map((decision) => decision.step),
    series: [{ name: KNOBS[knob], colour: runColour(place), points, step: true }],
  });
}

function tuningOf(run, place) {
  const { tuning } = run;
  const windows = tuning.windows;
  const moving = Object.keys(KNOBS).filter((knob) => knob === "update_interval" || new Set(tuning.knobs.map(([, knobs]) => knobs[knob])).size > 1);
  const charts = moving.map((knob) => knobChart(run, place, knob));
  if (windows.length) {
    charts.push(lineChart({
      title: "Step time: predicted against measured", x: "step", y: "seconds", yScale: TIMES, fromZero: true, height: 240,
      guides: tuning.decisions.map((decision) => decision.step), note: "Dashed lines: decisions.",
      series: [
        { name: "measured", colour: runColour(place), points: windows.map((window) => [window.step, window.measured]), dots: true },
        { name: "of it stalled", colour: "var(--stall)", points: windows.map((window) => [window.step, window.stalled]) },
        { name: "predicted by the twin", colour: "var(--text)", dashed: true, dots: true, points: windows.map((window) => [window.step, window.predicted]) },
      ],
    }));
  }
  const rows = tuning.decisions.map((decision) => [
    String(decision.step), decision.by,
    Object.entries(decision.change).map(([name, [before, after]]) => `${KNOBS[name] || name}: ${shownCell(before)} → ${shownCell(after)}`).join(", "),
    time(decision.before), time(decision.predicted), time(decision.after),
    decision.after && decision.predicted ? share(decision.predicted / decision.after - 1) : "–",
    share(decision.gain), share(decision.error), { long: decision.reason }]);
  const searched = tuning.search_seconds === null ? "" : ` The search took ${time(tuning.search_seconds, 3)} of CPU time.`;
  return el("article", {}, el("h3", {}, run.name), el("p", { class: "lead" },
    `${plural(tuning.decisions.length, "decision")} over ${plural(windows.length, "measured window")}` +
    `${tuning.finished ? "" : "; the run has not finished"}.${searched}`),
  el("div", { class: "charts" }, charts),
  rows.length ? el("div", { class: "card decisions" }, tableOf(
    ["after step", { name: "by", text: true }, { name: "change", text: true }, "step before, measured", "step predicted", "step after, measured", "prediction off by", "gain predicted", "its error before", { name: "reason", text: true }], rows)) : null);
}

// ---- provenance --------------------------------------------------------------------------------

function provenanceSection() {
  const machine = (hardware) => !hardware ? "–" : typeof hardware === "string" ? hardware
    : [hardware.gpu, hardware.cpu, hardware.cores ? plural(hardware.cores, "core") : null, hardware.memory_bytes ? bytes(hardware.memory_bytes) : null, hardware.system].filter(Boolean).join(", ");
  const named = (versions) => !versions ? "–" : Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ");
  const groups = new Map();
  for (const origin of [...DATA.origins, { path: "this page", ...DATA.made }]) {
    const known = [origin.commit || "–", machine(origin.hardware), named(origin.versions), origin.seed === null || origin.seed === undefined ? "–" : String(origin.seed)];
    const key = JSON.stringify(known);
    if (!groups.has(key)) groups.set(key, { paths: [], known });
    groups.get(key).paths.push(origin.path);
  }
  const rows = [...groups.values()].map(({ paths, known: [commit, hardware, versions, seed] }) =>
    [{ long: paths.map((path) => el("div", {}, path)) }, commit, { long: hardware }, { long: versions }, seed]);
  for (const trace of DATA.traces) {
    const where = trace.facts.machine ? `${trace.source}, ${trace.facts.machine}` : `a trace keeps no more than: ${trace.source}`;
    rows.push([{ long: trace.path }, trace.facts.commit ?? "–", { long: where }, "–", "–"]);
  }
  const left = [{ name: "what", text: true }, { name: "commit", text: true }, { name: "hardware", text: true }, { name: "versions", text: true }, "seed"];
  return el("div", { class: "card" }, tableOf(left, rows),
    DATA.runs.filter((run) => Object.keys(run.settings).length).map((run) => el("details", {}, el("summary", {}, `Settings of ${run.name}`),
      el("p", {}, el("code", {}, Object.entries({ ...run.settings, ...run.rule }).filter(([, value]) => value !== null)
        .map(([name, value]) => `${name}=${JSON.stringify(value)}`).join("  "))))),
    el("p", { class: "keys" }, "Made by ", el("code", {}, DATA.made.command), ` on ${DATA.made.at}.`));
}

// ---- the page ----------------------------------------------------------------------------------

function section(id, title, lead, content) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), lead ? el("p", { class: "lead" }, lead) : null, content);
}

function build() {
  const parts = [section("summary", "Summary", null, summarySection())];
  if (compared().length) {
    parts.push(section("comparison", compared().length > 1 ? "Side by side" : "The run",
      "Red is the device waiting. Times and bytes of a run are means over it, those of a trace over the steps recorded in it.", comparisonSection()));
  }
  let group = null;
  if (DATA.timelines.length) {
    group = new TimelineGroup(DATA.timelines);
    parts.push(section("timelines", "Timelines", "What ran where. Of a run these are the steps whose spans were recorded, its last ones.", group.node()));
  }
  const tuned = DATA.runs.map((run, place) => [run, place]).filter(([run]) => run.tuning);
  if (tuned.length) {
    parts.push(section("tuning", "Tuning", "What was decided while the run went on, what was expected of it, and what came.", tuned.map(([run, place]) => tuningOf(run, place))));
  }
  if (DATA.tables.length) parts.push(section("sweeps", "Sweeps", null, DATA.tables.map((table) => new SweepTable(table).node())));
  parts.push(section("provenance", "Provenance", "Where and with what each result was made.", provenanceSection()));

  const toggle = el("button", { type: "button", "aria-label": "Switch between light and dark", onclick: () => Theme.set(!Theme.dark) }, "light / dark");
  const notes = DATA.notes.length ? el("div", { class: "card notes" }, el("h3", {}, "To know"), el("ul", {}, DATA.notes.map((note) => el("li", {}, note)))) : null;
  document.getElementById("page").append(
    el("header", { class: "top" }, el("h1", {}, DATA.title),
      el("nav", { "aria-label": "Sections" }, parts.map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent))), toggle),
    el("main", {}, notes, parts), Tip.node);
  Theme.set(Theme.dark);
  if (group) {
    group.link(group.linked);
    group.fit();
    Theme.listeners.push(() => group.timelines.forEach((one) => one.lanes.paint()));
    new ResizeObserver(() => group.fit()).observe(document.querySelector("main"));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => Theme.set(event.matches));
}

build();
