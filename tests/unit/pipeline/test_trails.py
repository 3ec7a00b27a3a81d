"""What is noted of KV, and when it is dropped."""

from __future__ import annotations

from dataclasses import replace

from pearl.pipeline.trails import Trail, Trails
from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import EndReason, KvHandle

A, B = TrajectoryId("a"), TrajectoryId("b")
W0, W1 = WorkerId(0), WorkerId(1)


def handle(owner: int, version: int = 0) -> KvHandle:
    return KvHandle(
        id=HandleId(f"{owner}"),
        owner=WorkerId(owner),
        epoch=0,
        tokens=9,
        size_bytes=9,
        version=WeightVersion(version),
        expires_s=99,
    )


def test_a_worker_holds_all_but_the_last_token_that_it_drew() -> None:
    trail = Trail()
    trail.note(W0, 10, 4, EndReason.STOP)
    assert trail.held == {0: 13}
    trail.note(W0, 20, 0, EndReason.INTERRUPTED)  # nothing is known of how far it came
    assert trail.held == {0: 13}
    trail.note(W0, 20, 3, EndReason.FAILED)  # the engine may have dropped everything
    assert trail.held == {0: 0}


def test_a_worker_takes_what_it_held_with_it() -> None:
    trails = Trails()
    trails.of(A).held.update({W0: 5, W1: 6})
    trails.of(A).readback = handle(1)
    trails.of(B).held[W0] = 7
    trails.of(B).readback = handle(0)
    trails.drop_worker(W1)
    assert (trails.of(A).held, trails.of(A).readback) == ({0: 5}, None)
    assert (trails.of(B).held, trails.of(B).readback) == ({0: 7}, handle(0))


def test_new_weights_void_kv_and_older_handles() -> None:
    trails = Trails()
    trails.of(A).held.update({W0: 5, W1: 6})
    trails.of(A).readback = handle(1, version=1)
    trails.of(B).readback = handle(1, version=2)
    assert trails.void(W0, WeightVersion(2)) == [(A, handle(1, version=1))]
    assert trails.of(A).held == {0: 0, 1: 6}  # named still: it is to be told when the trajectory ends
    assert (trails.of(A).readback, trails.of(B).readback) == (None, handle(1, version=2))
    assert W0 not in trails.of(B).held


def test_a_trajectory_is_forgotten_once() -> None:
    trails = Trails()
    trail = trails.of(A)
    assert trails.of(A) is trail
    assert trails.pop(A) is trail
    assert trails.pop(A) is None
    assert len(trails) == 0


def test_kept_handles_expire_unless_they_were_taken_or_replaced() -> None:
    trails = Trails()
    first, second, third = (replace(handle(n), expires_s=10.0 + n) for n in range(3))
    trails.keep(A, trails.of(A), first)
    trails.keep(B, trails.of(B), second)
    trails.keep(A, trails.of(A), third)
    assert trails.expired(9.0) == []
    assert trails.expired(11.0) == [(B, second)], "the first was replaced"
    assert trails.of(B).readback is None
    trails.pop(A)
    assert trails.expired(99.0) == [], "the third went with its trajectory"
