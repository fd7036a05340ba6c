"use strict";
// The charts: each function takes rows and gives a figure.

// style.css has these colours for light and dark pages. Parts that touch are separated by lines in the colour of the page.
const C = Object.fromEntries(["blue", "vermillion", "green", "purple", "orange", "sky", "yellow", "grey"].map((name) => [name, `var(--${name})`]));
const SERIES = [C.blue, C.vermillion, C.green, C.purple, C.orange, C.sky];
const DASHES = ["none", "7 3", "2 3", "9 3 2 3"];
const STAGES = { GERMINATED: C.yellow, TRAINING: C.orange, BLENDING: C.sky, HOLDING: C.purple, FOSSILIZED: C.blue };
const OPERATIONS = { germinate: C.green, set_alpha_target: C.sky, fossilize: C.blue, advance: C.purple, prune: C.vermillion, wait: C.grey };
// Both networks of a host look the same in every chart: the one that is kept is drawn first, so that the dashes show where they are equal.
const NETWORKS = [["committed", "committed_acc", "kept network", C.blue, "none"], ["live", "val_acc", "with all seeds", C.vermillion, "3 3"]]
  .map(([ofRound, ofStep, name, color, dash]) => ({ ofRound, ofStep, name, color, dash }));
const MARGIN = { marginLeft: 46, marginRight: 14, marginTop: 14, marginBottom: 34 };

const style = (index) => ({ color: SERIES[index % SERIES.length], dash: DASHES[Math.floor(index / SERIES.length) % DASHES.length] });
const plot = (width, options) => Plot.plot({ width, height: 230, ...MARGIN, style: { background: "transparent", fontSize: "11px" }, ...options });

/** The value on the x axis of a drawn chart below the pointer. */
const valueAt = (svg, event) => svg.scale("x").invert(((event.clientX - svg.getBoundingClientRect().left) * svg.viewBox.baseVal.width) / svg.clientWidth);

/** Calls `choose([from, to])` when the mouse is dragged over a chart in `place`, and `choose(null)` after a double click. */
function onInterval(place, choose) {
  let from = null, box;
  const chartOf = (event) => event.target.closest(".chart");
  place.addEventListener("pointerdown", (event) => {
    const chart = chartOf(event);
    if (!chart || event.button || event.pointerType === "touch") return;
    from = { chart, x: event.clientX, value: valueAt(chart.querySelector("svg"), event) };
    chart.append(box = el("i", { class: "interval" }));
  }, true);  // before Plot, which stops the event over a value
  place.addEventListener("pointermove", (event) => {
    if (!from) return;
    const left = from.chart.getBoundingClientRect().left;
    Object.assign(box.style, { left: `${Math.min(from.x, event.clientX) - left}px`, width: `${Math.abs(event.clientX - from.x)}px` });
  });
  const end = (event) => {
    if (!from) return;
    const { chart, x, value } = from;
    from = null;
    box.remove();
    if (event.type === "pointerup" && Math.abs(event.clientX - x) > 5) choose(d3.sort([value, valueAt(chart.querySelector("svg"), event)]));
  };
  ["pointerup", "pointerleave", "pointercancel"].forEach((name) => place.addEventListener(name, end));
  place.addEventListener("dblclick", (event) => { if (chartOf(event)) choose(null); });
}

/** Ticks at whole numbers only. */
const wholeTicks = (low, high, width) => d3.ticks(low, high, Math.max(2, width / 70)).filter(Number.isInteger);

