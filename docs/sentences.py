"""Count the sentences of the pages, and print the longest: ``python docs/sentences.py [--docstrings]``.

Prose is what a reader reads from left to right. Fenced code, headings, pictures, HTML, comments and Sphinx's directives
are left out. An item of a list is a paragraph, and so is a cell of a table that has more than twenty words: what is too
long for a cell is no shorter for standing in one. Inline code and the text of a link count: a piece of code is one word. A
sentence ends at a full stop, a question mark, an exclamation mark, or the end of its paragraph.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(
    r"(?ms:^( *)(```|\{\{|\$\$).*?^\1(```|\}\}|\$\$) *$|<!--.*?-->)"
    r"|<(p|div|picture|img|a|table|details)\b[^>]*>|</\w+>|!\[[^]]*\]\([^)]*\)"
)
ITEM = re.compile(r"\s*([-*]|\d\.) +")
END = re.compile(r"(?<!et al\.)(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])[)\"*]*\s+(?=[(\"*\[`A-Z0-9])")
LONG_CELL = 20  # words
# Our own words and fragments, on which a reader from elsewhere stumbles: tests/test_docs.py finds none outside of code.
STUMBLES = re.compile(
    r"`[^`]*`|((?i:\b(?:that of|those of|in company|in any company|rungs?|ladders?|bands?|at hand)\b)"
    r"|\bslots?\b|\b(?:take[ns]?|took) (?:it |them )?again\b|(?<!scaling )(?<!Scaling )\b[Ll]aws?\b|^Of (?!course))"
)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each paragraph of prose in Markdown ``text``."""
    text = LEFT_OUT.sub(lambda match: "\n" * match[0].count("\n"), text)  # the numbers of the lines below stay
    first, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        outside = not line.strip() or line.lstrip().startswith(("#", "|", ":::", ".. ", "% ", "---"))
        if line.lstrip().startswith("|"):
            yield from ((number, cell) for cell in map(str.strip, line.split("|")) if len(cell.split()) > LONG_CELL)
        item = ITEM.match(line)
        if lines and (outside or item):
            yield first, " ".join(lines)
            lines = []
        if not outside:
            first = first if lines else number
            lines.append(line[item.end() if item else 0 :].strip())


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line where its paragraph begins and the text of each sentence of Markdown ``text``."""
    for number, paragraph in paragraphs(text):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`+[^`]+`+", lambda code: code[0].replace(" ", "_"), plain)
        yield from ((number, sentence) for sentence in END.split(plain) if re.search(r"\w", sentence))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of one module, each line of an ``Args:`` section as an item."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = re.sub(r"^\w+:$", "", ast.get_docstring(node) or "", flags=re.M)
            yield re.sub(r"^ {4}(\w+):", r"- \1:", text, flags=re.M).replace("``", "`")


def main() -> None:
    """Print a table of the pages, or of the docstrings by folder, and the ten longest sentences."""
    texts = {page: page.read_text(encoding="utf-8") for page in [*(REPOSITORY / "docs").glob("*.md")]}
    texts |= {page: page.read_text(encoding="utf-8") for page in REPOSITORY.glob("[RC]*.md")}
    if "--docstrings" in sys.argv:
        texts = {path: "\n\n".join(docstrings(path)) for path in (REPOSITORY / "jaxgpt").rglob("*.py")}
    counts, longest = dict[str, list[int]](), list[tuple[int, str, str]]()
    for path, text in texts.items():
        place = str((path.parent if "--docstrings" in sys.argv else path).relative_to(REPOSITORY))
        for number, sentence in sentences(text):
            counts.setdefault(place, []).append(len(sentence.split()))
            longest.append((len(sentence.split()), f"{path.relative_to(REPOSITORY)}:{number}", sentence))
    print(f"{'place':30} sentences  words  mean")
    for place, words in sorted(counts.items(), key=lambda item: -sum(item[1]) / len(item[1])):
        print(f"{place:30} {len(words):9} {sum(words):6} {sum(words) / len(words):5.1f}")
    for words, place, sentence in sorted(longest, reverse=True)[:10]:
        print(f"\n{words} words, {place}: {sentence}")


if __name__ == "__main__":
    main()
