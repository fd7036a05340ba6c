"use strict";
// Elements, tables and figures, from which app.js builds the sections.

/** An element with attributes (functions become listeners) and children; text stays text. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** An SVG element with attributes and children. */
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat(2));
  return element;
}

/** A number with so many decimals; a dash if it was not measured. */
function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return (Math.abs(value) >= 1e5 ? d3.format(".3~s")(value) : value.toFixed(digits)).replace("-", "−");
}

/** A whole number, or one with so many decimals. */
const count = (value, digits = 2) => number(value, Number.isInteger(value) ? 0 : digits);

const signed = (value, digits = 2) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value, digits));
const plusMinus = (value, half) => number(value) + (half === null || half === undefined ? "" : ` ± ${number(half)}`);
const words = (name) => name.toLowerCase().replaceAll("_", " ");

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${seconds.toFixed(1)} s`;
}

/** A table; `columns` are [heading, row => text, isText]. */
function table(columns, rows, caption) {
  const head = el("tr", {}, columns.map(([name, , text]) => el("th", { scope: "col", class: text ? "text" : null }, name)));
  const body = rows.map((row) => el("tr", {}, columns.map(([, value, text]) => el("td", { class: text ? "text" : null }, value(row)))));
  body.forEach((tr) => tr.childNodes.forEach((td) => { if (td.textContent.length > 50) td.classList.add("long"); }));
  return el("div", { class: rows.length > 60 ? "scroll" : "scroll tall", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

/** A labelled list of choices; `options` are [value, text]. */
function choice(label, options, change) {
  const select = el("select", { change: () => change(select.value) }, options.map(([value, text]) => el("option", { value }, text)));
  return el("label", {}, label + " ", select);
}

/** A switch with a label. */
function toggle(label, change) {
  const box = el("input", { type: "checkbox", change: () => change(box.checked) });
  return el("label", {}, box, " " + label);
}

/** How a chart draws something: in a colour, as a dashed line, filled, or as a line in a band. */
function mark({ color, dash = "none", fill, band }) {
  const box = fill ? { stroke: "currentColor", "stroke-opacity": 0.5 } : { "fill-opacity": 0.25 };
  return svg("svg", { class: "mark", "aria-hidden": "true" }, fill || band ? svg("rect", { width: 18, height: 12, fill: color, ...box }) : [],
    fill ? [] : svg("line", { x1: 0, x2: 18, y1: 6, y2: 6, stroke: color, "stroke-width": 3, "stroke-dasharray": dash }));
}

/** The key of a chart: names with their marks. */
const keys = (entries) => (entries.length ? el("ul", { class: "keys" }, entries.map((entry) => el("li", {}, mark(entry), entry.name))) : null);

/**
 * A titled chart that fits its width, with its data as a table and its picture as SVG.
 * `draw(width)` gives an SVG element; `rows` are its data.
 */
function figure({ title, note, key, draw, rows = [] }) {
  const place = el("div", { class: "chart" });
  const data = el("div", { hidden: true });
  const names = rows.length ? Object.keys(rows[0]) : [];
  const show = () => {
    if (!data.childElementCount) data.append(table(names.map((name) => [name, (row) => String(row[name] ?? "–")]), rows, title));
    data.hidden = !data.hidden;
    button.setAttribute("aria-expanded", String(!data.hidden));
  };
  const button = el("button", { type: "button", click: show, "aria-expanded": "false", "aria-label": `Data of ${title}` }, "Data");
  const csv = el("button", { type: "button", click: () => saveAs(d3.csvFormat(rows), "text/csv", `${title}.csv`), "aria-label": `Save ${title} as CSV` }, "CSV");
  const save = el("button", { type: "button", click: () => download(place.querySelector("svg"), title), "aria-label": `Save ${title} as SVG` }, "SVG");
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width < 200 || width === drawn) return;  // no room beside the labels, as while a window opens
    drawn = width;
    const svg = draw(width);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${title}. ${note ?? ""}`);
    place.replaceChildren(svg);
    place.dispatchEvent(new Event("drawn", { bubbles: true }));
  }).observe(place);
  return el("figure", {}, el("figcaption", {}, el("h3", {}, title), note ? el("p", {}, note) : null, key ?? null),
    place, el("div", { class: "tools" }, rows.length ? [button, csv] : null, save), data);
}

/** Saves the picture of a chart in the colours of the page. */
function download(svg, title) {
  const copy = svg.cloneNode(true);
  const style = getComputedStyle(document.body);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("style", `color: ${style.color}; background: ${style.backgroundColor}; font: 11px sans-serif`);
  const drawn = copy.outerHTML.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  saveAs(drawn, "image/svg+xml", `${title}.svg`);
}

function saveAs(text, type, name) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name.replace(/[^\w.]+/g, "-") }).click();
  URL.revokeObjectURL(url);
}