/** Lines over x, with a band where rows have low and high. Series are [{name, color, dash, rows: [{x, y, low, high}]}]. */
function lines({ title, note, series, xLabel = "round", limits = [], domain, digits = 2, marginLeft = MARGIN.marginLeft, height = 230, legend, xDomain, log = false, band = "quartiles of the hosts" }) {
  const shown = series.filter((one) => one.rows.some((row) => row.y !== null && row.y !== undefined));
  if (!shown.length) return null;
  const all = shown.flatMap((one) => one.rows.map((row) => ({ ...row, name: one.name, color: one.color })));
  const known = all.filter((row) => row.y !== null && row.y !== undefined);
  const banded = known.filter((row) => row.low != null), tall = d3.extent([...known.map((row) => row.y), ...banded.flatMap((row) => [row.low, row.high])]);
  const room = tall[1] - tall[0] || Math.abs(tall[1]) || 1;
  const [near, far] = [true, false].map((is) => limits.filter(({ value }) => (value >= tall[0] - room && value <= tall[1] + room) === is));  // a far one would make the curve flat
  const [low, high] = xDomain ?? d3.extent(all, (row) => row.x), whole = all.every((row) => Number.isInteger(row.x)) && high - low < 1e6;
  const draw = (width) => plot(width, {
    height, marginLeft,
    insetLeft: 6, insetRight: 6,
    x: { label: xLabel, tickFormat: high > 1e4 ? "~s" : whole ? (x) => String(x) : undefined, ticks: whole ? wholeTicks(low, high, width) : 5, domain: low === high ? [low - 0.5, high + 0.5] : [low, high] },
    y: { label: null, grid: true, domain, nice: !domain, ticks: 5, type: log && known.every((row) => row.y > 0) ? "log" : "linear", tickFormat: shown.some((one) => one.rows.some((row) => Math.abs(row.y) > 1e4)) ? "~s" : undefined },
    marks: [
      ...shown.filter((one) => one.rows.some((row) => row.low != null)).map((one) => Plot.areaY(one.rows, { x: "x", y1: "low", y2: "high", fill: one.color, fillOpacity: 0.18 })),
      ...near.map((limit) => Plot.ruleY([limit.value], { stroke: C.vermillion, strokeDasharray: "4 3" })),
      ...shown.map((one) => Plot.lineY(one.rows, { x: "x", y: "y", stroke: one.color, strokeWidth: 2, strokeDasharray: one.dash })),
      ...shown.filter((one) => one.rows.length <= 12).map((one) => Plot.dot(one.rows, { x: "x", y: "y", fill: one.color, r: 3 })),
      Plot.tip(known, Plot.pointer({ x: "x", y: "y", title: (row) => `${row.name}\n${xLabel} ${count(row.x)}: ${number(row.y, digits)}${row.low != null ? `\n${band}: ${number(row.low, digits)} to ${number(row.high, digits)}` : ""}` })),
    ],
  });
  const rows = all.map(({ name, x, y, low, high }) => ({ series: name, [xLabel]: x, value: y, ...(banded.length ? { low, high } : {}) }));
  const listed = (some) => some.map((limit) => limit.label).join(", ");
  const outside = banded.some((row) => row.y < row.low || row.y > row.high);
  const notes = [note, near.length && `Dashed: ${listed(near)}.`, far.length && `Beyond the chart: ${listed(far)}.`, outside && "A few hosts move the mean out of the band."];
  return figure({ title, note: notes.filter(Boolean).join(" "), rows, draw, key: legend ?? keys([...(shown.length > 1 ? shown : []), ...(banded.length ? [{ name: `line: mean, band: ${band}`, color: shown.length > 1 ? "currentColor" : shown[0].color, band: true }] : [])]) });
}

/** Rows of {x, part, value} stacked on each x, positive parts up and negative ones down. */
function stacked(rows, width) {
  const up = new Map(), down = new Map();
  return rows.map((row) => {
    const heap = row.value >= 0 ? up : down, from = heap.get(row.x) ?? 0;
    heap.set(row.x, from + row.value);
    return { ...row, x1: row.x - width / 2, x2: row.x + width / 2, y1: from, y2: from + row.value };
  });
}

/** Stacked bars over a number; `colors` give the order of the parts. */
function bars({ title, note, rows, colors, xLabel, unit = "", percent = false, line, top, key = true, xDomain, marginLeft = MARGIN.marginLeft }) {
  if (!rows.length) return null;
  const order = Object.keys(colors);
  const xs = d3.sort(new Set(rows.map((row) => row.x)));
  const step = xs.length > 1 ? d3.min(d3.pairs(xs), ([a, b]) => b - a) : 1;
  const boxes = stacked(d3.sort(rows, (row) => order.indexOf(row.part)), step * 0.92);
  const draw = (width) => plot(width, {
    marginLeft,
    x: { label: xLabel, ticks: wholeTicks(xs[0], xs.at(-1), width), tickFormat: xs.at(-1) > 1e4 ? "~s" : String, domain: xDomain ?? [xs[0] - step / 2, xs.at(-1) + step / 2] },
    y: { label: null, grid: true, ticks: 5, percent, tickFormat: percent ? (value) => `${value} %` : undefined, nice: true, domain: top && [0, 100 * top] },
    color: { domain: order, range: order.map((name) => colors[name]) },
    marks: [
      Plot.rect(boxes, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: "part", insetTop: 0.5, insetBottom: 0.5 }),
      Plot.ruleY([0]),
      ...(line ? [["var(--paper)", 5], ["currentColor", 2]].map(([stroke, strokeWidth]) => Plot.lineY(line, { x: "x", y: "y", stroke, strokeWidth })) : []),
      Plot.tip(boxes, Plot.pointer({ x: "x", y: "y2", title: (row) => `${words(row.part)}\n${xLabel} ${count(row.x)}: ${percent ? number(100 * row.value, 1) + " %" : number(row.value, 4) + unit}` })),
    ],
  });
  const used = order.filter((name) => rows.some((row) => row.part === name));
  const legend = keys([...used.map((name) => ({ name: words(name), color: colors[name], fill: true })), ...(line ? [{ name: "sum", color: "currentColor" }] : [])]);
  return figure({ title, note, key: key ? legend : null, draw, rows: rows.map(({ x, part, value }) => ({ [xLabel]: x, part, value })) });
}

