"""Simulate a plan on a number of GPUs: when each stage starts, how long everything takes and how busy the GPUs are."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A stage as a scheduler sees it."""

    key: str
    needs: tuple[str, ...]  # keys of jobs in the same plan
    seconds: float
    gpus: float = 0.0  # two stages may share one


@dataclass(frozen=True)
class Schedule:
    """When each job starts, in seconds, and what follows from it."""

    starts: Mapping[str, float]
    makespan: float
    critical: tuple[str, ...]  # the chain of jobs that no number of GPUs shortens, first to last
    shortest: float  # its length
    busy: float  # GPU-seconds of all jobs
    utilisation: float  # of the GPUs, over the makespan


def simulate(jobs: Sequence[Job], gpus: float) -> Schedule:
    """Start each job as soon as its needs are done and its GPUs are free, the one with most work behind it first.

    jobs: what is needed comes first. A job that finds too few free GPUs lets smaller ones pass, as Ray and Slurm do;
    jobs without a GPU never wait for one. Raises ValueError for a job that needs more GPUs than there are.

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
    ready: dict[float, list[tuple[float, str]]] = defaultdict(
        list
    )  # by GPUs: jobs that could start, longest tail first
    running: list[tuple[float, str]] = []
    starts: dict[str, float] = {}
    now, free, new = 0.0, gpus, [job.key for job in jobs if not job.needs]
    while running or len(starts) < len(jobs):
        for key in new:
            heapq.heappush(ready[named[key].gpus], (-tail[key], key))
        while fitting := [(queue[0], size) for size, queue in ready.items() if queue and size <= free + 1e-9]:
            (_, key), size = min(fitting)
            heapq.heappop(ready[size])
            starts[key], free = now, free - size
            heapq.heappush(running, (now + named[key].seconds, key))
        now, ended = heapq.heappop(running)
        free, new = free + named[ended].gpus, []
        for key in after[ended]:
            waiting[key] -= 1
            new += [key] if not waiting[key] else []
    critical, links = [], [job.key for job in jobs if not job.needs]
    while links:
        critical.append(max(links, key=lambda key: tail[key]))
        links = after[critical[-1]]
    busy = sum(job.seconds * job.gpus for job in jobs)
    shortest, makespan = max(tail.values(), default=0.0), float(now)
    return Schedule(starts, makespan, tuple(critical), shortest, busy, busy / (gpus * makespan) if makespan else 0.0)
