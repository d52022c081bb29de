// The model in JavaScript: it reads one token at a time and keeps what it computed at each position, as the sections draw it.
// Matrices are row-major by output, in float32; sums are in float64.

const [PREDICTIONS, LENS_PREDICTIONS, UNITS, ELEMENTS] = [5, 3, 8, 8]; // as in activations.py and page.py

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

// Four rows at a time: 1.45 billion products per second instead of 0.95 with four parts of one row (node 20, Xeon).
function multiply({ values, rows, columns, bias, out }, x) {
  let r = 0;
  for (; r + 3 < rows; r += 4) {
    const p = r * columns, q = p + columns, s = q + columns, t = s + columns;
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < columns; i++) {
      a += values[p + i] * x[i];
      b += values[q + i] * x[i];
      c += values[s + i] * x[i];
      d += values[t + i] * x[i];
    }
    out.set([a, b, c, d], r);
  }
  for (; r < rows; r++) out[r] = dot(values, r * columns, x, 0, columns);
  if (bias) for (r = 0; r < rows; r++) out[r] += bias[r];
  return out;
}

function moments(x) {
  let sum = 0, squares = 0;
  for (let i = 0; i < x.length; i++) sum += x[i];
  const mean = sum / x.length;
  for (let i = 0; i < x.length; i++) squares += (x[i] - mean) ** 2;
  return { mean, variance: squares / x.length };
}

function normalise({ centred, eps, scale, bias }, x, out) {
  const { mean, variance } = moments(x);
  const inverse = 1 / Math.sqrt((centred ? variance : variance + mean * mean) + eps);
  for (let i = 0; i < x.length; i++) out[i] = (x[i] - (centred ? mean : 0)) * inverse * scale[i] + (bias ? bias[i] : 0);
  return out;
}

const size = (x) => Math.sqrt(dot(x, 0, x, 0, x.length));
const cap = (x, most) => (most === null ? x : most * Math.tanh(x / most));

// By a series of positive terms; from 4 on it is 1 to 2e-8.
function erf(x) {
  if (Math.abs(x) >= 4) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-12 * Math.abs(sum); n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const gelu = (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2));
