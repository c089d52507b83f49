"""What aiokafka 0.14 does wrong in requests that have no public place to change."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import NoError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest


def correct(client: AIOKafkaClient) -> None:
    """Correct what this client sends and is answered, on each connection that it makes.

    It lets the broker create topics that it asks about, with one partition and default settings: a
    topic that somebody deletes under running workers would be there again, not usable. And it does
    not read the error of an answer that has no offsets: while a coordinator loads its group, or has
    moved, the group would seem to have committed nothing, and all were read from the beginning.
    """
    connect = client._get_conn

    async def connected(*place: Any, **options: Any) -> AIOKafkaConnection | None:
        connection = await connect(*place, **options)
        if connection is not None and not hasattr(connection.send, "is_corrected"):
            connection.send = _corrected(connection.send)
        return connection

    client._get_conn = connected


def _corrected(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(send)
    def sent(request: object, *more: Any, **options: Any) -> Awaitable[Any]:
        if isinstance(request, MetadataRequest):
            request = MetadataRequest(request._topics, allow_auto_topic_creation=False)
        answer = send(request, *more, **options)
        return _checked(answer) if isinstance(request, OffsetFetchRequest) else answer

    sent.is_corrected = True  # type: ignore[attr-defined]  # marks it as wrapped
    return sent


async def _checked(answer: Awaitable[Any]) -> Any:
    """An answer with offsets. Raises its error as KafkaError: the client looks for the coordinator
    then, and asks again if the error is one that passes."""
    response = await answer
    error = for_code(getattr(response, "error_code", NoError.errno))
    if error is not NoError:
        raise error()
    return response
