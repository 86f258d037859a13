"""A cluster of two worker processes on loopback, for tests."""

from contextlib import contextmanager


@contextmanager
def two_workers():
    """A client of a cluster that nothing outside of this machine can reach."""
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(host="127.0.0.1", memory_limit=0, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
