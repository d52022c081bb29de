
// The playground: try the server's model, token by token. Without a framework; h, table, arrows and others are of page.js.

// It holds nothing of the run and asks the server for everything:
// GET /v1/models: the first model, and of its field `jaxgpt` chat, context, temperature, chat_stop_token_ids.
// POST /tokenize: the ids of a prompt as completions read it, or of a conversation as the template renders it.
// POST /v1/completions: always streamed, with the ids as prompt and 20 alternatives; a conversation adds stop_token_ids.
//   To continue from another token, it sends the ids before it, and the other one.
//   The text of an answer, for the next turn, is the echo of its ids, without new tokens.

const $ = (id) => document.getElementById(id);
const DARKEST = 8; // bits
const ALTERNATIVES = 20;
const facts = {}; // of the model: see above
let model = null;
let panes = [];

const isChat = () => document.body.dataset.mode === "chat";
const bitsOf = (logprob) => -logprob / Math.LN2;
const inBits = (bits) => `${bits > 0 && bits < 0.01 ? "<0.01" : number(bits)} bits`;

// Requests ----------------------------------------------------------------------------------------------------------------

let key = "";
let asking = null; // the promise of a key, while its form is open

function askKey() {
  asking ??= new Promise((resolve) => {
    const [before, form] = [document.activeElement, $("key-form")];
    $("key-why").textContent = key ? "The server does not accept this key." : "The server asks for its API key.";
    form.hidden = false;
    $("key").focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      [key, asking, form.hidden] = [$("key").value, null, true];
      (before === document.body ? $("prompt") : before).focus();
      resolve();
    };
  });
  return asking;
}

// Return the response; raise an Error with the server's own words.
async function ask(path, body = null, signal = null) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const sent = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(path, sent).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  if (response.ok) return response;
  if (response.status === 401) {
    await askKey();
    return ask(path, body, signal);
  }
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error?.message ?? `The server answered with status ${response.status}.`);
}

const askJson = async (...request) => (await ask(...request)).json();

// The server-sent events of a response, up to [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the text did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((line) => line.startsWith("data:"))) {
      const text = line.slice(5).trim();
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Settings ----------------------------------------------------------------------------------------------------------------

// The numbers in the inputs of a fieldset; an empty one is left out, so that the server's default holds.
function numbers(fields) {
  const filled = [...fields.querySelectorAll("input")].filter((input) => input.value !== "");
  return Object.fromEntries(filled.map((input) => [input.name, Number(input.value)]));
}

function stops() {
  const unescape = (line) => line.replace(/\\(.)/g, (_, c) => ({ n: "\n", t: "\t", r: "\r" })[c] ?? c);
  return $("both").querySelector("[name=stop]").value.split("\n").filter(Boolean).map(unescape);
}

// A pane: one setting, and what it generated. A branch is { prompt: ids, given: text, tokens, name }, and a token
// { id, text, logprob, top: tokens }. -------------------------------------------------------------------------------------------

