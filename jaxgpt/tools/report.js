// The report page: losses, samples, speed and configuration of a run.

const s = data.summary;
const SPEED = ["tokens_per_second", "grad_norm", "learning_rate"]; // metrics of the section on speed

// About n round numbers from low to high.
function ticks(low, high, n) {
  const least = (high - low) / n;
  const ten = 10 ** Math.floor(Math.log10(least));
  const apart = [1, 2, 5, 10].map((k) => k * ten).find((k) => k >= least);
  const first = Math.ceil(low / apart);
  return Array.from({ length: Math.floor(high / apart) - first + 1 }, (_, i) => (first + i) * apart);
}

// A chart over steps: series of { name, points: [[step, value]], color, dash, dots }.
// from: lowest value of the axis. null: the lowest of the data, and high values in the first tenth, before the model has learnt, are cut off.
function curves(label, unit, series, { height = 320, from = null } = {}) {
  const drawn = series.filter((one) => one.points.length);
  const keyed = drawn.length > 1; // the unit names a single line
  const [left, right, top, bottom, width] = [80, 14, 12, keyed ? 64 : 44, 860];
  const xs = drawn.flatMap((one) => one.points.map((p) => p[0]));
  const all = drawn.flatMap((one) => one.points.map((p) => p[1])).sort((a, b) => a - b);
  if (!all.length) return h("p", { class: "quiet" }, "No values were logged.");
  const ends = drawn.map((one) => one.points[Math.floor(one.points.length / 10)][1]);
  let [low, high] = from === null ? [all[0], Math.max(...ends)] : [from, all[all.length - 1]];
  if (high <= low) high = low + Math.max(Math.abs(low), 1e-6) * 0.1;
  const pad = (high - low) * 0.06;
  [low, high] = [from === null ? low - pad : from, high + pad];
  const last = Math.max(...xs, 1);
  const x = (step) => left + ((width - left - right) * step) / last;
  const y = (v) => top + (height - top - bottom) * (1 - (Math.min(Math.max(v, low), high) - low) / (high - low));
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "wide" });
  for (const v of ticks(low, high, 7)) {
    svg.append(h("line", { class: "axis", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      h("text", { class: "quiet", x: left - 6, y: y(v) + 4, "text-anchor": "end" }, Number(v.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 12 })));
  }
  for (const step of ticks(0, last, 8).filter(Number.isInteger)) {
    svg.append(h("text", { class: "quiet", x: x(step), y: height - bottom + 18, "text-anchor": x(step) > width - 40 ? "end" : "middle" }, step.toLocaleString("en")));
  }
  drawn.forEach((one, n) => {
    const path = h("path", { class: "line", d: `M${one.points.map(([step, v]) => `${x(step)},${y(v)}`).join("L")}`, "stroke-dasharray": one.dash || null });
    path.style.stroke = one.color;
    if (one.thin) path.style.strokeWidth = "1";
    svg.append(path);
    if (one.dots) one.points.forEach(([step, v]) => {
      const dot = h("circle", { cx: x(step), cy: y(v), r: 3 }, h("title", {}, `step ${step}: ${number(v, 5)}`));
      dot.style.fill = one.color;
      svg.append(dot);
    });
    if (!keyed) return;
    const key = h("line", { x1: left + 200 * n, x2: left + 200 * n + 24, y1: height - 10, y2: height - 10, "stroke-width": 2, "stroke-dasharray": one.dash || null });
    key.style.stroke = one.color;
    svg.append(key, h("text", { class: "quiet", x: left + 200 * n + 30, y: height - 6 }, one.name));
  });
  svg.append(h("text", { class: "quiet", x: width - right, y: height - bottom + 38, "text-anchor": "end" }, `optimiser step; ${unit}`));
  return svg;
}

function losses() {
  const { loss = [], val_loss = [] } = data.curves;
  const others = Object.entries(data.curves).filter(([name]) => !["loss", "val_loss", ...SPEED].includes(name));
  const rows = val_loss.map(([step, loss]) => [step.toLocaleString("en"), number(loss, 5)]);
  return section("losses", "Losses",
    s.skipped_steps.length ? h("p", {}, `Skipped steps: ${s.skipped_steps.slice(0, 20).join(", ")}.`) : null,
    curves("training and validation loss by step; the table below lists the validation losses", data.unit, [
      { name: "training, per batch", points: loss, color: "var(--cool)", thin: true },
      { name: "validation", points: val_loss, color: "var(--accent)", dots: true },
    ]),
    h("details", {}, h("summary", {}, "validation losses"), table(`${data.unit}, over the validation split`, ["step", "loss"], rows)),
    ...others.flatMap(([name, points]) => plot(name, points)));
}

// A small chart of one metric with its name as the heading.
function plot(name, points, options = {}) {
  return [h("h3", {}, name), curves(`${name} by step`, name, [{ name, points, color: "var(--accent)", thin: true }], { height: 180, ...options })];
}

function samples() {
  const kept = s.samples.map((one) => [h("h3", {}, `step ${one.step.toLocaleString("en")}`), h("blockquote", { class: "sample", lang: "" }, h("b", {}, one.prompt), one.text)]);
  return section("samples", "Samples through time",
    h("p", {}, "Generated from each kept checkpoint with the same prompt and the same seed. To keep more checkpoints, train with --train.keep-every."),
    ...(kept.length ? kept.flat() : [h("p", { class: "quiet" }, "The run has no checkpoints.")]));
}

function speed() {
  const t = s.throughput;
  const rate = (x) => (x === null ? "–" : Math.round(x).toLocaleString("en"));
  return section("speed", "Speed",
    h("p", {}, `${rate(t.tokens_per_second)} tokens per second (median); ${t.mfu === null ? "MFU unknown on this device" : `MFU ${percent(t.mfu)}`}; ${t.seconds === null ? "–" : Math.round(t.seconds).toLocaleString("en")} s in total, on ${s.device}.`),
    ...SPEED.flatMap((name) => plot(name.replaceAll("_", " "), data.curves[name] || [], { from: 0 })));
}

function configuration() {
  const shown = (value) => (value === null ? "none" : Array.isArray(value) ? value.join(" ") : String(value));
  const rows = (all) => all.map(([name, value]) => [name, h("td", { class: "text wide" }, shown(value))]);
  return section("configuration", "Configuration",
    table("fields that differ from the defaults", ["field", "value:"], rows(data.configuration.filter((one) => one[2]))),
    h("details", {}, h("summary", {}, "all fields"), table("all fields", ["field", "value:"], rows(data.configuration))));
}

begin(async () => {
  const best = s.validation_loss;
  const facts = [
    ["run", s.run], ["steps", `${s.steps.logged.toLocaleString("en")} of ${s.steps.planned.toLocaleString("en")}`],
    ["best validation loss", best.best === null ? "–" : `${number(best.best, 5)} at step ${best.at.toLocaleString("en")}`],
    ["parameters", s.parameters.toLocaleString("en")],
  ];
  const sections = [losses(), samples(), speed(), configuration()];
  document.body.append(
    h("a", { class: "skip", href: "#losses" }, "skip to the losses"),
    h("header", {}, h("h1", {}, data.title), h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
    h("nav", { "aria-label": "parts of the page" }, h("ul", {}, ...sections.map((one) => h("li", {}, h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent))))),
    h("main", {}, ...sections));
});
