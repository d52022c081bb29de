"""The registry against a local server: what is downloaded, checked, refused, kept."""

import dataclasses
import hashlib
import http.server
import socket
import struct
import threading

import pytest

from jaxgpt.data import corpus as module
from jaxgpt.data.corpus import CORPORA, Corpus, download, find_corpus_files, find_user_files, read_text, strip_gutenberg
from jaxgpt.errors import UserError

TEXT = "Desocupado lector: ñandú.\n"


@pytest.fixture
def server():
    """Serves TEXT at /good, less of it elsewhere, and at /second/... as there the first time; counts what it served."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = TEXT.encode()
            server.served.append(self.path)
            if self.path == "/missing":
                self.send_error(404)
                return
            how = self.path.removeprefix("/second") if len(server.served) == 1 else "/good"
            how = how if self.path.startswith("/second") else self.path
            if how == "/busy":
                self.send_error(503)
                return
            self.send_response(200)
            if how != "/unknown":  # else nothing says where the text should end
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if how == "/good" else body[: len(body) // 2])
            if how == "/reset":  # instead of a farewell: an RST
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.served = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def entry(server, page, sha256=hashlib.sha256(TEXT.encode()).hexdigest()):  # noqa: B008
    return Corpus(
        name="lector",
        url=f"http://127.0.0.1:{server.server_port}/{page}",
        sha256=sha256,
    )


def test_downloaded_once_then_kept(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    monkeypatch.setitem(CORPORA, "lector", entry(server, "good"))
    for _ in range(2):
        (path,) = find_corpus_files("lector")
        assert path.read_text(encoding="utf-8") == TEXT
    assert server.served == ["/good"]
    path.write_text("something else")
    with pytest.raises(UserError, match="is not the corpus 'lector'"):
        find_corpus_files("lector")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.mark.parametrize("how", ["cut", "reset", "unknown", "busy"])
def test_what_stops_half_way_is_begun_again(server, tmp_path, how):
    path = tmp_path / "corpora" / "lector.txt"
    download(entry(server, f"second/{how}"), path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert len(server.served) == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "IncompleteRead"),
        ("reset", "could not download"),
        ("unknown", "has SHA-256|codec can't decode"),
        ("busy", "Service Unavailable"),
    ],
)
def test_what_stops_every_time_is_never_used(server, tmp_path, how, said):
    path = tmp_path / "corpora" / "lector.txt"
    with pytest.raises(UserError, match=rf"({said}).*, 3 times\. To give it by hand"):
        download(entry(server, how), path)
    assert len(server.served) == 3 and not list(path.parent.iterdir())


def test_what_is_not_there_is_asked_for_once(server, tmp_path):
    with pytest.raises(UserError, match="Not Found"):
        download(entry(server, "missing"), tmp_path / "lector.txt")
    assert len(server.served) == 1


@pytest.mark.parametrize(
    ("page", "sha256", "said"),
    [
        ("missing", "0" * 64, "could not download lector"),
        ("good", "0" * 64, "has SHA-256"),
        ("cut", hashlib.sha256(TEXT.encode()).hexdigest(), "lector"),
    ],
)
def test_what_fails_is_told_and_leaves_nothing(server, tmp_path, page, sha256, said):
    path = tmp_path / "corpora" / "lector.txt"
    with pytest.raises(UserError, match=said) as caught:
        download(entry(server, page, sha256), path)
    assert "by hand" in str(caught.value) and str(path) in str(caught.value)
    assert not list(path.parent.iterdir())


def test_no_network_is_told(tmp_path):
    nowhere = dataclasses.replace(CORPORA["shakespeare"], url="http://127.0.0.1:9/")
    with pytest.raises(UserError, match="could not download shakespeare"):
        download(nowhere, tmp_path / "x.txt")


def test_the_registry_is_complete():
    for name, corpus in CORPORA.items():
        assert corpus.name == name
        assert len(corpus.sha256) == 64 and corpus.url.startswith("https://")


@pytest.mark.parametrize("name", ["shakespeare", "sancho", "quijote"])
def test_registered_hashes_are_those_of_the_real_texts(real_text, name):
    assert hashlib.sha256((real_text / f"{name}.txt").read_bytes()).hexdigest() == CORPORA[name].sha256


def test_pythons_documentation_is_always_there():
    (path,) = find_corpus_files("python-docs")
    text = path.read_text(encoding="utf-8")
    assert len(text) > 300_000 and "statement" in text
    assert find_corpus_files("python-docs") == [path]


@pytest.mark.parametrize("name", ["python-docs", "python-docs.jsonl"])
def test_a_made_corpus_that_is_damaged_is_made_again(tmp_path, monkeypatch, name):
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    (path,) = find_corpus_files(name)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert find_corpus_files(name) == [path] and path.read_bytes() == good


def test_an_unknown_corpus_is_told():
    with pytest.raises(
        UserError,
        match="unknown corpus 'bible': known are python-docs, python-docs.jsonl, spanish-numbers.tsv, shakespeare",
    ):
        find_corpus_files("bible")


def test_gutenberg_frame_is_removed():
    framed = "\ufeffThe Project Gutenberg eBook\r\n*** START OF THE PROJECT ***\r\n\r\nEn un lugar\r\nde la Mancha\r\n\r\n*** END OF THE PROJECT ***\r\nlicence\r\n"
    assert strip_gutenberg(framed) == "En un lugar\nde la Mancha"


def test_a_folder_is_its_text_files_by_name(tmp_path):
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("A")
    (tmp_path / "c.md").write_text("C")
    files = find_user_files(str(tmp_path))
    assert [f.name for f in files] == ["b.txt", "a.txt"]
    assert list(read_text(files)) == ["B", "", None, "A", ""]


def test_text_is_read_in_pieces_and_characters_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    path = tmp_path / "t.txt"
    path.write_text("ñandú — sí", encoding="utf-8")
    pieces = list(read_text([path]))
    assert len(pieces) > 3 and "".join(pieces) == "ñandú — sí"


@pytest.mark.parametrize(
    "raw", [b"abc\xff\xfedef", b"\x89PNG\r\n\x1a\n\x00", "año".encode("latin-1"), "ñ".encode()[:1]]
)
def test_what_is_not_utf8_is_told_with_its_place(tmp_path, raw):
    path = tmp_path / "t.txt"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"t\.txt is not UTF-8 text: byte 0x.. at about offset"):
        list(read_text([path]))
