"""The HTTP gateway. Never imports torch."""

from rose.serving.gateway.app import create_app
from rose.serving.gateway.settings import GatewaySettings

__all__ = ["GatewaySettings", "create_app"]
