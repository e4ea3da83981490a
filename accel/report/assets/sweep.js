// SPDX-License-Identifier: Apache-2.0
// Many runs: a table of settings that differ and of metrics, and parallel coordinates of settings against a metric.

let sweep = null;
const WAYS = ["last", "best", "at step"];
const table = { columns: [], sort: null, falls: false, step: null, rows: [], chosen: null };

function lastOf(metric, run) {
  return DATA.metrics[metric].curves[run]?.last?.[1] ?? null;
}
function bestOf(metric, run) {
  return DATA.metrics[metric].curves[run]?.best?.[1] ?? null;
}
// The value at a step, or the newest one before it; of a long curve the mean of the part around it.
function valueAt(metric, run, step) {
  if (!DATA.metrics[metric].curves[run] || step === null) return null;
  const curve = curveOf(metric, run);
  if (curve.x === undefined) return null;
  const at = lowerBound(stepsOf(curve.x), step + 1e-9) - 1;
  return at < 0 ? null : curve.mean[at];
}

const asNumber = (value) => (value === null || value === undefined || value === "" || Number.isNaN(Number(value)) ? null
  : Number(value));

function columnOfSetting(name) {
  return { key: `s ${name}`, title: name, isMetric: false, value: (run) => RUNS[run].params[name] ?? null, better: "" };
}
function columnOfMetric(metric, way) {
  const { name, better } = DATA.metrics[metric];
  const value = { last: lastOf, best: bestOf, "at step": (each, run) => valueAt(each, run, table.step) }[way];
  return { key: `m ${metric} ${way}`, title: name, way, isMetric: true, value: (run) => value(metric, run), better };
}

function compareValues(one, other) {
  const [a, b] = [asNumber(one), asNumber(other)];
  if (a !== null && b !== null) return a - b;
  if (a !== null || b !== null) return a !== null ? -1 : 1;
  if (one === null || other === null) return one === other ? 0 : one === null ? 1 : -1;
  return String(one) < String(other) ? -1 : String(one) > String(other) ? 1 : 0;
}

// The value of a group in a column: of several runs a metric's mean, or the setting that they share.
function valueIn(column, runs) {
  const values = runs.map((run) => column.value(run));
  if (values.length === 1) return values[0];
  if (column.isMetric) return spreadOf(values).mean;
  const distinct = [...new Set(values)];
  return distinct.length === 1 ? distinct[0] : `${distinct.length} values`;
}

function sortedGroups() {
  const groups = groupsOfRuns();
  const column = table.columns.find((each) => each.key === table.sort);
  if (!column) return groups;
  const value = ({ runs }) => valueIn(column, runs);
  const isEmpty = (each) => each === null || each === undefined || typeof each === "string" && each === "nan";
  const known = groups.filter((each) => !isEmpty(value(each)));
  known.sort((one, other) => compareValues(value(one), value(other)) * (table.falls ? -1 : 1) || one.run - other.run);
  return [...known, ...groups.filter((each) => isEmpty(value(each)))];
}

function bestGroup(column, groups) {
  if (!column.isMetric || !column.better) return null;
  const value = ({ runs }) => valueIn(column, runs);
  const known = groups.filter((each) => typeof value(each) === "number");
  if (known.length < 2) return null;
  const sign = column.better === "min" ? 1 : -1;
  return known.reduce((best, each) => (sign * value(each) < sign * value(best) ? each : best));
}

function head(column) {
  const isSorted = table.sort === column.key;
  const sign = isSorted ? (table.falls ? " ↓" : " ↑") : "";
  const step = column.way === "at step" ? ` ${table.step ?? "…"}` : "";
  const way = column.way ? make("span", { className: "soft" }, ` ${column.way}${step}`) : "";
  const button = make("button", { type: "button", title: "Sort" }, column.title, way, sign);
  button.addEventListener("click", () => {
    if (isSorted) table.falls = !table.falls;
    else Object.assign(table, { sort: column.key, falls: column.better === "max" });
    buildTable();
  });
  const cell = make("th", { scope: "col", className: column.isMetric ? "number" : "" }, button);
  if (isSorted) cell.setAttribute("aria-sort", table.falls ? "descending" : "ascending");
  return cell;
}

