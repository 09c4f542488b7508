// One chart for each kind of curve; they share the pointer, so that one moment is read in all of them.

const HEIGHT = 190;
const content = JSON.parse(byId("content").textContent);
const drawn = [];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Digits that matter, as many as a reader of a chart wants.
function figure(value) {
  return value === null || value === undefined ? "-" : String(Number(value.toPrecision(3)));
}

function options(chart, width) {
  const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width, height: HEIGHT,
    cursor: { sync: { key: "time", scales: ["x", null] }, y: false },
    scales: { x: { time: false }, y: { range: (u, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.08] } },
    axes: [
      { ...axis, size: 26, values: (u, ticks) => ticks.map((tick) => `${figure(tick)} s`) },
      { ...axis, size: 58, values: (u, ticks) => ticks.map(figure) },
    ],
    series: [
      { label: "time", value: (u, value) => `${figure(value)} s` },
      ...chart.names.map((name, place) => ({
        label: name, stroke: color(`curve${(place % 6) + 1}`), width: 1.5, spanGaps: true, dash: place < 6 ? [] : [4, 3],
        value: (u, value) => `${figure(value)} ${chart.unit}`,
      })),
    ],
  };
}

function draw() {
  for (const one of drawn.splice(0)) one.destroy();
  const places = [...byId("charts").children];
  content.forEach((chart, place) => {
    drawn.push(new uPlot(options(chart, Math.max(places[place].clientWidth, 200)), [chart.times, ...chart.curves], places[place].lastChild));
  });
}

function begin() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  for (const chart of content) {
    const name = `${chart.title} [${chart.unit}]`;
    byId("charts").append(el("section", {}, el("h3", {}, name),
      el("div", { role: "img", "aria-label": `${name}: ${chart.names.join(", ")}` })));
  }
  draw();
  let timer = 0;
  addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 150); });
  document.documentElement.dataset.ready = "yes";
}

begin();
