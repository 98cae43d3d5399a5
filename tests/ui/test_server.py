"""The dashboard answers this computer only, and calls from its own pages only."""

import socket

import gradio as gr
import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from megatrain.errors import MegaTrainError
from ui import server


def client(hosts):
    routes = [Route("/", lambda request: PlainTextResponse("served"), methods=["GET", "POST"])]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(server.LocalOnly, hosts=hosts)]))


LOCAL = ("localhost", "127.0.0.1", "::1")


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1", "[::1]:7860", "LOCALHOST"])
def test_this_computer_is_served(host):
    assert client(LOCAL).get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "", "127.0.0.1.evil.example", "[::1", "localhost@evil.example"])
def test_a_foreign_host_gets_400(host):
    assert client(LOCAL).get("/", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "https://127.0.0.1:7860.evil.example", "http://["])
def test_a_call_from_another_page_is_refused(origin):
    headers = {"host": "127.0.0.1:7860", "origin": origin}
    assert client(LOCAL).post("/", headers=headers).status_code == 400
    assert client(None).post("/", headers=headers).status_code == 400


def test_a_call_from_the_own_page_is_served():
    headers = {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}
    assert client(LOCAL).post("/", headers=headers).status_code == 200


def test_with_a_password_any_name_is_served():
    assert client(None).get("/", headers={"host": "workstation.lan:7860"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "workstation.lan"])
def test_others_need_a_password(host):
    with pytest.raises(MegaTrainError, match="everyone in this network"):
        server.launch(None, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_local_addresses(host):
    assert server.is_local(host)


def test_nothing_in_the_head_comes_from_the_network():
    head = server.head()
    assert "https://" not in head
    assert server.PLOTLY_JS.is_file()


def test_a_password_guards_the_pages_and_the_scripts():
    with gr.Blocks() as demo:
        gr.Markdown("hello")
    address = server.launch(demo, port=free_port(), password="open sesame")
    try:
        script = f"{address}gradio_api/file={server.PLOTLY_JS.as_posix()}"
        with httpx.Client() as visitor:
            assert visitor.get(script).status_code == 401
            assert visitor.post(f"{address}login", data={"username": "megatrain", "password": "guess"}).status_code == 400
            assert visitor.post(f"{address}login", data={"username": "megatrain", "password": "open sesame"}).status_code == 200
            assert visitor.get(address).status_code == 200
    finally:
        demo.close(verbose=False)


def test_the_page_serves_plotly_from_the_package():
    with gr.Blocks() as demo:
        gr.Markdown("hello")
    address = server.launch(demo, port=free_port())
    try:
        page = httpx.get(address)
        assert f"file={server.PLOTLY_JS.as_posix()}" in page.text
        reply = httpx.get(f"{address}gradio_api/file={server.PLOTLY_JS.as_posix()}")
        assert reply.status_code == 200
        assert len(reply.content) == server.PLOTLY_JS.stat().st_size
        assert httpx.get(f"{address}gradio_api/file={server.SHARED_JS.as_posix()}").status_code in (403, 404), "no other file is served"
    finally:
        demo.close(verbose=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