class Pane {
  constructor(name, temperature) {
    this.name = name;
    this.fields = $("setting").content.cloneNode(true).firstElementChild;
    this.fields.querySelector("[name=temperature]").value = temperature;
    this.element = $("pane").content.cloneNode(true).firstElementChild;
    this.part = (selector) => this.element.querySelector(selector);
    [this.strip, this.panel] = [this.part(".strip"), this.part(".panel")];
    this.strip.addEventListener("click", (event) => event.target.closest(".tok") && this.pick(this.at(event)));
    this.strip.addEventListener("keydown", (event) => {
      if (!["Enter", " "].includes(event.key) || !event.target.closest(".tok")) return;
      event.preventDefault();
      this.pick(this.at(event));
      this.panel.querySelector("[tabindex='0']").focus();
    });
    arrows(this.strip, ".tok", (t) => this.pick(t));
    arrows(this.panel, ".choices button", () => {});
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.token(this.picked).focus();
    });
    this.part(".more").onclick = () => this.write(this.shown);
    this.forget();
  }

  at = (event) => Number(event.target.closest(".tok").dataset.t);
  token = (t) => this.strip.querySelector(`[data-t="${t}"]`);
  say = (...said) => replace(this.part(".status"), ...said);

  forget() {
    this.control?.abort();
    [this.messages, this.branches, this.picked] = [[], [], 0];
    this.show(null);
    this.say();
  }

  rename(two) {
    this.part("h2").textContent = two ? `Setting ${this.name}` : isChat() ? "Conversation" : "Text";
    this.fields.querySelector("legend").textContent = two ? `Sampling, setting ${this.name}` : "Sampling";
    this.element.setAttribute("aria-label", this.part("h2").textContent);
  }

  // Run a task that Stop ends; show its error. Return whether it went well.
  async during(task) {
    this.control?.abort();
    const control = (this.control = new AbortController());
    this.part(".wrong").textContent = $("agreement").textContent = "";
    this.say();
    refresh();
    try {
      await task(control.signal);
      return true;
    } catch (error) {
      if (this.control !== control) return false; // another task has begun
      this.say(control.signal.aborted ? "Stopped. " : "", this.summary());
      if (!control.signal.aborted) this.part(".wrong").textContent = error.message;
      return false;
    } finally {
      if (this.control === control) this.control = null;
      refresh();
    }
  }

  // Begin a text, or the next answer of the conversation, as a first branch without tokens.
  prepare(text) {
    return this.during(async (signal) => {
      let messages = [];
      if (isChat()) {
        messages = this.shown?.tokens.length
          ? [...this.messages, { role: "assistant", content: await this.answer(signal) }]
          : this.messages.slice(0, -1); // its answer failed
        messages.push({ role: "user", content: text });
      }
      const asked = isChat() ? { messages } : { prompt: text };
      const { tokens: prompt } = await askJson("/tokenize", { model, ...asked }, signal);
      [this.messages, this.branches] = [messages, [{ prompt, given: isChat() ? "" : text, tokens: [], name: "first" }]];
      this.show(this.branches[0]);
    });
  }

  // The text of the shown tokens: decoders treat the first ids of a text differently, so that of all ids less the prompt's.
  async answer(signal) {
    const decode = async (prompt) => (await askJson("/v1/completions", { model, prompt, echo: true, max_tokens: 0 }, signal)).choices[0].text;
    return (await decode(this.ids())).slice((await decode(this.shown.prompt)).length);
  }

  // The prompt from which the model continues a branch.
  ids = (branch = this.shown) => [...branch.prompt, ...branch.tokens.map((token) => token.id)];

  // Continue a branch.
  write(branch) {
    if (this.shown !== branch) this.show(branch);
    return this.during(async (signal) => {
      this.say("Writing…");
      const body = { model, prompt: this.ids(branch), stream: true, logprobs: ALTERNATIVES, stop: stops(), ...numbers($("both")), ...numbers(this.fields) };
      if (isChat()) body.stop_token_ids = facts.chat_stop_token_ids;
      let reason = null;
      for await (const event of events(await ask("/v1/completions", body, signal)))
        for (const choice of event.choices) {
          this.add(branch, choice.logprobs);
          reason = choice.finish_reason ?? reason;
        }
      const full = this.ids(branch).length > facts.context; // the last token is not read
      this.say(reason === "stop" ? "Ended by a stop. " : full ? "The context is full. " : "Ended at max tokens. ", this.summary());
    });
  }

  add(branch, found) {
    const begin = branch.tokens.length;
    found?.token_ids.forEach((id, i) => {
      const top = found.top_token_ids[i].map((id, k) => ({ id, text: found.top_token_texts[i][k], logprob: found.top_token_logprobs[i][k] }));
      branch.tokens.push({ id, text: found.tokens[i], logprob: found.token_logprobs[i], top });
    });
    if (this.shown !== branch) return;
    const follows = this.strip.scrollTop + this.strip.clientHeight >= this.strip.scrollHeight - 8;
    this.strip.append(...branch.tokens.slice(begin).map((token, i) => this.button(token, begin + i)));
    if (follows) this.strip.scrollTop = this.strip.scrollHeight;
  }

  button(token, t) {
    const bits = bitsOf(token.logprob);
    return h("span", {
      role: "button", class: token.chosen ? "tok chosen" : "tok", tabindex: t === this.picked ? 0 : -1, "data-t": t,
      "--much": `${Math.round(100 * Math.min(bits / DARKEST, 1))}%`,
      "aria-label": `${visible(token.text)}, token ${t + 1}: ${inBits(bits)}${token.chosen ? ", chosen by you" : ""}`,
    }, ...spelled(token.text));
  }

  summary() {
    const tokens = this.shown?.tokens ?? [];
    const bits = tokens.reduce((sum, token) => sum + bitsOf(token.logprob), 0);
    return tokens.length ? `${tokens.length} tokens, on average ${inBits(bits / tokens.length)}.` : "";
  }

  show(branch) {
    [this.shown, this.picked, this.panel.hidden] = [branch, 0, true];
    const given = branch?.given ? [h("span", { class: "given" }, branch.given)] : [];
    replace(this.strip, ...given, ...(branch?.tokens ?? []).map((token, t) => this.button(token, t)));
    const turns = this.messages.map(({ role, content }) => h("div", { class: `turn ${role}` }, h("h3", {}, role === "user" ? "You" : "Model"), h("p", {}, content)));
    replace(this.part(".turns"), ...turns, turns.length ? h("div", { class: "turn" }, h("h3", {}, "Model")) : null);
    const nav = this.part(".branches");
    nav.hidden = this.branches.length < 2;
    replace(nav, ...this.branches.map((other, n) =>
      h("button", { type: "button", "aria-current": other === branch ? "true" : null, onclick: () => this.goTo(n) }, `${n + 1}: ${other.name}`)));
    refresh();
  }

  goTo(n) {
    this.show(this.branches[n]);
    if (!this.control) this.say(`Branch ${n + 1}: `, this.summary());
    this.part(".branches").children[n].focus();
  }

  pick(t) {
    this.token(this.picked)?.classList.remove("here");
    this.token(this.picked)?.setAttribute("tabindex", -1);
    this.picked = t;
    this.token(t).classList.add("here");
    this.token(t).setAttribute("tabindex", 0);
    const [token, own] = [this.shown.tokens[t], (other) => other.id === this.shown.tokens[t].id];
    const all = token.top.some(own) ? token.top : [...token.top, token];
    const choices = all.map((other) => {
      const p = Math.exp(other.logprob);
      const label = `${visible(other.text)}, ${percent(p)}${own(other) ? ", the present one" : ""}: continue with it`;
      return h("li", {}, h("button", { type: "button", tabindex: own(other) ? 0 : -1, "aria-current": own(other) ? "true" : null, "aria-label": label, onclick: () => this.fork(t, other) },
        h("span", { class: "code" }, named(other.text)), h("span", { class: "share" }, percent(p)), bar(p)));
    });
    this.panel.hidden = false;
    replace(this.panel, h("h3", {}, `Token ${t + 1}: `, h("span", { class: "code" }, named(token.text)), `, ${inBits(bitsOf(token.logprob))}`),
      h("p", { class: "quiet" }, "Probabilities before temperature and filters. Choose a token to continue from there in a new branch."),
      h("ol", { class: "choices", "aria-label": `alternatives to token ${t + 1}` }, ...choices));
  }

  // Continue with another token in the place of token t.
  fork(t, { id, text, logprob }) {
    const [{ prompt, given, tokens }, from] = [this.shown, this.branches.indexOf(this.shown) + 1];
    const kept = [...tokens.slice(0, t), { id, text, logprob, top: tokens[t].top, chosen: true }];
    this.branches.push({ prompt, given, tokens: kept, name: `${named(text)} at token ${t + 1} of ${from}` });
    this.write(this.branches.at(-1));
    this.token(this.picked).setAttribute("tabindex", -1);
    this.picked = t;
    this.token(t).setAttribute("tabindex", 0);
    this.token(t).focus();
  }
}

