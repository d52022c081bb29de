"""List bad inputs, a few of each kind: command lines, and what stderr must say when they are refused.

The files that they name are made by `bad_place`.
"""

TRAIN = (
    "train --model.n-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 8 --optim.warmup-steps 1 "
    "--train.steps 2 --train.batch-size 2 --train.sample-tokens 5 "
)
TEXT = f"{TRAIN} --data.path t.txt "

# By how command lines begin: how they go on, with what is said.
TABLE = {
    "": {
        "trian": "unknown command 'trian' (did you mean train?)",
        "'\udcff'": "unknown command",
        "serve a b": "give one at a time: got b as well",
        "replay runs/tiny --step 0": "--step 0: needs one of the steps of runs/tiny, 1 to",
        "report nowhere": "nowhere is not a run directory",
        "runs nowhere": "no directory nowhere: name one that holds runs",
        "study variants_data.py --seeds 0": "--seeds=0: needs at least 1",
        "sweep --over optim.learning-rate=1e-4..1e-1 --run-dir runs/tiny": "is a run and not a sweep",
        "xray runs/tiny --prompt a --out empty --force": "empty is a directory: give a regular file",
        "plan --topologie v5e:4x4": "--topology",
    },
    "train ": {
        "--model.n-layr 3": "no option --model.n-layr (did you mean --model.n-layer?)",
        "--model.n-layer": "--model.n-layer: expected 1 argument",
        "--model.n-layer 0": "n-layer",
        "--model.n-layer ３.５": "n-layer",
        f"--model.n-layer {'1' * 5000}": "n-layer",
        "--model.n-embd 9": "n-embd",
        "--epochs 3": "(did you mean --train.steps?)",
        "--train.steps 1e-3": "--train.steps='1e-3': needs a whole number",
        "--optim.learning-rate 1e-400": "learning-rate",
        "--parallel.slices 2": "slices",
        "--run-dir ''": "run_dir is empty",
        "--run-dir t.txt": "t.txt exists and is not a run directory",
        "--data.corpus bible": "unknown corpus 'bible'",
        "syntax.py": "syntax.py:1: '(' was never closed",
        "raises.py": "raises.py:2: RuntimeError: no luck",
        "other.py:his": "has no `his = Experiment(...)`; it has mine",
        "quikstart": "did you mean quickstart?",
        "--run-dir broken/half": "experiment.json is damaged",
    },
    f"{TRAIN} --data.path ": {
        "nowhere.txt": "no file or folder at nowhere.txt",
        "pipe": "pipe is a pipe: give a regular file",
        "latin1.txt": "latin1.txt is not UTF-8 text: byte 0xf1 at about offset 1. Convert it",
        "short.txt": "needed 9",
        "half.jsonl": "half.jsonl:2: the line is damaged",
        "role.jsonl": "role.jsonl:3: message 1 is {'content': 'a', 'role': 'robot'}: give a role, system, user, assist",
        "end.jsonl": r"end.jsonl:2: message 1 has '\x03', which ends a turn",
        "good.jsonl --data.tokenizer template_syntax/tokenizer.json": "the chat template is not a Jinja template, line 1",
        "good.jsonl --data.tokenizer template_escapes/tokenizer.json": "the chat template rejects the conversation: ",
        "medium.txt --run-dir runs/tiny": "was trained on other data",
    },
    f"{TRAIN} --data.tokenizer ids --model.vocab-size 500 --data.path ": {
        "odd.bin": "999 bytes are not whole 16-bit tokens",
        "large.bin": "token 1000 at byte 0 (token number 0) is outside the vocabulary, 0 to 499",
    },
    TEXT: {
        "--data.tokenizer tokenizer_deep.json": "nested too deeply",
        "--data.tokenizer tokenizer_few.json": "not in this tokenizer's 8 characters",
        "--train.init-from m.gguf": "m.gguf is a file: make it a run with `jaxgpt import m.gguf --run-dir DIR`",
        "--train.init-from runs/tiny --lora.rank 2 --lora.targets": "lora.targets is empty",
        "--train.init-from models/all_at_once": "missing transformer.h.0-1.ln_2.bias; unknown adapter",
        "--run-dir runs/tiny --train.seed 7": "train.seed 0 -> 7",
        "--run-dir gs://bucket/x": "gs:/bucket/x is an address",
    },
    "sample ": {
        "nowhere": "nowhere is not a run directory: there is no such directory",
        "'no such\nrun'": r"no such\nrun is not a run directory",
        "loop": "Too many levels of symbolic links",
        "x" * 300: "File name too long",
        "broken/changed": "experiment.json is not what was written: its own SHA-256 does not match. Restore a copy",
        "broken/deep": "nested too deeply",
        "broken/width": "n_embd=1152921504606846976",
        "broken/unknown": "unknown field experiment.model.n_layers (did you mean n_layer?)",
        "broken/pipe": "is a pipe: give a regular file",
        "broken/large": "larger than 16,777,216 bytes",
        "broken/damaged_checkpoints": "is damaged, and no other is good",
        "broken/no_checkpoint": "has no checkpoint yet",
        "broken/no_tokenizer": "no tokenizer at",
        "broken/other_tokenizer": "not the tokenizer that",
        "runs/tiny --prompt a --average 9": "average=9: runs/tiny has 1 checkpoints",
        "runs/tiny --prompt a --temperature -1": "temperature=-1.0",
        "runs/tiny --prompt 漢字": "'字' (U+5B57), '漢' (U+6F22)",
        "runs/tiny --prompt '\udcff'": "U+DCFF",
        "runs/tiny --chat": "--chat has no prompt: give --prompt TEXT, or write the user's turn to standard",
    },
    "evaluate ": {
        "runs/tiny --data utf16.txt": "is not UTF-8 text: byte 0xff at about offset 0. Convert it",
        "runs/tiny --data /dev/zero": "/dev/zero is a device",
    },
    "export runs/tiny ": {
        "--to gguf --out t.txt": "t.txt exists: name another file with --out",
        "--to peft --out new": "runs/tiny has no adapters (--lora.rank)",
        "--to hf --out 'with a file'": "with a file exists and is not empty",
    },
    "import --run-dir new ": {
        "m.gguf": "m.gguf is not a GGUF file",
        "models/adapter": "has an adapter of 'gpt2', no whole model. Merge it",
        "models/pickled": "has only pickled weights (pytorch_model.bin), which could run any code",
        "models/mixed": "model_type=['gpt2'] is not supported: jaxgpt reads gpt2, llama, mistral, qwen2, qwen3, gemma",
        "models/activation": "activation_function='swish': needs one of gelu_new",
        "models/integers": "transformer.wpe.weight holds I32, jaxgpt reads F32, F16, BF16",
        "models/cut": "model.safetensors is not a valid safetensors file",
        "models/enormous": "model.safetensors is not a valid safetensors file",
        "models/index_dots": "names '../good/model.safetensors': it must name a .safetensors file next to it",
        "models/index_gone": "model-2.safetensors is missing, but model.safetensors.index.json needs it",
        "models/tokenizer_large": "tokenizer.json has ids up to 77, the model a vocab_size of 60",
    },
}
# With variables of the environment.
ENVIRONMENT = [
    # Without the tokens of an earlier run.
    (
        "evaluate runs/moved",
        {"JAXGPT_CACHE": "nowhere", "JAX_COMPILATION_CACHE_DIR": ""},
        "was trained on gone.txt, which is not there",
    ),
    (TEXT, {"JAX_NUM_CPU_DEVICES": "0"}, "JAX_NUM_CPU_DEVICES='0'"),
    (TEXT, {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/tokens"),
    (TEXT, {"SLURM_STEP_NODELIST": "x", "SLURM_NTASKS": "2"}, "the processes could not meet"),
    ("train --model.n-layr 3", {"COLUMNS": "20"}, "--model.n-layer"),
    ("train --data.path nowhere.txt", {"LANG": "C", "LC_ALL": "C"}, "nowhere.txt"),
]
# Read while Python or jax starts: only a fresh process meets them.
AT_IMPORT = [
    (TEXT, {"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS='nonsense'"),
    ("train --data.path ñ.txt", {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}, ".txt"),
]


def rows() -> list[tuple[str, dict, str]]:
    """Return (command line, environment, what is said) of all but what only a fresh process meets."""
    plain = [(begin + rest, {}, said) for begin, lines in TABLE.items() for rest, said in lines.items()]
    return plain + ENVIRONMENT
