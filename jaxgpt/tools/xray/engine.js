// The model in JavaScript: it reads one token at a time and keeps what it computes at each position, as the sections draw it.
// Matrices are row-major by output, in float32; sums are in float64.

// A matrix of the page, { values, scale }, dequantised, with its bias and the array of its result: to allocate one for every
// product would take longer than the product.
function linear({ values: stored, scale }, bias) {
  const [rows, columns] = stored.shape;
  const [numbers, scales] = [array(stored), scale && array(scale)];
  const values = scale ? Float32Array.from(numbers, (x, i) => x * scales[Math.floor(i / columns)]) : numbers;
  return { values, rows, columns, bias: bias ? array(bias) : null, out: new Float32Array(rows) };
}

function dot(x, i, y, j, count) {
  let sum = 0;
  for (const end = i + count; i < end; i++, j++) sum += x[i] * y[j];
  return sum;
}

// Four rows at a time: 1.45 billion products per second instead of 0.95 with one row in four parts (node 20).
function multiply({ values, rows, columns, bias, out }, x) {
  let r = 0;
  for (; r + 3 < rows; r += 4) {
    const p = r * columns;
    const q = p + columns;
    const s = q + columns;
    const t = s + columns;
    let a = 0;
    let b = 0;
    let c = 0;
    let d = 0;
    for (let i = 0; i < columns; i++) {
      const y = x[i];
      a += values[p + i] * y;
      b += values[q + i] * y;
      c += values[s + i] * y;
      d += values[t + i] * y;
    }
    out[r] = a;
    out[r + 1] = b;
    out[r + 2] = c;
    out[r + 3] = d;
  }
  for (; r < rows; r++) out[r] = dot(values, r * columns, x, 0, columns);
  if (bias) for (r = 0; r < rows; r++) out[r] += bias[r];
  return out;
}

function moments(x) {
  let sum = 0;
  let squares = 0;
  for (let i = 0; i < x.length; i++) sum += x[i];
  const mean = sum / x.length;
  for (let i = 0; i < x.length; i++) squares += (x[i] - mean) ** 2;
  return { mean, variance: squares / x.length };
}

function normalise({ centred, eps, scale, bias }, x, out) {
  const { mean, variance } = moments(x);
  const centre = centred ? mean : 0;
  const inverse = 1 / Math.sqrt((centred ? variance : variance + mean * mean) + eps);
  for (let i = 0; i < x.length; i++) out[i] = (x[i] - centre) * inverse * scale[i] + (bias ? bias[i] : 0);
  return out;
}

const size = (x) => Math.sqrt(dot(x, 0, x, 0, x.length));
const cap = (x, most) => (most === null ? x : most * Math.tanh(x / most));

// By a series of positive terms; from 4 on it is 1 to 2e-8.
function erf(x) {
  if (Math.abs(x) >= 4) return Math.sign(x);
  let term = x;
  let sum = x;
  for (let n = 1; Math.abs(term) > 1e-12 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const gelu = (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
const geluTanh = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0), relu2: (x) => Math.max(x, 0) ** 2, gelu, gelu_tanh: geluTanh,
  swiglu: (x) => x / (1 + Math.exp(-x)), geglu: gelu, geglu_tanh: geluTanh,
};

const [PREDICTIONS, LENS_PREDICTIONS, UNITS, ELEMENTS] = [5, 3, 8, 8]; // as activations.py and page.py have them

// The indices of the `count` largest values, the largest first; of equal ones the first.
function largest(values, count) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === count && !(values[i] > values[best[count - 1]])) continue;
    let at = best.length;
    while (at > 0 && values[i] > values[best[at - 1]]) at--;
    best.splice(at, 0, i);
    best.length = Math.min(best.length, count);
  }
  return best;
}

