"""Keys that protect the connection between gateways and engines beyond one machine (CURVE).

Each side has a pair of keys and knows the public one of the other. The connection is encrypted, and
neither talks to anybody else.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import encode as z85

from rose.serving.repeated import RepeatedWarning

log = logging.getLogger(__name__)

Role = Literal["engine", "gateway"]
_PEER: dict[Role, Role] = {"engine": "gateway", "gateway": "engine"}
KEY_CHARS = 40
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key is let in (its RFC 27)
NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

_refused_key = RepeatedWarning(log, "refused a client at %s: it has not the gateway's key")
_refused_form = RepeatedWarning(
    log, "refused a client: it has not this engine's public key, or none at all (%s)"
)


@dataclass(frozen=True, slots=True)
class Keys:
    """One side's keys, each 40 characters of Z85.

    Attributes:
        public: Its own.
        secret: Its own.
        peer: The other side's public key.
    """

    public: bytes
    secret: bytes
    peer: bytes


def make_keys(folder: Path) -> list[Path]:
    """Write a pair of keys for the engines and one for the gateways, and return the files.

    Raises:
        FileExistsError: there are keys already.
        OSError: the folder cannot be written.
    """
    paths = [folder / f"{role}.{kind}" for role in _PEER for kind in ("key", "secret")]
    if found := [path for path in paths if path.exists()]:
        raise FileExistsError(f"{found[0]} exists; keys are not replaced")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in _PEER:
        public, secret = zmq.curve_keypair()
        _write(folder / f"{role}.key", public, 0o644)
        _write(folder / f"{role}.secret", secret, 0o600)
    return paths


def _write(path: Path, key: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")


def read_keys(folder: Path, role: Role) -> Keys:
    """Read the keys of one side: `ROLE.secret`, `ROLE.key` and the other side's `.key`.

    Raises:
        ValueError: a file is missing, is no key, or a secret can be read by others.
    """
    secret = folder / f"{role}.secret"
    key = _read(secret)
    if secret.stat().st_mode & 0o077:
        raise ValueError(f"{secret} can be read by other users; chmod 600 it")
    public = _read(folder / f"{role}.key")
    if zmq.curve_public(key) != public:
        raise ValueError(f"{secret} and {role}.key are not of one pair")
    return Keys(public, key, _read(folder / f"{_PEER[role]}.key"))


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        message = f"cannot read the key {path}: {error.strerror}; `rose keys FOLDER` makes keys"
        raise ValueError(message) from None
    if len(key) != KEY_CHARS:
        raise ValueError(f"{path} is no key: {len(key)} characters instead of {KEY_CHARS}")
    return key


def ask_for(socket: "zmq.asyncio.Socket", keys: Keys) -> None:
    """Let a client's socket talk only to the engine that has the key."""
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = keys.public
    socket.curve_serverkey = keys.peer


class Doorkeeper:
    """Lets only the gateway's key in at an engine's socket, and logs who came without."""

    def __init__(
        self, context: "zmq.asyncio.Context", socket: "zmq.asyncio.Socket", keys: Keys
    ) -> None:
        """Guard `socket`, which is not bound yet; there is one doorkeeper a context.

        Nobody is let in before `run` runs.
        """
        self._allowed = keys.peer
        self._questions = context.socket(zmq.REP)
        self._questions.bind(ZAP_ADDRESS)
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.zap_domain = b"rose"
        self._monitor = socket.get_monitor_socket(NO_HANDSHAKE)
        self._socket = socket

    async def run(self) -> None:
        """Answer until cancelled."""
        await asyncio.gather(self._answer_loop(), self._watch_loop())

    def close(self) -> None:
        """Close what it listens with."""
        self._socket.disable_monitor()
        self._questions.close(linger=0)

    async def _answer_loop(self) -> None:
        while True:
            await self._questions.send_multipart(
                self._answer(await self._questions.recv_multipart())
            )

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        """Answer ZeroMQ: version, its number, status, text, user, metadata."""
        version, number, _domain, address, _identity, mechanism, *credentials = question
        let_in = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(z85(credentials[0]), self._allowed)
        )
        if not let_in:
            _refused_key.note(address.decode(errors="replace"))
        status = (b"200", b"OK", b"gateway") if let_in else (b"400", b"unknown key", b"")
        return [version, number, *status, b""]

    async def _watch_loop(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            _refused_form.note(zmq.Event(event["event"]).name)
