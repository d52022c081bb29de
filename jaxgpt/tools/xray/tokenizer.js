// The run's tokenizer: characters, or byte-pair encoding; bytes are the latter without merges.

class Tokenizer {
  // bytes: those of all tokens, concatenated; ends: where each ends; alphabet: the token of each byte, or null for characters;
  // pattern: of the words of a text, or null for one word; merges: [M, 3], left, right and result, the earliest first;
  // whole_words: a word that is a token is not split.
  constructor({ bytes, ends, alphabet, pattern, merges, whole_words }) {
    const [all, at, triples] = [array(bytes), array(ends), array(merges)];
    this.bytes = Array.from(at, (end, i) => all.subarray(i ? at[i - 1] : 0, end));
    this.known = new Map(this.bytes.map((token, id) => [String.fromCharCode(...token), id]));
    Object.assign(this, { alphabet: alphabet && array(alphabet), pattern: pattern && new RegExp(pattern, "gu"), whole_words });
    [this.merges, this.words] = [new Map(), new Map()];
    for (let m = 0; m < triples.length; m += 3) this.merges.set(triples[m] * at.length + triples[m + 1], [m, triples[m + 2]]);
  }

  // Return { ids, unknown }: the tokens of a text, and the characters that none stands for.
  encode(text) {
    const [ids, unknown] = [[], new Set()];
    const parts = !this.alphabet ? text : this.pattern ? (text.match(this.pattern) ?? []) : [text];
    for (const part of parts) {
      const bytes = new TextEncoder().encode(part);
      const id = this.alphabet && !this.whole_words ? undefined : this.known.get(Array.from(bytes, (b) => String.fromCharCode(b)).join(""));
      if (id !== undefined) ids.push(id);
      else if (!this.alphabet) unknown.add(part);
      else for (const piece of this.merge(part, bytes)) ids.push(piece);
    }
    return { ids, unknown: [...unknown] };
  }

  // Join neighbours by the earliest merge for as long as there is one.
  merge(word, bytes) {
    if (this.words.has(word)) return this.words.get(word);
    const ids = Array.from(bytes, (byte) => this.alphabet[byte]);
    for (let best = this.merges.size ? [] : null; best; ) {
      best = null;
      for (let i = 0; i + 1 < ids.length; i++) {
        const found = this.merges.get(ids[i] * this.bytes.length + ids[i + 1]);
        if (found && !(best?.[0] <= found[0])) best = [...found, i];
      }
      if (best) ids.splice(best[2], 2, best[1]);
    }
    if (this.pattern) this.words.set(word, ids);
    return ids;
  }
}
