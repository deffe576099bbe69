"""Structured logs for unattended processes: one JSON object per line on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "who": self.who, "text": record.getMessage()}
        line |= getattr(record, "event", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(who: str) -> logging.Logger:
    """Log all records of this package under the name `who` of the node or server. Set up once per process."""
    logger = logging.getLogger("hetero_ssfl")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines(who))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
