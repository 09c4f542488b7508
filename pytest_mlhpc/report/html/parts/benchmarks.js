// The view of benchmarks: a section for each, a row for each metric; charts exist only near what is seen.

const NEAR = "600px";

const benchmarks = { sections: [], watcher: null, days: 0, width: 0 };

function benchSection(bench) {
  opened(bench);
  const last = lastPlace(bench);
  const kind = kindAt(bench, last);
  const nodes = bench.rows.map((row) => rowNode(bench, row));
  const facts = [bench.machine, bench.environment, bench.device].filter(Boolean).join(" \u00b7 ");
  const section = el("section", { class: "bench", id: `bench-${bench.id}`, "aria-labelledby": `name-${bench.id}` },
    el("header", {},
      el("h2", { id: `name-${bench.id}` }, el("a", { href: `#view=benchmarks&bench=${bench.id}`, title: "link to this benchmark" }, bench.label)),
      el("p", { class: "where" }, facts),
      el("p", { class: "last" }, badge(kind, textAt(bench, "verdict", last)), ` ${date(bench.times[last])} `, linksAt(bench, last)),
      el("details", {}, el("summary", {}, "test and definition"), el("code", {}, bench.test), el("br"), el("code", {}, bench.definition))),
    bench.failures.has(last) ? el("p", { class: "failure" }, bench.failures.get(last)) : null,
    nodes.length ? nodes : el("p", { class: "small" }, "No night has a figure."));
  return { bench, section, nodes, kind, last };
}

function benchmarksView(days) {
  benchmarks.days = days;
  benchmarks.width = 0;
  benchmarks.watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? draw(entry.target) : undraw(entry.target);
  }, { rootMargin: `${NEAR} 0px` });
  benchmarks.sections = content.benches.map(benchSection);
  const all = el("div", { class: "benches" }, benchmarks.sections.map((one) => one.section));
  for (const one of benchmarks.sections) one.nodes.forEach((node) => benchmarks.watcher.observe(node.chart));
  return all;
}

function draw(place) {
  const node = place.closest(".row");
  if (place.plot || !node) return;
  benchmarks.width ||= place.clientWidth; // of all charts; to ask each would lay the page out for each
  place.plot = makeChart(place, node.bench, node.row, benchmarks.days, benchmarks.width);
}

function undraw(place) {
  if (!place.plot) return;
  place.plot.destroy();
  place.plot = null;
}

function redraw(days) {
  benchmarks.days = days;
  benchmarks.width = 0;
  for (const one of benchmarks.sections) {
    for (const node of one.nodes) {
      if (!node.chart.plot) continue;
      undraw(node.chart);
      if (node.chart.clientWidth) draw(node.chart);
    }
  }
}

// Which sections and rows are shown. Returns how many of each.
function filterBenchmarks(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const keeps = rowFilter(state);
  let [shown, shownRows] = [0, 0];
  for (const one of benchmarks.sections) {
    const { bench } = one;
    const text = searchable(bench);
    let left = 0;
    for (const node of one.nodes) {
      const keep = keeps(bench, node.row, one.kind);
      node.hidden = !keep;
      left += keep ? 1 : 0;
    }
    const bare = !one.nodes.length && benchFits(state, bench, one.kind) && !state.row && !state.metric && !state.changed && words.every((word) => text.includes(word));
    one.section.hidden = !left && !bare;
    shown += one.section.hidden ? 0 : 1;
    shownRows += left;
  }
  return [shown, shownRows];
}

function benchFits(state, bench, kind) {
  return (!state.system || bench.system === state.system) && (!state.kind || kind === state.kind) && (!state.bench || bench.id === state.bench);
}

// What says of a row whether it is shown.
function rowFilter(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = state.row ? rows.get(state.row).row : null;
  return (bench, row, kind) => {
    const metric = wanted ? wanted === row : state.metric === "*" || (state.metric ? row.metric === state.metric : row.judged || !bench.rows.some((other) => other.judged));
    if (!metric || !benchFits(state, bench, kind) || (state.changed && !recentShift(bench, row))) return false;
    const text = searchable(bench);
    return words.every((word) => text.includes(word) || row.metric.includes(word));
  };
}

// Whether a row changed within the last thirty days before the page was made.
function recentShift(bench, row) {
  return row.shifts.some((shift) => bench.times[shift[0]] > content.made - 30 * DAY);
}
