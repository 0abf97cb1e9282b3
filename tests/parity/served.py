"""A checkpoint behind the whole way of a request: HTTP, gateway, wire, engine; in this process."""

import asyncio
from pathlib import Path

import httpx

from rose.runtime.build import ModelOptions, build
from rose.serving.gateway.app import create_app
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.replicas import ReplicaSet
from tests.unit.engine_rig import RunningEngine, connected


def post(
    checkpoint: Path,
    *requests: tuple[str, dict],
    settings: GatewaySettings | None = None,
    **options,
) -> list[httpx.Response]:
    """Serve a checkpoint, send requests (path and body) at one time, and return the answers."""
    options = {"device": "cpu", "max_batch_tokens": 32, **options}
    served = build(ModelOptions(path=str(checkpoint), name="tiny", **options))
    address = f"ipc://{checkpoint}/e.sock"

    async def run() -> list[httpx.Response]:
        engine = RunningEngine(served, address)
        try:
            async with connected(address) as client:
                await client.wait_ready()
                app = create_app({"tiny": ReplicaSet([client])}, settings or GatewaySettings())
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://rose") as http:
                    sent = [http.post(path, json=body, timeout=60) for path, body in requests]
                    return await asyncio.gather(*sent)
        finally:
            await engine.close()

    try:
        return asyncio.run(run())
    finally:
        served.close()
