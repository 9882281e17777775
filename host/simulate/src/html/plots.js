// What pages of simulations are drawn with.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
byId("title").textContent = data.title;
document.title = data.title;
byId("table").textContent = data.table;
const colours = ["#2b6cb0", "#d9822b", "#38a169", "#805ad5", "#c53030", "#319795", "#b7791f", "#d53f8c", "#718096", "#276749", "#4c51bf", "#9c4221"];
const colourOf = (line, place) => line.colour ?? colours[place % colours.length];
const W = 560, H = 220, L = 58, R = 12, T = 10, B = 34;
const short = value => {
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  return String(+value.toPrecision(3));
};
const escaped = text => String(text).replace(/[&<>"]/g, sign => `&#${sign.charCodeAt(0)};`);
// Round numbers between two, about as many as asked for.
function ticks(low, high, about) {
  const rough = (high - low) / about, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(times => times * size).find(step => step >= rough * .999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(last - first + 1, 0) }, (_, place) => (first + place) * step);
}
// Powers of ten between two, with some of their multiples where there are few, and round numbers where there are next to none.
function logTicks(low, high) {
  const of = times => {
    const all = [];
    for (let size = 10 ** Math.floor(Math.log10(low)); size <= high; size *= 10)
      all.push(...times.map(by => by * size).filter(x => x >= low * .999 && x <= high * 1.001));
    return all;
  };
  const all = [[1, 2, 5], [1, 3], [1]].map(of).find(all => all.length <= 8) ?? [];
  return all.length < 3 ? ticks(low, high, 5) : all;
}
// A latency of a run in limits, drawn up to four of them. A run that answered not all requests is far above.
const inLimits = (run, latency, limits) => run.failed ? 4 : Math.min(run[latency] / limits[latency], 4);
// Lines of points [x, y] with their names, and their colours where it matters; `log` draws x by its logarithm, `most` is the end of y, `dots` marks the points.
function plot(id, lines, xName, { log = false, most = 0, dots = false } = {}) {
  const all = lines.flatMap(line => line.points);
  if (!all.length) { byId(id).textContent = "nothing to show"; return; }
  let top = most, low = Infinity, high = -Infinity;
  for (const p of all) { top = Math.max(top, p[1]); low = Math.min(low, p[0]); high = Math.max(high, p[0]); }
  if (log) low = Math.max(low, high / 1e5, 1e-3);
  if (high <= low) high = low + 1;
  const yTicks = ticks(0, top || 1, 5);
  top = Math.max(top || 1, yTicks[yTicks.length - 1]);
  const scale = x => log ? (Math.log(Math.max(x, low)) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (x - low) / (high - low);
  const X = x => L + scale(x) * (W - L - R), Y = y => H - B - y / top * (H - T - B);
  let out = "";
  for (const y of yTicks) {
    out += `<path class="grid-line" d="M${L},${Y(y).toFixed(1)}H${W - R}"/>`;
    out += `<text x="${L - 6}" y="${(Y(y) + 4).toFixed(1)}" text-anchor="end">${short(y)}</text>`;
  }
  for (const x of log ? logTicks(low, high) : ticks(low, high, 6)) {
    const at = X(x), anchor = at > W - R - 16 ? "end" : "middle";
    out += `<path class="axis" d="M${at.toFixed(1)},${H - B}v4"/>`;
    out += `<text x="${at.toFixed(1)}" y="${H - B + 16}" text-anchor="${anchor}">${short(x)}</text>`;
  }
  out += `<path class="axis" fill="none" d="M${L},${T}V${H - B}H${W - R}"/>`;
  out += `<text x="${(L + W - R) / 2}" y="${H - 3}" text-anchor="middle">${escaped(xName)}</text>`;
  lines.forEach((line, place) => {
    const d = line.points.map((p, i) => (i ? "L" : "M") + X(p[0]).toFixed(1) + "," + Y(p[1]).toFixed(1)).join("");
    // Lines that cover each other are all to be seen.
    const dash = place && lines.length > 1 ? ` stroke-dasharray="5 3"` : "";
    const colour = colourOf(line, place);
    out += `<path class="line" stroke="${colour}"${dash} d="${d}"/>`;
    if (dots) out += line.points.map(p => `<circle cx="${X(p[0]).toFixed(1)}" cy="${Y(p[1]).toFixed(1)}" r="2.5" fill="${colour}"/>`).join("");
  });
  const names = lines.map((line, place) => `<span style="color:${colourOf(line, place)}">${escaped(line.name)}</span>`);
  const legend = lines.length > 1 ? `<div class="note legend">${names.join(" ")}</div>` : "";
  byId(id).innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img">${out}</svg>${legend}`;
}
