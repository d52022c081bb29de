// The page that is the model: one types or lets it write, and switches heads and MLPs off.

const SLICE = 12; // ms of computing per frame; the rest is the browser's
const REDRAW = 250; // ms between drawings while it reads or writes, or three times what one takes if that is more
const PAUSE = 50; // ms after the last key before the text is read

let engine, tokenizer, timer;
const state = { ids: [], window: 1, writing: false, running: false, written: 0, since: 0, until: 0, fresh: "" };
Object.assign(state, { stale: true, drawing: 0, drawnAt: 0, cost: 0 }); // of the sections
const box = h("textarea", { id: "text", rows: 4, spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
const [said, skipped] = [h("p", { id: "said", class: "quiet", role: "status" }), h("p", { id: "skipped", role: "status" })];
const button = h("button", { type: "button", id: "write", onclick: () => write(!state.writing) }, "write");

function readText() {
  clearTimeout(timer);
  if (!state.writing) state.written = 0;
  const { ids, unknown } = tokenizer.encode(box.value);
  state.ids = data.prefix.length + ids.length ? [...data.prefix, ...ids] : [data.empty];
  state.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // the bytes of a character may come in several tokens
  skipped.textContent = unknown.length ? `Skipped, since the model does not know them: ${unknown.map(named).join(" ")}` : "";
  start();
}

function write(on) {
  state.writing = on;
  button.textContent = on ? "stop" : "write";
  if (on) Object.assign(state, { written: 0, since: performance.now() });
  if (on) readText(); // which may have changed less than PAUSE ago
  else start();
}

// Switch parts on or off: all that was computed changes.
function change(parts) {
  parts.forEach((part) => engine.off.delete(part) || engine.off.add(part));
  engine.tokens.length = 0;
  start();
}

function start() {
  state.stale = true;
  if (!state.running) requestAnimationFrame(work);
  state.running = true;
}

// Read or write one token; return whether there was something to do. Of a text longer than the context, the first half
// contexts are left out, so that what follows is seldom read again.
function advance() {
  const [C, n] = [engine.C, state.ids.length];
  const half = Math.max(C >> 1, 1);
  const tokens = state.ids.slice(n > C ? Math.ceil((n - C) / half) * half : 0);
  state.window = tokens.length;
  const read = engine.keep(tokens);
  if (read < tokens.length) engine.step(tokens[read]);
  else if (state.writing) writeToken();
  else return false;
  return (state.stale = true);
}

function writeToken() {
  const { ids, logits } = engine.ranked();
  const p = distribution(logits, chosen);
  let [left, at] = [Math.random(), 0];
  while (at + 1 < p.length && (left -= p[at]) >= 0) at++;
  if (data.stop.includes(ids[at])) return write(false);
  state.ids.push(ids[at]);
  state.fresh += state.decoder.decode(tokenizer.bytes[ids[at]], { stream: true });
  Object.assign(state, { written: state.written + 1, until: performance.now() });
}

function work() {
  const begun = performance.now();
  if (state.drawing) Object.assign(state, { drawing: 0, drawnAt: begun, cost: begun - state.drawing }); // with the layout
  while ((state.running = advance()) && performance.now() - begun < SLICE);
  if (state.fresh) {
    box.value += state.fresh;
    box.scrollTop = box.scrollHeight;
    state.fresh = "";
  }
  if (state.stale && (!state.running || begun - state.drawnAt > Math.max(REDRAW, 3 * state.cost))) redraw();
  if (state.running) requestAnimationFrame(work);
}

function update() {
  const { sampling, ...rest } = engine.activations();
  Object.assign(data, rest, { sampling: { ...data.sampling, ...sampling } });
  texts.text = engine.tokens.slice();
}

function redraw() {
  state.drawing = performance.now();
  const isLast = selection.fixed === texts.text.length - 1; // and stays so
  update();
  const [n, read, rate] = [state.ids.length, texts.text.length, (1000 * state.written) / (state.until - state.since)];
  Object.assign(selection, { hovered: null, fixed: isLast ? read - 1 : Math.min(selection.fixed, read - 1) });
  document.body.setAttribute("aria-busy", state.running); // a screen reader waits for the end
  drawings.forEach((draw) => draw());
  select(selection.fixed, true);
  said.textContent = `${n} tokens; the model reads at most ${engine.C}${state.window < n ? `, here the last ${state.window}` : ""}.`
    + (read < state.window ? ` Reading: ${percent(read / state.window)}.` : "")
    + (state.written ? ` Written: ${state.written} tokens, ${number(rate)} per second.` : "")
    + (engine.off.size ? ` Switched off: ${engine.off.size}.` : "");
  state.stale = false;
}

// A row for each layer: its heads, then its MLP.
function switches() {
  const one = (part, layer, name) => {
    const onclick = () => change([part]);
    const label = `layer ${layer}, ${name}`;
    const element = h("button", { type: "button", class: "switch", "data-part": part, "aria-label": label, onclick }, name);
    drawings.push(() => {
      element.setAttribute("aria-pressed", !engine.off.has(part));
      document.querySelector(`[data-head="${part}"]`)?.classList.toggle("off", engine.off.has(part));
    });
    return element;
  };
  const heads = [...Array(engine.N).keys()];
  const rows = engine.layers.flatMap((_, l) => [h("span", {}, `layer ${l}`), h("div", { class: "switches" },
    ...heads.map((n) => one(`${l},${n}`, l, `head ${n}`)), one(`${l},mlp`, l, "MLP"))]);
  const all = h("button", { type: "button", id: "all-on", onclick: () => change([...engine.off]) }, "all on");
  return [h("p", {}, "Click a head or an MLP to switch it off: its output becomes zero. ", all), h("div", { class: "layers" }, ...rows)];
}

begin(() => {
  [tokenizer, engine] = [new Tokenizer(data.tokenizer), new Engine(data.model)];
  engine.step(data.empty);
  update();
  drawPage(section("live", "Text",
    h("p", {}, "Type, or let the model write. Everything runs on this page: the model, its tokenizer, and the sections below."),
    h("label", { class: "sr", for: "text" }, "text"), box, h("div", { class: "row" }, button), skipped, said, ...switches()));
  button.after(document.getElementById("temperature").closest(".slider"));
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(readText, PAUSE);
  });
  box.value = data.prompt;
  readText();
  return new Promise((done) => drawings.push(() => state.running || done())); // until the text has been read
});
