// SPDX-License-Identifier: Apache-2.0
// The one legend of the page, its controls, the tooltip, and what happens when a reader's choice changes.

const chips = [];

function toggle(run, isAlone) {
  if (isAlone) {
    const others = [...state.matching].filter((each) => each !== run);
    const wasAlone = !state.hidden.has(run) && others.every((each) => state.hidden.has(each));
    state.hidden = new Set(wasAlone ? [] : RUNS.keys());
    state.hidden.delete(run);
  } else if (!state.hidden.delete(run)) {
    state.hidden.add(run);
  }
  changed("runs");
}

function light(one) {
  const run = one === null ? null : leaderOf(one);
  if (state.lit === run) return;
  state.lit = run;
  changed("lit");
}

function buildLegend() {
  const place = document.getElementById("legend");
  if (!place) return;
  RUNS.slice(chips.length).forEach(({ name, state: kind }, at, all) => {
    const run = RUNS.length - all.length + at;
    const dot = make("i", { className: "dot" });
    dot.style.background = colorOf(run);
    const chip = make("button", { type: "button", className: "chip", title: `${name}: ${kind}` }, dot,
      make("span", {}, name));
    chip.addEventListener("click", (event) => toggle(run, event.altKey || event.shiftKey));
    chip.addEventListener("pointerenter", () => light(run));
    chip.addEventListener("pointerleave", () => light(null));
    chips.push(chip);
    place.append(chip);
  });
}

function updateLegend() {
  chips.forEach((chip, run) => {
    chip.hidden = !state.matching.has(run);
    chip.setAttribute("aria-pressed", String(!state.hidden.has(run)));
    chip.classList.toggle("lit", state.lit === leaderOf(run));
    chip.firstChild.style.background = colorOf(run);
  });
  const shown = shownRuns().length;
  const count = document.getElementById("count");
  if (count) count.textContent = shown === RUNS.length ? `${shown} runs` : `${shown} of ${RUNS.length} runs`;
}

// Words of a filter must all be in a run's name and settings; `lr<0.01` compares numbers of settings and metrics.
function matcher(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, key, sign, value] = word.match(/^(.+?)(<=|>=|<|>|=)(.+)$/) ?? [];
    const number = Number(value);
    if (!key || (sign !== "=" && Number.isNaN(number))) return (run) => textOf(run).includes(word);
    return (run) => {
      const found = numberOf(run, key);
      if (sign === "=") return found === number || textOf(run).includes(word);
      return found !== null && { "<": found < number, ">": found > number, "<=": found <= number,
        ">=": found >= number }[sign];
    };
  });
  return (run) => tests.every((test) => test(run));
}
const texts = [];
function textOf(run) {
  const { name, params, state: kind } = RUNS[run];
  return (texts[run] ??= [name, kind, ...Object.entries(params).map(([key, value]) => `${key}=${value}`)].join("\n")
    .toLowerCase());
}
function numberOf(run, key) {
  const param = Object.entries(RUNS[run].params).find(([name]) => name.toLowerCase() === key);
  if (param) return Number.isNaN(Number(param[1])) ? null : Number(param[1]);
  const metric = DATA.metrics.findIndex((each) => each.name.toLowerCase() === key);
  const last = metric < 0 ? null : DATA.metrics[metric].curves[run]?.last?.[1];
  return typeof last === "number" ? last : null;
}

function applyFilter() {
  const matches = matcher(document.getElementById("filter")?.value ?? "");
  state.matching = new Set([...RUNS.keys()].filter(matches));
}

