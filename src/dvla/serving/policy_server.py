"""A policy behind a websocket, in the protocol of openpi's client.

The server speaks first: a message that describes the policy. Then each message of the client is an observation, and the
answer is the policy's with ``server_timing``: ``infer_ms``, and ``prev_total_ms``, which the last one took from its
observation to its answer. Whatever goes wrong is told as a text with the traceback, and then the connection is closed with
code 1011. ``GET /healthz`` is answered with OK.
"""

from __future__ import annotations

import http
import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from dvla.config import ConfigError
from dvla.robot_policy import RobotPolicy
from dvla.serving.array_messages import pack, unpack

_LARGEST_MESSAGE = 64 << 20
"""Bytes: pictures of many cameras, but not all of the memory."""
_INTERNAL_ERROR = 1011

logger = logging.getLogger(__name__)


@contextmanager
def served(policy: RobotPolicy, host: str, port: int) -> Iterator[int]:
    """Answer any number of clients within a block, one question at a time; gives the port.

    Pages in a browser are refused: they could reach it from anywhere.

    Args:
        policy: What answers.
        host: Name or address of the interface to listen on.
        port: 0 takes a free one.

    Raises:
        ConfigError: It cannot listen there.
    """
    description, one_at_a_time = pack(policy.description), threading.Lock()

    def converse(connection: ServerConnection) -> None:
        try:
            connection.send(description)
            last_ms: dict[str, float] = {}
            for message in connection:
                begin = time.monotonic()
                observation = unpack(_bytes(message))
                with one_at_a_time:
                    begin_infer = time.monotonic()
                    answer = policy.infer(observation)
                    infer_ms = 1e3 * (time.monotonic() - begin_infer)
                connection.send(pack(answer | {"server_timing": {"infer_ms": infer_ms} | last_ms}))
                last_ms = {"prev_total_ms": 1e3 * (time.monotonic() - begin)}
        except ConnectionClosed:
            pass
        except Exception as error:  # the client's fault or the policy's: the server goes on
            logger.warning("a client gets an error: %s: %s", type(error).__name__, error)
            with suppress(ConnectionClosed):
                connection.send(traceback.format_exc())
                connection.close(_INTERNAL_ERROR, "the error is in the message before")

    try:
        server = serve(
            converse,
            host,
            port,
            origins=[None],
            compression=None,
            max_size=_LARGEST_MESSAGE,
            max_queue=1,
            process_request=_health,
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host={host} port={port}: cannot listen there ({error})") from error
    thread = threading.Thread(target=server.serve_forever, name="dvla-server")
    thread.start()
    try:
        yield server.socket.getsockname()[1]
    finally:
        server.shutdown()  # closes connections, after the answers that are on their way
        thread.join()


def _bytes(message: Any) -> bytes:
    if not isinstance(message, bytes):
        raise TypeError("an observation must be a binary message")
    return message


def _health(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(http.HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None
