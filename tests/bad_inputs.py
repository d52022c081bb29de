"""List bad inputs: command lines, their environment, and what stderr must say when they are refused.

`table()` puts the rows together. The files that they name are made by `bad_place`.
"""

from tests.bad_models import MODELS
from tests.bad_place import LONG

# Of the damaged runs, what is said. Every command that reads a run meets each.
BROKEN = {
    "half": "experiment.json is damaged",
    "changed": "experiment.json is not what was written: its own SHA-256 does not match. Restore a copy",
    "deep": "nested too deeply",
    "format": "has format 99",
    "width": "n_embd=1152921504606846976",
    "infinite": "dropout=inf",
    "unknown": "unknown field experiment.model.n_layers (did you mean n_layer?)",
    "twice": "'format' appears twice",
    "name": "name='../../x'",
    "pipe": "is a pipe: give a regular file",
    "large": "larger than 16,777,216 bytes",
}

# What is no run directory, with what is said.
NO_RUN = [
    ("nowhere", "nowhere is not a run directory: there is no such directory"),
    ("empty", "it has no experiment.json"),
    ("", "run is empty"),
    (LONG, "File name too long"),
    ("no such\nrun", r"no such\nrun is not a run directory"),
    ("loop", "Too many levels of symbolic links"),
    ("\udcff", r"\udcff is not a run directory"),
    ("gs://bucket/x", "gs:/bucket/x is an address: a run needs a directory of this machine"),
]

# Texts that will not do, for --data.path and for evaluate's --data.
NO_TEXT = [
    ("nowhere.txt", "no file or folder at nowhere.txt"),
    ("a\nb\nc\nd.txt", r"no file or folder at a\nb\nc\nd.txt"),
    ("pipe", "pipe is a pipe: give a regular file"),
    ("/dev/zero", "/dev/zero is a device"),
    ("latin1.txt", "latin1.txt is not UTF-8 text: byte 0xf1 at about offset 1. Convert it (iconv -f latin1 -t"),
    ("utf16.txt", "utf16.txt is not UTF-8 text: byte 0xff at about offset 0. Convert it (iconv -f utf-16 -t utf-8)"),
]

SHARDS = [
    ("odd.bin", "999 bytes are not whole 16-bit tokens"),
    ("gzip.bin", "gzip: unpack it first"),
    ("text.bin", "text: name it .txt"),
    ("large.bin", "token 1000 at byte 0 (token number 0) is outside the vocabulary, 0 to 499"),
    ("promise.bin", "promises 600 tokens of 2 bytes, the file holds 1000"),
    ("gap", "x_train_000001.bin is missing between"),
    ("only", "validation shards only"),
    ("pipe.bin", "pipe.bin is a pipe"),
]

# Conversations that will not do, for --data.path.
CHATS = [
    ("nowhere.jsonl", "no file at nowhere.jsonl: --data.path NAME.jsonl takes"),
    ("half.jsonl", "half.jsonl:2: the line is damaged"),
    (
        "role.jsonl",
        "role.jsonl:3: message 1 is {'content': 'a', 'role': 'robot'}: give a role, system, user, assistant",
    ),
    ("content.jsonl", "content.jsonl:1: message 2 has the content 7: give a text"),
    ("alone.jsonl", "alone.jsonl:1: none of its 1 messages is the assistant's"),
    ("end.jsonl", r"end.jsonl:2: message 1 has '\x03', which ends a turn"),
    ("long.jsonl", "no conversation of the training split of long.jsonl has an answer that ends within block_size=8"),
]

# Folders of a tokenizer whose chat template will not do.
TEMPLATES = [
    ("template_syntax", "the chat template is not a Jinja template, line 1"),
    ("template_refuses", "good.jsonl:1: the chat template rejects the conversation: not today"),
    ("template_escapes", "good.jsonl:1: the chat template rejects the conversation: "),
    ("template_silent", "good.jsonl:1: the chat template writes no text of the assistant"),
]

TOKENIZERS = [
    ("tokenizer_half.json", "is not a tokenizer.json"),
    ("tokenizer_deep.json", "nested too deeply"),
    ("tokenizer_huge.json", "kind of tokenizer 'ids' unknown or damaged"),
    ("tokenizer_model.json", "not a tokenizer.json of Hugging Face's"),
    ("tokenizer_few.json", "not in this tokenizer's 8 characters"),
    ("ids", "tokenizer ids is for .bin"),
]

