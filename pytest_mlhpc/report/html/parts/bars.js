// Small pictures without axes: strips of nights, bars of shares. Each says in words what it shows.

// What the colours of strips mean.
function kindLegend(kinds) {
  return el("ul", { class: "legend" }, kinds.map((kind) => el("li", {}, svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, class: `fill-${kind}` })), ` ${KIND_WORDS[kind]}`)));
}

// One column for each night; heights are shares of that night's runs.
function nightStrip(days) {
  const [wide, high, gap] = [6, 36, 1];
  const bars = days.map(([day, ...counts], at) => {
    const all = counts.reduce((sum, count) => sum + count, 0) || 1;
    let top = 0;
    const parts = counts.map((count, number) => {
      const height = (count / all) * high;
      const part = count ? svg("rect", { x: at * (wide + gap), y: top, width: wide, height, class: `fill-${content.kinds[number]}` }) : null;
      top += height;
      return part;
    });
    const words = counts.map((count, number) => (count ? `${count} ${KIND_WORDS[content.kinds[number]]}` : "")).filter(Boolean);
    return svg("g", {}, svg("title", {}, `${day}: ${words.join(", ")}`), parts);
  });
  const width = days.length * (wide + gap);
  const bad = days.filter(([, ok, unsure, ...others]) => others.some(Boolean)).length;
  const strip = svg("svg", { class: "strip", viewBox: `0 0 ${width} ${high}`, width, height: high, role: "img", "aria-label": `The last ${many(days.length, "night")}: ${bad} of them with trouble.` }, bars);
  return el("div", { class: "nights" }, strip, el("p", { class: "ends small" }, el("span", {}, days[0][0]), days.length > 1 ? el("span", {}, days[days.length - 1][0]) : null));
}

function hostStrip(days) {
  const wide = 7;
  const cells = days.map(([day, kind], at) => svg("rect", { x: at * (wide + 1), y: kind === "ok" ? 4 : 0, width: wide, height: kind === "ok" ? 8 : 16, class: `fill-${kind}` }, svg("title", {}, `${day}: ${KIND_WORDS[kind]}`)));
  const bad = days.filter(([, kind]) => kind !== "ok").map(([day, kind]) => `${day} ${KIND_WORDS[kind]}`);
  const width = days.length * (wide + 1);
  return svg("svg", { class: "strip", viewBox: `0 0 ${width} 16`, width, height: 16, role: "img", "aria-label": bad.length ? bad.slice(-5).join(", ") : `${many(days.length, "night")}, all ok` }, cells);
}

function shareBar(parts) {
  let left = 0;
  const rects = parts.map(([name, share]) => {
    const rect = svg("rect", { x: left * 100, y: 0, width: Math.max(share, 0) * 100, height: 10, class: `fill-${name}` });
    left += share;
    return rect;
  });
  const words = parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return svg("svg", { class: "share", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": words }, rects);
}

// Shares over nights as filled areas, the first at the bottom.
function areaStrip(columnsOfShares, names, label) {
  const count = columnsOfShares[0].length;
  const x = (at) => (count > 1 ? (at / (count - 1)) * 200 : 100);
  let floor = new Array(count).fill(0);
  const areas = columnsOfShares.map((shares, number) => {
    const roof = shares.map((share, at) => floor[at] + share);
    const up = roof.map((share, at) => `${x(at).toFixed(1)},${(40 - share * 40).toFixed(2)}`);
    const down = floor.map((share, at) => `${x(at).toFixed(1)},${(40 - share * 40).toFixed(2)}`).reverse();
    floor = roof;
    return svg("polygon", { points: [...up, ...down].join(" "), class: `fill-${names[number]}` });
  });
  return svg("svg", { class: "areas", viewBox: "0 0 200 40", preserveAspectRatio: "none", role: "img", "aria-label": label }, areas);
}

// A figure left or right of zero.
function balance(share, most) {
  const size = Math.min(Math.abs(share) / most, 1) * 30;
  return svg("svg", { class: "balance", viewBox: "0 0 60 10", width: 60, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 30, x2: 30, y1: 0, y2: 10, class: "zero" }),
    svg("rect", { x: share < 0 ? 30 - size : 30, y: 2, width: size, height: 6, class: share < 0 ? "fill-slow" : "fill-ok" }));
}
