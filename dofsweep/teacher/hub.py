"""Is the model hub there? Asked once, cheaply, before a library retries for minutes."""

from __future__ import annotations

import queue
import threading
from urllib.parse import urlsplit

PROBE_S = 5.0
"""Longest time that the question may take, name resolution included."""


def hub_problem(timeout_s: float = PROBE_S) -> str | None:
    """Why the hub cannot be used, or None where it answers.

    Any HTTP answer counts: what it says is for the download itself to tell. Proxies and
    HF_ENDPOINT are honoured, as the request goes through the hub library's own session.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    if not _is_url(endpoint()):
        return f"HF_ENDPOINT={endpoint()} is not an http or https address"
    answer: queue.Queue[str | None] = queue.Queue()
    # Name resolution has no timeout of its own, hence a thread that can be left behind.
    thread = threading.Thread(target=_ask, args=(answer, timeout_s), daemon=True)
    thread.start()
    try:
        return answer.get(timeout=timeout_s)
    except queue.Empty:
        return f"{endpoint()} did not answer within {timeout_s:g} s"


def endpoint() -> str:
    """Address of the hub in use."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def http_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises for a failed request.

    Which HTTP client is below it has changed twice, so its base error is taken from the class
    that the library builds on it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__mro__[1], OSError


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _ask(answer: queue.Queue[str | None], timeout_s: float) -> None:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint(), timeout=timeout_s, follow_redirects=False)
    except http_errors() as err:
        answer.put(f"{endpoint()} cannot be reached ({err})")
    else:
        answer.put(None)
