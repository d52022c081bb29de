"""Keep a run in a bucket: with a working copy on the local disk, synchronised after each checkpoint.

A checkpoint is in the bucket if its manifest.json is, which is sent last and deleted first. What else a
run needs is sent before experiment.json. So a kill between two requests leaves a whole run.

The object `.lease` holds a token of the process that trains the run. A working copy with the same
token is at least as new as the bucket. Any other is made equal to the bucket when it is opened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from pathlib import Path
from urllib.parse import quote, unquote

import filelock

from jaxgpt.data.corpus import open_bucket
from jaxgpt.errors import CheckpointSaveError, UserError, first_line
from jaxgpt.files import Json, cache_directory, make_cache, parse_json, write_whole

LOG = logging.getLogger(__name__)
EXPERIMENT, MANIFEST = "experiment.json", "/manifest.json"
RENEW, STALE, POLL = 20.0, 90.0, 2.0  # seconds between renewals of a lease, until it is stale, between looks at it
PAUSES = (0.0, 2.0, 10.0)  # seconds before each attempt to synchronise
# What is not synchronised: locks, profiles, unfinished files and checkpoints. And the names of no file below a run.
LEFT_OUT = re.compile(
    r"^profile/|(^|/)(\.{0,2}|\.(lock|claim|lease|part)|[^/]*\.(saving|deleting|damaged))(/|$)|\\|\.[0-9a-f]{8}$"
)
TO_LIST = r"(.*/)?(experiment\.json|metrics\.jsonl|code/.*|checkpoints/\d+/manifest\.json)$"  # files that `runs` reads
# Names in the directory of a run that was killed before it wrote experiment.json.
BEGINNINGS = re.compile(
    r"\.(lock|claim|lease)|(tokenizer|tokenizer_config|special_tokens_map|experiment)\.json(\..*)?|chat_template\.jinja|hf|code"
)


class HeldElsewhere(UserError):
    """Another process trains the run."""


def address_of(run: object) -> str | None:
    """Return the address by which a run is named, such as gs://bucket/run, or None for a directory."""
    match = re.fullmatch(r"([A-Za-z][\w+.-]+):/+(.*)", str(run), re.DOTALL)  # `Path` makes one slash of two
    return match and f"{match[1]}://{match[2].rstrip('/')}"


def name_of(directory: Path) -> str:
    """Return the address of a working copy, or the path of another directory."""
    is_copy = directory.parent == cache_directory() / "runs"
    return unquote(directory.name) if is_copy else str(directory)


