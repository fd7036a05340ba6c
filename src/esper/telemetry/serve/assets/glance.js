"use strict";
// All hosts of a round as small pictures, and the step that the page looks at.

// The step that is shown, in all parts of the page at once. Parts call `watch` when they are drawn.
const scrub = { step: null, length: 0, watchers: [], waiting: false };

/** Calls `show(step)` now, and in the next frame whenever the step changes, until `element` has left the page. */
function watch(element, show) {
  scrub.watchers.push({ element, show, seen: false });
  show(scrub.step);
}

function setStep(step) {
  scrub.step = Math.max(1, Math.min(scrub.length, Math.round(step)));
  if (scrub.waiting) return;
  scrub.waiting = true;
  requestAnimationFrame(() => {
    scrub.waiting = false;
    scrub.watchers = scrub.watchers.filter((one) => (one.seen ||= one.element.isConnected) === one.element.isConnected);
    scrub.watchers.forEach((one) => one.show(scrub.step));
  });
}

/** The step of the address, else the last one; called before parts are drawn. */
function beginScrub(length, step) {
  scrub.length = length;
  scrub.step = Math.max(1, Math.min(length, scrub.step ?? step ?? length));
}

/** The control of the step. The arrow keys move it from anywhere on the page. */
function slider() {
  const range = el("input", { type: "range", min: 1, max: scrub.length, "aria-label": "Step of the episode", input: () => setStep(Number(range.value)) });
  const at = el("output", {});
  const move = (by, name, text) => el("button", { type: "button", "aria-label": name, click: () => setStep(scrub.step + by) }, text);
  const bar = el("div", { class: "scrub" }, move(-1, "step back", "◀"), range, move(1, "step on", "▶"), at);
  watch(bar, (step) => {
    range.value = step;
    at.textContent = `step ${step} of ${scrub.length}`;
  });
  return bar;
}

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || !scrub.length || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, .scroll, nav")) return;
  event.preventDefault();
  setStep(scrub.step + by * (event.shiftKey ? 10 : 1));
});

const ACCURACY_HEIGHT = 44, LANE = 10;

/** Accuracy above, slots below: colour is the stage, filled height is alpha. */
function miniature(host, { length, slots }, [low, high]) {
  const height = ACCURACY_HEIGHT + LANE * slots.length, bottom = (slot) => ACCURACY_HEIGHT + LANE * (slots.indexOf(slot) + 1) - 1;
  const y = (value) => 2 + (ACCURACY_HEIGHT - 5) * (1 - (value - low) / (high - low || 1));
  const curve = d3.line((row) => row[0], (row) => y(row[1])).defined((row) => row[1] !== null);
  const path = ({ ofStep, color, dash }) => svg("path", { d: curve(d3.zip(host.steps.t, host.steps[ofStep])) ?? "", fill: "none", stroke: color, "stroke-width": 1.6, "vector-effect": "non-scaling-stroke", "stroke-dasharray": dash });
  const seed = (s) => {
    const color = STAGES[s.stage] ?? C.grey, base = bottom(s.slot), x = s.t - 0.5;
    const weight = `M${x} ${base}` + s.alpha.map((alpha, i) => `V${base - (LANE - 2) * (alpha ?? 0)}H${x + i + 1}`).join("") + `V${base}Z`;
    return [svg("rect", { x, y: base - LANE + 2, width: s.alpha.length, height: LANE - 2, fill: color, "fill-opacity": 0.4, stroke: color, "vector-effect": "non-scaling-stroke" }),
      svg("path", { d: weight, fill: color }), svg("path", { d: `M${x} ${base}v${2 - LANE}`, stroke: "var(--panel)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" })];
  };
  return svg("svg", { viewBox: `0.5 0 ${length} ${height}`, preserveAspectRatio: "none", height, "aria-hidden": "true" },
    slots.map((slot) => svg("rect", { x: 0.5, y: bottom(slot) - LANE + 2, width: length, height: LANE - 2, fill: "currentColor", "fill-opacity": 0.06 })),
    host.segments.map(seed), NETWORKS.map(path));
}

const ORDERS = { host: ["number", (h) => h.host], objective: ["100·J", (h) => -(h.objective ?? -Infinity)], growth: ["growth", (h) => -(h.growth ?? -Infinity)] };

/** All hosts of a round; what comes after the step is veiled, and each host says its accuracy in that step. */
function glance(round, order, address) {
  const known = round.hosts.flatMap((h) => [...h.steps.val_acc, ...h.steps.committed_acc]).filter((v) => v !== null && v !== undefined);
  const range = d3.extent(known), hosts = d3.sort(round.hosts, ORDERS[order][1]);
  const cells = hosts.map((host) => {
    const value = el("output", {}), link = el("a", { class: "cell", href: address(host.host) },
      el("span", { class: "picture" }, miniature(host, round, range), el("i", { class: "veil" })),
      el("span", { class: "caption" }, el("b", {}, `host ${host.host}`), value), el("span", { class: "faint" }, `100·J ${number(host.objective, 1)}`));
    link.addEventListener("pointerdown", () => { link.href = address(host.host); });  // with the step of this moment
    link.addEventListener("focus", () => { link.href = address(host.host); });
    return { link, value, host, at: new Map(host.steps.t.map((t, i) => [t, i])) };
  });
  const place = el("div", { class: "cells" }, cells.map((cell) => cell.link));
  watch(place, (step) => {
    place.style.setProperty("--at", `${(100 * step) / scrub.length}%`);
    for (const { value, host, at } of cells) {
      const accuracy = host.steps.val_acc[at.get(step)];
      value.textContent = accuracy === null || accuracy === undefined ? "" : `${number(accuracy, 1)} %`;
    }
  });
  return place;
}
