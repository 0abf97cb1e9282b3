"""Serving: wire protocol, engine process, client, HTTP gateway, command line."""