function applySearch() {
  const words = (document.getElementById("search")?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  for (const chart of charts) {
    const name = DATA.metrics[chart.metric].name.toLowerCase();
    chart.card.hidden = !words.every((word) => name.includes(word));
  }
  for (const card of mediaCards()) {
    const name = seriesOf(card).name.toLowerCase();
    card.hidden = !words.every((word) => name.includes(word));
  }
  for (const group of document.querySelectorAll("details.group")) {
    group.hidden = [...group.querySelectorAll(".card")].every((card) => card.hidden);
  }
}

// Listen to the controls that are on the page, each once: a served page gets more of them.
const heard = new WeakSet();
function listen(id, event, listener) {
  const control = document.getElementById(id);
  if (!control || heard.has(control)) return;
  heard.add(control);
  control.addEventListener(event, () => listener(control));
}

const barred = new ResizeObserver(([{ target }]) => { // what sticks below the bar
  document.body.style.setProperty("--bar", `${target.offsetHeight}px`);
});
function buildControls() {
  const bar = document.getElementById("bar");
  if (bar) barred.observe(bar);
  listen("filter", "input", () => { applyFilter(); changed("runs"); });
  listen("search", "input", applySearch);
  listen("reset", "click", () => setView(null));
  listen("all", "click", () => {
    const isNone = [...state.matching].every((run) => !state.hidden.has(run));
    state.hidden = new Set(isNone ? RUNS.keys() : []);
    changed("runs");
  });
  listen("axis", "change", (axis) => {
    state.axis = axis.value;
    state.view = null;
    state.hover = null;
    changed("axis");
  });
  buildGroups();
  listen("group", "change", (select) => {
    state.group = select.value;
    regroup();
    fillDots();
    setHover(null);
    changed("runs");
  });
  listen("log", "change", (log) => { state.log = log.checked; changed("scale"); });
  listen("smooth", "input", (smooth) => {
    state.smooth = smooth.value ** 2 / 1e4 * 0.3; // fine steps at the beginning
    const share = (state.smooth * 100).toPrecision(2);
    document.getElementById("smooth-value").textContent = state.smooth ? `${Number(share)} %` : "off";
    changed("scale");
  });
}

const tip = make("div", { className: "tip", hidden: true, role: "status" });
function setHover(hover) {
  if (hover && !hover.chart.drawn) return;
  state.hover = hover;
  if (!hover) {
    tip.hidden = true;
    light(null);
    redraw(true);
    return;
  }
  const found = hover.chart.nearest(hover.place, hover.y);
  light(found.length > 1 && found[0].distance < 30 ? found[0].run : null);
  fillTip(hover, found);
  redraw(true);
}

function fillTip(hover, found) {
  const most = 10;
  const rows = found.slice(0, most).map((each) => {
    const dot = make("i", { className: "dot" });
    dot.style.background = colorOf(each.run);
    const show = (value) => showMetric(hover.chart.metric, value);
    const { runs, label } = each.curve;
    const spread = runs && ` ± ${show((each.high - each.low) / 2)}, ${runs.length} run${runs.length > 1 ? "s" : ""}`;
    const band = spread ?? (each.hasBand ? ` (${show(each.low)} to ${show(each.high)})` : "");
    const values = [make("b", {}, show(each.mean)), make("span", { className: "soft" }, band)];
    return make("div", { className: each.run === state.lit ? "lit" : "" }, dot,
      make("span", { className: "name" }, label ?? (RUNS.length > 1 ? RUNS[each.run].name : "")), ...values);
  });
  const unit = { step: "step ", time: "" }[state.axis] ?? `${state.axis} `;
  const near = found.length ? found[0].x : hover.place;
  const notes = found.flatMap(({ run, curve }) => notesAt(hover, run, curve)).slice(0, 3);
  tip.replaceChildren(make("div", { className: "soft" }, `${unit}${showPlace(near)}`), ...rows,
    ...(found.length > most ? [make("div", { className: "soft" }, `and ${found.length - most} more`)] : []),
    ...notes.map((text) => make("div", { className: "note" }, text)));
  tip.hidden = !rows.length;
  const [x, y] = hover.client;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width < innerWidth ? x + 14 : Math.max(4, x - 14 - width);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
}

function notesAt(hover, run, curve) {
  if (curve.runs) return [];
  const x = hover.chart.drawn.toX(hover.place);
  const isNear = (step) => Math.abs(hover.chart.drawn.toX(placeOf(run, step)) - x) < 5;
  const name = RUNS.length > 1 ? `${RUNS[run].name}: ` : "";
  return [
    ...RUNS[run].marks.filter(([step]) => isNear(step)).map(([step, , text]) => `${name}${text} at step ${showValue(step)}`),
    ...curve.marks.filter(([step]) => isNear(step)).map(([step, text]) => `${name}${text} at step ${showValue(step)}`),
  ];
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const chart = charts.find((each) => each.canvas === target);
    if (chart) chart.isVisible = isIntersecting;
    if (isIntersecting) schedule();
  }
}, { rootMargin: "100px" });
const sized = new ResizeObserver(() => redraw());
function addChart(card) {
  const chart = new Chart(card);
  charts.push(chart);
  seen.observe(chart.canvas);
  sized.observe(chart.canvas);
  card.querySelector("button")?.addEventListener("click", () => card.classList.toggle("whole"));
  addExports(chart);
}
// On paper all charts are in sight, as wide as the paper and in light colours, and what is folded is open.
const unfolded = [];
function beginPrint() {
  for (const each of document.querySelectorAll("main details:not([open])")) {
    each.open = true;
    unfolded.push(each);
  }
  printed(true);
  for (const chart of charts) if (!chart.card.hidden) chart.draw();
}
function printed(is) {
  document.documentElement.classList.toggle("printed", is);
  readTheme();
  redrawSpreads();
  for (const chart of charts) chart.isStale = true;
}
function endPrint() {
  for (const each of unfolded.splice(0)) each.open = false;
  printed(false);
  redraw();
}
function fillDots() {
  for (const dot of document.querySelectorAll(".dot[data-run]")) dot.style.background = colorOf(Number(dot.dataset.run));
  for (const spark of document.querySelectorAll(".spark[data-run]")) spark.style.stroke = colorOf(Number(spark.dataset.run));
}

