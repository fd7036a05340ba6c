"use strict";
// The sections of the report. Each has a title, the payloads it needs, and a function from those to elements.
// `start(load)` draws them: `load(name)` promises a payload, embedded in this page or fetched.

const rowsOf = (columns, y, low, high) => (columns.round ?? []).map((x, i) => ({ x, y: columns[y][i], ...(low ? { low: columns[low][i], high: columns[high][i] } : {}) }));

/** Mean over the last `span` rows; NaN-free. */
const rolling = (rows, span) => rows.map((row, i) => (span < 2 ? row : { ...row, ...Object.fromEntries(["y", "low", "high"].filter((k) => row[k] != null).map((k) => [k, d3.mean(rows.slice(Math.max(0, i - span + 1), i + 1), (r) => r[k])])) }));

const named = (runs) => (runs.length > 1 ? (run) => run : () => "");
const present = (...elements) => elements.flat(Infinity).filter(Boolean);
const say = (text) => el("p", { class: "faint" }, text);

/** A part that a control redraws; `make(state)` gives elements. */
function redrawn(make, state, controls) {
  const place = el("div");
  const update = (change = {}) => { Object.assign(state, change); place.replaceChildren(...present(make(state))); };
  update();
  return [el("div", { class: "controls" }, controls(update)), place];
}

function tile(value, label, main) {
  return el("div", { class: main ? "tile main" : "tile" }, el("b", {}, value), el("span", {}, label));
}

function tiles(run, evaluated) {
  const last = run.last, best = run.summary.best_host, trained = evaluated.find((row) => row.kind === "trained"), constant = evaluated.find((row) => row.kind === "constant");
  return el("div", { class: "tiles" }, present(
    last && tile(number(last.objective), `100·J of round ${last.round}: mean, ± ${number(last.objective_std)} standard deviation over ${run.num_envs} training hosts`, !trained),
    trained && tile(plusMinus(trained.objective, trained.objective_half), `100·J on ${trained.hosts} new hosts, with 95 % interval`, true),
    constant && tile(plusMinus(constant.objective, constant.objective_half), `100·J of the best constant schedule, ${constant.controller}, on the same hosts`),
    run.learned && tile(`${number(run.learned.first, 1)} → ${number(run.learned.last, 1)}`, `100·J, first to last ${run.learned.rounds === 1 ? "round" : `${run.learned.rounds} rounds`}`),
    last && tile(`${number(last.committed, 1)} %`, `validation accuracy of the network that is kept (all seeds: ${number(last.live, 1)} %)`),
    run.finished && tile(`${number(run.summary.final_test_accuracy_mean, 1)} %`, "test accuracy of the network that is kept"),
    best && tile(number(best.objective), `100·J of the best host of all rounds: host ${best.host} of round ${best.round}; validation ${number(best.val, 1)} %, test ${number(best.test, 1)} %, growth ${number(best.growth)}×`),
    last && tile(`${number(last.growth, 1)}×`, "parameters of the network that is kept, host = 1"),
    tile(duration(run.cost.seconds), `for ${run.cost.rounds} rounds of ${run.num_envs} hosts × ${run.episode_length} steps${last ? `, ${number(last.env_steps_per_s, 0)} env-steps/s` : ""}`),
    tile(count(run.cost.rollbacks ?? 0), "rollbacks of hosts"),
  ));
}

function summary({ runs, evaluation, anomalies, differences }) {
  const many = runs.length > 1;
  const findings = anomalies.kinds.map((kind) => el("p", { class: "finding" }, el("strong", {}, (many ? `${kind.run}: ` : "") + words(kind.kind)), ` (${kind.times}×, last in round ${kind.last_round}) ${kind.message ?? ""} ${kind.advice ?? ""}`));
  const verdicts = evaluation.flatMap(({ task, sources }) => sources.filter((source) => source.verdict).map((source) => el("p", { class: "verdict" },
    el("strong", {}, `${many ? `${source.run}, e` : "E"}valuation${evaluation.length > 1 ? ` on ${task}` : ""}: `), source.verdict)));
  const evaluated = (run) => (evaluation.find(({ task }) => task === run.task)?.rows ?? []).filter((row) => row.run === run.run);
  const unfinished = runs.filter((run) => !run.finished).map((run) => el("p", { class: "verdict" }, `${run.run} is not finished: ${run.cost.rounds} complete rounds${run.config.rounds ? ` of ${run.config.rounds}` : ""}.`));
  return present(
    many ? comparison(runs, evaluated) : runs.map((run) => tiles(run, evaluated(run))),
    verdicts, unfinished,
    anomalies.warnings.map((text) => el("p", { class: "finding" }, text)),
    findings.length ? findings : say("No anomaly was found."),
    differences.length ? paired(differences) : null,
  );
}

