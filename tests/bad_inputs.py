"""The table of bad inputs: command lines, their environment, and what stderr must say when they are refused.

`table()` puts the rows together; the files that they name are those of `bad_place`.
"""

from tests.bad_place import LONG

# Of the damaged runs, what is said. Every verb that reads a run meets each.
BROKEN = {
    "half": "experiment.json is damaged",
    "nothing": "experiment.json is damaged",
    "list": "has format None",
    "null": "has format None",
    "deep": "nested too deeply",
    "format": "has format 99",
    "format_text": r"has format '1\n2",
    "no_format": "has format None",
    "nan": "NaN is not JSON",
    "digits": "4300",
    "vocabulary": "vocab_size=1152921504606846976",
    "vocabulary_true": "vocab_size=True",
    "width": "n_embd=1152921504606846976",
    "layers": "n_layer=1000",
    "layers_text": "n_layer='xxx",
    "infinite": "dropout=inf",
    "unknown": "did you mean experiment.model.n_layer?",
    "lines": r"experiment.model.a\nb",
    "twice": "'format' is there twice",
    "experiment": "got int, needs an object",
    "data": "data=[1]",
    "name": "name='../../x'",
    "utf16": "utf-8",
    "bom": "BOM",
    "latin1": "utf-8",
    "device": "is a device, needs a regular file",
    "folder": "is a directory, needs a regular file",
    "pipe": "is a pipe, needs a regular file",
    "large": "larger than 16,777,216 bytes",
}

# What is no run directory, with what is said.
NO_RUN = [
    ("nowhere", "nowhere is not a run directory: there is no such directory"),
    ("empty", "it has no experiment.json"),
    ("t.txt", "t.txt is not a run directory"),
    ("", "run is empty"),
    (LONG, "File name too long"),
    ("x/" * 3000, "File name too long"),
    ("no such\nrun", r"no such\nrun is not a run directory"),
    ("loop", "Too many levels of symbolic links"),
    ("pipe", "pipe is not a run directory"),
    ("/dev/null", "/dev/null is not a run directory"),
    ("\udcff", r"\udcff is not a run directory"),
    ("🐎 ñandú", "🐎 ñandú is not a run directory"),
    ("\u202etxt.nur", r"\u202etxt.nur is not a run directory"),
    ("\x1b[31mred", r"\x1b[31mred is not a run directory"),
    ("runs", "runs is not a run directory: it has no experiment.json"),
]

# Texts that will not do, for --data.path and for evaluate's --data.
NO_TEXT = [
    ("nowhere.txt", "no file or folder at nowhere.txt"),
    ("dangling.txt", "no file or folder at dangling.txt"),
    ("empty", "empty has no .txt files"),
    (LONG, "File name too long"),
    ("t.txt/x", "no file or folder at t.txt/x"),
    ("no such file.txt", "no file or folder at no such file.txt"),
    ("a\nb\nc\nd.txt", r"no file or folder at a\nb\nc\nd.txt"),
    ("loop", "Too many levels of symbolic links"),
    ("pipe", "pipe is a pipe, needs a regular file"),
    ("/dev/null", "/dev/null is a device"),
    ("/dev/zero", "/dev/zero is a device"),
    ("\udcff.txt", r"no file or folder at \udcff.txt"),
    ("latin1.txt", "latin1.txt is not UTF-8 text: byte 0xf1 at about offset 1"),
    ("utf16.txt", "utf16.txt is not UTF-8 text: byte 0xff at about offset 0"),
    ("picture.txt", "picture.txt is not UTF-8 text: byte 0x89"),
    ("half.txt", "half.txt is not UTF-8 text: byte 0xc3"),
    ("surrogate.txt", "surrogate.txt is not UTF-8 text: byte 0xed at about offset 3"),
]