class Engine {
  // model: config (GPTConfig.explicit()), context, vocab_size, windows and frequencies of each layer, params.
  constructor({ config, context, vocab_size, windows, frequencies, params }) {
    const c = Object.assign(this, { c: config, C: context, V: vocab_size }).c;
    [this.N, this.K, this.H] = [c.n_head, c.n_kv_head, c.head_dim];
    this.tokens = []; // those that were read
    this.off = new Set(); // heads, "layer,head", and MLPs, "layer,mlp", that are switched off
    const floats = (n = 1) => new Float32Array(n * context);
    const norm = (node, centred) => node && {
      eps: c.norm_eps, centred, bias: node.bias ? array(node.bias) : null, scale: array(node.scale).map((x) => x + c.norm_offset),
    };
    const watched = (node, name) => node && {
      ...norm(node, c.norm === "layernorm"), name, x: [], out: new Float32Array(c.n_embd),
      before: { mean: floats(), variance: floats() }, after: { mean: floats(), variance: floats() },
    };
    const branch = (name) => ({ name, added: floats(), stream: floats(), sum: new Float32Array(c.n_embd) });
    this.layers = windows.map((window, l) => {
      const p = params[`h_${l}`];
      const of = (part, name) => p[part][name] && linear(p[part][name].kernel, p[part][name].bias);
      const names = ["ln_1", "ln_1_out", "ln_2", "ln_2_out"];
      return {
        window, frequencies: frequencies[l], q: of("attn", "q"), k: of("attn", "k"), v: of("attn", "v"), merge: of("attn", "c_proj"),
        q_norm: norm(p.attn.q_norm, false), k_norm: norm(p.attn.k_norm, false),
        fc: of("mlp", "c_fc"), gate: of("mlp", "c_gate"), proj: of("mlp", "c_proj"),
        ...Object.fromEntries(names.map((name) => [name, watched(p[name], `h_${l}/${name}`)])),
        attn: branch(`h_${l}/attn`), mlp: branch(`h_${l}/mlp`),
        keys: floats(this.K * this.H), values: floats(this.K * this.H), weights: floats(this.N * context), hidden: floats(c.mlp_dim),
        heads: new Float32Array(this.N * this.H),
      };
    });
    this.wte = linear(params.wte.embedding);
    this.head = { ...linear(params.lm_head ?? params.wte.embedding), rows: vocab_size, out: new Float32Array(vocab_size) };
    this.wpe = params.wpe && array(params.wpe.embedding);
    this.last = watched(params.ln_f, "ln_f");
    this.start = floats();
    this.lens = [null, ...this.layers].map(() => ({ read: floats(c.n_embd), sum: floats(), ids: [], p: [] })); // sum: log of it
  }

  // Forget all but the tokens at the beginning that are also those of `tokens`, or every token; return how many are kept.
  keep(tokens) {
    const different = this.tokens.findIndex((token, t) => token !== tokens[t]);
    if (different >= 0) this.tokens.length = different;
    return this.tokens.length;
  }

  // Switch a head or an MLP on or off.
  toggle(part) {
    if (!this.off.delete(part)) this.off.add(part);
    this.tokens.length = 0;
  }

  // Switch everything on.
  restore() {
    this.off.clear();
    this.tokens.length = 0;
  }

  // Read the next token.
  step(token) {
    const [t, { c }] = [this.tokens.length, this];
    const D = c.n_embd;
    const scale = c.scale_embeddings ? Math.sqrt(D) : 1;
    let x = Float32Array.from({ length: D }, (_, i) => Math.fround(this.wte.values[token * D + i] * scale) + (this.wpe ? this.wpe[t * D + i] : 0));
    this.start[t] = size(x);
    this.look(0, x, t);
    this.layers.forEach((layer, l) => {
      const entered = x;
      x = this.join(layer.attn, x, this.attend(layer, l, this.enter(layer.ln_1, x, t), t), layer.ln_1, layer.ln_1_out, t);
      const read = this.enter(layer.ln_2, c.parallel_residual ? entered : x, t);
      x = this.join(layer.mlp, x, this.feed(layer, l, read, t), layer.ln_2, layer.ln_2_out, t);
      this.look(l + 1, x, t);
    });
    this.tokens.push(token);
  }

  // Apply a norm that the page shows.
  watch(norm, x, t) {
    const y = normalise(norm, x, norm.out);
    for (const [side, vector] of [["before", x], ["after", y]]) {
      const { mean, variance } = moments(vector);
      norm[side].mean[t] = mean;
      norm[side].variance[t] = variance;
    }
    norm.x[t] = [...x.subarray(0, ELEMENTS)];
    return y;
  }

  // The input of a branch, and the stream after it: see Block.
  enter(norm, x, t) {
    return ["pre", "sandwich"].includes(this.c.norm_position) ? this.watch(norm, x, t) : x;
  }

