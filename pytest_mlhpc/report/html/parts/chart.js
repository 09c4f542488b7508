// One chart of nights: the series, the accepted value with its band, change points, events, failures.

const DAY = 86400;
const CHART_HEIGHT = 130; // as in rows.css

const colors = new Map(); // of the theme that is on; asking the browser takes its time

function color(name) {
  if (!colors.has(name)) {
    colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colors.get(name);
}

// Two columns: nights that count, and all others (re-runs, manual runs, other branches).
function columns(bench, row) {
  const counted = [];
  const others = [];
  row.values.forEach((value, place) => {
    counted.push(bench.counts[place] ? value : null);
    others.push(bench.counts[place] || isFolded(bench, place) ? null : value);
  });
  return [bench.times, counted, others];
}

function valueRange(row) {
  return (u, low, high) => {
    let [least, most] = [low, high];
    if (least === null || !Number.isFinite(least)) [least, most] = row.band ? [row.band[0], row.band[0]] : [0, 1];
    if (row.band) {
      least = Math.min(least, row.band[0] * (1 - row.band[1]));
      most = Math.max(most, row.band[0] * (1 + row.band[1]));
    }
    const room = (most - least) * 0.08 || Math.abs(most) * 0.05 || 1;
    return [least - room, most + room];
  };
}

function period(days) {
  const end = content.made + DAY / 4;
  return [days ? content.made - days * DAY : content.since - DAY / 4, end];
}

// Inside the plotting area, in canvas pixels.
function paint(u, draw) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(left, top, width, height);
  u.ctx.clip();
  u.ctx.textAlign = "left"; // axes leave it as they need it
  draw(u.ctx, (x) => u.valToPos(x, "x", true), (y) => u.valToPos(y, "y", true), { left, top, width, height });
  u.ctx.restore();
}

function paintBand(u, row) {
  if (!row.band) return;
  const [value, width, since] = row.band;
  paint(u, (ctx, x, y, box) => {
    const from = Math.max(since ? x(since) : box.left, box.left);
    ctx.fillStyle = color("band");
    ctx.fillRect(from, y(value * (1 + width)), box.left + box.width - from, y(value * (1 - width)) - y(value * (1 + width)));
    line(ctx, color("accepted"), [from, y(value)], [box.left + box.width, y(value)], []);
  });
}

function line(ctx, style, from, to, dash) {
  ctx.strokeStyle = style;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
  ctx.setLineDash([]);
}

function haloed(ctx, words, left, top) {
  ctx.strokeStyle = color("ground");
  ctx.lineWidth = 3 * devicePixelRatio;
  ctx.strokeText(words, left, top);
  ctx.fillText(words, left, top);
}

