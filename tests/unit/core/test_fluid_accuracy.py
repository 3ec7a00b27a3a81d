"""The fluid network against two other models of the same fleets: a simulation of single iterations, and published results.

The simulation below knows nothing of queueing theory: engines run iterations of the same costs; prompts are computed first come
first served, up to a chunk per iteration; the one that ends a prompt draws the first token; replies come after random waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.fluid import FluidPredictor
from pearl.core.makespan import Profile, Target, candidates_of
from pearl.core.platform import Platform
from pearl.core.profile import HandOff, IterationTimes
from pearl.core.progress import fresh_batch
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile
from tests.platforms import linear_times, platform_of, target

CHUNK = 512
HAND_OFF_S = 0.01


COSTS = {1: (0.02, 0.0004, 0.0001), 2: (0.012, 0.0002, 0.00006)}
"""tp -> seconds per iteration, per decoding sequence (a quarter more of it at a context of 8K), and per prompt token."""
TIMES = {tp: linear_times(*costs, contexts=(1, 8192)) for tp, costs in COSTS.items()}
PLATFORM = platform_of(TIMES, CHUNK, HandOff(fixed_s=HAND_OFF_S, s_per_byte=0.0))
WORK = WorkloadProfile(
    turns=constant(10),
    prompt_tokens=constant(600),
    new_tokens=constant(300),
    generated_tokens=constant(40),
    env_s=constant(0),
)


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), action))

    def run(self) -> float:
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        return self.now_s


@dataclass(slots=True)
class Job:
    """A turn's work on an engine."""

    context: float
    prompt: int
    tokens: int
    done: Callable[[], None]


@dataclass(slots=True)
class SimulatedEngine:
    """Iterations of up to a chunk of prompt tokens beside one token of each running sequence."""

    clock: Clock
    costs: tuple[float, float, float]
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    busy: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        if not self.busy:
            self.busy = True
            self.iterate()

    def iterate(self) -> None:
        room, computed = CHUNK, list[Job]()
        for job in list(self.waiting):
            part = min(room, job.prompt)
            job.prompt -= part
            room -= part
            if job.prompt == 0:
                computed.append(self.waiting.popleft())
            if room == 0:
                break
        beside = self.running or computed
        context = sum(job.context for job in beside) / max(1, len(beside))
        base_s, sequence_s, token_s = self.costs
        taken_s = base_s + sequence_s * len(self.running) * (1 + context / 32768) + token_s * (CHUNK - room)
        self.clock.after(taken_s, lambda: self.iterated(computed))

    def iterated(self, computed: list[Job]) -> None:
        for job in self.running:
            job.tokens -= 1
        ended = [job for job in (*self.running, *computed) if job.tokens == 0]
        self.running = [job for job in (*self.running, *computed) if job.tokens > 0]
        for job in ended:
            job.done()
        self.busy = self.load > 0
        if self.busy:
            self.iterate()


def simulated_s(target: Target, work: WorkloadProfile, trajectories: int, seed: int) -> float:
    """Seconds until the last of so many trajectories has ended; waits are exponential."""
    clock = Clock()
    engines: dict[Role, list[SimulatedEngine]] = {role: [] for role in Role}
    for role, tp in target.shape.roles():
        engines[role].append(SimulatedEngine(clock, COSTS[tp]))
    homes = engines[Role.DECODE] or engines[Role.COLOCATED]
    generated, mean_s = round(work.generated_tokens.mean), work.env_s.mean

    def begin(home: SimulatedEngine, rng: random.Random, turn: int, turns: int) -> None:
        new = round((work.new_tokens if turn else work.prompt_tokens).mean)
        context = work.context_tokens(turn) + generated / 2

        def reply() -> None:
            if turn + 1 < turns:
                clock.after(rng.expovariate(1 / mean_s) if mean_s else 0.0, lambda: begin(home, rng, turn + 1, turns))

        def decode() -> None:
            home.submit(Job(context=context, prompt=0, tokens=generated - 1, done=reply))

        if home in engines[Role.COLOCATED] or (turn and new <= target.append_tokens):
            home.submit(Job(context=context, prompt=new, tokens=generated - 1, done=reply))
        else:
            least = min(engines[Role.PREFILL], key=lambda engine: engine.load)
            least.submit(Job(context=context, prompt=new, tokens=0, done=lambda: clock.after(HAND_OFF_S, decode)))

    for each in range(trajectories):
        rng = random.Random(f"{seed} {each}")  # the same lengths and waits whatever the fleet
        (turns,) = rng.choices(work.turns.values, work.turns.weights)
        begin(homes[each % len(homes)], rng, 0, round(turns))
    return clock.run()


def predicted_s(
    targets: Sequence[Target], work: WorkloadProfile, trajectories: int, platform: Platform = PLATFORM
) -> list[float]:
    forecast = FluidPredictor().forecast(Profile(workload=work, platform=platform), fresh_batch(trajectories, 1))
    return [float(close) for close in forecast(candidates_of(targets)).close_s]


def exponential(mean: float) -> Distribution:
    """Two hundred quantiles of it."""
    return distribution_of([-mean * math.log(1 - (each + 0.5) / 200) for each in range(200)])


