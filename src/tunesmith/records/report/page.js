// The page's tabs. What is looked at (the view) is in the address after #, so that a link or a reload shows it again.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
let model = data.model;
const token = new URLSearchParams(location.search).get("token");

const view = {
  tab: "Curves", weight: 0, x: "step", log: false, only: "", hidden: [], run: 0, kind: "", status: "", first: "", last: "", text: "",
  colour: "logprob", settings: "said", ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
};
view.weight = Number(view.weight);
view.run = Math.min(Number(view.run), model.runs.length - 1);
view.log = view.log === true || view.log === "true";
view.hidden = typeof view.hidden === "string" ? view.hidden.split(",").filter(Boolean) : view.hidden;
const closed = new Set(["time", "critic", "other"]);

function remember() {
  const kept = Object.entries(view).filter(([, value]) => value !== "" && value !== false && String(value) !== "");
  history.replaceState(null, "", `${location.search}#${new URLSearchParams(kept)}`);
}

const runColour = (n) => COLOURS[n % COLOURS.length];
const visibleRuns = () => model.runs.map((run, n) => ({ ...run, n, colour: runColour(n) })).filter((run) => !view.hidden.includes(run.name));

// Where rollouts come from: the sample in a written report, or the server of `watch`, which pages through all of them.

async function ask(path, parameters) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { headers: { Authorization: `Bearer ${token}` } });
  if (response.status === 204) return null;
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

async function findGroups(start) {
  if (data.live) return ask("api/groups", { run: view.run, kind: view.kind, status: view.status, first: view.first, last: view.last, text: view.text, start });
  const groups = data.rollouts[view.run].filter(fits).reverse();
  return { groups: groups.slice(Number(start || 0), Number(start || 0) + 200), next: groups.length > Number(start || 0) + 200 ? Number(start || 0) + 200 : null };
}

async function linesOf(group) {
  return group.lines || (await ask("api/lines", { run: view.run, place: group.place })).lines;
}

// The same as Query in rollouts.py.
function fits(group) {
  const unequal = group.low !== null && group.low !== group.high;
  const text = view.text.toLowerCase();
  return (!view.kind || group.kind === view.kind)
    && (view.first === "" || group.step >= Number(view.first)) && (view.last === "" || group.step <= Number(view.last))
    && ({ failed: group.failed > 0, contrast: unequal, equal: !unequal && group.low !== null }[view.status] ?? true)
    && (!text || group.lines.some((line) => texts(line).some((part) => part.toLowerCase().includes(text))));
}

function texts(line) {
  const whole = ["task", "prompt", "completion", "error", "status", "columns", "notes"].map((name) => line[name]).filter((value) => value !== null && value !== undefined);
  const parts = Array.isArray(line.parts) ? line.parts.map((part) => String(part.text)) : [];
  return [...whole.map((value) => (typeof value === "string" ? value : JSON.stringify(value))), ...parts];
}

// Controls

function choice(label, name, options, after = show) {
  const select = make("select", { onchange: (event) => { view[name] = event.target.value; after(); } },
    ...options.map(([value, text]) => make("option", { value: String(value), selected: String(view[name]) === String(value) }, text)));
  return make("label", {}, label, select);
}

function field(label, name, type, after = show, properties = {}) {
  let timer = null;
  const input = make("input", { type, value: view[name], ...properties, oninput: (event) => {
    view[name] = event.target.value;
    clearTimeout(timer);
    timer = setTimeout(after, 200);
  } });
  return make("label", {}, label, input);
}

// Tabs: `controls` and `body` return the elements to show.

const tabs = {
  Curves: {
    controls: () => [
      make("label", {}, "Smoothing", make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.weight, oninput: (event) => { view.weight = Number(event.target.value); show(); } })),
      choice("Over", "x", [["step", "steps"], ["time", "hours"], ["total_tokens", "tokens"]]),
      make("label", {}, make("input", { type: "checkbox", checked: view.log, onchange: (event) => { view.log = event.target.checked; show(); } }), "Logarithmic"),
      field("Metrics", "only", "search", show, { placeholder: "reward, entropy …", "data-search": "" }),
    ],
    body: curvesBody,
  },
  Time: { body: timeBody },
  Rollouts: { controls: rolloutControls, body: rolloutsBody },
  Evaluations: { body: evaluationsBody },
  Settings: {
    controls: () => [
      choice("Show", "settings", [["said", "said and derived"], ["differ", "what differs between runs"], ["all", "all"]]),
      field("Keys", "only", "search", show, { "data-search": "" }),
    ],
    body: settingsBody,
  },
  Memory: { body: memoryBody },
  Findings: { body: findingsBody },
};

