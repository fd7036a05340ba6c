"use strict";
// The overview: runs, or groups of runs that differ in the seed alone, as a chart and a table.
// What is shown is in `state`: filter, regex, group, band, pin (the name of a run), columns, sort, all.

const DRAWN = 12, ROWS = 200;  // most lines of the chart, and rows of the table until all are asked for
const chosen = new Set();  // names of the runs to compare
const styles = new Map();  // by the first run of a row: the number of its colour and dash, which it keeps while it is drawn

/** A curve without axes. */
function spark(values, { color, dash }) {
  if (values.length < 2) return "–";
  const [low, high] = d3.extent(values), y = (v) => 3 + 20 * (1 - (v - low) / (high - low || 1));
  const last = values.length - 1;
  return svg("svg", { viewBox: "-3 0 106 26", width: 106, height: 26, role: "img", "aria-label": `100·J from ${number(values[0])} to ${number(values[last])}, between ${number(low)} and ${number(high)}` },
    svg("path", { d: d3.line((_, i) => (100 * i) / last, y)(values), fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash }),
    svg("circle", { cx: 100, cy: y(values[last]), r: 3, fill: color }));
}

function age(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  return passed < 90 ? `${Math.round(passed)} s ago` : passed < 5400 ? `${Math.round(passed / 60)} min ago` : passed < 129600 ? `${Math.round(passed / 3600)} h ago` : new Date(1000 * seconds).toISOString().slice(0, 10);
}

const condition = (row) => (row.finished ? "finished" : row.changed === null ? "empty" : `written ${age(row.changed)}`);
const seedsOf = ({ names, seeds }) => (names.length === 1 ? "" : `${seeds.length < names.length ? `${names.length} runs, ` : ""}${seeds.length} ${seeds.length === 1 ? "seed" : "seeds"}`);
/** [heading, row => text, isText, row => key to sort by, decimals of the difference to the baseline] */
const RUN_COLUMNS = [
  ["run", (row) => [styles.has(row.names[0]) ? mark(styleOf(row)) : null, el("a", { href: link("/run", { run: row.names }) }, row.run), el("span", { class: "faint" }, ` ${seedsOf(row)}`)], true, (row) => row.run],
  ["100·J ± sd", (row) => plusMinus(row.objective, row.objective_std), false, (row) => row.objective, 2],
  ["100·J by round", (row) => spark(row.curve, styleOf(row)), true, null],
  ["best", (row) => number(row.best), false, (row) => row.best, 2],
  ["accuracy %", (row) => number(row.committed, 1), false, (row) => row.committed, 1],
  ["growth", (row) => number(row.growth, 2), false, (row) => row.growth, 2],
  ["rounds", (row) => `${row.least < row.round ? `${row.least}–` : ""}${row.round ?? 0}${row.rounds ? ` / ${row.rounds}` : ""}`, false, (row) => row.round ?? 0],
  ["state", condition, true, (row) => (row.finished ? -1 : row.changed)],
  ["task", (row) => row.task ?? "–", true, (row) => row.task],
  ["preset", (row) => row.preset ?? "–", true, (row) => row.preset],
  ["reward", (row) => row.reward ?? "–", true, (row) => row.reward],
  ["seed", (row) => (row.seeds.length > 3 ? `${row.seeds.length} seeds` : row.seeds.map((seed) => count(seed)).join(", ")), false, (row) => row.seeds[0]],
  ["hosts", (row) => count(row.num_envs), false, (row) => row.num_envs],
  ["steps", (row) => count(row.episode_length), false, (row) => row.episode_length],
  ["env-steps/s", (row) => number(row.env_steps_per_s, 0), false, (row) => row.env_steps_per_s, 0],
  ["time", (row) => duration(row.seconds), false, (row) => row.seconds],
];
const AT_FIRST = RUN_COLUMNS.map(([heading]) => heading).filter((heading) => heading !== "steps" && heading !== "env-steps/s");
const shownColumns = () => state.columns?.split(",") ?? AT_FIRST;

/** What the bands of groups are, and their ends from the values of the seeds. */
const BANDS = {
  sd: ["± standard deviation of the seeds", (ys) => [-1, 1].map((sign) => d3.mean(ys) + sign * (d3.deviation(ys) ?? 0))],
  range: ["lowest to highest seed", d3.extent],
};
const bandOf = () => BANDS[state.band] ?? BANDS.sd;