// The page ----------------------------------------------------------------------------------------------------------------

// Show which parts apply now.
function refresh() {
  const writing = panes.some((pane) => pane.control);
  $("stop").setAttribute("aria-disabled", !writing);
  $("forget").hidden = !isChat();
  for (const pane of panes) {
    const some = Boolean(pane.shown?.tokens.length);
    pane.strip.classList.toggle("writing", Boolean(pane.control));
    pane.strip.setAttribute("aria-busy", Boolean(pane.control));
    pane.part(".actions").hidden = pane.control !== null || !some;
    pane.part(".more").hidden = some && pane.ids().length > facts.context;
    pane.part(".plain").textContent = pane.control || !some ? "" : pane.shown.tokens.map((token) => token.text).join("");
    pane.element.hidden = !pane.shown && !pane.part(".wrong").textContent && !pane.control;
  }
}

const stop = () => panes.forEach((pane) => pane.control?.abort());

function arrange() {
  panes.forEach((pane) => pane.rename(panes.length > 1));
  $("panes").classList.toggle("two", panes.length > 1);
  replace($("panes"), ...panes.map((pane) => pane.element));
  replace($("settings"), ...panes.map((pane) => pane.fields));
  $("agreement").textContent = "";
  refresh();
}

// Say how long the texts of two settings agree.
function agreement() {
  const [a, b] = panes.map((pane) => pane.shown.tokens);
  const differs = a.findIndex((token, t) => token.id !== b[t]?.id);
  const same = differs < 0 ? a.length : differs;
  return same === a.length && same === b.length ? "A and B wrote the same tokens." : `Tokens until A and B differ: ${same}.`;
}

