// The view of systems: one chart for each benchmark that several machines ran, all machines in it, each against its own level.

function overlayGroups() {
  const groups = new Map();
  for (const bench of content.benches) {
    for (const row of bench.rows) {
      if (row.better === "none" || !levelOf(opened(bench), row)) continue;
      const same = JSON.stringify([bench.benchmark, row.metric, row.unit]);
      if (!groups.has(same)) groups.set(same, []);
      groups.get(same).push({ bench, row });
    }
  }
  return [...groups.values()].filter((some) => some.length > 1);
}

// The accepted value, else the median of the nights that count.
function levelOf(bench, row) {
  if (row.band) return row.band[0];
  const counted = row.values.filter((value, place) => value !== null && bench.counts[place]);
  return counted.length ? middle(counted) : 0;
}

function overlayView() {
  const groups = overlayGroups();
  if (!groups.length) return el("p", { class: "calm" }, "No benchmark was run on several machines.");
  benchmarks.watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? drawOverlay(entry.target) : undraw(entry.target);
  }, { rootMargin: `${NEAR} 0px` });
  return el("div", { class: "overlays" },
    el("p", { class: "small" }, "Each machine against its own accepted value, or the median of its nights where none is accepted: 100 % is its usual speed."),
    groups.map(overlayNode));
}

function overlayNode(some) {
  const [{ bench, row }] = some;
  const machines = some.map((one) => [one.bench.machine, one.bench.environment === "default" ? "" : one.bench.environment].filter(Boolean).join(" "));
  const newest = some.map((one, at) => `${machines[at]} ${figure(one.row.newest, one.row.unit)}`);
  const chart = el("div", { class: "chart tall", role: "img", "aria-label": `${row.metric} of ${bench.label} on ${many(some.length, "machine")}: ${newest.join("; ")}` });
  const node = el("section", { class: "card overlay", "aria-label": `${bench.label}, ${row.metric}` },
    el("h2", {}, bench.label), el("p", { class: "small" }, `${row.metric}, ${row.better} is better`),
    el("ul", { class: "legend" }, some.map((one, at) => el("li", {}, curveKey(at), " ", el("a", { href: `#view=benchmarks&row=${one.row.id}` }, machines[at]), ` ${figure(one.row.newest, one.row.unit)}`))),
    chart);
  chart.some = some;
  chart.machines = machines;
  node.chart = chart;
  node.some = some;
  benchmarks.watcher.observe(chart);
  return node;
}

function curveKey(at) {
  return svg("svg", { width: 18, height: 8, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, class: `stroke-${CURVES[at % CURVES.length]}` }));
}

// The day to which a night belongs; it begins at 18:00 UTC the evening before.
function nightOf(seconds) {
  return Math.floor((seconds + DAY / 4) / DAY) * DAY;
}

function drawOverlay(place) {
  if (place.plot || !place.some) return;
  const tables = place.some.map(({ bench, row }) => {
    const level = levelOf(bench, row);
    const nights = new Map(); // machines run at other minutes of one night
    row.values.forEach((value, at) => { if (bench.counts[at] && value !== null) nights.set(nightOf(bench.times[at]), (value / level) * 100); });
    return [[...nights.keys()], [...nights.values()]];
  });
  const data = uPlot.join(tables);
  place.plot = new uPlot({
    width: Math.max(place.clientWidth, 200), height: 220, legend: { show: false }, padding: [10, 22, 0, 0],
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    cursor: { y: false, drag: { x: true, y: false } },
    scales: { x: { time: true, range: (u, low, high) => (low === null ? period(0) : [low, high]) }, y: { range: (u, low, high) => { const room = Math.max((high - low) * 0.1, 2); return [low - room, high + room]; } } },
    axes: axes("% of its level"),
    series: [{}, ...place.some.map((_one, at) => ({ stroke: color(CURVES[at % CURVES.length]), width: 1.5, spanGaps: true, points: { show: data[0].length < 120, size: 4 } }))],
    hooks: { setCursor: [(u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined || !place.matches(":hover")) return;
      const lines = place.machines.map((name, number) => (data[number + 1][at] === null || data[number + 1][at] === undefined ? null : `${name}: ${data[number + 1][at].toFixed(1)} %`)).filter(Boolean);
      const box = u.over.getBoundingClientRect();
      showTip([date(data[0][at]), ...lines], box.left + u.cursor.left, box.top + u.cursor.top);
    }] },
  }, data, place);
  place.plot.over.addEventListener("mouseleave", hideTip);
}

function filterOverlays(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const node of document.querySelectorAll(".overlay")) {
    const text = node.some.map((one) => `${searchable(one.bench)} ${one.row.metric}`).join(" ");
    const judged = state.metric === "*" || (state.metric ? node.some[0].row.metric === state.metric : node.some.some((one) => one.row.judged));
    node.hidden = !judged || (Boolean(state.system) && !node.some.some((one) => one.bench.system === state.system)) || !words.every((word) => text.includes(word));
    shown += node.hidden ? 0 : 1;
  }
  return shown;
}
