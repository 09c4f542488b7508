// From the address to what is on the page.

const shown = { view: "", days: "", reruns: "" };

function themeOf() {
  try {
    const kept = localStorage.getItem("mlhpc-theme");
    if (kept === "dark" || kept === "light") return kept;
  } catch { /* a browser that keeps nothing for files */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
  colors.clear();
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try { localStorage.setItem("mlhpc-theme", theme); } catch { /* as above */ }
  redrawAll();
}

function redrawAll() {
  redraw(Number(shown.days));
  if (shown.view === "scaling") drawScaling();
  for (const node of document.querySelectorAll(".overlay")) {
    if (!node.chart.plot) continue;
    undraw(node.chart);
    if (node.chart.clientWidth) drawOverlay(node.chart);
  }
}

function makeView(state) {
  const main = byId("main");
  if (benchmarks.watcher) benchmarks.watcher.disconnect();
  for (const one of benchmarks.sections) one.nodes.forEach((node) => undraw(node.chart));
  benchmarks.sections = [];
  document.querySelectorAll(".overlay").forEach((node) => undraw(node.chart));
  if (list.watcher) list.watcher.disconnect();
  list.body = null;
  const makers = { overview: overviewView, list: listView, systems: overlayView, benchmarks: () => benchmarksView(Number(state.days)), time: splitView, scaling: scalingView, nodes: hostsView };
  main.replaceChildren(makers[state.view]());
  if (state.view === "scaling") drawScaling();
  for (const link of byId("views").children) {
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (byId("morning")) byId("morning").hidden = state.view !== "overview";
  makeFilters(state);
}

function foundText(state) {
  if (state.view === "benchmarks") {
    const [sections, count] = filterBenchmarks(state);
    return `${many(sections, "benchmark")}, ${many(count, "row")}${state.bench || state.row ? "; only what the link names" : ""}`;
  }
  if (state.view === "list") return many(filterList(state), "row");
  if (state.view === "systems") return many(filterOverlays(state), "benchmark");
  if (state.view === "time") return many(filterLines(state), "benchmark");
  if (state.view === "scaling") return many(filterScaling(state), "plot");
  if (state.view === "nodes") return many(filterHosts(state), "node");
  return many(filterOverview(state), "system");
}

function show() {
  hideTip();
  const state = stateOfAddress();
  const fresh = shown.view !== state.view;
  const drawn = shown.days === state.days && shown.reruns === state.reruns;
  Object.assign(shown, { view: state.view, days: state.days, reruns: state.reruns });
  if (fresh) makeView(state);
  else if (!drawn) redraw(Number(state.days));
  syncFilters(state);
  const found = byId("found");
  found.replaceChildren(foundText(state));
  if (state.bench || state.row) found.append(" ", el("a", { href: addressOf({ ...state, bench: "", row: "" }) }, "show all"));
  if (fresh) window.scrollTo(0, 0);
}

function begin() {
  setTheme(themeOf());
  byId("theme").addEventListener("click", switchTheme);
  byId("made").textContent = `${many(content.benches.length, "benchmark")} since ${date(content.since)}, made ${moment(content.made)}`;
  byId("views").append(...Object.entries(VIEWS).map(([view, name]) => el("a", { href: `#view=${view}`, "data-view": view }, name)));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  // A skip link must not change the address that holds the view.
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
  addEventListener("hashchange", show);
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    if (event.key === "/" && !event.target.closest("input, select, textarea")) {
      const search = document.querySelector("#filters input[type=search]");
      if (search && !byId("filters").hidden) { event.preventDefault(); search.focus(); }
    }
  });
  addEventListener("scroll", hideTip, { passive: true });
  let width = innerWidth;
  let timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; redrawAll(); } }, 150);
  });
  show();
  document.documentElement.dataset.ready = "yes";
}

begin();