async function start(event) {
  event.preventDefault();
  const ready = await Promise.all(panes.map((pane) => pane.prepare($("prompt").value)));
  if (!ready.every(Boolean)) return;
  if (isChat()) $("prompt").value = "";
  const [done, written] = [panes, await Promise.all(panes.map((pane) => pane.write(pane.shown)))];
  if (panes === done && panes.length > 1 && written.every(Boolean)) $("agreement").textContent = agreement();
}

function setMode(mode) {
  document.body.dataset.mode = mode;
  panes.forEach((pane) => pane.forget());
  $("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  $("prompt-keys").textContent = isChat() ? "Enter sends, Shift+Enter begins a line, Escape stops." : "Ctrl+Enter starts, Escape stops.";
  $("start").textContent = isChat() ? "Send" : "Start";
  if (isChat()) $("form").before($("results"));
  else $("form").after($("results"));
  arrange();
}

async function connect() {
  const { data: [first] } = await askJson("/v1/models");
  model = first.id;
  Object.assign(facts, first.jaxgpt);
  $("title").textContent = document.title = `Playground: ${model}`;
  $("facts").textContent = `Context: ${facts.context} tokens.`;
  const most = $("both").querySelector("[name=max_tokens]");
  [most.max, most.value] = [facts.context, Math.min(200, facts.context)];
  panes = [new Pane("A", facts.temperature)];
  $("modes").hidden = !facts.chat;
  const mode = facts.chat ? "chat" : "text";
  document.querySelector(`[value=${mode}]`).checked = true;
  setMode(mode);
}

$("form").addEventListener("submit", start);
$("stop").addEventListener("click", stop);
$("forget").addEventListener("click", () => panes.forEach((pane) => pane.forget()));
$("modes").addEventListener("change", (event) => setMode(event.target.value));
$("compare").addEventListener("change", (event) => {
  panes.slice(1).forEach((pane) => pane.forget());
  panes = event.target.checked ? [panes[0], new Pane("B", 0)] : panes.slice(0, 1);
  if (event.target.checked) $("details").open = true;
  arrange();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || (isChat() ? event.shiftKey : !(event.ctrlKey || event.metaKey))) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("details").open = !matchMedia("(max-width: 46rem)").matches;
connect().then(
  () => (document.documentElement.dataset.ready = "true"),
  (error) => ($("alert").textContent = error.message));
