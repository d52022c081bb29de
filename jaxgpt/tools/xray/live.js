// The page that is the model: one types or lets it write, and switches heads and MLPs off.

const SLICE = 12; // ms of computing per frame; the rest is the browser's
const REDRAW = 250; // ms between drawings while it writes
const PAUSE = 50; // ms after the last key before the text is read

let engine, tokenizer;
const state = { ids: [], writing: false, working: false, stale: false, drawnAt: 0, pieces: null, fresh: "", since: 0, until: 0, written: 0 };
const box = h("textarea", { id: "text", rows: 4, spellcheck: false, autocomplete: "off", autocapitalize: "off" });
const [said, noticed] = [h("p", { id: "said", class: "quiet", "aria-live": "polite" }), h("p", { id: "unknown", role: "status" })];
const writeButton = h("button", { type: "button", id: "write", onclick: () => write(!state.writing) });

// A full context moves on by half, so that what was read of the rest is read again only then.
function firstRead() {
  const [C, n] = [engine.C, state.ids.length];
  const hop = Math.max(C >> 1, 1);
  return n <= C ? 0 : Math.ceil((n - C) / hop) * hop;
}

function readText() {
  const { ids, unknown } = tokenizer.encode(box.value);
  state.ids = [...data.prefix, ...ids];
  if (!state.ids.length) state.ids = [data.empty];
  state.pieces = new TextDecoder("utf-8", { ignoreBOM: true });
  noticed.textContent = unknown.length ? `Skipped, because the model knows no such character: ${unknown.map(named).join(" ")}` : "";
  start();
}

function start() {
  state.stale = true;
  if (!state.working) requestAnimationFrame(work);
  state.working = true;
}

// Read what has not been read, or write the next token; return whether there was something to do.
function advance() {
  const tokens = state.ids.slice(firstRead());
  const read = engine.keep(tokens);
  if (read < tokens.length) engine.step(tokens[read]);
  else if (state.writing) {
    const { ids, logits } = engine.ranked();
    const p = distribution(logits, chosen);
    let [left, at] = [Math.random(), 0];
    while (at + 1 < p.length && (left -= p[at]) >= 0) at++;
    if (data.stop.includes(ids[at])) return write(false);
    state.ids.push(ids[at]);
    state.written++;
    state.until = performance.now();
    state.fresh += state.pieces.decode(tokenizer.bytes[ids[at]], { stream: true });
  } else return false;
  state.stale = true;
  return true;
}

function work() {
  const begun = performance.now();
  let more = true;
  while (more && performance.now() - begun < SLICE) more = advance();
  if (state.fresh) {
    box.value += state.fresh;
    box.scrollTop = box.scrollHeight;
    state.fresh = "";
  }
  if (state.stale && (!more || begun - state.drawnAt > REDRAW)) show();
  state.working = more;
  if (more) requestAnimationFrame(work);
}

function show() {
  const last = selection.fixed >= texts.text.length - 1;
  update();
  selection.hovered = null;
  selection.fixed = last ? texts.text.length - 1 : Math.min(selection.fixed, texts.text.length - 1);
  drawings.forEach((draw) => draw());
  select(selection.fixed, true);
  const [all, read] = [state.ids.length, texts.text.length];
  said.textContent = [`${all} tokens; ${read < all ? `the model reads the last ${read}, at most ${engine.C}` : `at most ${engine.C} are read`}.`,
    state.written ? `Written: ${state.written} tokens, ${number((1000 * state.written) / (state.until - state.since))} per second.` : "",
    engine.off.size ? `Switched off: ${engine.off.size}.` : ""].join(" ");
  state.drawnAt = performance.now();
  state.stale = false;
}

function update() {
  const { sampling, ...rest } = engine.activations();
  Object.assign(data, rest);
  Object.assign(data.sampling, sampling);
  texts.text = engine.tokens.slice();
}

function write(on) {
  state.writing = on;
  replace(writeButton, on ? "stop" : "write");
  if (on) Object.assign(state, { since: performance.now(), written: 0 });
  start();
  return false;
}

// One row of switches per layer: its heads, then its MLP.
function switches() {
  const toggle = (part, name) => {
    const set = () => {
      const off = engine.off.has(part);
      button.setAttribute("aria-pressed", !off);
      document.querySelector(`[data-head="${part}"]`)?.classList.toggle("off", off);
    };
    const button = h("button", { type: "button", class: "switch", "aria-pressed": true, "data-part": part, "aria-label": name,
      onclick: () => [engine.toggle(part), start()] }, name.replace(/.*, /, ""));
    drawings.push(set);
    return button;
  };
  const row = (_, l) => [h("span", {}, `layer ${l + 1}`), h("div", { class: "switches" },
    ...[...Array(engine.N).keys()].map((n) => toggle(`${l},${n}`, `layer ${l + 1}, head ${n + 1}`)), toggle(`${l},mlp`, `layer ${l + 1}, MLP`))];
  const all = h("button", { type: "button", id: "all-on", onclick: () => [engine.restore(), start()] }, "all on");
  return h("div", {}, h("p", {}, "Click a head or an MLP to switch it off: its output becomes zero. ", all), h("div", { class: "layers" }, ...engine.layers.flatMap(row)));
}

begin(() => {
  tokenizer = new Tokenizer(data.tokenizer);
  engine = new Engine(data.model);
  engine.step(data.empty);
  update();
  const part = section("live", "Text",
    h("p", {}, "Type, or let the model write. All of it runs on this page: the model, its tokenizer and the sections below."),
    h("label", { class: "sr", for: "text" }, "text"), box, h("div", { class: "row" }, writeButton), noticed, said, switches());
  drawPage(part);
  writeButton.after(document.getElementById("temperature").closest(".slider"));
  box.addEventListener("input", () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(readText, PAUSE);
  });
  box.value = data.prompt;
  write(false);
  readText();
  return new Promise((done) => drawings.push(done));
});
