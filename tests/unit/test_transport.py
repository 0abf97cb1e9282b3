"""Addresses and sockets of the wire."""

import asyncio
import errno
import gc
import socket
import stat
import time

import pytest
import zmq
import zmq.asyncio

from rose.serving.transport import (
    AddressError,
    Port,
    bind_router,
    bound_address,
    check_address,
    check_peer,
    make_dealer,
)


@pytest.fixture
def context():
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def bind(context):
    """Binds a router, and keeps it until the test is over."""
    kept = []

    def bind(address):
        kept.append(bind_router(context, address))
        return bound_address(kept[-1])

    return bind


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "http://x",
        "ipc://",
        "tcp://127.0.0.1",
        "tcp://0.0.0.0:5555",
        "tcp://10.1.2.3:1",
        "tcp://127.0.0.1:99999",
        "ipc://" + "x" * 200,
    ],
)
def test_addresses_that_must_not_be_used(address):
    for check in (check_address, check_peer):
        with pytest.raises(AddressError, match="address"):
            check(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "ipc://*"])
def test_an_engine_may_leave_its_place_open_and_a_client_may_not(bind, address):
    assert check_peer(bind(address)).partition("://")[0] == address.partition("://")[0]
    with pytest.raises(AddressError, match="has to name"):
        check_peer(address)


def has_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 1)) == errno.ECONNREFUSED


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_every_loopback_address_works(context, bind, host):
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    bound = bind(f"tcp://{host}:*")
    with make_dealer(context, bound) as dealer:
        dealer.connect(bound)


def test_an_address_in_use_is_a_clear_error(bind, tmp_path):
    for address in ("tcp://127.0.0.1:*", f"ipc://{tmp_path}/e.sock"):
        bound = bind(address)
        with pytest.raises(AddressError, match="cannot listen on"):
            bind(bound)


def test_the_socket_of_an_engine_that_died_is_replaced(bind, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "e.sock"))
    assert bind(f"ipc://{tmp_path}/e.sock") == f"ipc://{tmp_path}/e.sock"


def test_a_file_that_is_no_socket_is_left_alone(bind, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("of value")
    with pytest.raises(AddressError, match="not a socket"):
        bind(f"ipc://{path}")
    assert path.read_text() == "of value"


def test_the_socket_is_for_this_user_alone(bind, tmp_path):
    bind(f"ipc://{tmp_path}/e.sock")
    mode = (tmp_path / "e.sock").stat().st_mode
    assert stat.S_IMODE(mode) & 0o077 == 0


class Pair:
    """A router and a dealer that is connected to it, each with a port."""

    def __init__(self, context, address):
        self.router = bind_router(context, address)
        self.dealer = make_dealer(context, bound_address(self.router))
        self.dealer.connect(bound_address(self.router))
        self.engine, self.client = Port(self.router), Port(self.dealer)

    def close(self):
        self.dealer.close()
        self.router.close()


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def talk(context, address, scenario):
    async def run():
        pair = Pair(context, address)
        try:
            async with asyncio.timeout(20):
                await scenario(pair)
        finally:
            pair.close()

    asyncio.run(run())


def test_messages_that_come_while_others_are_sent_are_received(context, tmp_path):
    async def scenario(pair):
        received = asyncio.Queue()
        tasks = [
            asyncio.create_task(pair.engine.deliver(lambda parts: pair.engine.send(parts))),
            asyncio.create_task(pair.client.deliver(received.put_nowait)),
        ]
        got = 0
        for burst in (1, 2, 50, 1, 500):  # the answers to some arrive while the next ones are sent
            for number in range(burst):
                pair.client.send([b"%d" % number])
                await asyncio.sleep(0)
            for number in range(burst):
                assert [frame.bytes for frame in await received.get()] == [b"%d" % number]
                got += 1
        assert got == 554
        await end(*tasks)

    talk(context, f"ipc://{tmp_path}/e.sock", scenario)


def test_a_message_whose_signal_was_taken_by_another_call_is_received(context, tmp_path):
    async def scenario(pair):
        received = asyncio.Queue()
        task = asyncio.create_task(pair.engine.deliver(received.put_nowait))
        await asyncio.sleep(0.05)
        pair.client.send([b"hello"])
        async with asyncio.timeout(5):
            while not pair.engine.has_messages():  # which takes the signal
                time.sleep(0.001)  # the loop does not look meanwhile
        assert (await received.get())[1].bytes == b"hello"
        await end(task)

    talk(context, f"ipc://{tmp_path}/e.sock", scenario)


def test_an_error_of_whoever_takes_messages_ends_the_delivery(context, tmp_path):
    async def scenario(pair):
        def refuse(parts):
            raise ValueError(parts[1].bytes.decode())

        pair.client.send([b"first"])
        pair.client.send([b"second"])
        with pytest.raises(ValueError, match="first"):
            await pair.engine.deliver(refuse)
        received = asyncio.Queue()
        task = asyncio.create_task(pair.engine.deliver(received.put_nowait))
        assert (await received.get())[1].bytes == b"second"
        await end(task)

    talk(context, f"ipc://{tmp_path}/e.sock", scenario)


def test_a_port_keeps_its_socket(context, tmp_path):
    async def scenario(pair):
        port = Port(bind_router(context, f"ipc://{tmp_path}/other.sock"))
        gc.collect()
        assert not port.has_messages()  # of a closed socket it would raise
        port._owner.close()

    talk(context, f"ipc://{tmp_path}/e.sock", scenario)


def test_what_a_peer_that_is_gone_is_sent_raises(context, tmp_path):
    async def scenario(pair):
        with pytest.raises(zmq.ZMQError):
            pair.engine.send([b"nobody", b"hello"])

    talk(context, f"ipc://{tmp_path}/e.sock", scenario)
