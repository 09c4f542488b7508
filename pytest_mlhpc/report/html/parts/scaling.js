// The view of scaling: work per time over devices, against ideal; efficiency beside it and in a table.

const CURVES = ["curve1", "curve2", "curve3", "curve4", "curve5", "curve6"];

function scalingView() {
  if (!content.scaling.length) return el("p", { class: "calm" }, "No benchmark was run with several numbers of devices.");
  return el("div", { class: "scalings" }, content.scaling.map(scalingNode));
}

function scalingNode(one) {
  const rate = el("div", { class: "chart tall", role: "img", "aria-label": `${one.metric} over devices; the table below has the figures.` });
  const share = el("div", { class: "chart tall", role: "img", "aria-label": "Efficiency over devices; the table below has the figures." });
  const how = one.how === "weak" ? "weak scaling: the same batch on each device" : "strong scaling: the same batch for all devices together";
  const lines = one.curves.flatMap(([machine, steps]) => steps.map(([devices, value, efficiency, runs, bench]) => [
    machine, devices, el("a", { href: `#view=benchmarks&bench=${bench}` }, figure(value, one.unit)), figure(value / devices, one.unit), percent(efficiency), runs]));
  const node = el("section", { class: "card scaling", "aria-label": `${one.label}, ${one.metric}` },
    el("h2", {}, one.label), el("p", { class: "small" }, `${one.metric}; ${how}; medians of the newest nights, efficiency against the smallest scale`),
    el("ul", { class: "legend" }, one.curves.map(([machine], at) => el("li", {}, curveKey(at), ` ${machine}`)), el("li", {}, "dashed: ideal")),
    el("div", { class: "pair" }, rate, share),
    table("Figures", ["Machine", "Devices", one.metric, "per device", "Efficiency", "Nights"], lines));
  node.plot = one;
  node.places = [rate, share];
  return node;
}

function drawScaling() {
  for (const node of document.querySelectorAll(".scaling")) {
    const one = node.plot;
    const every = [...new Set(one.curves.flatMap(([, steps]) => steps.map((step) => step[0])))].sort((a, b) => a - b);
    const column = (steps, at) => every.map((devices) => { const found = steps.find((step) => step[0] === devices); return found ? found[at] : null; });
    const ideal = (steps) => every.map((devices) => (devices < steps[0][0] ? null : (steps[0][1] / steps[0][0]) * devices));
    const [rate, share] = node.places;
    for (const place of node.places) place.replaceChildren();
    const curves = one.curves.map(([, steps]) => steps);
    scalePlot(rate, one.unit, 3, [every, ...curves.map((steps) => column(steps, 1)), ...curves.map(ideal)], curves.length);
    scalePlot(share, "%", 1, [every, ...curves.map((steps) => column(steps, 2).map((value) => value && value * 100)), every.map(() => 100)], curves.length);
  }
}

function scalePlot(place, unit, distr, data, curves) {
  const style = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const series = data.slice(1).map((_column, at) => (at < curves
    ? { stroke: color(CURVES[at % CURVES.length]), width: 2, spanGaps: true, points: { show: true, size: 6 } }
    : { stroke: color("muted"), width: 1, dash: [4, 4], spanGaps: true, points: { show: false } }));
  const title = (label) => ({ label, labelSize: 16, labelGap: 2, labelFont: "11px system-ui, sans-serif" });
  const text = (value) => (unit === "%" ? `${Math.round(value)} %` : figure(value, unit).replace(` ${unit}`, ""));
  const chart = new uPlot({
    width: Math.max(place.clientWidth, 200), height: 220, legend: { show: false }, padding: [10, 16, 0, 0],
    cursor: { y: false, drag: { x: false } },
    scales: { x: { time: false, distr: 3, log: 2 }, y: distr === 3 ? { distr: 3 } : { range: (u, low, high) => [0, Math.max(110, high * 1.05)] } },
    axes: [
      { ...style, ...title("devices"), size: 28, splits: () => data[0], values: (u, ticks) => ticks.map(String), filter: null },
      { ...style, ...title(unit === "%" ? "efficiency, %" : unit), size: 60, values: (u, ticks) => ticks.map((tick) => (tick === null ? null : text(tick))) },
    ],
    series: [{}, ...series],
    hooks: { setCursor: [(u) => {
      if (u.cursor.idx === null || u.cursor.idx === undefined || !place.matches(":hover")) return;
      const names = place.closest(".scaling").plot.curves.map(([machine]) => machine);
      const lines = names.map((name, at) => (data[at + 1][u.cursor.idx] === null ? null : `${name}: ${unit === "%" ? `${data[at + 1][u.cursor.idx].toFixed(1)} %` : figure(data[at + 1][u.cursor.idx], unit)}`)).filter(Boolean);
      const box = u.over.getBoundingClientRect();
      showTip([many(data[0][u.cursor.idx], "device"), ...lines], box.left + u.cursor.left, box.top + u.cursor.top);
    }] },
  }, data, place);
  chart.over.addEventListener("mouseleave", hideTip);
}

function filterScaling(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const node of document.querySelectorAll(".scaling")) {
    const text = [node.plot.label, node.plot.metric, ...node.plot.curves.map(([machine]) => machine)].join(" ").toLowerCase();
    const here = !state.system || node.plot.curves.some(([, steps]) => steps.some((one) => benches.get(one[4]).system === state.system));
    node.hidden = !here || !words.every((word) => text.includes(word));
    shown += node.hidden ? 0 : 1;
  }
  return shown;
}
