// The run's tokenizer: characters, or byte-pair encoding; bytes are the latter without merges.

class Tokenizer {
  // bytes: those of all tokens, concatenated; ends: where each ends; alphabet: the token of each byte, or null for characters;
  // pattern: of the words of a text, or null for a single one; merges: [M, 3], left, right and result, the first ones first.
  constructor({ bytes, ends, alphabet, pattern, merges, whole_words }) {
    const [all, at] = [array(bytes), array(ends)];
    this.bytes = Array.from(at, (end, i) => all.subarray(i ? at[i - 1] : 0, end));
    this.alphabet = alphabet && array(alphabet);
    this.pattern = pattern && new RegExp(pattern, "gu");
    this.known = new Map(this.bytes.map((token, id) => [String.fromCharCode(...token), id]));
    this.known.delete("");
    this.merges = new Map();
    const triples = array(merges);
    for (let m = 0; m < triples.length; m += 3) this.merges.set(triples[m] * at.length + triples[m + 1], [m, triples[m + 2]]);
    this.whole = whole_words; // a word that is a token is not split
    this.words = new Map();
  }

  // Return { ids, unknown }: the tokens of a text, and the characters that none stands for.
  encode(text) {
    const [ids, unknown] = [[], new Set()];
    const parts = this.alphabet ? (this.pattern ? (text.match(this.pattern) ?? []) : [text]) : text;
    for (const part of parts) {
      const bytes = new TextEncoder().encode(part);
      if (this.alphabet) this.merge(part, bytes).forEach((id) => ids.push(id));
      else {
        const id = this.known.get(String.fromCharCode(...bytes));
        if (id === undefined) unknown.add(part);
        else ids.push(id);
      }
    }
    return { ids, unknown: [...unknown] };
  }

  // Join the neighbours of the earliest merge until there is none.
  merge(word, bytes) {
    const ids = Array.from(bytes, (byte) => this.alphabet[byte]);
    if (!this.merges.size) return ids;
    if (this.words.has(word)) return this.words.get(word);
    const whole = this.whole && bytes.length < 256 ? this.known.get(String.fromCharCode(...bytes)) : undefined;
    for (let joined = whole === undefined; joined; ) {
      let best = [Infinity];
      for (let i = 0; i + 1 < ids.length; i++) {
        const found = this.merges.get(ids[i] * this.bytes.length + ids[i + 1]);
        if (found && found[0] < best[0]) best = [...found, i];
      }
      joined = best[0] < Infinity;
      if (joined) ids.splice(best[2], 2, best[1]);
    }
    const found = whole === undefined ? ids : [whole];
    if (this.words.size < 1e5) this.words.set(word, found);
    return found;
  }
}
