// The sections of a page about one text: a position is selected, and every section shows the activations at that position.

// Draw now, and again when the data have changed.
const drawings = [];
function drawn(draw) {
  drawings.push(draw);
  draw();
}

const word = (i) => data.words[i];

// A click or a key selects a position; the one under the pointer is shown for as long as the pointer is there.
const selection = { fixed: 0, hovered: null, listeners: [] };
const selected = () => selection.hovered ?? selection.fixed;

function select(t, fixed) {
  const last = texts.text.length - 1;
  if (fixed) selection.fixed = Math.min(Math.max(t, 0), last);
  selection.hovered = fixed ? null : t;
  selection.listeners.forEach((listener) => listener(selected()));
}

function onSelect(listener) {
  selection.listeners.push(listener);
}

const texts = {};

// Show the tokens of a text as buttons: { element, mark(t), shade(f, label) }, where f(t) is 0 to 1. Each button is a span, so that
// lines break as in text. picked(t, fixed) is called when a token is selected (fixed) or hovered.
function strip(label, ids, picked) {
  const buttons = [...ids].map((id, t) => {
    return h("span", { role: "button", class: "tok", tabindex: t ? -1 : 0, "data-t": t }, ...spelled(word(id)));
  });
  const element = h("div", { class: "strip", role: "group", "aria-label": `${label}; use the arrow keys to move` }, ...buttons);
  const at = (event) => event.target.closest?.(".tok");
  element.addEventListener("pointerover", (event) => at(event) && picked(Number(at(event).dataset.t), false));
  element.addEventListener("pointerleave", () => picked(null, false));
  element.addEventListener("click", (event) => at(event) && picked(Number(at(event).dataset.t), true));
  arrows(element, ".tok", (t) => picked(t, true));
  let before = null;
  return {
    element,
    mark(t) {
      before?.classList.remove("here");
      before?.removeAttribute("aria-pressed");
      buttons.forEach((button, i) => (button.tabIndex = i === (t ?? 0) ? 0 : -1));
      before = t === null ? null : buttons[t];
      before?.classList.add("here");
      before?.setAttribute("aria-pressed", "true");
    },
    shade(much, label, color = "var(--hot)") {
      buttons.forEach((button, t) => {
        button.style.setProperty("--much", `${Math.round(100 * Math.min(Math.max(much(t), 0), 1))}%`);
        button.style.setProperty("--shade", color);
        button.setAttribute("aria-label", `${visible(word(ids[t]))}, position ${t}: ${label(t)}`);
      });
    },
  };
}

function guesses(guess, t) {
  const K = guess.ids.shape[1];
  const [ids, p] = [array(guess.ids), array(guess.p)];
  return [...Array(K).keys()].map((k) => ({ text: word(ids[t * K + k]), p: p[t * K + k] }));
}

function positionBar() {
  const current = h("output", { id: "position" });
  onSelect((t) => replace(current, `position ${t}, of 0 to ${texts.text.length - 1}: `, h("span", { class: "code" }, named(word(texts.text[t]))), data.bits[t] === null ? ", no context" : `, ${number(data.bits[t])} bits`));
  return h("div", { class: "position", role: "group", "aria-label": "selected position" },
    h("button", { type: "button", id: "previous", onclick: () => select(selection.fixed - 1, true) }, "← previous"),
    h("button", { type: "button", id: "next", onclick: () => select(selection.fixed + 1, true) }, "next →"),
    current);
}

