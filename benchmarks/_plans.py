"""Small fleets at random, and the cheapest plan for each, found by trying everything."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from pearl.core.plan import Plan, PlanRequest, plan
from pearl.core.platform import TransitionCosts
from pearl.core.shape import Pool, Shape
from pearl.core.state import Activity, FleetState, Gpu, GpuOwner, Role, Worker
from pearl.records.ids import GpuId, NodeId, WorkerId

ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
GPUS_PER_NODE = 4
MOST_WORKERS = 6
PRICES_MS = (0, 1, 1000, 3200, 6300, 20_000, 56_300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A fleet, a target and prices."""

    state: FleetState
    request: PlanRequest
    costs: TransitionCosts


def random_instance(rng: random.Random) -> Instance:
    """One or two nodes of four GPUs, up to six workers that may or may not be movable, slots of before, any target."""
    owners = [rng.choice(list(GpuOwner)) for _ in range(rng.choice((1, 2)))]
    gpus = {
        GpuId(f"n{node}-{i}"): Gpu(
            id=GpuId(f"n{node}-{i}"),
            node=NodeId(f"n{node}"),
            # The trainer's nodes are all its own: a worker is on its GPUs alone, or on none of them.
            owner=owner if owner is GpuOwner.TRAINING or rng.random() < 0.9 else GpuOwner.EXTERNAL,
        )
        for node, owner in enumerate(owners)
        for i in range(GPUS_PER_NODE)
    }
    workers, slots = _workers(rng, gpus, len(owners))
    state = FleetState(
        version=7, gpus=MappingProxyType(gpus), workers=MappingProxyType(workers), slots=MappingProxyType(slots)
    )
    stays = [gpu for gpu in gpus.values() if rng.random() < 0.9]
    borrowable = {gpu for worker in workers.values() if _is_overlap(state, worker) for gpu in worker.gpus}
    tps = rng.choice(((1,), (2,), (1, 2), (2, 4), (1, 2, 4)))
    counts = {
        (rng.choice(ROLES), rng.choice(tps)): rng.choice((1, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 2, 3)))
    }
    shape = Shape(tuple(Pool(role=role, tp=tp, workers=count) for (role, tp), count in counts.items()))
    most = min(shape.workers, 3) if borrowable else 0
    return Instance(
        state=state,
        request=PlanRequest(
            shape=shape,
            borrowed=rng.randint(0, most),
            usable=frozenset(gpu.id for gpu in stays if gpu.owner is not GpuOwner.TRAINING),
            lendable=frozenset(gpu.id for gpu in stays if gpu.owner is GpuOwner.TRAINING),
        ),
        costs=TransitionCosts(**{each.name: rng.choice(PRICES_MS) / 1000 for each in fields(TransitionCosts)})
        if rng.random() < 0.7
        else TransitionCosts(),
    )


def least_cost_ms(instance: Instance) -> tuple[int, int] | None:
    """Milliseconds and changes of the cheapest plan, the fewest changes among equal costs; None where there is none."""
    found = list(_ways(instance))
    return min(found) if found else None


def is_optimal(instance: Instance) -> bool:
    """Whether the plan costs what the cheapest does, or is refused where there is none."""
    made, least = plan(instance.state, instance.request, instance.costs), least_cost_ms(instance)
    if not isinstance(made, Plan) or least is None:
        return not isinstance(made, Plan) and least is None
    return (round(1000 * made.cost_s), changes(made)) == least


def changes(made: Plan) -> int:
    """How many workers a plan does something to."""
    return sum(map(len, (made.reassigned, made.woken, made.added, made.removed, made.returned)))


def optimal_fraction(instances: int, seed: int = 0) -> float:
    """Of random instances, how many are planned at the least cost, or refused where nothing reaches the target."""
    return sum(is_optimal(random_instance(random.Random(f"{seed}/{i}"))) for i in range(instances)) / instances


# -- making fleets --------------------------------------------------------------------------------------------------


