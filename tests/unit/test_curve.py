"""Keys between gateway and engine: who is let in, who is not, and what each side says then."""

import asyncio
import contextlib
import logging

import pytest
import zmq
import zmq.asyncio

from rose.serving import curve
from rose.serving.client import EngineClient
from rose.serving.connection import BAD_HANDSHAKE, BAD_KEY
from rose.serving.curve import Doorkeeper, make_keys, read_keys
from rose.serving.protocol import PROTOCOL_VERSION, Hello, Welcome, decode_from_client, encode
from rose.serving.transport import AddressError, bind_router, bound_address, check_peer
from tests.unit.gateway_stub import card


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    for warning in (curve._refused_key, curve._refused_form):
        monkeypatch.setattr(warning, "_said", None)


@contextlib.asynccontextmanager
async def engine(keys):
    """An engine that welcomes whoever gets through to it; yields its address."""
    context = zmq.asyncio.Context()
    doors = []
    guard = (lambda socket: doors.append(Doorkeeper(context, socket, keys))) if keys else None
    socket = bind_router(context, "tcp://127.0.0.1:*", guard)

    async def serve():
        while True:
            identity, header, *_ = await socket.recv_multipart()
            if isinstance(decode_from_client(header), Hello):
                welcome = encode(Welcome(PROTOCOL_VERSION, card()))
                await socket.send_multipart([identity, welcome, b"{}"])

    tasks = [asyncio.create_task(serve()), *[asyncio.create_task(door.run()) for door in doors]]
    try:
        yield bound_address(socket)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for door in doors:
            door.close()
        context.destroy(linger=0)


async def meet(engine_keys, gateway_keys, reason):
    """Let a gateway's client come to an engine; returns once it is ready, or says `reason`."""
    context = zmq.asyncio.Context()
    async with engine(engine_keys) as address:
        own = EngineClient(context, address, gateway_keys)
        own.start()
        try:
            async with asyncio.timeout(20):
                while own.unready_reason != reason:
                    await asyncio.sleep(0.01)
        finally:
            await own.close()
            context.destroy(linger=0)


def run(*arguments):
    asyncio.run(meet(*arguments))


def test_those_that_have_each_others_keys_talk(folder, caplog):
    caplog.set_level(logging.INFO)
    run(read_keys(folder, "engine"), read_keys(folder, "gateway"), None)
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_a_gateway_with_another_key_is_refused_and_both_sides_say_so(folder, tmp_path, caplog):
    make_keys(tmp_path / "other")
    stranger = read_keys(tmp_path / "other", "gateway")
    stranger = curve.Keys(stranger.public, stranger.secret, read_keys(folder, "gateway").peer)
    run(read_keys(folder, "engine"), stranger, BAD_KEY)
    assert "refused a client at 127.0.0.1: it has not the gateway's key" in caplog.messages
    assert any(message.endswith(BAD_KEY) for message in caplog.messages)


def test_an_engine_that_is_not_the_one_meant_is_refused(folder, tmp_path, caplog):
    make_keys(tmp_path / "other")
    run(read_keys(folder, "engine"), read_keys(tmp_path / "other", "gateway"), BAD_HANDSHAKE)
    assert any("it has not this engine's public key" in message for message in caplog.messages)
    assert any(message.endswith(BAD_HANDSHAKE) for message in caplog.messages)


@pytest.mark.parametrize("keyed", ["engine", "gateway"])
def test_keys_on_one_side_only_do_not_talk(folder, caplog, keyed):
    keys = read_keys(folder, keyed)
    run(keys if keyed == "engine" else None, keys if keyed == "gateway" else None, BAD_HANDSHAKE)
    assert any(message.endswith(BAD_HANDSHAKE) for message in caplog.messages)


def test_keys_are_private_and_never_replaced(folder):
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {
        "engine.key": 0o644,
        "engine.secret": 0o600,
        "gateway.key": 0o644,
        "gateway.secret": 0o600,
    }
    with pytest.raises(FileExistsError, match=r"engine\.key exists; keys are not replaced"):
        make_keys(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "engine.secret").chmod(0o644), "can be read by other users"),
        (lambda f: (f / "gateway.key").unlink(), "cannot read the key .*gateway.key"),
        (lambda f: (f / "gateway.key").write_text("abc"), "gateway.key is no key: 3 characters"),
        (
            lambda f: (f / "engine.key").write_bytes((f / "gateway.key").read_bytes()),
            "not of one pair",
        ),
    ],
)
def test_keys_that_cannot_be_used_say_which_file(folder, spoil, words):
    spoil(folder)
    with pytest.raises(ValueError, match=words):
        read_keys(folder, "engine")


def test_each_side_needs_its_own_files_only(folder):
    (folder / "gateway.secret").unlink()
    keys = read_keys(folder, "engine")
    assert keys.peer == (folder / "gateway.key").read_bytes().strip()
    with pytest.raises(ValueError, match=r"gateway\.secret"):
        read_keys(folder, "gateway")


def test_beyond_this_machine_only_with_keys():
    for address in ("tcp://10.1.2.3:5555", "tcp://a.host.example:5555"):
        with pytest.raises(AddressError, match="or keys"):
            check_peer(address)
        assert check_peer(address, keyed=True) == address
    for address in ("tcp://*:5555", "tcp://0.0.0.0:5555"):
        with pytest.raises(AddressError, match="name the host"):
            check_peer(address, keyed=True)
