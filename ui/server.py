"""Serving the dashboard: this computer only unless a password is set, nothing from the network, nothing to the network."""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import plotly
from starlette.middleware import Middleware

from megatrain.errors import MegaTrainError
from ui.theme import CSS, THEME

PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
SHARED_JS = Path(__file__).parent / "static" / "shared.js"
USER = "megatrain"  # the login name when a password is set

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class LocalOnly:
    """ASGI middleware: a request must name one of `hosts` as its Host (None: any), and a web page may call only from the same origin.

    Without it a foreign page whose name resolves to 127.0.0.1 could start and stop runs.
    """

    def __init__(self, app: Any, hosts: tuple[str, ...] | None) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            await send({"type": "http.response.body", "body": refusal.encode()})

    def _refusal(self, scope: Scope) -> str | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            return "This address is not served here."
        origin = headers.get(b"origin")
        if origin is not None and _place(origin) != host.lower():
            return "Calls from other pages are refused."
        return None


def _place(origin: str) -> str:
    """Host and port of an Origin header; empty when it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `localhost:7860` -> `localhost`, `[::1]:7860` -> `::1`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """True when `host` can be reached from this computer only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def head() -> str:
    """What every page loads before its widgets: plotly from the installed package, and the helpers that the widgets share."""
    source = SHARED_JS.read_text("utf-8")
    return f'<script>{source}</script>\n<script defer src="/gradio_api/file={PLOTLY_JS.as_posix()}"></script>'


def refuse_open_door(host: str, password: str | None) -> None:
    """MegaTrainError when the dashboard would be open to others without a password."""
    if not is_local(host) and not password:
        raise MegaTrainError(
            f"Listening on {host} would let everyone in this network start and stop runs.",
            "Set a password in MEGATRAIN_PASSWORD, or leave --host out to serve this computer only.",
        )


def launch(demo: gr.Blocks, host: str = "127.0.0.1", port: int | None = None, password: str | None = None, browser: bool = False) -> str:
    """Serve `demo` from threads of this process and return its address. MegaTrainError if others could use it without a password."""
    refuse_open_door(host, password)
    hosts = (host.lower(), "localhost", "127.0.0.1", "::1") if is_local(host) else None
    gr.set_static_paths([PLOTLY_JS])
    _, address, _ = demo.launch(
        server_name=host,
        server_port=port,
        auth=(USER, password) if password else None,
        inbrowser=browser,
        prevent_thread_lock=True,
        share=False,
        quiet=True,
        theme=THEME,
        css=CSS,
        head=head(),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        _frontend=False,  # skips only gradio's own look at the page, which gives up after 3 s on a busy machine
        app_kwargs={"middleware": [Middleware(LocalOnly, hosts=hosts)]},
    )
    return str(address)
