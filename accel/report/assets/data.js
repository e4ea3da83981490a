// SPDX-License-Identifier: Apache-2.0
// The page's data and what all parts share: runs, curves decoded at first use, numbers as text, ticks, colours.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
// Okabe and Ito's colours, some made lighter or darker to read on light and dark; later runs take hues that are far apart
const COLORS = ["#2185d0", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c00", "#9467bd"];
const hues = []; // number of each run's colour, where a link gives it another than the run's own
function colorOf(run) {
  const at = hues[leaderOf(run)] ?? leaderOf(run);
  return at < COLORS.length ? COLORS[at] : `hsl(${(at * 137.508) % 360} 62% 50%)`;
}

// What a reader has chosen. A run is shown unless it was clicked away or the filter leaves it out.
const state = {
  axis: "step", log: false, smooth: 0, view: null, hidden: new Set(), matching: new Set(RUNS.keys()), lit: null,
  hover: null, group: "",
};
const isShown = (run) => state.matching.has(run) && !state.hidden.has(run);
const shownRuns = () => RUNS.map((_, run) => run).filter(isShown);
const listeners = [];
const onChange = (listener) => listeners.push(listener);
const changed = (what) => { for (const listener of listeners) listener(what); };

function decode(text) {
  const raw = atob(text.slice(1));
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at += 1) bytes[at] = raw.charCodeAt(at);
  return text[0] === "d" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

// The data of a moment that followed, in the place of that before; what was made of that is forgotten.
function takeData(fresh) {
  const { runs, ...rest } = fresh;
  RUNS.splice(0, RUNS.length, ...runs);
  Object.assign(DATA, rest);
  for (const made of [decoded, curves, places]) made.clear();
  regroup();
}

const decoded = new Map();
function stepsOf(ident) {
  if (!decoded.has(ident)) decoded.set(ident, decode(DATA.steps[ident]));
  return decoded.get(ident);
}

const curves = new Map();
function curveOf(metric, run) {
  const key = `${metric} ${run}`;
  if (!curves.has(key)) {
    const found = DATA.metrics[metric].curves[run];
    const mean = found.y ? decode(found.y) : new Float64Array(0);
    const low = found.low ? decode(found.low) : mean;
    const high = found.high ? decode(found.high) : mean;
    curves.set(key, { x: found.x, run, mean, low, high, marks: found.marks ?? [], last: found.last, best: found.best,
      smooth: new Map() });
  }
  return curves.get(key);
}

// Index of the first value that is not below `value`.
function lowerBound(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// Steps as places on the x axis: themselves, or what the run had counted by then.
function axisKnots(run, axis) {
  const found = RUNS[run].axes[axis];
  return found ? [stepsOf(found[0]), (found[2] ??= decode(found[1]))] : null;
}
function placeOf(run, step, axis = state.axis) {
  if (axis === "step") return step;
  const knots = axisKnots(run, axis);
  if (!knots) return NaN;
  const [steps, values] = knots;
  const at = lowerBound(steps, step);
  if (at === 0) return values[0];
  if (at === steps.length) return values[at - 1];
  const part = (step - steps[at - 1]) / (steps[at] - steps[at - 1]);
  return values[at - 1] + part * (values[at] - values[at - 1]);
}
const places = new Map();
function placesOf(curve, axis = state.axis) {
  if (axis === "step") return curve.x === undefined ? new Float64Array(0) : stepsOf(curve.x);
  const key = `${axis} ${curve.run} ${curve.x}`;
  if (!places.has(key)) {
    const steps = curve.x === undefined ? [] : stepsOf(curve.x);
    places.set(key, axisKnots(curve.run, axis) ? Float64Array.from(steps, (step) => placeOf(curve.run, step, axis))
      : new Float64Array(0));
  }
  return places.get(key);
}

// A mean that forgets exponentially over a share of the whole axis, however many points a curve has.
function smoothed(curve, xs) {
  if (!state.smooth) return curve.mean;
  const key = `${state.axis} ${state.smooth}`;
  if (!curve.smooth.has(key)) {
    const length = state.smooth * (xs[xs.length - 1] - xs[0]) || 1;
    const made = new Float64Array(curve.mean.length);
    let sum = 0;
    let weight = 0;
    for (let at = 0; at < made.length; at += 1) {
      const kept = Math.exp(-(at ? xs[at] - xs[at - 1] : xs[1] - xs[0]) / length);
      sum = sum * kept + curve.mean[at] * (1 - kept);
      weight = weight * kept + (1 - kept);
      made[at] = weight > 0 ? sum / weight : curve.mean[at];
    }
    curve.smooth.clear();
    curve.smooth.set(key, made);
  }
  return curve.smooth.get(key);
}

// The part of a curve between two places: its points, or where they are dense one for each column of the chart. Columns
// are alike in width, so that no point stands in a pause of the wall-clock.
function partOf(curve, xs, from, to, columns) {
  const first = Math.max(0, lowerBound(xs, from) - 1);
  const end = Math.min(xs.length, lowerBound(xs, to) + 2);
  const line = smoothed(curve, xs);
  if (end - first <= 2 * columns) {
    const cut = (values) => values.subarray(first, end);
    return { x: cut(xs), mean: cut(line), low: cut(curve.low), high: cut(curve.high) };
  }
  const part = { x: [], mean: [], low: [], high: [] };
  const wide = (to - from) / columns;
  for (let start = first; start < end;) {
    const column = Math.floor((xs[start] - from) / wide);
    let [sum, low, high, stop] = [0, Infinity, -Infinity, start];
    do {
      sum += line[stop];
      if (curve.low[stop] < low) low = curve.low[stop];
      if (curve.high[stop] > high) high = curve.high[stop];
      stop += 1;
    } while (stop < end && Math.floor((xs[stop] - from) / wide) === column);
    part.x.push((xs[start] + xs[stop - 1]) / 2);
    part.mean.push(sum / (stop - start));
    part.low.push(low);
    part.high.push(high);
    start = stop;
  }
  return part;
}

// The whole range of the x axis, over all runs that are shown.
function fullRange() {
  let [from, to] = [Infinity, -Infinity];
  for (const run of shownRuns()) {
    const extent = RUNS[run].extent;
    if (!extent) continue;
    from = Math.min(from, placeOf(run, extent[0]) || 0);
    to = Math.max(to, placeOf(run, extent[1]) || 0);
  }
  return from > to ? [0, 1] : from === to ? [from - 0.5, to + 0.5] : [from, to];
}
const currentView = () => state.view ?? fullRange();

const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
function showValue(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf").replace("NaN", "nan");
  const size = Math.abs(value);
  if (size === 0 || (size < 1e4 && Number.isInteger(value))) return String(value);
  if (size < 1e-3 || size >= 1e15) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${trim(mantissa)}e${Number(exponent)}`;
  }
  if (size < 9999.5) return trim(value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(size)))));
  const [unit, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([each]) => size >= each * 0.9995);
  const scaled = value / unit;
  return trim(scaled.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(scaled) * 1.0005))))) + letter;
}
// Bytes have units of their own: a billion of them is 1 GB.
function showMetric(metric, value) {
  const text = showValue(value);
  if (!/_bytes(_per_s)?$/.test(DATA.metrics[metric].name)) return text;
  return /[kMBT]$/.test(text) ? `${text.slice(0, -1)} ${text.at(-1).replace("B", "G")}B` : text;
}
function showSeconds(value) {
  const seconds = Math.abs(value);
  if (seconds < 90) return `${trim(value.toFixed(seconds < 10 ? 1 : 0))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const [unit, length, inner, part] = minutes < 1440 ? ["h", 60, "min", 1] : ["d", 1440, "h", 60];
  const rest = Math.floor((minutes % length) / part);
  return `${Math.floor(minutes / length)} ${unit}${rest ? ` ${rest} ${inner}` : ""}`;
}
const showPlace = (value) => (state.axis === "time" ? showSeconds(value) : showValue(Math.round(value)));

const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  432000, 864000];
function ticks(from, to, count, isTime = false) {
  const rough = (to - from) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  if (isTime && rough >= 0.5) step = DURATIONS.find((each) => each >= rough) ?? step;
  const found = [];
  const first = Math.ceil(from / step - 1e-9);
  for (let at = first; at * step <= to + step * 1e-9 && found.length < 50; at += 1) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
}
// Powers of ten, with 2 and 5 between them where few fit; `from` and `to` are logarithms.
function logTicks(from, to, count) {
  const decades = Math.floor(to) - Math.ceil(from) + 1;
  const found = [];
  const stride = Math.max(1, Math.ceil(decades / count));
  const inner = decades >= 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(from); power <= to; power += 1) {
    if (power % stride) continue;
    for (const each of inner) {
      const at = power + Math.log10(each);
      if (at >= from && at <= to) found.push(at);
    }
  }
  return found.length > 1 ? found : ticks(10 ** from, 10 ** to, count).filter((each) => each > 0).map(Math.log10);
}

function make(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
}
