"""A grpc.aio server whose one handler returns an empty answer: the lower bound for the cost of P12's heartbeats.

Law of this file: started as a module, with `--bind host:port` as a lighthouse is. Other flags are for lighthouses.
"""

from __future__ import annotations

import argparse
import asyncio

import grpc

from tft_coord.wire import services


async def serve(bind: str) -> None:
    """Answer until the process is killed."""

    async def answer(request: bytes, context: object) -> bytes:
        return b""

    service, _, method = services.LIGHTHOUSE_HEARTBEAT.strip("/").partition("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(bind)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    asyncio.run(serve(parser.parse_known_args()[0].bind))