/** Stacked horizontal bars by a named situation: rows of {name, part, value}. */
function shares({ title, note, rows, colors, names, top }) {
  if (!rows.length) return null;
  const order = Object.keys(colors);
  const draw = (width) => plot(width, {
    height: 44 + 26 * names.length, marginLeft: 112, marginRight: 24,
    x: { label: null, percent: true, tickFormat: (value) => `${value} %`, ticks: 4, domain: [0, 100 * top] }, y: { label: null, domain: names },
    color: { domain: order, range: order.map((name) => colors[name]) },
    marks: [
      Plot.barX(rows, Plot.stackX({ x: "value", y: "name", fill: "part", order, inset: 1 })),
      Plot.ruleX([0]),
      Plot.tip(rows, Plot.pointer(Plot.stackX({ x: "value", y: "name", z: "part", order, title: (row) => `${row.name}\n${words(row.part)}: ${number(100 * row.value, 1)} % of ${count(row.of)} decisions` }))),
    ],
  });
  return figure({ title, note, draw, rows: rows.map(({ name, part, value }) => ({ situation: name, operation: part, share: value })) });
}

/** Horizontal bars with intervals in the order of `names`: rows of {name, value, half}. */
function ranked({ title, note, rows, names, percent = false }) {
  const text = (value) => (percent ? `${number(100 * value, 1)} %` : number(value, 4));
  const draw = (width) => plot(width, {
    height: 44 + 18 * names.length, marginLeft: 152, marginRight: 24,
    x: { label: null, grid: true, percent, ticks: Math.max(2, (width - 152) / 70), tickFormat: percent ? (value) => `${value} %` : undefined, domain: d3.max(rows, (row) => row.value) > 0 ? undefined : [0, 1] },
    y: { label: null, domain: names, tickSize: 0 },
    marks: [
      Plot.barX(rows, { x: "value", y: "name", fill: C.blue, fillOpacity: 0.35, stroke: C.blue, insetTop: 2.5, insetBottom: 2.5 }),
      Plot.ruleY(rows.filter((row) => row.half !== null), { y: "name", x1: (row) => Math.max(0, row.value - row.half), x2: (row) => row.value + row.half, stroke: "currentColor", strokeWidth: 1.5 }),
      Plot.ruleX([0]),
      Plot.tip(rows, Plot.pointer({ x: "value", y: "name", title: (row) => `${row.name}\n${text(row.value)}${row.half === null ? "" : ` ± ${text(row.half)}`}` })),
    ],
  });
  return figure({ title, note, draw, rows });
}

/** A table of numbers as shades, with the numbers: rows of {x, y, value (share), times}. The darkest lets them be read. */
const SHADE = 0.4;
function heat({ title, note, rows, xs, ys }) {
  if (!rows.length) return null;
  const top = d3.max(rows, (row) => row.value);
  const draw = (width) => plot(width, {
    height: 60 + 22 * ys.length, marginLeft: 112, marginTop: 26, marginBottom: 6,
    x: { label: null, domain: xs, axis: "top" }, y: { label: null, domain: ys },
    marks: [
      Plot.cell(rows, { x: "x", y: "y", fill: C.blue, fillOpacity: (row) => (SHADE * row.value) / top, stroke: "currentColor", strokeOpacity: 0.2, inset: 1 }),
      Plot.text(rows, { x: "x", y: "y", text: (row) => `${Math.round(100 * row.value)} %`, fill: "currentColor" }),
      Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: (row) => `${row.y} in ${row.x}\n${number(100 * row.value, 1)} %, ${row.times} seeds` })),
    ],
  });
  return figure({ title, note, draw, rows });
}