function surprise() {
  const [explained, holder, panel] = [h("p"), h("div"), h("div", { id: "alternatives", "aria-live": "polite" })];
  let tokens;
  drawn(() => {
    tokens = strip("tokens of the text, shaded by surprise", texts.text, select);
    const known = data.bits.filter((b) => b !== null);
    const most = Math.max(...known, 1);
    tokens.shade((t) => (data.bits[t] ?? 0) / most, (t) => (data.bits[t] === null ? "no context" : `${number(data.bits[t])} bits`));
    const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    explained.textContent = `The shade of a token shows its surprise: −log₂ of the probability that the model gave it, in bits. Mean: ${number(mean)} bits per token; strongest shade: ${number(most)} bits.`;
    replace(holder, tokens.element);
  });
  onSelect((t) => {
    tokens.mark(t);
    if (t === 0) return replace(panel, h("p", {}, "The first token has no context, so the model does not predict it."));
    const p = data.guess.actual[t - 1];
    const rows = guesses(data.guess, t - 1).map((g) => [code(named(g.text)), percent(g.p), bar(g.p)]);
    replace(panel, table(`most probable tokens at position ${t}`, ["token", "probability", ""], rows),
      h("p", {}, "Actual token: ", h("span", { class: "code" }, named(word(texts.text[t]))), `, probability ${percent(p)}, ${number(data.bits[t])} bits.`));
  });
  return section("surprise", "Surprise", explained, h("div", { class: "columns" }, holder, panel));
}

// Attention -----------------------------------------------------------------------------------------------------------

