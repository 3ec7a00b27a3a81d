from collections.abc import Mapping
from types import MappingProxyType

import pytest

from pearl.core.actions import Admit, GiveBack, SetRole, Stop
from pearl.core.schedule import Arrival, Changes, Service, finishes_turns, parties, schedule, service_of
from pearl.core.state import FleetState, Role, Worker
from pearl.records.ids import WorkerId
from tests.unit.core._fleets import ROLES, fleet, ids, story

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def told(
    state: FleetState,
    target: str,
    *,
    returned: str = "",
    vacated: str = "",
    removed: str = "",
    turned: str = "",
    arrivals: str = "",
    to_training: str = "",
    to_source: str = "",
) -> list[str]:
    """The story of changes: slots by number, turned as `1D`, arrivals as `3P a0 a1, 4D` (woken: no GPUs named)."""

    def workers(text: str) -> tuple[Worker, ...]:
        return tuple(state.workers[WorkerId(int(slot))] for slot in text.split())

    def arrival(text: str) -> Arrival:
        what, *gpus = text.split()
        slot = WorkerId(int(what[:-1]))
        on = ids(" ".join(gpus)) if gpus else state.workers[slot].gpus
        return Arrival(worker=slot, gpus=on, role=ROLES[what[-1]], wakes=not gpus)

    changes = Changes(
        returned=workers(returned),
        to_training=ids(to_training),
        vacated=workers(vacated),
        to_source=ids(to_source),
        removed=workers(removed),
        reassigned=MappingProxyType({WorkerId(int(text[:-1])): ROLES[text[-1]] for text in turned.split()}),
        arrivals=tuple(arrival(text) for text in arrivals.split(",") if text),
    )
    counts: Mapping[Role, int] = {role: target.count(letter) for letter, role in ROLES.items()}
    return story(schedule(state, changes, counts))


@pytest.mark.parametrize(
    ("prefill", "decode", "colocated", "can"),
    [
        (0, 0, 0, False),
        (1, 0, 0, False),
        (0, 1, 0, False),
        (1, 1, 0, True),
        (0, 0, 1, True),
        (1, 0, 1, True),
        (0, 1, 1, True),
    ],
)
def test_what_it_takes_to_finish_a_turn(prefill: int, decode: int, colocated: int, can: bool) -> None:
    assert finishes_turns({P: prefill, D: decode, C: colocated}) is can


def test_what_has_to_be_kept_up() -> None:
    assert service_of({P: 1, D: 1}, {P: 2, D: 2}) == Service(roles=frozenset({P, D}), turns=True)
    assert service_of({C: 2}, {P: 2, D: 2}) == Service(roles=frozenset(), turns=True)
    assert service_of({P: 1, D: 1}, {P: 0, C: 1}) == Service(roles=frozenset(), turns=True)
    assert service_of({P: 2}, {P: 1, D: 1}) == Service(roles=frozenset({P}), turns=False)
    assert service_of({P: 0, C: 1}, {P: 1}) == Service(roles=frozenset(), turns=False)
    assert service_of({}, {C: 1}) == Service(roles=frozenset(), turns=False)
    assert service_of({C: 1}, {}) == Service(roles=frozenset(), turns=False)


def test_what_is_missing() -> None:
    assert Service(roles=frozenset({P, D}), turns=True).missing({P: 1, D: 1}) == frozenset()
    assert Service(roles=frozenset({P, D}), turns=True).missing({P: 1}) == {D, None}
    assert Service(roles=frozenset({P, D}), turns=True).missing({P: 0, C: 1}) == {P, D}
    assert Service(roles=frozenset({P}), turns=False).missing({}) == {P}
    assert Service(roles=frozenset(), turns=True).missing({D: 3}) == {None}
    assert Service(roles=frozenset(), turns=False).missing({}) == frozenset()


def test_nothing_to_do() -> None:
    assert told(fleet("a1", "0 C a0"), "C") == []


