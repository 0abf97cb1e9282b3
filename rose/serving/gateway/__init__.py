"""The HTTP gateway. Never imports torch."""