SHARDS = [
    ("odd.bin", "999 bytes are not whole 16-bit tokens"),
    ("none.bin", "0 bytes"),
    ("array.bin", "a NumPy array"),
    ("zip.bin", "a zip archive"),
    ("gzip.bin", "gzip: unpack it first"),
    ("parquet.bin", "Parquet"),
    ("safetensors.bin", "safetensors"),
    ("text.bin", "text: name it .txt"),
    ("float.bin", "outside the vocabulary, 0 to 499"),
    ("large.bin", "token 1000 at byte 0 (token number 0) is outside the vocabulary, 0 to 499"),
    ("promise.bin", "promises 600 tokens of 2 bytes, the file holds 1000"),
    ("negative.bin", "promises -1 tokens"),
    ("cut.bin", "promises 500 tokens of 2 bytes, the file holds 0"),
    ("header.bin", "holds no tokens"),
    ("gap", "x_train_000001.bin is missing between"),
    ("only", "validation shards only"),
    ("one", "val.bin is a directory"),
    ("pipe.bin", "pipe.bin is a pipe"),
    ("loop.bin", "Too many levels of symbolic links"),
    ("nowhere.bin", "no file or folder at nowhere.bin"),
]

# Conversations that will not do, for --data.path.
CHATS = [
    ("nowhere.jsonl", "no file at nowhere.jsonl: --data.path NAME.jsonl takes"),
    ("empty.jsonl", "empty.jsonl has 0 conversations"),
    ("one.jsonl", "one.jsonl has 1 conversations"),
    ("half.jsonl", "half.jsonl:2: the line is damaged"),
    ("text.jsonl", "text.jsonl:1: got {'text': 'a story'}, needs {"),
    ("role.jsonl", "role.jsonl:3: message 1 has the role 'tool': needs one of system, user, assistant"),
    ("content.jsonl", "content.jsonl:1: message 2 has the content None: needs a text"),
    ("alone.jsonl", "alone.jsonl:1: none of its 1 messages is the assistant's"),
    ("latin1.jsonl", "latin1.jsonl:1: the line is damaged: 'utf-8'"),
    ("end.jsonl", r"end.jsonl:2: message 1 has '\x03', which ends a turn"),
    ("long.jsonl", "no conversation of the training split of long.jsonl has an answer that ends within block_size=8"),
    ("folder.jsonl", "no file at folder.jsonl"),
    ("pipe.jsonl", "pipe.jsonl is a pipe"),
    ("\x1b.jsonl", r"no file at \x1b.jsonl"),
]

# Folders of a tokenizer whose chat template will not do.
TEMPLATES = [
    ("template_syntax", "the chat template is no Jinja template, line 1"),
    ("template_refuses", "good.jsonl:1: the chat template refuses it: not today"),
    ("template_escapes", "good.jsonl:1: the chat template refuses it: "),
    ("template_list", "is damaged: needs a text, or a list with one named default"),
    ("template_config", "tokenizer_config.json is damaged: it holds list, needs an object"),
    ("template_silent", "good.jsonl:1: the chat template writes nothing of the assistant's"),
]

TOKENIZERS = [
    ("nowhere.json", "no tokenizer at nowhere.json"),
    ("chars", "no tokenizer at chars"),
    ("empty", "empty is a directory"),
    ("pipe", "pipe is a pipe"),
    ("/dev/zero", "/dev/zero is a device"),
    (LONG, "File name too long"),
    ("t.txt", "t.txt is not a tokenizer.json"),
    ("tokenizer_nothing.json", "is not a tokenizer.json"),
    ("tokenizer_half.json", "is not a tokenizer.json"),
    ("tokenizer_list.json", "it holds list, not an object"),
    ("tokenizer_deep.json", "nested too deeply"),
    ("tokenizer_latin1.json", "utf-8"),
    ("tokenizer_kind.json", "kind of tokenizer 'runes' unknown"),
    ("tokenizer_unsorted.json", "in the order of their code points"),
    ("tokenizer_surrogate.json", "in the order of their code points"),
    ("tokenizer_none.json", "at least one character"),
    ("tokenizer_twice.json", "'jaxgpt' is there twice"),
    ("tokenizer_huge.json", "kind of tokenizer 'ids' unknown or damaged"),
    ("tokenizer_model.json", "not a tokenizer.json of Hugging Face's"),
    ("tokenizer_vocabulary.json", "its ids go up to -1"),
    ("tokenizer_far.json", "its ids go up to 4294967295"),
    ("tokenizer_few.json", "not in this tokenizer's 8 characters"),
    ("ids", "tokenizer ids is for .bin"),
    ("", "data.tokenizer is empty"),
]

