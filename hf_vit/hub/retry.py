"""Requests to the Hub: a time limit, and retries of failures that pass. The library itself does not retry a commit."""

import json
import time
from collections.abc import Callable

from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

from hf_vit.system.errors import UserError, one_line


MAX_ATTEMPTS, MAX_WAIT, TIMEOUT = 5, 300, 60  # the latter two are seconds
TRANSIENT_STATUS = (408, 409, 412, 429, 500, 502, 503, 504)
# HTTPError is that of httpx; the last two the library raises for answers of other servers, RuntimeError for a broken upload.
REQUEST_ERRORS = (HTTPError, OSError, RuntimeError, json.JSONDecodeError, KeyError)
HINTS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to one that may write",
    403: "take a --repo under your own name, or a token that may write there",
    404: "check the name and --revision",
}


def set_http_timeout(seconds: float = TIMEOUT):
    """Make every request of huggingface_hub fail when the Hub is silent for so long; by default, most wait forever."""
    session = get_session()

    def limit(request):  # per request, since the library passes other limits or none
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)

    hooks = {**session.event_hooks, "request": [*session.event_hooks["request"], limit]}
    set_client_factory(lambda: type(session)(event_hooks=hooks, follow_redirects=True))


def retry(action: Callable, log: Callable[[str], None], give_up: Callable = lambda error: False):
    """`action()`, called again after a growing pause while it fails in a way that may pass.

    Raises:
        ValueError: in the end, or at once if `give_up(error)`; one line, with what to do.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return action()
        except REQUEST_ERRORS as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
            wait = _wait_before_retry(cause, attempt)
            if wait is None or attempt == MAX_ATTEMPTS or give_up(cause):
                raise UserError(explain_error(cause)) from error
            log(f"{one_line(cause)[:400]}: trying again in {wait:g} s ({attempt} of {MAX_ATTEMPTS})")
            time.sleep(wait)


def _wait_before_retry(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None if it is not worth one."""
    status = status_of(error)
    if status is None:  # a broken connection passes; an error of this disk, or of an answer that is none, does not
        transient = isinstance(error, HTTPError | ConnectionError | TimeoutError | LocalEntryNotFoundError)
        return 2.0 ** (attempt - 1) if transient else None
    asked = error.response.headers.get("Retry-After", "")
    wait = float(asked) if asked.isdigit() else 2.0 ** (attempt - 1)
    return wait if status in TRANSIENT_STATUS and wait <= MAX_WAIT else None


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error; None if there was no response."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def explain_error(error: Exception) -> str:
    """One line on what went wrong between this machine and the Hub, and what to do."""
    hint = HINTS.get(status_of(error), f"check the connection and HF_ENDPOINT ({constants.ENDPOINT})")
    return f"{one_line(error)[:400]}; {hint}; nothing on this disk has changed, and the same command continues"
