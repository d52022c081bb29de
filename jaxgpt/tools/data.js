// For pages that carry their data.

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

const KINDS = { u1: Uint8Array, i1: Int8Array, i4: Int32Array, f4: Float32Array };

// Return the array that Python's Arrays.put stored; of { values, shape } the values, which the page itself computed.
function array(reference) {
  if (reference.values) return reference.values;
  const size = reference.shape.reduce((a, b) => a * b, 1);
  return new KINDS[reference.type](bytes, reference.at, size);
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
    svg.append(h("text", { class: "quiet", x: x(i), y: height - bottom + 18, "text-anchor": x(i) > width - 40 ? "end" : "middle" }, name));
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
