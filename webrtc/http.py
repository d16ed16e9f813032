"""What all routes share: errors as problem+json, tokens, origins, bounded bodies."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import math
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rtgen.errors import ConfigError, RtgenError, StreamClosed
from webrtc.config import ServerConfig
from webrtc.metrics import Metrics
from webrtc.signalling import Problem

logger = logging.getLogger(__name__)

OPEN_ROUTES = ("/", "/static", "/healthz", "/readyz", "/config")
"""Served without a token: pages carry none, and probes need none."""
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self' ws: wss:; frame-ancestors 'self'",
}
CORS_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, If-Match",
    "Access-Control-Expose-Headers": "Location, ETag, Link, Accept-Patch, Retry-After",
    "Access-Control-Max-Age": "600",
}


def problem_response(problem: Problem) -> web.Response:
    """The answer to a refused request."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(problem.retry_after_s), 1))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=problem.status,
        text=json.dumps(problem.to_dict()),
        content_type="application/problem+json",
        headers=headers,
    )


def as_problem(error: RtgenError) -> Problem:
    """An error of ours as an answer."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, StreamClosed):
        return Problem(404, "not_found", str(error))
    if isinstance(error, ConfigError):
        return Problem(400, "invalid", str(error))
    return Problem(422, "invalid", str(error))


def guard(config: ServerConfig, metrics: Metrics) -> Middleware:
    """The middleware around every route."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        try:
            check_host(request, config)
            check_origin(request, origin, config)
            if request.method == "OPTIONS":
                response: web.StreamResponse = web.Response(status=204)
            else:
                check_token(request, config)
                response = await handler(request)
        except RtgenError as error:
            response = problem_response(as_problem(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            reason = {404: "not_found", 405: "invalid", 413: "too_large"}.get(error.status)
            response = problem_response(Problem(error.status, reason or "invalid", error.reason))
        resource = request.match_info.route.resource
        route = "other" if resource is None else resource.canonical
        metrics.add("rtgen_http_requests_total", route=route, status=str(response.status))
        if not response.prepared:
            for name, value in SECURITY_HEADERS.items():
                response.headers.setdefault(name, value)
            if origin is not None and origin in config.cors_origins:
                response.headers["Access-Control-Allow-Origin"] = origin
                response.headers["Vary"] = "Origin"
                response.headers.update(CORS_HEADERS)
        return response

    return middleware


def check_token(request: web.Request, config: ServerConfig) -> None:
    """Compares the bearer token, which websockets of browsers carry as a subprotocol.

    Raises:
        Problem: 401.
    """
    if config.token is None:
        return
    path = request.path
    if path in OPEN_ROUTES or path.startswith("/static/"):
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
        if protocol.strip().startswith("bearer."):
            given = protocol.strip().removeprefix("bearer.")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), config.token.encode()):
        raise Problem(401, "unauthorized", "this server needs its token as Authorization: Bearer")


def check_origin(request: web.Request, origin: str | None, config: ServerConfig) -> None:
    """Pages of other origins may use the server only if they are named.

    Raises:
        Problem: 403.
    """
    if origin is None or origin in config.cors_origins:
        return
    if urlsplit(origin).netloc.lower() != request.host.lower():
        raise Problem(403, "forbidden_origin", f"pages of {origin} may not use this server")


def check_host(request: web.Request, config: ServerConfig) -> None:
    """A server for this machine alone answers to its names only: no page may rebind another.

    Raises:
        Problem: 403.
    """
    if not is_loopback(config.host):
        return
    name = urlsplit(f"//{request.host}").hostname
    if name is None or not is_loopback(name):
        raise Problem(403, "forbidden_origin", f"this server does not answer to {request.host}")


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_json(request: web.Request, limit: int) -> object:
    """Reads a bounded JSON body.

    Raises:
        Problem: 413 too large; 400 no JSON.
    """
    body = await read_body(request, limit)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "invalid", f"the body must be JSON: {error}") from error


async def read_body(request: web.Request, limit: int) -> bytes:
    """Reads a body of at most `limit` bytes; counts while it comes.

    Raises:
        Problem: 413.
    """
    too_large = Problem(413, "too_large", f"the body may have {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_chunked(64 * 1024):
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)