  join(branch, x, out, norm, norm_out, t) {
    const position = this.c.norm_position;
    const added = position === "output" ? this.watch(norm, out, t) : position === "sandwich" ? this.watch(norm_out, out, t) : out;
    const { sum } = branch;
    for (let i = 0; i < x.length; i++) sum[i] = x[i] + added[i];
    const stream = position === "post" ? this.watch(norm, sum, t) : sum;
    branch.added[t] = size(added);
    branch.stream[t] = size(stream);
    return stream;
  }

  attend(layer, l, x, t) {
    const { c, N, K, H, C } = this;
    const rotate = (heads, norm) => {
      if (norm && c.qk_norm_over === "heads") normalise(norm, heads, heads);
      for (let from = 0; from < heads.length; from += H) {
        const one = heads.subarray(from, from + H);
        if (norm && c.qk_norm_over === "head") normalise(norm, one, one);
        const half = layer.frequencies?.length ?? 0;
        for (let i = 0; i < half; i++) {
          const angle = Math.fround(t * layer.frequencies[i]);
          const [a, b, cos, sin] = [one[i], one[i + half], Math.cos(angle), Math.sin(angle)];
          one[i] = a * cos - b * sin;
          one[i + half] = b * cos + a * sin;
        }
      }
      return heads;
    };
    const q = rotate(multiply(layer.q, x), layer.q_norm);
    layer.keys.set(rotate(multiply(layer.k, x), layer.k_norm), t * K * H);
    layer.values.set(multiply(layer.v, x), t * K * H);
    const { keys, values, weights, heads } = layer;
    const first = layer.window === null ? 0 : Math.max(0, t + 1 - layer.window);
    for (let n = 0; n < N; n++) {
      const shared = Math.floor(n / (N / K)) * H;
      const row = (n * C + t) * C;
      let [most, total] = [-Infinity, 0];
      for (let s = first; s <= t; s++) {
        weights[row + s] = cap(dot(keys, s * K * H + shared, q, n * H, H) / Math.sqrt(c.query_scale), c.attention_softcap);
        most = Math.max(most, weights[row + s]);
      }
      for (let s = first; s <= t; s++) total += weights[row + s] = Math.exp(weights[row + s] - most);
      for (let s = first; s <= t; s++) weights[row + s] /= total;
      const off = this.off.has(`${l},${n}`);
      for (let i = 0; i < H; i++) {
        let sum = 0;
        for (let s = off ? t + 1 : first; s <= t; s++) sum += weights[row + s] * values[s * K * H + shared + i];
        heads[n * H + i] = sum;
      }
    }
    return multiply(layer.merge, heads);
  }

  feed(layer, l, x, t) {
    const act = ACTIVATIONS[this.c.activation];
    const [F, up, gate] = [this.c.mlp_dim, multiply(layer.fc, x), layer.gate && multiply(layer.gate, x)];
    const hidden = layer.hidden.subarray(t * F, (t + 1) * F);
    for (let i = 0; i < F; i++) hidden[i] = gate ? act(gate[i]) * up[i] : act(up[i]);
    const out = multiply(layer.proj, hidden);
    return this.off.has(`${l},mlp`) ? out.fill(0) : out;
  }

  // Predict the next token from the stream x after l layers.
  look(l, x, t) {
    const lens = this.lens[l];
    const read = !this.last ? x : l === this.layers.length ? this.watch(this.last, x, t) : normalise(this.last, x, this.last.out);
    lens.read.set(read, t * read.length);
    const logits = this.logits(l, t);
    const best = largest(logits, PREDICTIONS);
    const most = logits[best[0]];
    lens.sum[t] = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
    lens.ids[t] = best;
    lens.p[t] = best.map((token) => Math.exp(logits[token] - lens.sum[t]));
  }

  logits(l = this.layers.length, t = this.tokens.length - 1) {
    const D = this.c.n_embd;
    const logits = multiply(this.head, this.lens[l].read.subarray(t * D, (t + 1) * D));
    for (let i = 0; i < logits.length; i++) logits[i] = cap(logits[i], this.c.logit_softcap);
    return logits;
  }

  // The log-probability in nats of the token after position t, predicted after l layers.
  logprob(t, l = this.layers.length) {
    const D = this.c.n_embd;
    const logit = dot(this.head.values, this.tokens[t + 1] * D, this.lens[l].read, t * D, D);
    return cap(logit, this.c.logit_softcap) - this.lens[l].sum[t];
  }