/** The controls; they are drawn once, so that nothing disturbs whoever types. */
function overviewControls() {
  let typing;
  const filter = el("input", { type: "search", value: state.filter ?? "", placeholder: "run, task, preset, reward", input: () => { clearTimeout(typing); typing = setTimeout(() => go({ filter: filter.value }), 120); } });
  const flag = (label, name) => {
    const made = toggle(label, (on) => go({ [name]: on ? "1" : null }));
    made.querySelector("input").checked = Boolean(state[name]);
    return made;
  };
  const group = flag("group runs that differ in the seed alone", "group"), band = choice("Band", Object.entries(BANDS).map(([name, [text]]) => [name, text]), (name) => go({ band: name }));
  band.querySelector("select").value = state.band in BANDS ? state.band : "sd";
  band.hidden = !state.group;
  group.addEventListener("change", () => { band.hidden = !state.group; });
  const boxes = RUN_COLUMNS.slice(1).map(([heading]) => {
    const made = toggle(heading, (on) => {
      const columns = RUN_COLUMNS.map(([name]) => name).filter((name) => (name === heading ? on : shownColumns().includes(name))).join();
      go({ columns: columns === AT_FIRST.join() ? null : columns });
    });
    made.querySelector("input").checked = shownColumns().includes(heading);
    return made;
  });
  return [el("div", { class: "controls" }, el("label", {}, "Filter ", filter), flag("regular expression", "regex"), group, band),
    el("details", {}, el("summary", {}, "Columns"), el("div", { class: "controls" }, boxes))];
}

/** Whether a run is shown, and what is wrong with the filter. */
function filtered() {
  const text = state.filter ?? "";
  let fits = (value) => value.toLowerCase().includes(text.toLowerCase()), wrong = null;
  if (state.regex) {
    try {
      const expression = new RegExp(text, "i");
      fits = (value) => expression.test(value);
    } catch (error) {
      [fits, wrong] = [() => true, `The filter is not a regular expression, so all runs are shown. ${error.message}.`];
    }
  }
  return [(run) => [run.run, run.task, run.preset, run.reward].some((value) => fits(value ?? "")), wrong];
}

/** A row of runs: itself, or means over those of a group and their standard deviation. */
function rowOf(runs) {
  const names = runs.map((run) => run.run), seeds = [...new Set(runs.map((run) => run.seed))].sort(d3.ascending), points = pointsOf(runs);
  if (runs.length === 1) return { ...runs[0], names, seeds, points };
  const means = Object.fromEntries(["objective", "best", "committed", "growth", "seconds", "env_steps_per_s"].map((name) => [name, d3.mean(runs, (run) => run[name]) ?? null]));
  return { ...runs[0], ...means, run: shared(names), names, seeds, points, curve: points.map((point) => point.y), objective_std: d3.deviation(runs, (run) => run.objective) ?? null,
    least: d3.min(runs, (run) => run.round ?? 0), round: d3.max(runs, (run) => run.round), finished: runs.every((run) => run.finished), changed: d3.max(runs, (run) => run.changed) ?? null };
}

const rowsOfRuns = (runs) => (state.group ? d3.groups(runs, (run) => run.config ?? run.run).map(([, group]) => rowOf(group)) : runs.map((run) => rowOf([run])));

/** The mean of the runs by round on the coarsest of their grids, with the band where there are several. */
function pointsOf(runs) {
  const every = d3.max(runs, (run) => run.every), last = d3.max(runs, (run) => run.round), sums = new Map();
  runs.forEach((run, r) => run.curve.forEach((y, i) => {
    const k = Math.floor((i * run.every) / every), of = sums.get(k) ?? sums.set(k, new Map()).get(k);
    of.set(r, [...(of.get(r) ?? []), y]);
  }));
  return d3.sort([...sums], ([k]) => k).map(([k, of]) => {
    const ys = [...of.values()].map((values) => d3.mean(values)), [low, high] = runs.length > 1 ? bandOf()[1](ys) : [];
    return { x: Math.min((k + 1) * every, last), y: d3.mean(ys), low, high };
  });
}

/** What names have in common, with * for the rest. */
function shared(names) {
  const [first] = names, short = d3.min(names, (name) => name.length);
  const same = (most, at) => { let n = 0; while (n < most && names.every((name) => at(name, n) === at(first, n))) n++; return n; };
  const head = same(short, (name, n) => name[n]), tail = same(short - head, (name, n) => name.at(-1 - n));
  return head + tail ? `${first.slice(0, head)}*${first.slice(first.length - tail)}` : `${first} and others`;
}

