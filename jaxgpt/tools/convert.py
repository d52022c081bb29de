"""Convert models to and from Hugging Face's format, which transformers and vLLM read, and GGUF, for llama.cpp and ollama."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from jax.typing import DTypeLike

from jaxgpt.data.conversations import find_end_of_turn
from jaxgpt.data.template import ETX, ChatTemplate, Jinja, Turns, read_object, write_template
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, Say, cache_directory, is_there, render_json, write_whole
from jaxgpt.gguf.file import FAMILIES, open_gguf, parse_dtype, to_gguf, write_gguf
from jaxgpt.gguf.tokenizers import read_chat_template, read_ends, tokenizer_fields
from jaxgpt.hf.families import find_family
from jaxgpt.hf.family import Family
from jaxgpt.hf.source import (
    BESIDE_TOKENIZER,
    HF_FOLDER,
    HUB_ID,
    README,
    Source,
    copy_files,
    end_tokens,
    find_directory,
    keep_companions,
    open_source,
    special_ids,
    tokenizer_config,
    tokenizer_json,
)
from jaxgpt.hf.weights import DTYPES, SHARD, read_params, to_peft, to_tensors, write, write_file
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.parallel.multihost import whole_everywhere
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.run import Run, load_run
from jaxgpt.runs.checkpoint import Checkpoints, open_checkpoints
from jaxgpt.runs.directory import RUNS, RunMetadata, find_run, is_run, lock_run, read_metadata, write_metadata
from jaxgpt.runs.pretrained import load_base, restore_adapters
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.tools.html_page import read_asset


def find_run_of(name: str, say: Say) -> str:
    """Return the run into which a model is imported: a GGUF file, a folder in Hugging Face's format, or its id.

    Any other name is returned as it is. A model that has changed since is imported again.
    """
    path = Path(name)
    is_path = path.exists() or path.parent.exists() or path.parts[:1] == RUNS.parts
    is_id = not is_path and HUB_ID.fullmatch(name)
    is_file = path.suffix == ".gguf" and path.is_file()
    is_folder = (path / "config.json").exists() and not is_run(path)
    if not (is_id or is_file or is_folder):
        return name
    place = find_directory(name) if is_id else path.resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    run = cache_directory() / "models" / f"{path.name}-{digest}"
    if not is_run(run):
        say(f"importing {name} into {run}, once")
        configure_jax()
        import_model(str(name if is_id else path), run)
    return str(run)


def import_model(
    name: str, run_dir: str | Path, *, dtype: DTypeLike | None = None, tokenizer: str | None = None
) -> Source:
    """Write a model into a new run directory, for sampling, evaluation and export: whole or not at all.

    Memory holds the model and one more tensor.

    Args:
        name: directory of a model in Hugging Face's format, its id on the Hub, or a FILE.gguf.
        run_dir: the run directory, absent or empty.
        dtype: the dtype of the parameters. None means as stored, and float32 if quantised.
        tokenizer: path of another tokenizer.json, or "ids" for none. None means the model's.

    Raises:
        UserError: the model cannot be read, or `run_dir` is not empty. Nothing is written then.
    """
    directory = Path(run_dir)
    source, fields = open_gguf(Path(name), tokenizer) if name.endswith(".gguf") else (open_source(name, tokenizer), {})
    model_type = next((kind for kind, family in FAMILIES.items() if family is source.family), source.family.model_type)
    title = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(name).resolve().name)[:100].strip("-") or "imported"
    _check_empty(directory, "--run-dir")
    with lock_run(directory, fresh=False):
        try:
            params = read_params(source.tensors, source.family, source.config, dtype=dtype)
            with contextlib.closing(Checkpoints(directory / "checkpoints")) as checkpoints:
                checkpoints.save_params(params, 0)
            if fields:
                _keep_settings(fields, source, directory)
            else:
                keep_companions(source.directory, directory)
            write_metadata(
                directory,
                Experiment(name=title, model=source.config),
                source.tokenizer,
                data={"tokenizer_sha256": fingerprint(source.tokenizer)},
                vocab_size=source.config.vocab_size,
                imported={"from": name, "model_type": model_type},
            )
        except BaseException:  # leave it empty for the next attempt
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return source


def _keep_settings(fields: Json, source: Source, directory: Path) -> None:
    """Keep the chat template and the ends of a text, of the fields of a GGUF file, in a run directory."""
    template = {"chat_template": read_chat_template(fields)}
    for token in ("bos", "eos"):
        i = fields.get(f"tokenizer.ggml.{token}_token_id")
        if type(i) is int and i in range(source.tokenizer.vocab_size):
            template[f"{token}_token"] = source.tokenizer.decode([i])  # spelled as in a text
    if template["chat_template"] is not None:
        write_template(directory, template)
    if ends := read_ends(fields):
        (directory / HF_FOLDER).mkdir()
        _write_json(directory / HF_FOLDER / "generation_config.json", {"eos_token_id": ends})


def _check_empty(directory: Path, option: str) -> None:
    """Raise `UserError` unless a directory is absent or empty. option: where another one is named."""
    if is_there(directory, f"See {option}.") and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not empty: name another with {option}")


def _load_to_export(metadata: RunMetadata, model_type: str | None) -> tuple[Run, Family, ChatTemplate | None]:
    """Return a run with its layers unstacked, the family it is exported as, and the template of its chats, if any."""
    if metadata.model.is_foreign:
        raise UserError(f"{type(metadata.model).__name__}: no family of Hugging Face's or llama.cpp's computes it")
    family = find_family(metadata.model, model_type)  # before the weights are read
    run = load_run(metadata)
    model, params = unstack_layers(run.model, run.params)
    template = run.prompt_format.template if run.experiment.data.is_chat else None
    return dataclasses.replace(run, model=model, params=params), family, template


def export_gguf(run: str | Path | None, out: str | Path, *, dtype: str | None = None) -> Path:
    """Write the parameters, the architecture, the tokenizer and its chat template as one GGUF file.

    Memory holds the model and one more tensor.

    Args:
        run: directory of the run. None means the newest under `runs/`.
        out: the file to write, which must not exist.
        dtype: the dtype of the matrices: float32, float16, bfloat16 or q8_0. None means the run's own. Norms, biases and
            learned positions are float32.

    Returns:
        The file.

    Raises:
        UserError: llama.cpp has no such architecture or tokenizer. Nothing is written then.
    """
    dtype, directory, out = parse_dtype(dtype), find_run(run), Path(out)
    _check_empty(out, "--out")
    metadata = read_metadata(directory)
    loaded, family, template = _load_to_export(metadata, (metadata.imported or {}).get("model_type"))
    config, own = loaded.model.config, loaded.prompt_format.template
    assert config.vocab_size is not None
    fields, tensors = to_gguf(loaded.params, config, family.model_type)
    if config.activation in ("gelu", "geglu"):
        what = f"activation={config.activation}: llama.cpp computes GELU by tanh, not by erf"
        warnings.warn(f"{what}; the two differ by up to 5e-4", stacklevel=2)
    ends = end_tokens(directory)
    if template is not None:
        ends = _end_turns(ends or [loaded.tokenizer.end_of_text], loaded, template)
    jinja = own.source if isinstance(own, Jinja) else own.jinja() if template is not None else None
    fields |= {"general.name": loaded.experiment.name}
    fields |= tokenizer_fields(loaded.tokenizer, config.vocab_size, chat_template=jinja, ends=ends)
    write_gguf(out, fields, tensors, dtype)
    return out


def export_hf(run: str | Path | None, out: str | Path, *, dtype: DTypeLike | None = None, shard: int = SHARD) -> Path:
    """Write config.json, safetensors, the tokenizer and a model card, for AutoModelForCausalLM and AutoTokenizer.

    Arguments, memory, result and errors: see `export_gguf`. But `out` is a directory, absent or empty, and gets
    files of at most `shard` bytes. A family on the Hub must have the architecture (see `jaxgpt.hf.families`).
    """
    directory, out = find_run(run), Path(out)
    _check_empty(out, "--out")
    imported = read_object(directory / HF_FOLDER / "config.json")  # as it was imported, else empty
    loaded, family, template = _load_to_export(read_metadata(directory), imported.get("model_type"))
    config = loaded.model.config
    if config.position == "rope" and imported.get("model_type") == family.model_type:
        # Rows of training are as long as its data need. The model reads as much as its weights could before.
        longest = max(config.block_size, family.read(imported).block_size)
        config = dataclasses.replace(config, block_size=longest)
        loaded = dataclasses.replace(loaded, model=loaded.model.clone(config=config))
    tensors = to_tensors(loaded.params, family, config, dtype)
    stored_as = DTYPES[next(iter(tensors.values())).kind].name
    ids = special_ids(loaded.tokenizer, _visible_end(loaded, template))
    # No pad here: PyTorch would give its row of the embedding no gradient.
    special = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": None}
    written = (imported or special) | family.write(config) | {"dtype": stored_as, "torch_dtype": stored_as}
    out.mkdir(parents=True, exist_ok=True)
    write(out, tensors, shard)
    _write_json(out / "config.json", written)
    write_tokenizer(out, loaded, template)
    if loaded.metadata.imported and (directory / HF_FOLDER / README).exists():  # with the model's license
        copy_files(directory / HF_FOLDER, out, [README])
    else:
        card = Template(read_asset("model_card.md")).substitute(
            dataclasses.asdict(loaded.model.config.explicit()),
            name=loaded.experiment.name,
            model_type=family.model_type,
            architecture=family.architecture,
            parameters=f"{count_parameters(loaded.params):,}",
            origin="\n".join(f"- {fact}." for fact in _list_facts(loaded)),
        )
        write_whole(out / README, card)  # the Hub reads its header
    return out


def export_peft(run: str | Path | None, out: str | Path, *, dtype: DTypeLike | None = None) -> Path:
    """Write the adapters of a run, and its tokenizer, for PEFT, which adds them to the model that the run began from.

    Arguments, result and errors: see `export_hf`. The run must have adapters, of a model in Hugging Face's format.
    """
    directory, out = find_run(run), Path(out)
    _check_empty(out, "--out")
    metadata = read_metadata(directory)
    lora, base = metadata.experiment.lora, metadata.experiment.train.init_from
    if lora.rank is None:
        raise UserError(f"{directory} has no adapters (--lora.rank). Give --to hf, to export its parameters.")
    hf = read_object(directory / HF_FOLDER / "config.json")
    loaded, family, template = _load_to_export(metadata, hf.get("model_type"))
    if (of := load_base(metadata).metadata) is not None:  # a run, which may have been imported
        base = (of.imported or {}).get("from")
    if base is None:
        raise UserError(f"{directory} adapts a run, and PEFT opens none. Give --to hf, to merge the adapters.")
    if lora.frozen != "float32":
        warnings.warn(f"the adapters learnt on {lora.frozen} matrices, and PEFT adds them to exact ones", stacklevel=2)
    model = metadata.model.make_model()
    like = with_shardings(model.shapes(), whole_everywhere())
    adapters = restore_adapters(metadata, open_checkpoints(directory), loaded.step, like)
    tensors, config = to_peft(unstack_layers(model, adapters)[1], lora, family, loaded.model.config, dtype)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "adapter_model.safetensors", tensors)
    _write_json(out / "adapter_config.json", {"base_model_name_or_path": base} | config)
    write_tokenizer(out, loaded, template)
    return out


def _end_turns(ends: Sequence[int | None], run: Run, template: ChatTemplate) -> list[int]:
    """Return the tokens that end a text, of which the one that ends the turns of a chat, if any, comes last."""
    turn = find_end_of_turn(template, run.tokenizer)
    return [end for end in (*(end for end in ends if end != turn), turn) if end is not None]


def write_tokenizer(out: Path, run: Run, template: ChatTemplate | None) -> None:
    """Write the tokenizer of a run, and the settings of generation. template: the template of its chats, or None."""
    end = _visible_end(run, template)
    if (text := tokenizer_json(run.tokenizer, end)) is not None:
        write_whole(out / "tokenizer.json", text)
        copy_files(run.directory, out, BESIDE_TOKENIZER)
        values = original = read_object(out / "tokenizer_config.json")
        if "tokenizer_class" not in values:  # otherwise the file is complete
            values = tokenizer_config(run.tokenizer, run.model.config.block_size, end) | values
        if isinstance(template, Turns):  # our own template: other libraries need it in Jinja
            values = values | {"chat_template": template.jinja()}
        if values != original:
            _write_json(out / "tokenizer_config.json", values)
    generation = run.directory / HF_FOLDER / "generation_config.json"
    if template is None and generation.exists():
        copy_files(generation.parent, out, [generation.name])
        return
    ids = {f"{t}_token_id": i for t, i in special_ids(run.tokenizer, end).items() if t != "unk"}
    values = ids | read_object(generation)
    if template is not None:
        ends = values["eos_token_id"]
        values["eos_token_id"] = _end_turns(ends if isinstance(ends, list) else [ends], run, template)
    _write_json(out / generation.name, values)


def _visible_end(run: Run, template: ChatTemplate | None) -> int | None:
    """Return the id of U+0003, which would be printed, if it ends the turns of a chat. Else return None."""
    end = None if template is None else find_end_of_turn(template, run.tokenizer)
    return end if end is not None and run.tokenizer.decode([end]) == ETX else None


def _write_json(path: Path, values: Json) -> None:
    write_whole(path, render_json(values, indent=2, ensure_ascii=False) + "\n")


def _list_facts(run: Run) -> Iterator[str]:
    """Yield what is known of the training of a run."""
    experiment, metadata = run.experiment, run.metadata
    if metadata.imported:
        yield f"The weights of `{_hide_folders(str(metadata.imported.get('from')))}`, unchanged"
        return
    train, data = experiment.train, experiment.data
    seen = run.step * train.batch_size * experiment.model.block_size
    yield f"Text: {', '.join(Path(part).name for part in (data.path or data.corpus).split(','))}"
    yield f"Training: step {run.step:,} of {train.steps:,}, {seen:,} tokens seen, on {metadata.device}"
    if train.init_from is not None:
        adapted = f", by adapters of rank {experiment.lora.rank}" if experiment.lora.rank else ""
        yield f"Starting from `{_hide_folders(train.init_from)}`{adapted}"
    if metadata.data.get("train_sha256"):
        yield f"SHA-256 of the text: `{metadata.data['train_sha256']}`"
    if run.val_loss is not None:
        yield f"Validation loss: {run.val_loss:.4f} {experiment.objective.unit}"


def _hide_folders(name: str) -> str:
    """Return the last name of a path, since a model card is published, and an id on the Hub as it is."""
    return name if HUB_ID.fullmatch(name) else Path(name).name
