"""An engine that listens beyond loopback, and gateways with the right and the wrong keys."""

import httpx

from rose.serving.curve import make_keys
from tests.e2e.test_halves import (
    bert,
    embed,
    is_ready,
    run,
    start_engine,
    start_gateway,
    stop,
    wait_for_log,
    wait_until,
)
from tests.ports import free_port

__all__ = ["bert", "run"]  # fixtures


def start_keyed_gateway(run, address, keys):
    gateway = start_gateway(run, f"kites={address}", options=("--keys", keys))
    wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
    return gateway


def test_only_a_gateway_with_the_right_key_is_served(run, bert, tmp_path):
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")
    (tmp_path / "other" / "engine.key").write_bytes((tmp_path / "keys" / "engine.key").read_bytes())
    port = free_port("0.0.0.0")
    refused = start_engine(run, bert, f"tcp://0.0.0.0:{port}")
    assert refused.wait(60) == 1
    assert "rose keys FOLDER" in refused.log.read_text()
    engine = start_engine(run, bert, f"tcp://0.0.0.0:{port}", "--keys", tmp_path / "keys")
    address = f"tcp://127.0.0.1:{port}"

    gateway = start_keyed_gateway(run, address, tmp_path / "keys")
    wait_until(lambda: is_ready(gateway))
    assert embed(gateway).status_code == 200

    stranger = start_keyed_gateway(run, address, tmp_path / "other")
    wait_for_log(engine, "refused a client at 127.0.0.1: it has not the gateway's key")
    wait_for_log(stranger, "the engine refuses this gateway's key")
    answer = httpx.get(f"{stranger.url}/ready")
    assert answer.status_code == 503
    assert "refuses this gateway's key" in answer.json()["error"]["message"]
    assert embed(stranger).status_code == 503
    assert embed(gateway).status_code == 200, "nobody else is hurt"
    inspect = run("inspect", "--graphs", address, "--keys", tmp_path / "keys", "--json")
    assert inspect.wait(60) == 0
    assert inspect.log.read_text().strip() == "[]"
    assert [stop(process) for process in (stranger, gateway, engine)] == [0, 0, 0]