const MAIN = ["reward", "eval/accuracy", "eval/reward", "loss", "eval/loss", "accuracy", "completion_tokens", "entropy", "grad_norm", "policy_kl", "truncated", "tokens_per_second"];
const GROUPS = { main: "Main", rollouts: "Rollouts", learning: "Learning", preferences: "Preferences", evaluation: "Evaluations", critic: "Critic", time: "Time and pipeline", other: "Others" };

function xOf(run, curves) {
  if (view.x === "time") return curves.time.map((time) => (time === null ? null : (time - (run.curves.time[0] ?? curves.time[0])) / 3600));
  const tokens = run.curves.metrics.total_tokens;
  if (view.x !== "total_tokens" || !tokens) return curves.step;
  return curves.step.map((step) => (run.curves.step.length && step >= run.curves.step[0] ? tokens.mean[nearest(run.curves.step, step)] : 0));
}

function chartOf(name) {
  const series = visibleRuns().flatMap((run) => {
    const curves = name.startsWith("eval/") ? run.evaluations : run.curves;
    return curves.metrics[name] ? [{ name: run.name, colour: run.colour, x: xOf(run, curves), ...curves.metrics[name] }] : [];
  });
  if (!series.length) return null;
  const about = model.metrics[name] || {};
  const xName = { step: "step", time: "hour", total_tokens: "token" }[view.x];
  return lineChart(name, series, { unit: about.unit, meaning: about.meaning, weight: name.startsWith("eval/") ? 0 : view.weight, log: view.log, xName });
}

function curvesBody() {
  const names = Object.keys(model.metrics).filter((name) => !view.only || name.toLowerCase().includes(view.only.toLowerCase()));
  const grouped = { main: MAIN.filter((name) => names.includes(name)) };
  for (const name of names) (grouped[model.metrics[name].group] ||= []).push(name);
  const sections = Object.keys(GROUPS).filter((key) => grouped[key] && grouped[key].length).map((key) => {
    const charts = make("div", { class: "charts" });
    const fill = () => charts.replaceChildren(...grouped[key].map(chartOf).filter(Boolean));
    const section = make("details", { open: Boolean(view.only) || !closed.has(key), ontoggle: () => {
      if (view.only) return;
      if (section.open) { closed.delete(key); if (!charts.children.length) fill(); } else closed.add(key);
    } }, make("summary", {}, `${GROUPS[key]} (${grouped[key].length})`), charts);
    if (section.open) fill();
    return section;
  });
  return sections.length ? sections : [make("p", { class: "faint" }, names.length ? "" : "No metric to show.")];
}

function timeBody() {
  return visibleRuns().flatMap((run) => {
    const total = Object.values(run.seconds).reduce((a, b) => a + b, 0);
    const planned = (run.plan && run.plan.seconds) || {};
    const phases = Object.keys(run.seconds).filter((name) => run.curves.metrics[`seconds/${name}`]);
    const rows = Object.entries(run.seconds).map(([name, seconds], n) => make("tr", {},
      make("td", {}, swatch(COLOURS[n % COLOURS.length]), ` ${name}`), make("td", { class: "number" }, duration(seconds)),
      make("td", { class: "number" }, total ? `${((seconds / total) * 100).toFixed(1)}%` : "–"),
      make("td", {}, bar(seconds / (total || 1)))));
    const idle = Object.keys(run.curves.metrics).filter((name) => name.startsWith("idle/") && !/\/(min|max)$/.test(name));
    const ranks = Object.keys(run.curves.metrics).filter((name) => /^rank_(busy|waiting)\/\d+$/.test(name));
    const shares = (title, names, label) => names.length ? lineChart(title, names.map((name, n) => ({ name: label(name), colour: COLOURS[n % COLOURS.length], x: run.curves.step, mean: run.curves.metrics[name].mean })), { unit: "share", weight: view.weight }) : null;
    return [
      make("h2", {}, `${run.name}: where the time went`),
      rows.length ? make("table", {}, ...rows) : make("p", { class: "faint" }, "No step is complete yet."),
      run.curves.step.length && phases.length ? stackedChart("Seconds of a step by phase", run.curves.step,
        phases.map((name) => ({ name, colour: COLOURS[Object.keys(run.seconds).indexOf(name) % COLOURS.length], values: run.curves.metrics[`seconds/${name}`].mean }))) : null,
      shares("Idle share by actor", idle, (name) => name.slice(5)),
      shares("Computing and waiting, by rank of the trainer", ranks, (name) => name.replace("rank_", "").replace("/", " of rank ")),
      Object.keys(planned).length ? table("Seconds planned for a step", Object.entries(planned).map(([name, seconds]) => [name, duration(seconds)])) : null,
      make("h2", {}, `${run.name}: who did what in a step`),
      ...run.traces.map((trace) => timelineChart(trace)),
      run.traces.some((trace) => trace.metrics) ? make("p", { class: "faint" }, "Metrics tell how long each phase and each actor took, not when an engine or a reward worked. ",
        make("code", {}, "monitor.trace_steps=[2]"), " records every request of step 2.") : null,
    ];
  });
}

