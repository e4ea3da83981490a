// SPDX-License-Identifier: Apache-2.0
// Media by step: one slider for all of them, a card for each name, and in it a panel for each run that is shown.

const MOST_PANELS = 6; // next to each other
const SMALLEST = 96; // pixels of an image's longer side on the page; smaller ones are enlarged by a whole number
const LARGEST = 300; // of an image's longer side in a card that is not widened
// The step that a reader chose, null for the newest; contents by key, and where more come from on a served page.
const shelf = {
  step: null, steps: [], contents: null, fetch: null, failed: false, frame: 0, visible: new WeakSet(), panels: new WeakMap(),
};

const mediaCards = () => [...document.querySelectorAll(".card.medium")];
const seriesOf = (card) => DATA.media[Number(card.dataset.media)];
const runsOf = (series) => Object.keys(series.runs).map(Number).filter(isShown);

function contentOf(key) {
  if (!shelf.contents) {
    const stored = document.getElementById("contents");
    shelf.contents = new Map(Object.entries(stored ? JSON.parse(stored.textContent) : {}));
  }
  return shelf.contents.get(key);
}

// The newest of a run's records at a step or before it.
function recordAt(records, step) {
  let [low, high] = [0, records.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (records[middle][0] <= step) low = middle + 1; else high = middle;
  }
  return low ? records[low - 1] : null;
}

function updateSteps() {
  const found = new Set();
  for (const series of DATA.media) {
    for (const run of runsOf(series)) for (const [step] of series.runs[run]) found.add(step);
  }
  shelf.steps = [...found].sort((one, other) => one - other);
  const input = document.getElementById("media-at");
  if (input) input.max = Math.max(0, shelf.steps.length - 1);
}
const placeOfStep = () => {
  const last = shelf.steps.length - 1;
  return shelf.step === null ? last : Math.min(last, Math.max(0, lowerBound(shelf.steps, shelf.step + 1) - 1));
};
function setStep(at) {
  shelf.step = at >= shelf.steps.length - 1 ? null : shelf.steps[Math.max(0, at)];
  renderMedia();
}

function renderMedia() {
  shelf.frame ||= requestAnimationFrame(() => {
    shelf.frame = 0;
    const input = document.getElementById("media-at");
    if (!input) return;
    const at = placeOfStep();
    const step = shelf.steps[at];
    input.value = at;
    const text = step === undefined ? "no run with media is shown" : `step ${step}`;
    input.setAttribute("aria-valuetext", text);
    const last = shelf.steps.length - 1;
    const count = at < 0 ? "" : at === last ? ", the newest" : `, ${at + 1} of ${last + 1}`;
    document.getElementById("media-step").replaceChildren(text, make("span", { className: "soft" }, count));
    input.disabled = last < 1;
    document.getElementById("media-before").disabled = at <= 0;
    document.getElementById("media-after").disabled = at >= last;
    const lacking = new Set();
    for (const card of mediaCards()) if (shelf.visible.has(card)) renderCard(card, step, lacking);
    if (lacking.size && !shelf.failed) shelf.fetch?.([...lacking]);
  });
}

function renderCard(card, step, lacking) {
  const series = seriesOf(card);
  const all = runsOf(series);
  const place = card.querySelector(".panels");
  const known = shelf.panels.get(place) ?? new Map();
  shelf.panels.set(place, known);
  card.classList.toggle("several", Object.keys(series.runs).length > 1);
  const shown = all.slice(0, MOST_PANELS);
  for (const run of shown) if (!known.has(run)) known.set(run, new Panel(run));
  const panels = shown.map((run) => known.get(run).element);
  if (all.length > MOST_PANELS) {
    const text = `${MOST_PANELS} of ${all.length} runs: hide some, or filter, to see others`;
    panels.push(make("p", { className: "key more" }, text));
  }
  const isAlike = panels.length === place.children.length && panels.every((each, at) => each === place.children[at]);
  if (!isAlike) place.replaceChildren(...panels);
  const range = series.kind === "histogram" ? rangeOf(series, shown) : null;
  for (const run of shown) known.get(run).show(series, step, lacking, range);
}

