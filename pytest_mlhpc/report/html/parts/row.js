// One metric of one benchmark: its figures in words, its chart, its table.

const TABLE_NIGHTS = 60;

function summary(bench, row) {
  const counted = row.values.filter((value, place) => value !== null && bench.counts[place]).length;
  const parts = [`${row.metric} of ${bench.label} on ${bench.machine}: ${many(counted, "night")}`];
  parts.push(`newest ${figure(row.newest, row.unit)}`);
  if (row.band) parts.push(`accepted ${figure(row.band[0], row.unit)}, within ${percent(row.band[1])}`);
  if (row.change !== null) parts.push(`${percent(row.change, true)} of ${row.band ? "the accepted value" : "the median"}`);
  for (const shift of row.shifts) {
    parts.push(`${percent(shift[5], true)} about ${date(bench.times[shift[0]])}`);
  }
  return `${parts.join("; ")}.`;
}

function changeBadge(row) {
  if (row.change === null) return null;
  const good = isGood(row.change, row.better);
  const width = row.band ? row.band[1] : 0.05;
  const kind = good === null || Math.abs(row.change) <= width ? "plain" : good ? "good" : "bad";
  return el("span", { class: `change ${kind}`, title: row.band ? "against the accepted value" : "against the median" }, percent(row.change, true));
}

function shiftList(bench, row) {
  if (!row.shifts.length) return null;
  return el("ul", { class: "shifts" }, row.shifts.slice(-3).map((shift) => {
    const [at, first, last, before, after, size, worse, causes] = shift;
    const range = first === last ? date(bench.times[at]) : `${date(bench.times[first])} to ${date(bench.times[last])}`;
    return el("li", { class: worse === null ? null : worse ? "bad" : "good" },
      el("strong", {}, percent(size, true)), ` ${range}: ${figure(before, row.unit)} \u2192 ${figure(after, row.unit)}`,
      causes.length ? el("span", { class: "causes" }, `; there also: ${causes.slice(0, 4).join("; ")}`) : "");
  }));
}

function nightTable(bench, row) {
  const cells = [];
  for (let place = bench.times.length - 1; place >= 0 && cells.length < TABLE_NIGHTS; place -= 1) {
    if ((row.values[place] === null && !bench.failures.has(place)) || isFolded(bench, place)) continue;
    const more = [bench.mores.get(place), rerunText(bench, row, place)].filter(Boolean).join(", ");
    cells.push([
      moment(bench.times[place]), figure(row.values[place], row.unit), textAt(bench, "verdict", place) + (more ? `, ${more}` : ""),
      textAt(bench, "nodes", place), linksAt(bench, place), (bench.changes.get(place) || []).join("; "),
    ]);
  }
  return table(`${row.metric}, the last ${many(cells.length, "night")}`, ["Night", "Figure", "Verdict", "Nodes", "Commit, job, pipeline", "Changed"], cells);
}

// What re-runs of a night measured, where they are folded into it.
function rerunText(bench, row, place) {
  if (shown.reruns === "1") return "";
  const again = rerunsOf(bench, place);
  const values = again.map((one) => row.values[one]).filter((value) => value !== null);
  if (!again.length) return "";
  const range = values.length ? `: ${figure(Math.min(...values), row.unit)} to ${figure(Math.max(...values), row.unit)}` : "";
  return `${many(again.length, "re-run")}${range}`;
}

// Commit, job and pipeline of a night, each a link where the site says to which address.
function linksAt(bench, place) {
  const found = ["commit", "job", "pipeline"].map((name) => [name, textAt(bench, name, place)]).filter(([, value]) => value);
  return found.map(([name, value], at) => {
    const text = name === "commit" ? value.slice(0, 12) : `${name} ${value}`;
    const form = content.links[name];
    return [at ? ", " : "", form ? el("a", { href: form.replaceAll(`{${name}}`, encodeURIComponent(value)) }, text) : text];
  }).flat();
}

function rowNode(bench, row) {
  opened(bench);
  const chart = el("div", { class: "chart", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": `${summary(bench, row)} Arrow keys go from night to night.` });
  const more = el("div", { class: "more", hidden: true });
  const button = el("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => {
    if (!more.firstChild) more.append(nightTable(bench, row));
    more.hidden = !more.hidden;
    button.setAttribute("aria-expanded", String(!more.hidden));
  } }, "Table");
  const node = el("article", { class: row.judged ? "row" : "row unjudged", id: `row-${row.id}`, "aria-label": `${row.metric} of ${bench.label}` },
    el("div", { class: "facts" },
      el("h3", {}, el("a", { href: `#view=benchmarks&row=${row.id}`, title: "link to this row" }, row.metric)),
      el("p", { class: "newest" }, figure(row.newest, row.unit), " ", changeBadge(row)),
      row.band ? el("p", { class: "small" }, `accepted ${figure(row.band[0], row.unit)} \u00b1 ${percent(row.band[1])}`) : el("p", { class: "small" }, row.judged ? "no accepted value" : "not judged"),
      button),
    el("div", { class: "drawn" }, chart, shiftList(bench, row), more));
  chart.addEventListener("keydown", (event) => step(event, bench, row, chart));
  chart.addEventListener("blur", hideTip);
  node.chart = chart;
  node.bench = bench;
  node.row = row;
  return node;
}

// Arrow keys: from night to night, those without figure and failure left out.
function step(event, bench, row, place) {
  const directions = { ArrowLeft: -1, ArrowRight: 1, Home: 1, End: -1 };
  const way = directions[event.key];
  if (!way || !place.plot) return;
  event.preventDefault();
  const count = bench.times.length;
  let at = event.key === "Home" ? -1 : event.key === "End" ? count : place.at === undefined ? (way > 0 ? -1 : count) : place.at;
  do at += way; while (at >= 0 && at < count && ((row.values[at] === null && !bench.failures.has(at)) || isFolded(bench, at)));
  if (at < 0 || at >= count) return;
  place.at = at;
  const plot = place.plot;
  const left = plot.valToPos(bench.times[at], "x");
  const top = row.values[at] === null ? plot.over.clientHeight - 8 : plot.valToPos(row.values[at], "y");
  plot.setCursor({ left, top });
  const box = plot.over.getBoundingClientRect();
  const lines = nightLines(bench, row, at);
  showTip(lines, box.left + left, box.top + top);
  say(lines.join(", "));
}
