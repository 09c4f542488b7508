// The view of systems: the last night of each, what needs a look, what changed lately.

const LATELY_DAYS = 30;
const MOST_LINKS = 4;

function systemCard(one) {
  const counts = content.kinds.filter((kind) => one.counts[kind]).map((kind) => el("li", {},
    el("a", { href: `#view=benchmarks&system=${encodeURIComponent(one.name)}&kind=${kind}` }, badge(kind, `${one.counts[kind]} ${KIND_WORDS[kind]}`))));
  const total = Object.values(one.counts).reduce((sum, count) => sum + count, 0);
  return el("section", { class: one.stale ? "card stale" : "card", "aria-labelledby": `system-${one.name}` },
    el("header", {},
      el("h2", { id: `system-${one.name}` }, el("a", { href: `#view=benchmarks&system=${encodeURIComponent(one.name)}` }, one.name)),
      one.stale ? badge("missing", "stale") : null),
    el("p", { class: "small" }, `Last night ended ${moment(one.ended)}, ${ago(one.ended)} this page was made. `
      + `${many(total, "benchmark")}, ${one.hours.toFixed(1)} node-hours.`),
    el("ul", { class: "counts" }, counts),
    nightStrip(one.days),
    troubleList(one),
    one.unfit.length ? el("p", {}, el("strong", {}, "Left out by vetting: "), one.unfit.map(([host, reason], at) => [at ? "; " : "", el("a", { href: `#view=nodes&q=${encodeURIComponent(host)}` }, host), ` (${reason})`])) : null);
}

function troubleList(one) {
  if (!one.troubles.length) return el("p", { class: "calm" }, one.stale ? "Nothing was recorded since." : "All that was expected ran, and is as fast as it was.");
  const groups = new Map(); // what is said in the same words is said once
  for (const [id, kind, verdict, text] of one.troubles) {
    const bench = benches.get(id);
    const told = text.startsWith(`${verdict}: `) ? text.slice(verdict.length + 2) : text;
    const same = JSON.stringify([kind, verdict, bench.machine, told]);
    if (!groups.has(same)) groups.set(same, { kind, verdict, told, machine: bench.machine, found: [] });
    groups.get(same).found.push(bench);
  }
  return el("ul", { class: "troubles" }, [...groups.values()].map(({ kind, verdict, told, machine, found }) => {
    const links = found.slice(0, MOST_LINKS).map((bench, at) => [at ? ", " : "", el("a", { href: `#view=benchmarks&bench=${bench.id}` }, bench.label)]);
    const rest = found.length - links.length;
    const more = rest > 0 ? [" and ", el("a", { href: `#view=benchmarks&system=${encodeURIComponent(one.name)}&kind=${kind}` }, `${rest} more`)] : [];
    return el("li", {}, badge(kind, kind === "missing" ? KIND_WORDS.missing : verdict), ` ${machine}: `, links.flat(), more,
      told ? el("div", { class: "small" }, told) : null);
  }));
}

// Change points of judged rows in the last days, newest first.
function latestShifts() {
  const found = [];
  for (const bench of content.benches) {
    opened(bench);
    for (const row of bench.rows) {
      if (!row.judged) continue;
      for (const shift of row.shifts) {
        if (bench.times[shift[0]] > content.made - LATELY_DAYS * DAY) found.push({ bench, row, shift, at: bench.times[shift[0]] });
      }
    }
  }
  return found.sort((a, b) => b.at - a.at);
}

function overviewView() {
  const shifts = latestShifts();
  const changes = shifts.length
    ? table(`Changes of level in the last ${LATELY_DAYS} days`, ["Benchmark", "Machine", "Metric", "Change", "Since", "There also"], shifts.slice(0, 100).map(({ bench, row, shift, at }) => [
      el("a", { href: `#view=benchmarks&row=${row.id}` }, bench.label), bench.machine, row.metric,
      el("span", { class: shift[6] === null ? null : shift[6] ? "bad" : "good" }, `${percent(shift[5], true)}${shift[6] === null ? "" : shift[6] ? " worse" : " better"}`),
      date(at), causesOf(shift[7])]))
    : el("p", { class: "calm" }, `No level changed in the last ${LATELY_DAYS} days.`);
  const events = content.marks.slice(-20).reverse();
  return el("div", {},
    content.notes.map((note) => el("p", { class: "note" }, note)),
    content.systems.length ? kindLegend(content.kinds) : null,
    el("div", { class: "cards" }, content.systems.map(systemCard)),
    el("section", { class: "lately" }, el("h2", {}, "What changed"), changes),
    events.length ? el("section", { class: "lately" }, el("h2", {}, "Events"), table("What was done to the systems", ["Day", "System", "What"], events.map(([at, system, partition, text]) => [date(at), [system, partition].filter(Boolean).join(":"), text]))) : null);
}

function causesOf(causes) {
  return causes.length > 3 ? `${causes.slice(0, 3).join("; ")}; and ${causes.length - 3} more` : causes.join("; ");
}

function filterOverview(state) {
  const cards = document.querySelectorAll(".card");
  let shown = 0;
  content.systems.forEach((one, at) => {
    cards[at].hidden = Boolean(state.system) && state.system !== one.name;
    shown += cards[at].hidden ? 0 : 1;
  });
  return shown;
}
