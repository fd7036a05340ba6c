"""The requests that the live page answers, and those that it refuses before anything is read.

/ /run /host /policy /anomalies      one HTML page; live.js draws the view that the address names
/assets/NAME                         its scripts and styles, those of the report among them
/api/overview                        all runs
/api/NAME?run=A&run=B                a payload (runs.py)
/api/events?run=A                    tells when files of these runs, or of any, have changed (server-sent events)

method        GET and HEAD alone
Host          a name of this machine, where there is no token: another name may be a foreign page whose name was made
              to point here (DNS rebinding)
Origin        absent or our own for data and events, so that other pages cannot follow a run
token         where one is set: in the address, which sets a cookie, then in that cookie

Links of the page are relative, so that it works below any path of a proxy.
"""

import json
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import final
from urllib.parse import quote, unquote

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper.leyline.errors import EsperError
from esper.telemetry.report import page
from esper.telemetry.serve.runs import LIVE, Runs, UnknownRunError

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names by which every browser reaches its own machine."""
VIEWS = ("/", "/run", "/host", "/policy", "/anomalies")
_OWN = ("glance.js", "overview.js", "views.js", "live.js", "live.css")
SCRIPTS, STYLES = (*page.SCRIPTS[:-1], *_OWN[:-1]), ("style.css", "live.css")
"""Those of the report, without the last one, which starts it, and our own."""
POLL, KEEP_ALIVE, PATIENCE = 1.0, 15.0, 5
"""Seconds between looks at the files, between signs of life on a quiet stream, and that answers may take to end."""
HEADERS = {
    # Plot puts a style element into each chart; scripts come from our files alone
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
FRAMED = HEADERS | {"Content-Security-Policy": HEADERS["Content-Security-Policy"].partition("; frame-ancestors")[0]}
del FRAMED["X-Frame-Options"]
"""The same where other pages may show this one in a frame."""
_TYPES = {"js": "text/javascript", "css": "text/css"}


def application(
    runs: Runs,
    *,
    names: Collection[str] = LOCAL,
    token: str | None = None,
    root: str = "",
    frames: bool = False,
    ends: Callable[[], bool] = lambda: False,
) -> Starlette:
    """The answers for some runs, as an ASGI application.

    Args:
        runs: what is served.
        names: names of this machine that a browser may use, where there is no token. With a token any name may be used:
            a browser does not send the cookie to a foreign name that points here.
        token: the secret, None for everybody who reaches the port.
        root: the path below which a proxy shows the page, such as /esper. Requests may have it or not.
        frames: whether other pages may show this one in a frame.
        ends: whether streams are to end.
    """
    served = _Server(runs, token, ends)
    routes = [
        *(Route(path, served.view) for path in VIEWS),
        Route("/assets/{name}", _asset),
        Route("/api/overview", served.overview),
        Route("/api/events", served.events),
        Route("/api/{name}", served.payload),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_Guard, token=token, root=root, headers=FRAMED if frames else HEADERS),
            Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if token else list(names), www_redirect=False),
            Middleware(GZipMiddleware, compresslevel=5),
        ],
        exception_handlers={HTTPException: _plain_error, EsperError: _explained, OSError: _explained},
    )


@final
class _Guard:
    """ASGI middleware: refuses requests of other pages, and those without the token; adds headers to each answer."""

    def __init__(self, app: ASGIApp, token: str | None, root: str, headers: Mapping[str, str]) -> None:
        self._app, self._token, self._root, self._headers = app, token, root, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        scope = _below(self._root, scope)
        request, answer = Request(scope), self._app
        if _place(scope).startswith("/api/") and not _is_own_page(request):
            answer = _refused(403, "this data is for the page of esper serve alone, not for pages of other sites.")
        elif self._token is not None and not _brings(request, self._token):
            answer = _refused(
                401,
                "this page needs its token; open the address with ?token= that esper serve printed when it started.",
            )
        elif not _place(scope):  # relative links need the slash at the end
            answer = RedirectResponse(f"{scope['root_path']}/?{request.url.query}".rstrip("?"))
        await answer(scope, receive, with_headers)


def _place(scope: Scope) -> str:
    """The path of a request below that of a proxy, or of an application in which this one is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _below(root: str, scope: Scope) -> Scope:
    """The request with `root` as the path of a proxy, whether or not the proxy has removed it."""
    outer, place = scope.get("root_path", "") + root, _place(scope)
    if root and f"{place}/".startswith(f"{root}/"):
        place = place.removeprefix(root)
    return {**scope, "root_path": outer, "path": outer + place}


def _brings(request: Request, token: str) -> bool:
    """Whether the address or the cookie holds the token; takes equally long for all texts that are not the token."""
    given = request.query_params.get("token", ""), unquote(request.cookies.get(_cookie(request), ""))
    return any([secrets.compare_digest(text.encode(), token.encode()) for text in given])


def _cookie(request: Request) -> str:
    """The name of the cookie. Browsers send cookies to every port, so it holds the port."""
    return f"esper-{request.scope['server'][1]}"


