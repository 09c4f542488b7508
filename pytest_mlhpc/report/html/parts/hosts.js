// The view of nodes: what ran where, how fast, and what vetting said.

const HOST_COLUMNS = [
  ["Node", (host) => host.name], ["System", (host) => host.system], ["Runs", (host) => host.runs], ["Failed", (host) => host.failed],
  ["Against its peers", (host) => (host.deviation === null ? -Infinity : host.deviation)], ["Unfit", (host) => host.unfit],
  ["Last reason", (host) => host.reason], ["Last seen", (host) => host.last],
];

function hostsView() {
  if (!content.hosts.length) return el("p", { class: "calm" }, "No record names its nodes.");
  const body = el("tbody", {}, content.hosts.map(hostLine));
  const heads = HOST_COLUMNS.map(([name, value]) => {
    const head = el("th", { scope: "col", class: name === "System" ? "machine" : null });
    head.append(el("button", { type: "button", class: "quiet", onclick: () => sortHosts(head, body, value) }, name));
    return head;
  });
  return el("div", {},
    el("p", { class: "small", id: "peers" }, "\u201cAgainst its peers\u201d: the median of how far judged figures of runs on this node alone lie from the level of their series then; positive is faster. In brackets, how many figures."),
    kindLegend([...content.kinds, "unfit"].filter((kind) => content.hosts.some((host) => host.days.some(([, one]) => one === kind)))),
    el("div", { class: "wide", role: "region", "aria-label": "Nodes", tabindex: "0" },
      el("table", { class: "hosts", "aria-describedby": "peers" },
        el("thead", {}, el("tr", {}, heads, el("th", { scope: "col" }, "Nights"))), body)));
}

function hostLine(host) {
  const told = host.deviation === null ? "\u2013" : [balance(host.deviation, 0.1), ` ${percent(host.deviation, true)}`, el("span", { class: "small" }, ` (${host.figures})`)];
  const line = el("tr", {}, el("th", { scope: "row" }, host.name, narrow(host.system)), el("td", { class: "machine" }, host.system), el("td", {}, host.runs), el("td", { class: host.failed ? "bad" : null }, host.failed),
    el("td", {}, told), el("td", { class: host.unfit ? "bad" : null }, host.unfit ? many(host.unfit, "time") : "0"),
    el("td", { class: "reason" }, host.reason ? `${date(host.reasonAt)}: ${host.reason}` : ""), el("td", {}, date(host.last)), el("td", {}, hostStrip(host.days)));
  line.host = host;
  return line;
}

function sortHosts(head, body, value) {
  const down = head.getAttribute("aria-sort") !== "descending";
  head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const lines = [...body.children].sort((a, b) => {
    const [one, two] = [value(a.host), value(b.host)];
    return typeof one === "string" ? one.localeCompare(two, "en", { numeric: true }) : one - two;
  });
  body.replaceChildren(...(down ? lines.reverse() : lines));
}

function filterHosts(state) {
  const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const line of document.querySelectorAll(".hosts tbody tr")) {
    const text = `${line.host.name} ${line.host.system} ${line.host.reason}`.toLowerCase();
    line.hidden = (Boolean(state.system) && line.host.system !== state.system) || !words.every((word) => text.includes(word));
    shown += line.hidden ? 0 : 1;
  }
  return shown;
}
