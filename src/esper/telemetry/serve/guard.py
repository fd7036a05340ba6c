"""Refuses requests that a page of ours would not send, before anything is read.

method        GET and HEAD alone
Host          an IP address, this machine's name, or a name that was allowed: another name may be a foreign page whose
              name was made to point here (DNS rebinding)
Origin        absent or our own for data and events, so that other pages cannot follow a run
token         where one is set: in the address once, then in a cookie
"""

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from typing import final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
_API = "/api/"


@final
@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may read.

    Attributes:
        names: names of this machine that a browser may use; IP addresses are always allowed.
        token: the secret, None for everybody who reaches the port.
    """

    names: Collection[str] = ("localhost",)
    token: str | None = None

    def allows_host(self, header: str) -> bool:
        """Whether the Host header names this machine."""
        name = _name_of(header)
        return name.lower().rstrip(".") in {known.lower() for known in self.names} or _is_address(name)

    def allows_token(self, given: str) -> bool:
        """Whether `given` is the token; takes equally long for all that are not."""
        return self.token is None or secrets.compare_digest(given.encode(), self.token.encode())

    @property
    def session(self) -> str:
        """The value of the cookie, from which the token cannot be told."""
        return sha256(f"esper serve {self.token}".encode()).hexdigest()

    @property
    def cookie(self) -> str:
        """The name of the cookie. Browsers send cookies to every port, so servers with other tokens use other names."""
        return f"esper-{self.session[:12]}"


@final
class Guard:
    """ASGI middleware that applies an `Access` and adds the security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, or pass the request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            request = Request(scope)
            answer = self._refusal(request) or self._app
            await answer(scope, receive, self._with_headers(request, send))

    def _refusal(self, request: Request) -> Response | None:
        access, headers = self._access, request.headers
        if request.method not in ("GET", "HEAD"):
            return refused(405, "this page can only be read; use GET.", {"Allow": "GET, HEAD"})
        if not access.allows_host(headers.get("host", "")):
            return refused(
                403,
                f"the address names the host {_name_of(headers.get('host', ''))!r}, which is not known to be this "
                "machine; use its IP address, or start esper serve with --allow-host NAME.",
            )
        if request.url.path.startswith(_API) and not _is_own_page(request):
            return refused(403, "this data is for the page of esper serve alone, not for pages of other sites.")
        if not (self._brings_token(request) or self._has_cookie(request)):
            return refused(
                401,
                "this page needs its token; open the address with ?token= that esper serve printed when it started.",
            )
        return None

    def _brings_token(self, request: Request) -> bool:
        return self._access.allows_token(request.query_params.get("token", ""))

    def _has_cookie(self, request: Request) -> bool:
        given = request.cookies.get(self._access.cookie, "")
        return secrets.compare_digest(given.encode(), self._access.session.encode())

    def _with_headers(self, request: Request, send: Send) -> Callable[[Message], Awaitable[None]]:
        access = self._access
        sets_cookie = access.token is not None and self._brings_token(request)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if sets_cookie and message["status"] < 400:
                    # not a redirect: after a link of another site a browser would follow it without the cookie
                    headers.append("Set-Cookie", f"{access.cookie}={access.session}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        return with_headers


def refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """A sentence as the answer."""
    return PlainTextResponse(f"esper: {why}\n", status, headers)


def _is_own_page(request: Request) -> bool:
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    own = origin is None or origin in {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
    return own and site in ("none", "same-origin")


def _name_of(host: str) -> str:
    """A Host header without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
