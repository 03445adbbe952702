"""Sweeps as Ray jobs: submit, follow, stop. The id of the job is the id of the sweep."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dofsweep.errors import ClusterError
from dofsweep.rayrun.env import job_env
from dofsweep.rayrun.local import find_cluster, token_path

PING_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ClusterAddress:
    """Where a cluster's Jobs API is, and what lets us in."""

    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def is_loopback(self) -> bool:
        """Whether the cluster is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def given_address(text: str, home: Path) -> ClusterAddress:
    """The cluster at an address that the user gave: ``http://host:8265`` or ``host:8265``.

    The token is the local cluster's own, or Ray's: RAY_AUTH_TOKEN, or a file named by
    RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.
    Raises:
        ClusterError: not an address.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port
    except ValueError:
        valid = False
    if not valid or parts.username or parts.password:
        raise ClusterError(
            f"address {text!r} is not that of a Ray dashboard: give http://HOST:8265 "
            "(the address that `ray start --head` prints for the dashboard)"
        )
    url = f"{parts.scheme}://{parts.netloc}"
    local = find_cluster(home)
    if local and local.dashboard_url == url:
        return ClusterAddress(url, token_path(home).read_text().strip())
    return ClusterAddress(url, _ray_token())


def _ray_token() -> str | None:
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def ping(address: ClusterAddress) -> dict[str, Any]:
    """Versions that the cluster reports.

    Raises:
        ClusterError: it does not answer in a few seconds, or refuses our token.
    """
    request = urllib.request.Request(f"{address.url}/api/version")
    if address.token:
        request.add_header("Authorization", f"Bearer {address.token}")
    try:
        with urllib.request.urlopen(request, timeout=PING_TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as err:
        if err.code in {401, 403}:
            raise ClusterError(
                f"the cluster at {address.url} refuses our token ({err.code}); "
                "set RAY_AUTH_TOKEN to its token"
            ) from err
        raise ClusterError(f"{address.url} answers {err.code}; is it a Ray dashboard?") from err
    except (OSError, ValueError) as err:
        reason = getattr(err, "reason", err)
        raise ClusterError(
            f"no Ray cluster answers at {address.url} ({reason}); check the address, or leave "
            "--address out to start a local cluster"
        ) from err
    if not isinstance(found, dict) or "ray_version" not in found:
        raise ClusterError(f"{address.url} answers, but is not a Ray dashboard")
    return found


class Jobs:
    """The Jobs API of one cluster."""

    def __init__(self, address: ClusterAddress) -> None:
        logging.getLogger("ray").setLevel(logging.WARNING)
        from ray.job_submission import JobSubmissionClient

        headers = {"Authorization": f"Bearer {address.token}"} if address.token else None
        with _cluster_errors(address.url):
            self._client = JobSubmissionClient(address.url, headers=headers)

    def submit(self, sweep_id: str, *, model: str, env: dict[str, str]) -> None:
        """Start the driver of a sweep as a job.

        Raises:
            ClusterError: the cluster does not take the job; all methods raise it when the
                cluster is gone or refuses.
        """
        entrypoint = f"{shlex.quote(sys.executable)} -m dofsweep.driver {shlex.quote(sweep_id)}"
        with _cluster_errors("the cluster did not take the job"):
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=sweep_id,
                runtime_env={"env_vars": job_env() | env},
                metadata={"sweep": sweep_id, "model": model},
            )

    def status(self, sweep_id: str) -> str | None:
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; None for an unknown job."""
        with _cluster_errors("cannot ask for the job"):
            try:
                return str(self._client.get_job_status(sweep_id).value)
            except RuntimeError as err:
                if "404" not in str(err):
                    raise
                return None

    def message(self, sweep_id: str) -> str:
        """What the cluster says of how the job ended; nothing if it can no longer say."""
        with contextlib.suppress(RuntimeError, ConnectionError):
            return str(self._client.get_job_info(sweep_id).message or "")
        return ""

    def stop(self, sweep_id: str) -> None:
        """Ask a job to end: SIGTERM, then SIGKILL some seconds later."""
        with _cluster_errors(f"cannot stop {sweep_id}"):
            self._client.stop_job(sweep_id)

    def forget(self, sweep_id: str) -> None:
        """Make the id of a job that has ended free for another; unknown ids are free already."""
        status = self.status(sweep_id)
        if status is None:
            return
        if status in {"PENDING", "RUNNING"}:
            raise ClusterError(f"job {sweep_id} is {status}; stop it first")
        with _cluster_errors(f"cannot forget job {sweep_id}"):
            self._client.delete_job(sweep_id)

    def logs(self, sweep_id: str) -> str:
        """All that the driver has printed."""
        with _cluster_errors(f"no logs of {sweep_id}"):
            return str(self._client.get_job_logs(sweep_id))

    def running(self) -> list[str]:
        """Ids of the jobs that have not ended; none on a cluster that is gone."""
        try:
            jobs = self._client.list_jobs()
        except (RuntimeError, ConnectionError):
            return []
        return [str(job.submission_id) for job in jobs if not job.status.is_terminal()]


@contextlib.contextmanager
def _cluster_errors(what: str) -> Iterator[None]:
    """What the client of the Jobs API raises, as one line of ours."""
    try:
        yield
    except (RuntimeError, ConnectionError) as err:
        lines = str(err).strip().splitlines()
        raise ClusterError(f"{what}: {lines[0] if lines else type(err).__name__}") from err