  // The tokens that can come next, the most probable first, with their logits.
  ranked() {
    const logits = this.logits();
    const ids = Uint32Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
    return { ids, logits: Float32Array.from(ids, (id) => logits[id]) };
  }

  // All activations, in the form of the X-ray's data.
  activations() {
    const { c, N, C, tokens: { length: T } } = this;
    const held = (values, ...shape) => ({ values, shape });
    const guess = (l, K) => {
      const [kept, { ids, p }] = [Math.min(K, this.V), this.lens[l]];
      const flat = (rows) => rows.slice(0, T).flatMap((row) => row.slice(0, kept));
      const actual = Array.from({ length: T }, (_, t) => (t + 1 < T ? Math.exp(this.logprob(t, l)) : null));
      return { ids: held(flat(ids), T, kept), p: held(flat(p), T, kept), actual };
    };
    const map = ({ weights }, l) => {
      const roots = new Uint8Array(N * T * T);
      for (let n = 0; n < N; n++) {
        for (let t = 0; t < T; t++) {
          for (let s = 0; s <= t; s++) roots[(n * T + t) * T + s] = Math.round(255 * Math.sqrt(weights[(n * C + t) * C + s]));
        }
      }
      const share = (n, to) => {
        let sum = 0;
        for (let t = 2; t < T; t++) sum += weights[(n * C + t) * C + to(t)];
        return sum / (T - 2);
      };
      const shares = T < 3 ? null : [...Array(N).keys()].map((n) => [(t) => t - 1, () => 0, (t) => t].map((to) => share(n, to)));
      return { name: `layer ${l + 1}`, queries: "text", keys: "text", roots: held(roots, N, T, T), shares };
    };
    const units = ({ hidden: all }) => {
      const F = c.mlp_dim;
      const hidden = all.subarray(0, T * F);
      const [peaks, levels, zeros] = [new Float32Array(F), new Uint8Array(F * T), new Float32Array(T)];
      const silent = new Uint8Array(F).fill(1);
      hidden.forEach((value, i) => {
        peaks[i % F] = Math.max(peaks[i % F], value);
        if (value === 0) zeros[Math.floor(i / F)] += 1 / F;
        else silent[i % F] = 0;
      });
      hidden.forEach((value, i) => (levels[(i % F) * T + Math.floor(i / F)] = Math.round((15 * Math.max(value, 0)) / (peaks[i % F] || 1))));
      const top = Array.from({ length: T }, (_, t) => largest(hidden.subarray(t * F, (t + 1) * F), Math.min(UNITS, F)));
      const values = top.flatMap((row, t) => row.map((f) => hidden[t * F + f]));
      const [most, count] = [top[0].length, silent.reduce((a, b) => a + b, 0)];
      return {
        units: F, top: held(top.flat(), T, most), values: held(values, T, most), levels: held(levels, F, T), peaks: held(peaks, F),
        zeros: c.activation.startsWith("relu") ? zeros : null, silent: count,
      };
    };
    const norm = (n) => {
      const spread = (x) => x && [x.reduce((a, b) => a + b, 0) / x.length, Math.min(...x), Math.max(...x)];
      const cut = ({ mean, variance }) => ({ mean: mean.subarray(0, T), variance: variance.subarray(0, T) });
      return { ...n, before: cut(n.before), after: cut(n.after), x: n.x.slice(0, T), scales: spread(n.scale), biases: spread(n.bias) };
    };
    const norms = this.layers.flatMap((layer) => [layer.ln_1, layer.ln_1_out, layer.ln_2, layer.ln_2_out]);
    const { ids, logits } = this.ranked();
    return {
      bits: this.tokens.map((_, t) => (t ? -this.logprob(t - 1) / Math.LN2 : null)),
      guess: guess(this.layers.length, PREDICTIONS),
      lens: this.lens.map((_, l) => guess(l, LENS_PREDICTIONS)),
      attention: this.layers.map(map),
      start: this.start.subarray(0, T),
      branches: this.layers.flatMap((layer) => [layer.attn, layer.mlp])
        .map((b) => ({ name: b.name, added: b.added.subarray(0, T), stream: b.stream.subarray(0, T) })),
      norms: [...norms, this.last].filter(Boolean).map(norm),
      mlp: this.layers.map(units),
      sampling: { ids: held(ids, this.V), logits: held(logits, this.V) },
    };
  }
}
