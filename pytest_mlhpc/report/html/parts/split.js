// The view of time: which share of a training epoch is I/O, compute, communication.

const SHARES = ["io", "communication", "compute"];

function splitView() {
  if (!content.splits.length) return el("p", { class: "calm" }, "No benchmark reports epoch_time and io_time.");
  const key = el("ul", { class: "legend" }, SHARES.map((name) => el("li", {}, svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, class: `fill-${name}` })), ` ${name === "io" ? "I/O: blocked wait for data, and copies" : name === "communication" ? "communication that computation waited for" : "compute"}`)));
  const cells = content.splits.map((one) => {
    const bench = opened(benches.get(one.bench));
    const compute = one.io.map((share, at) => 1 - share - one.talk[at]);
    const end = one.io.length - 1;
    const usual = middle(one.io);
    const machine = [bench.machine, bench.device].filter(Boolean).join(" ");
    const name = el("a", { href: `#view=benchmarks&bench=${bench.id}&metric=*` }, bench.label);
    const node = [
      [name, narrow(machine)], machine,
      shareBar([["io", one.io[end]], ["communication", one.talk[end]], ["compute", compute[end]]]),
      percent(one.io[end]), one.told ? percent(one.talk[end]) : "not reported", percent(compute[end]), percent(usual),
      areaStrip([one.io, one.talk, compute], SHARES, `${many(one.io.length, "night")}; I/O usually ${percent(usual)}, last ${percent(one.io[end])}`),
    ];
    node.bench = bench;
    return node;
  });
  const made = table("Shares of the training epoch in the last night", ["Benchmark", "Machine", "Last night", "I/O", "Communication", "Compute", "I/O usually", "All nights"], cells);
  made.querySelectorAll("tbody tr").forEach((line, at) => { line.bench = cells[at].bench; });
  return el("div", { class: "splits" }, key, made);
}

function middle(values) {
  const sorted = Array.from(values).sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

// Lines of a table that each belong to a bench.
function filterLines(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const one of document.querySelectorAll("main tbody tr")) {
    if (!one.bench) continue;
    one.hidden = (Boolean(state.system) && one.bench.system !== state.system) || !words.every((word) => searchable(one.bench).includes(word));
    shown += one.hidden ? 0 : 1;
  }
  return shown;
}
