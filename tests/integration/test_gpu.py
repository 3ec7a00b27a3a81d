"""What only a GPU can show: `benchmarks/gpu_check.py`, whole."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(600)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
def test_the_gpu_check_passes() -> None:
    from benchmarks.gpu_check import main

    assert main([]) == 0


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_check import main

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "torch finds no GPU here; want one, or --device cpu --quick" in capsys.readouterr().err