const styleOf = ({ names: [name] }) => (styles.has(name) ? style(styles.get(name)) : { color: C.grey, dash: "none" });

/** Keeps the styles of rows that stay, and gives the others those that are free. */
function giveStyles(rows) {
  const names = rows.map((row) => row.names[0]);
  [...styles.keys()].filter((name) => !names.includes(name)).forEach((name) => styles.delete(name));
  names.filter((name) => !styles.has(name)).forEach((name) => styles.set(name, d3.range(DRAWN).find((i) => ![...styles.values()].includes(i))));
}

/** The columns that are shown; those with decimals also say the difference to the baseline. */
function columnsFor(baseline, several) {
  const shown = RUN_COLUMNS.filter(([heading]) => heading === "run" || shownColumns().includes(heading)).map(([heading, text, isText, key, digits]) => {
    const differs = (row) => baseline && row !== baseline && digits !== undefined && key(row) !== null && key(baseline) !== null;
    return [heading, (row) => [text(row), differs(row) ? el("span", { class: "difference" }, signed(key(row) - key(baseline), digits)) : null], isText, key];
  });
  const choose = (row) => el("input", { type: "checkbox", checked: row.names.every((name) => chosen.has(name)), "aria-label": `compare ${row.run}`, change: (event) => {
    row.names.forEach((name) => (event.target.checked ? chosen.add(name) : chosen.delete(name)));
  } });
  const pin = (row) => el("button", { type: "button", "aria-pressed": String(row === baseline), "aria-label": `baseline ${row.run}`, click: () => go({ pin: row === baseline ? null : row.names[0] }) }, row === baseline ? "unpin" : "pin");
  return several ? [shown[0], ["", (row) => [choose(row), pin(row)], true, null], ...shown.slice(1)] : shown;
}

function overviewSection({ overview }) {
  const { runs } = overview, several = runs.length > 1, [fits, wrong] = filtered();
  const isPinned = (row) => row.names.includes(state.pin), baseline = rowsOfRuns(runs).find(isPinned);
  const found = rowsOfRuns(runs.filter(fits)).filter((row) => !isPinned(row));
  const columns = columnsFor(baseline, several), rows = [...(baseline ? [baseline] : []), ...ordered(columns, found)];
  const drawn = rows.filter((row) => row.points.length).slice(0, DRAWN);
  giveStyles(drawn);
  const notes = [...overview.notes, ...runs.flatMap((run) => run.warnings), wrong, state.pin && !baseline ? `The baseline ${state.pin} is not here.` : null];
  const series = drawn.map((row) => ({ ...styleOf(row), name: [row.run, seedsOf(row)].filter(Boolean).join(", ") + (row === baseline ? " (baseline)" : ""), rows: row.points }));
  const note = rows.length > drawn.length ? `The first ${drawn.length} rows of the table that have a round.` : series.length === 1 ? series[0].name : null;
  const shown = d3.sum(rows, (row) => row.names.length);
  const made = runs.length ? sortable(columns, state.all ? rows : rows.slice(0, ROWS), "Runs") : null, left = state.all ? 0 : rows.length - ROWS;
  made?.classList.add("tall");
  made?.querySelectorAll("tbody tr").forEach((tr, i) => { if (rows[i] === baseline) tr.setAttribute("aria-current", "true"); });
  const compare = () => { if (chosen.size) location.assign(link("/run", { run: runs.map((run) => run.run).filter((name) => chosen.has(name)) })); };
  if (overview.reading) ask("now");  // the server answers before it has read all
  return present(notes.filter(Boolean).map((text) => el("p", { class: "finding" }, text)),
    shown < runs.length ? say(`${shown} of ${runs.length} runs are shown.`) : null,
    lines({ title: "100·J by round", note, series, band: bandOf()[0] }),
    made, left > 0 ? el("p", {}, el("button", { type: "button", click: () => go({ all: "1" }) }, `Show ${left} more rows`)) : null,
    made && several ? el("p", {}, el("button", { type: "button", click: compare }, "Compare the chosen runs")) : null,
    overview.reading ? say(`${overview.reading} runs are still being read; their curve, best round and time follow.`) : null,
    made && say(`100·J: accuracy of the network that is kept minus the price of its growth; mean and standard deviation over the hosts of the last round, in a group over its seeds. Each curve in the table has its own scale.${baseline ? ` Below the values: the difference to ${baseline.run}.` : ""}`));
}
