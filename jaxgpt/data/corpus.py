"""Find the text to train on: a registered public corpus, or the user's own files."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import http.client
import logging
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import filelock

from jaxgpt.errors import UserError, first_line
from jaxgpt.files import cache_directory, is_there, make_cache, open_file, parse_json, sha256, write_whole

LOG = logging.getLogger(__name__)

SPLITS = ("train", "val")
CHUNK = 8 * 1024**2  # bytes read at a time: a text may be larger than memory
BUCKETS = ("gs", "s3")
LARGEST = 2**28  # bytes of a download. Every registered corpus is far below


class Corpus(NamedTuple):
    """A public text: downloaded on first use, verified, and kept in the cache."""

    url: str
    sha256: str  # the digest of what `clean` returns, in UTF-8
    clean: Callable[[str], str] = str  # turns the download into the text


def strip_gutenberg(text: str) -> str:
    """Strip the header and licence of a Project Gutenberg file, and convert its line ends to Unix."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    framed = re.search(r"(?ms)^\*\*\* START OF.*?\n(.*?)^\*\*\* END OF", text)
    return (framed[1] if framed else text).strip("\n")


# All three are in the public domain. Sancho, verse by Cervantes, is from a repository with the MIT licence.
CORPORA = {
    "shakespeare": Corpus(  # 1,115,394 characters of the plays
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "sancho": Corpus(  # 147,758 characters, between <|inicio|> and <|fin|>
        url="https://raw.githubusercontent.com/gabmerlo/Construyamos-GPT/"
        "3ab11161820a97e202ed8d436a74d34ad314d726/data/datos_sancho_mini.txt",
        sha256="52a86bfb7cccac99d3619c73308348bee13d99b8b7f0d4bbbf2edb8e951ebe0e",
    ),
    "quijote": Corpus(  # Don Quixote in Spanish, both parts, 2,097,952 characters
        url="https://www.gutenberg.org/cache/epub/2000/pg2000.txt",
        sha256="467f4714581d95fcf18b1f852ad8cdc6da184170cd3e7d6bdd548d93655f306d",
        clean=strip_gutenberg,
    ),
}


def find_corpus_files(name: str) -> list[Path]:
    """Return the files of a registered corpus, after generating or downloading them if necessary."""
    if name == "python-docs":
        raw = _python_docs().encode()
        path = cache_directory() / "corpora" / f"{name}-{hashlib.sha256(raw).hexdigest()[:12]}.txt"
        if not path.exists() or path.read_bytes() != raw:
            make_cache(path.parent)
            write_whole(path, raw)
        return [path]
    if (corpus := CORPORA.get(name)) is None:
        known = ", ".join(["python-docs", *CORPORA])
        raise UserError(f"unknown corpus {name!r}: known are {known}; for a text of your own use --data.path")
    path = cache_directory() / "corpora" / f"{name}.txt"
    if not path.exists():
        _download(name, corpus, path)
    elif (found := sha256(path)) != corpus.sha256:
        raise UserError(
            f"{path} is not the corpus {name!r}: its SHA-256 is {found[:12]}..., needed {corpus.sha256[:12]}... "
            "Delete it to download it again."
        )
    return [path]


def find_user_files(path: str) -> list[Path]:
    """Return the text files at `--data.path`: the file itself, or all .txt files below a folder, sorted by path."""
    root, takes = Path(path), "--data.path takes a UTF-8 text file, a folder of .txt files, or .bin token shards"
    if not is_there(root, takes):
        raise UserError(f"no file or folder at {root}: {takes}")
    if not root.is_dir():
        open_file(root).close()
        return [root]
    files = sorted(p for p in root.rglob("*.txt") if p.is_file())
    if not files:
        raise UserError(f"{root} has no .txt files: {takes}, as jaxgpt prepare makes of other files")
    return files


def find_copy(url: str) -> Path:
    """Return where the cache has the file or folder of an address, if it was downloaded. Nothing is connected to."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:24]
    folder = cache_directory() / "remote" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', url)[:80]}-{digest}"
    name = url.rpartition("/")[2]
    return folder / name if name and (folder / name).is_file() else folder


def fetch(url: str) -> Path:
    """Return a copy in the cache of the file, or the folder of token shards or texts, at gs:// or s3://.

    It is downloaded once. Raises `UserError` if that fails.
    """
    copy = find_copy(url)
    make_cache(copy.parent)
    with service_errors("read", url), filelock.FileLock(f"{copy}.lock"):  # one process of a host downloads
        if not copy.exists():
            _download_bucket(*open_bucket(url), copy)
    return find_copy(url)


def open_bucket(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address at gs:// or s3://, and the path there.

    Raises `UserError` for others: fsspec's other protocols connect to any host, and its chained
    addresses can run code.
    """
    protocol, _, root = url.partition("://")
    if protocol not in BUCKETS or "::" in root or not root:
        raise UserError(f"{url} is not in a bucket (gs:// or s3://): download it, and name the file or folder")
    import fsspec  # takes 0.1 s to import, which local data do without

    return fsspec.filesystem(protocol), root


@contextlib.contextmanager
def service_errors(doing: str, url: str) -> Iterator[None]:
    """Turn what fails in a bucket into a `UserError`: each service has exceptions of its own."""
    try:
        yield
    except UserError:
        raise
    except ImportError as e:
        raise UserError(f"{url} needs another package: python -m pip install 'jaxgpt[remote]' ({e})") from None
    except Exception as e:
        check = "Check the address, your credentials for it, and the room on the disk"
        raise UserError(f"cannot {doing} {url}: {first_line(e)}. {check}") from None


def _download_bucket(fs: Any, root: str, folder: Path) -> None:
    """Download the texts and token shards of a folder, or a file, into a new folder."""
    is_file = fs.info(root)["type"] == "file"
    kinds = (".bin", ".txt", ".json")
    paths = [root] if is_file else [path for path in fs.ls(root, detail=False) if path.endswith(kinds)]
    if not paths:
        raise FileNotFoundError("it has no .bin or .txt files")
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as partial:
        for path in paths:
            LOG.warning("downloading %s", path)  # a warning, so that it shows
            fs.get_file(path, f"{partial}/{path.rpartition('/')[2]}")
        os.rename(partial, folder)


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of bounded size. Raises `UserError` if it is not UTF-8."""
    with open_file(path) as f:
        yield from decode_text(f, path)


def decode_text(f: BinaryIO, name: str | Path) -> Iterator[str]:
    """Yield the text of an open file in pieces of bounded size. Raises `UserError` if it is not UTF-8."""
    decoder, at = codecs.getincrementaldecoder("utf-8-sig")(), 0
    try:
        while piece := f.read(CHUNK):
            yield decoder.decode(piece)
            at += len(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        raise _not_utf8(name, e, at) from None


def parse_line(raw: bytes, where: str, **hooks: Any) -> Any:
    """Parse a line of a .jsonl file with `parse_json`, whose hooks these are."""
    try:
        return parse_json(raw.decode("utf-8"), where, **hooks)
    except UnicodeDecodeError as e:
        raise _not_utf8(where, e, 0) from None


def _not_utf8(where: str | Path, e: UnicodeDecodeError, at: int) -> UserError:
    """Return the error of a text, `at` bytes from its beginning."""
    place = f"byte 0x{e.object[e.start]:02x} at about offset {at + e.start}"
    return UserError(f"{where} is not UTF-8 text: {place}. Convert it, or give .bin token shards.")


def _download(name: str, corpus: Corpus, path: Path) -> None:
    """Download, clean, verify and write a corpus. Raises `UserError` if that fails. A wrong text is not used."""
    by_hand = f"To give it by hand, save the text as {path}, or use --data.path FILE."
    make_cache(path.parent)
    try:
        with urllib.request.urlopen(corpus.url, timeout=60.0) as response:  # seconds without data
            raw = response.read(LARGEST)
        text = corpus.clean(raw.decode("utf-8"))
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as e:  # URLError is an OSError
        if isinstance(e, urllib.error.HTTPError):
            e.close()  # the exception is also the response
        raise UserError(f"could not download {name} from {corpus.url}: {getattr(e, 'reason', e)}. {by_hand}") from None
    # A truncated download ends here too if the server did not send its length.
    if (found := hashlib.sha256(text.encode()).hexdigest()) != corpus.sha256:
        raise UserError(
            f"{name} from {corpus.url} has SHA-256 {found[:12]}..., needed {corpus.sha256[:12]}...: not used. {by_hand}"
        )
    write_whole(path, text)


def _python_docs() -> str:
    """Return the paragraphs that the reference of every Python from 3.11.2 to 3.14.7 has, which a file lists by digest."""
    from pydoc_data.topics import topics

    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics.values()).strip("\n"))
    found = {hashlib.sha256(text.encode()).hexdigest()[:8]: text for text in paragraphs}
    chosen = Path(__file__).with_name("python_docs.txt").read_text().split()
    kept = list(filter(None, map(found.get, chosen)))
    if lost := len(chosen) - len(kept):
        LOG.warning("this Python's reference lacks %d of %d paragraphs", lost, len(chosen))
    return "\n\n".join(kept) + "\n"
