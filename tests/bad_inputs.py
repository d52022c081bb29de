"""List bad inputs, a few of each kind: command lines, and what stderr must say when they are refused.

The files that they name are made by `bad_place`.
"""

# What `tests.helpers.tiny_experiment` is, so that its run can be resumed.
TRAIN = (
    "train --model.n-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 8 --optim.warmup-steps 2 "
    "--train.steps 6 --train.batch-size 4 --train.log-every 1 --train.eval-every 3 --train.checkpoint-every 2 "
    "--train.sample-tokens 12 "
)
TEXT = f"{TRAIN} --data.path t.txt "

# By how command lines begin: how they go on, with what is said.
TABLE = {
    "": {
        "trian": "unknown command 'trian' (did you mean train?)",
        "runs nowhere": "no directory nowhere: name one that holds runs",
        "prepare t.txt --tokenizer byte --out gs://bucket/p": "gs:/bucket/p is an address",
        "plan --topologie v5e:4x4": "--topology",
    },
    "train ": {
        "--on local:2": "one training takes --on ray and --hosts N together",
        "--model.n-layr 3": "no option --model.n-layr (did you mean --model.n-layer?)",
        "--model.n-layer": "--model.n-layer: expected 1 argument",
        "--model.n-layer ３.５": "n-layer",
        "--model.n-embd 9": "n-embd",
        "--run-dir t.txt": "t.txt exists and is not a run directory",
        "syntax.py": "syntax.py:1: '(' was never closed",
        "raises.py": "raises.py:2: RuntimeError: no luck",
        "quikstart": "did you mean quickstart?",
        "--run-dir broken/half": "experiment.json is damaged",
    },
    f"{TRAIN} --data.path ": {
        "nowhere.txt": "no file or folder at nowhere.txt",
        "pipe": "pipe is a pipe: give a regular file",
        "latin1.txt": "latin1.txt is not UTF-8 text: byte 0xf1 at about offset 1. Convert it",
        "short.txt": "needed 9",
        "half.jsonl": "half.jsonl:2: the line is damaged",
    },
    TEXT: {
        "--run-dir runs/tiny --train.seed 7": "train.seed 0 -> 7",
        "--run-dir ftp://host/x": "ftp://host/x is not in a bucket (gs:// or s3://)",
    },
    "sample ": {
        "nowhere": "nowhere is not a run directory: there is no such directory",
        "'no such\nrun'": r"no such\nrun is not a run directory",
        "loop": "Too many levels of symbolic links",
        "broken/changed": "experiment.json is not what was written: its own SHA-256 does not match. Restore a copy",
        "broken/width": "n_embd=1152921504606846976",
        "broken/no_checkpoint": "has no checkpoint yet",
        "runs/tiny --prompt a --temperature -1": "temperature=-1.0",
        "runs/tiny --prompt 漢字": "'字' (U+5B57), '漢' (U+6F22)",
    },
    "chat ": {"models/cut.gguf": "models/cut.gguf is damaged within its header", "runs/tiny --context 0": "context=0"},
    "evaluate ": {"runs/tiny --data /dev/zero": "/dev/zero is a device"},
    "export runs/tiny ": {"--to hf --out 'with a file'": "with a file exists and is not empty"},
    "import --run-dir new ": {
        "models/pickled": "Pickles are not read, since they could run any code",
        "models/integers": "transformer.wpe.weight holds I32, jaxgpt reads F32, F16, BF16",
        "models/enormous": "model.safetensors is not a valid safetensors file",
        "models/index_dots": "names '../good/model.safetensors': it must name a .safetensors file next to it",
    },
}
# With variables of the environment.
ENVIRONMENT = [
    (TEXT, {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/tokens"),
    ("train --model.n-layr 3", {"COLUMNS": "20"}, "--model.n-layer"),
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
