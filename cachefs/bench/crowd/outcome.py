"""What a run of the simulation came to, in a few numbers with stable names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from random import Random
from statistics import median

from cachefs.bench.crowd.policies import (
    CONCURRENCY,
    THREADS,
    Adaptive,
    Clock,
    Habits,
    Paced,
    Standard,
)
from cachefs.bench.crowd.simulation import Client, Crowd, Policy, Store

POLICIES = ("cachefs", "standard", "adaptive")
_PATIENCE = 6
"""Multiples of the ideal time after which whoever is not done counts as never done."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What all policies are up against."""

    calls: int = 60
    """Parts that each node has to send."""
    processes: int = 8
    """Processes of a node (one for each accelerator) that share its parts. With boto3 each is a
    client of its own; with cachefs the node's one daemon sends for all."""
    budget: float = 3500.0
    """Requests per second that the store serves under one prefix (S3: PUT)."""
    latency: float = 0.05
    """Mean seconds of an answer."""
    skew: float = 0.02
    """Seconds within which all begin."""
    habits: Habits = field(default_factory=Habits)
    """Of the programs that use boto3."""
    seed: int = 1

    def ideal(self, nodes: int, slots: int) -> float:
        """Seconds that cannot be beaten: the store busy throughout, or a node's slots.

        `slots`: requests that a node may have in flight.
        """
        store = Store(self.budget)
        budgeted = nodes * self.calls / store.rate - store.burst
        return max(budgeted, -(-self.calls // slots) * self.latency)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy, one number of nodes. `inf` where some node was never done."""

    policy: str
    nodes: int
    drain_seconds: float
    """Until the last node was done."""
    drain_by_ideal: float
    refused_share: float
    """Requests answered 503, of all."""
    errors: int
    """Calls that the library gave up: exceptions in the program."""
    sent_by_needed: float
    """Requests that were served, by those that would have done."""
    jain: float
    """Jain's index of what the nodes had done when half of everything was: 1 all the same, 1/n one
    had done it all."""
    slowest_by_fastest: float
    """Time of the last node by that of the first."""
    median_seconds: float
    """Until half the nodes were done."""


def simulate(policy: str, nodes: int, scene: Scene) -> Outcome:
    """Run one policy. Deterministic."""
    crowd = Crowd(Store(scene.budget), latency=scene.latency, skew=scene.skew, seed=scene.seed)
    shares = _shares(scene.calls, 1 if policy == "cachefs" else scene.processes)
    make = _maker(policy, scene)
    for _ in range(nodes):
        for share in shares:
            crowd.join(make, share)
    slots = CONCURRENCY if policy == "cachefs" else THREADS * len(shares)
    ideal = scene.ideal(nodes, slots)
    clients = crowd.run(served=nodes * scene.calls // 2)
    machines = [clients[i : i + len(shares)] for i in range(0, len(clients), len(shares))]
    fairness = jain([sum(client.served for client in machine) for machine in machines])
    crowd.run(until=_PATIENCE * ideal)
    return _outcome(policy, machines, scene, ideal, fairness)


def _shares(calls: int, processes: int) -> list[int]:
    """Calls of each process; those that would have none are left out."""
    each, more = divmod(calls, processes)
    return [share for i in range(processes) if (share := each + (i < more))]


def _maker(policy: str, scene: Scene) -> Callable[[Random, Clock], Policy]:
    if policy == "cachefs":
        return Paced
    kind = {"standard": Standard, "adaptive": Adaptive}[policy]
    return lambda random, clock: kind(random, clock, scene.habits)


def _outcome(
    policy: str,
    machines: Sequence[Sequence[Client]],
    scene: Scene,
    ideal: float,
    fairness: float,
) -> Outcome:
    times = [max(client.done_at for client in machine) for machine in machines]
    clients = [client for machine in machines for client in machine]
    refused = sum(client.refused for client in clients)
    served = sum(client.served for client in clients)
    return Outcome(
        policy=policy,
        nodes=len(machines),
        drain_seconds=max(times),
        drain_by_ideal=max(times) / ideal,
        refused_share=refused / (refused + served),
        errors=sum(client.failed for client in clients),
        sent_by_needed=served / (scene.calls * len(machines)),
        jain=fairness,
        slowest_by_fastest=inf if isinf(max(times)) else max(times) / min(times),
        median_seconds=median(times),
    )


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, 0.0 if all have nothing. Source: https://arxiv.org/abs/cs/9809099"""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0