function buildTable() {
  const place = document.getElementById("rows");
  const name = { key: "name", title: grouping.groups ? "group" : "run", value: (run) => RUNS[run].name, better: "" };
  const kind = { key: "state", title: "state", value: (run) => RUNS[run].state, better: "" };
  const shown = [name, kind, ...table.columns];
  table.columns = shown;
  const order = sortedGroups();
  table.columns = shown.slice(2);
  const matching = order.filter(({ runs }) => runs.some((run) => state.matching.has(run)));
  const best = table.columns.map((column) => bestGroup(column, matching));
  table.rows = [];
  const body = make("tbody");
  for (const group of order) {
    const { run, runs } = group;
    const dot = make("button", { type: "button", className: "dot", title: "Show or hide the curve" });
    dot.style.background = colorOf(run);
    dot.addEventListener("click", () => runs.forEach((each) => toggle(each, false)));
    const cells = table.columns.map((column, at) => {
      const value = valueIn(column, runs);
      const number = asNumber(value);
      const { deviation, count } = spreadOf(runs.map((each) => column.value(each)));
      const spread = column.isMetric && count > 1 ? ` ± ${showValue(deviation)}` : "";
      const text = number === null ? String(value ?? "–") : showValue(number) + spread;
      const cell = make("td", { className: number === null && !column.isMetric ? "" : "number" }, text);
      if (number !== null) cell.title = String(value);
      if (best[at] === group) cell.classList.add("best");
      return cell;
    });
    const title = grouping.groups ? `${group.label} (${runs.length})` : group.label;
    const states = [...new Set(runs.map((each) => RUNS[each].state))];
    const badges = states.map((each) => make("span", { className: `badge ${each}` }, each));
    const row = make("tr", {}, make("th", { scope: "row" }, dot, title), make("td", {}, ...badges), ...cells);
    row.addEventListener("pointerenter", () => light(run));
    row.addEventListener("pointerleave", () => light(null));
    table.rows[run] = row;
    body.append(row);
  }
  place.replaceChildren(make("thead", {}, make("tr", {}, ...shown.map(head))), body);
  updateRows();
}

function updateRows() {
  for (const { run, runs } of groupsOfRuns()) {
    const row = table.rows[run];
    if (!row) continue;
    row.hidden = !runs.some((each) => state.matching.has(each));
    row.classList.toggle("off", runs.every((each) => state.hidden.has(each)));
    row.classList.toggle("lit", state.lit === run);
  }
}

// Check boxes of the columns: settings that differ, and each metric's last and best value and that at a step.
function buildChooser() {
  const place = document.getElementById("columns");
  const isFirst = table.chosen === null;
  const chosen = (table.chosen ??= new Set([...tellingSettings().slice(0, 8).map((name) => `s ${name}`),
    ...DATA.matter.flatMap((metric) => ["last", "best"].map((way) => `m ${metric} ${way}`))]));
  const all = [...DATA.differing.map(columnOfSetting),
    ...DATA.metrics.flatMap((each, metric) => WAYS.filter((way) => way !== "best" || each.better)
      .map((way) => columnOfMetric(metric, way)))];
  const rank = (column) => {
    const at = DATA.matter.indexOf(Number(column.key.split(" ")[1]));
    return column.isMetric && at >= 0 ? at : column.isMetric ? DATA.matter.length : -1;
  };
  const choose = () => {
    table.columns = all.filter((column) => chosen.has(column.key)).sort((one, other) => rank(one) - rank(other));
    buildTable();
    buildParallel();
  };
  const box = (column, text) => {
    const input = make("input", { type: "checkbox", checked: chosen.has(column.key) });
    input.addEventListener("change", () => {
      if (input.checked) chosen.add(column.key); else chosen.delete(column.key);
      choose();
    });
    return make("label", {}, input, ` ${text}`);
  };
  const settings = make("div", { className: "boxes" }, ...all.filter((each) => !each.isMetric).map((each) => box(each, each.title)));
  const lines = DATA.metrics.map((each, metric) => make("div", {}, make("span", { className: "name" }, each.name),
    ...all.filter((column) => column.key.startsWith(`m ${metric} `)).map((column) => box(column, column.way))));
  const step = make("input", { type: "number", min: 0, placeholder: "step", value: table.step ?? "" });
  step.addEventListener("input", () => { table.step = step.value === "" ? null : Number(step.value); choose(); });
  place.replaceChildren(place.querySelector("summary"), make("h4", {}, "Settings that differ"), settings, make("h4", {}, "Metrics"),
    make("label", {}, "at step ", step), make("div", { className: "metrics" }, ...lines));
  const first = DATA.matter[0];
  if (isFirst && first !== undefined) {
    const { better } = DATA.metrics[first];
    Object.assign(table, { sort: `m ${first} ${better ? "best" : "last"}`, falls: better === "max" });
  }
  choose();
}

