import sys

import pytest

from benchmarks import _aisimulate
from benchmarks.peer_aisimulate import (
    INSTALL,
    Cell,
    Compared,
    cells,
    checks_of,
    main,
    ours,
    peer_config,
    profile_from,
    reason,
)
from pearl.silicon.tables import silicon_profiles


class Linear:
    """An engine whose times tell what it was asked."""

    def decode_step_latency(self, decoding: int, context: int, _: int) -> float:
        return 1000 * decoding + context

    def predict_prefill_latency(self, batch: int, total: int, cached: int) -> float:
        return batch * (total - cached)

    def mixed_step_latency(self, prefill: int, decoding: int, context: int, _: int, __: int) -> float:
        return prefill + decoding / 1000


def test_table_asks_for_what_an_iteration_computes() -> None:
    seconds = _aisimulate.times_of(Linear())
    p, d, c = (
        {value: index for index, value in enumerate(axis)}
        for axis in (_aisimulate.PREFILL, _aisimulate.DECODING, _aisimulate.CONTEXT)
    )
    assert seconds[p[0]][d[4]][c[256]] == pytest.approx(4.255)  # the new token is not in the cache yet
    assert seconds[p[128]][d[0]][c[512]] == pytest.approx(0.128)  # the last 128 of 512
    assert seconds[p[768]][d[0]][c[512]] == pytest.approx(0.768)  # one and a half sequences
    assert seconds[p[128]][d[4]][c[512]] == pytest.approx(0.128004)


def test_profile_has_their_times_and_moves_kv_in_no_time() -> None:
    shipped = silicon_profiles("qwen3-8b", "h200", (1,))[1]
    table = {"prefill_tokens": [0, 8], "decoding": [0, 1], "context_tokens": [64], "cells_s": [[[1], [2]], [[3], [4]]]}
    profile = profile_from(shipped, table)
    assert profile.iterations.seconds(8, 1, 64) == 4
    assert profile.hand_off is not None
    assert profile.hand_off.seconds(1e12) == 0
    assert profile.kv_capacity_tokens == shipped.kv_capacity_tokens


def test_one_session_takes_its_iterations() -> None:
    table = {"prefill_tokens": [0, 8], "decoding": [0, 1], "context_tokens": [64], "cells_s": [[[0], [2]], [[8], [8]]]}
    profile = profile_from(silicon_profiles("qwen3-8b", "h200", (1,))[1], table)
    cell = Cell(shape="1C", at_once=1, sessions=2, turns=2, new_tokens=8, output_tokens=3, wait_s=5.0)
    # A turn: the prompt's iteration draws the first token, two more follow. The second turn also computes the last token drawn.
    assert ours(cell, profile).makespan_s == pytest.approx(2 * ((8 + 4) + 5 + (9 + 4)))


def test_cell_is_written_as_they_read_it() -> None:
    config = peer_config(Cell(shape="1P3D", at_once=5, sessions=9, wait_s=2.0), 1000)
    assert config["engine"]["mode"] == "disaggregated"
    workers = config["engine"]["workers"]
    assert {name: worker["parallelism"]["replicas"] for name, worker in workers.items()} == {"prefill": 1, "decode": 3}
    assert workers["decode"]["kv_cache"]["capacity"] == {"type": "fixed", "blocks": 62}
    assert config["traffic"]["load"] == {"type": "concurrency", "concurrency": 5}
    assert config["traffic"]["stop"] == {"sessions": 9}
    assert config["traffic"]["source"]["session"]["inter_turn_delay_ms"] == 2000
    assert peer_config(Cell(), 1000)["engine"]["mode"] == "aggregated"


@pytest.mark.parametrize(
    ("shape", "theirs", "here", "found"),
    [
        ("4C", 0.80, 0.82, ""),
        ("4C", 0.63, 0.81, "round robin"),
        ("2P6D", 0.64, 0.77, "round robin"),
        ("1P3D", 0.37, -0.1, "decode worker"),
        ("1P3D", 0.3, 0.7, "another order"),
    ],
)
def test_reasons(shape: str, theirs: float, here: float, found: str) -> None:
    why = reason(Cell(shape=shape), theirs, here)
    assert found in why
    assert bool(found) == bool(why)


def test_only_equal_semantics_count() -> None:
    one = Compared(cell=Cell(reference_s=100.0), peer_s=102.0, peer_reuse=0.8, ours_s=107.1, ours_reuse=0.8)
    other = Compared(cell=Cell(), peer_s=10.0, peer_reuse=0.8, ours_s=30.0, ours_reuse=0.1, excluded="so")
    found = {check.name: check.value for check in checks_of([one, other])}
    assert found["peer_error_max"] == pytest.approx(0.05)
    assert found["peer_against_reference_max"] == pytest.approx(0.02)
    assert (found["cells"], found["cells_excluded"]) == (2, 1)


def test_nothing_counted_is_no_success() -> None:
    assert not checks_of([])[0].passed


def test_cells_are_as_many_as_asked_and_differ() -> None:
    chosen = cells(quick=False)
    assert 30 <= len(chosen) <= 60
    assert len(set(chosen)) == len(chosen)


def test_without_the_package_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peer-python", f"{sys.executable}-that-is-not-there"]) == 2
    assert INSTALL in capsys.readouterr().err