function bar(share) {
  const element = make("div", { class: "bar" });
  element.style.width = `${Math.max(0, Math.min(1, share)) * 14}rem`;
  return element;
}

function table(title, rows, headings = []) {
  const [first, ...others] = headings;
  const head = first ? make("tr", {}, make("th", {}, first), ...others.map((text) => make("th", { class: "number" }, text))) : null;
  return make("div", { class: "scroll" }, title ? make("h2", {}, title) : null, make("table", {}, head, ...rows.map(([name, ...cells]) =>
    make("tr", {}, make("td", {}, name), ...cells.map((cell) => make("td", { class: "number" }, cell))))));
}

// Rollouts

let groups = [], selected = -1, nextStart = null, asked = 0;

function rolloutControls() {
  const again = () => { remember(); search(); };
  return [
    model.runs.length > 1 ? choice("Run", "run", model.runs.map((run, n) => [n, run.name]), () => { view.run = Number(view.run); again(); }) : null,
    choice("Kind", "kind", [["", "all"], ["train", "training"], ["eval", "evaluations"]], again),
    choice("Groups", "status", [["", "all"], ["contrast", "unequal rewards"], ["equal", "equal rewards"], ["failed", "with failures"]], again),
    field("Steps", "first", "number", again, { min: 0, "aria-label": "first step" }),
    field("to", "last", "number", again, { min: 0, "aria-label": "last step" }),
    field("Text", "text", "search", again, { "data-search": "" }),
    choice("Colour tokens by", "colour", [["logprob", "log-probability"], ["advantage", "advantage"], ["ratio", "ratio"], ["version", "version"], ["none", "nothing"]], () => { remember(); openGroup(selected); }),
  ].filter(Boolean);
}

function rolloutsBody() {
  const run = model.runs[view.run];
  const about = data.live ? null : data.rollouts[view.run].length < run.rollouts.groups
    ? make("p", { class: "notice" }, `This file holds ${data.rollouts[view.run].length} of ${run.rollouts.groups} groups, spread over the run. `, make("code", {}, `tunesmith watch ${run.path}`), " pages through all of them.") : null;
  setTimeout(search);
  return [about, make("p", { id: "found", class: "faint", role: "status" }),
    make("div", { class: "rollouts" }, make("div", { id: "list", class: "list", role: "listbox", "aria-label": "Groups" }), make("div", { id: "group" }))];
}

async function search() {
  const mine = ++asked;
  const answer = await findGroups("").catch((error) => ({ groups: [], next: null, error }));
  if (mine !== asked || view.tab !== "Rollouts") return;
  groups = answer.groups;
  nextStart = answer.next;
  fillList(answer.error);
  openGroup(groups.length ? 0 : -1);
}

async function more() {
  const answer = await findGroups(nextStart);
  groups = groups.concat(answer.groups);
  nextStart = answer.next;
  fillList();
}

// What was written since the list was made, perhaps further rollouts of a group in it; what is looked at stays. A search for text is not repeated.
async function addNewGroups() {
  const newest = view.text ? [] : (await findGroups("")).groups;
  const places = new Set(newest.map((group) => group.place)), before = groups.length;
  groups = [...newest, ...groups.filter((group) => !places.has(group.place))];
  if (selected < 0 && groups.length) openGroup(0);
  else if (selected >= 0) selected += groups.length - before;
  fillList();
}

