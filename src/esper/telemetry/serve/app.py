"""The requests that the live page answers.

/ /run /host /policy /anomalies      one HTML page; live.js draws the view that the address names
/assets/NAME                         its scripts and styles, those of the report among them
/api/overview                        all runs
/api/NAME?run=A&run=B                a payload (payloads.py)
/api/events?run=A                    tells when files of these runs, or of any, have changed (server-sent events)
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from esper.leyline.errors import EsperError
from esper.telemetry.report.page import asset as report_asset
from esper.telemetry.serve.guard import Access, Guard, refused
from esper.telemetry.serve.overview import Overview
from esper.telemetry.serve.payloads import LIVE
from esper.telemetry.serve.sources import Runs, UnknownRunError, encoded

VIEWS = ("/", "/run", "/host", "/policy", "/anomalies")
SCRIPTS = ("d3.min.js", "plot.min.js", "dom.js", "charts.js", "app.js", "glance.js", "views.js", "live.js")
STYLES = ("style.css", "live.css")
POLL, KEEP_ALIVE = 1.0, 15.0
"""Seconds between looks at the files, and between signs of life on a quiet stream."""
_OWN = ("glance.js", "views.js", "live.js", "live.css")
_TYPES = {"js": "text/javascript", "css": "text/css"}


def application(runs: Runs, access: Access, ends: Callable[[], bool] = lambda: False) -> Starlette:
    """The answers for some runs, as an ASGI application; streams end when `ends()` is true."""
    served = _Server(runs, ends)
    routes = [
        *(Route(path, _view) for path in VIEWS),
        Route("/assets/{name}", _asset),
        Route("/api/overview", served.overview),
        Route("/api/events", served.events),
        Route("/api/{name}", served.payload),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, access=access), Middleware(GZipMiddleware, compresslevel=5)],
        exception_handlers={HTTPException: _plain_error, EsperError: _explained, OSError: _explained},
    )


class _Server:
    """The answers that depend on the runs; files are read in threads, so that streams go on."""

    def __init__(self, runs: Runs, ends: Callable[[], bool]) -> None:
        self._runs, self._overview, self._ends = runs, Overview(runs), ends

    async def overview(self, request: Request) -> Response:
        del request
        return _json(await run_in_threadpool(lambda: encoded(self._overview.table())))

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

    Args:
        runs: where to look.
        names: report these alone, or all if there are none.
        poll: seconds between looks.
        ends: whether to stop.
    """

    def look() -> Mapping[str, str]:
        return {name: version for name, version in runs.versions().items() if not names or name in names}

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


async def _view(request: Request) -> Response:
    del request
    return HTMLResponse(_page(), headers={"Cache-Control": "no-cache"})


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
        return report_asset(name)
    return files("esper.telemetry.serve").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _page() -> str:
    def address(name: str) -> str:
        return f"/assets/{name}?{sha256(_text(name).encode()).hexdigest()[:12]}"

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
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": why}, status)
    return refused(status, f"{request.url.path} is not here; the overview is at /." if status == 404 else why)


def _explained(request: Request, error: Exception) -> Response:
    """An error that a run can cause, as a sentence that the page shows."""
    del request
    if isinstance(error, OSError):  # files of a run that is moved or removed at this moment
        return JSONResponse({"error": f"a file of the run cannot be read ({error}); try again."}, 503)
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, UnknownRunError) else 422)


PATIENCE = 5
"""Seconds that answers may take to end."""


def server_of(runs: Runs, access: Access, port: int = 0) -> uvicorn.Server:
    """A server that answers for these runs; `port` is used where `run` gets no socket, 0 chooses a free one."""
    app = application(runs, access, lambda: server.should_exit)
    settings = uvicorn.Config(
        app,
        port=port,
        log_level="warning",
        access_log=False,  # it would hold the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=PATIENCE,
        lifespan="off",
    )
    server = uvicorn.Server(settings)
    return server