function comparison(runs, evaluated) {
  const of = (run) => evaluated(run).find((row) => row.kind === "trained");
  return table([
    ["run", (run) => run.run, true], ["task", (run) => run.task, true], ["seed", (run) => count(run.seed)], ["rounds", (run) => count(run.cost.rounds)],
    ["100·J, last round ± sd", (run) => (run.last ? plusMinus(run.last.objective, run.last.objective_std) : "–")],
    ["on new hosts ± 95 %", (run) => (of(run) ? plusMinus(of(run).objective, of(run).objective_half) : "–")],
    ["accuracy %", (run) => number(run.last?.committed, 1)], ["growth", (run) => number(run.last?.growth, 1)],
    ["time", (run) => duration(run.cost.seconds)], ["rollbacks", (run) => count(run.cost.rollbacks ?? 0)],
  ], runs, "Runs");
}

function paired(differences) {
  return el("div", {}, el("h3", {}, "Paired differences"),
    say("Mean over hosts paired by round and number in the last rounds of both, with 95 % interval. It covers the hosts, not the choice of the training seed."),
    table([
      ["run", (d) => `${d.run} − ${d.reference}`, true], ["100·J", (d) => `${signed(d.objective)} ± ${number(d.objective_half)}`],
      ["accuracy", (d) => `${signed(d.committed)} ± ${number(d.committed_half)}`], ["growth", (d) => `${signed(d.growth)} ± ${number(d.growth_half)}`],
      ["rounds", (d) => `${d.first}–${d.last}`], ["pairs", (d) => count(d.pairs)],
    ], differences, "Paired differences"));
}

const AXES = {
  round: (run, curve) => curve.round,
  "env-steps": (run, curve) => curve.round.map((round) => round * run.num_envs * run.episode_length),
  minutes: (run, curve) => curve.seconds.map((seconds) => seconds / 60),
};
// What the learning curves show, also when they are drawn again: an axis, an interval of it, and the rounds of an average.
const shown = { axis: "round", domain: null, span: 1 };

