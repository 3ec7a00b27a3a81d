import hashlib

import pytest

from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import Manifest, Shard, TrainingBatch, TrainingSample, model_hash
from pearl.records.turn import Versions


def sample(name: str, group: str, versions: list[tuple[int, int]]) -> TrainingSample:
    trained = sum(tokens for _, tokens in versions)
    return TrainingSample(
        trajectory=TrajectoryId(name),
        group=GroupId(group),
        token_ids=TokenIds(range(trained + 1)),
        trained=((1, trained + 1),),
        logprobs=Floats([-1.0] * trained),
        versions=Versions.of(versions),
        reward=0.0,
    )


def batch(version: int, *samples: TrainingSample) -> TrainingBatch:
    return TrainingBatch(version=WeightVersion(version), samples=samples)


def test_groups_are_listed_once_in_order() -> None:
    samples = [sample(name, group, [(0, 1)]) for name, group in ("ab", "cd", "eb", "ff", "gd")]
    assert batch(0, *samples).groups == ("b", "d", "f")


def test_staleness_counts_every_trained_token() -> None:
    # Version 5 trains: 3 tokens of version 5, 2 + 4 of version 4, 1 of version 2.
    both = batch(5, sample("a", "g", [(4, 2), (5, 3)]), sample("b", "g", [(2, 1), (4, 4)]))
    assert both.staleness_tokens == {0: 3, 1: 6, 3: 1}
    assert list(both.staleness_tokens) == [0, 1, 3]
    assert both.staleness_max == 3


def test_a_batch_of_nothing() -> None:
    assert batch(3).groups == ()
    assert batch(3).staleness_tokens == {}
    assert batch(3).staleness_max == 0


def shard(name: str, size_bytes: int) -> Shard:
    return Shard(
        name=name, dtype="F32", shape=(1,), start=(0,), size_bytes=size_bytes, checksum="crc32:00000000", locations=()
    )


def test_a_manifest_is_as_large_as_its_shards() -> None:
    shards = (shard("a", 12), shard("b", 30))
    assert Manifest(version=WeightVersion(1), model_hash="x", shards=shards).size_bytes == 42
    assert Manifest(version=WeightVersion(1), model_hash="x", shards=()).size_bytes == 0


TENSORS = [("b.weight", "F32", (2, 3)), ("a.weight", "BF16", (4,))]


def test_the_model_hash_is_pinned() -> None:
    # Engines and trainers of different processes must agree on it, and checkpoints keep it.
    text = b"a.weight|BF16|4\nb.weight|F32|2,3\n"
    assert model_hash(TENSORS) == hashlib.blake2b(text, digest_size=8).hexdigest()
    assert len(model_hash(TENSORS)) == 16


def test_the_model_hash_knows_no_order() -> None:
    assert model_hash(reversed(TENSORS)) == model_hash(iter(TENSORS))


@pytest.mark.parametrize(
    "other",
    [
        [("b.weight", "F32", (2, 3)), ("a.weights", "BF16", (4,))],
        [("b.weight", "F16", (2, 3)), ("a.weight", "BF16", (4,))],
        [("b.weight", "F32", (3, 2)), ("a.weight", "BF16", (4,))],
        [("b.weight", "F32", (6,)), ("a.weight", "BF16", (4,))],
        TENSORS[:1],
        [],
    ],
)
def test_another_model_has_another_hash(other: list[tuple[str, str, tuple[int, ...]]]) -> None:
    assert model_hash(other) != model_hash(TENSORS)