function fillList(error) {
  const run = model.runs[view.run];
  byId("found").textContent = error ? printable(String(error)) : `${groups.length}${nextStart === null ? "" : " or more"} groups found; ${run.rollouts.groups} in the run's files (${bytes(run.rollouts.bytes)})`;
  const buttons = groups.map((group, n) => make("button", { role: "option", "aria-selected": String(n === selected), onclick: () => openGroup(n) },
    make("strong", {}, `${group.kind === "eval" ? "evaluation after step" : "step"} ${group.step}`), ` · ${group.task || `group ${group.number}`}`, make("br"),
    make("span", { class: "faint" }, `${group.rollouts} rollout${group.rollouts === 1 ? "" : "s"}, reward ${group.low === null ? "–" : group.low === group.high ? shown(group.low) : `${shown(group.low)} … ${shown(group.high)}, mean ${shown(group.reward)}`}`),
    group.failed ? make("span", { class: "bad" }, ` ${group.failed} failed`) : null));
  if (nextStart !== null) buttons.push(make("button", { onclick: more }, "More …"));
  byId("list").replaceChildren(...buttons);
}

async function openGroup(n) {
  selected = n;
  const options = [...byId("list").querySelectorAll("[role=option]")];
  options.forEach((option, i) => option.setAttribute("aria-selected", String(i === n)));
  if (options[n]) options[n].scrollIntoView({ block: "nearest" });
  if (n < 0) { byId("group").replaceChildren(); return; }
  const group = groups[n], lines = await linesOf(group);
  if (selected !== n || view.tab !== "Rollouts") return;
  byId("group").replaceChildren(...(lines.length ? groupShown(lines) : [make("p", { class: "faint" }, "This group is no longer in the run's files.")]));
}

function groupShown(lines) {
  const first = lines[0];
  const scale = colourScale(lines);
  return [
    make("h3", {}, `${first.task ?? ""}`),
    make("div", { class: "text prompt", tabIndex: 0 }, ...(first.rendered ? [first.rendered] : promptShown(first.prompt))),
    first.columns && Object.keys(first.columns).length ? make("p", { class: "faint" }, Object.entries(first.columns).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("  ·  ")) : null,
    make("p", { class: "faint" }, scale.legend),
    make("div", { class: "group" }, ...lines.map((line) => rolloutShown(line, scale))),
  ].filter(Boolean);
}

function promptShown(prompt) {
  if (!Array.isArray(prompt)) return [String(prompt ?? "")];
  return prompt.flatMap((message) => [make("strong", {}, `${message.role}: `), typeof message.content === "string" ? message.content : JSON.stringify(message.content), make("br")]);
}

function rolloutShown(line, scale) {
  const facts = [["advantage", shown(line.advantage)], ["tokens", shown(line.tokens)], ["ended by", line.finish_reason], ["versions", [...new Set(line.versions || [])].join(" … ")],
    ...Object.entries(line.rewards || {}).map(([name, value]) => [`reward ${name}`, shown(value)]),
    ...Object.entries(line.metrics || {}).map(([name, value]) => [name, shown(value)]),
    ...Object.entries(line.notes || {}).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])].filter(([, value]) => value !== undefined && value !== "");
  const failed = line.error !== null && line.error !== undefined;
  return make("article", { class: failed ? "rollout failed" : "rollout" },
    make("h3", {}, failed ? String(line.status) : `reward ${shown(line.reward)}`),
    failed ? make("p", { class: "bad" }, String(line.error)) : null,
    make("div", { class: "text", tabIndex: 0 }, ...partsShown(line, scale)),
    make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])));
}

// The policy's tokens, coloured; what the environment wrote; and where the conversation forked.
function partsShown(line, scale) {
  const tokens = line.by_token;
  const parts = Array.isArray(line.parts) ? line.parts : [{ by: "policy", text: line.completion ?? "", tokens: tokens ? tokens.text.length : 0 }];
  let at = 0;
  return parts.flatMap((part, n) => {
    const fork = n && part.record !== parts[n - 1].record ? make("p", { class: "faint" }, `record ${part.record}: the conversation was edited here`) : null;
    if (part.by !== "policy") return [fork, make("span", { class: "environment" }, String(part.text))].filter(Boolean);
    const start = at, stop = Math.min(at + part.tokens, tokens ? tokens.text.length : 0);
    at = stop;
    if (!tokens || stop - start !== part.tokens) return [fork, String(part.text)].filter(Boolean).map((p) => (typeof p === "string" ? make("span", {}, p) : p));
    return [fork, ...tokensShown(tokens, start, stop, scale)].filter(Boolean);
  });
}

