"""Serve a live page: a page, the events that fill it, and the same metrics for Prometheus. Nothing else is served.

The page is sent without content, and content only to a bounded number of viewers, so that connections cost little
memory. A connection is for one request, which must arrive soon.
"""

import asyncio
import base64
import hmac
import json
import logging
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..federation.watching import LOCAL, TOKEN
from .exposition import exposition
from .live import LiveRuns
from .page import TEMPLATES, fill_template

MAX_VIEWERS = 50
MAX_CONNECTIONS = 2000
MAX_WAIT = 10.0  # seconds for a request to arrive
MAX_UNREAD = 30.0  # seconds after which a viewer that does not read is dropped
HEARTBEAT = 15.0  # seconds
TICK = 0.5  # seconds between two looks at the runs
HEADERS = {
    "connection": "close",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Server(uvicorn.Server):
    """Ends with the process that started it, if there is one: the run whose page it serves."""

    parent: int | None = None

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.parent not in (None, os.getppid())


class Protocol(H11Protocol):
    """Closes a connection whose request does not arrive, so that slow ones do not use up all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(MAX_WAIT, lambda: None if self.cycle else transport.close())


class Guarded:
    """Lets only those in who know the token. Without a token, only requests to this machine by its own name."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        app = self.app
        if scope["type"] == "http" and not self._allows(Request(scope)):
            app = PlainTextResponse("Pass the token that hetero-ssfl watch has printed.\n", 403)
        await app(scope, receive, send_with_headers)

    def _allows(self, request: Request) -> bool:
        if self.token is None:  # a page of another site must not reach this one by a name that leads here
            return request.url.hostname in LOCAL
        given = request.query_params.get("token") or request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.token.encode())


class Stream(Response):
    """Server-sent events: the parts of the page that have changed since this viewer was sent them."""

    def __init__(self, viewers: "Viewers") -> None:
        self.viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen: dict[str, str] = {}
        live, silent = self.viewers.live, 0.0
        request = Request(scope, receive)
        self.viewers.count += 1
        try:
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            ended = False
            while not ended and not await request.is_disconnected():
                ended = self.viewers.ended()
                if ended:  # the end of the run may not be shown yet
                    await asyncio.to_thread(live.refresh, at_once=True)
                parts = dict(live.parts)
                new = {name: html for name, html in parts.items() if seen.get(name) != html}
                if new or not seen or ended or silent >= HEARTBEAT:
                    about = {"title": live.title, "state": live.state, "over": ended and live.finished}
                    text = f"data: {json.dumps({**about, 'order': order(parts), 'parts': new})}\n\n"
                    body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                    await asyncio.wait_for(send(body), MAX_UNREAD)
                    seen, silent = parts, 0.0
                await asyncio.sleep(TICK * (not ended))
                silent += TICK
        except TimeoutError:
            pass
        finally:
            self.viewers.count -= 1
        with suppress(TimeoutError):
            await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), 1)


FIRST = ("trouble", "warnings", "clients", "newest", "top")


def order(parts: dict[str, str]) -> list[str]:
    return [*(name for name in FIRST if name in parts), *(name for name in parts if name not in FIRST)]


class Viewers:
    """How many look at the page. The run folders are read only while somebody does."""

    def __init__(self, live: LiveRuns, ended: Callable[[], bool]) -> None:
        self.live, self.ended, self.count = live, ended, 0

    async def follow(self) -> None:
        while True:
            if self.count:
                await asyncio.to_thread(self.live.refresh)
            await asyncio.sleep(TICK)


def make_app(live: LiveRuns, token: str | None, ended: Callable[[], bool] = lambda: False) -> ASGIApp:
    viewers, script = Viewers(live, ended), (TEMPLATES / "live.js").read_text()
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = f"; script-src 'sha256-{digest}'; connect-src 'self'; base-uri 'none'; form-action 'none'"
    values: dict[str, Any] = {"made_by": "watch", "policy": Markup(policy), "script": Markup(script)}

    async def page(_: Request) -> Response:
        return HTMLResponse(fill_template("live.html", title=live.title, **values))

    async def events(_: Request) -> Response:
        if viewers.count >= MAX_VIEWERS:
            return PlainTextResponse(f"{MAX_VIEWERS} others look at this page.\n", 503)
        return Stream(viewers)

    async def metrics(_: Request) -> Response:
        await asyncio.to_thread(live.refresh, draw=False)
        return PlainTextResponse(exposition(live.runs, live.statuses), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def following(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(viewers.follow())
        yield
        task.cancel()

    routes = [Route("/", page), Route("/events", events), Route("/metrics", metrics)]
    return Guarded(Starlette(routes=routes, lifespan=following), token)


def watch(live: LiveRuns, listener: socket.socket, token: str | None, parent: int | None = None) -> None:
    """Serve the page until the process is stopped, or until `parent` ends."""
    open_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files, min(hard, 2 * MAX_CONNECTIONS)), hard))
    server: Server
    app = make_app(live, token, lambda: server.should_exit)
    settings: dict[str, Any] = {"http": Protocol, "ws": "none", "log_config": None, "server_header": False}
    settings |= {"limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": 10, "lifespan": "on"}
    server = Server(uvicorn.Config(app, **settings))
    server.parent = parent
    server.run(sockets=[listener])


def main() -> None:
    """Serve the page of a run for the process that trains it (federation/watching.py)."""
    os.nice(10)  # the run comes first
    number, path = sys.argv[1:]
    logging.disable()
    watch(LiveRuns([Path(path)]), socket.socket(fileno=int(number)), os.environ.pop(TOKEN, None) or None, os.getppid())


if __name__ == "__main__":
    main()