def test_training_gets_its_gpus_first_and_the_source_next() -> None:
    state = fleet("a3 b2t c2x", "0 P a0", "1 D a1", "2 P b0 b1", "4 D c0", "5 P- c1")
    assert told(
        state, "PD", returned="2", to_training="b0 b1", vacated="4 5", to_source="c0 c1", arrivals="6P a2", turned=""
    ) == [
        "return: 0 drain 2; 1 sleep 2 <0; 2 back to training b0 b1 <1",
        "vacate: 3 drain 4; 4 stop 4 <3; 5 stop 5; 6 back to external c0 c1 <4 <5",
        "expand: 7 start 6 P a2; 8 load 6 <7; 9 admit 6 <8",
    ]


def test_gpus_may_go_back_with_nobody_on_them_and_workers_without_their_gpus() -> None:
    state = fleet("a2 c1x", "0 C a0", "1 C a1")
    assert told(state, "C", to_source="c0") == ["vacate: 0 back to external c0"]
    assert told(state, "C", vacated="1") == ["vacate: 0 drain 1; 1 stop 1 <0"]


def test_new_workers_are_admitted_at_once_before_others_end() -> None:
    state = fleet("a5", "0 C a0", "2 C a2")
    assert told(state, "CCC", removed="2", arrivals="1C a1,3C a3,4C a4") == [
        "expand: 0 start 1 C a1; 1 start 3 C a3; 2 start 4 C a4; 3 load 1 <0; 4 load 3 <1; 5 load 4 <2; "
        "6 admit 1 3 4 <3 <4 <5",
        "surplus: 7 drain 2 <6; 8 stop 2 <7",
    ]


def test_those_that_wake_come_before_those_that_start_and_neither_waits_for_the_other() -> None:
    state = fleet("a5", "0 C a0", "1 C- a1", "2 C a2", "5 C- a4")
    assert told(state, "CCCC", removed="2", arrivals="1C,3C a3,5C") == [
        "expand: 0 wake 1 C; 1 wake 5 C; 2 load 1 <0; 3 load 5 <1; 4 admit 1 5 <2 <3",
        "expand: 5 start 3 C a3; 6 load 3 <5; 7 admit 3 <6",
        "surplus: 8 drain 2 <4 <7; 9 stop 2 <8",
    ]


ASLEEP = ("0 P- a0", "1 D- a1", "2 P- a2", "3 D- a3", "4 C- a4")


def test_those_that_need_each_other_are_admitted_together() -> None:
    assert told(fleet("a9", *ASLEEP), "PDD", arrivals="0P,5D a5,6D a6") == [
        "expand: 0 wake 0 P; 1 start 5 D a5; 2 start 6 D a6; 3 load 0 <0; 4 load 5 <1; 5 load 6 <2; "
        "6 admit 0 5 6 <3 <4 <5"
    ]
    # Where one that decodes serves already, the first to prefill does not wait.
    assert told(fleet("a9", *ASLEEP, "7 D a7"), "PDD", arrivals="0P,5D a5") == [
        "expand: 0 wake 0 P; 1 load 0 <0; 2 admit 0 <1",
        "expand: 3 start 5 D a5; 4 load 5 <3; 5 admit 5 <2 <4",
    ]
    # Nor where one has just begun to.
    assert told(fleet("a9", *ASLEEP, "7 P a7", "8 P a8"), "PPDD", turned="8D", arrivals="0P,5D a5") == [
        "roles: 0 drain 8; 1 set 8 D <0; 2 admit 8 <1",
        "expand: 3 wake 0 P; 4 load 0 <3; 5 admit 0 <4",
        "expand: 6 start 5 D a5; 7 load 5 <6; 8 admit 5 <7",
    ]
    # One that is drained meanwhile does not serve.
    assert told(fleet("a9", *ASLEEP, "7 D a7"), "PD", returned="7", arrivals="0P,5D a5")[1:] == [
        "expand gap: 2 wake 0 P; 3 start 5 D a5; 4 load 0 <2; 5 load 5 <3; 6 admit 0 5 <4 <5"
    ]


