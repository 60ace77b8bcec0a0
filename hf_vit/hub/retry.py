"""Talking to the Hub: time limits, retries of failures that pass, and error messages of one line."""

import json
import time
from pathlib import Path

from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import hf_raise_for_status

from hf_vit.system.errors import UserError, one_line


MAX_ATTEMPTS = 5
MAX_WAIT = 300  # seconds
TRANSIENT_STATUS = (408, 409, 412, 429, 500, 502, 503, 504)
INVALID_ADDRESS = ("UnsupportedProtocol", "InvalidURL")  # of httpx or httpx2: HF_ENDPOINT is not a URL
# HTTPError is that of httpx or httpx2, whichever huggingface_hub uses; the last two it raises for answers of other servers.
REQUEST_ERRORS = (HTTPError, OSError, json.JSONDecodeError, KeyError)


def set_http_timeout(seconds: float):
    """Make every request of huggingface_hub fail when the Hub is silent for so long, or asks to wait more than `MAX_WAIT`.

    By default, most requests wait forever, and a Retry-After header is obeyed whatever it says.
    """
    session = get_session()

    def limit(request):  # per request, since the library passes other limits or none
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)

    def refuse(response):
        if response.status_code >= 400 and (_retry_after(response) or 0) > MAX_WAIT:
            response.read()
            hf_raise_for_status(response)

    hooks = {
        "request": [*session.event_hooks["request"], limit],
        "response": [*session.event_hooks["response"], refuse],
    }
    set_client_factory(lambda: type(session)(event_hooks=hooks, follow_redirects=True))


def retry(action, explain, log, give_up=lambda error: False):
    """Return `action()`, called again after a growing pause when it fails in a way that may pass.

    In the end, or at once if `give_up(error)`, an OSError is raised with the message `explain(error, attempts)`.
    """
    began = time.monotonic()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return action()
        except (*REQUEST_ERRORS, RuntimeError) as error:  # the latter wraps errors of an upload in huggingface_hub
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
            wait = _wait_before_retry(cause, attempt)
            exhausted = attempt == MAX_ATTEMPTS or time.monotonic() - began > MAX_WAIT
            if wait is None or exhausted or give_up(cause):
                raise UserError(explain(cause, attempt)) from error
            log(f"{summarize_error(cause)}: trying again in {wait:g} s ({attempt} of {MAX_ATTEMPTS})")
            time.sleep(wait)


def _wait_before_retry(error, attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None if it is not worth one."""
    status = status_of(error)
    if status is not None and status not in TRANSIENT_STATUS:
        return None
    # The first two and the last are of the network (huggingface_hub itself gave up with the last); other OSErrors are local.
    transient = (HTTPError, ConnectionError, TimeoutError, LocalEntryNotFoundError)
    if (isinstance(error, OSError) and not isinstance(error, transient)) or type(error).__name__ in INVALID_ADDRESS:
        return None
    requested = None if status is None else _retry_after(error.response)
    wait = 2.0 ** (attempt - 1) if requested is None else requested
    return wait if wait <= MAX_WAIT else None


def _retry_after(response) -> float | None:
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else None


def status_of(error) -> int | None:
    """The HTTP status of an error; None if there was no response."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def url_of(error) -> str:
    """The address of the request that failed; "" if there was none."""
    try:
        return str((error.response.request if status_of(error) is not None else error.request).url)
    except (AttributeError, RuntimeError):
        return ""


def summarize_error(error) -> str:
    """An error or a text on one line of at most 400 characters, without the token."""
    text = one_line(error)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def explain_error(error, repo: str, attempts: int = 1, folder: Path | None = None) -> str:
    """One line on what went wrong between this machine and the Hub when `folder`, if any, was sent, and what to do."""
    status, hub, summary = status_of(error), constants.ENDPOINT, summarize_error(error)
    unchanged = "nothing on this disk has changed"
    again = f"{unchanged}; the same command goes on, and what has arrived is not sent again"
    not_a_hub = isinstance(error, json.JSONDecodeError | KeyError) or type(error).__name__ in INVALID_ADDRESS
    if status in (405, 501) or not_a_hub:
        return f"{hub} does not answer as a Hub does ({summary}): check HF_ENDPOINT; {unchanged}"
    if status == 404 or isinstance(error, RepositoryNotFoundError):
        unknown = f"knows no {repo}, or no such revision of it, or does not show it to this token ({status})"
        return f"{hub} {unknown}: check the name, --revision and HF_ENDPOINT; {unchanged}"
    if status == 401:
        login = "log in with `hf auth login`, or set HF_TOKEN to one that may write"
        return f"{hub} does not accept the token (401): {login}; {unchanged}"
    if status == 403:
        reason = summarize_error(error.server_message or "no reason is given")
        return (
            f"the token may not write to {repo} (403: {reason}): take a --repo under your own name or an organisation of yours "
            f"if {repo.partition('/')[0]} is neither, or a token with write access; {unchanged}"
        )
    if status in (409, 412):
        return f"others changed {repo} while this was sent ({status}), {attempts} times: wait for them; {again}"
    if status == 413 and folder is not None:
        sizes = [(file.stat().st_size, str(file.relative_to(folder))) for file in folder.rglob("*") if file.is_file()]
        largest = ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for size, name in sorted(sizes, reverse=True)[:3])
        return f"{hub} takes no files so large (413): the largest are {largest}: check the limits of your plan; {unchanged}"
    if status == 429:
        seconds = error.response.headers.get("Retry-After", "some")
        return f"{hub} asks to wait {seconds} s (429): run it again then; {again}"
    if status is not None and status >= 500:
        return f"{hub} fails ({status}), {attempts} times: run it again later; {again}"
    if "Timeout" in type(error).__name__:
        advice = "check the connection, or allow more by --timeout"
        return f"{hub} gave no answer in time, {attempts} times: {advice}; {again}"
    if status is None and isinstance(error, HTTPError | ConnectionError):
        broken = f"cannot be reached, or the connection broke ({summary}), {attempts} times"
        return f"{hub} {broken}: check the connection and HF_ENDPOINT; {again}"
    return f"{repo}: {summary}; {unchanged}"