/** Points with intervals in both directions and their names. */
function frontier({ title, note, rows, x, xLabel, y, log }) {
  const shown = rows.filter((row) => row[x] !== null && row[x] !== undefined && row[y] !== null)
    .map((row) => ({ ...row, x: row[x], y: row[y], dx: row[`${x}_half`] ?? 0, dy: row[`${y}_half`] ?? 0, color: KINDS[row.kind][1] }));
  if (!shown.length) return null;
  const left = (row) => Math.max(row.x - row.dx, log ? d3.min(shown, (r) => r.x) * 0.9 : -Infinity);
  const picture = (width, labels) => plot(width, {
    height: 320, inset: 10,
    x: { label: xLabel, type: log ? "log" : "linear", grid: true, ticks: Math.max(2, width / 90), tickFormat: "~s" },
    y: { label: null, grid: true },
    marks: [
      Plot.ruleX(shown, { x: "x", y1: (row) => row.y - row.dy, y2: (row) => row.y + row.dy, stroke: "color" }),
      Plot.ruleY(shown, { y: "y", x1: left, x2: (row) => row.x + row.dx, stroke: "color" }),
      Plot.dot(shown, { x: "x", y: "y", fill: "color", r: 5, stroke: "var(--paper)" }),
      ...labels.map(({ row, text, dx, dy, anchor }) => Plot.text([row], { x: "x", y: "y", text: () => text, dx, dy, textAnchor: anchor, fill: "currentColor", stroke: "var(--paper)", strokeWidth: 4 })),
      Plot.tip(shown, Plot.pointer({ x: "x", y: "y", title: (row) => `${row.label}\naccuracy ${plusMinus(row.y, row.dy)}\n${xLabel} ${plusMinus(row.x, row.dx)}` })),
    ],
  });
  const draw = (width) => picture(width, labelPlaces(picture(width, []), shown, width));
  const key = keys(Object.values(KINDS).map(([name, color]) => ({ name, color, fill: true })));
  return figure({ title, note, key, draw, rows: shown.map((row) => ({ controller: row.label, [xLabel]: row.x, accuracy: row.y })) });
}
const KINDS = { trained: ["trained controller", C.vermillion], constant: ["constant schedule", C.blue], other: ["other baseline", C.grey] };

/** Where the labels of points do not cover each other: above the point, else higher or lower; those without room are shortened. */
function labelPlaces(drawn, rows, width) {
  const [sx, sy] = [drawn.scale("x"), drawn.scale("y")], taken = [];
  return d3.sort(rows, (row) => -row.y).map((row) => {
    const x = sx.apply(row.x), y = sy.apply(row.y), most = Math.floor((Math.max(x, width - x) - 16) / 6.2);
    const text = row.label.length > most ? `${row.label.slice(0, most - 1)}…` : row.label, length = text.length * 6.2;
    const anchor = x + length > width - 16 ? "end" : "start", from = anchor === "end" ? x - length - 8 : x + 8;
    const free = (dy) => taken.every((t) => from + length < t.from || from > t.to || Math.abs(y + dy - t.y) > 12);
    const dy = [-9, 11, -22, 24, 37, -35].find(free) ?? -9;
    taken.push({ from, to: from + length, y: y + dy });
    return { row, text, dx: anchor === "end" ? -8 : 8, dy, anchor };
  });
}