const AT_ONCE = 4000;

function tokensShown(tokens, start, stop, scale) {
  const end = Math.min(stop, start + AT_ONCE);
  const spans = [];
  for (let i = start; i < end; i++) {
    const about = Object.keys(tokens).filter((name) => name !== "text").map((name) => `${name} ${shown(valueOf(tokens, name, i))}`);
    const logprob = valueOf(tokens, "logprob", i);
    if (logprob !== null && logprob !== undefined) about.push(`probability ${shown(Math.exp(logprob))}`);
    const span = make("span", { class: "token", title: about.join("\n") }, tokens.text[i]);
    span.style.backgroundColor = scale.colour(tokens, i);
    spans.push(span);
  }
  if (end < stop) {
    const button = make("button", { onclick: () => button.replaceWith(...tokensShown(tokens, end, stop, scale)) }, `${stop - end} more tokens`);
    spans.push(button);
  }
  return spans;
}

// A column of by_token is a list, or one number where all are equal.
function valueOf(tokens, name, i) {
  return Array.isArray(tokens[name]) ? tokens[name][i] : tokens[name];
}

function colourScale(lines) {
  const name = view.colour, values = [];
  for (const { by_token: tokens } of lines) {
    if (!tokens || tokens[name] === undefined) continue;
    for (const value of [tokens[name]].flat()) if (typeof value === "number") values.push(value);
  }
  const none = { colour: () => "", legend: name === "none" ? "" : `These rollouts have no ${name} by token.` };
  if (!values.length) return none;
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b)), most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const scales = {
    logprob: [(value) => `rgba(221, 80, 47, ${Math.min(0.75, -value / 6)})`, "The redder, the less likely the sampler thought the token: from probability 1 (no colour) to below 0.01."],
    advantage: [(value) => (value < 0 ? `rgba(201, 64, 100, ${(0.7 * -value) / most})` : `rgba(47, 158, 99, ${(0.7 * value) / most})`), `Green: to be made more likely; red: less likely. The strongest is ${shown(most)}.`],
    ratio: [(value) => (value < 1 ? `rgba(59, 120, 231, ${Math.min(0.75, -Math.log(value))})` : `rgba(221, 107, 47, ${Math.min(0.75, Math.log(value))})`), "Blue: the trainer thinks the token less likely than the sampler did; orange: more likely."],
    version: [(value) => `hsla(${(210 + 137 * (value - low)) % 360}, 60%, 55%, ${high === low ? 0.12 : 0.35})`, `Each version of the policy has its colour: ${low} to ${high}.`],
  };
  const [colour, legend] = scales[name];
  return { legend, colour: (tokens, i) => { const value = valueOf(tokens, name, i); return typeof value === "number" ? colour(value) : ""; } };
}

// Evaluations

function evaluationsBody() {
  const names = Object.keys(model.metrics).filter((name) => name.startsWith("eval/"));
  if (!names.length) return [make("p", { class: "faint" }, "These runs have no evaluation.")];
  const prompts = visibleRuns().filter((run) => run.evaluations.prompts).map((run) => `${run.name}: ${run.evaluations.prompts}`);
  return [
    make("p", { class: "faint" }, `Bands and brackets are 95% intervals for the number of held-out prompts (${prompts.join(", ") || "unknown"}).`),
    make("div", { class: "charts" }, ...names.map(chartOf).filter(Boolean)),
    ...visibleRuns().flatMap((run) => [
      make("h2", {}, `${run.name}: first and last`),
      table("", names.filter((name) => run.evaluations.metrics[name]).map((name) => {
        const curve = run.evaluations.metrics[name];
        return [name, ...firstAndLast(curve.mean).map((i) => withInterval(curve, i, model.metrics[name].unit))];
      }), ["metric", ...firstAndLast(run.evaluations.step).map((i) => `step ${run.evaluations.step[i]}`)]),
      run.examples.length ? make("h2", {}, `${run.name}: answers before and after`) : null,
      ...run.examples.map((pair) => make("article", { class: "rollout" }, make("div", { class: "text prompt" }, ...promptShown(pair.before.prompt)),
        make("div", { class: "group" }, ...["before", "after"].map((when) => make("div", {},
          make("h3", {}, `${when}: step ${pair[when].step}, reward ${shown(pair[when].reward)}`), make("div", { class: "text" }, String(pair[when].completion ?? ""))))))),
    ]).filter(Boolean),
  ];
}