const geluTanh = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0), relu2: (x) => Math.max(x, 0) ** 2, gelu, gelu_tanh: geluTanh,
  swiglu: (x) => x / (1 + Math.exp(-x)), geglu: gelu, geglu_tanh: geluTanh,
};

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
  // config: GPTConfig.explicit(); context: tokens; windows, rotations: of each layer; params: as linen names them.
  constructor({ config: c, context, vocab_size, windows, rotations, params }) {
    const { n_head: N, n_kv_head: K, head_dim: H, n_embd: D } = c;
    Object.assign(this, { c, N, K, H, D, C: context, V: vocab_size });
    this.tokens = []; // those that were read; without them, what was computed is forgotten
    this.off = new Set(); // heads, "layer,head", and MLPs, "layer,mlp", that are switched off
    const floats = (n = 1) => new Float32Array(n * context);
    const norm = (p, centred) => p && {
      eps: c.norm_eps, centred, scale: array(p.scale).map((x) => x + c.norm_offset), bias: p.bias ? array(p.bias) : null,
    };
    const sides = () => ({ before: floats(D), after: floats(D), out: new Float32Array(D) });
    const shown = (p, name) => p && { ...norm(p, c.norm === "layernorm"), name, ...sides() };
    const branch = (name) => ({ name, added: floats(), stream: floats(), sum: new Float32Array(D) });
    this.layers = windows.map((window, l) => {
      const { attn, mlp, ...norms } = params[`h_${l}`];
      const dense = (p) => p && linear(p.kernel, p.bias);
      return {
        window, rotation: rotations[l] ?? [[], 1], q: dense(attn.q), k: dense(attn.k), v: dense(attn.v), merge: dense(attn.c_proj),
        q_norm: norm(attn.q_norm, false), k_norm: norm(attn.k_norm, false),
        up: dense(mlp.c_fc), gate: dense(mlp.c_gate), down: dense(mlp.c_proj), attn: branch(`h_${l}/attn`), mlp: branch(`h_${l}/mlp`),
        norms: Object.fromEntries(Object.keys(norms).sort().map((name) => [name, shown(norms[name], `h_${l}/${name}`)])),
        keys: floats(K * H), values: floats(K * H), weights: floats(N * context), heads: new Float32Array(N * H), hidden: floats(c.mlp_dim),
      };
    });
    this.wte = linear(params.wte.embedding);
    this.head = { ...(params.lm_head ? linear(params.lm_head.kernel) : this.wte), rows: vocab_size, out: new Float32Array(vocab_size) };
    this.wpe = params.wpe && array(params.wpe.embedding);
    this.last = shown(params.ln_f, "ln_f");
    this.start = floats();
    this.lens = [null, ...this.layers].map(() => ({ read: floats(D), sum: floats(), ids: [], p: [] })); // sum: its logarithm
  }

  // Forget all but the tokens at the beginning that are those of `tokens`, too; return how many are kept.
  keep(tokens) {
    const different = this.tokens.findIndex((token, t) => token !== tokens[t]);
    if (different >= 0) this.tokens.length = different;
    return this.tokens.length;
  }

  // Read the next token.
  step(token) {
    const { c, D, wte, wpe, tokens: { length: t } } = this;
    const scale = c.scale_embeddings ? Math.sqrt(D) : 1;
    let x = new Float32Array(D).map((_, i) => Math.fround(wte.values[token * D + i] * scale) + (wpe ? wpe[t * D + i] : 0));
    this.start[t] = size(x);
    this.predict(0, x, t);
    this.layers.forEach((layer, l) => {
      const entered = x;
      const { ln_1, ln_1_out, ln_2, ln_2_out } = layer.norms;
      x = this.join(layer.attn, x, this.attend(layer, l, this.enter(ln_1, x, t), t), ln_1, ln_1_out, t);
      const read = this.enter(ln_2, c.parallel_residual ? entered : x, t);
      x = this.join(layer.mlp, x, this.feed(layer, l, read, t), ln_2, ln_2_out, t);
      this.predict(l + 1, x, t);
    });
    this.tokens.push(token);
  }

  // Apply a norm that the page shows.
  show(norm, x, t) {
    norm.before.set(x, t * this.D);
    norm.after.set(normalise(norm, x, norm.out), t * this.D);
    return norm.out;
  }

  // The input of a branch, and the stream after it: see Block.
  enter(norm, x, t) {
    return ["pre", "sandwich"].includes(this.c.norm_position) ? this.show(norm, x, t) : x;
  }

  join(branch, x, out, norm, norm_out, t) {
    const after = { output: norm, sandwich: norm_out }[this.c.norm_position];
    if (after) out = this.show(after, out, t);
    for (let i = 0; i < x.length; i++) branch.sum[i] = x[i] + out[i];
    const stream = this.c.norm_position === "post" ? this.show(norm, branch.sum, t) : branch.sum;
    branch.added[t] = size(out);
    branch.stream[t] = size(stream);
    return stream;
  }

  // Norm and rotate the heads of queries or keys.
  rotate(heads, norm, [frequencies, magnitude], t) {
    if (norm && this.c.qk_norm_over === "heads") normalise(norm, heads, heads);
    for (let from = 0; from < heads.length; from += this.H) {
      const x = heads.subarray(from, from + this.H);
      if (norm && this.c.qk_norm_over === "head") normalise(norm, x, x);
      frequencies.forEach((frequency, i) => {
        const angle = Math.fround(t * frequency);
        const j = i + frequencies.length;
        const [a, b, cos, sin] = [x[i], x[j], magnitude * Math.cos(angle), magnitude * Math.sin(angle)];
        x[i] = a * cos - b * sin;
        x[j] = b * cos + a * sin;
      });
    }
    return heads;
  }

  attend({ window, rotation, keys, values, weights, heads, ...layer }, l, x, t) {
    const { c, N, K, H, C } = this;
    const q = this.rotate(multiply(layer.q, x), layer.q_norm, rotation, t);
    keys.set(this.rotate(multiply(layer.k, x), layer.k_norm, rotation, t), t * K * H);
    values.set(multiply(layer.v, x), t * K * H);
    const first = window === null ? 0 : Math.max(0, t + 1 - window);
    for (let n = 0; n < N; n++) {
      const [shared, row] = [Math.floor((n * K) / N) * H, (n * C + t) * C];
      let most = -Infinity, total = 0;
      for (let s = first; s <= t; s++) {
        weights[row + s] = cap(dot(keys, s * K * H + shared, q, n * H, H) / Math.sqrt(c.query_scale), c.attention_softcap);
        most = Math.max(most, weights[row + s]);
      }
      for (let s = first; s <= t; s++) total += weights[row + s] = Math.exp(weights[row + s] - most);
      for (let s = first; s <= t; s++) weights[row + s] /= total;
      const off = this.off.has(`${l},${n}`);
      for (let i = 0; i < H; i++) {
        let sum = 0;
        for (let s = first; s <= t; s++) sum += weights[row + s] * values[s * K * H + shared + i];
        heads[n * H + i] = off ? 0 : sum;
      }
    }
    return multiply(layer.merge, heads);
  }

  feed(layer, l, x, t) {
    const [F, act] = [this.c.mlp_dim, ACTIVATIONS[this.c.activation]];
    const [up, gate, hidden] = [multiply(layer.up, x), layer.gate && multiply(layer.gate, x), layer.hidden.subarray(t * F, (t + 1) * F)];
    for (let i = 0; i < F; i++) hidden[i] = gate ? act(gate[i]) * up[i] : act(up[i]);
    const out = multiply(layer.down, hidden);
    return this.off.has(`${l},mlp`) ? out.fill(0) : out;
  }

  // Predict the next token from the stream x after l layers.
  predict(l, x, t) {
    const lens = this.lens[l];
    if (this.last) x = l === this.layers.length ? this.show(this.last, x, t) : normalise(this.last, x, this.last.out);
    lens.read.set(x, t * this.D);
    const logits = this.logits(l, t);
    lens.ids[t] = largest(logits, PREDICTIONS);
    const most = logits[lens.ids[t][0]];
    lens.sum[t] = most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
    lens.p[t] = lens.ids[t].map((token) => Math.exp(logits[token] - lens.sum[t]));
  }

  logits(l = this.layers.length, t = this.tokens.length - 1) {
    const logits = multiply(this.head, this.lens[l].read.subarray(t * this.D, (t + 1) * this.D));
    return this.c.logit_softcap === null ? logits : logits.map((logit) => cap(logit, this.c.logit_softcap));
  }

  // The log-probability in nats of the token after position t, predicted after l layers.
  logprob(t, l = this.layers.length) {
    const logit = dot(this.head.values, this.tokens[t + 1] * this.D, this.lens[l].read, t * this.D, this.D);
    return cap(logit, this.c.logit_softcap) - this.lens[l].sum[t];
  }

  // The tokens that can come next, the most probable first, with their logits.
  ranked() {
    const logits = this.logits();
    const ids = Uint32Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
    return { ids, logits: Float32Array.from(ids, (id) => logits[id]) };
  }

  // All activations, as page.py gives those of the X-ray to the sections.
  activations() {
    const { ids, logits } = this.ranked();
    const T = this.tokens.length;
    const branches = this.layers.flatMap(({ attn, mlp }) => [attn, mlp]);
    return {
      bits: this.tokens.map((_, t) => (t ? -this.logprob(t - 1) / Math.LN2 : null)),
      guess: this.guess(this.layers.length, PREDICTIONS),
      lens: this.lens.map((_, l) => this.guess(l, LENS_PREDICTIONS)),
      attention: this.layers.map(({ weights }, l) => this.maps(weights, `layer ${l}`)),
      start: this.start.subarray(0, T),
      branches: branches.map(({ name, added, stream }) => ({ name, added: added.subarray(0, T), stream: stream.subarray(0, T) })),
      norms: [...this.layers.flatMap(({ norms }) => Object.values(norms)), this.last].filter(Boolean).map((norm) => this.norm(norm)),
      mlp: this.layers.map(({ hidden }) => this.units(hidden.subarray(0, T * this.c.mlp_dim))),
      sampling: { ids: { values: ids, shape: [this.V] }, logits: { values: logits, shape: [this.V] } },
    };
  }

  guess(l, most) {
    const [T, K] = [this.tokens.length, Math.min(most, this.V)];
    const flat = (rows) => ({ values: rows.slice(0, T).flatMap((row) => row.slice(0, K)), shape: [T, K] });
    const actual = this.tokens.map((_, t) => (t + 1 < T ? Math.exp(this.logprob(t, l)) : null));
    return { ids: flat(this.lens[l].ids), p: flat(this.lens[l].p), actual };
  }

  maps(weights, name) {
    const { N, C, tokens: { length: T } } = this;
    const roots = new Uint8Array(N * T * T);
    for (let n = 0; n < N; n++) {
      for (let t = 0; t < T; t++) {
        const row = weights.subarray((n * C + t) * C, (n * C + t) * C + t + 1);
        row.forEach((weight, s) => (roots[(n * T + t) * T + s] = Math.round(255 * Math.sqrt(weight))));
      }
    }
    return { name, roots: { values: roots, shape: [N, T, T] } };
  }

  norm(norm) {
    const { D, tokens } = this;
    const side = (x) => {
      const each = tokens.map((_, t) => moments(x.subarray(t * D, (t + 1) * D)));
      return { mean: each.map(({ mean }) => mean), variance: each.map(({ variance }) => variance) };
    };
    const x = tokens.map((_, t) => norm.before.subarray(t * D, t * D + Math.min(ELEMENTS, D)));
    return { ...norm, before: side(norm.before), after: side(norm.after), x };
  }

  units(hidden) {
    const [F, T] = [this.c.mlp_dim, this.tokens.length];
    const [peaks, levels, active, zeros] = [new Float32Array(F), new Uint8Array(F * T), new Uint8Array(F), new Float32Array(T)];
    hidden.forEach((value, i) => {
      peaks[i % F] = Math.max(peaks[i % F], value);
      if (value === 0) zeros[Math.floor(i / F)] += 1 / F;
      else active[i % F] = 1;
    });
    hidden.forEach((value, i) => (levels[(i % F) * T + Math.floor(i / F)] = Math.round((15 * Math.max(value, 0)) / (peaks[i % F] || 1))));
    const top = this.tokens.map((_, t) => largest(hidden.subarray(t * F, (t + 1) * F), Math.min(UNITS, F)));
    const shape = [T, top[0].length];
    return {
      units: F, top: { values: top.flat(), shape }, values: { values: top.flatMap((row, t) => row.map((f) => hidden[t * F + f])), shape },
      levels: { values: levels, shape: [F, T] }, peaks: { values: peaks, shape: [F] },
      zeros: this.c.activation.startsWith("relu") ? zeros : null, silent: F - active.reduce((a, b) => a + b, 0),
    };
  }
}
