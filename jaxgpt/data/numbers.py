"""Numbers in Spanish words and in digits: pairs to translate either way, in which every word matters."""

from __future__ import annotations

import numpy as np

COUNT = 200_000  # numbers, each both ways
LARGEST = 999_999_999

_SMALL = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete "
    "dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete "
    "veintiocho veintinueve"
).split()
_TENS = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_HUNDREDS = (
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos novecientos".split()
)


def spell_number(n: int) -> str:
    """Spell n in Spanish, 0 to 999,999,999: 21,000 is "veintiún mil", 101 "ciento uno".

    As the Academy writes it: Ortografía de la lengua española, 2010, chapter VIII.
    """
    if not 0 <= n <= LARGEST:
        raise ValueError(f"n={n}: needs 0 to {LARGEST:,}")
    if n == 0:
        return _SMALL[0]
    millions, thousands, rest = n // 1_000_000, n // 1000 % 1000, n % 1000
    words = []
    if millions:
        words.append("un millón" if millions == 1 else f"{_before_noun(millions)} millones")
    if thousands:
        words.append("mil" if thousands == 1 else f"{_before_noun(thousands)} mil")
    if rest:
        words.append(_below_1000(rest))
    return " ".join(words)


def _below_1000(n: int) -> str:
    if n == 100:
        return "cien"
    words = [_HUNDREDS[n // 100 - 1]] if n >= 100 else []
    n %= 100
    if n >= 30:
        words.append(_TENS[n // 10 - 3] + (f" y {_SMALL[n % 10]}" if n % 10 else ""))
    elif n:
        words.append(_SMALL[n])
    return " ".join(words)


def _before_noun(n: int) -> str:
    """Drop the o of "uno": veintiún mil, treinta y un millones."""
    words = _below_1000(n)
    if words.endswith("veintiuno"):
        return words.removesuffix("uno") + "ún"
    return words.removesuffix("o") if words.endswith("uno") else words


def make_number_pairs() -> str:
    """Return a .tsv of COUNT different numbers, each in words then digits, and the other way round in the next line.

    Lengths from one to nine digits are equally likely, in a mixed order that is always the same; there are fewer
    numbers of few digits, so that most have five to nine.
    """
    rng = np.random.default_rng(2017)
    digits_N = rng.integers(1, 10, 4 * COUNT)
    drawn_N = rng.integers(10 ** (digits_N - 1) * (digits_N > 1), 10**digits_N)
    _, first = np.unique(drawn_N, return_index=True)
    lines = []
    for n in drawn_N[np.sort(first)[:COUNT]].tolist():
        words = spell_number(n)
        lines.append(f"{words}\t{n}\n{n}\t{words}\n")
    return "".join(lines)
