"use strict";
// Shared by all pages. Text from users enters the page only as text nodes, never as HTML.

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

// The content of a token's element: its text, and a sign for what would be invisible.
function spelled(text) {
  const sign = text === "" || /[\n\t\r]/.test(text);
  return sign ? [h("span", { class: "mark" }, visible(text)), text.includes("\n") ? "\n" : ""] : [text];
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