function curveSection({ runs, curves }) {
  const drawn = runs.filter((run) => curves[run.run]?.round), names = drawn.map((run) => run.run), label = named(names);
  if (!names.length) return say("No round is complete yet.");
  const xs = (run) => AXES[shown.axis](drawn.find((one) => one.run === run), curves[run]);
  const inside = (row) => row.x !== null && (!shown.domain || (row.x >= shown.domain[0] && row.x <= shown.domain[1]));
  const chart = (title, note, column, extra = []) => lines({
    title, note, xLabel: shown.axis, xDomain: shown.domain,
    series: [column, ...extra].flatMap((name, kind) => names.map((run, i) => ({
      ...NETWORKS[kind], ...(names.length > 1 ? { ...style(i), ...(kind ? { dash: NETWORKS[kind].dash } : {}) } : {}),
      name: [label(run), extra.length ? NETWORKS[kind].name : ""].filter(Boolean).join(" ") || title,
      rows: rolling(rowsOf(curves[run], name, ...(kind ? [] : [`${name}_low`, `${name}_high`])), shown.span).map((row, k) => ({ ...row, x: xs(run)[k] })).filter(inside),
    }))),
  });
  const make = () => {
    const grid = el("div", { class: "grid zoomable" }, present(
      chart("100·J", "What is optimized: accuracy of the network that is kept minus the price of its growth.", "objective"),
      chart("Accuracy", "Validation, %, at the end of each round.", "committed", ["live"]),
      chart("Growth", "Parameters of the network that is kept / those of the host.", "growth"),
      chart("Return", "Sum of the rewards of an episode; it trains the controller and does not rank it.", "shaped_return"),
    ));
    onInterval(grid, zoom);
    return grid.childElementCount ? grid : say("No round lies in this interval.");
  };
  let update;
  const zoom = (domain) => {
    const whole = d3.extent(names.flatMap(xs)), [from, to] = domain ?? whole;
    update({ domain: domain && from < to ? [from, to] : null });
    fields.forEach((field, i) => { field.value = Number((shown.domain ?? whole)[i].toPrecision(4)); });
  };
  const fields = ["from", "to"].map((name) => el("input", { type: "number", step: "any", "aria-label": name, change: () => zoom(fields.map((field) => Number(field.value))) }));
  const made = redrawn(make, shown, (change) => {
    update = change;
    const axis = choice("Axis", Object.keys(AXES).map((name) => [name, name]), (name) => { shown.axis = name; zoom(null); });
    const span = choice("Average over", [1, 3, 10, 30].map((n) => [n, n === 1 ? "each round" : `${n} rounds`]), (n) => update({ span: Number(n) }));
    [axis, span].forEach((control, i) => { control.querySelector("select").value = [shown.axis, shown.span][i]; });
    return [span, axis, el("label", {}, "from ", fields[0]), el("label", {}, "to ", fields[1]), el("button", { type: "button", click: () => zoom(null) }, "all")];
  });
  zoom(shown.domain);
  return [say("Drag over a chart to see a part of the run; a double click shows all of it."), ...made];
}

function hostSection({ runs, hosts }) {
  const options = runs.flatMap((run) => hosts[run.run].map((round, i) => [`${run.run}\n${i}`, `${runs.length > 1 ? `${run.run}, ` : ""}round ${round.round} (${round.label})`]));
  if (!options.length) return say("No round is complete yet.");
  const find = ({ round }) => { const [run, i] = round.split("\n"); return [runs.find((r) => r.run === run), hosts[run][Number(i)]]; };
  const best = (round) => d3.greatestIndex(round.hosts, (a, b) => d3.ascending(a.fossilized > 0, b.fossilized > 0) || d3.ascending(a.objective ?? -Infinity, b.objective ?? -Infinity));  // of those that grew
  const state = { round: options[0][0], host: best(hosts[options[0][0].split("\n")[0]][0]) };
  const make = (state) => {
    const [run, round] = find(state);
    return hostView(run, round, round.hosts[state.host]);
  };
  const controls = (update) => {
    const list = el("select", { change: () => update({ host: Number(list.value) }) });
    const fill = () => {
      const [, round] = find(state);
      list.replaceChildren(...round.hosts.map((host, i) => el("option", { value: i }, `host ${host.host}: 100·J ${number(host.objective)}`)));
      list.value = state.host;
    };
    const move = (by) => { const [, round] = find(state); update({ host: (state.host + by + round.hosts.length) % round.hosts.length }); list.value = state.host; };
    fill();
    return [
      choice("Round", options, (round) => { state.round = round; update({ host: best(find(state)[1]) }); fill(); }),
      el("label", {}, "Host ", list),
      el("button", { type: "button", click: () => move(-1) }, "previous"), el("button", { type: "button", click: () => move(1) }, "next"),
    ];
  };
  return redrawn(make, state, controls);
}

const SEED_COLUMNS = [["slot", (s) => s.slot, true], ["blueprint", (s) => s.blueprint ?? "–", true], ["germinated in step", (s) => count(s.germinated_t)], ["fossilized", (s) => count(s.fossilized_t)],
  ["pruned", (s) => count(s.pruned_t)], ["parameters", (s) => count(s.params)], ["contribution", (s) => signed(s.contribution)]];

/** What the task says of a host, in words. */
const instanceOf = ({ instance }) => (instance && instance !== "null" ? ` Task instance: ${flat(JSON.parse(instance)).map(([name, value]) => `${words(name)} ${value}`).join(", ")}.` : "");

