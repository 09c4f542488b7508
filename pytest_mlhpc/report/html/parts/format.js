// Figures, times and shares as people read them.

const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "\u00b5"], [1e-9, "n"]];
const SCALED = new Set(["B", "B/s", "FLOP", "FLOP/s", "J", "W", "Hz", "s"]);

function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 100) return String(Number(value.toFixed(size >= 1000 ? 0 : 1)));
  return String(Number(value.toPrecision(4)));
}

function figure(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (unit === "1") return digits(value);
  if (!SCALED.has(unit) || value === 0) return `${digits(value)} ${unit}`;
  const size = Math.abs(value);
  const most = unit === "s" ? 1 : Infinity; // no kiloseconds
  const [factor, letter] = PREFIXES.find(([one]) => one <= most && size >= one) || PREFIXES[PREFIXES.length - 1];
  return `${digits(value / factor)} ${letter}${unit}`;
}

function percent(share, signed) {
  if (share === null || share === undefined) return "\u2013";
  const text = (Math.abs(share) * 100).toFixed(1);
  const sign = share < 0 && text !== "0.0" ? "\u2212" : signed && text !== "0.0" ? "+" : "";
  return `${sign}${text}\u202f%`;
}

function two(number) {
  return String(number).padStart(2, "0");
}

// All times are UTC, as in all that mlhpc prints.
function date(seconds) {
  const at = new Date(seconds * 1000);
  return `${at.getUTCFullYear()}-${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())}`;
}

function moment(seconds) {
  const at = new Date(seconds * 1000);
  return `${date(seconds)} ${two(at.getUTCHours())}:${two(at.getUTCMinutes())} UTC`;
}

function ago(seconds) {
  const hours = (content.made - seconds) / 3600;
  if (hours < 1) return "less than an hour before";
  return hours < 48 ? `${Math.round(hours)} h before` : `${Math.round(hours / 24)} days before`;
}

function many(number, one, more) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : more || `${one}s`}`;
}

// Whether a relative change is good: true, false, or null where nothing is good or bad.
function isGood(change, better) {
  if (!change || better === "none") return null;
  return (change > 0) === (better === "higher");
}

function badge(kind, text) {
  return el("span", { class: `badge ${kind}` }, el("span", { "aria-hidden": "true" }, `${KIND_SIGNS[kind]} `), text || KIND_WORDS[kind]);
}
