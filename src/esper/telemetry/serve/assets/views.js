"use strict";
// The views of the live page. Each is a list of sections, most of them those of the report.
// `state` is what the address says beyond the runs; `go(change)` changes it.

const of = (id) => SECTIONS.find((section) => section.id === id);

/** The address of a view from any other, with what `parameters` has a value for. */
function link(path, parameters) {
  const pairs = Object.entries(parameters).flatMap(([name, value]) => [value].flat().filter((one) => one !== null && one !== undefined && one !== "").map((one) => [name, one]));
  return pairs.length ? `.${path}?${new URLSearchParams(pairs)}` : `.${path}`;
}

/** Rows in the order of the address; `columns` have the key to sort by as fourth part. */
function ordered(columns, rows) {
  const sort = state.sort ?? "", key = columns.find(([heading]) => heading === sort.replace(/^-/, ""))?.[3];
  if (!key) return rows;
  const known = (row) => key(row) !== null && key(row) !== undefined;
  return [...d3.sort(rows.filter(known), (a, b) => (sort.startsWith("-") ? d3.descending : d3.ascending)(key(a), key(b))), ...rows.filter((row) => !known(row))];
}

/** A table whose headings sort it. */
function sortable(columns, rows, caption) {
  const name = (state.sort ?? "").replace(/^-/, ""), down = (state.sort ?? "").startsWith("-");
  const made = table(columns, rows, caption);
  made.querySelectorAll("th").forEach((th, i) => {
    const [heading, , text, by] = columns[i];
    if (!by) return;
    const own = heading === name, next = own ? (down ? "" : "-") + heading : (text ? "" : "-") + heading;  // numbers: the highest first
    if (own) th.setAttribute("aria-sort", down ? "descending" : "ascending");
    th.replaceChildren(el("button", { type: "button", class: "sort", click: () => go({ sort: next }) }, heading, own ? (down ? " ▼" : " ▲") : ""));
  });
  return made;
}

// Run ---------------------------------------------------------------------------------------------------------------

/** Chooses a round; without a choice the page follows the newest one. */
function roundControls(found) {
  const field = el("input", { type: "number", min: found.first, max: found.newest, value: found.round, "aria-label": "Round", change: () => go({ round: field.value === "" ? null : Number(field.value) }) });
  const move = (by, name, text) => el("button", { type: "button", "aria-label": name, disabled: found.round + by < found.first || found.round + by > found.newest, click: () => go({ round: found.round + by }) }, text);
  return [el("label", {}, "Round ", field), move(-1, "previous round", "◀"), move(1, "next round", "▶"),
    el("button", { type: "button", disabled: state.round === null, click: () => go({ round: null }) }, state.round === null ? "following the newest" : "follow the newest")];
}

const STAGE_KEYS = () => keys([...Object.entries(STAGES).map(([name, color]) => ({ name: words(name), color, fill: true })), ...NETWORKS.map((one) => ({ ...one, name: `accuracy, ${one.name}` }))]);

function glanceSection({ round }) {
  if (round.round === null) return say("No round is complete yet.");
  beginScrub(round.length, state.step);
  const address = (host) => link("/host", { run: round.run, round: state.round === null ? null : round.round, host, step: scrub.step });
  const order = choice("Order", Object.entries(ORDERS).map(([name, [text]]) => [name, text]), (order) => go({ order }));
  order.querySelector("select").value = state.order ?? "host";
  const recorded = round.hosts.some((host) => host.steps.t.length);
  return present(
    say("Accuracy and seeds of each host through the episode; all on one scale. Colour: stage; filled height: alpha. A host opens its own page."),
    el("div", { class: "controls" }, roundControls(round), order), STAGE_KEYS(),
    recorded ? null : say("The steps of this round are not in the record: the run was recorded without them, or they are not written yet."),
    glance(round, state.order ?? "host", address), recorded ? slider() : null,
    round.total > round.hosts.length ? say(`${round.total - round.hosts.length} more hosts of this round are left out.`) : null);
}

// Host --------------------------------------------------------------------------------------------------------------

/** A bar of a share of `most`, to both sides of a middle if there are negative values. */
function bar(value, most, color, both = false) {
  const share = most ? (100 * Math.abs(value ?? 0)) / most / (both ? 2 : 1) : 0;
  const left = both ? (value < 0 ? 50 - share : 50) : 0;
  return el("span", { class: both ? "bar both" : "bar" }, el("i", { style: `left:${left}%;width:${share}%;background:${color}` }));
}

