// The content of the page, as `encode.py` wrote it, unpacked as it is needed.

const content = JSON.parse(byId("content").textContent);
byId("content").remove(); // its text is no longer needed

const benches = new Map();
const rows = new Map();
for (const bench of content.benches) {
  benches.set(bench.id, bench);
  bench.machine = [bench.system, bench.partition].filter(Boolean).join(":");
  for (const row of bench.rows) rows.set(row.id, { bench, row });
}

const KIND_WORDS = {
  ok: "ok", unsure: "not judged", slow: "slower", broken: "broken", machine: "machine's fault", missing: "not run", unfit: "unfit",
};
const KIND_SIGNS = {
  ok: "\u2713", unsure: "?", slow: "\u25bc", broken: "\u2715", machine: "\u26a0", missing: "\u2013", unfit: "\u26a0",
};

// Columns of differences become columns of values, once, when the bench is first drawn.
function opened(bench) {
  if (bench.times) return bench;
  bench.times = summed(bench.at);
  bench.at = null;
  bench.counts = new Uint8Array(bench.times.length);
  let place = 0;
  bench.watched.forEach((length, turn) => {
    if (turn % 2) bench.counts.fill(1, place, place + length);
    place += length;
  });
  bench.failures = new Map(bench.failure);
  bench.mores = new Map(bench.more);
  bench.changes = new Map(bench.changed);
  return bench;
}

function summed(steps) {
  const values = new Float64Array(steps.length);
  let sum = 0;
  steps.forEach((step, place) => { values[place] = sum += step; });
  return values;
}

// A re-run follows a first attempt that was slower; the page folds it into that night unless re-runs are asked for.
function isRerun(bench, place) {
  return (bench.mores.get(place) || "").startsWith("re-run");
}

function isFolded(bench, place) {
  return shown.reruns !== "1" && isRerun(bench, place);
}

// The re-runs of the night at *place*: those that follow it.
function rerunsOf(bench, place) {
  const found = [];
  for (let next = place + 1; next < bench.times.length && isRerun(bench, next); next += 1) found.push(next);
  return isRerun(bench, place) ? [] : found;
}

function kindAt(bench, place) {
  return content.kinds[Number(bench.kind[place])];
}

function textAt(bench, column, place) {
  return content.texts[bench[column][place]];
}

// The newest night that counts; where none does, the newest.
function lastPlace(bench) {
  opened(bench);
  const place = bench.counts.lastIndexOf(1);
  return place < 0 ? bench.times.length - 1 : place;
}

function marksOf(bench) {
  return content.marks.filter((mark) => mark[1] === bench.system && (!mark[2] || mark[2] === bench.partition));
}

// What a search looks through; in small letters.
function searchable(bench) {
  if (!bench.words) {
    const last = lastPlace(bench);
    bench.words = [
      bench.label, bench.benchmark, bench.definition, bench.machine, bench.environment, bench.device, bench.test,
      textAt(bench, "nodes", last), textAt(bench, "commit", last), textAt(bench, "verdict", last),
    ].join(" ").toLowerCase();
  }
  return bench.words;
}
