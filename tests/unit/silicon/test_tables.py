"""The shipped tables: what is there, that it is sound, and numbers published apart from them."""

from __future__ import annotations

import json
import math
import zipfile
from importlib import resources
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from pearl.core.priors import PLATFORM_PRIORS, platform_prior
from pearl.engine.embedded.architecture import read_architecture
from pearl.errors import ProfileError
from pearl.records.training import model_hash
from pearl.silicon.tables import shipped, silicon_profiles

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "src" / "pearl" / "silicon" / "tables"
TPS = (1, 2, 4, 8)
NAMES = [("qwen3-8b", "h100"), ("qwen3-8b", "h200"), ("qwen3-30b-a3b", "h100"), ("qwen3-30b-a3b", "h200")]
EVERY = list(product(NAMES, TPS))


def milliseconds(model: str, gpu: str, tp: int, prefill: int, decoding: int, context: int) -> float:
    return 1e3 * silicon_profiles(model, gpu, (tp,))[tp].iterations.seconds(prefill, decoding, context)


class TestWhatIsThere:
    def test_two_models_on_two_gpus(self) -> None:
        assert dict(shipped()) == dict.fromkeys(sorted(NAMES), TPS)

    def test_every_prior_of_a_recipe_has_tables(self) -> None:
        assert {tuple(name.rsplit("-", 1)) for name in PLATFORM_PRIORS} == set(shipped())

    def test_those_asked_for_in_that_order(self) -> None:
        found = silicon_profiles("Qwen3-8B", "H100", (4, 1))
        assert list(found) == [4, 1]
        assert {tp: profile.tp for tp, profile in found.items()} == {4: 4, 1: 1}
        assert silicon_profiles("qwen3-8b", "h100", ()) == {}

    def test_read_once(self) -> None:
        first, second = (silicon_profiles("qwen3-8b", "h200", (2,))[2] for _ in range(2))
        assert first is second

    @pytest.mark.parametrize(("model", "gpu"), [("qwen3-8b", "h800"), ("gpt", "h100"), ("qwen3-8b-h100", ""), ("", "")])
    def test_what_is_not_there(self, model: str, gpu: str) -> None:
        with pytest.raises(ProfileError) as caught:
            silicon_profiles(model, gpu, (1,))
        assert str(caught.value) == (
            f"iteration times: got {model} on {gpu}, want one of qwen3-30b-a3b on h100, qwen3-30b-a3b on h200, "
            "qwen3-8b on h100, qwen3-8b on h200; or measure with `pearl profile`"
        )

    @pytest.mark.parametrize("tp", [0, 3, 16])
    def test_a_tensor_parallelism_that_is_not_there(self, tp: int) -> None:
        with pytest.raises(ProfileError) as caught:
            silicon_profiles("Qwen3-8B", "h100", (1, tp))
        assert str(caught.value) == (
            f"iteration times of Qwen3-8B on h100: got tp {tp}, want one of 1, 2, 4, 8; or measure with `pearl profile`"
        )


class TestSound:
    @pytest.mark.parametrize(("name", "tp"), EVERY)
    def test_more_work_never_takes_less(self, name: tuple[str, str], tp: int) -> None:
        times = silicon_profiles(*name, (tp,))[tp].iterations
        cells = np.array(times.cells_s)
        assert (cells > 0).all()
        for axis in range(3):
            assert (np.diff(cells, axis=axis) >= 0).all(), axis
        assert times.prefill_tokens[-1] >= 8192
        assert times.decoding[-1] >= 512
        assert times.context_tokens[-1] >= 131_072

    @pytest.mark.parametrize(("name", "tp"), EVERY)
    def test_what_it_says_of_itself(self, name: tuple[str, str], tp: int) -> None:
        model, gpu = name
        found = silicon_profiles(model, gpu, (tp,))[tp]
        prior = platform_prior(f"{model}-{gpu}").by_tp[1]
        assert found.model.lower() == model
        assert found.device == f"NVIDIA {gpu.upper()} SXM (tabulated)"
        assert (found.dtype, found.tp) == ("bfloat16", tp)
        assert found.hand_off == prior.hand_off
        assert (found.weight_load_s, found.sleep_s, found.engine_start_s) == (
            prior.weight_load_s,
            prior.sleep_s,
            prior.engine_start_s,
        )
        assert found.wake_s == pytest.approx(prior.wake_s)

    def test_wider_workers_are_faster_and_less_efficient(self) -> None:
        for (model, gpu), (p, d, c) in product(
            NAMES, [(0, 1, 4096), (0, 64, 4096), (128, 16, 8192), (2048, 0, 32_768)]
        ):
            taken = [milliseconds(model, gpu, tp, p, d, c) for tp in TPS]
            for narrow, wide in pairwise(taken):
                assert narrow / 2.2 < wide <= narrow, (model, gpu, p, d, c)

    def test_an_h200_is_no_slower(self) -> None:
        """It computes as an H100 does, and reads memory 1.43 times as fast; 5 % for the noise of measurements."""
        for model, tp, (p, d, c) in product(
            ("qwen3-8b", "qwen3-30b-a3b"), TPS, [(0, 1, 64), (0, 64, 8192), (2048, 0, 8192)]
        ):
            ratio = milliseconds(model, "h100", tp, p, d, c) / milliseconds(model, "h200", tp, p, d, c)
            assert 0.95 < ratio < 1.6

    @pytest.mark.parametrize(("name", "tp"), EVERY)
    def test_capacity_is_what_the_memory_has_room_for(self, name: tuple[str, str], tp: int) -> None:
        """90 % of 80 and 141 GiB, less the weights and between 4 and 5.5e9 bytes on each GPU."""
        model, gpu = name
        found = silicon_profiles(model, gpu, (tp,))[tp]
        weights = 2 * (8.19e9 if model == "qwen3-8b" else 30.53e9)
        room = tp * 0.9 * {"h100": 80, "h200": 141}[gpu] * 2**30 - weights
        taken = found.kv_capacity_tokens * found.kv_bytes_per_token
        assert 4e9 * tp < room - taken < 5.5e9 * tp

    def test_kv_bytes(self) -> None:
        """2 * 36 * 8 * 128 * 2 and 2 * 48 * 4 * 128 * 2; four heads on eight GPUs stand there twice."""
        bytes_of = {
            model: [silicon_profiles(model, "h100", (tp,))[tp].kv_bytes_per_token for tp in TPS]
            for model in ("qwen3-8b", "qwen3-30b-a3b")
        }
        assert bytes_of == {"qwen3-8b": [147_456] * 4, "qwen3-30b-a3b": [98_304, 98_304, 98_304, 196_608]}