const HEAD_NAMES = ["slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];
const byStep = (rows) => d3.group(rows, (row) => row.t);

function hostHeading({ host: found }) {
  if (found.host === null || found.host === undefined) return say("No round is complete yet.");
  const at = found.hosts.indexOf(found.host), result = found.result;
  const list = el("select", { "aria-label": "Host", change: () => go({ host: Number(list.value) }) }, found.hosts.map((host) => el("option", { value: host }, `host ${host}`)));
  list.value = found.host;
  const move = (by, name, text) => el("button", { type: "button", "aria-label": name, click: () => go({ host: found.hosts.at((at + by) % found.hosts.length) }) }, text);
  return [
    el("div", { class: "controls" }, roundControls(found), el("label", {}, "Host ", list), move(-1, "previous host", "◀"), move(1, "next host", "▶"),
      el("a", { href: link("/run", { run: found.run, round: state.round, step: state.step }) + "#glance" }, "all hosts")),
    el("p", {}, el("strong", {}, `Host ${found.host}, round ${found.round}: `), `100·J ${number(result.objective)}, kept network ${number(result.committed)} %, growth ${number(result.growth)}×; ${result.germinated} germinated, ${result.fossilized} fossilized, ${result.pruned} pruned, ${result.rollbacks} rolled back.`,
      instanceOf(result)),
  ];
}

function hostTimeline({ host: found }) {
  if (!found.steps?.length) return say(found.host === null ? "No round is complete yet." : "The steps of this round are not in the record: the run was recorded without them, or they are not written yet.");
  beginScrub(found.length, state.step);
  const series = NETWORKS.map((one) => ({ ...one, rows: found.steps.map((row) => ({ x: row.t, y: row[one.ofStep] })) }));
  const known = found.decisions.filter((row) => row.p_wait !== null);
  const chances = known.flatMap((row) => Object.keys(OPERATIONS).map((op) => ({ x: row.t, part: op, value: row[`p_${op}`] })));
  const terms = [...new Set(found.rewards.map((row) => row.term))], colors = Object.fromEntries(terms.map((term, i) => [term, [...SERIES, C.yellow, C.grey][i % 8]]));
  const domain = [0.5, found.length + 0.5];
  const charts = el("div", { class: "charts" }, present(
    lines({ title: "Accuracy", note: "Validation, %, after each step.", series, xLabel: "step", marginLeft: 60, height: 190, xDomain: domain }),
    found.segments.length ? lanes({ host: found, slots: found.slots, length: found.length }) : say("No seed germinated in this episode."),
    bars({ title: "Probabilities of the operations", note: "What the policy gave each operation.", rows: chances, colors: OPERATIONS, xLabel: "step", percent: true, top: 1, xDomain: domain, marginLeft: 60 }),
    bars({ title: "Reward", note: "Terms of each step, and their sum.", rows: found.rewards.map((row) => ({ x: row.t, part: row.term, value: row.value })), colors, xLabel: "step", xDomain: domain, marginLeft: 60,
      line: found.steps.filter((row) => row.reward !== null).map((row) => ({ x: row.t, y: row.reward })) })));
  follow(charts);
  return [el("div", { class: "beside" }, charts, stepPanel(found, colors)), slider()];
}

/** A line through every chart at the step, moved without drawing the chart again; a click on a chart chooses the step. */
function follow(charts) {
  const place = () => charts.querySelectorAll(".chart").forEach((chart) => {
    const drawn = chart.querySelector("svg"), scale = drawn?.scale?.("x");
    if (!scale) return;
    if (!chart.cursor?.isConnected) chart.append(chart.cursor = el("i", { class: "cursor" }));
    chart.cursor.style.transform = `translateX(${(scale.apply(scrub.step) * drawn.clientWidth) / drawn.viewBox.baseVal.width}px)`;
  });
  charts.addEventListener("drawn", place);
  charts.addEventListener("click", (event) => {
    const chart = event.target.closest(".chart"), drawn = chart?.querySelector("svg"), scale = drawn?.scale?.("x");
    if (scale) setStep(valueAt(drawn, event));
  });
  watch(charts, place);
}

/** What happened in the step: the decision with its probabilities, the reward with its terms, the seeds. */
function stepPanel(found, colors) {
  const [steps, decisions, slots, rewards] = [found.steps, found.decisions, found.slot_rows, found.rewards].map(byStep);
  const most = d3.max(found.rewards, (row) => Math.abs(row.value)) ?? 0, both = found.rewards.some((row) => row.value < 0);
  const body = el("div", {}), parts = el("div", { class: "parts" }), panel = el("aside", { class: "panel", "aria-label": "The step" }, body, parts);
  new ResizeObserver(() => panel.style.setProperty("--height", `${panel.offsetHeight}px`)).observe(panel);  // a tall one scrolls to its end
  const draw = (t) => {
    const [step] = steps.get(t) ?? [{}], [decision] = decisions.get(t) ?? [];
    const values = new Map((rewards.get(t) ?? []).map((row) => [row.term, row.value]));
    body.replaceChildren(...present(
      el("h3", {}, `Step ${t}`), el("p", { class: "decision" }, decided(decision, step)),
      decision && decision.p_wait !== null ? listed(Object.entries(OPERATIONS).map(([op, color]) => [words(op), bar(decision[`p_${op}`], 1, color), `${number(100 * decision[`p_${op}`], 1)} %`, decision.op.toLowerCase() === op])) : null,
      el("h3", {}, `Reward ${signed(step.reward, 4)}`),
      Object.keys(colors).length ? listed(Object.entries(colors).map(([term, color]) => [words(term), bar(values.get(term), most, color, both), signed(values.get(term) ?? 0, 4)])) : say("No term of the reward was recorded."),
      decision?.constrained ? say(`Not every value was allowed for ${decision.constrained.split("+").map(words).join(", ")}.`) : null,
      decision && decision.value !== null ? say(`The critic expected a return of ${number(decision.value, 3)} (scaled).`) : null,
      el("h3", {}, "Accuracy and size"),
      listed([["with all seeds", number(step.val_acc) + " %"], ["kept network", number(step.committed_acc) + " %"], ["training", number(step.train_acc) + " %"], ["growth", number(step.growth) + "×"]]),
      slots.has(t) ? el("div", {}, el("h3", {}, "Seeds after the step"), table([["slot", (s) => s.slot, true], ["blueprint", (s) => s.blueprint ?? "–", true], ["stage", (s) => words(s.stage), true], ["alpha", (s) => number(s.alpha)], ["points", (s) => signed(s.contribution)]], slots.get(t), "Seeds after the step")) : null));
  };
  const measured = Object.keys(found.waterfalls).map(Number);
  let shown = null, waiting;
  const takeApart = (t) => {  // a chart: drawn when the step has come to rest
    const at = d3.max(measured.filter((m) => m <= t));
    if (at === shown) return;
    shown = at;
    parts.replaceChildren(...present(at !== undefined ? [waterfall({ parts: found.waterfalls[at], blueprints: new Map((slots.get(at) ?? []).map((s) => [s.slot, s.blueprint])) }), say(`Measured in step ${at}.`)] : null));
  };
  watch(panel, (t) => {
    draw(t);
    clearTimeout(waiting);
    waiting = setTimeout(() => takeApart(t), 120);
  });
  return panel;
}

const listed = (rows) => el("dl", { class: "listed" }, rows.map(([name, ...rest]) => el("div", { class: rest.at(-1) === true ? "chosen" : null }, el("dt", {}, name), rest.filter((part) => typeof part !== "boolean").map((part) => el("dd", {}, part)))));

function decided(decision, step) {
  if (!decision) return step.rollback ? `Rolled back: ${step.rollback}.` : "No decision was recorded.";
  const heads = HEAD_NAMES.filter((name) => decision[name] !== null && decision[name] !== undefined).map((name) => (name === "slot" || name === "blueprint" ? decision[name] : `${words(name)} ${words(String(decision[name]))}`));
  return [el("strong", {}, words(decision.op)), heads.length ? ` ${heads.join(", ")}` : "", decision.success === false ? el("em", {}, ", without effect") : ""];
}

function hostSteps({ host: found }) {
  if (!found.steps?.length) return null;
  const decisions = byStep(found.decisions);
  const shown = table([
    ["step", (row) => el("button", { type: "button", class: "sort", click: () => setStep(row.t) }, row.t)],
    ["operation", (row) => el("span", {}, decided(decisions.get(row.t)?.[0], row)), true],
    ["probability", (row) => { const d = decisions.get(row.t)?.[0], p = d && d[`p_${d.op.toLowerCase()}`]; return p === null || p === undefined ? "–" : `${number(100 * p, 1)} %`; }],
    ["value", (row) => number(decisions.get(row.t)?.[0]?.value, 3)], ["reward", (row) => signed(row.reward, 4)],
    ["accuracy %", (row) => number(row.val_acc)], ["kept %", (row) => number(row.committed_acc)], ["growth", (row) => number(row.growth)],
  ], found.steps, "Steps"), rows = shown.querySelectorAll("tbody tr");
  let marked = null;
  watch(shown, (t) => {
    marked?.removeAttribute("aria-current");
    marked = rows[found.steps.findIndex((row) => row.t === t)];
    marked?.setAttribute("aria-current", "step");
  });
  return shown;
}

// Policy and anomalies ----------------------------------------------------------------------------------------------

function policySection({ runs, policy }) {
  const charts = runs.flatMap((run) => Object.values(policy[run.run]).filter((phase) => phase.steps.length).map(({ rounds: [from, to], steps }) => bars({
    title: [runs.length > 1 ? run.run : "", from === to ? `round ${from}` : `rounds ${from} to ${to}`].filter(Boolean).join(", "),
    rows: steps.flatMap((row) => Object.keys(OPERATIONS).map((op) => ({ x: row.t, part: op, value: row[op] }))), colors: OPERATIONS, xLabel: "step", percent: true, top: 1 })));
  return charts.length ? [say("Mean probability of each operation by step of the episode, over all hosts, in the first and the last quarter of the rounds."), el("div", { class: "grid" }, charts)]
    : say("No probability was recorded.");
}

function anomalySection({ runs, anomalies }) {
  const many = runs.length > 1;
  const findings = anomalies.kinds.map((kind) => el("p", { class: "finding" }, el("strong", {}, (many ? `${kind.run}: ` : "") + words(kind.kind)), ` (${kind.times}×, last in round ${kind.last_round}) ${kind.message ?? ""} ${kind.advice ?? ""}`));
  const place = (a) => (a.host === null || a.host < 0 || a.t === null ? count(a.round) : el("a", { href: link("/host", { run: a.run, round: a.round, host: a.host, step: a.t }) }, `${a.round}, step ${a.t}, host ${a.host}`));
  const columns = [
    ...(many ? [["run", (a) => a.run, true, (a) => a.run]] : []), ["round", place, true, (a) => a.round], ["kind", (a) => words(a.kind), true, (a) => a.kind],
    ["value", (a) => count(a.value, 3), false, (a) => a.value], ["threshold", (a) => count(a.threshold, 3), false, (a) => a.threshold],
    ["meaning", (a) => a.message ?? "–", true, null], ["what to do", (a) => a.advice ?? "–", true, null]];
  return present(anomalies.warnings.map((text) => el("p", { class: "finding" }, text)), findings.length ? findings : say("No anomaly was found."),
    anomalies.newest.length ? [el("h3", {}, "Newest first"), sortable(columns, ordered(columns, anomalies.newest), "Anomalies")] : null);
}

const VIEWS = {
  "/": { title: "Overview", sections: [
    { id: "choice", title: "Runs", needs: [], draw: overviewControls }, { id: "overview", title: null, needs: ["overview"], draw: overviewSection }] },
  "/run": { title: "Run", sections: [of("result"), of("curves"), { id: "glance", title: "All hosts at a glance", needs: ["round"], draw: glanceSection, single: true }, of("frontier"), of("seeds"), of("rewards"), of("ppo"), of("settings")] },
  "/host": { title: "Host", single: true, sections: [
    { id: "place", title: "Host", needs: ["host"], draw: hostHeading }, { id: "timeline", title: "Growth, step by step", needs: ["host"], draw: hostTimeline }, { id: "steps", title: "All steps", needs: ["host"], draw: hostSteps }] },
  "/policy": { title: "Policy", sections: [of("behaviour"), { id: "policy", title: "Probabilities of the operations", needs: ["runs", "policy"], draw: policySection }, of("importance"), of("seeds"), of("ppo")] },
  "/anomalies": { title: "Anomalies", sections: [{ id: "anomalies", title: "Anomalies", needs: ["runs", "anomalies"], draw: anomalySection }] },
};
