"""The registry against a local server: what is downloaded, checked, refused, kept."""

import hashlib
import http.server
import threading

import pytest

from jaxgpt.data import corpus as module
from jaxgpt.data.corpus import CORPORA, Corpus, find_corpus_files, find_user_files, read_text, strip_gutenberg
from jaxgpt.errors import UserError

TEXT = "Desocupado lector: ñandú.\n"
SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.fixture
def server():
    """Serves TEXT at /good, and less of it elsewhere; lists what it served."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = TEXT.encode()
            server.served.append(self.path)
            self.send_response(200)
            if self.path != "/unknown":  # else nothing says where the text should end
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.path == "/good" else body[: len(body) // 2])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.served = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture
def lector(server, tmp_path, monkeypatch):
    """Register a corpus at a page of the server."""
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))

    def register(page, sha256=SHA256, port=server.server_port):
        monkeypatch.setitem(CORPORA, "lector", Corpus(url=f"http://127.0.0.1:{port}/{page}", sha256=sha256))

    return register


def test_downloaded_once_then_kept(server, lector):
    lector("good")
    for _ in range(2):
        (path,) = find_corpus_files("lector")
        assert path.read_text(encoding="utf-8") == TEXT
    assert server.served == ["/good"]
    path.write_text("something else")
    with pytest.raises(UserError, match=r"is not the corpus 'lector': .* Delete it to download it again"):
        find_corpus_files("lector")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"page": "cut"}, "IncompleteRead"),
        ({"page": "unknown"}, "has SHA-256|codec can't decode"),
        ({"page": "good", "sha256": "0" * 64}, "has SHA-256"),
        ({"page": "good", "port": 9}, "could not download lector"),
    ],
)
def test_what_fails_is_told_and_leaves_nothing(lector, tmp_path, where, said):
    lector(**where)
    path = tmp_path / "corpora" / "lector.txt"
    with pytest.raises(
        UserError, match=rf"({said}).*To give it by hand, save the text as {path}, or use --data\.path FILE"
    ):
        find_corpus_files("lector")
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("name", ["shakespeare", "sancho", "quijote"])
def test_registered_hashes_are_those_of_the_real_texts(real_text, name):
    assert hashlib.sha256((real_text / f"{name}.txt").read_bytes()).hexdigest() == CORPORA[name].sha256


def test_pythons_documentation_is_always_there():
    (path,) = find_corpus_files("python-docs")
    text = path.read_text(encoding="utf-8")
    assert len(text) > 300_000 and "statement" in text
    assert find_corpus_files("python-docs") == [path]


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
    assert ["".join(read_text(file)) for file in files] == ["B", "A"]


def test_text_is_read_in_pieces_and_characters_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    path = tmp_path / "t.txt"
    path.write_text("ñandú — sí", encoding="utf-8")
    pieces = list(read_text(path))
    assert len(pieces) > 3 and "".join(pieces) == "ñandú — sí"