def test_those_that_start_are_admitted_after_those_that_wake_where_they_need_them() -> None:
    assert told(fleet("a9", *ASLEEP), "PDD", arrivals="0P,1D,5D a5") == [
        "expand: 0 wake 0 P; 1 wake 1 D; 2 load 0 <0; 3 load 1 <1; 4 admit 0 1 <2 <3",
        "expand: 5 start 5 D a5; 6 load 5 <5; 7 admit 5 <4 <6",
    ]
    # They do not where both roles start, or the other one serves.
    apart = [
        "expand: 0 wake 0 P; 1 wake 1 D; 2 load 0 <0; 3 load 1 <1; 4 admit 0 1 <2 <3",
        "expand: 5 start 5 P a5; 6 start 6 D a6; 7 load 5 <5; 8 load 6 <6; 9 admit 5 6 <7 <8",
    ]
    assert told(fleet("a9", *ASLEEP), "PPDD", arrivals="0P,1D,5P a5,6D a6") == apart
    assert told(fleet("a9", *ASLEEP, "7 P a7"), "PPDD", arrivals="0P,1D,5D a5")[1:] == [
        "expand: 5 start 5 D a5; 6 load 5 <5; 7 admit 5 <6"
    ]


def test_those_that_wake_come_last_where_they_need_what_starts_and_it_does_not_need_them() -> None:
    assert told(fleet("a9", *ASLEEP), "PDDD", arrivals="1D,3D,5P a5,6D a6") == [
        "expand: 0 start 5 P a5; 1 start 6 D a6; 2 load 5 <0; 3 load 6 <1; 4 admit 5 6 <2 <3",
        "expand: 5 wake 1 D; 6 wake 3 D; 7 load 1 <5; 8 load 3 <6; 9 admit 1 3 <4 <7 <8",
    ]
    # A colocated one that wakes needs nobody, and nobody needs it.
    assert told(fleet("a9", *ASLEEP), "PDDC", arrivals="1D,4C,5P a5,6D a6") == [
        "expand: 0 wake 4 C; 1 load 4 <0; 2 admit 4 <1",
        "expand: 3 start 5 P a5; 4 start 6 D a6; 5 load 5 <3; 6 load 6 <4; 7 admit 5 6 <5 <6",
        "expand: 8 wake 1 D; 9 load 1 <8; 10 admit 1 <7 <9",
    ]


@pytest.mark.parametrize(
    ("arrivals", "there", "found"),
    [
        # Lower case wakes, upper case starts.
        ("", "", []),
        ("", "PDC", []),
        ("c", "", ["c"]),
        ("C", "", ["C"]),
        ("CcC", "", ["c", "CC"]),
        ("pD", "", ["pD"]),
        ("Pd", "", ["Pd"]),
        ("DpDp", "", ["DpDp"]),
        ("pD", "D", ["p", "D"]),
        ("pD", "P", ["D", "p"]),
        ("pD", "PD", ["p", "D"]),
        ("pD", "C", ["pD"]),
        ("Pd", "D", ["P", "d"]),
        ("Pd", "P", ["d", "P"]),
        ("pdPD", "", ["pd", "PD"]),
        ("pdP", "", ["pd", "P"]),
        ("pPD", "", ["PD", "p"]),
        ("dPD", "", ["PD", "d"]),
        ("pdD", "", ["pd", "D"]),
        # Colocated ones need nobody.
        ("cpCD", "", ["c", "C", "pD"]),
        ("cpD", "", ["c", "pD"]),
        ("pCD", "", ["C", "pD"]),
        ("pdCD", "", ["pd", "CD"]),
        ("cdPD", "", ["c", "PD", "d"]),
        ("cC", "P", ["c", "C"]),
        # Whom nobody comes for does not wait.
        ("pP", "", ["p", "P"]),
        ("dDc", "", ["dc", "D"]),
        ("pC", "", ["p", "C"]),
    ],
)
def test_who_is_admitted_together(arrivals: str, there: str, found: list[str]) -> None:
    coming = [
        Arrival(worker=WorkerId(slot), gpus=(), role=ROLES[letter.upper()], wakes=letter.islower())
        for slot, letter in enumerate(arrivals)
    ]
    made = list(parties(coming, {ROLES[letter] for letter in there}))
    assert ["".join(arrivals[each.worker] for each in party) for party in made] == found
    assert all(list(party) == sorted(party, key=lambda each: each.worker) for party in made)


