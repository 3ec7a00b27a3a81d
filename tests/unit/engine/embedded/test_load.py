"""Taking new weights: versions, KV of before, and manifests that must be refused with the old weights still serving."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.records.training import LoadMode, Manifest
from pearl.records.turn import EndReason

MakeEngine = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="session")
def other_tensors(tmp_path_factory: pytest.TempPathFactory, kit: Any) -> dict[str, torch.Tensor]:
    """Weights of the same architecture that speak differently."""
    folder = kit.make_folder(tmp_path_factory.mktemp("other") / "m", seed=2, norm_seed=6)
    return dict(load_file(folder / "model.safetensors"))


@pytest.fixture
def manifest(tmp_path: Path, other_tensors: dict[str, torch.Tensor], kit: Any) -> Manifest:
    return kit.publish(tmp_path / "v1.safetensors", other_tensors, version=1)


@pytest.fixture
def make_other(tmp_path: Path, folder: Path, other_tensors: dict[str, torch.Tensor], make_engine: Any) -> Any:
    """Engines that began with the new weights."""
    copy = Path(shutil.copytree(folder, tmp_path / "other"))
    save_file(other_tensors, copy / "model.safetensors")
    return lambda **settings: make_engine(copy, **settings)


def steps(engine: EmbeddedEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("mode", list(LoadMode))
def test_tokens_carry_the_version_that_drew_them(
    make_engine: MakeEngine, manifest: Manifest, kit: Any, mode: LoadMode
) -> None:
    engine = make_engine(progress_interval_s=1e9)
    engine.submit([kit.request("a", kit.tokens(1, 10), new=10)])
    steps(engine, 4)
    report = engine.load(manifest, mode)
    assert (report.version, report.loaded_bytes) == (1, manifest.size_bytes)
    result = kit.drain(engine)["a"]
    assert result.versions == [0] * 4 + [1] * 6
    assert engine.stats().version == 1
    assert result.end is EndReason.LENGTH


def test_recompute_goes_on_as_a_fresh_engine_with_the_new_weights_would(
    make_engine: MakeEngine, make_other: MakeEngine, manifest: Manifest, kit: Any
) -> None:
    context = kit.tokens(1, 10)
    old = kit.generate(make_engine(), kit.request("a", context, new=12))["a"]
    engine = make_engine(prefill_chunk_tokens=6)
    engine.submit([kit.request("a", context, new=12)])
    steps(engine, 6)  # prefill of 6 + 4, then four decodes: five tokens
    report = engine.load(manifest, LoadMode.RECOMPUTE)
    assert report.recomputed_tokens == 14
    result = kit.drain(engine)["a"]
    assert result.ids[:5] == old.ids[:5]
    want = kit.generate(make_other(), kit.request("b", context + old.ids[:5], new=7))["b"]
    assert result.ids[5:] == want.ids
    assert result.ids != old.ids, "weights that say the same test nothing"
    np.testing.assert_allclose(result.logprobs[5:], want.logprobs, atol=1e-5, rtol=0)
    # Ten before, then all fifteen known tokens again.
    assert result.computed == 25


def test_keep_kv_goes_on_with_the_old_keys_and_values(
    make_engine: MakeEngine, make_other: MakeEngine, manifest: Manifest, kit: Any
) -> None:
    """The first logits after the load: last token by new weights, everything before by old ones."""
    context = kit.tokens(1, 10)
    engine = make_engine()
    engine.submit([kit.request("a", context, new=12)])
    steps(engine, 5)
    report = engine.load(manifest, LoadMode.KEEP_KV)
    assert report.recomputed_tokens == 0
    result = kit.drain(engine)["a"]
    assert result.computed == 10
    assert result.versions == [0] * 5 + [1] * 7
    # Independently: an engine whose cache was filled by the old weights and whose next chunk is run by the new ones.
    twin = make_engine()
    twin.submit([kit.request("a", context + result.ids[:4], new=8)])
    twin.step()
    twin.load(manifest, LoadMode.KEEP_KV)
    want = kit.drain(twin)["a"]
    assert result.ids[4:] == want.ids
    np.testing.assert_allclose(result.logprobs[4:], want.logprobs, atol=1e-5, rtol=0)
    recomputed = kit.generate(make_other(), kit.request("b", context + result.ids[:5], new=7))["b"]
    difference = np.abs(np.array(result.logprobs[5:]) - np.array(recomputed.logprobs))
    assert difference.max() > 1e-3, "old keys and values must show"


def test_idle_prefixes(make_engine: MakeEngine, manifest: Manifest, make_other: MakeEngine, kit: Any) -> None:
    context = kit.tokens(1, 10)
    for mode, computed in ((LoadMode.KEEP_KV, 6), (LoadMode.RECOMPUTE, 21)):
        engine = make_engine()
        first = kit.generate(engine, kit.request("a", context, trajectory="t", new=6))["a"]
        report = engine.load(manifest, mode)
        assert report.recomputed_tokens == (15 if mode is LoadMode.RECOMPUTE else 0)
        longer = context + first.ids + kit.tokens(2, 5)
        second = kit.generate(engine, kit.request("b", longer, trajectory="t", min_version=WeightVersion(1)))["b"]
        assert second.computed == computed
        if mode is LoadMode.RECOMPUTE:
            assert second.ids == kit.generate(make_other(), kit.request("b", longer))["b"].ids


def test_interrupted_after_a_load_and_continued_on_an_engine_with_the_new_weights(
    make_engine: MakeEngine, make_other: MakeEngine, manifest: Manifest, kit: Any
) -> None:
    context = kit.tokens(3, 8)
    uninterrupted = make_engine()
    interrupted = make_engine()
    for engine in (uninterrupted, interrupted):
        engine.submit([kit.request("a", context, new=14, seed=4)])
        steps(engine, 4)
        engine.load(manifest, LoadMode.RECOMPUTE)
    whole = kit.drain(uninterrupted)["a"]
    steps(interrupted, 5)
    interrupted.interrupt(["a"])
    part = kit.collect(interrupted.take_chunks(0.0))["a"]
    assert part.versions == [0] * 4 + [1] * 5
    rest = kit.generate(make_other(), kit.request("b", context + part.ids, new=5, seed=4))["b"]
    assert part.ids + rest.ids == whole.ids
    np.testing.assert_allclose(part.logprobs + rest.logprobs, whole.logprobs, atol=1e-5, rtol=0)


def test_load_in_the_middle_of_prefill(
    make_engine: MakeEngine, make_other: MakeEngine, manifest: Manifest, kit: Any
) -> None:
    context = kit.tokens(3, 30)
    engine = make_engine(prefill_chunk_tokens=8)
    engine.submit([kit.request("a", context)])
    steps(engine, 2)
    assert engine.load(manifest, LoadMode.RECOMPUTE).recomputed_tokens == 16
    result = kit.drain(engine)["a"]
    assert result.computed == 16 + 30
    assert result.versions == [1] * 12
    assert result.ids == kit.generate(make_other(), kit.request("a", context))["a"].ids


def test_waiting_requests_see_the_new_weights(make_engine: MakeEngine, manifest: Manifest, kit: Any) -> None:
    engine = make_engine(max_sequences=1)
    engine.submit([kit.request("a", [5], new=3), kit.request("b", [5], new=3)])
    steps(engine, 1)
    engine.load(manifest, LoadMode.KEEP_KV)
    results = kit.drain(engine)
    assert results["a"].versions == [0, 1, 1]
    assert results["b"].versions == [1, 1, 1]


# -- refused ------------------------------------------------------------------------------------------------------------------


def _shard(manifest: Manifest, index: int = 0, **fields: Any) -> Manifest:
    shards = list(manifest.shards)
    shards[index] = dataclasses.replace(shards[index], **fields)
    return dataclasses.replace(manifest, shards=tuple(shards))


def _flip_byte(manifest: Manifest) -> Manifest:
    path = Path(manifest.shards[0].locations[0])
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x40
    path.write_bytes(bytes(raw))
    return manifest


def _truncate(manifest: Manifest) -> Manifest:
    path = Path(manifest.shards[0].locations[0])
    path.write_bytes(path.read_bytes()[:-50])
    return manifest


def _vanish(manifest: Manifest) -> Manifest:
    Path(manifest.shards[0].locations[0]).unlink()
    return manifest


def _another_shape_in_the_file(manifest: Manifest) -> Manifest:
    path = Path(manifest.shards[0].locations[0])
    tensors = load_file(path)
    name = "model.norm.weight"
    tensors[name] = tensors[name].view(8, 8).clone()
    save_file(tensors, path)
    return manifest


def _lacks_a_tensor(manifest: Manifest) -> Manifest:
    path = Path(manifest.shards[0].locations[0])
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    return manifest


def _directory(manifest: Manifest) -> Manifest:
    return _shard(manifest, locations=(str(Path(manifest.shards[0].locations[0]).parent),))


FAULTS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "another model": (lambda m: dataclasses.replace(m, model_hash="0" * 16), "model_hash: got 0000000000000000, want"),
    "flipped byte": (_flip_byte, "checksum: got crc32:.*, want crc32:.*damaged"),
    "wrong checksum": (lambda m: _shard(m, 3, checksum="crc32:00000000"), "checksum: got crc32"),
    "truncated": (_truncate, "cannot be read"),
    "vanished": (_vanish, "cannot be read"),
    "a folder": (_directory, "cannot be read"),
    "shape in the file": (_another_shape_in_the_file, r"got F32 \(8, 8\) in the file, want F32 \(64,\)"),
    "tensor not in the file": (_lacks_a_tensor, "cannot be read"),
    "shape in the manifest": (lambda m: _shard(m, shape=(1, 2)), r"shape=\(1, 2\)"),
    "dtype in the manifest": (lambda m: _shard(m, dtype="BF16"), "dtype='BF16'"),
    "a slice": (lambda m: _shard(m, start=(1, 0)), r"at \(1, 0\), want .* whole"),
    "unknown name": (lambda m: _shard(m, name="lm_head.weight"), "lm_head.weight: got .* want None"),
    "missing shard": (lambda m: dataclasses.replace(m, shards=m.shards[1:]), "1 tensors are missing, the first is"),
    "no shards": (lambda m: dataclasses.replace(m, shards=()), "tensors are missing"),
    "a shard twice": (lambda m: dataclasses.replace(m, shards=(*m.shards, m.shards[0])), "more than one shard"),
    "no location": (lambda m: _shard(m, 2, locations=()), "no location"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", list(LoadMode))
def test_refused_with_the_old_weights_still_serving(
    make_engine: MakeEngine, manifest: Manifest, kit: Any, fault: str, mode: LoadMode
) -> None:
    spoil, says = FAULTS[fault]
    whole = kit.generate(make_engine(), kit.request("a", kit.tokens(1, 10), new=8))["a"]
    engine = make_engine()
    engine.submit([kit.request("a", kit.tokens(1, 10), new=8)])
    steps(engine, 3)
    with pytest.raises(WeightsError, match=says) as raised:
        engine.load(spoil(manifest), mode)
    assert "weights of version 1" in str(raised.value)
    result = kit.drain(engine)["a"]
    assert (result.ids, result.versions, result.computed) == (whole.ids, [0] * 8, 10)
    assert engine.stats().version == 0


def test_weights_that_have_diverged_are_refused(
    make_engine: MakeEngine, tmp_path: Path, other_tensors: dict[str, torch.Tensor], kit: Any
) -> None:
    spoiled = {name: tensor.clone() for name, tensor in other_tensors.items()}
    spoiled["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    manifest = kit.publish(tmp_path / "nan.safetensors", spoiled, version=2)
    with pytest.raises(WeightsError, match="not finite"):
        make_engine().load(manifest, LoadMode.KEEP_KV)


def test_shards_in_several_files(
    make_engine: MakeEngine, tmp_path: Path, other_tensors: dict[str, torch.Tensor], make_other: MakeEngine, kit: Any
) -> None:
    names = sorted(other_tensors)
    parts = [
        kit.publish(tmp_path / f"part{i}.safetensors", {n: other_tensors[n] for n in names[i::2]}, version=1)
        for i in range(2)
    ]
    engine = make_engine()
    whole = Manifest(
        version=WeightVersion(1), model_hash=engine.info().model_hash, shards=parts[0].shards + parts[1].shards
    )
    engine.load(whole, LoadMode.KEEP_KV)
    got = kit.generate(engine, kit.request("a", [5, 6]))["a"]
    assert got.ids == kit.generate(make_other(), kit.request("a", [5, 6]))["a"].ids


def test_the_file_may_go_once_it_was_loaded(
    make_engine: MakeEngine, manifest: Manifest, make_other: MakeEngine, kit: Any
) -> None:
    engine = make_engine()
    engine.load(manifest, LoadMode.KEEP_KV)
    path = Path(manifest.shards[0].locations[0])
    path.write_bytes(b"\0" * path.stat().st_size)
    got = kit.generate(engine, kit.request("a", [5, 6]))["a"]
    assert got.ids == kit.generate(make_other(), kit.request("a", [5, 6]))["a"].ids
