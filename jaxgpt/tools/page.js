"use strict";
// Shared by all pages. Text from users enters the page only as text nodes, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
let bytes; // the contents of all arrays

async function unpack() {
  const packed = atob(document.getElementById("arrays").textContent);
  const raw = Uint8Array.from(packed, (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  bytes = await new Response(stream).arrayBuffer();
}

// Draw the page once its arrays are unpacked, and set data-ready; show an error on the page, not only in the console.
function begin(draw) {
  unpack().then(draw).then(
    () => (document.documentElement.dataset.ready = "true"),
    (error) => {
      document.documentElement.dataset.failed = "true";
      document.body.prepend(h("p", { role: "alert" }, `This page could not be drawn (${error}). It needs a browser from 2024 or later.`));
      throw error;
    });
}

const KINDS = { u1: Uint8Array, i4: Int32Array, f4: Float32Array };

// Return the array that Python's Arrays.put stored.
function array(reference) {
  const size = reference.shape.reduce((a, b) => a * b, 1);
  return new KINDS[reference.type](bytes, reference.at, size);
}

// Create an element: h("p", { class: "quiet", onclick: f }, "text", child, ...).
function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "text", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), ...children);
}

function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3)) return x.toExponential(1);
  return String(Number(x.toPrecision(digits)));
}

function percent(p) {
  if (p > 0 && p < 1e-4) return "<0.01%";
  return p >= 0.0995 || p === 0 ? `${Math.round(100 * p)}%` : `${Number((100 * p).toPrecision(2))}%`;
}

// Show a token: whitespace that would be invisible becomes a sign.
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍").replace(/^ +| +$/g, (s) => "␣".repeat(s.length)) || "∅";
}

const named = (text) => `“${visible(text)}”`;

// A table of rows of cells, each a text, a number or an element; the first cell of a row is its header. A column whose name
// ends in ":" is aligned to the left.
function table(caption, columns, rows) {
  const cell = (value, at) => (value instanceof HTMLTableCellElement ? value : h(at ? "td" : "th", at ? {} : { scope: "row" }, value));
  const head = (name) => h("th", { scope: "col", class: String(name).endsWith(":") ? "text" : null }, String(name).replace(/:$/, ""));
  return h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...columns.map(head))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell)))));
}

const code = (text) => h("td", { class: "text" }, text);

function bar(share, width = 6) {
  const element = h("span", { class: "bar", "aria-hidden": "true" });
  element.style.width = `${Math.max(share * width, 0.05)}rem`;
  return element;
}

// Only one button of a group is in the Tab order; arrow keys move within the group.
function arrows(group, selector, moved) {
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    const all = [...group.querySelectorAll(selector)];
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
    next.focus();
    moved(all.indexOf(next));
  });
}

function replace(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

// A line chart: series of { name, values, color, dash } over the names of the points.
function chart(label, names, series, height = 260) {
  const [left, top, width, bottom] = [52, 12, 760, 46];
  const all = series.flatMap((s) => s.values).filter((v) => v !== null);
  const most = Math.max(...all, 1e-9) * 1.05;
  const x = (i) => left + ((width - left - 12) * i) / Math.max(names.length - 1, 1);
  const y = (v) => top + (height - top - bottom) * (1 - v / most);
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const v of [0, most / 2, most]) {
    svg.append(h("line", { class: "axis", x1: left, x2: width - 12, y1: y(v), y2: y(v) }));
    svg.append(h("text", { class: "quiet", x: left - 6, y: y(v) + 4, "text-anchor": "end" }, number(v, 2)));
  }
  const every = Math.ceil(names.length / 14);
  names.forEach((name, i) => {
    if (i % every) return;
    svg.append(h("text", { class: "quiet", x: x(i), y: height - bottom + 18, "text-anchor": "middle" }, name));
  });
  series.forEach((s, n) => {
    const points = s.values.map((v, i) => (v === null ? null : `${x(i)},${y(v)}`)).filter((p) => p !== null);
    const path = h("path", { class: "line", d: `M${points.join("L")}`, "stroke-dasharray": s.dash || null });
    path.style.stroke = s.color;
    svg.append(path, h("title", {}, s.name));
    const key = h("line", { x1: left + 190 * n, x2: left + 190 * n + 24, y1: height - 12, y2: height - 12, "stroke-width": 2, "stroke-dasharray": s.dash || null });
    key.style.stroke = s.color;
    svg.append(key, h("text", { class: "quiet", x: left + 190 * n + 30, y: height - 8 }, s.name));
  });
  return svg;
}
