"""The Dask cluster of `--cluster`: one that is started here, on loopback alone, or one that runs elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..tables.tables import InputError

WORKERS_MEMORY = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**27,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}
"""Settings of Dask for the workers of a cluster that is started here.

Dask lets them return every freed 64 kB to the system. Blocks of rows are 4 MB, and to get fresh pages for each of them
takes longer than to measure it.
"""


@contextmanager
def connect(
    cluster: str, tls_ca: Path | None = None, tls_cert: Path | None = None, tls_key: Path | None = None
) -> Generator[Any]:
    """A client of a cluster, by which Dask computes while it is open.

    Args:
        cluster: "local:4" for four workers on this machine, which nothing outside of it can reach; or the address of a
            scheduler, "tcp://host:8786" or "tls://host:8786".
        tls_ca: the certificate of the authority that signed those of the cluster, for "tls://".
        tls_cert: the certificate of this client.
        tls_key: its key.
    """
    try:
        import dask.config
        from distributed import Client, LocalCluster
        from distributed.security import Security
    except ImportError as error:
        raise InputError("--cluster needs Dask: pip install 'bayesrule[dask]'.") from error
    kind, _, rest = cluster.partition(":")
    given = {"--tls-ca": tls_ca, "--tls-cert": tls_cert, "--tls-key": tls_key}
    if kind == "local":
        if rest and not (rest.isdigit() and int(rest) > 0):
            raise InputError(f"--cluster local:4 starts four workers on this machine, got {cluster!r}.")
        # Whoever reaches a scheduler can run code: this one listens to processes of this machine alone.
        options: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": None, "threads_per_worker": 1}
        with (
            dask.config.set(WORKERS_MEMORY),
            LocalCluster(int(rest) if rest else None, **options) as local,
            Client(local) as client,
        ):
            yield client
        return
    if kind not in ("tcp", "tls"):
        raise InputError(
            f"--cluster is local:4, or the address of a scheduler, tcp://host:8786 or tls://host:8786, got {cluster!r}."
        )
    security = None
    if any(path is not None for path in given.values()):
        absent = [name for name, path in given.items() if path is None or not path.is_file()]
        if absent or kind != "tls":
            what = f"{absent[0]} must name a file" if absent else f"the address must begin with tls://, got {cluster!r}"
            raise InputError(f"A cluster by TLS takes --tls-ca, --tls-cert and --tls-key together: {what}.")
        security = Security(
            tls_ca_file=str(tls_ca), tls_client_cert=str(tls_cert), tls_client_key=str(tls_key), require_encryption=True
        )
    try:
        client = Client(cluster, security=security, timeout="20s") if security else Client(cluster, timeout="20s")
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if kind == "tls" and isinstance(error, TypeError):  # Dask has no certificates, neither from here nor its own.
            reason = (
                "it asks for certificates. Give --tls-ca, --tls-cert and --tls-key, or put them into Dask's settings."
            )
        raise InputError(f"No scheduler answers at {cluster}: {reason}") from error
    with client:
        yield client
