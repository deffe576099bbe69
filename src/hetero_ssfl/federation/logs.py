"""Structured logs for unattended processes: one JSON object per line, on standard error and in a file."""

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ..runs.events import Answered, Event, Progressed, Warned

log = logging.getLogger(__name__)

MAX_BYTES, BACKUPS = 5_000_000, 3  # of a log file


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
        _add(logger, who, logging.StreamHandler(sys.stderr))
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def log_to_file(who: str, file: Path) -> None:
    """Log to a file, too, which is rotated. A file that cannot be written is not an error."""
    logger = logging.getLogger("hetero_ssfl")
    if not any(getattr(handler, "baseFilename", "") == str(file.absolute()) for handler in logger.handlers):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)  # the file itself comes with its first line
            _add(logger, who, RotatingFileHandler(file, maxBytes=MAX_BYTES, backupCount=BACKUPS, delay=True))


def _add(logger: logging.Logger, who: str, handler: logging.Handler) -> None:
    handler.setFormatter(JsonLines(who))
    logger.addHandler(handler)


def log_event(event: Event) -> None:
    if isinstance(event, Warned):
        log.warning("%s", event.text, extra={"event": event.to_json()})
    elif not isinstance(event, Answered | Progressed):
        log.info("%s", event.kind, extra={"event": event.to_json()})