EXPERIMENT_FILES = [
    ("syntax.py", "syntax.py:1: '(' was never closed"),
    ("raises.py", "raises.py:2: RuntimeError: no luck"),
    ("missing.py", "missing.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("value.py", "value.py:2: n_layer=0: needs at least 1"),
    ("field.py", "field.py:2: TypeError"),
    ("other.py:his", "has no `his = Experiment(...)`; it has mine"),
    ("folder.py", "folder.py is a directory"),
    ("quikstart", "did you mean quickstart?"),
    ("t.txt", "it is neither a built-in name nor a .py file"),
]

TRAIN = (
    "train --model.n-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 8 --optim.warmup-steps 1 "
    "--train.steps 2 --train.batch-size 2 --train.sample-tokens 5 --data.path t.txt"
).split()

SAMPLE = ["sample", "runs/tiny", "--prompt", "a"]
IDS = ["--data.tokenizer", "ids", "--model.vocab-size", "500"]

# Weights to start from, with what is said.
FROM = ["--train.init-from", "runs/tiny"]
STARTS = [
    (["--train.init-from", "nowhere"], "no directory at nowhere"),
    (["--train.init-from", "t.txt"], "t.txt is a file: give the directory"),
    (["--train.init-from", "m.gguf"], "m.gguf is a file: make it a run with `jaxgpt import m.gguf --run-dir DIR`"),
    (["--train.init-from", "broken/no_checkpoint"], "has no checkpoint yet"),
    (["--train.init-from", "broken/damaged_checkpoints"], "is damaged, and no other is good"),
    ([*FROM, "--data.path", "unknown.txt"], "'字' (U+5B57), '漢' (U+6F22)"),
    ([*FROM, "--lora.rank", "2", "--lora.targets"], "lora.targets is empty"),
    ([*FROM, "--run-dir", "runs/tiny"], "another configuration: train.init_from None -> runs/tiny"),
]

VERBS = [
    ("trian", "unknown command 'trian' (did you mean train?)"),
    ("\udcff", "unknown command"),
    ("scale", "python experiments/scaling_laws.py"),
]

OVER = ["--over", "optim.learning-rate=1e-4..1e-1"]
# Of every command: options that do not exist, want a value, or have two.
OPTIONS = [
    (["train", "--model.n-layr", "3"], "no option --model.n-layr (did you mean --model.n-layer?)"),
    (["serve", "a", "b"], "give one at a time: got b as well"),
    (["train", "--model.n-layer"], "--model.n-layer: expected 1 argument"),
    (["train", "--epochs", "3"], "(did you mean --train.steps?)"),
    (["train", "--device", "cpu"], "(did you mean JAX_PLATFORMS=cpu?)"),
    (["sample", "--lr", "1"], "there is no option --lr. See jaxgpt sample --help"),
    (["train", "--train.steps", "1e-3"], "--train.steps='1e-3': needs a whole number"),
    (["train", "--run-dir", ""], "run_dir is empty"),
    (["train", "quickstart", "shakespeare"], "shakespeare"),
    (["train", "--model.bias", "maybe"], "maybe"),
    (["sample", "--temprature", "1"], "--temperature"),
    (["sample", "runs/tiny", "--chat", "--prompt", "a"], "not in this tokenizer's"),
    (
        ["sample", "runs/tiny", "--chat"],
        "--chat has no prompt: give --prompt TEXT, or write the user's turn to standard",
    ),
    (["evaluate", "runs/tiny", "--data", "unknown.txt"], "'字' (U+5B57), '漢' (U+6F22)"),
    (["sample", "runs/tiny", "--prompt", "a", "--average", "9"], "average=9: runs/tiny has 1 checkpoints"),
    (["report", "nowhere"], "nowhere is not a run directory"),
    (["report", "runs/tiny", "--out", "nowhere"], "there is no directory nowhere for report.html"),
    (["runs", "nowhere"], "no directory nowhere: name one that holds runs"),
    (["study", "nowhere.py"], "no study 'nowhere.py': give a .py file"),
    (["study", "variants_data.py", "--seeds", "0"], "--seeds=0: needs at least 1"),
    (["sweep", *OVER, "--run-dir", "runs/tiny"], "runs/tiny exists and is not a sweep (no sweep.json)"),
    (["xray", "runs/tiny", "--prompt", "añejo"], "'ñ' (U+00F1)"),
    (["xray", "runs/tiny", "--prompt", "a", "--out", "empty", "--force"], "empty is a directory: give a regular file"),
    (["replay", "runs/tiny", "--step", "0"], "--step 0: needs one of the steps of runs/tiny, 1 to"),
    (["import", "models/good", "--run-dir", "runs/tiny"], "runs/tiny exists and is not empty"),
    (["import", "no such\nmodel", "--run-dir", "new"], r"no directory at no such\nmodel"),
    (["import", "m.gguf", "--run-dir", "new"], "m.gguf is not a GGUF file"),
    (["export", "runs/tiny", "--to", "gguf", "--out", "t.txt"], "t.txt exists: name another file with --out"),
    (["export", "runs/tiny", "--to", "peft", "--out", "new"], "runs/tiny has no adapters (--lora.rank)"),
    (["export", "runs/tiny", "--to", "hf", "--out", "with a file"], "with a file exists and is not empty"),
    (["plan", "--topologie", "v5e:4x4"], "--topology"),
]

# Values that a field refuses, by its option.
NUMBERS = {
    "model.n-layer": ["0", "2147483648", "1e400", "0.5", "", "３.５", "1,000", "three", "1" * 5000, "None"],
    "model.n-embd": ["-4", "9", str(2**24)],
    "model.block-size": ["5000", str(2**31)],
    "model.position": ["ＲＯＰＥ"],
    "data.val-fraction": ["1", "1e-9"],
    "optim.learning-rate": ["0", "inf", "1e-400", "1" + "0" * 400],
    "optim.max-skipped": [str(2**40)],
    "train.steps": ["0", str(2**31), "1" + "0" * 30],
    "train.profile": ["20", "0:3", "7:3", "x", "1:2:3"],
    "train.seed": ["-1", str(2**32)],
    "train.attention": ["cudnn", "flash"],
    "lora.rank": ["0", "3"],  # of which weights?
    "parallel.slices": ["2"],  # which need a mesh
    "parallel.processes": ["2"],
    "parallel.coordinator": ["nowhere"],
    "parallel.connect-timeout": [str(2**40)],
    "name": ["../x", "", "a\nb", "x" * 300, "🐎"],
}

SAMPLING = [
    (["--max-new-tokens", "0"], "--max-new-tokens=0: needs at least 1"),
    (["--temperature", "-1"], "temperature=-1.0"),
    (["--stop="], "a stop string is empty"),
    (["--draft", "nowhere"], "(did you mean python experiments/speculative.py RUN DRAFT?)"),
]

PROMPTS = [
    ("añejo", "'ñ' (U+00F1)"),
    ("漢字", "'字' (U+5B57), '漢' (U+6F22)"),
    ("\udcff", "U+DCFF"),
]

MISSING = ["train", "--data.path", "nowhere.txt"]
ENVIRONMENT = [
    (TRAIN, {"JAX_NUM_CPU_DEVICES": "0"}, "JAX_NUM_CPU_DEVICES='0'"),
    (TRAIN, {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/tokens"),
    (["train"], {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/corpora"),
    (TRAIN, {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "abc"}, "OMPI_COMM_WORLD_SIZE='abc'"),
    (TRAIN, {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "the processes could not meet"),
    (TRAIN, {"SLURM_STEP_NODELIST": "x", "SLURM_NTASKS": "2"}, "the processes could not meet"),
    # Where the surroundings are odd, a mistake is told as ever.
    (["train", "--model.n-layr", "3"], {"COLUMNS": "20"}, "--model.n-layer"),
    (MISSING, {"LANG": "C", "LC_ALL": "C"}, "nowhere.txt"),
]

# Read while Python or jax starts: only a fresh process meets them.
AT_IMPORT = [
    (TRAIN, {"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS='nonsense'"),
    (TRAIN, {"JAX_ENABLE_X64": "maybe"}, "jax cannot be imported"),
    (["train", "--data.path", "ñ.txt"], {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}, ".txt"),
]


# Without the tokens of an earlier run, and without a place for compiled programs.
NO_CACHE = {"JAXGPT_CACHE": "nowhere", "JAX_COMPILATION_CACHE_DIR": ""}


def table() -> list[tuple[list[str], dict, str]]:
    rows: list[tuple[list[str], dict, str]] = [([verb], {}, said) for verb, said in VERBS]
    rows += [(argv, {}, said) for argv, said in OPTIONS]
    for name, values in NUMBERS.items():
        option, given = f"--{name}", dict(zip(TRAIN[1::2], TRAIN[2::2], strict=True))
        given.pop(option, None)
        argv = ["train", *(word for pair in given.items() for word in pair)]
        rows += [([*argv, option, value], {}, name.rpartition(".")[2]) for value in values]
    rows += [(["sample", f"broken/{name}"], {}, said) for name, said in BROKEN.items()]
    for verb in (
        ["train", "--run-dir"],
        ["evaluate"],
        ["replay", "--step", "1"],
        ["export", "--to", "hf", "--out", "new"],
    ):
        rows += [([*verb, f"broken/{name}"], {}, BROKEN[name]) for name in ("half", "width", "pipe")]
    for verb in ("sample", "evaluate"):
        rows += [([verb, path], {}, said) for path, said in NO_RUN]
        rows += [
            ([verb, "broken/damaged_checkpoints"], {}, "is damaged, and no other is good"),
            ([verb, "broken/no_checkpoint"], {}, "has no checkpoint yet"),
            ([verb, "broken/no_tokenizer"], {}, "no tokenizer at"),
            ([verb, "broken/other_tokenizer"], {}, "not the tokenizer that"),
        ]
    rows += [([*TRAIN[:-2], "--data.path", path], {}, said) for path, said in NO_TEXT]
    rows += [(["evaluate", "runs/tiny", "--data", path], {}, said) for path, said in NO_TEXT]
    rows += [([*TRAIN[:-2], *IDS, "--data.path", path], {}, said) for path, said in SHARDS]
    rows += [([*TRAIN[:-2], "--data.path", path], {}, said) for path, said in CHATS]
    rows += [([*TRAIN[:-2], "--data.path", "half.tsv"], {}, "pairs are for experiments/transformer_2017")]
    rows += [([*TRAIN[:-2], *IDS, "--data.path", "good.jsonl"], {}, "conversations need char, byte, bpe")]
    rows += [(["evaluate", "runs/tiny", "--data", "half.jsonl"], {}, "half.jsonl:1: not in this tokenizer's")]
    rows += [
        ([*TRAIN[:-2], "--data.path", "good.jsonl", "--data.tokenizer", f"{name}/tokenizer.json"], {}, said)
        for name, said in TEMPLATES
    ]
    rows += [([*TRAIN, "--data.tokenizer", path], {}, said) for path, said in TOKENIZERS]
    rows += [(["train", path], {}, said) for path, said in EXPERIMENT_FILES]
    rows += [(["import", f"models/{name}", "--run-dir", "new"], {}, said) for name, said in MODELS]
    rows += [([*TRAIN, *argv], {}, said) for argv, said in STARTS]
    rows += [([*TRAIN, "--train.init-from", f"models/{name}"], {}, said) for name, said in MODELS[::5]]
    rows += [([*SAMPLE, *argv], {}, said) for argv, said in SAMPLING]
    rows += [(["sample", "runs/tiny", "--prompt", prompt], {}, said) for prompt, said in PROMPTS]
    rows += [
        ([*TRAIN[:-2], "--data.path", "short.txt"], {}, "needed 9"),
        ([*TRAIN[:-2], "--data.path", "empty.txt"], {}, "empty.txt is empty"),
        (["train", "--data.path", "medium.txt"], {}, "the validation split of medium.txt"),
        (["train", "--data.corpus", "bible"], {}, "unknown corpus 'bible'"),
        (["train", "--run-dir", "t.txt"], {}, "t.txt exists and is not a run directory"),
        ([*TRAIN, "--run-dir", "gs://bucket/x"], {}, "gs:/bucket/x is an address"),
        ([*TRAIN, "--run-dir", "runs/tiny", "--train.seed", "7"], {}, "train.seed 0 -> 7"),
        ([*TRAIN[:-2], "--data.path", "t.txt", "--run-dir", "runs/tiny", "--optim.beta1", "0.5"], {}, "optim.beta1"),
        ([*TRAIN[:-2], "--run-dir", "runs/tiny", "--data.path", "medium.txt"], {}, "was trained on other data"),
        (["evaluate", "runs/moved"], NO_CACHE, "was trained on gone.txt, which is not there"),
        (["replay", "runs/moved", "--step", "1"], NO_CACHE, "to replay a step, put that text back"),
        (["audit", "runs/moved"], NO_CACHE, "to audit it, name that text with --data"),
    ]
    return rows + [(argv, env, said) for argv, env, said in ENVIRONMENT]