def _is_own_page(request: Request) -> bool:
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    own = origin is None or origin in {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
    return own and site in ("none", "same-origin")


def _refused(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    """A sentence as the answer."""
    return PlainTextResponse(f"esper: {why}\n", status, headers)


class _Server:
    """The answers that depend on the runs; files are read in threads, so that streams go on."""

    def __init__(self, runs: Runs, token: str | None, ends: Callable[[], bool]) -> None:
        self._runs, self._token, self._ends = runs, token, ends

    async def view(self, request: Request) -> Response:
        answer = HTMLResponse(_page(), headers={"Cache-Control": "no-cache"})
        if self._token is not None and "token" in request.query_params:
            # not a redirect: after a link of another site a browser would follow it without the cookie
            path = request.scope["root_path"] + "/"
            answer.set_cookie(_cookie(request), quote(self._token), path=path, httponly=True, samesite="strict")
        return answer

    async def overview(self, request: Request) -> Response:
        del request
        return _json(await run_in_threadpool(self._runs.overview_json))

    async def payload(self, request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        if name not in LIVE:
            raise HTTPException(404, f"there is no data called {name!r}; there is {', '.join(sorted(LIVE))}.")
        if not (runs := tuple(dict.fromkeys(query.getlist("run")))):
            raise HTTPException(400, "no run is named; add ?run=NAME to the address.")
        place = {key: _number(key, query[key]) for key in ("round", "host") if key in query}
        key = f"{name} {sorted(place.items())}"
        return _json(await run_in_threadpool(self._runs.answer, runs, key, lambda record: LIVE[name](record, place)))

    async def events(self, request: Request) -> Response:
        names = frozenset(request.query_params.getlist("run"))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        stream = changes(self._runs, names, ends=self._ends)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def changes(
    runs: Runs, names: frozenset[str], poll: float = POLL, ends: Callable[[], bool] = lambda: False
) -> AsyncIterator[str]:
    """Server-sent events: `ready` at once, then `changed` with the names of the runs whose files have changed.

    Of `names` alone, or of all runs if there are none; `poll` seconds pass between looks, until `ends` says so.
    """

    def look() -> Mapping[str, object]:
        return runs.versions(names)

    known = await run_in_threadpool(look)
    yield _event("ready", sorted(known))
    quiet = 0.0
    while not ends():
        await anyio.sleep(poll)
        now = await run_in_threadpool(look)
        changed = sorted(name for name in {*known, *now} if known.get(name) != now.get(name))
        known, quiet = now, quiet + poll
        if changed:
            yield _event("changed", changed)
        elif quiet >= KEEP_ALIVE:
            yield ": no change\n\n"
        else:
            continue
        quiet = 0.0


def _event(kind: str, names: list[str]) -> str:
    return f"event: {kind}\ndata: {json.dumps(names)}\n\n"


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name} is {text!r}, expected a number such as {name}=3.")
    return int(text)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in (*SCRIPTS, *STYLES):
        raise HTTPException(404, f"there is no file {name!r}.")
    # the address holds the digest of the content, which so never changes
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return Response(_text(name), media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


@cache
def _text(name: str) -> str:
    if name not in _OWN:
        return page.asset(name)
    return files("esper.telemetry.serve").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _page() -> str:
    def address(name: str) -> str:
        return f"./assets/{name}?{sha256(_text(name).encode()).hexdigest()[:12]}"

    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<title>esper</title>\n<link rel="icon" href="data:,">',
            *(f'<link rel="stylesheet" href="{address(name)}">' for name in STYLES),
            *(f'<script defer src="{address(name)}"></script>' for name in SCRIPTS),
            '</head>\n<body>\n<a class="skip" href="#main">Skip to the content</a>',
            '<header></header>\n<nav aria-label="Views"></nav>\n<main id="main" tabindex="-1" aria-busy="true">',
            "<noscript>This page is drawn by its scripts; allow them to run.</noscript></main>",
            '<footer role="status"></footer>\n</body>\n</html>\n',
        ]
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


def _plain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, why = error.status_code, error.detail
    if _place(request.scope).startswith("/api/"):
        return JSONResponse({"error": why}, status, error.headers)
    why = {
        404: f"{request.scope['path']} is not here; the overview is at {request.scope['root_path']}/.",
        405: "this page can only be read; use GET.",
    }.get(status, why)
    return _refused(status, why, error.headers)


def _explained(request: Request, error: Exception) -> Response:
    """An error that a run can cause, as a sentence that the page shows."""
    del request
    if isinstance(error, OSError):  # files of a run that is moved or removed at this moment
        return JSONResponse({"error": f"a file of the run cannot be read ({error}); try again."}, 503)
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, UnknownRunError) else 422)


def server_of(
    runs: Runs, *, names: Collection[str] = LOCAL, token: str | None = None, root: str = "", frames: bool = False
) -> uvicorn.Server:
    """A server that answers for these runs (`application`), on a free port where `run` gets no socket."""
    app = application(runs, names=names, token=token, root=root, frames=frames, ends=lambda: server.should_exit)
    settings = uvicorn.Config(
        app,
        port=0,
        log_level="warning",
        access_log=False,  # it would hold the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=PATIENCE,
        lifespan="off",
    )
    server = uvicorn.Server(settings)
    return server
