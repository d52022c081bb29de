"""A server without a model that speaks the wire of the playground, deterministically: see jaxgpt/serve/playground.js."""

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from jaxgpt.serve.app import playground_page
from tests.serve.conftest import wait_for

SCRIPT = "<script>pwned=1</script>"
IMAGE = "<img src=x onerror=pwned=1>"
# Ids from FIRST on; below, each id is a character. Digits, which JavaScript sorts in objects, and two equal texts.
WORDS = [" the", " a", " cat", " sat", "7", "12", "same", "same", SCRIPT, IMAGE, "\n", "é", " on", ".", " it", " was"]
WORDS += [" &amp;", "\t", " dog", " ran", " far", " and", " so", " then"]
FIRST = 2**21
END_OF_TURN, ANSWER = 3, 12  # an answer ends after so many tokens


@dataclasses.dataclass
class Fake:
    """What the server does, and what it saw."""

    chat: bool = False
    name: str = "tiny"
    key: str | None = None
    delay: float = 0.0  # s between tokens
    fail: str | None = None  # "400", or "broken": the stream ends early, or "event": an error in it
    message: str = "max_tokens=999: needs at most 256"
    seen: list = dataclasses.field(default_factory=list)  # (path, body)
    left: int = 0  # streams that clients gave up

    def bodies(self, path):
        return [body for at, body in self.seen if at == path and not (body or {}).get("echo")]


def text_of(ids):
    return "".join(WORDS[i - FIRST] if i >= FIRST else chr(i) for i in ids)


def distribution(ids):
    """(id, logprob) of all words after these ids, best first."""
    order = random.Random(str(ids)).sample(range(len(WORDS)), len(WORDS))
    weights = [0.7**k for k in range(len(WORDS))]
    return [(FIRST + i, math.log(w / sum(weights))) for i, w in zip(order, weights, strict=True)]


def generate(body):
    """[(id, logprob, top)] of a request, without end."""
    ids = list(body["prompt"])
    while True:
        best = distribution(ids)
        drawn = random.Random(f"{ids} {body.get('seed')} {body.get('temperature')}").choices(
            best, [math.exp(p) for _, p in best]
        )[0]
        i, logprob = drawn if body.get("temperature", 1) else best[0]
        yield i, logprob, best[: body["logprobs"]]
        ids.append(i)


def reply(body):
    """The tokens that a request gives, and why it ends."""
    answer = END_OF_TURN in body.get("stop_token_ids", [])
    count = min(ANSWER, body["max_tokens"]) if answer else body["max_tokens"]
    found = [token for _, token in zip(range(count), generate(body), strict=False)]
    return found, "stop" if answer and count == ANSWER else "length"


def chunk(tokens, finish):
    tops = [top for *_, top in tokens]
    logprobs = {
        "tokens": [text_of([i]) for i, *_ in tokens],
        "token_logprobs": [p for _, p, _ in tokens],
        "top_logprobs": [{text_of([i]): p for i, p in top} for top in tops],
        "text_offset": [0 for _ in tokens],
        "token_ids": [i for i, *_ in tokens],
        "top_token_ids": [[i for i, _ in top] for top in tops],
        "top_token_texts": [[text_of([i]) for i, _ in top] for top in tops],
        "top_token_logprobs": [[p for _, p in top] for top in tops],
    }
    text = text_of([i for i, *_ in tokens])
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def make_app(fake):
    def handles(answer):
        async def handle(request):
            if fake.key is not None and request.headers.get("authorization") != f"Bearer {fake.key}":
                return JSONResponse({"error": {"message": "needs a key"}}, 401)
            body = await request.json() if request.method == "POST" else None
            fake.seen.append((request.url.path, body))
            return answer(body)

        return handle

    async def page(request):
        html, policy = playground_page()
        return HTMLResponse(html, headers={"content-security-policy": policy})

    def models(body):
        own = {"chat": fake.chat, "context": 256, "temperature": 0.8}
        own["chat_stop_token_ids"] = [END_OF_TURN] if fake.chat else None
        return JSONResponse({"data": [{"id": fake.name, "object": "model", "jaxgpt": own}]})

    def tokenize(body):
        text = body.get("prompt")
        if text is None:
            text = "".join(f"{m['role']}:{m['content']}\x03" for m in body["messages"]) + "assistant:"
        return JSONResponse({"tokens": [ord(c) for c in text]})

    def completions(body):
        if body.get("echo"):
            return JSONResponse({"choices": [{"text": text_of(body["prompt"])}]})
        if fake.fail == "400":
            return JSONResponse({"error": {"message": fake.message}}, 400)
        return StreamingResponse(stream(body), media_type="text/event-stream")

    async def stream(body):
        tokens, finish = reply(body)
        try:
            for n in range(0, len(tokens), 2):
                await asyncio.sleep(fake.delay)
                if fake.fail and n:
                    if fake.fail == "event":
                        yield f"data: {json.dumps({'error': {'message': fake.message}})}\n\n"
                    return
                yield chunk(tokens[n : n + 2], finish if n + 2 >= len(tokens) else None)
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            fake.left += 1
            raise

    posted = {"/tokenize": tokenize, "/v1/completions": completions}
    routes = [Route(path, handles(answer), methods=["POST"]) for path, answer in posted.items()]
    return Starlette(routes=[Route("/", page), Route("/v1/models", handles(models)), *routes])


@contextlib.contextmanager
def running(app):
    """Serve an app from a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        server.force_exit = True
