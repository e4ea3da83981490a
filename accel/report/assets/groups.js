// SPDX-License-Identifier: Apache-2.0
// Runs grouped by a setting: in charts a line of each group's mean with a band of its spread, in the table a row.

const BUT_SEEDS = "*"; // every setting that differs, but the seeds
const MOST_PLACES = 1000; // of a mean over curves with different places
const isSeed = (name) => /(^|[._\- ])seed$/i.test(name);
// Settings that differ and say more than the run's name, as a folder that ends with it does not.
const tellingSettings = () => DATA.differing.filter((name) => !RUNS.every((run) => run.params[name]?.endsWith?.(run.name)));
const grouping = { groups: null, leaders: [], means: new Map() };

// The first run of a run's group; the group has its number and colour.
const leaderOf = (run) => grouping.leaders[run] ?? run;

function regroup() {
  grouping.means.clear();
  grouping.groups = null;
  grouping.leaders = [];
  if (!state.group) return;
  const names = state.group === BUT_SEEDS ? tellingSettings().filter((name) => !isSeed(name)) : [state.group];
  const found = new Map();
  RUNS.forEach(({ params }, run) => {
    const label = names.map((name) => `${name}=${params[name] ?? "–"}`).join(", ") || "all runs";
    if (!found.has(label)) found.set(label, { label, run, runs: [] });
    found.get(label).runs.push(run);
    grouping.leaders[run] = found.get(label).run;
  });
  grouping.groups = [...found.values()];
}

// Groups of all runs, or each run as a group of one.
const groupsOfRuns = () => grouping.groups ?? RUNS.map(({ name }, run) => ({ label: name, run, runs: [run] }));

// Mean and sample deviation of numbers; those that are none are left out.
function spreadOf(values) {
  const known = values.filter((each) => typeof each === "number" && Number.isFinite(each));
  const mean = known.reduce((sum, each) => sum + each, 0) / known.length;
  const squares = known.reduce((sum, each) => sum + (each - mean) ** 2, 0);
  return { mean: known.length ? mean : null, deviation: known.length > 1 ? Math.sqrt(squares / (known.length - 1)) : 0,
    count: known.length };
}

// The curves of a chart's shown runs with their places; of a group the mean of its shown runs.
function shownCurves(metric, runs, axis = state.axis) {
  const shown = new Set(runs.filter(isShown));
  const single = (run) => ({ run, curve: curveOf(metric, run), xs: placesOf(curveOf(metric, run), axis) });
  if (!grouping.groups) return [...shown].map(single);
  return grouping.groups.flatMap(({ label, run, runs: members }) => {
    const parts = members.filter((each) => shown.has(each)).map(single).filter(({ xs }) => xs.length);
    if (!parts.length) return [];
    const key = [metric, axis, ...parts.map((each) => each.run)].join(" ");
    if (!grouping.means.has(key)) grouping.means.set(key, meanCurve(label, run, parts));
    const curve = grouping.means.get(key);
    return [{ run, curve, xs: curve.xs }];
  });
}

// Places at which a mean is taken: the places of all curves if they are few, else evenly spaced ones.
function placesOfMean(parts) {
  if (parts.every(({ xs }) => xs === parts[0].xs)) return parts[0].xs;
  const count = parts.reduce((sum, { xs }) => sum + xs.length, 0);
  if (count <= 4 * MOST_PLACES) return Float64Array.from(new Set(parts.flatMap(({ xs }) => [...xs]))).sort();
  const from = Math.min(...parts.map(({ xs }) => xs[0]));
  const to = Math.max(...parts.map(({ xs }) => xs[xs.length - 1]));
  return Float64Array.from({ length: MOST_PLACES }, (_, at) => from + (at * (to - from)) / (MOST_PLACES - 1));
}

// The mean of curves, and a deviation to each side of it. Each curve counts from its first place to its last.
function meanCurve(label, run, parts) {
  const xs = placesOfMean(parts);
  const [mean, low, high] = [0, 1, 2].map(() => new Float64Array(xs.length));
  const counts = new Uint16Array(xs.length);
  const next = parts.map(() => 0);
  for (let at = 0; at < xs.length; at += 1) {
    const values = parts.map(({ curve, xs: own }, each) => {
      while (next[each] < own.length - 1 && own[next[each]] < xs[at]) next[each] += 1;
      const [end, place] = [next[each], xs[at]];
      if (place < own[0] || place > own[own.length - 1]) return null;
      if (own[end] === place || end === 0) return curve.mean[end];
      const part = (place - own[end - 1]) / (own[end] - own[end - 1]);
      return curve.mean[end - 1] + part * (curve.mean[end] - curve.mean[end - 1]);
    });
    const { mean: middle, deviation, count } = spreadOf(values);
    mean[at] = middle ?? NaN;
    low[at] = mean[at] - deviation;
    high[at] = mean[at] + deviation;
    counts[at] = count;
  }
  return { label, run, runs: parts.map((each) => each.run), xs, mean, low, high, counts, marks: [], smooth: new Map() };
}

// The choice among settings that differ; a served page may get more of them.
function buildGroups() {
  const select = document.getElementById("group");
  if (!select) return;
  const names = tellingSettings();
  const some = names.some(isSeed) ? [[BUT_SEEDS, "all but the seed"]] : [];
  const options = [["", "none"], ...some, ...names.map((name) => [name, name])];
  const known = new Set([...select.options].map(({ value }) => value));
  for (const [value, text] of options) if (!known.has(value)) select.append(make("option", { value }, text));
  select.parentElement.hidden = options.length < 2;
}
