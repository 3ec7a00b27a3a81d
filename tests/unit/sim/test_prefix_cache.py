"""The memory of a simulated engine: by hand, and its sums against what is in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion
from pearl.sim.prefix_cache import NO_PREFIX, PrefixCache

V0, V1 = WeightVersion(0), WeightVersion(1)
A, B, C = (TrajectoryId(name) for name in "abc")
H, G = HandleId("h"), HandleId("g")


def test_the_prefix_used_longest_ago_leaves_first() -> None:
    cache = PrefixCache(100)
    for trajectory, tokens in ((A, 40), (B, 30), (C, 20)):
        cache.keep(trajectory, tokens, V0)
    cache.keep(A, 45, V1)
    cache.held_tokens = 6
    cache.make_room()
    assert [cache.find(one) for one in (A, B, C)] == [(45, V1), NO_PREFIX, (20, V0)]
    assert (cache.used_tokens, cache.free_tokens) == (71, 94)


def test_an_export_stays_and_its_end_counts_as_a_use() -> None:
    cache = PrefixCache(100)
    cache.keep(A, 40, V0)
    cache.pin(A, H, 40, 5.0)
    cache.keep(B, 30, V0)
    cache.held_tokens = 80
    cache.make_room()
    assert (cache.pinned_tokens, cache.cached_tokens) == (40, 0)
    assert cache.soonest_end_s == 5.0
    cache.held_tokens = 20
    cache.keep(C, 30, V0)
    assert (cache.expire(4.9), cache.expire(5.0), cache.expire(9.0)) == ([], [H], [])
    cache.held_tokens = 50
    cache.make_room()
    assert [cache.find(one)[0] for one in (A, C)] == [40, 0]


def test_a_request_shares_its_prefix_with_exports_of_it() -> None:
    cache = PrefixCache(100)
    cache.keep(A, 40, V0)
    cache.pin(A, H, 40, 5.0)
    assert (cache.free_tokens, cache.room_for(A), cache.room_for(B)) == (60, 100, 60)
    cache.take(A)
    assert (cache.pinned_tokens, cache.find(A)) == (0, NO_PREFIX)
    cache.forget(A)
    cache.keep(A, 50, V1)
    assert (cache.pinned_tokens, cache.find(A)) == (50, (50, V1))
    cache.forget_all()
    assert (cache.pinned_tokens, cache.find(A)[0]) == (40, 0)
    assert (cache.unpin(A, H), cache.unpin(A, H), cache.used_tokens) == (True, False, 0)
    assert cache.soonest_end_s is None


def test_all_can_be_dropped() -> None:
    cache = PrefixCache(100)
    cache.keep(A, 40, V0)
    cache.keep(B, 10, V0)
    cache.pin(B, H, 10, 1.0)
    cache.clear()
    assert (cache.used_tokens, cache.soonest_end_s, cache.is_pinned(B, H)) == (0, None, False)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "take", "forget", "pin", "unpin", "expire", "void", "room"]),
        st.sampled_from([A, B, C]),
        st.integers(0, 60),
    ),
    max_size=40,
)


@given(STEPS)
def test_sums_are_those_of_what_is_in_it(steps: list[tuple[str, TrajectoryId, int]]) -> None:
    cache, now_s, handles = PrefixCache(100), 0.0, []
    for kind, trajectory, tokens in steps:
        now_s += 1
        match kind:
            case "keep":
                cache.keep(trajectory, tokens, V0)
            case "take":
                cache.take(trajectory)
            case "forget":
                cache.forget(trajectory)
            case "pin":
                handles.append((trajectory, HandleId(f"{len(handles)}")))
                cache.pin(*handles[-1], tokens, now_s + 5)
            case "unpin" if handles:
                cache.unpin(*handles[tokens % len(handles)])
            case "expire":
                cache.expire(now_s)
            case "void":
                cache.forget_all()
            case "room":
                cache.make_room()
                assert cache.used_tokens <= 100 or not cache.cached_tokens
        entries = cache._entries.values()
        assert cache.pinned_tokens == sum(one.size for one in entries if one.pins)
        assert cache.cached_tokens == sum(one.size for one in entries if not one.pins)
        assert set(cache._order) == {name for name, one in cache._entries.items() if not one.pins}