function hostView(run, round, host) {
  const series = NETWORKS.map((one) => ({ ...one, rows: host.steps.t.map((x, k) => ({ x, y: host.steps[one.ofStep][k] })) }));
  const blueprints = new Map(host.segments.map((s) => [s.slot, s.blueprint]));
  const results = `100·J ${number(host.objective)}, kept network ${number(host.committed)} %, growth ${number(host.growth)}×; ${host.germinated} germinated, ${host.fossilized} fossilized, ${host.pruned} pruned, ${host.rollbacks} rolled back.`;
  return present(
    el("p", {}, el("strong", {}, `Host ${host.host}: `), results, instanceOf(host)),
    lines({ title: "Accuracy", note: "Validation, %, after each step.", series, xLabel: "step", xDomain: [0.5, run.episode_length + 0.5], marginLeft: 60, height: 190 }),
    host.segments.length ? lanes({ host, slots: run.slots, length: run.episode_length })
      : host.seeds.length ? table(SEED_COLUMNS, host.seeds, "Seeds") : say("No seed germinated in this episode."),
    host.waterfall ? waterfall({ parts: host.waterfall, blueprints }) : say("The final network was not measured without its seeds, so their parts are unknown."),
    host.waterfall?.shapley ? say("Shapley values (points): " + Object.entries(host.waterfall.shapley).map(([slot, value]) => `${slot} ${signed(value)}`).join(", ") + ".") : null,
    round.total > round.hosts.length ? say(`${round.total - round.hosts.length} more hosts of this round are left out.`) : null,
  );
}

function seedSection({ runs, seeds }) {
  const share = (name) => (row) => `${number(100 * row[name] / row.germinated, 0)} %`;
  const columns = [
    ["blueprint", (row) => row.blueprint ?? "–", true], ["germinated", (row) => count(row.germinated)], ["fossilized", share("fossilized")], ["pruned", share("pruned")],
    ["contribution, points", (row) => signed(row.contribution)], ["parameters", (row) => number(row.params, 0)],
    ["points per 1,000 parameters", (row) => (row.params ? signed((1000 * row.contribution) / row.params) : "–")], ["steps until decided", (row) => number(row.age, 1)],
  ];
  const make = ({ phase }) => runs.filter((run) => seeds[run.run][phase].length).map((run) => el("div", {}, runs.length > 1 ? el("h3", {}, run.run) : null, table(columns, seeds[run.run][phase], "Seeds by blueprint")));
  if (runs.every((run) => !seeds[run.run].last.length)) return say("No seed was recorded.");
  return [say("Contribution and parameters are means over the fossilized seeds."),
    redrawn(make, { phase: "last" }, (update) => choice("Rounds", [["last", "last quarter"], ["first", "first quarter"]], (phase) => update({ phase })))];
}

function evaluationSection({ runs, evaluation }) {
  if (!evaluation.length) return el("p", {}, "Not evaluated yet: ", el("code", {}, `esper evaluate ${runs[0]?.path ?? "RUN"} --out ${runs[0]?.path ?? "RUN"}/evaluation`), " compares the controller with the baselines on new hosts.");
  return evaluation.map((found) => [evaluation.length > 1 ? el("h3", {}, `On ${found.task}`) : null, ...evaluationOf(found, named(runs))]);
}

