"use strict";
// Starts the view that the address names, and draws its sections again when files of its runs have changed.

const address = new URL(location.href);
const path = address.pathname.slice(address.pathname.lastIndexOf("/"));  // below that of a proxy
const view = VIEWS[path], names = address.searchParams.getAll("run");
const whole = (name) => (/^\d+$/.test(address.searchParams.get(name) ?? "") ? Number(address.searchParams.get(name)) : null);
const state = { round: whole("round"), host: whole("host"), step: whole("step"), ...Object.fromEntries(["order", "sort", "filter", "regex", "group", "band", "pin", "columns", "all"].map((name) => [name, address.searchParams.get(name)])) };
const places = new Map();  // section id: { place, body, text, content }
let busy = false, wanted = null, rested = 0, timer;

/** Shows `state` in the address, without the token; going back leaves the view. */
function remember() {
  history.replaceState(null, "", link(path, { run: names, ...state, step: scrub.step ?? state.step }) + location.hash);
}

function go(change) {
  Object.assign(state, change);
  if (!(state.order in ORDERS)) state.order = null;
  remember();
  const other = "round" in change || "host" in change;  // asks for other data
  places.forEach((one) => {
    if (!one.section.needs.some((name) => name in { overview: 0, round: 0, anomalies: 0 })) return;
    if (other) one.text = null;
    else if (one.content) paint(one);
  });
  if (other) ask("now");
}

/** A payload as text; an error as a sentence. */
async function fetched(name) {
  const place = name === "host" ? { round: state.round, host: state.host } : name === "round" ? { round: state.round } : {};
  let answer;
  try {
    answer = await fetch(link(`/api/${name}`, { run: name === "overview" ? [] : names, ...place }));
  } catch {
    throw new Error("esper serve does not answer; start it again.");
  }
  const text = await answer.text();
  if (answer.ok) return text;
  let why = text.replace(/^esper: /, "");
  try { why = JSON.parse(text).error; } catch { /* a plain sentence */ }
  throw new Error(why);
}

async function redraw(one, load) {
  const { section } = one;
  let text, content, failed = null;
  try {
    const texts = await Promise.all(section.needs.map(load));
    text = texts.join("\n");
    if (text === one.text) return;
    content = () => section.draw(Object.fromEntries(section.needs.map((name, i) => [name, JSON.parse(texts[i])])));
  } catch (error) {
    failed = text = error.message;
    if (text === one.text) return;
    content = () => el("p", { class: "finding" }, error.message);
  }
  Object.assign(one, { text, failed, content });
  paint(one);
}

function paint({ place, body, content }) {
  place.style.minHeight = `${place.offsetHeight}px`;  // charts come a moment later; nothing below must jump
  const chosen = choices(body);
  body.replaceChildren(...present(content()));
  place.hidden = !body.hasChildNodes();
  choose(body, chosen);
  setTimeout(() => { place.style.minHeight = ""; }, 400);
}

const controls = (body) => [...body.querySelectorAll(".controls select, .controls input, .scroll")];

/** What the user has chosen in a section, by its place. */
const choices = (body) => controls(body).map((c) => ({ value: c.value, checked: c.checked, focus: c === document.activeElement, top: c.scrollTop, left: c.scrollLeft }));

function choose(body, chosen) {
  const now = controls(body);
  if (now.length !== chosen.length) return;
  now.forEach((control, i) => {
    const { value, checked, focus, top, left } = chosen[i];
    if (control.matches("[type=checkbox]")) {
      if (control.checked !== checked) { control.checked = checked; control.dispatchEvent(new Event("change")); }
    } else if (control.matches("select:not([aria-label]), [type=search]") && control.value !== value) {
      control.value = value;
      if (control.value === value) control.dispatchEvent(new Event(control.type === "search" ? "input" : "change"));
    }
    control.scrollTo?.(left, top);
    if (focus) control.focus({ preventScroll: true });
  });
}

/** Asks for a refresh: "now" after a click; "later", after files have changed, when four times as long has passed as the
 * last one took (at most 15 s), so that a server beside a training takes little of it. */
function ask(when) {
  if (busy) { wanted = wanted === "now" ? wanted : when; return; }
  clearTimeout(timer);
  timer = setTimeout(refresh, when === "now" ? 0 : Math.max(0, rested - performance.now()));
}

async function refresh() {
  busy = true;
  const began = performance.now(), texts = new Map(), all = [...places.values()];
  const load = (name) => texts.get(name) ?? texts.set(name, fetched(name)).get(name);
  await Promise.all(all.map((one) => redraw(one, load)));
  all.forEach((one, i) => { if (one.failed) one.place.hidden = all.slice(0, i).some((other) => other.failed === one.failed); });  // said once
  const runs = all.some(({ section }) => section.needs.includes("runs")) ? await load("runs").then(JSON.parse, () => null) : null;
  if (runs) document.querySelector("header").replaceChildren(...heading(runs));
  document.querySelector("main").setAttribute("aria-busy", "false");
  rested = performance.now() + Math.min(15000, 4 * (performance.now() - began));
  busy = false;
  const next = wanted;
  wanted = null;
  if (next) ask(next);
}

function frame() {
  const title = names.join(", ") || "esper";
  document.title = `${view.title}: ${title}`;
  document.querySelector("header").replaceChildren(el("h1", {}, title));
  const item = ([to, { title, single }]) => el("li", {}, el("a", { href: to === "/" ? link(to, {}) : link(to, { run: single ? names[0] : names }), "aria-current": to === path ? "page" : null }, title));
  document.querySelector("nav").replaceChildren(el("ul", {}, Object.entries(VIEWS).filter(([to]) => to === "/" || names.length).map(item)));
  const sections = view.sections.filter((section) => !section.single || names.length === 1);
  document.querySelector("main").replaceChildren(...sections.map((section) => {
    const body = el("div", {}, say("reading …")), place = framed(section, body);
    places.set(section.id, { section, place, body, text: null });
    return place;
  }));
}

/** Follows the runs while the page is seen; a hidden one must not hold a connection, of which browsers allow six. */
function connect() {
  const status = document.querySelector("footer");
  const source = new EventSource(link("/api/events", { run: names }));
  source.addEventListener("ready", () => { status.textContent = "Follows the files of the runs."; ask("later"); });
  source.addEventListener("changed", () => { status.textContent = `Last change: ${new Date().toLocaleTimeString()}.`; ask("later"); });
  source.addEventListener("error", () => { status.textContent = "esper serve does not answer; trying again."; });
  document.addEventListener("visibilitychange", () => { source.close(); if (!document.hidden) connect(); }, { once: true });
}

async function begin() {
  if (view !== VIEWS["/"] && !names.length) {  // the only run, or a choice
    const { runs } = JSON.parse(await fetched("overview"));
    if (runs.length !== 1) { location.replace(link("/", {})); return; }
    names.push(runs[0].run);
  }
  remember();
  frame();
  let resting;
  watch(document.body, () => { clearTimeout(resting); resting = setTimeout(remember, 250); });
  ask("now");
  connect();
}

begin();
