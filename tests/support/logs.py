"""What a rank logs."""

from __future__ import annotations

import logging


def log_lines(
    logger: str | logging.Logger = "lightning_dp", level: int = logging.INFO
) -> list[str]:
    """Collect messages of ``logger`` from here on, in this forked rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(logger) if isinstance(logger, str) else logger
    logger.addHandler(handler)
    logger.setLevel(level)
    return lines