/** The evaluations of one task: the newest of each run. */
function evaluationOf({ rows: found, sources }, label) {
  const rows = found.map((row) => ({ ...row, label: [label(row.run), row.controller].filter(Boolean).join(" ") }));
  const [most, least] = [d3.max(rows, (row) => row.growth), d3.min(rows, (row) => row.growth)];
  const older = sources.filter((source) => source.older.length);
  return [
    ...older.map(({ run, file, older }) => say(`${label(run) && `${run}: `}${file} is the newest evaluation on this task and is shown; not shown: ${older.join(", ")}.`)),
    el("div", { class: "grid" }, present(
      frontier({ title: "Accuracy against size", note: "Validation, %, of the network that is kept, against its parameters (host = 1), with 95 % intervals over the hosts.", rows, x: "growth", xLabel: "growth", y: "committed", log: least > 0 && most / least > 8 }),
      frontier({ title: "Accuracy against training cost", note: "The same against the operations that training a host took.", rows, x: "training_flops", xLabel: "training FLOPs per host", y: "committed", log: false }),
    )),
    table([
      ["controller", (row) => row.label, true], ["100·J ± 95 %", (row) => plusMinus(row.objective, row.objective_half)],
      ["− reference, 95 %", (row) => (row.difference?.mean ? `${signed(row.difference.mean)} [${signed(row.difference.low)}, ${signed(row.difference.high)}]` : "–")],
      ["validation %", (row) => number(row.committed)], ["test %", (row) => number(row.test)], ["growth", (row) => number(row.growth)],
      ["training FLOPs", (row) => (row.training_flops ? d3.format(".3~s")(row.training_flops) : "–")], ["hosts", (row) => count(row.hosts)],
    ], rows, "Evaluated controllers"),
  ];
}

const STAGE_NAMES = { "-1": "no seed", 0: "fossils only", 1: "germinated", 2: "training", 3: "blending", 4: "holding" };
const QUARTERS = { 1: "lowest quarter", 2: "second", 3: "third", 4: "highest quarter" };

/** Counts as shares of their group: rows of {x or name, part, value, of}. */
function sharesOf(rows, group, waiting, name) {
  const totals = d3.rollup(rows, (rs) => d3.sum(rs, (r) => r.times), (r) => r[group]);
  return rows.filter((r) => waiting || r.op !== "wait").map((r) => ({ ...name(r), part: r.op, value: r.times / totals.get(r[group]), of: totals.get(r[group]) }));
}

function behaviourSection({ runs, behaviour }) {
  const make = ({ run, waiting }) => {
    const { operations } = behaviour[run], phases = Object.entries(behaviour[run].phases), hosts = runs.find((r) => r.run === run).num_envs;
    const over = ([, phase]) => (phase.rounds[0] === phase.rounds[1] ? `round ${phase.rounds[0]}` : `rounds ${phase.rounds[0]} to ${phase.rounds[1]}`);
    const each = (draw) => phases.flatMap((phase) => draw(phase[1], over(phase)));
    const slots = runs.find((r) => r.run === run).slots;
    const preferred = d3.groupSort(phases.flatMap(([, phase]) => phase.blueprint), (g) => -d3.sum(g, (r) => r.times), (r) => r.blueprint);
    const heaps = (group, rows) => d3.max(d3.rollups(sharesOf(rows, group, waiting, (r) => ({ name: r[group] })), (rs) => d3.sum(rs, (r) => r.value), (r) => r.name), (r) => r[1]) ?? 0;
    const top = (column, group) => d3.max(phases, ([, phase]) => heaps(group, phase[column] ?? [])) || 1;
    const situations = (group, names) => (phase, rounds) => {
      const rows = sharesOf(phase[group], group === "stage" ? "rank" : "quarter", waiting, (r) => ({ name: names[r.rank ?? r.quarter] }));
      const order = Object.keys(names).map(Number).sort((a, b) => a - b).map((key) => names[key]).filter((name) => rows.some((r) => r.name === name));
      return shares({ title: group === "stage" ? `By most advanced seed, ${rounds}` : `By accuracy among the hosts, ${rounds}`, rows, colors: OPERATIONS, names: order, top: top(group, group === "stage" ? "rank" : "quarter") });
    };
    const inSlots = (phase, rounds) => {
      const totals = d3.rollup(phase.blueprint, (rs) => d3.sum(rs, (r) => r.times), (r) => r.slot);
      return heat({ title: `Blueprints by slot, ${rounds}`, note: "Share of the seeds germinated in the slot.", xs: slots, ys: preferred, rows: phase.blueprint.map((r) => ({ x: r.slot, y: r.blueprint, value: r.times / totals.get(r.slot), times: r.times })) });
    };
    const overRounds = bars({ title: "Over the rounds", note: "Operations that took effect, per host and round.", colors: OPERATIONS, xLabel: "round", key: false,
      rows: Object.keys(OPERATIONS).filter((op) => waiting || op !== "wait").flatMap((op) => (operations.round ?? []).map((x, i) => ({ x, part: op, value: (operations[`ops_${op}`][i] ?? 0) / hosts }))) });
    const grid = el("div", { class: "grid" }, present(
      overRounds, overRounds && phases.length ? el("div") : null,
      each((phase, rounds) => bars({ title: `By step of the episode, ${rounds}`, colors: OPERATIONS, xLabel: "step", percent: true, key: false, top: top("step", "t"),
        rows: sharesOf(phase.step, "t", waiting, (r) => ({ x: r.t + (r.width - 1) / 2 })) })),
      each((phase, rounds) => (phase.stage ? situations("stage", STAGE_NAMES)(phase, rounds) : [])), each(situations("accuracy", QUARTERS)), each(inSlots)));
    return grid.childElementCount ? grid : say("No decision was recorded.");
  };
  const recorded = runs.filter((run) => Object.keys(behaviour[run.run].phases).length);
  if (!recorded.length) return say("No round is complete yet.");
  const key = keys(Object.entries(OPERATIONS).map(([name, color]) => ({ name: words(name), color, fill: true })));
  return [say("Share of all decisions in a situation, in the first and the last quarter of the rounds."), key,
    redrawn(make, { run: recorded[0].run, waiting: false }, (update) => [
      recorded.length > 1 ? choice("Run", recorded.map((r) => [r.run, r.run]), (run) => update({ run })) : null,
      toggle("show waiting", (waiting) => update({ waiting }))].filter(Boolean))];
}