FLEETS = [
    target("4C"),
    target("1P3D"),
    target("2P2D"),
    target("3P1D"),
    target("1P3D", 300),
    target("4C@tp2"),
    target("1P@tp2+3D@tp1"),
    target("2P@tp1+1D@tp2"),
]


@pytest.mark.parametrize(("wait_s", "trajectories", "seeds"), [(0.0, 1, 1), (0.0, 12, 1), (0.0, 48, 1), (0.5, 48, 2)])
def test_close_to_a_simulation_of_iterations(wait_s: float, trajectories: int, seeds: int) -> None:
    """Within an eighth, and in the same order wherever the simulation tells fleets apart."""
    work = replace(WORK, env_s=exponential(wait_s)) if wait_s else WORK
    predicted = predicted_s(FLEETS, work, trajectories)
    runs = [[simulated_s(fleet, work, trajectories, seed) for seed in range(seeds)] for fleet in FLEETS]
    simulated = [sum(each) / seeds for each in runs]
    assert predicted == pytest.approx(simulated, rel=0.125)
    for (p0, s0), (p1, s1) in itertools.permutations(zip(predicted, simulated, strict=True), 2):
        assert s0 < 1.1 * s1 or p0 > p1


@pytest.mark.parametrize(
    ("fleets", "within"),
    [
        ([target("1C"), target("8C"), target("2C@tp2")], 0.005),
        # A prefill worker's iteration draws the first token too, which the network leaves to decode workers: 1 in 40.
        ([target("1P1D"), target("1P7D"), target("1P1D", 300), target("2P1D@tp2")], 0.03),
    ],
)
def test_one_alone_takes_the_sum_of_its_turns(fleets: list[Target], within: float) -> None:
    """Prompts, tokens one by one, hand-offs."""
    simulated = [simulated_s(fleet, WORK, 1, 0) for fleet in fleets]
    assert predicted_s(fleets, WORK, 1) == pytest.approx(simulated, rel=within)


def test_trajectories_of_different_lengths() -> None:
    """Half of them end after 4 turns, half go on to 16: what is left of the batch speeds up."""
    work = replace(WORK, turns=Distribution((4.0, 16.0), (0.5, 0.5)))
    fleets = [target("1C"), target("1P1D")]
    runs = [[simulated_s(fleet, work, 24, seed) for seed in range(3)] for fleet in fleets]
    assert predicted_s(fleets, work, 24) == pytest.approx([sum(each) / 3 for each in runs], rel=0.1)


def h200_seconds(prefill: int, decoding: int, context: int) -> float:
    """Qwen3-8B on one H200, from what is known of it: 4.9 ms for weights (16.4 GB at 4.2 TB/s) and launches; 35 us per sequence
    and its KV (147,456 bytes per token at 4.2 TB/s); prompt tokens as two of its measured points want, 2,048 new ones at 8K in
    57 ms and at 32K in 102 ms: 18 us each and 0.89 ns more per token before them."""
    decode = decoding * (35e-6 + context * 147_456 / 4.2e12)
    return 4.9e-3 + decode + prefill * (18.2e-6 + 0.89e-9 * context)


def h200() -> Platform:
    prefill, decoding, contexts = (0, 256, 2048, 8192), (0, 1, 64, 256), (1024, 4096, 16384)
    cells = tuple(tuple(tuple(h200_seconds(p, d, c) for c in contexts) for d in decoding) for p in prefill)
    times = IterationTimes(prefill_tokens=prefill, decoding=decoding, context_tokens=contexts, cells_s=cells)
    one = replace(
        PLATFORM.by_tp[1],
        iterations=times,
        kv_capacity_tokens=782_000,
        kv_bytes_per_token=147_456,
        hand_off=HandOff(fixed_s=0.005, s_per_byte=1 / 50e9),
    )
    return Platform(by_tp={1: one}, readback=False)


@pytest.mark.parametrize(
    ("wait_s", "reference_s"),
    [
        (0.0, (61.5, 60.5, 69.1, 96.4)),
        (2.0, (103.4, 97.0, 106.4, 130.4)),
        (10.0, (271.4, 263.3, 271.9, 293.5)),
    ],
)
def test_reference_cells(wait_s: float, reference_s: tuple[float, ...]) -> None:
    """A published simulator's makespans of 144 sessions, 48 at a time, 8 turns of 1,024 new and 256 generated tokens.

    Constant waits are predicted low: sessions that begin together stay in step, so that all ask at once and then nobody does,
    while the network takes requests as spread. The network knows only a batch that drains: three of them, one after the other.
    Source: NVIDIA AISimulate 0.13, Qwen3-8B, 4 x H200, vLLM, no readback.
    """
    work = WorkloadProfile(
        turns=constant(8),
        prompt_tokens=constant(1024),
        new_tokens=constant(1024),
        generated_tokens=constant(256),
        env_s=constant(wait_s),
    )
    fleets = [target("4C"), target("1P3D"), target("2P2D"), target("3P1D")]
    predicted = [3 * close for close in predicted_s(fleets, work, 48, h200())]
    assert predicted == pytest.approx(reference_s, rel=0.2)
    for (p0, r0), (p1, r1) in itertools.permutations(zip(predicted, reference_s, strict=True), 2):
        assert r0 < 1.1 * r1 or p0 > p1