const firstAndLast = (values) => [...new Set([0, values.length - 1])].filter((i) => i >= 0);

function withInterval(curve, i, unit) {
  const value = withUnit(curve.mean[i], unit);
  return curve.low && curve.low[i] !== null ? `${value} [${withUnit(curve.low[i], unit)}, ${withUnit(curve.high[i], unit)}]` : value;
}

// Settings, memory, findings

function settingsBody() {
  const runs = visibleRuns();
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const text = (run, key) => (run.settings[key] ? JSON.stringify(run.settings[key].value) : "–");
  const differs = (key) => new Set(runs.map((run) => text(run, key))).size > 1;
  const wanted = keys.filter((key) => key.includes(view.only) && (view.settings === "all" || differs(key)
    || (view.settings === "said" && runs.some((run) => run.settings[key] && run.settings[key].source !== "default"))));
  const rows = wanted.map((key) => make("tr", { class: runs.length > 1 && differs(key) ? "differs" : "" }, make("td", { class: "value" }, key),
    ...runs.flatMap((run) => [make("td", { class: "value" }, text(run, key)),
      make("td", { class: "faint" }, run.settings[key] ? run.settings[key].reason || { said: "as you said", default: "the default" }[run.settings[key].source] || "" : "")])));
  return [
    make("div", { class: "scroll" }, make("table", {}, make("tr", {}, make("th", {}, "key"), ...runs.flatMap((run) => [make("th", {}, run.name), make("th", {}, "why")])), ...rows)),
    rows.length ? null : make("p", { class: "faint" }, view.settings === "differ" ? "Nothing differs." : "No setting to show."),
    ...runs.flatMap((run) => run.notes.map((note) => make("p", { class: "notice" }, `${run.name}: ${note}`))),
  ];
}

function memoryBody() {
  return visibleRuns().flatMap((run) => {
    const measured = (name) => (run.curves.metrics[name] ? Math.max(...(run.curves.metrics[name].high || run.curves.metrics[name].mean).filter((v) => v !== null)) : null);
    const plans = run.plan ? run.plan.memory : [];
    const parts = plans.flatMap((device) => Object.entries(device.roles).flatMap(([role, of]) => Object.keys(of).map((part) => `${role}: ${part}`)));
    const phases = plans.flatMap((device) => Object.keys(device.phases));
    const planned = (of) => plans.map((device) => { const amount = of(device); return amount === undefined ? "" : bytes(amount); });
    const known = (name) => (measured(name) === null ? "" : bytes(measured(name)));
    const rows = [
      ...[...new Set(parts)].map((name) => [name, ...planned((device) => (device.roles[name.split(": ")[0]] || {})[name.split(": ")[1]]), name.endsWith(": kv") ? known("kv_peak") : ""]),
      ...[...new Set(phases)].map((phase) => [`while ${phase}`, ...planned((device) => device.phases[phase]), ""]),
      ["at most, at once", ...planned((device) => device.peak), known("memory/device_peak")],
      ["host memory", ...planned((device) => device.host || undefined), known("memory/host_peak")],
      ["free when the run began", ...planned((device) => device.free), ""],
    ].filter((row) => row.slice(1).some(Boolean));
    return [
      rows.length ? table(`${run.name}: planned and measured at most`, [["", ...plans.map((device) => `planned, ${device.device}`), "measured"], ...rows]) : make("p", { class: "faint" }, `${run.name}: nothing was measured yet.`),
      measured("memory/host_peak") !== null && measured("memory/device_peak") === null ? make("p", { class: "faint" }, "On a CPU all is host memory of the trainer's process, which also holds Python, its libraries and the data.") : null,
      plans.length ? null : make("p", { class: "faint" }, "This run has no plan of its memory (plan.json)."),
    ];
  });
}