def test_all_but_one_turn_first_where_nobody_else_could_serve() -> None:
    state = fleet("a4", "0 C a0", "1 C a1", "2 C a2", "3 C a3")
    assert told(state, "PPDD", turned="0P 1P 2D 3D") == [
        "roles: 0 drain 0; 1 drain 1; 2 drain 2; 3 set 0 P <0; 4 set 1 P <1; 5 set 2 D <2; 6 admit 0 1 2 <3 <4 <5",
        "roles: 7 drain 3 <6; 8 set 3 D <7; 9 admit 3 <8",
    ]


def test_a_gap_that_cannot_be_helped_is_marked() -> None:
    state = fleet("a2", "0 C a0", "1 C a1")
    assert told(state, "PD", turned="0P 1D") == [
        "roles: 0 drain 0; 1 set 0 P <0; 2 admit 0 <1",
        "roles gap: 3 drain 1 <2; 4 set 1 D <3; 5 admit 1 <4",
    ]


def test_a_role_that_is_kept_never_has_nobody() -> None:
    # tp2 prefill becomes decode, tp1 decode prefill; each is the last of its role until the other kind has come.
    state = fleet("a6", "0 P a0 a1", "1 D a2", "2 D a3")
    assert told(state, "PPD", turned="0D 1P 2P") == [
        "roles: 0 drain 1; 1 set 1 P <0; 2 admit 1 <1",
        "roles: 3 drain 0 <2; 4 set 0 D <3; 5 admit 0 <4",
        "roles: 6 drain 2 <2 <5; 7 set 2 P <6; 8 admit 2 <7",
    ]


def test_where_no_change_can_go_first_all_go_at_once() -> None:
    state = fleet("a3", "0 P a0 a1", "1 D a2")
    assert told(state, "PD", turned="0D 1P") == [
        "roles gap: 0 drain 0; 1 drain 1; 2 set 0 D <0; 3 set 1 P <1; 4 admit 0 1 <2 <3"
    ]


def test_workers_that_come_on_free_gpus_make_it_possible_for_others_to_turn() -> None:
    state = fleet("a3", "0 P a0", "1 D a1")
    assert told(state, "PD", turned="0D", removed="1", arrivals="2P a2") == [
        "expand: 0 start 2 P a2; 1 load 2 <0; 2 admit 2 <1",
        "roles: 3 drain 0 <2; 4 set 0 D <3; 5 admit 0 <4",
        "surplus: 6 drain 1 <2 <5; 7 stop 1 <6",
    ]


def test_blocks_are_cleared_one_after_the_other_where_all_would_be_too_many() -> None:
    state = fleet("a8", "0 C a0 a1", "1 C a2 a3", "2 C a4 a5", "3 C a6 a7")
    assert told(state, "CC", removed="0 1 2 3", arrivals="4C a0 a1 a2 a3,5C a4 a5 a6 a7") == [
        "clear: 0 drain 0; 1 drain 1; 2 stop 0 <0; 3 stop 1 <1",
        "expand: 4 start 4 C a0 a1 a2 a3 <2 <3; 5 load 4 <4; 6 admit 4 <5",
        "clear: 7 drain 2 <6; 8 drain 3 <6; 9 stop 2 <7; 10 stop 3 <8",
        "expand: 11 start 5 C a4 a5 a6 a7 <9 <10; 12 load 5 <11; 13 admit 5 <12",
    ]


