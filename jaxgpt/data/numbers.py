"""Generate pairs of Spanish number words and digits: a translation task in which every word matters."""

from __future__ import annotations

import re

import numpy as np

COUNT = 200_000  # numbers, each in both directions

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
    """Spell n, from 0 to 999,999,999, in Spanish: 21,000 is "veintiún mil", 101 "ciento uno".

    Source: Real Academia Española, Ortografía de la lengua española, 2010, chapter VIII.
    """
    words = []
    for unit, one, many in ((1_000_000, "un millón", "millones"), (1000, "mil", "mil")):
        count, n = divmod(n, unit)
        if count:
            # Before a noun "uno" becomes "un": veintiún mil, treinta y un millones.
            counted = re.sub("uno$", "un", re.sub("veintiuno$", "veintiún", _below_1000(count)))
            words.append(one if count == 1 else f"{counted} {many}")
    if n or not words:
        words.append(_below_1000(n))
    return " ".join(words)


def _below_1000(n: int) -> str:
    if n == 100:
        return "cien"
    words = [_HUNDREDS[n // 100 - 1]] if n >= 100 else []
    n %= 100
    if n >= 30:
        words.append(_TENS[n // 10 - 3] + (f" y {_SMALL[n % 10]}" if n % 10 else ""))
    elif n or not words:
        words.append(_SMALL[n])
    return " ".join(words)


def make_number_pairs() -> str:
    """Return a .tsv of COUNT distinct numbers, each on two lines: words to digits, then digits to words.

    Lengths of one to nine digits are drawn with equal probability and a fixed seed. As few short numbers exist and
    duplicates are dropped, most have five to nine digits.
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
