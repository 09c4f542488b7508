// What is shown stands in the address after the #, so that any view can be linked to and the back button works.

const VIEWS = { overview: "Overview", list: "List", benchmarks: "Benchmarks", systems: "Systems", time: "Time", scaling: "Scaling", nodes: "Nodes" };
const FIELDS = ["view", "q", "system", "kind", "metric", "days", "changed", "reruns", "bench", "row"];

function stateOfAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  const state = Object.fromEntries(FIELDS.map((name) => [name, found.get(name) || ""]));
  if (!Object.hasOwn(VIEWS, state.view)) state.view = state.row || state.bench ? "benchmarks" : "overview";
  if (!content.kinds.includes(state.kind)) state.kind = "";
  if (!/^\d{1,4}$/.test(state.days)) state.days = "";
  if (state.row && !rows.has(state.row)) state.row = "";
  if (state.bench && !benches.has(state.bench)) state.bench = "";
  return state;
}

function addressOf(state) {
  const words = new URLSearchParams();
  for (const name of FIELDS) if (state[name]) words.set(name, state[name]);
  return `#${words}`;
}

function go(changes) {
  const before = stateOfAddress();
  location.hash = addressOf({ ...before, bench: "", row: "", ...changes });
}

function option(value, text, chosen) {
  return el("option", { value, selected: value === chosen }, text);
}

function choice(label, name, options, state) {
  return el("label", {}, el("span", {}, label), el("select", { name, onchange: (event) => go({ [name]: event.target.value }) }, options.map(([value, text]) => option(value, text, state[name]))));
}

function tick(name, text, state) {
  return el("label", { class: "check" }, el("input", { type: "checkbox", name, checked: state[name] === "1", onchange: (event) => go({ [name]: event.target.checked ? "1" : "" }) }), el("span", {}, text));
}

// Fields are made anew only when the view changes, so that nobody is thrown out of the field he types in.
function makeFilters(state) {
  const form = byId("filters");
  const systems = [["", "all systems"], ...content.systems.map((one) => [one.name, one.name])];
  const metrics = [...new Set(content.benches.flatMap((bench) => bench.rows.map((row) => row.metric)))].sort();
  let timer = 0;
  const search = el("input", { type: "search", name: "q", value: state.q, placeholder: "name, metric, node, commit", autocomplete: "off", spellcheck: "false", oninput: (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => go({ q: event.target.value }), 150);
  } });
  const fields = [choice("System", "system", systems, state)];
  if (state.view !== "overview") fields.unshift(el("label", { class: "search" }, el("span", {}, "Search"), search));
  const kinds = choice("Last night", "kind", [["", "any verdict"], ...content.kinds.map((kind) => [kind, KIND_WORDS[kind]])], state);
  const metric = choice("Metrics", "metric", [["", "judged"], ["*", "all"], ...metrics.map((name) => [name, name])], state);
  if (state.view === "systems") fields.push(metric);
  if (state.view === "list") fields.push(kinds, metric, tick("changed", "changed lately", state));
  if (state.view === "benchmarks") {
    fields.push(kinds, metric,
      choice("Time", "days", [["", "all nights"], ["30", "30 days"], ["90", "90 days"], ["365", "1 year"]], state),
      tick("changed", "changed lately", state), tick("reruns", "re-runs", state));
  }
  form.replaceChildren(...fields, el("button", { type: "button", class: "quiet", onclick: () => { location.hash = addressOf({ view: stateOfAddress().view }); makeFilters(stateOfAddress()); } }, "Clear"));
  form.hidden = state.view === "overview" && content.systems.length < 2;
}

// Brings fields in line with the address after back, forward, or a link.
function syncFilters(state) {
  for (const field of byId("filters").elements) {
    if (!field.name || field === document.activeElement) continue;
    if (field.type === "checkbox") field.checked = state[field.name] === "1";
    else field.value = state[field.name];
  }
}