def test_a_new_worker_waits_for_those_on_its_own_gpus_only() -> None:
    state = fleet("a6", "0 C a0 a1", "1 C a2", "2 C- a3", "3 C a4", "9 C a5")
    assert told(state, "CCCC", removed="0 1 2", arrivals="4C a0,5C a1,6C a2 a3") == [
        "clear: 0 drain 0; 1 drain 1; 2 stop 0 <0; 3 stop 1 <1; 4 stop 2",
        "expand: 5 start 4 C a0 <2; 6 start 5 C a1 <2; 7 start 6 C a2 a3 <3 <4; 8 load 4 <5; 9 load 5 <6; 10 load 6 <7; "
        "11 admit 4 5 6 <8 <9 <10",
    ]


def test_what_a_step_waits_for_is_in_order() -> None:
    # Nine drains are 0..8, nine stops 9..17; those on a6 and a7 are 15 and 16.
    state = fleet("b9", *(f"{i} C b{i}" for i in range(9)), "9 P b0", "10 D b0")
    arrivals = ",".join(f"{20 + i}C b{i}" for i in range(6)) + ",30C b6 b7,31C b8"
    (clear, expand) = told(state, "PD", removed="0 1 2 3 4 5 6 7 8", arrivals=arrivals)
    assert clear.count("drain") == clear.count("stop") == 9
    assert "start 30 C b6 b7 <15 <16;" in expand


def test_all_that_come_are_admitted_in_order_of_slots() -> None:
    state = fleet("a4", "0 C a0 a1", "1 C a2")
    assert told(state, "CCCC", removed="0", arrivals="4C a0,5C a3,6C a1")[1] == (
        "expand: 2 start 5 C a3; 3 start 4 C a0 <1; 4 start 6 C a1 <1; 5 load 5 <2; 6 load 4 <3; 7 load 6 <4; "
        "8 admit 4 5 6 <5 <6 <7"
    )


def test_what_shares_workers_that_make_way_goes_together() -> None:
    # Slot 9 is the last to serve until one of the two parts has come: 0 and 1 go for both 4 and 6, joined by 5, which
    # lies across them; 2 goes for 7.
    state = fleet("a8", "0 C a0 a1", "1 C a2 a3", "2 C a4 a5")
    assert told(state, "CCCC", removed="0 1 2", arrivals="4C a0,5C a1 a2,6C a3,7C a4 a5") == [
        "clear: 0 drain 0; 1 drain 1; 2 stop 0 <0; 3 stop 1 <1",
        "expand: 4 start 4 C a0 <2; 5 start 5 C a1 a2 <2 <3; 6 start 6 C a3 <3; 7 load 4 <4; 8 load 5 <5; 9 load 6 <6; "
        "10 admit 4 5 6 <7 <8 <9",
        "clear: 11 drain 2 <10; 12 stop 2 <11",
        "expand: 13 start 7 C a4 a5 <12; 14 load 7 <13; 15 admit 7 <14",
    ]
    # The other way round: the one across comes last, and joins two parts that were apart.
    assert told(state, "CCC", removed="0 1 2", arrivals="4C a0,5C a3,6C a1 a2")[:1] == [
        "clear: 0 drain 0; 1 drain 1; 2 stop 0 <0; 3 stop 1 <1"
    ]


def test_turning_and_making_way_go_side_by_side() -> None:
    state = fleet("a8", "0 P a0", "1 P a1", "2 D a2", "3 D a3 a4", "4 P a5", "5 D a6")
    assert told(state, "PPDDD", turned="0D", removed="3", arrivals="6D a3,7D a4") == [
        "roles: 0 drain 0; 1 set 0 D <0; 2 admit 0 <1",
        "clear: 3 drain 3; 4 stop 3 <3",
        "expand: 5 start 6 D a3 <4; 6 start 7 D a4 <4; 7 load 6 <5; 8 load 7 <6; 9 admit 6 7 <7 <8",
    ]