// Steps and values that the histograms of these runs share, as far as their contents are known.
function rangeOf(series, runs) {
  const range = { from: Infinity, to: -Infinity, low: Infinity, high: -Infinity };
  for (const [step, [key]] of runs.flatMap((run) => series.runs[run])) {
    const found = contentOf(key);
    if (!found?.counts.some(Boolean)) continue;
    range.from = Math.min(range.from, step);
    range.to = Math.max(range.to, step);
    range.low = Math.min(range.low, found.low);
    range.high = Math.max(range.high, found.high);
  }
  if (range.low === range.high) { range.low -= 0.5; range.high += 0.5; }
  return range;
}

class Panel {
  constructor(run) {
    this.run = run;
    this.name = make("span", { className: "name" });
    this.step = make("span", { className: "soft" });
    const dot = make("i", { className: "dot" });
    dot.style.background = colorOf(run);
    this.content = make("div", { className: "content" });
    const head = make("figcaption", {}, dot, this.name, this.step);
    this.element = make("figure", { className: "panel" }, head, this.content);
    this.element.addEventListener("pointerenter", () => { if (RUNS.length > 1) light(run); });
    this.element.addEventListener("pointerleave", () => light(null));
  }

  show(series, step, lacking, range) {
    this.name.textContent = RUNS[this.run].name;
    this.element.classList.toggle("only", RUNS.length === 1);
    this.element.classList.toggle("lit", RUNS.length > 1 && state.lit === this.run);
    const records = series.runs[this.run];
    const record = step === undefined ? null : recordAt(records, step);
    this.step.textContent = !record ? `first at step ${records[0][0]}` : record[0] === step ? "" : `step ${record[0]}`;
    const isHistogram = series.kind === "histogram";
    const keys = isHistogram ? records.flatMap(([, each]) => each) : record?.[1] ?? [];
    const absent = keys.filter((key) => contentOf(key) === undefined);
    for (const key of absent) lacking.add(key);
    const isWaiting = absent.length > 0 && !shelf.failed;
    this.content.classList.toggle("waits", isWaiting);
    if (isWaiting) return; // what was before stays until these come
    const gone = keys.some((key) => contentOf(key) === null);
    const shown = `${keys} ${absent.length} ${isHistogram ? `${step} ${Object.values(range)}` : ""}`;
    if (shown === this.shown) return;
    this.shown = shown;
    if (absent.length) this.content.replaceChildren(make("p", { className: "soft" }, "not connected"));
    else if (gone) this.content.replaceChildren(make("p", { className: "soft" }, "no longer served"));
    else if (!keys.length) this.content.replaceChildren();
    else if (isHistogram) this.drawHistogram(records, step, range);
    else this.content.replaceChildren(...this.built(series, record));
  }

  built(series, [step, keys]) {
    const contents = keys.map(contentOf);
    if (series.kind === "text") return [textBox(contents[0])];
    if (series.kind === "table") return [tableBox(contents[0])];
    const images = contents.map(([data, width, height], at) => {
      const number = keys.length > 1 ? `, ${at + 1} of ${keys.length}` : "";
      const alt = `${series.name} at step ${step}${number}`;
      const image = make("img", { src: `data:image/png;base64,${data}`, alt, width, height, decoding: "async" });
      const side = Math.max(width, height);
      const scale = Math.max(1, Math.round(SMALLEST / side));
      image.classList.toggle("pixels", scale > 1);
      image.style.setProperty("--own", `${width * scale}px`);
      image.style.setProperty("--wide", `${width * (scale > 1 ? 2 * scale : 1)}px`);
      image.style.setProperty("--most", `${Math.round(Math.min(1, LARGEST / side) * width * scale)}px`);
      return image;
    });
    return [make("div", { className: `shots ${keys.length > 1 ? "" : "alone"}` }, ...images)];
  }

  // All steps as columns, counts of intervals as shades; the chosen step's own below.
  drawHistogram(records, step, range) {
    const found = records.map(([at, [key]]) => ({ step: at, ...contentOf(key) }));
    const now = contentOf(recordAt(records, step)?.[1][0]);
    const bad = now?.nonfinite ? `, ${showValue(now.nonfinite)} not finite` : "";
    const ends = now?.counts.some(Boolean) ? `${showValue(now.low)} to ${showValue(now.high)}` : "no finite values";
    const note = now ? `${ends}${bad}` : "none by this step";
    const canvas = make("canvas", { role: "img", className: "spread", "aria-label": `Histograms over steps; ${note}` });
    this.content.replaceChildren(canvas, make("p", { className: "key" }, note));
    drawSpread(canvas, found.filter(({ counts }) => counts.some(Boolean)), step, range, colorOf(this.run));
  }
}

