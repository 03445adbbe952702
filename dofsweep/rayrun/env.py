"""Environment of the Ray processes that dofsweep starts."""

from __future__ import annotations

import os

NAMESPACE = "dofsweep"

QUIET = {
    # Usage statistics off; a "disabled" report would still be posted, so it gets a dead address.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    # Every port of a cluster we start listens on loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A busy machine may need longer than the default 30 s to bring its raylet up.
    "RAY_raylet_start_wait_time_s": "120",
    # SIGTERM ends the cluster at once; by default it may drain for half a minute.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}

TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # bounds the wait of each ray.train.report
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a worker prints appears twice
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # the dashboard's Train tab
}

PASSED_ON = (
    "DOFSWEEP_HOME",
    "DOFSWEEP_DB",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_DATASETS_CACHE",
    "TRANSFORMERS_OFFLINE",
    "OMP_NUM_THREADS",
)
"""Variables of the caller that a job must see, since a job inherits the cluster's environment."""


def job_env() -> dict[str, str]:
    """Variables of the caller for a submitted job."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}
