"""Write 124 conversations about Python, made from its own reference, for `chat_sft.py` and `post/chat_from_nothing.py`.

python experiments/python_questions.py chats.jsonl
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from jaxgpt.data.corpus import find_corpus_files


def make_questions() -> str:
    """Return conversations as JSON lines: "What is X?", answered by the first sentence of X's section in the reference.

    They are in an order that is shuffled but fixed, so that every kind is held out.
    """
    heading = r"^(\S.{2,59})\n([*=~-])\2+\n\n((?:[A-Z].*\n)(?:\S.*\n)*)"
    definition = r"^( *)((?:[a-z]\w*\.)+\w+)(?:\(.*\))?\n\n((?:\1   \S.*\n)+)"
    (reference,) = find_corpus_files("python-docs")
    text, found = reference.read_text(encoding="utf-8"), {}
    for match in (*re.finditer(heading, text, re.M), *re.finditer(definition, text, re.M)):
        name = match[1].strip() or match[2]
        sentence = re.match(r"[A-Z].{20,250}?\.(?= [A-Z]|$)", " ".join(match[3].split()))
        if sentence is not None:
            found.setdefault(name, sentence[0])
    lines = []
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        asked = {"role": "user", "content": f"What is {name}?"}
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": found[name]}]}))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_questions(), encoding="utf-8")
