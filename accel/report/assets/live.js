// SPDX-License-Identifier: Apache-2.0
// A served page: asks its server for a newer one, and changes what differs. What a reader chose, opened, zoomed and
// scrolled to stays, since elements stay.

const POLL_MS = 2000;
const place = document.querySelector("main");
const notice = make("p", { id: "live", role: "status", hidden: true });
const live = { version: place.dataset.version, heard: new Date(), asks: false };
// filled by the script, or by the reader
const OWN = new Set(["legend", "count", "group", "smooth-value", "rows", "columns", "against", "parallel", "media-at", "media-step"]);
const cards = new Map();

const titleOf = (card) => `card ${card.dataset.kind ?? ""} ${card.querySelector("h3").textContent}`;
function keyOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return node.nodeName;
  if (node.id) return `#${node.id}`;
  if (node.classList.contains("card")) return titleOf(node);
  if (node.localName === "details") return `details ${node.querySelector("summary").firstChild.textContent}`;
  return node.localName === "option" ? `option ${node.value}` : node.localName;
}

// Make an element like a fresh one, with as few changes as that takes.
function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (OWN.has(old.id) || old.localName === "canvas" || old.className === "panels") return;
  for (const { name, value } of fresh.attributes) {
    const isOwn = name === "open" || name === "disabled" || (name === "class" && old.classList.contains("card"));
    if (!isOwn && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (!fresh.hasAttribute("class")) old.removeAttribute("class");
  const pool = new Map();
  for (const child of old.childNodes) pool.set(keyOf(child), [...(pool.get(keyOf(child)) ?? []), child]);
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = keyOf(child);
    const found = pool.get(key)?.shift() ?? cards.get(key);
    cards.delete(key);
    if (found) morph(found, child);
    if (found && found === at) at = at.nextSibling;
    else old.insertBefore(found ?? child, at);
  }
  for (const child of [...pool.values()].flat()) if (child.parentNode === old) child.remove();
}

// Numbers of those in `fresh` by their names in the page's order, new ones last; null if one of the page is gone.
function orderOf(known, fresh) {
  const rest = new Map(fresh.map(({ name }, at) => [name, at]));
  const order = [];
  for (const { name } of known) {
    if (!rest.has(name)) return null;
    order.push(rest.get(name));
    rest.delete(name);
  }
  return [...order, ...rest.values()];
}
const renumbered = (byRun, places) => Object.fromEntries(Object.entries(byRun).map(([run, each]) => [places[run], each]));

// Give a page's runs and charts the numbers that they have here: a server that started anew may have another order.
// Returns false where one is gone or has another name; then the page begins anew.
function arrange(fresh, made) {
  if (place.dataset.kind === "empty") return true;
  const { data } = fresh;
  const runs = orderOf(RUNS, data.runs);
  const metrics = orderOf(DATA.metrics, data.metrics);
  if (!runs || !metrics) return false;
  const placesOfRuns = runs.map((_, at) => runs.indexOf(at));
  const placesOfMetrics = metrics.map((_, at) => metrics.indexOf(at));
  data.runs = runs.map((at) => data.runs[at]);
  data.metrics = metrics.map((at) => data.metrics[at]);
  for (const each of data.metrics) each.curves = renumbered(each.curves, placesOfRuns);
  for (const each of data.media) each.runs = renumbered(each.runs, placesOfRuns);
  data.matter = data.matter.map((at) => placesOfMetrics[at]);
  for (const { dataset } of made.querySelectorAll("[data-run]")) dataset.run = placesOfRuns[dataset.run];
  for (const { dataset } of made.querySelectorAll("[data-metric]")) dataset.metric = placesOfMetrics[dataset.metric];
  return true;
}

const columnNames = () => JSON.stringify([DATA.differing, DATA.metrics.map(({ name }) => name)]);
// What a reader who has scrolled sees first: it stays where it is while the page above it grows.
function firstInSight() {
  if (!scrollY) return null;
  const parts = [...place.querySelectorAll(".card, h2, summary")];
  return parts.find((each) => each.getClientRects().length && each.getBoundingClientRect().top >= 0) ?? null;
}