function importanceSection({ runs, importance }) {
  const make = ({ run }) => {
    const found = importance[run];
    if (!found.groups) return say(`Not measured: ${found.why}`);
    const rows = d3.sort(found.groups, (row) => -row.kl), heaps = ["all", "what", "where"].map((kind) => rows.filter((row) => row.kind === kind));
    const names = heaps.flatMap((heap, i) => [...heap.map((row) => row.group), " ".repeat(i + 1)]).slice(0, -1);  // blank between them
    const chart = (title, note, name, percent) => ranked({ title, note, percent, names, rows: rows.filter((row) => row[name] !== null).map((row) => ({ name: row.group, value: row[name], half: row[`${name}_half`] })) });
    return present(
      say(`Measured ${found.controller} on ${found.hosts} new hosts (${found.decisions} decisions with more than waiting to choose from): the policy is asked again with one group of its inputs taken from another host, in all steps of the episode, ${found.others} others for each host; legal operations stay. The step of the episode, which all hosts share, is taken from another step. Lines: 95 % intervals over the hosts. Groups share information, so that parts do not sum to the whole.`),
      el("div", { class: "grid small" }, present(
        chart("Changed probabilities", "KL divergence of the operations, nats.", "kl", false),
        chart("Changed decisions", "Another operation becomes the most probable.", "changed", true),
        chart("Changed value", "Mean absolute change (scaled return).", "value", false))),
      table([["inputs", (row) => row.group, true], ["KL, nats ± 95 %", (row) => (row.kl === null ? "–" : `${number(row.kl, 4)} ± ${number(row.kl_half, 4)}`)],
        ["changed decisions", (row) => (row.changed === null ? "–" : `${number(100 * row.changed, 1)} % ± ${number(100 * row.changed_half, 1)}`)],
        ["value", (row) => (row.value === null ? "–" : `${number(row.value, 4)} ± ${number(row.value_half, 4)}`)],
        ["columns", (row) => columnsOf(row.columns), true]], heaps.flat(), "What the controller looks at"));
  };
  const places = d3.sort(runs.map((run) => run.run), (run) => (importance[run].groups ? 0 : 1));
  return redrawn(make, { run: places[0] }, (update) => (places.length > 1 ? choice("Run", places.map((run) => [run, run]), (run) => update({ run })) : []));
}

