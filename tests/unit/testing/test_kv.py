from dataclasses import replace

import pytest

from pearl.records.ids import TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import KvHandle, Mode, TurnRequest
from pearl.testing.kv import FakeKv, kv_refusal
from tests.unit.testing._engine import request

A, B, C = (TrajectoryId(name) for name in "abc")
V3 = WeightVersion(3)


def kv(capacity_tokens: int = 100) -> FakeKv:
    return FakeKv(worker=WorkerId(4), model_hash="m", capacity_tokens=capacity_tokens, bytes_per_token=10, ttl_s=5)


def test_prefixes_are_kept_until_they_are_forgotten() -> None:
    one = kv()
    one.keep(A, 30, V3)
    one.keep(B, 20, V3)
    one.keep(A, 40, V3)
    assert (one.cached_tokens(A), one.cached_tokens(B), one.cached_tokens(C)) == (40, 20, 0)
    assert one.used_tokens == 60
    one.forget(A)
    one.forget(C)
    assert (one.cached_tokens(A), one.used_tokens) == (0, 20)
    one.forget_all()
    assert (one.cached_tokens(B), one.used_tokens) == (0, 0)


def test_the_least_recently_kept_make_room() -> None:
    one = kv()
    for trajectory, tokens in ((A, 40), (B, 40), (A, 50)):
        one.keep(trajectory, tokens, V3)
    one.keep(C, 30, V3)
    assert [one.cached_tokens(trajectory) for trajectory in (A, B, C)] == [50, 0, 30]
    # Larger than everything: nothing fits.
    one.keep(B, 101, V3)
    assert one.used_tokens == 0


def test_a_handle_says_what_it_is_for() -> None:
    handle = kv().export(TokenIds([1] * 12), V3, now_s=7)
    assert (handle.owner, handle.epoch, handle.tokens, handle.size_bytes) == (4, 0, 12, 120)
    assert (handle.version, handle.expires_s) == (3, 12)


def test_handles_have_names_of_their_own() -> None:
    one = kv()
    assert len({one.export(TokenIds([1] * 1), V3, now_s=0).id for _ in range(3)}) == 3


def test_a_handle_is_good_until_it_expires_or_is_released() -> None:
    one = kv()
    handle = one.export(TokenIds([1] * 12), V3, now_s=7)
    assert one.refusal(handle, 12) is None
    assert "expired at 12 s, now 12.5 s" in (one.refusal(handle, 12.5) or "")
    one.release(handle)
    one.release(handle)
    assert "was released" in (one.refusal(handle, 8) or "")


def test_an_expired_handle_is_swept_and_others_stay() -> None:
    one = kv()
    old, young = one.export(TokenIds([1] * 1), V3, now_s=0), one.export(TokenIds([1] * 1), V3, now_s=3)
    one.export(TokenIds([1] * 1), V3, now_s=6)
    assert one.refusal(old, 4) is not None
    assert one.refusal(young, 4) is None


def test_a_new_epoch_ends_everything() -> None:
    one = kv()
    one.keep(A, 10, V3)
    handle = one.export(TokenIds([1] * 10), V3, now_s=0)
    one.invalidate()
    assert (one.epoch, one.cached_tokens(A)) == (1, 0)
    assert "got epoch 0, want 1" in (one.refusal(handle, 1) or "")
    # A handle that claims the new epoch is none that was given out in it.
    assert "was released" in (one.refusal(replace(handle, epoch=1), 1) or "")
    assert one.export(TokenIds([1] * 10), V3, now_s=0).epoch == 1


def test_the_dead_serve_nothing() -> None:
    one = kv()
    handle = one.export(TokenIds([1] * 10), V3, now_s=0)
    one.lost = True
    assert "worker 4, is gone" in (one.refusal(handle, 1) or "")


def test_an_export_leaves_out_what_the_receiver_holds() -> None:
    handle = kv().export(TokenIds([1] * 12), V3, now_s=7, start=4)
    assert (handle.start, handle.tokens, handle.size_bytes) == (4, 12, 80)


def test_what_is_held_and_given_out_can_be_read() -> None:
    one = kv()
    one.keep(A, 10, V3)
    one.keep(B, 10, WeightVersion(2))
    first, second = (one.export(TokenIds([1]), V3, now_s=at_s) for at_s in (0, 3))
    assert (one.trajectories, one.cached(B), one.cached(C)) == ([A, B], (10, 2), (0, 0))
    assert [handle.id for handle in one.handles(4)] == [first.id, second.id]
    assert [handle.id for handle in one.handles(5)] == [second.id]


def importing(handle: KvHandle | None, context: list[int], mode: Mode = Mode.DECODE) -> TurnRequest:
    return request("r", context=TokenIds(context), mode=mode, kv=handle)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"payload": "x"}, "got a payload of str, want one of a fake engine"),
        ({"start": 13}, "got KV of tokens 13 .. 12, want a beginning of the 20 of the context"),
        ({"start": -1}, "got KV of tokens -1 .. 12"),
        ({"tokens": 21}, "got KV of tokens 0 .. 21"),
        ({"tokens": 13}, "got KV of other tokens than the context's"),
        ({"epoch": 1}, "got epoch 1, want 0"),
    ],
)
def test_what_cannot_be_imported(change: dict[str, object], why: str | None) -> None:
    handle = replace(kv().export(TokenIds(range(12)), V3, now_s=0), **change)  # type: ignore[arg-type]
    for mode in Mode:
        refused = kv_refusal(importing(handle, list(range(20)), mode), "m", 1)
        assert (refused is None) if why is None else (why in (refused or ""))


def test_kv_of_another_model_or_of_other_tokens_or_none_at_all() -> None:
    handle = kv().export(TokenIds(range(12)), V3, now_s=0)
    assert "got KV of model m, want n" in (kv_refusal(importing(handle, list(range(20))), "n", 1) or "")
    others = importing(handle, [*range(11), 5, 5])
    assert "of other tokens" in (kv_refusal(others, "m", 1) or "")
    assert "want one with mode decode" in (kv_refusal(importing(None, [1]), "m", 1) or "")
    assert kv_refusal(importing(None, [1], Mode.COLOCATED), "m", 1) is None
