"""Make chat.json: conversations as transformers tokenises them by six kinds of chat template, for tests/data/test_template.py.

    python -m pip install transformers tokenizers jinja2
    python tests/golden/make_chat.py

Two tokenizers of 300 ids trained on the conversations themselves: bytes, as GPT-2's, and pieces, as SentencePiece's,
whose first piece is another one at a text's beginning, and whose special tokens take the spaces after them in. The
assistant's tokens are transformers' where a template marks them, else null. Made last with transformers 5.23.0.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TRIMMED = """\
{%- set ns = namespace(first=true) %}
{%- for message in messages -%}
    {{- '' if not ns.first else bos_token -}}
    {%- set ns.first = false -%}
    {{- '<|' + message['role'] + '|>\\n\\n' + message['content'] | trim + '<|end|>' -}}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n\\n' }}{% endif %}
"""
INSTRUCT = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TAKING = """\
{% for message in messages %}{{ '<|' + message.role + '|>' + '\\n' + message.content + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""
DATED = """\
{% for message in messages %}
    {% if message.content is none %}{% continue %}{% endif %}
    {{- '<|' ~ message.role ~ '|>' ~ {'text': message.content} | tojson ~ '<|end|>' }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""

CONVERSATIONS = [
    [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    [("system", "Be brief."), ("user", "Why?"), ("assistant", "Because."), ("user", "And?"), ("assistant", "No.")],
    [("user", "\n¿Un ñandú? 🐎\n"), ("assistant", "  Sí — «un\n\nñandú».  ")],
    [("user", ""), ("assistant", "You said nothing.")],
    [("user", "Write <b>&amp;</b> {{ messages }} {% if %}"), ("assistant", '"quoted" \\n 日本語')],
    [("user", "a < b | c > d, im_start, </s"), ("assistant", "")],
]


def trained(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    specials = [AddedToken(token, special=True, normalized=False, rstrip=kind == "pieces") for token in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(
        [content for c in CONVERSATIONS for _, content in c] + [CHATML, TRIMMED, DATED] * 3, trainer
    )
    return tokenizer


def main() -> None:
    templates = dict(chatml=CHATML, marked=MARKED, trimmed=TRIMMED, instruct=INSTRUCT, taking=TAKING, dated=DATED)
    tokenizers = {kind: trained(kind) for kind in ("bytes", "pieces")}
    cases = []
    for kind, raw in tokenizers.items():
        for name, source in templates.items():
            hf = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=source)
            for number, conversation in enumerate(CONVERSATIONS):
                messages = [{"role": role, "content": content} for role, content in conversation]
                marked = "generation %}" in source
                found = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
                case = {"tokenizer": kind, "template": name, "conversation": number, "ids": found["input_ids"]}
                case["text"] = hf.apply_chat_template(messages, tokenize=False)
                case["prompt"] = hf.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
                case["answers"] = found["assistant_masks"] if marked else None
                cases.append(case)
    made = {
        "tokenizers": {kind: json.loads(t.to_str()) for kind, t in tokenizers.items()},
        "tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "templates": templates,
        "conversations": [[{"role": r, "content": c} for r, c in conversation] for conversation in CONVERSATIONS],
        "cases": cases,
    }
    Path(__file__).with_name("chat.json").write_text(json.dumps(made, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
