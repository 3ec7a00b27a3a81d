"""The part of the `Engine` contract on KV that moves between engines.

KV saves work and changes nothing: tokens are those of an engine that computes everything itself, whatever part of the KV
comes along. What a handle is no use for is computed; a handle that is not valid any more fails its request, alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from pearl.errors import WeightsError
from pearl.records.ids import RequestId, TrajectoryId
from pearl.records.tokens import Tokens
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, KvHandle, Mode, TurnRequest
from pearl.testing.contracts.base import Contract
from pearl.testing.contracts.engine_probe import EngineSubject, Log, Probe, Requests, token_context


class EngineKvContract(Contract):
    """Base of `EngineContract`."""

    supports_pd = True
    """Serves `Mode.PREFILL` and `Mode.DECODE`."""
    takes_kv_back = True
    """A released handle is refused at once; False: KV that has left its owner may be used as long as it is there."""
    has_ids = True
    """Deals in token ids; False: in counts."""
    logprob_tolerance = 1e-3
    """Between a request that was served whole and one that was continued elsewhere."""

    def engines(self, count: int) -> AbstractAsyncContextManager[Sequence[EngineSubject]]:
        """Fresh engines with equal weights."""
        raise NotImplementedError

    def context(self, vocab: int, tokens: int, salt: int) -> Tokens:
        """A context; another `salt`, another context."""
        return token_context(vocab, tokens, salt)

    @asynccontextmanager
    async def probes(self, count: int) -> AsyncIterator[tuple[Requests, list[Probe]]]:
        """Engines under test with their readers."""
        async with self.engines(count) as subjects:
            yield Requests(subjects[0].vocab, self.context), [Probe(subject) for subject in subjects]

    # -- there ------------------------------------------------------------------------------------------------------

    def test_prefill_and_decode_apart_draw_what_colocated_draws(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (prefill, decode)):
                whole = await prefill.generate(requests.make(max_new_tokens=8))
                first, request = await self._prefill(requests, prefill)
                assert len(first.token_ids) == 1
                assert first.kv is not None
                assert (first.kv.start, first.kv.tokens) == (0, len(request.context))
                rest = await decode.generate(self._decode(requests, request, first))
                assert rest.end is EndReason.LENGTH
                assert first.token_ids + rest.token_ids == whole.token_ids
                assert rest.computed < len(rest.request.context)

        self.check_pd(check)

    def test_any_mode_may_bring_kv(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (prefill, other)):
                whole = await prefill.generate(requests.make(max_new_tokens=8))
                first, request = await self._prefill(requests, prefill)
                rest = replace(self._decode(requests, request, first), mode=Mode.COLOCATED)
                log = await other.generate(rest)
                assert first.token_ids + log.token_ids == whole.token_ids
                assert log.computed < len(rest.context)

        self.check_pd(check)

    # -- and back ---------------------------------------------------------------------------------------------------

    def test_kv_goes_back_to_the_prefill_engine(self) -> None:
        async def check() -> None:
            async with self.probes(3) as (requests, (prefill, decode, alone)):
                first, request = await self._prefill(requests, prefill)
                rest, back = await self._decode_and_export(requests, decode, request, first)
                held = len(request.context)
                # The last token has not been through a forward pass.
                assert (back.start, back.tokens) == (held, held + 1 + len(rest.token_ids) - 1)
                assert first.kv is not None
                assert back.size_bytes * held == first.kv.size_bytes * (back.tokens - held)
                again = requests.next_turn(
                    rest.request, rest, 6, mode=Mode.PREFILL, kv=back, export_from=back.tokens, seed=11
                )
                prefilled = await prefill.generate(again)
                assert prefilled.computed == len(again.context) - back.tokens
                assert prefilled.kv is not None
                assert (prefilled.kv.start, prefilled.kv.tokens) == (back.tokens, len(again.context))
                last = await decode.generate(self._decode(requests, again, prefilled))
                assert last.computed == 1
                whole = await alone.generate(requests.make(context=again.context, max_new_tokens=again.max_new_tokens))
                assert prefilled.token_ids + last.token_ids == whole.token_ids

        self.check_pd(check)

    def test_kv_that_begins_behind_what_is_held_is_no_use_and_no_fault(self) -> None:
        async def check() -> None:
            async with self.probes(3) as (requests, (prefill, decode, stranger)):
                first, request = await self._prefill(requests, prefill)
                rest, back = await self._decode_and_export(requests, decode, request, first)
                again = requests.next_turn(rest.request, rest, 6, kv=back)
                log = await stranger.generate(again)
                assert log.end is EndReason.LENGTH
                assert log.computed == len(again.context)
                whole = await prefill.generate(requests.make(context=again.context))
                assert log.token_ids == whole.token_ids

        self.check_pd(check)

    def test_nothing_new_is_not_exported(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                log = await probe.generate(requests.make(max_new_tokens=4, export_kv=True, export_from=12 + 4 - 1))
                assert (log.end, log.kv) == (EndReason.LENGTH, None)
                log = await probe.generate(requests.make(max_new_tokens=4, export_kv=True, export_from=12 + 4 - 2))
                assert log.kv is not None
                assert (log.kv.start, log.kv.tokens) == (14, 15)

        self.check_pd(check)

    def test_kv_of_older_weights_is_no_use_to_an_engine_that_recomputes(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (prefill, decode)):
                first, request = await self._prefill(requests, prefill)
                manifest = await decode.subject.manifest(1)
                await decode.engine.load(manifest, LoadMode.RECOMPUTE)
                log = await decode.generate(self._decode(requests, request, first))
                assert log.end is EndReason.LENGTH
                assert log.computed == len(log.request.context)
                # One that keeps KV over a load takes it over as well.
                await decode.engine.load(manifest, LoadMode.KEEP_KV)
                kept = replace(self._decode(requests, request, first), trajectory=TrajectoryId("another"))
                assert (await decode.generate(kept)).computed == 1

        self.check_pd(check)

    # -- handles ----------------------------------------------------------------------------------------------------

    def test_decode_refuses_what_it_cannot_import(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (prefill, decode)):
                first, request = await self._prefill(requests, prefill)
                good = self._decode(requests, request, first)
                assert good.kv is not None
                bad = [
                    replace(good, id=RequestId("none"), kv=None),
                    replace(good, id=RequestId("epoch"), kv=replace(good.kv, epoch=good.kv.epoch + 1)),
                    replace(good, id=RequestId("late"), kv=replace(good.kv, expires_s=-1.0)),
                    replace(good, id=RequestId("short"), context=good.context[: good.kv.tokens - 1]),
                ]
                if self.has_ids:
                    other = self.context(decode.subject.vocab, len(good.context), 5)
                    bad.append(replace(good, id=RequestId("others"), context=other))
                if decode.subject.foreign_handle is not None:
                    bad.append(replace(good, id=RequestId("model"), kv=decode.subject.foreign_handle(good.kv)))
                for request in bad:
                    alone = replace(request, trajectory=TrajectoryId(f"of {request.id}"))
                    log = await decode.generate(alone)
                    assert (log.end, log.kv) == (EndReason.FAILED, None), request.id
                await prefill.engine.release(good.trajectory, good.kv)
                await prefill.engine.stats()  # a release may take effect a little later, as nobody waits for one
                released = (await decode.generate(good)).end
                assert released is (EndReason.FAILED if self.takes_kv_back else EndReason.LENGTH)

        self.check_pd(check)

    def test_releasing_a_handle_keeps_the_prefix(self) -> None:
        async def check() -> None:
            async with self.probes(1) as (requests, (probe,)):
                first, request = await self._prefill(requests, probe)
                await probe.engine.release(request.trajectory, first.kv)
                again = await probe.generate(requests.rest(replace(request, mode=Mode.COLOCATED), first))
                assert again.computed == 1

        self.check_pd(check)

    def test_releasing_the_prefix_keeps_the_handle(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (prefill, decode)):
                first, request = await self._prefill(requests, prefill)
                await prefill.engine.release(request.trajectory)
                rest = await decode.generate(self._decode(requests, request, first))
                assert (rest.end, rest.computed) == (EndReason.LENGTH, 1)
                forgotten = await prefill.generate(requests.rest(replace(request, mode=Mode.COLOCATED), first))
                assert forgotten.computed == len(request.context) + 1

        self.check_pd(check)

    def test_a_sleeping_engine_serves_nothing_and_wakes_without_its_kv(self) -> None:
        async def check() -> None:
            async with self.probes(2) as (requests, (sleeper, decode)):
                if sleeper.subject.sleep is None or sleeper.subject.wake is None:
                    return
                first, request = await self._prefill(requests, sleeper)
                epoch = (await sleeper.engine.info()).epoch
                await sleeper.subject.sleep()
                assert (await sleeper.generate(requests.make())).end is EndReason.FAILED
                with pytest.raises(WeightsError):
                    await sleeper.engine.load(await sleeper.subject.manifest(1), LoadMode.RECOMPUTE)
                await sleeper.subject.wake()
                assert (await sleeper.engine.info()).epoch > epoch
                assert (await sleeper.generate(requests.make())).end is EndReason.FAILED
                if self.takes_kv_back:
                    assert (await decode.generate(self._decode(requests, request, first))).end is EndReason.FAILED
                await sleeper.engine.load(await sleeper.subject.manifest(1), LoadMode.RECOMPUTE)
                log = await sleeper.generate(requests.rest(replace(request, mode=Mode.COLOCATED), first))
                assert log.end is EndReason.LENGTH
                assert log.computed == len(request.context) + 1

        self.check_pd(check)

    # -- steps ------------------------------------------------------------------------------------------------------

    def check_pd(self, check: Callable[[], Coroutine[object, object, None]]) -> None:
        """Check what only engines that serve prefill and decode apart are asked for."""
        if self.supports_pd:
            self.check(check())

    async def _prefill(self, requests: Requests, prefill: Probe) -> tuple[Log, TurnRequest]:
        request = requests.make(max_new_tokens=8, mode=Mode.PREFILL, export_kv=True)
        return await prefill.generate(request), request

    def _decode(self, requests: Requests, request: TurnRequest, first: Log) -> TurnRequest:
        rest = requests.rest(request, first)
        return replace(rest, mode=Mode.DECODE, kv=first.kv, export_kv=False)

    async def _decode_and_export(
        self, requests: Requests, decode: Probe, request: TurnRequest, first: Log
    ) -> tuple[Log, KvHandle]:
        wanted = replace(self._decode(requests, request, first), export_kv=True, export_from=len(request.context))
        rest = await decode.generate(wanted)
        assert rest.end is EndReason.LENGTH
        assert rest.kv is not None
        return rest, rest.kv
