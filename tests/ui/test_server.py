"""The dashboard answers this computer only, and calls from its own pages only."""

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


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "https://127.0.0.1:7860.evil.example"])
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
