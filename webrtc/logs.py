"""Logs as one JSON object a line, with the session that a line belongs to."""

from __future__ import annotations

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time (UTC), level, logger, message, session, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        body: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        session = getattr(record, "session", None)
        if session is not None:
            body["session"] = session
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


def use_json_logs() -> None:
    """Makes the handlers of the root logger write JSON, the life of each session included."""
    package = logging.getLogger("webrtc")
    package.setLevel(min(package.getEffectiveLevel(), logging.INFO))
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
