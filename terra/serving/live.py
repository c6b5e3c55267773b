"""The WebSocket route of live sessions: authorization, the exchange of messages, and closing."""

import asyncio
import hmac
import logging
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from terra.actions import Waypoints
from terra.errors import EngineError
from terra.serving.errors import ApiError
from terra.serving.guard import client_of
from terra.serving.messages import Message, MessageError, Open, read_message
from terra.serving.rollout import Fork
from terra.serving.service import Service
from terra.serving.session import LiveSession, SessionError

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0
_MAX_MISTAKES = 100  # invalid messages after which the connection is closed
# Close codes of RFC 6455: 1000 all is well, 1001 going away, 1008 refused, 1011 the server failed, 1013 try later.
_CODES = {"client": 1000, "max_frames": 1000, "shutdown": 1001, "engine": 1011}


async def live(websocket: WebSocket, service: Service, *, has_key: bool) -> None:
    """Serve one connection from its acceptance to its end; `has_key` tells whether its headers held the API key."""
    await websocket.accept()
    reason, code = "client", 1000
    try:
        service.check_open()
        message = await _first_message(websocket, service)
        if service.settings.api_key is not None and not has_key:
            _check_key(message, service.settings.api_key)
        client = client_of(websocket)
        with service.admit(client) as name:
            reason = await _serve(websocket, service, message, client, name)
            code = _CODES.get(reason, 1008)
    except ApiError as error:
        logger.info("live session refused: %s", error.code)
        reason, code = error.code, 1013 if error.status in (429, 503) else 1008
        await _try_sending(websocket, {"type": "error", "code": error.code, "message": error.message})
    except EngineError as error:
        logger.error("live session ended: %s", error)
        reason, code = "engine", 1011
        await _try_sending(websocket, {"type": "error", "code": "engine_error", "message": str(error)})
    except (WebSocketDisconnect, RuntimeError) as error:
        # Starlette raises RuntimeError if the connection closes while a message is being sent.
        if isinstance(error, RuntimeError) and websocket.application_state.name == "CONNECTED":
            raise
        return
    await _try_sending(websocket, {"type": "closed", "reason": reason}, close=code)


async def _first_message(websocket: WebSocket, service: Service) -> Open:
    try:
        async with asyncio.timeout(service.settings.live.open_seconds):
            message = read_message(await _receive(websocket))
    except TimeoutError:
        raise ApiError(408, "open_timeout", "expected an open message, got none in time") from None
    except MessageError as error:
        raise ApiError(400, "invalid_message", str(error)) from None
    if not isinstance(message, Open):
        raise ApiError(400, "not_open", f"expected an open message first, got {message.type}")
    return message


def _check_key(message: Open, key: str) -> None:
    given = (message.api_key or "").encode()
    if not hmac.compare_digest(given, key.encode()):
        raise ApiError(401, "invalid_api_key", "expected the API key, in the Authorization header or in `api_key`")


async def _serve(websocket: WebSocket, service: Service, message: Open, client: str, name: str) -> str:
    async def send(content: str | bytes) -> None:
        await (websocket.send_bytes(content) if isinstance(content, bytes) else websocket.send_text(content))

    session, start = await service.open(message, client, send)
    await websocket.send_json(_opened(service, name, start))
    service.sessions[name] = session
    if service.draining:
        session.end("shutdown")
    listening = asyncio.create_task(_listen(websocket, session, service.settings.live.idle_seconds))
    running = asyncio.create_task(session.run())
    try:
        await asyncio.wait({listening, running}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done() and not running.done():
            session.end(listening.result())
        return await running
    finally:
        for task in (listening, running):
            task.cancel()
        await asyncio.gather(listening, running, return_exceptions=True)


async def _listen(websocket: WebSocket, session: LiveSession, idle_seconds: float) -> str:
    """Handle a client's messages until the session must end; return the reason."""
    mistakes = 0
    while mistakes < _MAX_MISTAKES:
        try:
            async with asyncio.timeout(idle_seconds):
                text = await _receive(websocket)
        except TimeoutError:
            return "idle"
        try:
            message: Message = read_message(text)
            await session.handle(message)
        except (MessageError, SessionError) as error:
            mistakes += 1
            await session.complain(error.code if isinstance(error, SessionError) else "invalid_message", str(error))
    return "too_many_mistakes"


async def _receive(websocket: WebSocket) -> str:
    """Receive the next message's text; a binary message gives an empty text, which is invalid."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    return message.get("text") or ""


def _opened(service: Service, name: str, start: Fork) -> dict[str, Any]:
    space = service.model.spec.space
    if isinstance(space, Waypoints):
        facts: dict[str, Any] = {"camera": service.settings.camera.to_dict()}
    else:
        facts = {"neutral": space.to_json(space.neutral)}
    return {
        "type": "opened",
        "session": name,
        "model": service.model.name_of(start.adapter),
        "fps": service.model.spec.fps,
        "size": list(service.model.image_size),
        "num_context": start.num_context,
        "frame": start.last.index,
        "seed": start.seed,
        "action_space": space.model_dump(mode="json"),
        **({} if service.model.spec.views is None else {"views": service.model.spec.views.describe()}),
        **({} if start.memory is None else {"memory": start.memory.frames, "map": start.place is not None}),
        **facts,
    }


async def _try_sending(websocket: WebSocket, message: dict[str, Any], close: int | None = None) -> None:
    """Send a last message, and perhaps a close code, to a client that may be gone or not reading."""
    try:
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await websocket.send_json(message)
            if close is not None:
                await websocket.close(close, message.get("reason"))
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        logger.info("a live session's client was gone before the last word")