class TestPublished:
    @pytest.mark.parametrize(
        ("model", "tp", "decode"),
        [
            ("qwen3-8b", 1, (6.5, 10.7, 19.4)),
            ("qwen3-8b", 2, (4.3, 6.1, 10.6)),
            ("qwen3-8b", 4, (3.0, 3.9, 6.8)),
            ("qwen3-30b-a3b", 1, (4.8, 14.6, 30.3)),
            ("qwen3-30b-a3b", 2, (3.8, 9.6, 17.3)),
        ],
    )
    def test_decoding(self, model: str, tp: int, decode: tuple[float, ...]) -> None:
        """1, 16 and 64 sequences at context 4,096 on an H100, from the source's own decode step."""
        found = [milliseconds(model, "h100", tp, 0, count, 4096) for count in (1, 16, 64)]
        assert found == pytest.approx(list(decode), rel=0.06)

    @pytest.mark.parametrize(
        ("model", "gpu", "prefix", "new", "published"),
        [
            ("qwen3-8b", "h100", 8192, 512, 16.3),
            ("qwen3-30b-a3b", "h100", 8192, 512, 33.2),
            ("qwen3-8b", "h200", 8192, 2048, 57),
            ("qwen3-8b", "h200", 32_768, 2048, 102),
        ],
    )
    def test_appending(self, model: str, gpu: str, prefix: int, new: int, published: float) -> None:
        assert milliseconds(model, gpu, 1, new, 0, prefix + new) == pytest.approx(published, rel=0.06)

    def test_any_prefill_loads_every_expert(self) -> None:
        """In the mixture of experts 64 tokens more than double an iteration of one sequence; in the dense model they do not."""
        ratio = {
            model: milliseconds(model, "h100", 1, 64, 1, 4096) / milliseconds(model, "h100", 1, 0, 1, 4096)
            for model in ("qwen3-8b", "qwen3-30b-a3b")
        }
        assert ratio["qwen3-8b"] < 1.5
        assert ratio["qwen3-30b-a3b"] > 3


class TestProvenance:
    def test_every_table_has_its_line(self) -> None:
        text = (FOLDER / "README.md").read_text(encoding="utf-8")
        for model, gpu in NAMES:
            for tp in TPS:
                assert f"| `{model}-{gpu}-tp{tp}.json` |" in text
        for word in ("Apache-2.0", "0.12.0", "0.24.0", "make_iteration_tables.py"):
            assert word in text

    def test_they_are_small(self) -> None:
        sizes = [path.stat().st_size for path in FOLDER.iterdir()]
        assert len(sizes) == 17
        assert sum(sizes) < 1_000_000

    @pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
    def test_hash_of_the_architecture(self, name: str, tmp_path: Path) -> None:
        """From `config.json` of the checkpoints: 8.19e9 and 30.53e9 numbers, all in BF16."""
        experts = name == "qwen3-30b-a3b"
        config: dict[str, object] = {
            "model_type": "qwen3_moe" if experts else "qwen3",
            "vocab_size": 151_936,
            "hidden_size": 2048 if experts else 4096,
            "intermediate_size": 6144 if experts else 12_288,
            "num_hidden_layers": 48 if experts else 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 4 if experts else 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        if experts:
            config |= {
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = read_architecture(tmp_path).tensors()
        assert sum(map(math.prod, tensors.values())) == (30_532_122_624 if experts else 8_190_735_360)
        want = model_hash((tensor, "BF16", shape) for tensor, shape in tensors.items())
        for gpu in ("h100", "h200"):
            assert {profile.model_hash for profile in silicon_profiles(name, gpu, TPS).values()} == {want}

    def test_they_are_data_of_the_package(self) -> None:
        names = {path.name for path in resources.files("pearl.silicon").joinpath("tables").iterdir()}
        assert {f"{model}-{gpu}-tp{tp}.json" for (model, gpu), tp in EVERY} <= names

    def test_a_wheel_holds_them(self, tmp_path: Path) -> None:
        """What hatchling would pack, without building an environment for it."""
        builder = pytest.importorskip("hatchling.builders.wheel")
        made = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
        with zipfile.ZipFile(next(iter(made))) as wheel:
            names = {Path(name).name for name in wheel.namelist() if name.startswith("pearl/silicon/tables/")}
        assert names == {path.name for path in FOLDER.iterdir()}