EXPERIMENT_FILES = [
    ("syntax.py", "syntax.py:1: '(' was never closed"),
    ("raises.py", "raises.py:2: RuntimeError: no luck"),
    ("deeper.py", "deeper.py:2: ZeroDivisionError"),
    ("exits.py", "exits.py:2: SystemExit: 0"),
    ("none.py", "none.py has no `experiment = Experiment(...)`"),
    ("type.py", "type.py has no `experiment = Experiment(...)`"),
    ("cls.py", "cls.py has no `experiment = Experiment(...)`"),
    ("function.py", "function.py has no `experiment = Experiment(...)`"),
    ("circular.py", "circular.py:"),
    ("missing.py", "missing.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("recursion.py", "recursion.py:1: RecursionError"),
    ("prints.py", "prints.py has no"),
    ("value.py", "value.py:2: n_layer=0: needs at least 1"),
    ("field.py", "field.py:2: TypeError"),
    ("name.py", "name.py:2: name='../x'"),
    ("nul.py", "nul.py:1: "),
    ("coding.py", "klingon"),
    ("indent.py", "indent.py:2: unexpected indent"),
    ("other.py", "it has mine"),
    ("other.py:his", "has no `his = Experiment(...)`; it has mine"),
    ("generator.py", "generator.py:1: StopIteration"),
    ("silent.py", "silent.py:1: Exception"),
    ("empty.py", "empty.py has no"),
    ("latin1.py", "latin1.py:1: "),
    ("utf16.py", "utf16.py:1: "),
    ("folder.py", "folder.py is a directory"),
    ("loop.py", "Too many levels of symbolic links"),
    ("pipe.py", "pipe.py is a pipe"),
    ("nowhere.py", "there is no such file"),
    (LONG + ".py", "File name too long"),
    ("quikstart", "did you mean quickstart?"),
    ("t.txt", "it is neither a built-in name nor a .py file"),
    ("", "no experiment ''"),
    ("\udcff.py", r"\udcff.py': there is no such file"),
    ("ｑuickstart", "did you mean quickstart?"),
]

TRAIN = [
    "train",
    "--model.n-layer",
    "1",
    "--model.n-head",
    "2",
    "--model.n-embd",
    "8",
    "--model.block-size",
    "8",
    "--optim.warmup-steps",
    "1",
    "--train.steps",
    "2",
    "--train.batch-size",
    "2",
    "--train.sample-tokens",
    "5",
    "--data.path",
    "t.txt",
]

SAMPLE = ["sample", "runs/tiny", "--prompt", "a"]
IDS = ["--data.tokenizer", "ids", "--model.vocab-size", "500"]

VERBS = [
    ("trian", "unknown verb 'trian' (did you mean train?)"),
    ("", "unknown verb ''"),
    (" train", "unknown verb ' train'"),
    ("TRAIN", "unknown verb 'TRAIN'"),
    ("ｔｒａｉｎ", "unknown verb 'ｔｒａｉｎ'"),
    ("🐎", "unknown verb '🐎'"),
    ("train\nsample", r"unknown verb 'train\nsample'"),
    ("--version", "unknown verb '--version'"),
    ("-x", "unknown verb '-x'"),
    ("\udcff", "unknown verb"),
    (LONG * 100, "unknown verb"),
    ("../train", "unknown verb '../train'"),
]

# Of every verb: options that do not exist, want a value, or have two.
OPTIONS = [
    (["train", "--model.n-layr", "3"], "--model.n-layr, 3 Did you mean --model.n-layer?"),
    (["train", "--modle.n-layer", "3"], "--modle.n-layer"),
    (["train", "--nonsense"], "--nonsense"),
    (["train", "--model.n-layer"], "Missing value for argument '--model.n-layer'"),
    (["train", "--run-dir"], "Missing value for argument '--run-dir'"),
    (["train", "--run-dir", ""], "run_dir is empty"),
    (["train", "--fresh", "yes"], "yes"),
    (["train", "quickstart", "shakespeare"], "shakespeare"),
    (["train", "－－fresh"], "no experiment '－－fresh'"),
    (["train", "--Model.N-Layer", "3"], "--Model.N-Layer"),
    (["train", "--model"], "--model"),
    (["train", "--model.bias", "maybe"], "maybe"),
    (["train", "--model.n-layer\n", "3"], r"--model.n-layer"),
    (["train", "--model.ñ", "3"], "--model.ñ"),
    (["train", "--\udcff", "3"], "Unrecognized options"),
    (["train", "--", "3"], "3"),
    (["sample", "--temprature", "1"], "--temperature"),
    (["sample", "runs/tiny", "--chat", "maybe"], "maybe"),
    (["sample", "runs/tiny", "--chat", "--prompt", "a"], "not in this tokenizer's"),
    (["sample", "--prompt"], "Missing value for argument '--prompt'"),
    (["sample", "runs/tiny", "runs/tiny"], "runs/tiny"),
    (["sample", "--weights", "int4"], "int4"),
    (["sample", "--cache-dtype", "float64"], "float64"),
    (["evaluate", "--dta", "t.txt"], "--data"),
    (["evaluate", "--data"], "Missing value for argument '--data'"),
    (["evaluate", "--weights", "int4"], "int4"),
    (["evaluate", "runs/tiny", "--data", ""], "data is empty"),
    (["evaluate", "runs/tiny", "--data", "unknown.txt"], "'字' (U+5B57), '漢' (U+6F22)"),
    (["evaluate", "runs/tiny", "--data", "empty.txt"], "empty.txt has 0 tokens, needed at least 2"),
    (["evaluate", "runs/tiny", "--data", "bom.txt"], "bom.txt has 0 tokens, needed at least 2"),
    (["replay", "runs/tiny"], "--step"),
    (["replay", "runs/tiny", "--step"], "Missing value for argument '--step'"),
    (["replay", "runs/tiny", "--step", "0"], "--step 0: needs one of the steps of runs/tiny, 1 to"),
    (["replay", "runs/tiny", "--step", "-1"], "--step -1: needs one of the steps"),
    (["replay", "runs/tiny", "--step", "1" + "0" * 30], "needs one of the steps"),
    (["replay", "runs/tiny", "--step", "half"], "half"),
    (["replay", "runs/tiny", "--stpe", "1"], "--step"),
    (["replay", "runs/moved", "--step", "1"], "no file or folder at gone.txt"),
    (["replay", "nowhere", "--step", "1"], "nowhere is not a run directory"),
    (["plan", "--topologie", "v5e:4x4"], "--topology"),
    (["plan", "--topology"], "Missing value for argument '--topology'"),
    (["plan", "--topology", ""], "topology is empty"),
    (["plan", "--topology", "v9:1x1"], "topology 'v9:1x1': needs v4, v5e, v5p or v6e"),
    (["plan", "--topology", "v5e:3x3"], "v5e has no slice 3x3"),
    (["plan", "--topology", "v5e:９x９"], "needs v4, v5e, v5p or v6e"),
    (["plan", "--topology", "v5p:" + "9" * 5000], "up to 6144 chips"),
    (["plan", "nowhere.py"], "there is no such file"),
    (["plan", "raises.py"], "raises.py:2: RuntimeError: no luck"),
    (["plan", "--data.path", "nowhere.txt"], "no file or folder at nowhere.txt"),
    (["plan", "--model.n-layer", "0"], "n_layer=0: needs at least 1"),
]

NUMBERS = [
    *(("--model.n-layer", value) for value in ("0", "-1", "2147483648", "1" + "0" * 30, "1e400", "nan", "inf", "0.5")),
    *(
        ("--model.n-layer", value)
        for value in ("", "３.５", "1,000", "0x10", "three", "½", "1" * 5000, "1 2", "None", "²")
    ),
    ("--model.n-embd", "-4"),
    ("--model.n-embd", "9"),
    ("--model.n-embd", str(2**60)),
    ("--model.n-embd", str(2**24)),
    ("--model.n-head", "0"),
    ("--model.n-head", "3"),
    ("--model.n-head", "1" + "0" * 12),
    ("--model.n-kv-head", "3"),
    ("--model.n-kv-head", "-1"),
    ("--model.mlp-dim", "0"),
    ("--model.mlp-dim", str(2**40)),
    ("--model.block-size", "0"),
    ("--model.block-size", "5000"),
    ("--model.block-size", str(2**31)),
    ("--model.vocab-size", "0"),
    ("--model.vocab-size", "1"),
    ("--model.vocab-size", str(2**31)),
    ("--model.dropout", "1"),
    ("--model.dropout", "-0.1"),
    ("--model.dropout", "nan"),
    ("--model.norm-eps", "0"),
    ("--model.norm-eps", "1e400"),
    ("--model.rope-theta", "-1"),
    ("--model.logit-softcap", "0"),
    ("--model.norm", "batchnorm"),
    ("--model.position", "ＲＯＰＥ"),
    ("--model.activation", ""),
    ("--data.val-fraction", "0"),
    ("--data.val-fraction", "1"),
    ("--data.val-fraction", "nan"),
    ("--data.val-fraction", "1e-9"),
    ("--data.bpe-vocab-size", "256"),
    ("--data.bpe-vocab-size", str(2**31)),
    ("--optim.learning-rate", "0"),
    ("--optim.learning-rate", "-1"),
    ("--optim.learning-rate", "inf"),
    ("--optim.learning-rate", "1e-400"),
    ("--optim.learning-rate", "１e400"),
    ("--optim.learning-rate", "1" + "0" * 400),
    ("--optim.beta1", "1"),
    ("--optim.beta2", "-1"),
    ("--optim.momentum", "2"),
    ("--optim.warmup-steps", "-1"),
    ("--optim.warmup-steps", "3"),
    ("--optim.weight-decay", "-1"),
    ("--optim.grad-clip", "0"),
    ("--optim.decay-fraction", "0"),
    ("--optim.min-lr-ratio", "1.5"),
    ("--optim.name", "sgd"),
    ("--train.steps", "0"),
    ("--train.steps", "-1"),
    ("--train.steps", "0.5"),
    ("--train.steps", "1" + "0" * 30),
    ("--train.batch-size", "0"),
    ("--train.batch-size", str(2**31)),
    ("--train.seed", "-1"),
    ("--train.seed", str(2**32)),
    ("--train.seed", "1" + "0" * 30),
    ("--train.log-every", "0"),
    ("--train.eval-every", "-1"),
    ("--train.eval-tokens", "0"),
    ("--train.checkpoint-every", "0"),
    ("--train.checkpoint-every", "1" + "0" * 30),
    ("--train.sample-tokens", "-1"),
    ("--train.sample-tokens", str(2**31)),
    ("--train.sample-temperature", "-1"),
    ("--train.sample-temperature", "nan"),
    ("--train.dtype", "float8"),
    ("--train.attention", "cudnn"),
    ("--train.attention", "flash"),
    ("--parallel.strategy", "zero"),
    ("--parallel.data", "0"),
    ("--parallel.fsdp", "-2"),
    ("--parallel.tensor", str(2**31)),
    ("--parallel.tensor", "3"),
    ("--parallel.micro-batch-size", "0"),
    ("--parallel.loss-chunk", "3"),
    ("--parallel.processes", "2"),
    ("--parallel.coordinator", "nowhere"),
    ("--parallel.connect-timeout", "0"),
    ("--name", "../x"),
    ("--name", ""),
    ("--name", "a b"),
    ("--name", "a\nb"),
    ("--name", "x" * 300),
    ("--name", "🐎"),
]

SAMPLING = [
    (["--max-new-tokens", "0"], "--max-new-tokens 0: needs at least 1"),
    (["--max-new-tokens", "-1"], "--max-new-tokens -1: needs at least 1"),
    (["--max-new-tokens", "2147483648"], "--max-new-tokens 2147483648: needs at most"),
    (["--max-new-tokens", "1" + "0" * 30], "needs at most"),
    (["--max-new-tokens", "0.5"], "0.5"),
    (["--num-samples", "0"], "--num-samples 0: needs at least 1"),
    (["--num-samples", "2147483648"], "--num-samples 2147483648: needs at most"),
    (["--temperature", "-1"], "temperature=-1.0"),
    (["--temperature", "nan"], "temperature=nan"),
    (["--temperature", "1e400"], "temperature=inf"),
    (["--temperature", "warm"], "warm"),
    (["--top-k", "0"], "top_k=0"),
    (["--top-k", "-5"], "top_k=-5"),
    (["--top-p", "0"], "top_p=0.0"),
    (["--top-p", "1.5"], "top_p=1.5"),
    (["--top-p", "nan"], "top_p=nan"),
    (["--min-p", "2"], "min_p=2.0"),
    (["--min-p", "nan"], "min_p=nan"),
    (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
    (["--repetition-penalty", "inf"], "repetition_penalty=inf"),
    (["--stop="], "a stop string is empty"),
    (["--seed", "-1"], "seed=-1: needs at least 0"),
    (["--seed", "1" + "0" * 30], "seed=1" + "0" * 30),
    (["--seed", "0.5"], "0.5"),
    (["--draft", "nowhere"], "nowhere is not a run directory"),
    (["--draft", ""], "draft is empty"),
    (["--draft", "broken/half"], "experiment.json is damaged"),
]

PROMPTS = [
    ("añejo", "'ñ' (U+00F1)"),
    ("漢字", "'字' (U+5B57), '漢' (U+6F22)"),
    ("🐎", "'🐎' (U+1F40E)"),
    ("e\u0301", "U+0301"),
    ("\u202e", "U+202E"),
    ("\udcff", "U+DCFF"),
    ("１２", "'１' (U+FF11), '２' (U+FF12)"),
    ("\x1b[31m", "U+001B"),
    (LONG + "ñ" * 3000, "'ñ' (U+00F1)"),
]

MISSING = ["train", "--data.path", "nowhere.txt"]
ENVIRONMENT = [
    (TRAIN, {"JAX_NUM_CPU_DEVICES": "0"}, "JAX_NUM_CPU_DEVICES='0'"),
    (TRAIN, {"JAX_NUM_CPU_DEVICES": "-1"}, "JAX_NUM_CPU_DEVICES='-1'"),
    (TRAIN, {"JAX_NUM_CPU_DEVICES": "abc"}, "JAX_NUM_CPU_DEVICES='abc'"),
    (TRAIN, {"JAX_NUM_CPU_DEVICES": "８"}, "JAX_NUM_CPU_DEVICES='８'"),
    (SAMPLE, {"JAX_NUM_CPU_DEVICES": ""}, "JAX_NUM_CPU_DEVICES=''"),
    (TRAIN, {"XLA_FLAGS": "--nonsense"}, "XLA_FLAGS='--nonsense' will not do: Unknown flag"),
    (SAMPLE, {"XLA_FLAGS": "--nonsense"}, "XLA_FLAGS='--nonsense' will not do: Unknown flag"),
    (["plan"], {"XLA_FLAGS": "nonsense"}, 'Could not open file "nonsense"'),
    (TRAIN, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=abc"}, "Couldn't interpret value abc"),
    (TRAIN, {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/tokens"),
    (TRAIN, {"JAXGPT_CACHE": "/dev/null"}, "cannot write into the cache /dev/null/tokens"),
    (TRAIN, {"JAXGPT_CACHE": "/proc/nowhere"}, "cannot write into the cache /proc/nowhere/tokens"),
    (TRAIN, {"JAXGPT_CACHE": "loop"}, "cannot write into the cache loop/tokens"),
    (TRAIN, {"JAXGPT_CACHE": LONG}, "File name too long"),
    (["train"], {"JAXGPT_CACHE": "t.txt"}, "cannot write into the cache t.txt/corpora"),
    (TRAIN, {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "abc"}, "OMPI_COMM_WORLD_SIZE='abc'"),
    (TRAIN, {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}, "the processes could not meet"),
    (TRAIN, {"SLURM_STEP_NODELIST": "x", "SLURM_NTASKS": "-3"}, "SLURM_NTASKS='-3'"),
    (TRAIN, {"SLURM_STEP_NODELIST": "x", "SLURM_NTASKS": "two"}, "SLURM_NTASKS='two'"),
    (TRAIN, {"SLURM_STEP_NODELIST": "x", "SLURM_NTASKS": "2"}, "the processes could not meet"),
    # Where the surroundings are odd, a mistake is told as ever.
    (MISSING, {"COLUMNS": "0"}, "nowhere.txt"),
    (MISSING, {"COLUMNS": "-5", "LINES": "x"}, "nowhere.txt"),
    (["train", "--model.n-layr", "3"], {"COLUMNS": "1"}, "--model.n-layer"),
    (["train", "--model.n-layr", "3"], {"COLUMNS": "20"}, "--model.n-layer"),
    (MISSING, {"HOME": None, "JAXGPT_CACHE": None, "XDG_CACHE_HOME": "t.txt"}, "nowhere.txt"),
    (MISSING, {"TERM": "dumb", "FORCE_COLOR": "1"}, "nowhere.txt"),
    (["train", "--model.n-layr", "3"], {"FORCE_COLOR": "1", "TERM": "xterm-256color"}, "--model.n-layer"),
    (MISSING, {"LANG": "C", "LC_ALL": "C"}, "nowhere.txt"),
    (SAMPLE, {"PATH": "", "JAX_NUM_CPU_DEVICES": "99999"}, "JAX_NUM_CPU_DEVICES='99999'"),
]

# Read while Python or jax starts: only a fresh process meets them.
AT_IMPORT = [
    (TRAIN, {"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS='nonsense'"),
    (SAMPLE, {"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS='nonsense'"),
    (TRAIN, {"JAX_ENABLE_X64": "maybe"}, "jax cannot be imported"),
    (["train", "--data.path", "ñ.txt"], {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}, ".txt"),
]


def table() -> list[tuple[list[str], dict, str]]:
    rows: list[tuple[list[str], dict, str]] = [([verb], {}, said) for verb, said in VERBS]
    rows += [(argv, {}, said) for argv, said in OPTIONS]
    for option, value in NUMBERS:
        argv = TRAIN if option not in TRAIN else [*TRAIN[: TRAIN.index(option)], *TRAIN[TRAIN.index(option) + 2 :]]
        rows.append(([*argv, option, value], {}, option.rpartition(".")[2].strip("-")))
    rows += [(["sample", f"broken/{name}"], {}, said) for name, said in BROKEN.items()]
    rows += [(["train", "--run-dir", f"broken/{name}"], {}, said) for name, said in BROKEN.items()]
    rows += [(["evaluate", f"broken/{name}"], {}, BROKEN[name]) for name in ("half", "deep", "width", "pipe")]
    rows += [([verb, path], {}, said) for verb in ("sample", "evaluate") for path, said in NO_RUN]
    rows += [
        ([verb, "broken/damaged_checkpoints"], {}, "is damaged, and no other is good")
        for verb in ("sample", "evaluate")
    ]
    rows += [(["replay", f"broken/{name}", "--step", "1"], {}, said) for name, said in BROKEN.items()]
    rows += [([verb, "broken/no_checkpoint"], {}, "has no checkpoint yet") for verb in ("sample", "evaluate")]
    rows += [([verb, "broken/no_tokenizer"], {}, "no tokenizer at") for verb in ("sample", "evaluate")]
    rows += [([verb, "broken/other_tokenizer"], {}, "not the tokenizer that") for verb in ("sample", "evaluate")]
    rows += [([*TRAIN[:-2], "--data.path", path], {}, said) for path, said in NO_TEXT]
    rows += [(["evaluate", "runs/tiny", "--data", path], {}, said) for path, said in NO_TEXT]
    rows += [([*TRAIN[:-2], *IDS, "--data.path", path], {}, said) for path, said in SHARDS]
    rows += [([*TRAIN[:-2], "--data.path", path], {}, said) for path, said in CHATS]
    rows += [([*TRAIN[:-2], *IDS, "--data.path", "good.jsonl"], {}, "conversations need char, byte, bpe")]
    rows += [(["evaluate", "runs/tiny", "--data", "half.jsonl"], {}, "half.jsonl:1: not in this tokenizer's")]
    rows += [
        ([*TRAIN[:-2], "--data.path", "good.jsonl", "--data.tokenizer", f"{name}/tokenizer.json"], {}, said)
        for name, said in TEMPLATES
    ]
    rows += [([*TRAIN, "--data.tokenizer", path], {}, said) for path, said in TOKENIZERS]
    rows += [(["train", path], {}, said) for path, said in EXPERIMENT_FILES]
    rows += [([*SAMPLE, *argv], {}, said) for argv, said in SAMPLING]
    rows += [(["sample", "runs/tiny", "--prompt", prompt], {}, said) for prompt, said in PROMPTS]
    rows += [
        ([*TRAIN[:-2], "--data.path", "short.txt"], {}, "needed 9"),
        ([*TRAIN[:-2], "--data.path", "empty.txt"], {}, "empty.txt is empty"),
        ([*TRAIN[:-2], "--data.path", "bom.txt"], {}, "bom.txt is empty"),
        ([*TRAIN[:-2], "--data.path", ""], {}, "data.path is empty"),
        (["train", "--data.path", "medium.txt"], {}, "the validation split of medium.txt"),
        (["train", "--data.corpus", "bible"], {}, "unknown corpus 'bible'"),
        (["train", "--data.corpus", "../../etc/passwd"], {}, "unknown corpus '../../etc/passwd'"),
        (["train", "--run-dir", "with a file"], {}, "with a file exists and is not a run directory"),
        (["train", "--run-dir", "t.txt"], {}, "t.txt exists and is not a run directory"),
        ([*TRAIN, "--run-dir", "t.txt/run"], {}, "t.txt/run"),
        (["train", "--run-dir", LONG], {}, "File name too long"),
        (["train", "--run-dir", "loop"], {}, "Too many levels of symbolic links"),
        (["train", "--run-dir", "pipe"], {}, "pipe exists and is not a run directory"),
        (["train", "--run-dir", "/dev/null"], {}, "/dev/null exists and is not a run directory"),
        ([*TRAIN, "--run-dir", "/proc/nowhere"], {}, "/proc/nowhere"),
        ([*TRAIN, "--run-dir", "runs/tiny", "--train.seed", "7"], {}, "train.seed 0 -> 7"),
        ([*TRAIN[:-2], "--data.path", "t.txt", "--run-dir", "runs/tiny", "--optim.beta1", "0.5"], {}, "optim.beta1"),
        ([*TRAIN[:-2], "--run-dir", "runs/tiny", "--data.path", "medium.txt"], {}, "was trained on other data"),
        (["evaluate", "runs/moved"], {}, "no file or folder at"),
    ]
    return rows + [(argv, env, said) for argv, env, said in ENVIRONMENT]
