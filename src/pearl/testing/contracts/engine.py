"""Contract of `Engine`.

Chunks of a request join without gap or overlap and end once; log-probabilities and versions cover the tokens; tokens are
a function of (context, seed, position), so an interrupted request continues elsewhere with the same tokens; a bad request
fails alone; new weights change the versions of running requests and bad weights change nothing; a dead worker says so.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pearl.errors import WeightsError, WorkerLost
from pearl.records.ids import RequestId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, TurnRequest
from pearl.testing.contracts.engine_kv import EngineKvContract
from pearl.testing.contracts.engine_probe import EngineSubject, Log, Probe, Requests

__all__ = ["EngineContract", "EngineSubject"]


class EngineContract(EngineKvContract):
    """Subclass it and give `engines`."""

    long_tokens = 64
    """Tokens of a request that must still be running when the test has read its first chunk and answered."""
    pending_s = 0.002
    """Waited before an interrupt, so that there are tokens that no progress delta has carried yet."""
    batch = 64
    """Requests submitted at once; an engine may queue what it cannot hold."""
    reuses_prefix = True
    """Caches a trajectory's prefix between turns."""

    # -- one turn ---------------------------------------------------------------------------------------------------

    def test_a_turn_ends_at_max_new_tokens(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                request = requests.make(max_new_tokens=5)
                log = await probe.generate(request)
                assert log.end is EndReason.LENGTH
                assert len(log.token_ids) == 5
                assert [(run.version, run.tokens) for run in log.versions.runs] == [(0, 5)]
                assert log.computed == len(request.context)

        self.check(check())

    def test_a_turn_ends_at_the_context_limit(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                limit = (await probe.engine.info()).max_context_tokens
                log = await probe.generate(requests.make(context_tokens=limit - 3, max_new_tokens=50))
                assert log.end is EndReason.LENGTH
                assert 1 <= len(log.token_ids) <= 3

        self.check(check())

    def test_a_context_that_has_reached_the_limit_ends_at_once(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                limit = (await probe.engine.info()).max_context_tokens
                log = await probe.generate(requests.make(context_tokens=limit, max_new_tokens=5))
                assert (log.end, len(log.token_ids)) == (EndReason.LENGTH, 0)

        self.check(check())

    def test_tokens_are_ids_of_the_vocabulary(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                log = await probe.generate(requests.make(max_new_tokens=20))
                assert isinstance(log.token_ids, TokenIds)
                ids = log.token_ids.array
                assert ((ids >= 0) & (ids < probe.subject.vocab)).all()

        if self.has_ids:
            self.check(check())

    def test_equal_seeds_draw_equal_tokens(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                first = await probe.generate(requests.make(seed=5, max_new_tokens=24))
                again = await probe.generate(requests.make(seed=5, max_new_tokens=24))
                other = await probe.generate(requests.make(seed=6, max_new_tokens=24))
                assert again.token_ids == first.token_ids
                assert np.allclose(again.logprobs.array, first.logprobs.array, atol=self.logprob_tolerance)
                assert not self.has_ids or other.token_ids != first.token_ids

        self.check(check())

    def test_greedy_does_not_depend_on_the_seed(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                first = await probe.generate(requests.make(seed=5, temperature=0, max_new_tokens=8))
                other = await probe.generate(requests.make(seed=6, temperature=0, max_new_tokens=8))
                assert other.token_ids == first.token_ids

        self.check(check())

    def test_a_stop_token_ends_the_turn_and_is_kept(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                free = await probe.generate(requests.make(max_new_tokens=8))
                assert isinstance(free.token_ids, TokenIds)
                drawn = free.token_ids.tolist()
                expected = drawn[: drawn.index(drawn[3]) + 1]
                log = await probe.generate(requests.make(max_new_tokens=8, stops=(drawn[3],)))
                assert log.end is EndReason.STOP
                assert isinstance(log.token_ids, TokenIds)
                assert log.token_ids.tolist() == expected

        if self.has_ids:
            self.check(check())

    def test_a_stop_token_as_the_last_one_allowed_is_a_stop(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                free = await probe.generate(requests.make(max_new_tokens=1))
                assert isinstance(free.token_ids, TokenIds)
                log = await probe.generate(requests.make(max_new_tokens=1, stops=tuple(free.token_ids.tolist())))
                assert log.end is EndReason.STOP

        if self.has_ids:
            self.check(check())

    def test_a_second_turn_computes_only_what_is_new(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                first, second = await self._two_turns(requests, probe, release=False)
                # The last token of a turn has not been through a forward pass yet.
                assert 0 < second.computed <= len(second.request.context) - len(first.request.context)
                _, released = await self._two_turns(requests, probe, release=True)
                assert released.computed == len(released.request.context)

        if self.reuses_prefix:
            self.check(check())

    async def _two_turns(self, requests: Requests, probe: Probe, *, release: bool) -> tuple[Log, Log]:
        first = requests.make(context_tokens=20, max_new_tokens=4)
        log = await probe.generate(first)
        if release:
            await probe.engine.release(first.trajectory)
        observation = self.context(probe.subject.vocab, 6, 1)
        context = first.context + log.token_ids + observation
        second = requests.make(context=context, max_new_tokens=4, trajectory=first.trajectory, turn=1)
        return log, await probe.generate(second)

    # -- many requests ----------------------------------------------------------------------------------------------

    def test_a_batch_ends_whole(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                batch = [
                    requests.make(salt=n, seed=n, context_tokens=3 + n % 7, max_new_tokens=1 + n % 9)
                    for n in range(self.batch)
                ]
                await probe.submit(*batch)
                for n, request in enumerate(batch):
                    log = await probe.ended(request)
                    assert log.end is EndReason.LENGTH
                    assert len(log.token_ids) == 1 + n % 9
                stats = await probe.engine.stats()
                assert (stats.running, stats.waiting) == (0, 0)
                assert stats.generated_tokens == sum(len(log.token_ids) for log in probe.logs.values())

        self.check(check())

    def test_tokens_do_not_depend_on_the_company(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                alone = await probe.generate(requests.make(seed=3, max_new_tokens=12))
                same = requests.make(seed=3, max_new_tokens=12)
                await probe.submit(*[requests.make(salt=n, seed=n) for n in range(5)], same)
                assert (await probe.ended(same)).token_ids == alone.token_ids

        self.check(check())

    def test_a_bad_request_fails_alone(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                limit = (await probe.engine.info()).max_context_tokens
                good = requests.make(max_new_tokens=4)
                bad = [
                    requests.make(context=good.context[:0]),
                    requests.make(max_new_tokens=0),
                    requests.make(context_tokens=limit + 1),
                    requests.make(min_version=1),
                ]
                await probe.submit(*bad[:2], good, *bad[2:])
                for request in bad:
                    log = await probe.ended(request)
                    assert log.end is EndReason.FAILED
                    assert log.error
                    assert len(log.token_ids) == 0
                assert (await probe.ended(good)).end is EndReason.LENGTH

        self.check(check())

    # -- interruption -----------------------------------------------------------------------------------------------

    def test_an_interrupted_turn_continues_elsewhere_with_the_same_tokens(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (here, there)):
                whole = await here.generate(requests.make(max_new_tokens=self.long_tokens))
                request = requests.make(max_new_tokens=self.long_tokens)
                first = await self._interrupt(here, request)
                done = len(first.token_ids)
                assert 1 <= done < self.long_tokens
                rest = await there.generate(requests.rest(request, first))
                joined = first.token_ids + rest.token_ids
                assert rest.end is EndReason.LENGTH
                assert joined == whole.token_ids
                logprobs = (first.logprobs + rest.logprobs).array
                assert np.allclose(logprobs, whole.logprobs.array, atol=self.logprob_tolerance)

        self.check(check())

    def test_an_interrupted_turn_continues_on_the_same_engine(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                whole = await probe.generate(requests.make(max_new_tokens=self.long_tokens))
                request = requests.make(max_new_tokens=self.long_tokens)
                first = await self._interrupt(probe, request)
                rest = await probe.generate(requests.rest(request, first))
                assert first.token_ids + rest.token_ids == whole.token_ids

        self.check(check())

    def test_an_interrupt_ends_only_what_it_names(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                stays = requests.make(salt=1, max_new_tokens=self.long_tokens)
                goes = requests.make(salt=2, max_new_tokens=self.long_tokens)
                await probe.submit(stays, goes)
                await probe.some_tokens(goes)
                await probe.engine.interrupt([RequestId("nobody"), goes.id, goes.id])
                assert (await probe.ended(goes)).end is EndReason.INTERRUPTED
                await probe.engine.interrupt([goes.id])
                assert (await probe.ended(stays)).end is EndReason.LENGTH

        self.check(check())

    async def _interrupt(self, probe: Probe, request: TurnRequest) -> Log:
        await probe.submit(request)
        await probe.some_tokens(request)
        await asyncio.sleep(self.pending_s)
        await probe.engine.interrupt([request.id])
        log = await probe.ended(request)
        assert log.end is EndReason.INTERRUPTED
        delivered = sum(len(log.token_ids) for log in probe.logs.values())
        assert (await probe.engine.stats()).generated_tokens == delivered, "the interrupt lost a token"
        return log

    # -- weights ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", list(LoadMode))
    def test_new_weights_change_the_version_of_running_requests(self, mode: LoadMode) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                request = requests.make(max_new_tokens=self.long_tokens)
                await probe.submit(request)
                await probe.some_tokens(request)
                manifest = await probe.subject.manifest(1)
                report = await probe.engine.load(manifest, mode)
                log = await probe.ended(request)
                assert report.version == 1
                assert report.loaded_bytes == manifest.size_bytes
                assert (report.recomputed_tokens > 0) == (mode is LoadMode.RECOMPUTE)
                assert log.end is EndReason.LENGTH
                assert [run.version for run in log.versions.runs] == [0, 1]
                assert len(log.token_ids) == self.long_tokens
                assert (await probe.engine.stats()).version == 1

        self.check(check())

    def test_weights_of_another_model_are_refused_and_the_old_ones_stay(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                before = await probe.generate(requests.make())
                with pytest.raises(WeightsError):
                    await probe.engine.load(await probe.subject.foreign_manifest(1), LoadMode.RECOMPUTE)
                after = await probe.generate(requests.make())
                assert after.token_ids == before.token_ids
                assert after.versions.oldest == 0
                assert (await probe.engine.stats()).version == 0

        self.check(check())

    def test_a_request_waits_for_no_version_but_is_served_once_it_is_there(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                assert (await probe.generate(requests.make(min_version=1))).end is EndReason.FAILED
                await probe.engine.load(await probe.subject.manifest(1), LoadMode.KEEP_KV)
                log = await probe.generate(requests.make(min_version=1))
                assert log.end is EndReason.LENGTH
                assert log.versions.oldest == 1

        self.check(check())

    def test_the_manifest_is_of_the_engines_model(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (_, (probe,)):
                assert (await probe.subject.manifest(1)).model_hash == (await probe.engine.info()).model_hash

        self.check(check())

    # -- death ------------------------------------------------------------------------------------------------------

    def test_a_dead_worker_is_lost_to_every_caller(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                if probe.subject.kill is None:
                    return
                request = requests.make(max_new_tokens=self.long_tokens)
                await probe.submit(request)
                await probe.some_tokens(request)
                await probe.subject.kill()
                with pytest.raises(WorkerLost):
                    await probe.ended(request)
                with pytest.raises(WorkerLost):
                    await probe.engine.submit([requests.make()])
                with pytest.raises(WorkerLost):
                    await probe.engine.stats()

        self.check(check())