class Bucket:
    """A run in a bucket. What fails there raises the exceptions of the service: see `service_errors`."""

    def __init__(self, address: str, folder: str = "runs"):
        """Open the file system of an address. folder: the one in the cache that has the working copy."""
        self.address, self.directory = address, cache_directory() / folder / quote(address, safe="")
        self._fs, root = open_bucket(address)
        self._root = f"{root}/"
        self._token, since = secrets.token_hex(8), time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._who = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self._ended = threading.Event()
        self._is_sent = True  # whether the bucket has all of the working copy
        make_cache(self.directory)
        self._lock = filelock.FileLock(f"{self.directory}.lock")  # for what writes into the working copy

    def pull(self, needed: str = "") -> None:
        """Make the working copy equal to the bucket, unless it is newer. needed: a pattern of names."""
        with self._lock:
            if self._own_token() != self._read_lease().get("token", ""):
                for _ in range(3):
                    with contextlib.suppress(FileNotFoundError):  # training has just removed a checkpoint
                        return self._download(needed)
                self._download(needed)

    def _download(self, needed: str) -> None:
        there, here = self._list(), self._local()
        if not needed and EXPERIMENT not in there:
            if not all(BEGINNINGS.fullmatch(name.partition("/")[0]) for name in there):
                raise UserError(f"{self.address} holds other files and no run: name another")
            there = {}
        whole = {_checkpoint(name) for name in there if name.endswith(MANIFEST)} | {None}
        wanted = [name for name in sorted(there, key=_rank) if _checkpoint(name) in whole and re.match(needed, name)]
        same = {_checkpoint(name) for name in wanted if name.endswith(MANIFEST) and self._has_same(name)}
        for name in here.keys() - wanted:
            path = self.directory / name
            path.unlink()
            with contextlib.suppress(OSError):  # until one is not empty
                os.removedirs(path.parent)
        part = self.directory / ".part"
        for name in wanted:
            if _checkpoint(name) not in same or here.get(name) != there[name]:
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(self._root + name, str(part))
                when = self._fs.modified(self._root + name).timestamp()
                os.utime(part, (when, when))
                os.replace(part, path)

    def _has_same(self, name: str) -> bool:
        path = self.directory / name
        return path.exists() and path.read_bytes() == self._fs.cat_file(self._root + name)

    def _list(self) -> dict[str, int]:
        """Return the size of each file in the bucket, by its name below the run."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._root, detail=True)
        self._fs.invalidate_cache()  # gcsfs would read as many bytes as it has listed
        sizes = {path.partition(self._root)[2]: info["size"] for path, info in found.items()}
        return {name: size for name, size in sizes.items() if not LEFT_OUT.search(name)}

    def _local(self) -> dict[str, int]:
        """Return the size of each file in the working copy, by its name."""
        paths = {path.relative_to(self.directory).as_posix(): path for path in self.directory.rglob("*")}
        files = {name: path for name, path in paths.items() if not LEFT_OUT.search(name) and path.is_file()}
        return {name: path.stat().st_size for name, path in files.items()}

    def hold(self, stack: contextlib.ExitStack) -> None:
        """Take the lease until `stack` ends, with a working copy of the newest state, which the caller has locked.

        Raises `UserError` if another process trains the run.
        """
        renewing = threading.Thread(target=self._renew, daemon=True)
        with self._lock:
            self._take_lease()
            renewing.start()
            for end in (self._release, renewing.join, self._ended.set):  # in the other order
                stack.callback(end)
            self.pull()
            write_whole(self.directory / ".lease", self._token)

    def push(self, *, is_last: bool = False) -> None:
        """Send what is new. If that fails a later call sends it: the last raises `CheckpointSaveError`."""
        self._is_sent, why = False, ""
        for pause in PAUSES:
            time.sleep(pause)
            try:
                return self.synchronise()
            except CheckpointSaveError:
                raise
            except Exception as e:  # the next attempt goes on where this one failed
                why = first_line(e)
        if is_last:
            said = f"{self.address} lacks the end of the run: {why}"
            raise CheckpointSaveError(f"{said}. {self.directory} has it, and the same command here goes on")
        LOG.warning("%s lacks the last checkpoint, and the next one sends it: %s", self.address, why)

    def synchronise(self) -> None:
        """Send what is new, and delete the checkpoints that the working copy lacks."""
        if self._read_lease().get("token") != self._token:
            raise CheckpointSaveError(f"{self.address} is being trained by another process now, so this one ends")
        there, here = self._list(), self._local()
        for name in sorted(here, key=_rank):
            if _checkpoint(name) is None or there.get(name) != here[name]:
                self.send(name)
        for name in sorted(there.keys() - here, key=_rank, reverse=True):
            if _checkpoint(name) is not None:
                self._fs.rm_file(self._root + name)
        self._is_sent = True

    def send(self, name: str) -> None:
        """Send a file of the working copy."""
        self._fs.put_file(str(self.directory / name), self._root + name)

    def is_training(self, below: str) -> bool:
        """Return whether a process trains the run at or "/below" the address, by the clocks of both machines."""
        return time.time() - self._read_lease(f"{below}/".lstrip("/")).get("time", 0) < STALE

    def _take_lease(self) -> None:
        while not (found := self._read_lease()):
            with contextlib.suppress(FileExistsError):  # another process was faster
                return self._write_lease("create")
        if found["token"] == self._own_token():  # the process that wrote it was killed on this machine
            self._token, self._is_sent = found["token"], False
            return
        said = "%s: waiting %.0f s for a sign of life from %s, before taking the run over"
        LOG.warning(said, self.address, STALE, found["who"])
        until = time.monotonic() + STALE
        while time.monotonic() < until:
            time.sleep(POLL)
            if self._read_lease() not in (found, {}):
                said = f"{self.address} is being trained by another process ({found['who']})"
                raise HeldElsewhere(f"{said}: wait for it, stop it, or name another --run-dir")
        self._write_lease("overwrite")

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            with contextlib.suppress(Exception):  # the next attempt is before it is stale
                if self._read_lease().get("token") == self._token:
                    self._write_lease("overwrite")

    def _release(self) -> None:
        with contextlib.suppress(Exception):  # then it becomes stale
            if self._is_sent and self._read_lease().get("token") == self._token:
                self._fs.rm_file(self._root + ".lease")

    def _write_lease(self, mode: str) -> None:
        lease = {"who": self._who, "time": time.time(), "token": self._token}
        self._fs.pipe_file(self._root + ".lease", json.dumps(lease).encode(), mode=mode)

    def _read_lease(self, below: str = "") -> Json:
        """Return what the process wrote that trains the run, or one below it. Empty if there is none."""
        try:
            return parse_json(self._fs.cat_file(f"{self._root}{below}.lease"), f"{self.address}/{below}.lease")
        except FileNotFoundError:
            return {}

    def _own_token(self) -> str | None:
        path = self.directory / ".lease"
        return path.read_text(encoding="utf-8") if path.exists() else None


def _checkpoint(name: str) -> str | None:
    """Return the checkpoint that a file is in, or None for another file."""
    match = re.match(r"(.*/)?checkpoints/\d+/", name)
    return match and match[0]


def _rank(name: str) -> tuple[bool, bool, bool, bool]:
    """Order files so that what each needs comes before it."""
    return name.endswith(MANIFEST), _checkpoint(name) is not None, name == "metrics.jsonl", name == EXPERIMENT
