"""The process side of the live page: uvicorn around the application, whose streams end when it is told to stop."""

import uvicorn

from esper.telemetry.serve.app import application
from esper.telemetry.serve.guard import Access
from esper.telemetry.serve.sources import Runs

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