// What a reader chose is part of the page's address, so that a link shows the same.
const CONTROLS = ["filter", "search", "axis", "group", "log", "smooth", "against"];
function linkOf() {
  const kept = new URLSearchParams();
  for (const id of CONTROLS) {
    const control = document.getElementById(id);
    const value = control?.type === "checkbox" ? (control.checked ? "1" : "") : control?.value ?? "";
    if (value && value !== control.dataset.first) kept.set(id, value);
  }
  if (state.view) kept.set("view", state.view.map((each) => Number(each.toPrecision(12))).join(","));
  for (const run of [...state.hidden].slice(0, MOST_HIDDEN)) kept.append("hide", RUNS[run].name);
  if (kept.size && RUNS.length > 1) for (const name of namesByColor()) kept.append("color", name);
  return kept.size ? `#${kept}` : "";
}
const MOST_HIDDEN = 200;
const MOST_COLORS = 24; // of a link: more are hard to tell from each other
function namesByColor() {
  const runs = [...RUNS.keys()].sort((one, other) => (hues[one] ?? one) - (hues[other] ?? other));
  return runs.slice(0, MOST_COLORS).map((run) => RUNS[run].name);
}
// The runs of a link keep its colours, though others came before them; the rest take those that are left.
function takeColors(names) {
  const known = names.map((name) => RUNS.findIndex((run) => run.name === name));
  const left = [...RUNS.keys()].filter((hue) => !(known[hue] >= 0));
  RUNS.forEach((_, run) => { hues[run] = known.includes(run) ? known.indexOf(run) : left.shift(); });
}
function keepLink() {
  const link = linkOf();
  if (link !== location.hash) history.replaceState(null, "", link || location.pathname + location.search);
}
// A served page gets controls later: their first value is no reader's choice.
function watchControls() {
  for (const id of CONTROLS) {
    const control = document.getElementById(id);
    if (!control || "first" in control.dataset) continue;
    control.dataset.first = control.type === "checkbox" ? "" : control.value;
    control.addEventListener("input", keepLink);
  }
}
function openLink() {
  watchControls();
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const id of CONTROLS) {
    const control = document.getElementById(id);
    if (!control || !kept.has(id)) continue;
    if (control.type === "checkbox") control.checked = kept.get(id) === "1"; else control.value = kept.get(id);
    control.dispatchEvent(new Event(control.tagName === "SELECT" || control.type === "checkbox" ? "change" : "input"));
  }
  const hidden = new Set(kept.getAll("hide"));
  RUNS.forEach(({ name }, run) => { if (hidden.has(name)) state.hidden.add(run); });
  if (kept.has("color")) { takeColors(kept.getAll("color")); fillDots(); }
  const view = (kept.get("view") ?? "").split(",").map(Number);
  if (view.length === 2 && view.every(Number.isFinite) && view[0] < view[1]) setView(view);
}

function start() {
  document.querySelectorAll(".card[data-metric]").forEach(addChart);
  fillDots();
  document.body.append(tip);
  readTheme();
  buildLegend();
  buildControls();
  addMedia();
  onChange((what) => {
    if (what === "runs" || what === "lit") updateLegend();
    if (what === "runs") updateSteps();
    if (what === "runs" || what === "lit") renderMedia();
    if (what === "runs") state.view = state.view && currentView();
    document.getElementById("reset")?.toggleAttribute("disabled", !state.view);
    redraw(what === "lit");
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    redraw();
    redrawSpreads();
  });
  addEventListener("pointerdown", ({ target }) => { if (state.hover && target.tagName !== "CANVAS") setHover(null); });
  addEventListener("scroll", () => { if (state.hover) setHover(null); }, { passive: true });
  addEventListener("beforeprint", beginPrint);
  addEventListener("afterprint", endPrint);
  openLink();
  onChange((what) => { if (what !== "lit") keepLink(); });
  changed("runs");
}
