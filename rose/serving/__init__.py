"""Serving: the wire protocol, the engine process, the client, the HTTP gateway, the command line."""
