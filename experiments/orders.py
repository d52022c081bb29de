"""Does fine-tuning teach a small published model a task that it cannot do, and how much of it can be counted?

Reference   LoRA (Hu et al. 2021, arXiv:2106.09685), on frozen matrices of 4 bits as in QLoRA (Dettmers et al. 2023,
            arXiv:2305.14314).
Data        orders in plain words, and the same as JSON: made here, 200 for training, 50 others to be counted.
Command     python experiments/orders.py make orders                                    (writes both files)
            jaxgpt train finetune --train.init-from MODEL --data.path orders/train.jsonl --lora.rank 8 ...
            python experiments/orders.py count RUN orders/held-out.jsonl                (answers that are right)
            docs/finetuning.md has the whole of it, with SmolLM2-135M.
Expected    the model that is only imported writes no JSON, or other keys. After a few hundred examples most answers are
            right to the letter.
"""

import json
import random
import sys
from pathlib import Path

import jaxgpt

NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
NAMES = (
    "Ana Ben Clara David Elena Felix Greta Hugo Ines Jonas Karin Luis Marta Nils Olga Pablo Rosa Simon Teresa Viktor"
)
ITEMS = "apples bags of flour candles chairs cups lamps lemons notebooks oranges pencils plates pots ropes spoons tiles"
ITEMS = ITEMS.replace("bags of flour", "bags_of_flour").split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
FORMS = (
    "{name} would like {number} {item} by {day}.",
    "Please send {number} {item} to {name} on {day}.",
    "On {day} we need {number} {item} for {name}.",
    "Could {name} have {number} {item}? They are for {day}.",
    "An order from {name}: {number} {item}, {day}.",
    "For {day}, {number} {item}. The customer is {name}.",
)


def make_orders(count: int, seed: int) -> list[dict]:
    """Return different conversations of one order and its JSON each."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        number, name = draw.randrange(len(NUMBERS)), draw.choice(NAMES.split())
        item, day = draw.choice(ITEMS).replace("_", " "), draw.choice(DAYS)
        text = draw.choice(FORMS).format(name=name, number=NUMBERS[number], item=item, day=day)
        answer = json.dumps({"customer": name, "item": item, "count": number + 2, "day": day})
        found[text] = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return [{"messages": messages} for messages in found.values()]


def make(directory: str) -> None:
    """Write train.jsonl and held-out.jsonl, which have no order in common."""
    orders, folder = make_orders(250, seed=0), Path(directory)
    folder.mkdir(exist_ok=True)
    for name, part in (("train", orders[:200]), ("held-out", orders[200:])):
        lines = "".join(json.dumps(order) + "\n" for order in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def count_right(run: jaxgpt.Run, path: str | Path) -> tuple[int, int, list[str]]:
    """Return (answers that are right to the letter, orders, all answers) of greedy decoding."""
    pairs = [json.loads(line)["messages"] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    answers = run.sample([asked["content"] for asked, _ in pairs], chat=True, greedy=True, max_new_tokens=48)
    right = sum(answer == wanted["content"] for answer, (_, wanted) in zip(answers, pairs, strict=True))
    return right, len(pairs), list(answers)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        right, orders, answers = count_right(jaxgpt.load(sys.argv[2]), sys.argv[3])
        print(f"{right} of {orders} right. The first answer: {answers[0]}")