function take(fresh) {
  const made = document.createElement("main");
  made.innerHTML = fresh.main;
  made.dataset.kind = fresh.kind;
  if (!arrange(fresh, made)) return false;
  const columns = columnNames();
  const held = firstInSight();
  const top = held?.getBoundingClientRect().top;
  cards.clear();
  for (const { card } of charts) cards.set(titleOf(card), card);
  takeData(fresh.data);
  morph(place, made);
  document.title = fresh.title;
  const known = new Set(charts.map(({ card }) => card));
  for (const gone of charts.filter(({ card }) => !card.isConnected)) charts.splice(charts.indexOf(gone), 1);
  for (const card of document.querySelectorAll(".card[data-metric]")) if (!known.has(card)) addChart(card);
  fillDots();
  addMedia();
  forgetMedia();
  texts.length = 0;
  chips.forEach((chip, run) => { chip.title = `${RUNS[run].name}: ${RUNS[run].state}`; });
  buildLegend();
  buildControls();
  applySearch();
  applyFilter();
  if (!sweep) openSweep();
  else if (columns !== columnNames()) buildChooser();
  else buildParallel();
  watchControls();
  changed("runs");
  if (held?.isConnected) scrollBy(0, held.getBoundingClientRect().top - top);
  return true;
}

// A value with a change of the server's, which is none, another value, the middle of a text, or changes of parts by
// their keys.
function changedBy(old, change) {
  if (!change) return old;
  if ("v" in change) return change.v;
  if ("t" in change) return old.slice(0, change.a) + change.t + old.slice(old.length - change.z);
  const made = Array.isArray(old) ? old.slice(0, change.n) : { ...old };
  for (const [key, each] of Object.entries(change.k)) made[key] = changedBy(made[key], each);
  for (const key of change.x ?? []) delete made[key];
  return made;
}

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

async function ask() {
  if (live.asks || document.hidden) return;
  live.asks = true;
  try {
    const headers = { "If-None-Match": `"${live.version}"` };
    const base = live.raw ? `&base=${live.version}` : ""; // what is here: only changes of it are sent
    const answer = await fetch(`data${location.search}${base}`, { headers, cache: "no-store" });
    if (answer.status === 200) {
      const found = await answer.json();
      live.raw = "change" in found ? changedBy(live.raw, found.change) : found;
      const fresh = structuredClone(live.raw); // which is put into the page's order
      if (!take(fresh)) { location.reload(); return; }
      live.version = answer.headers.get("ETag").replaceAll('"', "");
    } else if (answer.status !== 304) {
      say(await answer.text());
      return;
    }
    live.heard = new Date();
    say("");
    if (shelf.failed) { shelf.failed = false; renderMedia(); }
  } catch {
    say(`Not connected since ${live.heard.toLocaleTimeString()}. The page goes on when its server is back.`);
  } finally {
    live.asks = false;
  }
}

// Contents of media are fetched once they come into sight.
const MOST_KEYS = 200; // of a request
const asked = new Set();
shelf.fetch = async (lacking) => {
  const keys = lacking.filter((key) => !asked.has(key)).slice(0, MOST_KEYS);
  if (!keys.length) return;
  for (const key of keys) asked.add(key);
  try {
    const answer = await fetch(`media${location.search}&keys=${keys.join(",")}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const found = await answer.json();
    for (const key of keys) shelf.contents.set(key, found[key] ?? null); // null: a newer page has it no more
  } catch {
    shelf.failed = true; // until the server answers again
  } finally {
    for (const key of keys) asked.delete(key);
  }
  renderMedia();
};
function forgetMedia() {
  const used = new Set(DATA.media.flatMap(({ runs }) => Object.values(runs).flat().flatMap(([, keys]) => keys)));
  for (const key of shelf.contents?.keys() ?? []) if (!used.has(key)) shelf.contents.delete(key);
}

document.body.append(notice);
document.documentElement.style.overflowAnchor = "none"; // `take` holds what is in sight, elements that move included
document.addEventListener("visibilitychange", ask);
setInterval(ask, POLL_MS);
