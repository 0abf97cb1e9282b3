"""The HTTP gateway: JSON, templates, tokenisation. It never imports torch."""