/** The slots of a host as lanes: colour is the stage, filled height is alpha. */
function lanes({ host, slots, length }) {
  const lane = 0.84, bottom = (slot) => slots.indexOf(slot) + lane;
  const stretches = host.segments.map((s) => ({ ...s, x1: s.t - 0.5, x2: s.t + s.alpha.length - 0.5, y1: slots.indexOf(s.slot), y2: bottom(s.slot) }));
  const fills = host.segments.flatMap((s) => s.alpha.map((alpha, i) => ({ stage: s.stage, alpha, t: s.t + i, slot: s.slot, blueprint: s.blueprint, x1: s.t + i - 0.5, x2: s.t + i + 0.5, y1: bottom(s.slot) - lane * (alpha ?? 0), y2: bottom(s.slot) })));
  const ends = host.seeds.flatMap((seed) => [["fossilized", seed.fossilized_t], ["pruned", seed.pruned_t]].filter(([, t]) => t != null).map(([what, t]) => ({ what, t, y: bottom(seed.slot) - lane / 2, blueprint: seed.blueprint })));
  const draw = (width) => {
    const room = (width - 60 - 14) / length;
    const named = host.seeds.filter((seed) => {
      const next = d3.min(host.seeds.filter((o) => o.slot === seed.slot && o.germinated_t > seed.germinated_t), (o) => o.germinated_t) ?? length + 1;
      return (next - seed.germinated_t) * room > seed.blueprint.length * 5.5;
    });
    return plot(width, {
      height: 44 + 46 * slots.length, marginLeft: 60, marginTop: 4,
      x: { label: "step of the episode", domain: [0.5, length + 0.5], ticks: wholeTicks(1, length, width) },
      y: { domain: [slots.length, 0], axis: null },
      marks: [
        Plot.rect(slots, { x1: 0.5, x2: length + 0.5, y1: (_, i) => i, y2: (_, i) => i + lane, fill: "currentColor", fillOpacity: 0.05 }),
        Plot.rect(stretches, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: (s) => STAGES[s.stage] ?? C.grey, fillOpacity: 0.3, stroke: (s) => STAGES[s.stage] ?? C.grey, strokeWidth: 1.5, inset: 0.75 }),
        Plot.rect(fills.filter((f) => f.alpha > 0), { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: (f) => STAGES[f.stage] ?? C.grey, shapeRendering: "crispEdges" }),
        Plot.ruleX(stretches, { x: "x1", y1: "y1", y2: "y2", stroke: "var(--paper)", strokeWidth: 2 }),
        Plot.text(slots, { frameAnchor: "left", dx: -54, y: (_, i) => i + lane / 2, text: (name) => name, textAnchor: "start", fill: "currentColor" }),
        Plot.dot(ends, { x: "t", y: "y", symbol: (e) => (e.what === "pruned" ? "times" : "diamond"), r: 6, stroke: (e) => (e.what === "pruned" ? "currentColor" : "white"), strokeWidth: (e) => (e.what === "pruned" ? 3 : 1.2), fill: (e) => (e.what === "pruned" ? "none" : "black") }),
        Plot.text(named, { x: (s) => s.germinated_t - 0.3, y: (s) => slots.indexOf(s.slot), dy: 8, text: "blueprint", textAnchor: "start", fill: "currentColor", stroke: "var(--paper)", strokeWidth: 3 }),
        Plot.tip(fills, Plot.pointer({ x: "t", y: (f) => (f.y2 - lane / 2), title: (f) => `${f.slot} ${f.blueprint}\nstep ${f.t}: ${words(f.stage)}, alpha ${number(f.alpha)}` })),
      ],
    });
  };
  const key = keys([...Object.entries(STAGES).map(([name, color]) => ({ name: words(name), color, fill: true })), { name: "◆ fossilized  ✕ pruned", color: "none" }]);
  return figure({ title: "Seeds by slot", note: "Colour: stage. Filled height: alpha, the weight of the seed's output.", key, draw, rows: host.seeds });
}

/** From the accuracy of the host alone to that of the network with all its seeds. */
function waterfall({ parts, blueprints }) {
  const sorted = d3.sort(parts.parts, (p) => (p.members.length > 1 ? 1 : 0), (p) => -Math.abs(p.value)), kept = sorted.slice(0, 12);
  const rest = parts.rest + d3.sum(sorted.slice(12), (p) => p.value);
  const name = (members) => (members.length > 1 ? members.join(" × ") : `${members[0]} ${blueprints.get(members[0]) ?? ""}`);
  let at = parts.base;
  const rows = [{ name: parts.base_members.length ? "host and fossils" : "host alone", from: 0, to: at, value: at, kind: "level" }];
  for (const part of [...kept.map((p) => ({ name: name(p.members), value: p.value })), ...(Math.abs(rest) > 0.005 ? [{ name: parts.method === "subsets" ? "larger groups" : "interaction", value: rest }] : [])]) {
    rows.push({ name: part.name, from: at, to: at + part.value, value: part.value, kind: part.value < 0 ? "down" : "up" });
    at += part.value;
  }
  rows.push({ name: "with all seeds", from: 0, to: parts.total, value: parts.total, kind: "level" });
  const colors = { level: C.grey, up: C.blue, down: C.vermillion };
  const draw = (width) => plot(width, {
    height: 40 + 24 * rows.length, marginLeft: 122, marginRight: 50,
    x: { label: "accuracy, points", grid: true }, y: { label: null, domain: rows.map((row) => row.name) },
    marks: [
      Plot.barX(rows, { x1: "from", x2: "to", y: "name", fill: (row) => colors[row.kind], inset: 2 }),
      Plot.text(rows, { x: (row) => Math.max(row.from, row.to), y: "name", text: (row) => (row.kind === "level" ? number(row.value) : signed(row.value)), dx: 5, textAnchor: "start", fill: "currentColor" }),
      Plot.ruleX([0]),
    ],
  });
  const note = parts.method === "subsets" ? "Each seed alone, then what pairs add together beyond that (a × b)." : "What is lost without each seed; the interaction is the rest.";
  return figure({ title: "Where the accuracy comes from", note, draw, rows: rows.map((row) => ({ part: row.name, points: row.value })) });
}
