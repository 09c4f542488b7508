// Making elements. Text only ever becomes text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") node.append(child);
  }
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// What a phone shows below the first cell of a line, as the column of its own is left out there.
function narrow(text) {
  return el("span", { class: "narrow small" }, text);
}

function byId(id) {
  return document.getElementById(id);
}

// Said to screen readers, shown to nobody.
function say(text) {
  byId("said").textContent = text;
}

function table(caption, heads, rows) {
  return el("div", { class: "wide", role: "region", "aria-label": caption, tabindex: "0" },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, at) =>
        at === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}
