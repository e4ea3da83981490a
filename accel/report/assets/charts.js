// SPDX-License-Identifier: Apache-2.0
// A chart of one metric: a band of least and most with a line inside for each run, marks, a zoom that all charts share.

const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
const MOST_BANDS = 6; // runs that show their band and their marks; more would cover each other
const theme = {};
function readTheme() {
  const style = getComputedStyle(document.body);
  for (const name of ["text", "soft", "line", "bad", "card"]) {
    const probe = make("span", { style: `color: var(--${name})` });
    document.body.append(probe);
    theme[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  theme.font = `11px ${style.fontFamily || "sans-serif"}`;
}

class Chart {
  constructor(card) {
    this.card = card;
    this.canvas = card.querySelector("canvas");
    this.isVisible = false;
    this.isDirty = true;
    this.isStale = true; // whether more than the pointer and the lit run differ from the picture below
    this.below = make("canvas");
    this.drag = null;
    this.listen();
  }

  get metric() {
    return Number(this.card.dataset.metric);
  }

  get runs() {
    return Object.keys(DATA.metrics[this.metric].curves).map(Number);
  }

  get plot() {
    const { width, height } = this.size;
    return { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  }

  // Shown runs of this chart, the lit one last, so that it lies on top.
  lines() {
    const [from, to] = currentView();
    const pixels = Math.max(20, this.plot.right - this.plot.left);
    const found = [];
    const shown = shownCurves(this.metric, this.runs);
    for (const { run, curve, xs } of shown) {
      if (!xs.length && !curve.marks.length) continue;
      found.push({ run, curve, part: partOf(curve, xs, from, to, pixels / (shown.length <= MOST_BANDS ? 3 : 6)) });
    }
    return found.sort((one, other) => (one.run === state.lit) - (other.run === state.lit));
  }

  domain(lines) {
    const hasBands = lines.length <= MOST_BANDS;
    let [low, high, least] = [Infinity, -Infinity, Infinity];
    for (const { part } of lines) {
      const [lows, highs] = hasBands ? [part.low, part.high] : [part.mean, part.mean];
      for (let at = 0; at < lows.length; at += 1) {
        if (lows[at] < low) low = lows[at];
        if (highs[at] > high) high = highs[at];
        if (lows[at] > 0 && lows[at] < least) least = lows[at];
        if (part.mean[at] > 0 && part.mean[at] < least) least = part.mean[at];
      }
    }
    if (low > high) return { low: 0, high: 1, isLog: false };
    const isLog = state.log && high > 0 && least < Infinity;
    if (isLog) [low, high] = [Math.log10(least), Math.log10(high)];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return { low: low - room, high: high + room, isLog };
  }

  draw() {
    this.isDirty = false;
    const box = this.canvas.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    this.size = { width: box.width, height: box.height };
    if (!box.width) return;
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const isKept = !this.isStale && this.isCrowded && this.below.width === width && this.below.height === height;
    if (!isKept) {
      Object.assign(this.below, { width, height });
      this.drawBelow(this.below.getContext("2d"), ratio);
      this.isStale = false;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.drawImage(this.below, 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (this.isCrowded) this.drawLit(pen);
    this.drawHover(pen, this.drawn.toX);
  }

  get isCrowded() {
    return this.drawn?.lines.length > MOST_BANDS;
  }

  // What stays while the pointer moves: with many runs all lines alike, since drawing them takes longer than a frame.
  drawBelow(pen, ratio) {
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.size.width, this.size.height);
    const lines = this.lines();
    const [from, to] = currentView();
    const domain = this.domain(lines);
    const plot = this.plot;
    const toX = (value) => plot.left + ((value - from) / (to - from)) * (plot.right - plot.left);
    const up = (plot.bottom - plot.top) / (domain.high - domain.low);
    const floor = domain.isLog ? 10 ** domain.low : 0;
    const toY = (value) => plot.bottom - ((domain.isLog ? Math.log10(Math.max(value, floor)) : value) - domain.low) * up;
    this.drawn = { lines, toX, toY, from, to };
    this.drawAxes(pen, domain, toX);
    this.clipped(pen, () => this.drawLines(pen, lines, this.isCrowded ? null : state.lit));
    if (!this.isCrowded && !grouping.groups) this.drawMarks(pen, lines, toX); // whole ones at both ends, too
  }

  clipped(pen, paint) {
    const plot = this.plot;
    pen.save();
    pen.beginPath();
    pen.rect(plot.left, plot.top - 2, plot.right - plot.left, plot.bottom - plot.top + 4);
    pen.clip();
    paint();
    pen.restore();
  }

  // The lit run of many: the others pale below it.
  drawLit(pen) {
    const { lines, from, to } = this.drawn;
    const found = lines.find(({ run }) => run === state.lit);
    if (!found) return;
    const { left, right } = this.plot;
    const part = partOf(found.curve, placesOf(found.curve), from, to, Math.max(20, right - left) / 3);
    this.clipped(pen, () => {
      pen.globalAlpha = 0.75;
      pen.fillStyle = theme.card;
      pen.fillRect(0, 0, this.size.width, this.size.height);
      this.drawLines(pen, [{ ...found, part }], state.lit);
    });
  }

  drawAxes(pen, domain, toX) {
    const plot = this.plot;
    const [from, to] = currentView();
    pen.font = theme.font;
    pen.lineWidth = 1;
    pen.strokeStyle = theme.line;
    pen.fillStyle = theme.soft;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const find = domain.isLog ? logTicks : ticks;
    const up = (plot.bottom - plot.top) / (domain.high - domain.low);
    for (const tick of find(domain.low, domain.high, Math.max(2, (plot.bottom - plot.top) / 42))) {
      const y = Math.round(plot.bottom - (tick - domain.low) * up) + 0.5;
      pen.beginPath();
      pen.moveTo(plot.left, y);
      pen.lineTo(plot.right, y);
      pen.stroke();
      const value = domain.isLog ? Number((10 ** tick).toPrecision(6)) : tick;
      pen.fillText(showMetric(this.metric, value), plot.left - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(from, to, Math.max(2, (plot.right - plot.left) / 80), state.axis === "time")) {
      const x = toX(tick);
      const text = state.axis === "time" ? showSeconds(tick) : showValue(tick);
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(x, half), this.size.width - half - 1), plot.bottom + 7);
    }
    pen.beginPath();
    pen.moveTo(plot.left, plot.bottom + 0.5);
    pen.lineTo(plot.right, plot.bottom + 0.5);
    pen.stroke();
  }

  drawLines(pen, lines, lit) {
    const { toX, toY } = this.drawn;
    const { isCrowded } = this;
    for (const { run, curve, part } of lines) {
      const isLit = run === lit;
      const isDim = lit !== null && !isLit;
      pen.strokeStyle = pen.fillStyle = colorOf(run);
      const hasBand = curve.low !== curve.mean || Array.isArray(part.x);
      if (hasBand && (!isCrowded || isLit) && !isDim) {
        pen.globalAlpha = 0.22;
        pen.beginPath();
        for (let at = 0; at < part.x.length; at += 1) pen.lineTo(toX(part.x[at]), toY(part.high[at]));
        for (let at = part.x.length - 1; at >= 0; at -= 1) pen.lineTo(toX(part.x[at]), toY(part.low[at]));
        pen.fill();
      }
      if (!hasBand && state.smooth && !isDim) { // the values themselves behind their smooth mean
        pen.globalAlpha = isCrowded && !isLit ? 0.15 : 0.35;
        pen.lineWidth = 1;
        pen.beginPath();
        for (let at = 0; at < part.x.length; at += 1) pen.lineTo(toX(part.x[at]), toY(part.low[at]));
        pen.stroke();
      }
      pen.globalAlpha = isDim ? 0.15 : isCrowded && !isLit ? 0.65 : 1;
      pen.lineWidth = isLit ? 2.4 : isCrowded ? 1 : 1.6;
      pen.lineJoin = isCrowded && !isLit ? "bevel" : "round"; // round joins of many lines take most of a frame
      pen.beginPath();
      for (let at = 0; at < part.x.length; at += 1) pen.lineTo(toX(part.x[at]), toY(part.mean[at]));
      pen.stroke();
      if (part.x.length < 3) {
        for (let at = 0; at < part.x.length; at += 1) {
          pen.beginPath();
          pen.arc(toX(part.x[at]), toY(part.mean[at]), 3, 0, 7);
          pen.fill();
        }
      }
    }
    pen.globalAlpha = 1;
  }

  drawMarks(pen, lines, toX) {
    const { left, right, top, bottom } = this.plot;
    const isOutside = (x) => !(x > left - 1 && x < right + 1);
    for (const { run, curve } of lines) {
      pen.fillStyle = pen.strokeStyle = colorOf(run);
      for (const [step, kind] of RUNS[run].marks) {
        const x = toX(placeOf(run, step));
        if (isOutside(x)) continue;
        pen.beginPath();
        if (kind === "checkpoint") {
          pen.moveTo(x - 4, bottom + 1);
          pen.lineTo(x + 4, bottom + 1);
          pen.lineTo(x, bottom - 5);
          pen.fill();
        } else {
          pen.lineWidth = 1.2;
          pen.setLineDash([4, 3]);
          pen.moveTo(x, top);
          pen.lineTo(x, bottom);
          pen.stroke();
          pen.setLineDash([]);
        }
      }
      pen.strokeStyle = theme.bad;
      pen.lineWidth = 2;
      let before = -Infinity;
      for (const [step] of curve.marks) {
        const x = toX(placeOf(run, step));
        if (isOutside(x) || x - before < 10) continue; // crosses that run into each other say no more
        before = x;
        pen.beginPath();
        pen.moveTo(x - 4, top + 1);
        pen.lineTo(x + 4, top + 9);
        pen.moveTo(x + 4, top + 1);
        pen.lineTo(x - 4, top + 9);
        pen.stroke();
      }
    }
  }

  drawHover(pen, toX) {
    const { left, right, top, bottom } = this.plot;
    if (this.drag?.isZoom && this.drag.now !== undefined) {
      pen.fillStyle = theme.text;
      pen.globalAlpha = 0.12;
      pen.fillRect(this.drag.start, top, this.drag.now - this.drag.start, bottom - top);
      pen.globalAlpha = 1;
    } else if (state.hover) {
      const x = Math.round(toX(state.hover.place)) + 0.5;
      if (x < left || x > right) return;
      pen.strokeStyle = theme.soft;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
      pen.stroke();
    }
  }

  placeAt(x) {
    const { left, right } = this.plot;
    const [from, to] = currentView();
    return from + ((x - left) / (right - left)) * (to - from);
  }

  // The point of each run that is nearest to a place, the nearest to the pointer's height first.
  nearest(place, y) {
    const found = [];
    for (const { run, curve, part } of this.drawn.lines) {
      if (!part.x.length) continue;
      let at = lowerBound(part.x, place);
      if (at === part.x.length || (at > 0 && place - part.x[at - 1] < part.x[at] - place)) at -= 1;
      const gap = Math.abs(this.drawn.toX(part.x[at]) - this.drawn.toX(place));
      if (gap > 40 && part.x.length > 2) continue;
      const hasBand = part.low[at] !== part.high[at];
      found.push({ run, curve, x: part.x[at], mean: part.mean[at], low: part.low[at], high: part.high[at], hasBand,
        distance: Math.abs(this.drawn.toY(part.mean[at]) - y) });
    }
    return found.sort((one, other) => one.distance - other.distance);
  }

  listen() {
    const canvas = this.canvas;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      if (event.pointerType === "touch") this.move(x, y, event);
      if (event.pointerType === "touch" || event.button !== 0 || !this.drawn) return;
      const isPan = event.shiftKey || y > this.plot.bottom;
      this.drag = { start: x, isZoom: !isPan, view: currentView() };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.move(...at(event), event));
    canvas.addEventListener("pointerup", (event) => this.release(at(event)[0]));
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", (event) => {
      if (!this.drag && event.pointerType !== "touch") setHover(null); // a finger leaves at once
    });
    canvas.addEventListener("dblclick", () => setView(null));
    canvas.addEventListener("wheel", (event) => this.wheel(event, at(event)[0]), { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const [from, to] = currentView();
      const part = (to - from) / 5;
      const moves = { ArrowLeft: [-part, -part], ArrowRight: [part, part], "+": [part, -part], "=": [part, -part],
        "-": [-part, part] };
      if (event.key === "0" || event.key === "Escape") setView(null);
      else if (moves[event.key]) setView([from + moves[event.key][0], to + moves[event.key][1]]);
      else return;
      event.preventDefault();
    });
  }

  move(x, y, event) {
    if (!this.drawn) return;
    if (this.drag?.isZoom) {
      this.drag.now = Math.min(Math.max(x, this.plot.left), this.plot.right);
      this.invalidate();
    } else if (this.drag) {
      const [from, to] = this.drag.view;
      const moved = ((this.drag.start - x) / (this.plot.right - this.plot.left)) * (to - from);
      setView([from + moved, to + moved]);
    } else {
      setHover({ chart: this, place: this.placeAt(x), y, client: [event.clientX, event.clientY] });
    }
  }

  release(x) {
    const drag = this.drag;
    this.drag = null;
    if (drag?.isZoom && Math.abs(x - drag.start) > 4) {
      const ends = [this.placeAt(drag.start), this.placeAt(Math.min(Math.max(x, this.plot.left), this.plot.right))];
      setView(ends.sort((one, other) => one - other));
    }
    this.invalidate();
  }

  wheel(event, x) {
    if (!this.drawn) return;
    const [from, to] = currentView();
    if (event.ctrlKey || event.metaKey) {
      const factor = Math.exp(Math.max(-50, Math.min(50, event.deltaY)) / 100);
      const middle = this.placeAt(x);
      setView([middle - (middle - from) * factor, middle + (to - middle) * factor]);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const moved = (event.deltaX / (this.plot.right - this.plot.left)) * (to - from);
      setView([from + moved, to + moved]);
    } else {
      return;
    }
    event.preventDefault();
  }

  invalidate() {
    this.isDirty = true;
    schedule();
  }
}

const charts = [];
let frame = 0;
const frames = []; // milliseconds that the newest frames took
function schedule() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const began = performance.now();
    for (const chart of charts) if (chart.isVisible && chart.isDirty) chart.draw();
    frames.push(performance.now() - began);
    if (frames.length > 1000) frames.shift();
  });
}
// Draw all charts again; `isLight` if nothing but the pointer and the lit run changed.
function redraw(isLight = false) {
  for (const chart of charts) {
    chart.isDirty = true;
    chart.isStale ||= !isLight;
  }
  schedule();
}
function setView(view) {
  if (view) {
    const [from, to] = fullRange();
    const length = Math.min(view[1] - view[0], to - from);
    if (length < (to - from) * 1e-6) return;
    const start = Math.min(Math.max(view[0], from), to - length);
    view = length >= to - from ? null : [start, start + length];
  }
  state.view = view;
  changed("view");
}
