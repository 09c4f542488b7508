// What is said of one night: beside the pointer, and to screen readers.

function nightLines(bench, row, place) {
  const lines = [`${moment(bench.times[place])}`];
  const value = row.values[place];
  if (value !== null) {
    const centre = row.band ? row.band[0] : null;
    const against = centre ? ` (${percent((value - centre) / centre, true)} of the accepted value)` : "";
    lines.push(`${figure(value, row.unit)}${against}`);
  }
  const verdict = textAt(bench, "verdict", place);
  lines.push(verdict + (bench.mores.has(place) ? `, ${bench.mores.get(place)}` : ""));
  const again = rerunText(bench, row, place);
  if (again) lines.push(again);
  if (bench.failures.has(place)) lines.push(bench.failures.get(place).split("\n")[0].slice(0, 200));
  const nodes = textAt(bench, "nodes", place);
  if (nodes) lines.push(`on ${nodes.length > 120 ? `${nodes.slice(0, 120)}\u2026` : nodes}`);
  const commit = textAt(bench, "commit", place);
  if (commit) lines.push(`commit ${commit.slice(0, 12)}`);
  for (const line of bench.changes.get(place) || []) lines.push(`changed: ${line}`);
  const shift = row.shifts.find((one) => one[1] <= place && place <= one[2]);
  if (shift) lines.push(`change point: ${percent(shift[5], true)}`);
  for (const mark of marksOf(bench)) {
    if (date(mark[0]) === date(bench.times[place])) lines.push(`event: ${mark[3]}`);
  }
  return lines;
}

function showTip(lines, left, top) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line, at) => el("div", { class: at === 1 ? "strong" : null }, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const besides = left + 14 + box.width > room ? left - 14 - box.width : left + 14;
  tip.style.left = `${Math.max(4, Math.min(besides, room - box.width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(top + 14, window.innerHeight - box.height - 4))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
