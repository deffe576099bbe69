"""Errors that are one sentence in a notebook, without the frames of this package above it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ..errors import HeteroSSFLError

P = ParamSpec("P")
R = TypeVar("R")


def short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Let our own errors start where the user called. All others, also those of the user's code, keep all frames."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except HeteroSSFLError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