/** Names of columns, where few enough to read. */
const columnsOf = (names) => (names.length > 15 ? `${names.length} columns` : names.join(", "));

function rewardSection({ runs, rewards }) {
  const make = ({ run }) => {
    const { rounds, steps, since } = rewards[run];
    const terms = [...new Set([...rounds, ...steps].map((row) => row.term))];
    const colors = Object.fromEntries(terms.map((term, i) => [term, [...SERIES, C.yellow, C.grey][i % 8]]));
    const chart = (title, note, rows, x) => bars({ title, note, colors, xLabel: x === "t" ? "step" : "round",
      rows: rows.map((row) => ({ x: row[x], part: row.term, value: row.value })),
      line: d3.rollups(rows, (rs) => d3.sum(rs, (r) => r.value), (r) => r[x]).map(([x, y]) => ({ x, y })).sort((a, b) => a.x - b.x) });
    return el("div", { class: "grid" }, present(
      chart("Over the rounds", "Sum over an episode, mean of the hosts.", rounds, "round"),
      chart("Over the steps of an episode", `Mean of the hosts since round ${since}.`, steps, "t")));
  };
  const recorded = runs.filter((run) => rewards[run.run].rounds.length);
  if (!recorded.length) return say("No reward term was recorded.");
  return redrawn(make, { run: recorded[0].run }, (update) => (recorded.length > 1 ? choice("Run", recorded.map((r) => [r.run, r.run]), (run) => update({ run })) : []));
}

function ppoSection({ runs, ppo }) {
  const label = named(runs);
  const make = ({ log }) => el("div", { class: "grid small" }, present(Object.entries(ppo.charts).map(([title, columns]) => {
    const series = runs.flatMap((run, i) => columns.filter((name) => ppo.runs[run.run][name]).map((name, k) => ({
      name: [label(run.run), columns.length > 1 ? words(name.replace("entropy_", "")) : ""].filter(Boolean).join(" ") || title,
      ...style(columns.length > 1 ? k : i), ...(columns.length > 1 && runs.length > 1 ? { dash: DASHES[i % DASHES.length] } : {}),
      rows: rowsOf(ppo.runs[run.run], name) })));
    const limits = ppo.thresholds.filter((limit) => columns.includes(limit.column));
    const both = columns.length > 1 && runs.length > 1;
    const legend = both ? keys([...columns.map((name, k) => ({ name: words(name.replace("entropy_", "")), ...style(k), dash: "none" })), ...runs.map((run, i) => ({ name: run.run, color: "currentColor", dash: DASHES[i % DASHES.length] }))]) : undefined;
    const merged = columns.length > 1 && limits.length ? [{ value: d3.max(limits, (l) => l.value), label: "alarms of the heads: " + d3.extent(limits, (l) => l.value).join(" to ") }] : limits;
    return lines({ title, series, limits: merged, digits: 4, legend, log });
  })));
  if (!make({}).childElementCount) return say("No update was recorded.");
  return redrawn(make, { log: false }, (update) => toggle("logarithmic, where all values are positive", (log) => update({ log })));
}

/** Nested values as [dotted name, text]. */
const flat = (value, prefix = "") => (value !== null && typeof value === "object" && !Array.isArray(value)
  ? Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key)) : [[prefix, Array.isArray(value) ? value.join(", ") : value === null ? "" : String(value)]]);

