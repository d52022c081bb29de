"""Make the cases of chat.json: its conversations as transformers tokenises them by its chat templates.

    python -m pip install transformers tokenizers jinja2
    python tests/golden/make_chat.py

Conversations, templates and two tokenizers stay as they are there: bytes, as GPT-2's, and pieces, as SentencePiece's,
whose first piece is another one at a text's beginning, and whose special tokens take the spaces after them in. The
assistant's tokens are transformers' where a template marks them, else null. Made last with transformers 5.23.0.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def main() -> None:
    path, cases = Path(__file__).with_name("chat.json"), []
    kept = json.loads(path.read_text())
    for kind, tokenizer in kept["tokenizers"].items():
        raw = Tokenizer.from_str(json.dumps(tokenizer))
        for name, source in kept["templates"].items():
            hf = PreTrainedTokenizerFast(tokenizer_object=raw, **kept["tokens"], chat_template=source)
            for number, messages in enumerate(kept["conversations"]):
                marked = "generation %}" in source
                found = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
                case = {"tokenizer": kind, "template": name, "conversation": number, "ids": found["input_ids"]}
                case["text"] = hf.apply_chat_template(messages, tokenize=False)
                case["prompt"] = hf.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
                case["answers"] = found["assistant_masks"] if marked else None
                cases.append(case)
    path.write_text(json.dumps(kept | {"cases": cases}, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
