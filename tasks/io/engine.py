"""Where work on buckets runs: threads of this process, a local cluster of processes, or a Dask cluster given by address.

One function applied to each item; results come back in the order of the items, so nothing downstream can depend on who was
fast. Knows no lake and no table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tasks.errors import SettingsError

Item = TypeVar("Item")
Result = TypeVar("Result")

ALIGNMENT = "ACERO_ALIGNMENT_HANDLING"
"""Arrow tables that crossed Dask's wire are not aligned; without this every group-by on them prints a warning."""
CONNECT_S = 10


def map_buckets(fn: Callable[[Item], Result], items: Sequence[Item], *, scheduler: str, workers: int) -> list[Result]:
    """fn of every item, in the order of the items.

    Args:
        fn: a function at the top of a module, so that another process can find it.
        items: its arguments; picklable where the scheduler is not "threads".
        scheduler: "threads" (Dask's threads in this process), "local" (a cluster of processes on loopback, without a
            dashboard, that ends with the call), or the address of a running scheduler, "tcp://host:port".
        workers: threads or processes; a cluster given by address has its own.

    Raises:
        SettingsError: no scheduler answers at the address; carries key, found, expected.
        Exception: whatever fn raises, of the first item in order that fails.
    """
    os.environ.setdefault(ALIGNMENT, "reallocate")
    if not items:
        return []
    if scheduler == "threads":
        return _on_threads(fn, items, workers)
    from distributed import Client, LocalCluster

    if scheduler == "local":
        with (
            LocalCluster(  # type: ignore[no-untyped-call]
                n_workers=min(workers, len(items)),
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                env={ALIGNMENT: "reallocate"},
            ) as cluster,
            Client(cluster) as client,  # type: ignore[no-untyped-call]
        ):
            return _on_cluster(client, fn, items)
    try:
        client = Client(scheduler, timeout=f"{CONNECT_S}s")  # type: ignore[no-untyped-call]
    except (TimeoutError, OSError, ValueError) as error:
        raise SettingsError(
            f"setting scheduler: nothing answers at {scheduler} within {CONNECT_S} s ({error}). Start one with `dask scheduler`, "
            "correct the address, or use threads or local.",
            key="scheduler",
            found=scheduler,
            expected="the address of a running Dask scheduler",
        ) from error
    with client:
        client.run(_prepare_worker)
        return _on_cluster(client, fn, items)


def _on_threads(fn: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    # The bare scheduler: Dask's collections would load its whole distributed part, half a second a process.
    from dask.threaded import get

    # A task without arguments: Dask would search arguments for the names of other tasks.
    tasks = {f"item-{number}": (partial(fn, item),) for number, item in enumerate(items)}
    return list(get(tasks, list(tasks), num_workers=workers))


def _on_cluster(client: object, fn: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    # pure=False: the same item a second time runs a second time; reuse belongs to the lake.
    futures = client.map(fn, items, pure=False)  # type: ignore[attr-defined]
    return list(client.gather(futures))  # type: ignore[attr-defined]


def _prepare_worker() -> None:
    os.environ.setdefault(ALIGNMENT, "reallocate")
