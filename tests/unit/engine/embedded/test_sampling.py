"""Counter-based numbers against an independent SplitMix64; draws against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pearl.engine.embedded.sampling import draw, mix, uniform, word

MASK = 2**64 - 1

# Chi-square quantiles at 1 - 1e-4, from tables: a sound generator fails one seed in ten thousand; the seeds are fixed.
CHI_SQUARE_255 = 349.5
CHI_SQUARE_99 = 157.0


class SplitMix64:
    """The published generator, in plain Python."""

    def __init__(self, state: int) -> None:
        self.state = state

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return finalise(self.state)


def finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    states = words(*((1234567 + step * 0x9E3779B97F4A7C15) & MASK for step in range(1, 6)))
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert mix(states).tolist() == published


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 123_456_789])
def test_words_are_the_stream_of_the_mixed_seed(seed: int) -> None:
    stream = SplitMix64(finalise(seed))
    want = [stream.next() for _ in range(200)]
    got = word(np.full(200, seed, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    assert got.tolist() == want


def test_uniform_is_the_top_48_bits() -> None:
    stream = SplitMix64(finalise(7))
    want = [(stream.next() >> 16) / 2**48 for _ in range(50)]
    assert uniform(np.full(50, 7, dtype=np.uint64), np.arange(50, dtype=np.uint64)).tolist() == want


@pytest.mark.parametrize("along", ["positions", "seeds", "diagonal"])
def test_numbers_are_uniform_and_unrelated_to_their_neighbours(along: str) -> None:
    count = 1 << 17
    index, fixed = np.arange(count, dtype=np.uint64), np.full(count, 99, dtype=np.uint64)
    seeds = fixed if along == "positions" else index
    positions = fixed if along == "seeds" else index
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    flat = np.full(256, count / 256)
    assert chi_square(np.bincount((numbers * 256).astype(int), minlength=256), flat) < CHI_SQUARE_255
    pairs = (numbers[:-1:2] * 16).astype(int) * 16 + (numbers[1::2] * 16).astype(int)
    assert chi_square(np.bincount(pairs, minlength=256), flat / 2) < CHI_SQUARE_255


def test_draw_walks_the_distribution_function_in_order_of_token_id() -> None:
    # Probabilities 1/2, 1/4, 1/8, 1/8: the function steps at 0.5, 0.75, 0.875.
    logits = torch.log(torch.tensor([[4.0, 2.0, 1.0, 1.0]])).repeat(6, 1)
    drawn = draw(logits, np.ones(6), np.array([0.0, 0.499, 0.501, 0.749, 0.8, 0.999]))
    assert drawn.token_ids.tolist() == [0, 0, 1, 1, 2, 3]
    np.testing.assert_allclose(drawn.logprobs, np.log([0.5, 0.5, 0.25, 0.25, 0.125, 0.125]), rtol=1e-6)


def test_temperature_tempers_draws_and_log_probabilities() -> None:
    logits = torch.log(torch.tensor([[3.0, 1.0]])).repeat(2, 1)
    # At temperature 1/2 the odds 3 : 1 become 9 : 1.
    drawn = draw(logits, np.array([0.5, 0.5]), np.array([0.89, 0.91]))
    assert drawn.token_ids.tolist() == [0, 1]
    np.testing.assert_allclose(drawn.logprobs, np.log([0.9, 0.1]), rtol=1e-6)


def test_temperature_zero_is_greedy_and_certain() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0]])
    drawn = draw(logits, np.array([0.0, 1.0]), np.array([0.999999, 0.999999]))
    assert drawn.token_ids.tolist() == [1, 3]
    assert drawn.logprobs[0] == 0.0
    assert drawn.logprobs[1] < -1


def test_tiny_temperature_is_not_a_nan() -> None:
    drawn = draw(torch.tensor([[1.0, 30.0, 2.0]]), np.array([1e-300]), np.array([0.7]))
    assert drawn.token_ids.tolist() == [1]
    assert drawn.finite.all()
    assert drawn.logprobs[0] == 0.0


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    numbers = np.array([0.0, 0.25, 0.5 - 2**-48, 0.5, 1 - 2**-48])
    drawn = draw(logits.repeat(5, 1), np.ones(5), numbers)
    assert drawn.token_ids.tolist() == [1, 1, 1, 3, 3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_reported_row_by_row(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = draw(logits, np.full(3, temperature), np.full(3, 0.5))
    assert drawn.finite.tolist() == [True, False, True]


def test_sample_follows_the_exact_distribution() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 100, generator=generator)
    count, temperature = 200_000, 0.7
    exact = torch.softmax(logits[0].double() / temperature, -1).numpy()
    numbers = uniform(np.full(count, 12, dtype=np.uint64), np.arange(count, dtype=np.uint64))
    drawn = draw(logits.expand(count, -1), np.full(count, temperature), numbers)
    assert (exact * count).min() > 5
    assert chi_square(np.bincount(drawn.token_ids, minlength=100), exact * count) < CHI_SQUARE_99
    np.testing.assert_allclose(drawn.logprobs, np.log(exact)[drawn.token_ids], atol=1e-6)