def test_a_woken_worker_waits_for_those_that_leave_its_gpus() -> None:
    state = fleet("a1 b2t", "0 C a0", "1 C b0 b1", "2 C- b0", "3 C- b1")
    assert told(state, "CCC", returned="1", arrivals="2C,3C") == [
        "return: 0 drain 1; 1 sleep 1 <0",
        "expand: 2 wake 2 C <1; 3 wake 3 C <1; 4 load 2 <2; 5 load 3 <3; 6 admit 2 3 <4 <5",
    ]


def test_a_gap_lasts_until_someone_has_come() -> None:
    # The only prefill worker is taken back; slot 1 turning makes up for it, and the new one only adds to that.
    state = fleet("a3 b1t", "0 P b0", "1 D a0", "2 D a1")
    assert told(state, "PPD", returned="0", to_training="b0", turned="1P", arrivals="3P a2") == [
        "return gap: 0 drain 0; 1 sleep 0 <0; 2 back to training b0 <1",
        "roles gap: 3 drain 1; 4 set 1 P <3; 5 admit 1 <4",
        "expand gap: 6 start 3 P a2; 7 load 3 <6; 8 admit 3 <7",
    ]


def test_what_is_missing_already_holds_nobody_up_but_nothing_else_goes_missing() -> None:
    # Prefill is gone. The last decode worker may not turn before the new one serves.
    state = fleet("a3 b1t", "0 P b0", "1 D a0 a1")
    assert told(state, "PD", returned="0", to_training="b0", turned="1P", arrivals="3D a2") == [
        "return gap: 0 drain 0; 1 sleep 0 <0; 2 back to training b0 <1",
        "expand gap: 3 start 3 D a2; 4 load 3 <3; 5 admit 3 <4",
        "roles gap: 6 drain 1 <5; 7 set 1 P <6; 8 admit 1 <7",
    ]


def test_a_full_stop_is_no_gap() -> None:
    state = fleet("a2", "0 P a0", "1 D a1")
    assert told(state, "", removed="0 1") == ["surplus: 0 drain 0; 1 drain 1; 2 stop 0 <0; 3 stop 1 <1"]


def test_trainers_do_not_count_as_serving() -> None:
    state = fleet("a2 b1t", "0 T b0", "1 C a0")
    assert told(state, "C", turned="", removed="1", arrivals="2C a0 a1") == [
        "clear gap: 0 drain 1; 1 stop 1 <0",
        "expand gap: 2 start 2 C a0 a1 <1; 3 load 2 <2; 4 admit 2 <3",
    ]


def test_each_step_says_how_it_is_undone() -> None:
    state = fleet("a2 b1t", "0 C a0", "1 P b0")
    changes = Changes(
        returned=(state.workers[WorkerId(1)],),
        to_training=ids("b0"),
        vacated=(),
        to_source=(),
        removed=(),
        reassigned=MappingProxyType({WorkerId(0): D}),
        arrivals=(Arrival(worker=WorkerId(2), gpus=ids("a1"), role=P, wakes=False),),
    )
    groups = schedule(state, changes, {P: 1, D: 1})
    undos = {
        type(step.action).__name__ + str(getattr(step.action, "worker", "")): step.undo
        for group in groups
        for step in group.steps
    }
    assert undos["GiveBack"] is None
    assert undos["Start2"] == (Stop(worker=WorkerId(2)),)
    assert undos["SetRole0"] == (SetRole(worker=WorkerId(0), role=C),)
    assert undos["Drain0"] == (Admit(workers=(WorkerId(0),)),)
    assert any(isinstance(step.action, GiveBack) for step in groups[0].steps)
