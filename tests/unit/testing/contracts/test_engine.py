"""The suite accepts the fake, and finds every kind of broken engine made here from it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pearl.ports import EngineStats
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, TurnRequest, Versions
from pearl.testing.contracts.engine import EngineContract, EngineSubject
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import fake_manifest

CONFIG = FakeEngineConfig(
    token_s=0.001, progress_interval_s=0.003, load_s=0.002, turn_tokens=10**9, max_context_tokens=512
)


class Bent(FakeEngine):
    """Delivers what `bend` makes of each chunk."""

    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [chunk]

    def _deliver(self, request: TurnRequest, chunk: Chunk) -> None:
        for bent in self.bend(request, chunk):
            super()._deliver(request, bent)


class Duplicates(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [chunk, chunk]


class LosesTokensAtTheInterrupt(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        if chunk.end is not EndReason.INTERRUPTED or not len(chunk.token_ids):
            return [chunk]
        return [replace(chunk, token_ids=TokenIds(), logprobs=Floats(), versions=Versions())]


class NeverEnds(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [] if chunk.end is EndReason.LENGTH and request.id.endswith("3") else [chunk]


class SwallowsTheStopToken(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        if chunk.end is not EndReason.STOP:
            return [chunk]
        left = chunk.logprobs[:-1]
        versions = chunk.versions.of([(0, len(left))])
        return [replace(chunk, token_ids=chunk.token_ids[:-1], logprobs=left, versions=versions)]


class CallsAStopALength(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [replace(chunk, end=EndReason.LENGTH)] if chunk.end is EndReason.STOP else [chunk]


class ComputesEverything(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [replace(chunk, computed_prompt_tokens=len(request.context))]


class DrawsAfterItsMood(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        assert isinstance(chunk.token_ids, TokenIds)
        # One engine in two, and each request differently.
        ids = (chunk.token_ids.array + int(request.id[1:]) * (1 + self.worker)) % 97
        return [replace(chunk, token_ids=TokenIds(ids))]


class IgnoresTheSeed(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([replace(r, sampling=replace(r.sampling, seed=0)) for r in requests])


class IsNeverGreedy(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests])


class LeavesTheVocabulary(FakeEngine):
    def __init__(self, config: FakeEngineConfig, *, worker: int) -> None:
        super().__init__(replace(config, vocab=1000), worker=worker)


class GoesBeyondTheLimit(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([replace(r, max_new_tokens=r.max_new_tokens + 1) for r in requests])


class ServesAnyVersion(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([replace(r, min_version=WeightVersion(0)) for r in requests])


class InterruptsEverything(FakeEngine):
    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        await super().interrupt(self._generation.ids)


class IgnoresInterrupts(FakeEngine):
    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        pass


class RaisesForUnknownIds(FakeEngine):
    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        for one in ids:
            if one not in self._generation:
                raise KeyError(one)
        await super().interrupt(ids)


class KeepsWhatIsReleased(FakeEngine):
    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        pass


class TakesAnyWeights(FakeEngine):
    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        return await super().load(replace(manifest, model_hash=self.config.model_hash), mode)


class HoldsOnToItsVersion(FakeEngine):
    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        report = await super().load(manifest, mode)
        self._generation.version = WeightVersion(0)
        return report


class LosesWhatRunsAtALoad(FakeEngine):
    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        await super().interrupt(self._generation.ids)
        return await super().load(manifest, mode)


class CountsWrong(FakeEngine):
    async def stats(self) -> EngineStats:
        return replace(await super().stats(), generated_tokens=1)


class DiesQuietly(FakeEngine):
    async def _stream(self) -> AsyncIterator[tuple[Chunk, ...]]:
        stream = super()._stream()
        while not self.gone:
            yield await anext(stream)

    def kill(self, detail: str = "killed") -> None:
        self._gone = detail


class ImportsAnything(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        self._refusal = lambda request, now_s: None  # type: ignore[method-assign]
        await super().submit(requests)


class OwesAHandle(Bent):
    def bend(self, request: TurnRequest, chunk: Chunk) -> Sequence[Chunk]:
        return [replace(chunk, kv=None)]


class IgnoresExportFrom(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([replace(r, export_from=0) for r in requests])


class ImportsForDecodeOnly(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([r if r.mode is Mode.DECODE else replace(r, kv=None) for r in requests])


class ReleasesThePrefixWithAHandle(FakeEngine):
    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        await super().release(trajectory, kv)
        await super().release(trajectory)


class ReleasesHandlesWithThePrefix(FakeEngine):
    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        await super().release(trajectory, kv)
        self.kv._handles.clear()


class RefusesGaps(FakeEngine):
    def _refusal(self, request: TurnRequest, now_s: float) -> str | None:
        behind = request.kv is not None and request.kv.start > self.kv.cached_tokens(request.trajectory)
        return "a gap" if behind else super()._refusal(request, now_s)


class FillsGapsWithNothing(FakeEngine):
    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        await super().submit([r if r.kv is None else replace(r, kv=replace(r.kv, start=0)) for r in requests])


class TakesOldKv(FakeEngine):
    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        report = await super().load(manifest, mode)
        self._generation.load_mode = LoadMode.KEEP_KV
        return report


class TakesKvOfAnyModel(FakeEngine):
    def _refusal(self, request: TurnRequest, now_s: float) -> str | None:
        refused = super()._refusal(request, now_s)
        return None if refused is not None and "of model" in refused else refused


class TakesKvOfOtherTokens(FakeEngine):
    def _refusal(self, request: TurnRequest, now_s: float) -> str | None:
        refused = super()._refusal(request, now_s)
        return None if refused is not None and "other tokens" in refused else refused


class NeverSleeps(FakeEngine):
    def sleep(self) -> None:
        self.kv.invalidate()


class SleepsWithOpenHandles(FakeEngine):
    def sleep(self) -> None:
        handles, epoch = dict(self.kv._handles), self.kv.epoch
        super().sleep()
        self.kv._handles, self.kv.epoch = handles, epoch


class WakesReady(FakeEngine):
    def wake(self) -> None:
        super().wake()
        self._unready = None


class Suite(EngineContract):
    def __init__(self, make: Callable[..., FakeEngine]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
        yield [self.subject(self.make(CONFIG, worker=worker)) for worker in range(count)]

    def subject(self, engine: FakeEngine) -> EngineSubject:
        async def manifest(version: int) -> Manifest:
            return fake_manifest(version)

        async def foreign_manifest(version: int) -> Manifest:
            return fake_manifest(version, hash_="another")

        async def kill() -> None:
            engine.kill()

        async def sleep() -> None:
            engine.sleep()

        async def wake() -> None:
            engine.wake()

        def foreign_handle(handle: KvHandle) -> KvHandle:
            return replace(handle, payload=replace(handle.payload, model_hash="another"))

        return EngineSubject(
            engine=engine,
            vocab=97,
            manifest=manifest,
            foreign_manifest=foreign_manifest,
            kill=kill,
            sleep=sleep,
            wake=wake,
            foreign_handle=foreign_handle,
        )


def test_of(suite: Suite, name: str) -> Callable[[], None]:
    """A test of the suite, bound; those with a mode for both modes."""
    method = getattr(suite, f"test_{name}")
    if "new_weights_change" not in name:
        return method  # type: ignore[no-any-return]
    return lambda: [method(mode) for mode in LoadMode] and None


test_of.__test__ = False  # type: ignore[attr-defined]

BREACHES = [
    (Duplicates, "a_turn_ends_at_max_new_tokens"),
    (GoesBeyondTheLimit, "a_turn_ends_at_max_new_tokens"),
    (ComputesEverything, "a_second_turn_computes_only_what_is_new"),
    (KeepsWhatIsReleased, "a_second_turn_computes_only_what_is_new"),
    (LeavesTheVocabulary, "tokens_are_ids_of_the_vocabulary"),
    (IgnoresTheSeed, "equal_seeds_draw_equal_tokens"),
    (DrawsAfterItsMood, "equal_seeds_draw_equal_tokens"),
    (IsNeverGreedy, "greedy_does_not_depend_on_the_seed"),
    (SwallowsTheStopToken, "a_stop_token_ends_the_turn_and_is_kept"),
    (CallsAStopALength, "a_stop_token_ends_the_turn_and_is_kept"),
    (CallsAStopALength, "a_stop_token_as_the_last_one_allowed_is_a_stop"),
    (NeverEnds, "a_batch_ends_whole"),
    (CountsWrong, "a_batch_ends_whole"),
    (DrawsAfterItsMood, "tokens_do_not_depend_on_the_company"),
    (ServesAnyVersion, "a_bad_request_fails_alone"),
    (ImportsAnything, "a_bad_request_fails_alone"),
    (LosesTokensAtTheInterrupt, "an_interrupted_turn_continues_elsewhere_with_the_same_tokens"),
    (IgnoresInterrupts, "an_interrupted_turn_continues_elsewhere_with_the_same_tokens"),
    (DrawsAfterItsMood, "an_interrupted_turn_continues_elsewhere_with_the_same_tokens"),
    (DrawsAfterItsMood, "an_interrupted_turn_continues_on_the_same_engine"),
    (InterruptsEverything, "an_interrupt_ends_only_what_it_names"),
    (RaisesForUnknownIds, "an_interrupt_ends_only_what_it_names"),
    (HoldsOnToItsVersion, "new_weights_change_the_version_of_running_requests"),
    (LosesWhatRunsAtALoad, "new_weights_change_the_version_of_running_requests"),
    (TakesAnyWeights, "weights_of_another_model_are_refused_and_the_old_ones_stay"),
    (ServesAnyVersion, "a_request_waits_for_no_version_but_is_served_once_it_is_there"),
    (HoldsOnToItsVersion, "a_request_waits_for_no_version_but_is_served_once_it_is_there"),
    (DiesQuietly, "a_dead_worker_is_lost_to_every_caller"),
    (OwesAHandle, "prefill_and_decode_apart_draw_what_colocated_draws"),
    (ComputesEverything, "prefill_and_decode_apart_draw_what_colocated_draws"),
    (ImportsAnything, "decode_refuses_what_it_cannot_import"),
    (KeepsWhatIsReleased, "decode_refuses_what_it_cannot_import"),
    (TakesKvOfAnyModel, "decode_refuses_what_it_cannot_import"),
    (TakesKvOfOtherTokens, "decode_refuses_what_it_cannot_import"),
    (ImportsForDecodeOnly, "any_mode_may_bring_kv"),
    (ImportsForDecodeOnly, "kv_goes_back_to_the_prefill_engine"),
    (IgnoresExportFrom, "kv_goes_back_to_the_prefill_engine"),
    (IgnoresExportFrom, "nothing_new_is_not_exported"),
    (RefusesGaps, "kv_that_begins_behind_what_is_held_is_no_use_and_no_fault"),
    (FillsGapsWithNothing, "kv_that_begins_behind_what_is_held_is_no_use_and_no_fault"),
    (TakesOldKv, "kv_of_older_weights_is_no_use_to_an_engine_that_recomputes"),
    (ReleasesThePrefixWithAHandle, "releasing_a_handle_keeps_the_prefix"),
    (ReleasesHandlesWithThePrefix, "releasing_the_prefix_keeps_the_handle"),
    (NeverSleeps, "a_sleeping_engine_serves_nothing_and_wakes_without_its_kv"),
    (SleepsWithOpenHandles, "a_sleeping_engine_serves_nothing_and_wakes_without_its_kv"),
    (WakesReady, "a_sleeping_engine_serves_nothing_and_wakes_without_its_kv"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_engine_is_accepted(name: str) -> None:
    test_of(Suite(FakeEngine), name)()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_engine_is_found(
    broken: type[FakeEngine], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(test_of(Suite(broken), name))


def test_what_an_engine_cannot_do_is_not_asked_of_it() -> None:
    suite = Suite(ImportsAnything)
    suite.supports_pd = suite.reuses_prefix = suite.has_ids = False
    suite.test_decode_refuses_what_it_cannot_import()
    suite.test_prefill_and_decode_apart_draw_what_colocated_draws()
    suite.test_kv_goes_back_to_the_prefill_engine()
    suite.test_tokens_are_ids_of_the_vocabulary()
    suite.test_a_second_turn_computes_only_what_is_new()


def test_a_suite_needs_a_factory() -> None:
    with pytest.raises(NotImplementedError):
        EngineContract().engines(1)