function paintLevels(u, bench, row) {
  paint(u, (ctx, x, y, box) => {
    let edge = -Infinity; // where the last label ended
    let lower = false;
    row.shifts.forEach((shift, at) => {
      const [, first, last, before, after, , worse] = shift;
      const style = color(worse === null ? "muted" : worse ? "slow" : "ok");
      const [from, to] = [x(bench.times[Math.max(first - 1, 0)]), x(bench.times[last])];
      ctx.globalAlpha = 0.16;
      ctx.fillStyle = style;
      ctx.fillRect(from, box.top, Math.max(to - from, 2 * devicePixelRatio), box.height);
      ctx.globalAlpha = 1;
      const begin = at ? x(bench.times[row.shifts[at - 1][0]]) : box.left;
      const end = row.shifts[at + 1] ? x(bench.times[row.shifts[at + 1][0]]) : box.left + box.width;
      line(ctx, color("level"), [begin, y(before)], [from, y(before)], [5, 3]);
      line(ctx, color("level"), [to, y(after)], [end, y(after)], [5, 3]);
      const words = percent(shift[5], true);
      ctx.font = `600 ${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.fillStyle = style;
      const wide = ctx.measureText(words).width;
      const left = to + wide + 4 * devicePixelRatio > box.left + box.width ? from - wide - 3 * devicePixelRatio : to + 3 * devicePixelRatio;
      lower = left < edge && !lower; // close to the one before: a line below it
      edge = left + wide + 3 * devicePixelRatio;
      haloed(ctx, words, left, box.top + (lower ? 23 : 11) * devicePixelRatio);
    });
  });
}

function paintMarks(u, bench, row) {
  paint(u, (ctx, x, y, box) => {
    const bottom = box.top + box.height;
    let edge = -Infinity; // where the last label ended
    let higher = false;
    for (const mark of marksOf(bench)) {
      line(ctx, color("event"), [x(mark[0]), box.top], [x(mark[0]), bottom], [2, 3]);
      ctx.fillStyle = color("event");
      ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
      const words = mark[3].slice(0, 28);
      const wide = ctx.measureText(words).width;
      const room = box.left + box.width - x(mark[0]) > wide + 6 * devicePixelRatio;
      const left = x(mark[0]) + (room ? 3 * devicePixelRatio : -wide - 3 * devicePixelRatio);
      higher = left < edge && !higher; // close to the one before: a line above it
      edge = left + wide + 3 * devicePixelRatio;
      haloed(ctx, words, left, bottom - (higher ? 24 : 12) * devicePixelRatio);
    }
    ctx.strokeStyle = color("broken");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    const arm = 3 * devicePixelRatio;
    bench.times.forEach((time, place) => {
      if (row.values[place] !== null || isFolded(bench, place) || !"broken machine".includes(kindAt(bench, place))) return;
      const [at, low] = [x(time), bottom - 6 * devicePixelRatio];
      ctx.beginPath();
      ctx.moveTo(at - arm, low - arm);
      ctx.lineTo(at + arm, low + arm);
      ctx.moveTo(at + arm, low - arm);
      ctx.lineTo(at - arm, low + arm);
      ctx.stroke();
    });
  });
}

function axes(unit) {
  const style = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const values = (u, ticks) => ticks.map((tick) => figure(tick, unit).replace(` ${unit}`, ""));
  return [
    { ...style, size: 24, space: 60, values: [[DAY * 300, "{YYYY}"], [DAY * 28, "{MMM} {YY}"], [DAY, "{D} {MMM}"], [3600, "{HH}:{mm}"]].map(([step, form]) => [step, form, null, null, null, null, null, null, 1]) },
    { ...style, size: 56, space: 24, values, label: unit === "1" ? null : unit, labelSize: 14, labelGap: 2, labelFont: "11px system-ui, sans-serif" },
  ];
}

function makeChart(place, bench, row, days, width) {
  opened(bench);
  const lastKind = (u) => {
    if (u.cursor.idx === null || u.cursor.idx === undefined || !place.matches(":hover")) return;
    const near = nearest(u, bench, row);
    if (near === null) return hideTip();
    const box = u.over.getBoundingClientRect();
    showTip(nightLines(bench, row, near), box.left + u.cursor.left, box.top + u.cursor.top);
  };
  const options = {
    width: Math.max(width, 200), height: CHART_HEIGHT, legend: { show: false },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    padding: [6, 22, 0, 0], // half of the last date stands right of the plot
    cursor: { sync: { key: "nights", setSeries: false, scales: ["x", null] }, y: false, points: { size: 7 }, focus: { prox: 1e6 } },
    scales: { x: { time: true, range: (u, low, high) => (low === null ? period(days) : [low, high]) }, y: { range: valueRange(row) } },
    axes: axes(row.unit),
    series: [
      {},
      { stroke: color("line"), width: 1.5, spanGaps: true, points: { show: (u, at, from, to) => to - from < 120, size: 4, fill: color("line") } },
      { stroke: color("muted"), width: 1, paths: () => null, points: { show: true, size: 5, fill: color("ground") } },
    ],
    hooks: {
      drawClear: [(u) => paintBand(u, row)],
      draw: [(u) => paintLevels(u, bench, row), (u) => paintMarks(u, bench, row)],
      setCursor: [lastKind],
    },
  };
  const chart = new uPlot(options, columns(bench, row), place);
  const [low, high] = period(days);
  chart.setScale("x", { min: low, max: high });
  chart.over.addEventListener("mouseleave", hideTip);
  chart.over.addEventListener("dblclick", () => chart.setScale("x", { min: low, max: high }));
  return chart;
}

// The night whose mark is nearest to the pointer: within 30 pixels.
function nearest(u, bench, row) {
  const [least, most] = [u.posToVal(u.cursor.left - 30, "x"), u.posToVal(u.cursor.left + 30, "x")];
  let [found, best] = [null, Infinity];
  for (let place = 0; place < bench.times.length; place += 1) {
    const time = bench.times[place];
    if (time < least || time > most || isFolded(bench, place)) continue;
    const across = u.valToPos(time, "x") - u.cursor.left;
    const value = row.values[place];
    const down = value === null ? 0 : (u.valToPos(value, "y") - u.cursor.top) / 4; // dates count more than heights
    const far = across * across + down * down + (value === null ? 16 : 0);
    if (far < best) [found, best] = [place, far];
  }
  return found;
}
