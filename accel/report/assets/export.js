// SPDX-License-Identifier: Apache-2.0
// A chart as a file: its picture as SVG, recorded from what it draws, and its values as CSV.

const escaped = (text) => String(text).replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
const short = (value) => Number(value.toFixed(2));

// What a chart asks of a canvas, as elements of SVG.
class SvgPen {
  constructor(measure) {
    this.measure = measure;
    this.parts = [];
    this.path = "";
    this.dash = [];
    Object.assign(this, { globalAlpha: 1, lineWidth: 1, strokeStyle: "", fillStyle: "", font: "", lineJoin: "round",
      textAlign: "start", textBaseline: "alphabetic" });
  }

  setTransform() {}
  clearRect() {}
  save() {}
  restore() { this.parts.push("</g>"); }
  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${short(x)} ${short(y)}`; }
  lineTo(x, y) { this.path += `${this.path ? "L" : "M"}${short(x)} ${short(y)}`; }
  rect(x, y, width, height) { this.box = [x, y, width, height].map(short); }
  arc(x, y, radius) { this.path += `M${short(x - radius)} ${short(y)}a${radius} ${radius} 0 1 0 ${2 * radius} 0a${radius} ${radius} 0 1 0 ${-2 * radius} 0`; }
  setLineDash(dash) { this.dash = dash; }
  measureText(text) { return this.measure(text); }

  clip() {
    const [x, y, width, height] = this.box;
    this.parts.push(`<clipPath id="plot"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath>`,
      '<g clip-path="url(#plot)">');
  }

  stroke() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash}"` : "";
    this.parts.push(`<path d="${this.path}" fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${
      this.lineWidth}" stroke-linejoin="${this.lineJoin}" opacity="${this.globalAlpha}"${dash}/>`);
  }

  fill() {
    this.parts.push(`<path d="${this.path}" fill="${escaped(this.fillStyle)}" opacity="${this.globalAlpha}"/>`);
  }

  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] ?? "start";
    const down = { middle: "middle", top: "hanging" }[this.textBaseline] ?? "auto";
    this.parts.push(`<text x="${short(x)}" y="${short(y)}" text-anchor="${anchor}" dominant-baseline="${down}" fill="${
      escaped(this.fillStyle)}">${escaped(text)}</text>`);
  }
}

function svgOf(chart) {
  chart.draw();
  const canvas = chart.canvas.getContext("2d");
  const pen = new SvgPen((text) => canvas.measureText(text));
  chart.drawBelow(pen, 1);
  const { width, height } = chart.size;
  const names = chart.drawn.lines.slice(0, 30).map(({ run, curve }, at) => `<text x="6" y="${height + 16 + 15 * at}" fill="${
    escaped(colorOf(run))}">${escaped(curve.label ?? RUNS[run].name)}</text>`);
  const whole = height + 24 + 15 * names.length;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${whole}" width="${width}" height="${whole}" ` +
    `font-family="sans-serif" font-size="11"><title>${escaped(DATA.metrics[chart.metric].name)}</title>` +
    `<rect width="100%" height="100%" fill="${escaped(theme.card)}"/>${pen.parts.join("")}${names.join("")}</svg>`;
}

// A name that a spreadsheet would take for a formula gets a quote in front.
const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
function csvOf(chart) {
  const lines = [grouping.groups ? "group,step,mean,mean - deviation,mean + deviation" : "run,step,mean,least,most"];
  for (const { run, curve, xs: steps } of shownCurves(chart.metric, chart.runs, "step")) {
    for (let at = 0; at < steps.length; at += 1) {
      lines.push([cell(curve.label ?? RUNS[run].name), steps[at], curve.mean[at], curve.low[at], curve.high[at]].join(","));
    }
  }
  return `${lines.join("\r\n")}\r\n`;
}

function offer(chart, ending, type, text) {
  const name = DATA.metrics[chart.metric].name.replace(/[^\w.-]+/g, "_");
  const href = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

function addExports(chart) {
  const button = (text, title, save) => {
    const made = make("button", { type: "button", title, className: "export" }, text);
    made.addEventListener("click", save);
    return made;
  };
  chart.card.querySelector("header")?.append(
    button("SVG", "Save this chart as SVG", () => offer(chart, "svg", "image/svg+xml", svgOf(chart))),
    button("CSV", "Save the values of this chart as CSV", () => offer(chart, "csv", "text/csv", csvOf(chart))));
}
