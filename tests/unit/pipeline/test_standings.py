"""Who has the least to do, without a look at every worker: always what a look at every worker gives."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.state import Role
from pearl.pipeline import standings as module
from pearl.pipeline.placement import STICKY_SLACK, Need, Placement, Way, choose
from pearl.pipeline.standings import Standings
from pearl.records.ids import WeightVersion, WorkerId

V0 = WeightVersion(0)
ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@dataclass(eq=False)
class One:
    id: WorkerId
    role: Role = Role.COLOCATED
    version: WeightVersion = V0
    load: int = 0
    draining: bool = False


def need(
    held: dict[int, int] | None = None, failed: tuple[int, ...] = (), *, tokens: int = 100, version: int = 0
) -> Need:
    return Need(
        tokens=tokens,
        min_version=WeightVersion(version),
        held={WorkerId(slot): known for slot, known in (held or {}).items()},
        failed=dict.fromkeys(map(WorkerId, failed)),
        append_tokens=10,
        whole=False,
    )


class House:
    """Workers, and the standings that are told of them."""

    def __init__(self, *roles: Role) -> None:
        self.workers = {WorkerId(slot): One(WorkerId(slot), role) for slot, role in enumerate(roles)}
        self.standings = Standings(self.workers)

    def put(self, slot: int, role: Role) -> None:
        self.workers[WorkerId(slot)] = One(WorkerId(slot), role)
        self.standings.changed()

    def remove(self, slot: int) -> None:
        self.workers.pop(WorkerId(slot), None)
        self.standings.changed()

    def load(self, slot: int, by: int) -> None:
        worker = self.workers.get(WorkerId(slot))
        if worker is None or worker.load + by < 0:
            return
        for _ in range(abs(by)):
            worker.load += 1 if by > 0 else -1
            if by < 0:
                self.standings.eased(worker)

    def change(self, slot: int, *, draining: bool | None = None, version: int | None = None) -> None:
        worker = self.workers.get(WorkerId(slot))
        if worker is not None:
            worker.draining = worker.draining if draining is None else draining
            worker.version = worker.version if version is None else WeightVersion(version)
            self.standings.changed()


def same(one: Placement[One] | None, other: Placement[One] | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.way, one.generator, one.prefill) == (other.way, other.generator, other.prefill)


SLOTS = st.integers(0, 5)
CHANGES = st.one_of(
    st.tuples(st.just("load"), SLOTS, st.integers(-20, 20)),
    st.tuples(st.just("put"), SLOTS, st.sampled_from(ROLES)),
    st.tuples(st.just("remove"), SLOTS, st.none()),
    st.tuples(st.just("draining"), SLOTS, st.booleans()),
    st.tuples(st.just("version"), SLOTS, st.integers(0, 2)),
)
NEEDS = st.builds(
    need,
    st.dictionaries(SLOTS, st.integers(0, 100), max_size=3),
    st.lists(SLOTS, max_size=2).map(tuple),
    version=st.sampled_from([0, 0, 0, 1, 2]),
)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(ROLES), max_size=6), st.lists(st.tuples(CHANGES, NEEDS), max_size=40))
def test_the_choice_is_that_of_a_look_at_every_worker(roles: list[Role], history: list[tuple[object, Need]]) -> None:
    house = House(*roles)
    for change, one in history:
        match change:
            case ("load", int(slot), int(by)):
                house.load(slot, by)
            case ("put", int(slot), Role() as role):
                house.put(slot, role)
            case ("remove", int(slot), None):
                house.remove(slot)
            case ("draining", int(slot), bool(draining)):
                house.change(slot, draining=draining)
            case ("version", int(slot), int(version)):
                house.change(slot, version=version)
            case _:
                raise AssertionError(change)
        assert same(house.standings.choose(one), choose(house.workers, one))


def test_loads_that_rise_and_fall_are_followed() -> None:
    house = House(Role.COLOCATED, Role.COLOCATED, Role.COLOCATED)

    def first() -> int:
        placed = house.standings.choose(need())
        assert placed is not None
        return placed.generator.id

    assert first() == 0
    house.load(0, 2)
    assert first() == 1
    house.load(1, 1)
    assert first() == 2
    house.load(2, 3)
    assert first() == 1
    house.load(0, -2)
    assert first() == 0


def test_a_prefix_is_looked_up_and_not_searched_for() -> None:
    house = House(Role.PREFILL, Role.DECODE, Role.DECODE)
    house.load(2, STICKY_SLACK)
    placed = house.standings.choose(need({2: 95}))
    assert placed is not None
    assert (placed.way, placed.generator.id) == (Way.APPEND, 2)
    house.load(2, 1)
    placed = house.standings.choose(need({2: 95}))
    assert placed is not None
    assert (placed.way, placed.generator.id, placed.prefill and placed.prefill.id) == (Way.HAND_OFF, 1, 0)


def test_what_is_kept_is_bounded_by_the_workers() -> None:
    house = House(*[Role.COLOCATED] * 3)
    for _ in range(1000):
        house.standings.choose(need())
        house.load(1, 1)
        house.load(1, -1)
    kept = house.standings._generators._heap
    assert len(kept) <= 2 * 3 + module._SPARE + 1


def test_one_that_is_not_ranked_any_more_may_still_be_eased() -> None:
    house = House(Role.COLOCATED, Role.COLOCATED)
    house.load(0, 3)
    gone = house.workers[WorkerId(0)]
    house.put(0, Role.COLOCATED)
    assert same(house.standings.choose(need()), choose(house.workers, need()))
    gone.load -= 1
    house.standings.eased(gone)
    assert same(house.standings.choose(need()), choose(house.workers, need()))
    house.remove(0)
    house.remove(1)
    house.standings.eased(gone)
    assert house.standings.choose(need()) is None