function paint(canvas, roots, T, S, row = null) {
  canvas.width = S;
  canvas.height = T;
  const image = new ImageData(S, T);
  const ink = getComputedStyle(document.body).getPropertyValue("color").match(/[\d.]+/g).map(Number);
  for (let i = 0; i < T * S; i++) {
    for (let channel = 0; channel < 3; channel++) image.data[4 * i + channel] = ink[channel];
    const faded = row === null || row === Math.floor(i / S) ? 1 : 0.4;
    image.data[4 * i + 3] = roots[i] * faded;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// A head's mean attention weight on the previous token, the first token and the token itself. The means are over queries from
// the third token on, because the token before the second is the first.
function attentionShares(roots, n) {
  const [[, T, S], values, sums] = [roots.shape, array(roots), [0, 0, 0]];
  for (let t = 2; t < T; t++) {
    [t - 1, 0, t].forEach((s, i) => (sums[i] += (values[(n * T + t) * S + s] / 255) ** 2 / (T - 2)));
  }
  return T > 2 ? sums : null;
}

function attention() {
  const heads = [];
  const dialog = headDialog();
  const layers = data.attention.map(({ name, roots }, l) => {
    const buttons = [...Array(roots.shape[0]).keys()].map((n) => {
      const [canvas, lines] = [h("canvas", { "aria-hidden": "true" }), h("div")];
      const button = h("button", { type: "button", class: "head", "data-head": `${l},${n}`, onclick: () => dialog.show(l, n) },
        canvas, h("b", {}, `head ${n}`), lines);
      heads.push(() => {
        const map = data.attention[l];
        const [, T, S] = map.roots.shape;
        const share = attentionShares(map.roots, n);
        const shares = share ? `previous ${percent(share[0])}, first ${percent(share[1])}, itself ${percent(share[2])}` : "";
        button.setAttribute("aria-label", `${name}, head ${n}: ${shares}`);
        replace(lines, ...shares.split(", ").map((line) => h("div", {}, line)));
        paint(canvas, array(map.roots).subarray(n * T * S, (n + 1) * T * S), T, S);
      });
      return button;
    });
    return [h("h3", {}, name), h("div", { class: "heads" }, ...buttons)];
  });
  const redraw = () => heads.forEach((draw) => draw());
  drawn(redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return section("attention", "Attention",
    h("p", {}, "One map per head, with one row per token: its weights on the tokens that it can attend to. The more a pixel differs from the background, the larger the weight; the shade is the square root of the weight. Below each map: the share of attention on the previous token, on the first token and on the token itself, averaged over tokens from the third on. Click a map to enlarge it."),
    ...layers.flat(), dialog.element);
}

function headDialog() {
  const title = h("h2", { id: "head-title", tabindex: -1 });
  const canvas = h("canvas", { id: "map", "aria-hidden": "true" });
  const weights = h("div", { id: "attended", "aria-live": "polite" });
  const strips = h("div", {});
  const state = { l: 0, n: 0, t: 0, shown: 0 };
  let draw = () => {};
  const step = (d) => () => {
    const all = data.attention.flatMap((map, l) => [...Array(map.roots.shape[0]).keys()].map((n) => [l, n]));
    const at = all.findIndex(([l, n]) => l === state.l && n === state.n);
    open(...all[(at + d + all.length) % all.length]);
  };
  const element = h("dialog", { "aria-labelledby": "head-title", onclose: () => draw(state.t) },
    h("div", { class: "row" }, title,
      h("button", { type: "button", onclick: step(-1) }, "← head"), h("button", { type: "button", onclick: step(1) }, "head →"),
      h("button", { type: "button", id: "close", onclick: () => element.close() }, "close")),
    h("p", { class: "quiet" }, "Point at a token, or move with the arrow keys, to see its attention weights."),
    strips, h("div", { class: "columns" }, canvas, weights));

  function open(l, n) {
    Object.assign(state, { l, n });
    const map = data.attention[l];
    const [, T, S] = map.roots.shape;
    const roots = array(map.roots).subarray(n * T * S, (n + 1) * T * S);
    const weight = (t, s) => (roots[t * S + s] / 255) ** 2;
    title.textContent = `${map.name}, head ${n}`;
    const pick = (t, fixed) => {
      if (fixed) {
        state.t = t;
        select(t, true);
      }
      draw(t ?? state.t);
    };
    const tokens = strip("the text", texts.text, pick);
    replace(strips, tokens.element);
    draw = (t) => {
      state.shown = t;
      tokens.mark(t);
      const most = (Math.max(...roots.subarray(t * S, (t + 1) * S)) / 255) ** 2 || 1;
      tokens.shade((s) => weight(t, s) / most, (s) => percent(weight(t, s)));
      paint(canvas, roots, T, S, t);
      const order = [...Array(S).keys()].sort((a, b) => weight(t, b) - weight(t, a)).slice(0, 6);
      const rows = order.filter((s) => weight(t, s) > 0).map((s) => [code(named(word(texts.text[s]))), s, percent(weight(t, s)), bar(weight(t, s))]);
      replace(weights, table(`largest attention weights of position ${t}, ${named(word(texts.text[t]))}`, ["token", "position", "weight", ""], rows));
    };
    canvas.onpointermove = (event) => {
      const t = Math.floor((event.offsetY / canvas.clientHeight) * T);
      if (t >= 0 && t < T && t !== state.shown) draw(t);
    };
    canvas.onpointerleave = () => draw(state.t);
    state.t = selection.fixed;
    draw(state.t);
    if (element.open) return;
    element.showModal();
    title.focus();
  }
  drawn(() => element.open && open(state.l, state.n));
  return { element, show: open };
}

// The residual stream and its norms ------------------------------------------------------------------------------------

const branchName = (name) => name.replace(/^h_(\d+)\/attn$/, (_, i) => `attention ${i}`).replace(/^h_(\d+)\/mlp$/, (_, i) => `MLP ${i}`);
const normName = (name) => name.replace(/^h_(\d+)\/ln_(1|2)(_out)?$/, (_, i, n, out) => `layer ${i}, ${{ 1: "attention", 2: "MLP" }[n]}${out ? " output" : ""}`).replace(/^ln_f$/, "final norm");

function stream() {
  const panel = h("div", {});
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const names = ["embedding", ...data.branches.map((b) => branchName(b.name))];
  const short = ["emb", ...data.branches.map((b) => b.name.replace(/^h_(\d+)\/(.).*$/, (_, i, kind) => `${{ a: "att", m: "mlp" }[kind]} ${i}`))];
  onSelect((t) => {
    const at = (pick) => data.branches.map((b) => pick(b));
    const norms = [data.start[t], ...at((b) => b.stream[t])];
    const added = [null, ...at((b) => b.added[t])];
    const rows = names.map((name, i) => [name, i ? number(added[i]) : "–", number(norms[i]), number(i ? mean(data.branches[i - 1].stream) : mean(data.start))]);
    replace(panel,
      chart(`norms by layer at position ${t}`, short, [
        { name: "stream, this position", values: norms, color: "var(--accent)" },
        { name: "stream, mean", values: [mean(data.start), ...at((b) => mean(b.stream))], color: "var(--quiet)", dash: "2 4" },
        { name: "added, this position", values: added, color: "var(--hot)", dash: "7 3" },
      ]),
      table(`Euclidean norms at position ${t}`, ["after", "added", "stream", "stream, mean over positions"], rows));
  });
  return section("stream", "The residual stream",
    h("p", {}, "The Euclidean norm of a token's vector along the layers, and of the output that each attention and each MLP adds to it."), panel);
}

function norms() {
  const kind = data.norms[0]?.centred ? "LayerNorm" : "RMSNorm";
  const [all, one] = [h("div", { class: "scroll" }), h("div", { class: "scroll", id: "norm-elements" })];
  const select = h("select", { id: "norm", onchange: () => draw(selected()) }, ...data.norms.map((norm, i) => h("option", { value: i }, normName(norm.name))));
  const spread = (x) => (x === null ? "none" : `${number(x.reduce((a, b) => a + b, 0) / x.length)} (${number(Math.min(...x))} to ${number(Math.max(...x))})`);
  const draw = (t) => {
    replace(all, table(`each ${kind} at position ${t}; gamma and beta: mean (minimum to maximum)`, ["norm", "mean before", "variance before", "gamma", "beta", "mean after", "variance after"],
      data.norms.map((n) => [normName(n.name), number(n.before.mean[t]), number(n.before.variance[t]), spread(n.scale), spread(n.bias), number(n.after.mean[t]), number(n.after.variance[t])])));
    const n = data.norms[Number(select.value)];
    const [mean, variance] = [n.before.mean[t], n.before.variance[t]];
    const inner = (x) => (n.centred ? (x - mean) / Math.sqrt(variance + n.eps) : x / Math.sqrt(variance + mean * mean + n.eps));
    const x = n.x[t];
    const row = (name, f) => [name, ...Array.from(x, (_, i) => number(f(i)))];
    replace(one, table(`${normName(n.name)}, position ${t}: the first ${x.length} elements of the vector`, ["", ...x.keys()], [
      row("x", (i) => x[i]),
      row(n.centred ? "(x − mean) / √(variance + ε)" : "x / √(mean of x² + ε)", (i) => inner(x[i])),
      row("gamma", (i) => n.scale[i]),
      ...(n.bias ? [row("beta", (i) => n.bias[i])] : []),
      row("result", (i) => inner(x[i]) * n.scale[i] + (n.bias?.[i] ?? 0)),
    ]));
  };
  onSelect(draw);
  return section("norms", kind,
    h("p", {}, `Before or after each attention and MLP, ${kind} normalises a token's vector to ${data.norms[0]?.centred ? "mean 0 and variance 1" : "a mean square of 1"}; then gamma scales each element${data.norms.some((n) => n.bias) ? " and beta shifts it" : ""}.`),
    all, h("h3", {}, "Element by element"), h("div", { class: "row" }, h("label", { for: "norm" }, "norm"), select), one);
}

// The MLP ----------------------------------------------------------------------------------------------------------------

function mlp() {
  const state = { layer: 0, unit: 0 };
  let tokens;
  const [top, peakLine, examples] = [h("div", { id: "units", "aria-live": "polite" }), h("p", {}), h("div", { id: "examples" })];
  const holder = h("div");
  const layer = h("select", { id: "mlp-layer", onchange: () => pick(Number(layer.value), null) }, ...data.mlp.map((_, i) => h("option", { value: i }, `layer ${i}`)));
  const unit = h("input", { id: "unit", type: "number", min: 0, step: 1, onchange: () => pick(state.layer, Number(unit.value)) });

  const best = (t) => {
    const m = data.mlp[state.layer];
    const [, K] = m.top.shape;
    const [ids, values] = [array(m.top), array(m.values)];
    return [...Array(K).keys()].map((k) => ({ unit: ids[t * K + k], value: values[t * K + k] }));
  };

  function list(t) {
    tokens.mark(t);
    const m = data.mlp[state.layer];
    const units = best(t);
    const most = Math.max(...units.map((u) => u.value), 1e-9);
    const rows = units.map((u) => [h("button", { type: "button", "data-unit": u.unit, onclick: () => pick(state.layer, u.unit) }, u.unit), number(u.value), bar(u.value / most)]);
    replace(top, table(`layer ${state.layer}: the most active units at position ${t}`, ["unit", "activation", ""], rows),
      h("p", {}, m.zeros ? `Zero at this position: ${percent(m.zeros[t])} of ${m.units} units. Zero at every position: ${m.silent} units.` : `${m.units} units; their activation function gives no exact zeros.`));
  }

  function show() {
    const m = data.mlp[state.layer];
    const T = texts.text.length;
    const levels = array(m.levels).subarray(state.unit * T, (state.unit + 1) * T);
    const peak = array(m.peaks)[state.unit];
    unit.max = m.units - 1;
    unit.value = state.unit;
    tokens.shade((t) => levels[t] / 15, (t) => `about ${number((levels[t] / 15) * peak, 2)}`);
    peakLine.textContent = `Unit ${state.unit} of layer ${state.layer}: ${peak > 0 ? `largest activation on this text ${number(peak)}` : "never above zero on this text"}.`;
    if (!data.corpus) return replace(examples, h("p", { class: "quiet" }, `No examples from a corpus. ${data.why_no_corpus}`));
    const K = m.examples.shape[1];
    const at = array(m.examples).subarray(state.unit * K, (state.unit + 1) * K);
    const values = array(m.example_values).subarray(state.unit * K, (state.unit + 1) * K);
    const rows = [...Array(K).keys()].map((k) => [number(values[k]), context(at[k])]);
    replace(examples, table("top activating examples from the corpus", ["activation", "text:"], rows));
  }

  function pick(l, u) {
    const units = data.mlp[l].units;
    state.layer = l;
    state.unit = Math.min(Math.max(Math.floor(u ?? best(selected())[0].unit) || 0, 0), units - 1);
    list(selected());
    show();
  }

  drawn(() => {
    tokens = strip("tokens of the text, shaded by the unit's activation", texts.text, select);
    replace(holder, tokens.element);
    show();
  });
  onSelect(list);
  queueMicrotask(() => pick(0, null));
  return section("mlp", "The MLP",
    h("p", {}, "Select a hidden unit of an MLP to see where it is active, in this text and in the corpus."),
    h("div", { class: "row" }, h("label", { for: "mlp-layer" }, "layer"), layer, h("label", { for: "unit" }, "unit"), unit),
    h("div", { class: "columns" }, h("div", {}, peakLine, holder, examples), top));
}

// A position of the corpus with its neighbours in the window that the model read.
function context(at) {
  const ids = array(data.corpus.ids);
  const first = Math.floor(at / data.corpus.window) * data.corpus.window;
  const text = (from, to) => [...ids.subarray(from, to)].map(word).join("").replaceAll("\n", "↵");
  const [from, to] = [Math.max(first, at - 28), Math.min(first + data.corpus.window, at + 12)];
  return h("td", { class: "text wide" }, text(from, at), h("mark", {}, visible(word(ids[at]))), text(at + 1, to));
}

// The logit lens, embeddings, sampling ------------------------------------------------------------------------------------------

function lens() {
  const panel = h("div", { id: "lens-predictions", "aria-live": "polite" });
  const holder = h("div", { class: "scroll" });
  let cells;
  drawn(() => {
    cells = [];
    const rows = data.lens.map((guess, l) => {
      const [ids, p] = [array(guess.ids), array(guess.p)];
      const K = guess.ids.shape[1];
      const row = [...texts.text].map((_, t) => {
        const cell = h("td", { class: "text", "data-t": t, "--much": `${Math.round(85 * p[t * K])}%` }, visible(word(ids[t * K])));
        (cells[t] ??= []).push(cell);
        return cell;
      });
      return [l ? `after layer ${l - 1}` : "embedding", ...row];
    }).reverse();
    const grid = table("most probable next token at each position (columns), predicted from the stream after each layer (rows)",
      ["", ...[...texts.text].map((id) => visible(word(id)))], rows);
    grid.classList.add("lens");
    replace(holder, grid);
  });
  const at = (event) => event.target.closest?.("td[data-t]");
  holder.addEventListener("pointerover", (event) => at(event) && select(Number(at(event).dataset.t), false));
  holder.addEventListener("pointerleave", () => select(null, false));
  holder.addEventListener("click", (event) => at(event) && select(Number(at(event).dataset.t), true));
  let before = [];
  onSelect((t) => {
    before.forEach((cell) => cell.classList.remove("here"));
    before = cells[t];
    before.forEach((cell) => cell.classList.add("here"));
    const next = texts.text[t + 1];
    const rows = data.lens.map((guess, l) => [l ? `layer ${l - 1}` : "embedding",
      h("td", { class: "text" }, guesses(guess, t).map((g) => `${named(g.text)} ${percent(g.p)}`).join("  ")),
      next === undefined ? "–" : percent(guess.actual[t])]);
    replace(panel, table(`predictions at position ${t}, after ${named(word(texts.text[t]))}`, ["from the stream after", "most probable:", next === undefined ? "actual token" : `actual token ${named(word(next))}`], rows));
  });
  return section("lens", "The logit lens",
    h("p", {}, "The next token that the model would predict after each layer: its final norm and output matrix, applied to the residual stream there. The more a cell differs from the background, the higher the probability."),
    holder, panel);
}

function embeddings() {
  const e = data.embedding;
  const [ids, xy, near, cosine] = [array(e.ids), array(e.xy), array(e.near), array(e.cosine)];
  const K = e.near.shape[1];
  const [width, height] = [720, 520];
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "map of the token embeddings; the table next to it lists the nearest tokens" });
  const labels = [...ids].map((id, i) => {
    const label = h("text", { x: width / 2 + xy[2 * i] * (width / 2 - 24), y: height / 2 - xy[2 * i + 1] * (height / 2 - 20), "text-anchor": "middle", "data-i": i }, visible(word(id)));
    svg.append(label);
    return label;
  });
  const select = h("select", { id: "embedding-token", onchange: () => show(Number(select.value)) }, ...[...ids].map((id, i) => h("option", { value: i }, visible(word(id)))));
  const panel = h("div", { id: "neighbours", "aria-live": "polite" });
  const show = (i) => {
    select.value = i;
    const close = [...near.subarray(i * K, (i + 1) * K)];
    labels.forEach((label, j) => label.setAttribute("class", j === i ? "chosen" : close.includes(j) ? "near" : "dim"));
    replace(panel, table(`tokens nearest to ${named(word(ids[i]))}, by cosine similarity`, ["token", "cosine"], close.map((j, k) => [code(named(word(ids[j]))), number(cosine[i * K + k], 2)])));
  };
  svg.addEventListener("pointerover", (event) => event.target.dataset?.i && show(Number(event.target.dataset.i)));
  svg.addEventListener("click", (event) => event.target.dataset?.i && show(Number(event.target.dataset.i)));
  onSelect((t) => {
    const i = ids.indexOf(texts.text[t]);
    if (i >= 0) show(i);
  });
  return section("embeddings", "Embeddings",
    h("p", {}, `${e.ids.shape[0]} of ${e.of} token vectors, projected on their first two principal components (${percent(e.share[0])} and ${percent(e.share[1] ?? 0)} of the variance).`),
    h("div", { class: "columns" }, h("div", { class: "scroll" }, svg), h("div", {}, h("div", { class: "row" }, h("label", { for: "embedding-token" }, "token"), select), panel)));
}

// As jaxgpt's `Sampling`: temperature, then top-k, then top-p. logits are sorted, largest first. Returns the probabilities of the
// tokens that can be drawn.
function distribution(logits, { temperature, topK, topP }) {
  if (temperature === 0) return [1];
  const kept = logits.subarray(0, topK ?? logits.length);
  const weights = Float64Array.from(kept, (x) => Math.exp((x - logits[0]) / temperature));
  const normal = (w) => {
    const sum = w.reduce((a, b) => a + b, 0);
    return w.map((x) => x / sum);
  };
  const p = normal(weights);
  if (topP >= 1) return p;
  let [count, mass] = [0, 0];
  while (count < p.length && mass < topP) mass += p[count++];
  return normal(p.subarray(0, Math.max(count, 1)));
}

const chosen = { temperature: 1, topK: null, topP: 1 }; // by the sliders

function sampling() {
  const V = array(data.sampling.logits).length;
  const most = Math.min(V, 200);
  const panel = h("div", { id: "drawn", "aria-live": "polite" });
  const slider = (id, label, min, max, step, value, shown) => {
    const out = h("output", { for: id });
    const input = h("input", { id, type: "range", min, max, step, value, oninput: () => draw() });
    return { input, row: h("div", { class: "slider" }, h("label", { for: id }, label), input, out), update: () => (out.textContent = shown(Number(input.value))) };
  };
  const temperature = slider("temperature", "temperature", 0, 3, 0.05, data.sampling.temperature, (v) => (v ? v.toFixed(2) : "0: greedy"));
  const topK = slider("top-k", "top-k", 1, most, 1, most, (v) => (v === most ? "off" : String(v)));
  const topP = slider("top-p", "top-p", 0.01, 1, 0.01, 1, (v) => (v === 1 ? "off" : v.toFixed(2)));
  const draw = () => {
    [temperature, topK, topP].forEach((control) => control.update());
    const [ids, logits] = [array(data.sampling.ids), array(data.sampling.logits)];
    const k = Number(topK.input.value);
    Object.assign(chosen, { temperature: Number(temperature.input.value), topK: k === most ? null : k, topP: Number(topP.input.value) });
    const p = distribution(logits, chosen);
    const bits = -p.reduce((sum, x) => sum + (x > 0 ? x * Math.log2(x) : 0), 0);
    const rows = [...p.slice(0, Math.min(20, ids.length))].map((x, i) => [code(named(word(ids[i]))), h("td", { "data-p": x }, percent(x)), bar(x, 14)]);
    replace(panel, h("p", {}, `Tokens that can be drawn: ${p.length} of ${V}. Entropy: ${number(bits)} bits.`), table("most probable", ["token", "probability", ""], rows));
  };
  drawn(draw);
  return section("sampling", "Sampling",
    h("p", {}, "The distribution from which the token after the last one is drawn."),
    temperature.row, topK.row, topP.row, panel);
}

// ------------------------------------------------------------------------------------------------------------------------

// Draw the page, with other parts between its head and its sections.
function drawPage(...parts) {
  const sections = [surprise(), attention(), norms(), stream(), mlp(), lens(), embeddings(), sampling()];
  const links = sections.map((s) => h("li", {}, h("a", { href: `#${s.id}` }, s.querySelector("h2").textContent)));
  document.body.append(
    h("a", { class: "skip", href: "#surprise" }, "skip to the text"),
    h("header", {}, h("h1", {}, data.title),
      h("dl", { class: "facts" }, ...data.facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("p", {}, "Layers, heads, positions, units and elements are counted from 0, as in jaxgpt.interventions.")),
    ...parts, h("nav", { "aria-label": "parts of the page" }, h("ul", {}, ...links)),
    positionBar(), h("main", {}, ...sections));
  select(Math.min(1, texts.text.length - 1), true);
}
