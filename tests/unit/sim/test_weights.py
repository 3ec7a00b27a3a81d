"""A simulated weight store: when versions arrive where, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import WeightsError, WorkerLost
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest
from pearl.sim.network import Network
from pearl.sim.weights import SOURCE, SimWeightStore
from pearl.virtual_time import run_virtual

V0, V1, V2, V3 = (WeightVersion(n) for n in range(4))


@dataclass
class Versions:
    version: WeightVersion = V0


def a_store(
    bandwidth: float = 10.0, *, fan_out: int = 2, peers: bool = True, gather_s: float = 0.0
) -> tuple[SimWeightStore, Versions]:
    """100 bytes: 10 s from end to end."""
    trainer = Versions()
    network = Network(lambda _: bandwidth)
    store = SimWeightStore(trainer, network, {"body": 90, "head": 10}, fan_out=fan_out, peers=peers, gather_s=gather_s)
    return store, trainer


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def arrivals(store: SimWeightStore, manifest: Manifest, receivers: Sequence[str]) -> list[float]:
    """When each has it, all asking now."""
    began_s = now_s()

    async def one(receiver: str) -> float:
        await store.pull(receiver, manifest)
        return now_s() - began_s

    return list(await asyncio.gather(*(one(receiver) for receiver in receivers)))


def test_publishing_takes_what_gathering_takes() -> None:
    async def check() -> None:
        store, _ = a_store(gather_s=4.0)
        manifest = await store.publish(V0)
        assert now_s() == 4.0
        assert (manifest.size_bytes, store.size_bytes) == (100, 100)
        by_size = SimWeightStore(Versions(), Network(lambda _: 1.0), {"w": 60}, gather_s=lambda size: size / 20)
        await by_size.publish(V0)
        assert now_s() == 7.0

    run_virtual(check())


def test_receivers_of_a_source_share_its_bandwidth_up_to_the_fan_out() -> None:
    async def check() -> None:
        store, _ = a_store(peers=False)
        manifest = await store.publish(V0)
        # Two at a time at 5 bytes/s.
        assert await arrivals(store, manifest, ["a", "b", "c", "d", "e"]) == [20.0, 20.0, 40.0, 40.0, 50.0]
        assert store.pulls == [(V0, SOURCE, receiver) for receiver in "abcde"]

    run_virtual(check())


def test_who_has_it_serves_it_on() -> None:
    async def check() -> None:
        store, _ = a_store(fan_out=1)
        manifest = await store.publish(V0)
        # One at a time and holder: 1, 2, 4, 8 have it after 10, 20, 30 s.
        assert await arrivals(store, manifest, list("abcdefg")) == [10.0, 20.0, 20.0, 30.0, 30.0, 30.0, 30.0]
        assert store.pulls[:3] == [(V0, SOURCE, "a"), (V0, SOURCE, "b"), (V0, "a", "c")]

    run_virtual(check())


def test_who_asks_for_a_newer_version_serves_the_older_to_nobody_new() -> None:
    async def check() -> None:
        store, trainer = a_store(fan_out=1)
        first = await store.publish(V0)
        await store.pull("a", first)
        trainer.version = V1
        second = await store.publish(V1)
        newer = asyncio.create_task(store.pull("a", second))
        await asyncio.sleep(0)
        assert await arrivals(store, first, ["b"]) == [20.0]  # from the source, beside a's pull
        await newer
        assert store.pulls == [(V0, SOURCE, "a"), (V1, SOURCE, "a"), (V0, SOURCE, "b")]

    run_virtual(check())


def test_a_holder_that_leaves_is_replaced() -> None:
    async def check() -> None:
        store, _ = a_store(fan_out=1)
        manifest = await store.publish(V0)
        await store.pull("a", manifest)
        pulls = [asyncio.create_task(store.pull(name, manifest)) for name in ("b", "c")]  # from the source, from a
        await asyncio.sleep(5.0)
        store.leave("a")
        await asyncio.gather(*pulls)
        # c begins again once somebody is free: the source after b.
        assert now_s() == 30.0
        assert {pull[2] for pull in store.pulls} == {"a", "b", "c"}

    run_virtual(check())


def test_a_receiver_that_leaves_is_lost_and_holds_up_nobody() -> None:
    async def check() -> None:
        store, _ = a_store(fan_out=1, peers=False)
        manifest = await store.publish(V0)
        first, queued, last = (asyncio.create_task(store.pull(name, manifest)) for name in "abc")
        await asyncio.sleep(5.0)
        store.leave("a")
        store.leave("b")
        for task in (first, queued):
            with pytest.raises(WorkerLost):
                await task
        await last
        assert now_s() == 15.0
        await store.pull("a", manifest)

    run_virtual(check())


def test_a_receiver_that_gives_up_holds_up_nobody() -> None:
    async def check() -> None:
        store, _ = a_store(fan_out=1, peers=False)
        manifest = await store.publish(V0)
        tasks = [asyncio.create_task(store.pull(name, manifest)) for name in "abcd"]
        await asyncio.sleep(5.0)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert now_s() == 25.0
        assert [pull[2] for pull in store.pulls] == ["b", "d"]

    run_virtual(check())


def test_a_version_that_is_dropped_on_the_way_does_not_arrive() -> None:
    async def check() -> None:
        store, trainer = a_store(fan_out=1)
        manifest = await store.publish(V0)
        pulls = [asyncio.create_task(store.pull(name, manifest)) for name in "ab"]
        await asyncio.sleep(0)
        for version in (V1, V2):
            trainer.version = version
            await store.publish(version)
        for pull in pulls:
            with pytest.raises(WeightsError, match=r"version 0.*no longer kept"):
                await pull
        with pytest.raises(WeightsError, match=r"pull of version 0 by c: no longer kept, want one of \[1, 2\]"):
            await store.pull("c", manifest)
        assert store.kept == (V1, V2)

    run_virtual(check())


def test_what_is_being_gathered_takes_the_place_of_the_oldest() -> None:
    async def check() -> None:
        store, trainer = a_store(gather_s=5.0)
        for version in (V0, V1):
            trainer.version = version
            await store.publish(version)
        trainer.version = V2
        publication = asyncio.create_task(store.publish(V2))
        await asyncio.sleep(1.0)
        assert store.kept == (V1,)
        await publication
        assert store.kept == (V1, V2)

    run_virtual(check())


def test_damage_is_noticed_on_arrival() -> None:
    async def check() -> None:
        store, _ = a_store()
        manifest = await store.publish(V0)
        store.damage(V0, "head")
        with pytest.raises(WeightsError, match=r"pull of version 0 by a: head: its checksum is another"):
            await store.pull("a", manifest)

    run_virtual(check())


def test_large_tensors_only_travel() -> None:
    async def check() -> None:
        store = SimWeightStore(Versions(), Network(lambda _: 1e12), {"body": 16 * 10**9})
        manifest = await store.publish(V0)
        with pytest.raises(WeightsError, match=r"body: got 16000000000 simulated bytes, want at most 1048576; pull"):
            await store.fetch(manifest, ["body"])
        await store.pull("a", manifest)
        assert now_s() == pytest.approx(0.016)

    run_virtual(check())


def test_models_differ_by_their_tensors_or_as_they_are_told() -> None:
    network = Network(lambda _: 1.0)
    stores = [SimWeightStore(Versions(), network, tensors) for tensors in ({"a": 1}, {"a": 2}, {"b": 1})]
    assert len({store.model_hash for store in stores}) == 3
    told = SimWeightStore(Versions(), network, {"a": 1}, hash_of_model="prior-qwen3-8b")
    assert run_virtual(told.publish(V0)).model_hash == "prior-qwen3-8b"


def test_what_cannot_be() -> None:
    network = Network(lambda _: 1.0)
    with pytest.raises(ValueError, match=r"weight store: tensors: got \{\}, want at least one"):
        SimWeightStore(Versions(), network, {})
    with pytest.raises(ValueError, match=r"weight store: tensors: got .*-1"):
        SimWeightStore(Versions(), network, {"a": -1})
    with pytest.raises(ValueError, match=r"weight store: fan_out: got 0, want >= 1"):
        SimWeightStore(Versions(), network, {"a": 1}, fan_out=0)

    async def check() -> None:
        store, _ = a_store()
        with pytest.raises(WeightsError, match=r"publish: got version 1, want 0, the trainer's current one"):
            await store.publish(V1)
        tight = SimWeightStore(Versions(), network, {"a": 100}, budget_bytes=199)
        with pytest.raises(WeightsError, match=r"want them within 199 bytes; raise weights.host_budget_gib"):
            await tight.publish(V0)

    run_virtual(check())


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from("abcdef"), st.sampled_from(("pull", "leave", "cancel"))),
        max_size=25,
    ),
    st.integers(1, 3),
)
def test_every_pull_ends_and_no_holder_serves_more_than_it_may(
    script: list[tuple[int, str, str]], fan_out: int
) -> None:
    async def check() -> None:
        store, _ = a_store(fan_out=fan_out)
        manifest = await store.publish(V0)
        begun: dict[str, asyncio.Task[None]] = {}
        every: list[asyncio.Task[None]] = []
        for at_s, name, what in sorted(script, key=lambda entry: entry[0]):
            await asyncio.sleep(max(0.0, at_s - now_s()))
            if what == "leave":
                store.leave(name)
            elif what == "cancel" and name in begun:
                begun[name].cancel()
            elif what == "pull" and (name not in begun or begun[name].done()):
                begun[name] = asyncio.create_task(store.pull(name, manifest))
                every.append(begun[name])
            served: dict[str, int] = {}
            for transfers in store._network._leaving.values():
                for moving in transfers.values():
                    served[moving.source] = served.get(moving.source, 0) + 1
            assert max(served.values(), default=0) <= fan_out
        ended = await asyncio.gather(*every, return_exceptions=True)
        allowed = (WorkerLost, asyncio.CancelledError)
        assert all(end is None or isinstance(end, allowed) for end in ended)
        assert store._network.active == 0
        assert len(store.pulls) == sum(end is None for end in ended)
        # Nobody is left serving: as many as may be are served at once.
        others = [f"new {n}" for n in range(fan_out)]
        await arrivals(store, manifest, others)
        assert all(not holders for holders in store._spreads[V0]._serving[1:])

    run_virtual(check())