function settingSection({ runs, curves, anomalies }) {
  const label = named(runs);
  const cost = (title, note, column, digits) => lines({ title, note, digits, series: runs.filter((run) => curves[run.run]?.round).map((run, i) => ({ name: label(run.run) || title, ...style(i), rows: rowsOf(curves[run.run], column) })) });
  const costs = present(cost("Speed", "Env-steps per second, with the update.", "env_steps_per_s", 0), cost("Memory", "Peak of the process, of the GPU where there is one; GiB.", "memory", 2));
  const maps = runs.map((run) => new Map([...flat({ version: run.version, commit: run.commit, device: run.device, started: run.started }), ...flat(run.environment, "environment"), ...flat(run.config)]));
  const names = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const differs = (name) => new Set(maps.map((map) => map.get(name))).size > 1;
  const make = ({ filter, different }) => table([["setting", (name) => name, true], ...runs.map((run, i) => [run.run, (name) => maps[i].get(name) || "–", true])],
    names.filter((name) => name.includes(filter) && (!different || differs(name))), "Settings");
  const search = (update) => { const input = el("input", { type: "search", input: () => update({ filter: input.value }) }); return el("label", {}, "Find ", input); };
  const list = anomalies.newest.length ? [el("h3", {}, "Anomalies, newest first"), table([
    ["run", (a) => a.run, true], ["round", (a) => count(a.round)], ["step", (a) => count(a.t)], ["host", (a) => (a.host === null || a.host < 0 ? "all" : count(a.host))], ["kind", (a) => words(a.kind), true],
    ["value", (a) => count(a.value, 3)], ["threshold", (a) => count(a.threshold, 3)], ["what to do", (a) => a.advice ?? "–", true]], anomalies.newest, "Anomalies")] : [];
  const state = { filter: "", different: runs.length > 1 && names.some(differs) };
  return [...list, el("div", { class: "grid" }, costs), el("h3", {}, "Settings and environment"), ...redrawn(make, state, (update) => {
    const box = toggle("only those that differ", (different) => update({ different }));
    box.querySelector("input").checked = state.different;
    return runs.length > 1 ? [search(update), box] : [search(update)];
  })];
}

const SECTIONS = [
  { id: "result", title: "Result", needs: ["runs", "evaluation", "anomalies", "differences"], draw: summary },
  { id: "curves", title: "Learning", needs: ["runs", "curves"], draw: curveSection },
  { id: "hosts", title: "Growth of a host", needs: ["runs", "hosts"], draw: hostSection },
  { id: "frontier", title: "Against baselines", needs: ["runs", "evaluation"], draw: evaluationSection },
  { id: "seeds", title: "Which seeds paid off", needs: ["runs", "seeds"], draw: seedSection },
  { id: "behaviour", title: "What the controller does", needs: ["runs", "behaviour"], draw: behaviourSection },
  { id: "importance", title: "What the controller looks at", needs: ["runs", "importance"], draw: importanceSection },
  { id: "rewards", title: "Reward", needs: ["runs", "rewards"], draw: rewardSection },
  { id: "ppo", title: "Health of PPO", needs: ["runs", "ppo"], draw: ppoSection },
  { id: "settings", title: "Speed, settings", needs: ["runs", "curves", "anomalies"], draw: settingSection },
];

/** What the page is about: a heading and a line. */
function heading(runs) {
  const about = runs.length === 1 ? [runs[0]].map((run) => [`task ${run.task}`, run.data && run.data !== run.task ? `data ${run.data}` : "", `preset ${run.preset}`, `reward ${run.reward}`, `seed ${run.seed}`, run.commit ? `commit ${run.commit.slice(0, 10)}` : "", run.device, run.started?.slice(0, 16)].filter(Boolean).join(" · ")) : [`${runs.length} runs`];
  return [el("h1", {}, runs.map((run) => run.run).join(", ") || "Report"), say(about[0])];
}

/** A section with what it draws; without a title it goes on with the one before. */
const framed = ({ id, title }, ...content) => el("section", { id, "aria-labelledby": title && `${id}-title` }, title && el("h2", { id: `${id}-title` }, title), ...content);

/** Draws all sections with the payloads that `load(name)` promises. */
async function start(load) {
  const [title, about] = heading(await load("runs"));
  document.title = title.textContent;
  document.querySelector("header").replaceChildren(title, about);
  document.querySelector("nav").replaceChildren(el("ul", {}, SECTIONS.map(({ id, title }) => el("li", {}, el("a", { href: `#${id}` }, title)))));
  document.querySelector("main").replaceChildren(...await Promise.all(SECTIONS.map(async (section) => {
    const payloads = Object.fromEntries(await Promise.all(section.needs.map(async (name) => [name, await load(name)])));
    return framed(section, section.draw(payloads));
  })));
}
