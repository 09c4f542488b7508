// The view of all rows as one dense table, which is sorted by any column and saved as CSV.

const LIST_BATCH = 200; // lines that are made at once; more are made when the end of the table comes near

const LIST_COLUMNS = [
  ["Benchmark", (one) => one.bench.label], ["Machine", (one) => one.bench.machine], ["Nights", null],
  ["Change", (one) => one.loss], ["Verdict", (one) => one.rank], ["Since", (one) => one.since],
  ["Owner", (one) => one.bench.owner], ["Metric", (one) => one.row.metric], ["Newest", (one) => one.row.newest],
];
const WORST_FIRST = new Set(["Change", "Verdict", "Since", "Newest"]); // the first click on other columns sorts from A

const list = { items: [], shown: [], made: 0, sort: 4, down: true, body: null, watcher: null };

// Since when: the newest change of level, or the first of the bad nights at the end, whichever is later; 0 where all is as ever.
function sinceOf(bench, row) {
  const shift = row.shifts[row.shifts.length - 1];
  let bad = 0;
  for (let place = bench.times.length - 1; place >= 0; place -= 1) {
    if (!bench.counts[place]) continue;
    if ("ok unsure".includes(kindAt(bench, place))) break;
    bad = bench.times[place];
  }
  return Math.max(shift ? bench.times[shift[0]] : 0, bad);
}

function listItem(bench, row) {
  opened(bench);
  const last = lastPlace(bench);
  const kind = kindAt(bench, last);
  const sign = row.better === "higher" ? -1 : 1;
  // The worst kind first: broken, slower, the machine's fault, not judged, ok.
  const rank = ["missing", "ok", "unsure", "machine", "slow", "broken"].indexOf(kind);
  return { bench, row, last, kind, rank, since: sinceOf(bench, row), loss: row.change === null || row.better === "none" ? null : sign * row.change };
}

function sparkline(bench, row) {
  const [wide, high, most] = [110, 20, 110];
  const places = [];
  row.values.forEach((value, place) => { if (value !== null && bench.counts[place]) places.push(place); });
  const values = places.map((place) => row.values[place]);
  if (!values.length) return null;
  const step = Math.max(1, Math.ceil(values.length / most));
  const thinned = step === 1 ? values : values.filter((value, at) => (values.length - 1 - at) % step === 0);
  let [low, up] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(up - low, Math.abs(up) * 0.1) || 1; // noise of a per cent does not fill the height
  low = (low + up - room) / 2;
  const x = (at) => (thinned.length > 1 ? (at / (thinned.length - 1)) * (wide - 4) + 2 : wide / 2);
  const y = (value) => high - 2 - ((value - low) / room) * (high - 4);
  const end = thinned.length - 1;
  return svg("svg", { class: "spark", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${many(values.length, "night")} from ${figure(values[0], row.unit)} to ${figure(values[values.length - 1], row.unit)}` },
    svg("polyline", { points: thinned.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }),
    svg("circle", { cx: x(end), cy: y(thinned[end]), r: 2 }));
}

function listLine(one) {
  const { bench, row } = one;
  return el("tr", {},
    el("th", { scope: "row" }, el("a", { href: `#view=benchmarks&row=${row.id}` }, bench.label), narrow(bench.machine)),
    el("td", { class: "machine" }, bench.machine), el("td", {}, sparkline(bench, row)), el("td", { class: "number" }, changeBadge(row)),
    el("td", {}, badge(one.kind, textAt(bench, "verdict", one.last))), el("td", {}, one.since ? date(one.since) : "\u2013"),
    el("td", {}, bench.owner || "\u2013"), el("td", {}, row.metric), el("td", { class: "number" }, figure(row.newest, row.unit)));
}

function listView() {
  list.items = content.benches.flatMap((bench) => bench.rows.map((row) => listItem(bench, row)));
  if (!list.items.length) return el("p", { class: "calm" }, "No night has a figure.");
  list.body = el("tbody", {});
  const heads = LIST_COLUMNS.map(([name, value], at) => el("th", { scope: "col", class: name === "Machine" ? "machine" : null, "aria-sort": at === list.sort ? (list.down ? "descending" : "ascending") : null },
    value === null ? name : el("button", { type: "button", class: "quiet", onclick: () => {
      list.down = list.sort === at ? !list.down : WORST_FIRST.has(name);
      list.sort = at;
      heads.forEach((head, other) => { if (other === at) head.setAttribute("aria-sort", list.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
      fillList();
    } }, name)));
  const end = el("div", { class: "end" });
  list.watcher = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) moreLines(); }, { rootMargin: NEAR });
  list.watcher.observe(end);
  return el("div", {},
    el("p", {}, el("button", { type: "button", onclick: saveCsv }, "Save as CSV")),
    el("div", { class: "wide", role: "region", "aria-label": "All rows", tabindex: "0" },
      el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads)), list.body)),
    end);
}

function compared(one, two) {
  const value = LIST_COLUMNS[list.sort][1];
  const [a, b] = [value(one), value(two)];
  const empty = (found) => found === null || found === "" || found === undefined;
  if (empty(a) || empty(b)) return empty(a) - empty(b); // what is not known comes last, whatever the order
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return (list.down ? -order : order) || two.loss - one.loss; // the greater loss first among equals
}

function fillList() {
  list.shown.sort(compared);
  list.made = 0;
  list.body.replaceChildren();
  moreLines();
}

function moreLines() {
  const next = list.shown.slice(list.made, list.made + LIST_BATCH);
  list.made += next.length;
  list.body.append(...next.map(listLine));
}

// Returns how many rows are in the list.
function filterList(state) {
  const fits = rowFilter(state);
  list.shown = list.items.filter((one) => fits(one.bench, one.row, one.kind));
  if (list.body) fillList();
  return list.shown.length;
}

// RFC 4180. A cell that a spreadsheet would take for a formula begins with an apostrophe.
function csvCell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOf(items) {
  const heads = ["benchmark", "test", "system", "partition", "environment", "metric", "unit", "newest", "change", "accepted", "verdict", "since", "owner", "night", "commit"];
  const lines = items.map(({ bench, row, last, since }) => [
    bench.label, bench.test, bench.system, bench.partition, bench.environment, row.metric, row.unit, row.newest, row.change,
    row.band ? row.band[0] : null, textAt(bench, "verdict", last), since ? date(since) : "", bench.owner,
    moment(bench.times[last]), textAt(bench, "commit", last),
  ]);
  return [heads, ...lines].map((cells) => `${cells.map(csvCell).join(",")}\r\n`).join("");
}

function saveCsv() {
  const address = URL.createObjectURL(new Blob([csvOf(list.shown)], { type: "text/csv;charset=utf-8" }));
  el("a", { href: address, download: "benchmarks.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