function findingsBody() {
  return visibleRuns().flatMap((run) => [
    make("h2", {}, run.name),
    ...run.problems.map((problem) => make("p", { class: "notice" }, problem)),
    run.no_findings ? make("p", { class: "faint" }, run.no_findings) : null,
    !run.no_findings && !run.findings.length ? make("p", { class: "good" }, `The doctor finds nothing wrong in ${run.steps} steps.`) : null,
    ...run.findings.map((finding) => make("article", { class: `finding ${finding.severity}` },
      make("h3", {}, `${finding.severity}: ${finding.key} `, make("span", { class: "faint" }, `(steps ${finding.steps})`)),
      make("p", {}, finding.numbers), make("p", {}, finding.cause),
      ...finding.change.map((change) => make("p", {}, make("code", {}, change))), make("p", { class: "faint" }, finding.effect))),
  ]);
}

// The frame: tabs, runs, keys, and what is new

function show() {
  remember();
  byId("body").replaceChildren(...tabs[view.tab].body().flat().filter(Boolean));
}

function openTab(name) {
  view.tab = tabs[name] ? name : "Curves";
  byId("tabs").replaceChildren(...Object.keys(tabs).map((tab, n) => make("button", {
    role: "tab", "aria-selected": String(tab === view.tab), "aria-controls": "page", title: `key ${n + 1}`, onclick: () => openTab(tab),
  }, tab === "Findings" ? findingsLabel() : tab)));
  const controls = tabs[view.tab].controls;
  byId("controls").replaceChildren(...(controls ? controls() : []));
  show();
}

function findingsLabel() {
  const count = model.runs.reduce((sum, run) => sum + run.findings.filter((finding) => finding.severity !== "note").length, 0);
  return count ? `Findings (${count})` : "Findings";
}

function showRuns() {
  document.title = `${model.runs.map((run) => run.name).join(", ")} – Tunesmith`;
  byId("runs").replaceChildren(...model.runs.map((run, n) => make("label", { title: run.path },
    model.runs.length > 1 ? make("input", { type: "checkbox", checked: !view.hidden.includes(run.name), onchange: () => {
      view.hidden = view.hidden.includes(run.name) ? view.hidden.filter((name) => name !== run.name) : [...view.hidden, run.name];
      show();
    } }) : null,
    swatch(runColour(n)), run.name, make("span", { class: "faint" }, `${run.state}, ${run.unit} ${run.steps}${run.total_steps ? ` of ${run.total_steps}` : ""}`),
    run.problems.length ? make("span", { class: "warn", title: run.problems.join("\n") }, "⚠") : null)));
}

const keys = {
  "1 … 7": "the tabs", "/": "search", "j, k": "the next and the previous group of rollouts", c: "colour tokens by something else",
  "+, −": "more and less smoothing", "?": "these keys",
};

function smooth(change) {
  view.weight = Math.round(Math.max(0, Math.min(0.98, view.weight + change)) * 100) / 100;
  openTab(view.tab);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  const search = byId("controls").querySelector("[data-search]");
  const moves = { j: 1, k: -1 };
  if (event.key >= "1" && event.key <= "7") openTab(Object.keys(tabs)[Number(event.key) - 1]);
  else if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.select(); }
  else if (event.key in moves && view.tab === "Rollouts" && groups[selected + moves[event.key]]) openGroup(selected + moves[event.key]);
  else if (event.key === "c" && view.tab === "Rollouts") {
    const order = ["logprob", "advantage", "ratio", "version", "none"];
    view.colour = order[(order.indexOf(view.colour) + 1) % order.length];
    byId("controls").replaceChildren(...rolloutControls());
    remember();
    openGroup(selected);
  } else if (event.key === "+" || event.key === "=") smooth(0.1);
  else if (event.key === "-") smooth(-0.1);
  else if (event.key === "?") byId("help").showModal();
});

async function refresh() {
  try {
    const newer = document.hidden ? null : await ask("api/model", { seen: model.version });
    if (newer) {
      model = newer;
      showRuns();
      if (view.tab === "Rollouts") await addNewGroups(); else show();
    }
    byId("status").textContent = "live";
  } catch (error) {
    byId("status").textContent = "not connected: tunesmith watch has ended";
  }
  setTimeout(refresh, wait());
}

// Making the model of a long run takes time, of which the run's machine gives a twentieth at most.
function wait() {
  return Math.max(2000, 20000 * (model.seconds || 0));
}

byId("keys").append(...Object.entries(keys).flatMap(([key, does]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, does)]));
byId("status").textContent = data.live ? "live" : `written ${data.written}`;
showRuns();
openTab(view.tab);
if (data.live) setTimeout(refresh, wait());