function drawSpread(canvas, found, step, { from, to, low, high }, color) {
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !found.length) return;
  const ratio = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const plot = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const toY = (value) => plot.bottom - ((value - low) / (high - low)) * (plot.bottom - plot.top);
  const across = (plot.right - plot.left) / (to - from || 1);
  const toX = (value) => (from === to ? (plot.left + plot.right) / 2 : plot.left + (value - from) * across);
  pen.font = theme.font;
  pen.fillStyle = theme.soft;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of ticks(low, high, 4)) pen.fillText(showValue(tick), plot.left - 6, toY(tick));
  pen.textBaseline = "top";
  for (const tick of ticks(from, to, Math.max(2, (plot.right - plot.left) / 80))) {
    pen.textAlign = tick === to ? "right" : "center";
    pen.fillText(showValue(tick), toX(tick), plot.bottom + 7);
  }
  pen.fillStyle = color;
  const snap = (value) => Math.round(value * ratio) / ratio; // parts that share a pixel would leave stripes
  found.forEach((each, at) => {
    const place = toX(each.step);
    const before = found.length === 1 ? plot.left : at ? toX(found[at - 1].step) : 2 * place - toX(found[at + 1].step);
    const after = found.length === 1 ? plot.right : at + 1 < found.length ? toX(found[at + 1].step) : 2 * place - before;
    const start = Math.max(plot.left, (before + place) / 2);
    const end = Math.min(plot.right, (place + after) / 2);
    const most = Math.log1p(each.counts.reduce((one, other) => Math.max(one, other)));
    const wide = (each.high - each.low) / each.counts.length;
    const [left, right] = [snap(start), snap(end)];
    each.counts.forEach((count, bin) => {
      if (!count) return;
      const top = snap(toY(each.low + wide * (bin + 1)));
      pen.globalAlpha = 0.08 + 0.92 * (Math.log1p(count) / most);
      pen.fillRect(left, top, Math.max(right - left, 1 / ratio), Math.max(1, snap(toY(each.low + wide * bin)) - top));
    });
  });
  pen.globalAlpha = 1;
  if (step === undefined || step < from) return;
  pen.strokeStyle = theme.text;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(toX(Math.min(step, to)), plot.top);
  pen.lineTo(toX(Math.min(step, to)), plot.bottom);
  pen.stroke();
}

function textBox({ text, more }) {
  const box = make("pre", { tabIndex: 0 }, text);
  if (more) box.append(make("span", { className: "soft" }, `\n[${more}]`));
  return box;
}

function tableBox({ columns, rows, numbers, more }) {
  const right = new Set(numbers);
  const cell = (tag) => (text, at) => make(tag, { className: right.has(at) ? "number" : "" }, text);
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...columns.map(cell("th")))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td"))))));
  const box = make("div", { className: "wide", tabIndex: 0 }, table);
  return more ? make("div", {}, box, make("p", { className: "key" }, more)) : box;
}

const seenMedia = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) shelf.visible[isIntersecting ? "add" : "delete"](target);
  renderMedia();
}, { rootMargin: "300px" });
function redrawSpreads() {
  for (const card of mediaCards()) {
    if (seriesOf(card).kind !== "histogram") continue;
    for (const panel of shelf.panels.get(card.querySelector(".panels"))?.values() ?? []) panel.shown = null;
  }
  renderMedia();
}
const widths = new WeakMap();
const sizedMedia = new ResizeObserver((entries) => {
  const isOther = entries.filter(({ target }) => widths.get(target) !== target.clientWidth);
  for (const { target } of entries) widths.set(target, target.clientWidth);
  if (isOther.length) redrawSpreads();
});
const heardCards = new WeakSet();
function addMedia() {
  for (const card of mediaCards()) {
    if (heardCards.has(card)) continue;
    heardCards.add(card);
    seenMedia.observe(card);
    sizedMedia.observe(card);
    card.querySelector("button").addEventListener("click", () => card.classList.toggle("whole"));
  }
  listen("media-at", "input", (input) => setStep(Number(input.value)));
  listen("media-before", "click", () => setStep(placeOfStep() - 1));
  listen("media-after", "click", () => setStep(placeOfStep() + 1));
  updateSteps();
  renderMedia();
}
