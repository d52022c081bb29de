"""A small fake of Google Cloud Storage: its JSON interface, as far as gcsfs uses it for runs."""

import http.server
import json
import threading
from urllib.parse import parse_qs, unquote, urlsplit


class GcsServer(http.server.ThreadingHTTPServer):
    """Serve the objects of one bucket from memory, until `stop`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.lock = {}, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, status, body):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def handle_object(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        name = unquote(url.path.partition("/o/")[2])
        objects, raw = self.server.objects, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            if self.command == "POST":
                _, about, content = raw.removesuffix(b"\n--==0==--").split(b"--==0==", 2)
                name = json.loads(about.partition(b"\n\n")[2])["name"]
                if query.get("ifGenerationMatch") == "0" and name in objects:
                    return 412, {}
                objects[name] = content.partition(b"\n\n")[2]
                return 200, describe(name, objects)
            if not name:
                names = [name for name in sorted(objects) if name.startswith(query.get("prefix", ""))]
                return 200, {"items": [describe(name, objects) for name in names]}
            if name not in objects:
                return 404, {}
            if self.command == "DELETE":
                del objects[name]
                return 204, b""
            return 200, objects[name] if query.get("alt") == "media" else describe(name, objects)

    def do_GET(self):
        self.answer(*self.handle_object())

    do_POST = do_DELETE = do_GET


def describe(name, objects):
    return {"name": name, "size": str(len(objects[name])), "updated": "2026-01-01T00:00:00.000Z"}
