"""Ports for the servers that tests start."""

import contextlib
import random
import socket

# Below those that systems give to clients, one of which could take the port before the server does.
PORTS = range(20_000, 32_000)


def free_port(host="127.0.0.1"):
    """A port that nobody uses."""
    draw = random.SystemRandom()  # not seeded, so that workers draw different ones
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
