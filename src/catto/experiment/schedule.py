"""Simulate a plan on a number of GPUs: when each stage starts, how long everything takes and how busy the GPUs are."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Job:
    """A stage as a scheduler sees it."""

    key: str
    needs: tuple[str, ...]  # keys of jobs in the same plan
    seconds: float
    gpus: float = 0.0  # below 1 a share of one, above it whole ones


@dataclass(frozen=True)
class Schedule:
    """When each job starts, in seconds, on which GPUs, and what follows from it."""

    starts: Mapping[str, float]
    places: Mapping[str, list[int]]  # numbers of GPUs
    makespan: float
    critical: tuple[str, ...]  # the chain of jobs that no number of GPUs shortens, first to last
    shortest: float  # its length
    busy: float  # GPU-seconds of all jobs
    utilisation: float  # of the GPUs, over the makespan


def simulate(jobs: Sequence[Job], gpus: int) -> Schedule:
    """Start each job as soon as its needs are done and its GPUs are free, the one with most work behind it first.

    jobs: what is needed comes first. A job that finds too few free GPUs lets smaller ones pass, as Ray and Slurm do;
    jobs without a GPU never wait for one. Shares are parts of one GPU, of the fullest with room. Raises ValueError for
    a job that needs more GPUs than there are.

    >>> jobs = [Job("sft", (), 60, 1), Job("dpo", ("sft",), 30, 1), Job("catto", ("sft",), 40, 1)]
    >>> simulate(jobs, 1).makespan, simulate(jobs, 2).makespan, simulate(jobs, 2).critical
    (130.0, 100.0, ('sft', 'catto'))
    """
    after: dict[str, list[str]] = defaultdict(list)
    for job in jobs:
        if job.gpus > gpus:
            raise ValueError(f"{job.key} needs {job.gpus:g} GPUs at once, and there are {gpus:g}")
        for need in job.needs:
            after[need].append(job.key)
    named, tail = {job.key: job for job in jobs}, dict[str, float]()  # tail: the longest chain that starts with a job
    for job in reversed(jobs):
        tail[job.key] = job.seconds + max((tail[key] for key in after[job.key]), default=0.0)
    waiting = {job.key: len(job.needs) for job in jobs}
    # By GPUs: jobs that could start, longest tail first.
    ready: dict[float, list[tuple[float, str]]] = defaultdict(list)
    running: list[tuple[float, str]] = []
    starts, places = dict[str, float](), dict[str, list[int]]()
    free = [1.0] * min(gpus, sum(ceil(job.gpus) for job in jobs))  # of each GPU that can be in use
    now, new = 0.0, [job.key for job in jobs if not job.needs]
    while running or len(starts) < len(jobs):
        for key in new:
            heapq.heappush(ready[named[key].gpus], (-tail[key], key))
        while fitting := [(queue[0], size) for size, queue in ready.items() if queue and _room(free, size) is not None]:
            (_, key), size = min(fitting)
            heapq.heappop(ready[size])
            starts[key], places[key] = now, _room(free, size) or []
            for number in places[key]:
                free[number] -= min(size, 1.0)
            heapq.heappush(running, (now + named[key].seconds, key))
        now, ended = heapq.heappop(running)
        new = []
        for number in places[ended]:
            free[number] += min(named[ended].gpus, 1.0)
        for key in after[ended]:
            waiting[key] -= 1
            new += [key] if not waiting[key] else []
    critical, links = [], [job.key for job in jobs if not job.needs]
    while links:
        critical.append(max(links, key=lambda key: tail[key]))
        links = after[critical[-1]]
    busy = sum(job.seconds * job.gpus for job in jobs)
    shortest, makespan = max(tail.values(), default=0.0), float(now)
    utilisation = busy / (gpus * makespan) if makespan else 0.0
    return Schedule(starts, places, makespan, tuple(critical), shortest, busy, utilisation)


def _room(free: Sequence[float], size: float) -> list[int] | None:
    """Return the GPUs that a job would get; None where it has to wait. free: the share of each that is free."""
    share = min(size, 1.0)
    fullest = heapq.nsmallest(ceil(size), ((left, number) for number, left in enumerate(free) if left > share - 1e-9))
    return [number for _, number in fullest] if len(fullest) == ceil(size) else None