def _workers(
    rng: random.Random, gpus: Mapping[GpuId, Gpu], nodes: int
) -> tuple[dict[WorkerId, Worker], dict[WorkerId, tuple[GpuId, ...]]]:
    workers: dict[WorkerId, Worker] = {}
    slots: dict[WorkerId, tuple[GpuId, ...]] = {}
    served: set[GpuId] = set()
    for slot in rng.sample(range(9), rng.randint(0, MOST_WORKERS + 2)):
        node, tp = rng.randrange(nodes), rng.choice((1, 1, 2, 2, 4))
        first = rng.randrange(GPUS_PER_NODE - tp + 1) if rng.random() < 0.2 else tp * rng.randrange(GPUS_PER_NODE // tp)
        mine = tuple(GpuId(f"n{node}-{first + i}") for i in range(tp))
        slots[WorkerId(slot)] = mine
        if len(workers) == MOST_WORKERS or rng.random() < 0.2:
            continue
        training = all(gpus[gpu].owner is GpuOwner.TRAINING for gpu in mine) and rng.random() < 0.2
        activity = rng.choice((*[Activity.ACTIVE] * 4, *[Activity.INACTIVE] * 2, Activity.TRANSITIONING))
        if activity is Activity.ACTIVE:
            if not served.isdisjoint(mine):
                activity = Activity.INACTIVE
            else:
                served.update(mine)
        role = Role.TRAINING if training else rng.choice(ROLES)
        workers[WorkerId(slot)] = Worker(id=WorkerId(slot), gpus=mine, role=role, activity=activity)
    return workers, slots


def _is_overlap(state: FleetState, worker: Worker) -> bool:
    return any(state.gpus[gpu].owner is GpuOwner.TRAINING for gpu in worker.gpus)


# -- trying everything ----------------------------------------------------------------------------------------------


def _ways(instance: Instance) -> Iterator[tuple[int, int]]:
    """Cost in ms and number of changes of every way to reach the target."""
    state, costs = instance.state, instance.costs
    allowed = instance.request.usable | instance.request.lendable
    ms = {each.name: round(1000 * getattr(costs, each.name)) for each in fields(costs)}
    movable = [
        worker
        for worker in state.workers.values()
        if worker.activity is not Activity.TRANSITIONING and worker.role is not Role.TRAINING
    ]
    must_go = [worker for worker in movable if not set(worker.gpus) <= allowed]
    base = [0, 0]
    for worker in must_go:
        overlap = _is_overlap(state, worker)
        if worker.activity is Activity.ACTIVE or not overlap:
            base[0] += ms["return_s" if overlap else "stop_s"]
            base[1] += 1
    choice = [worker for worker in movable if worker not in must_go]
    busy = _busy(state)
    for decided in itertools.product(*(_fates(state, worker, busy) for worker in choice)):
        yield from _with_blocks(instance, ms, list(zip(choice, decided, strict=True)), (base[0], base[1]))


def _busy(state: FleetState) -> set[GpuId]:
    return {
        gpu
        for worker in state.workers.values()
        if worker.activity is Activity.TRANSITIONING
        or (worker.role is Role.TRAINING and worker.activity is Activity.ACTIVE)
        for gpu in worker.gpus
    }


def _fates(state: FleetState, worker: Worker, busy: set[GpuId]) -> list[str]:
    """What may become of a worker."""
    if worker.activity is Activity.ACTIVE:
        return ["stay", "turn", "go"]
    fates = ["sleep"] if busy.intersection(worker.gpus) else ["sleep", "wake"]
    return fates if _is_overlap(state, worker) else [*fates, "end"]


def _with_blocks(
    instance: Instance, ms: Mapping[str, int], fates: list[tuple[Worker, str]], base: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    state, request = instance.state, instance.request
    serving = [(worker, fate) for worker, fate in fates if fate in ("stay", "turn", "wake")]
    used = [gpu for worker, _ in serving for gpu in worker.gpus]
    overlap = sum(_is_overlap(state, worker) for worker, _ in serving)
    need = Counter({(pool.role, pool.tp): pool.workers for pool in request.shape.pools})
    need.subtract((worker.role, len(worker.gpus)) for worker, fate in serving if fate == "stay")
    if len(set(used)) < len(used) or overlap != request.borrowed or min(need.values(), default=0) < 0:
        return
    per_tp = Counter[int]()
    for (_, tp), count in need.items():
        per_tp[tp] += count
    per_tp.subtract(len(worker.gpus) for worker, fate in serving if fate != "stay")
    if min(per_tp.values(), default=0) < 0:
        return
    asleep = {
        gpu for worker, fate in fates if fate == "sleep" and not _is_overlap(state, worker) for gpu in worker.gpus
    }
    room = request.usable - _busy(state) - set(used) - asleep
    starts = sum(per_tp.values())
    own = {frozenset(worker.gpus) for worker, _ in fates}
    if _packs([block for block in _all_blocks(state) if block <= room and block not in own], per_tp):
        price = {"stay": 0, "turn": ms["role_change_s"], "wake": ms["activate_s"], "sleep": 0, "end": ms["stop_s"]}
        cost = sum(
            price[fate] if fate != "go" else ms["return_s" if _is_overlap(state, worker) else "stop_s"]
            for worker, fate in fates
        )
        moved = sum(fate not in ("stay", "sleep") for _, fate in fates)
        yield base[0] + cost + starts * ms["start_s"], base[1] + moved + starts


def _all_blocks(state: FleetState) -> set[frozenset[GpuId]]:
    blocks = {frozenset(gpus) for gpus in state.slots.values()}
    for node in {gpu.node for gpu in state.gpus.values()}:
        ordered = sorted(gpu.id for gpu in state.gpus.values() if gpu.node == node)
        blocks |= {frozenset(ordered[i : i + tp]) for tp in (1, 2, 4) for i in range(0, len(ordered), tp)}
    return blocks


def _packs(blocks: list[frozenset[GpuId]], wanted: Mapping[int, int]) -> bool:
    """Whether so many blocks of each size lie side by side."""
    if not any(wanted.values()):
        return True
    for i, block in enumerate(blocks):
        if wanted.get(len(block), 0) > 0:
            rest = [other for other in blocks[i + 1 :] if not other & block]
            if _packs(rest, {**wanted, len(block): wanted[len(block)] - 1}):
                return True
    return False