// Parallel coordinates: an axis for each chosen setting, the last one for a metric, a line for each run.
const parallel = { lines: [], below: null, top: null };
const NS = "http://www.w3.org/2000/svg";
function draw(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function axisOf(column) {
  const values = [...RUNS.keys()].map((run) => column.value(run));
  const numbers = values.map(asNumber).filter((each) => each !== null && Number.isFinite(each));
  const known = values.filter((each) => each !== null && each !== undefined);
  if (numbers.length && numbers.length === known.filter((each) => each !== "nan" && each !== "inf" && each !== "-inf").length) {
    const [low, high] = [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))];
    const isLog = low > 0 && high / low >= 50;
    const scale = isLog ? Math.log10 : (value) => value;
    const span = scale(high) - scale(low);
    const at = (value) => {
      const number = asNumber(value);
      return number === null || !Number.isFinite(number) ? null : span ? (scale(number) - scale(low)) / span : 0.5;
    };
    const marks = span ? (isLog ? logTicks(scale(low), scale(high), 5).map((each) => Number((10 ** each).toPrecision(6)))
      : ticks(low, high, 5)) : [low];
    return { column, at, ticks: marks.map((value) => [at(value), showValue(value)]) };
  }
  const names = [...new Set(known.map(String))].sort();
  const at = (value) => (value === null || value === undefined ? null : names.length > 1 ? names.indexOf(String(value)) / (names.length - 1) : 0.5);
  const stride = Math.ceil(names.length / 12);
  return { column, at, ticks: names.filter((_, each) => each % stride === 0).map((name) => [at(name), name.length > 14 ? `${name.slice(0, 13)}…` : name]) };
}

// Lines are blue where the metric is good and orange where it is bad, by rank; the good ones lie on top.
function shadesOf({ column }) {
  const rank = new Map();
  const known = [...RUNS.keys()].filter((run) => typeof column.value(run) === "number");
  const sign = column.better === "max" ? 1 : -1;
  known.sort((one, other) => sign * (column.value(one) - column.value(other)));
  known.forEach((run, at) => rank.set(run, known.length > 1 ? at / (known.length - 1) : 1));
  const order = [...RUNS.keys()].sort((one, other) => (rank.get(one) ?? -1) - (rank.get(other) ?? -1));
  const color = (run) => {
    const part = rank.get(run);
    if (part === undefined) return "#808080";
    return part < 0.5 ? `color-mix(in oklab, #9a9a9a ${part * 200}%, #d55e00)`
      : `color-mix(in oklab, #2185d0 ${part * 200 - 100}%, #9a9a9a)`;
  };
  return { order, color };
}

function buildParallel() {
  const place = document.getElementById("parallel");
  const select = document.getElementById("against");
  const offered = new Set([...select.options].map(({ value }) => value));
  const order = [...DATA.matter, ...DATA.metrics.keys()].filter((each, at, all) => all.indexOf(each) === at);
  for (const metric of order) {
    for (const way of DATA.metrics[metric].better ? ["best", "last"] : ["last"]) {
      const value = `${metric} ${way}`;
      if (!offered.has(value)) select.append(make("option", { value }, `${DATA.metrics[metric].name}, ${way}`));
    }
  }
  const settings = table.columns.filter((column) => !column.isMetric);
  const [metric, way] = select.value.split(" ");
  const goal = select.value ? [columnOfMetric(Number(metric), way)] : [];
  const axes = [...settings, ...goal].map(axisOf);
  parallel.lines = [];
  if (axes.length < 2) { place.replaceChildren("Choose a setting that differs to see it against a metric."); return; }
  const width = Math.max(place.clientWidth - 2, 110 * axes.length);
  const [height, top] = [260, 34];
  const [left, right] = [axes[0], axes[axes.length - 1]].map(
    ({ ticks: labels }) => labels.reduce((most, [, text]) => Math.max(most, 14 + 7 * text.length), 70));
  const x = (at) => left + (at * (width - left - right)) / (axes.length - 1);
  const y = (part) => height - 12 - part * (height - top - 12);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "parallel", role: "img",
    "aria-label": "Settings of each run against a metric" });
  svg.style.width = `${width}px`;
  parallel.below = draw("g", { class: "lines" }); // a separate layer: a lit line does not paint the others again
  svg.append(parallel.below);
  const shade = shadesOf(axes[axes.length - 1]);
  for (const run of shade.order) {
    const points = axes.map((axis, at) => [x(at), axis.at(axis.column.value(run))]);
    let path = "";
    points.forEach(([across, part], at) => {
      if (part === null) return;
      path += `${at && points[at - 1][1] !== null ? "L" : "M"}${across.toFixed(1)} ${y(part).toFixed(1)}`;
    });
    const line = draw("path", { d: path || "M0 0", fill: "none", stroke: shade.color(run) });
    line.addEventListener("pointerenter", () => light(run));
    line.addEventListener("pointerleave", () => light(null));
    parallel.lines[run] = line;
    parallel.below.append(line);
  }
  parallel.top = draw("g", { class: "top", "pointer-events": "none" }); // lit lines again, above all others
  svg.append(parallel.top);
  axes.forEach((axis, at) => {
    svg.append(draw("line", { x1: x(at), x2: x(at), y1: y(0), y2: y(1), class: "axis" }));
    const title = axis.column.title.length > 22 ? `…${axis.column.title.slice(-21)}` : axis.column.title;
    svg.append(draw("text", { x: x(at), y: 14, class: "title", "text-anchor": "middle" }, title));
    const isLast = at === axes.length - 1;
    const most = at && !isLast ? Math.max(4, Math.floor((x(1) - x(0) - 24) / 6.5)) : Infinity; // up to the axis before
    for (const [part, whole] of axis.ticks) {
      const text = whole.length > most ? `${whole.slice(0, most - 1)}…` : whole;
      const attributes = { x: x(at) + (isLast ? 6 : -6), y: y(part) + 4, "text-anchor": isLast ? "start" : "end" };
      svg.append(draw("text", attributes, text));
    }
  });
  place.replaceChildren(svg);
  updateParallel();
}

function updateParallel() {
  parallel.lines.forEach((line, run) => line.classList.toggle("off", !isShown(run)));
  const lit = state.lit === null ? [] : parallel.lines.filter((_, run) => leaderOf(run) === state.lit);
  parallel.below?.classList.toggle("dim", lit.length > 0);
  parallel.top?.replaceChildren(...lit.map((line) => line.cloneNode()));
}

// Begin where the page has a sweep; a served one may get it later.
function openSweep() {
  sweep = document.getElementById("sweep");
  if (!sweep) return;
  document.getElementById("against").addEventListener("change", buildParallel);
  onChange((what) => {
    if (what === "runs") buildTable(); else if (what === "lit") updateRows();
    if (what === "runs" || what === "lit") updateParallel();
  });
  buildChooser();
  const place = document.getElementById("parallel");
  let before = place.clientWidth;
  new ResizeObserver(() => {
    if (place.clientWidth === before) return;
    before = place.clientWidth;
    buildParallel();
  }).observe(place);
}

openSweep();
start();
