"""Sampling: the right distribution, from noise of seed, position and token id alone."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from pagedlab.sampling import INVALID, Sampling, gumbel, keep_top, random_words, sample

torch.set_num_threads(1)
LOGITS = torch.tensor([1.5, -0.5, 0.0, 2.0, 1.0, -2.0, 0.5, 1.2])
# 99.9 % quantiles of chi-square, by degrees of freedom
CHI_SQUARE = {2: 13.82, 3: 16.27, 7: 24.32, 15: 37.70, 63: 103.44, 255: 330.52}


def draws(sampling: Sampling, num_draws: int, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """Tokens drawn at positions 0 to num_draws - 1 from the same logits."""
    return sample(logits.expand(num_draws, -1), [sampling] * num_draws, range(num_draws))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_greedy_takes_the_largest_logit_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, -1.0, 5.0, 5.0]])
    assert sample(logits, [Sampling()] * 2, [3, 4]).tolist() == [1, 0]
    mixed = [Sampling(), Sampling(temperature=0.5)]
    assert sample(logits, mixed, [3, 4])[0] == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_over_positions_follow_softmax(temperature):
    counts = draws(Sampling(temperature, seed=11), 20_000).bincount(minlength=8)
    assert chi_square(counts, (LOGITS / temperature).softmax(0)) < CHI_SQUARE[7]


def test_frequencies_over_seeds_follow_softmax():
    sampling = [Sampling(1.0, seed=seed) for seed in range(20_000)]
    counts = sample(LOGITS.expand(20_000, -1), sampling, [5] * 20_000).bincount(minlength=8)
    assert chi_square(counts, LOGITS.softmax(0)) < CHI_SQUARE[7]


def test_draws_at_neighbouring_positions_and_seeds_are_independent():
    flat = torch.zeros(8)
    first = draws(Sampling(1.0, seed=3), 16_001, flat)
    pairs = (first[:-1] * 8 + first[1:]).bincount(minlength=64)
    assert chi_square(pairs, torch.full((64,), 1 / 64)) < CHI_SQUARE[63]
    second = draws(Sampling(1.0, seed=4), 16_001, flat)
    pairs = (first * 8 + second).bincount(minlength=64)
    assert chi_square(pairs, torch.full((64,), 1 / 64)) < CHI_SQUARE[63]


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_the_hash_is_uniform(shift):
    tokens, positions = torch.arange(500), torch.arange(100)[:, None]
    words = random_words(torch.tensor(2**62 + 1), positions, tokens).flatten()
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32
    counts = (words >> shift & 255).bincount(minlength=256)
    assert chi_square(counts, torch.full((256,), 1 / 256)) < CHI_SQUARE[255]


def test_hash_reads_all_of_seed_position_and_token():
    base = random_words(torch.tensor(5), torch.tensor(6), torch.tensor(7))
    for seed, position, token in ((6, 6, 7), (5 + 2**40, 6, 7), (5, 7, 7), (5, 6, 8)):
        other = random_words(torch.tensor(seed), torch.tensor(position), torch.tensor(token))
        assert other != base


def test_gumbel_noise_is_finite_for_the_smallest_and_the_largest_word(monkeypatch):
    extremes = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr("pagedlab.sampling.random_words", lambda *_: extremes)
    smallest, largest = gumbel(torch.tensor([0]), torch.tensor([0]), 2)[0].tolist()
    assert -4 < smallest < -3
    assert 22 < largest < 23


def test_gumbel_noise_has_its_mean_and_variance():
    noise = gumbel(torch.tensor([1, 2]), torch.tensor([0, 0]), 50_000)
    assert noise.dtype == torch.float64
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


def test_a_draw_depends_on_neither_batch_nor_row():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 100, generator=generator)
    sampling = [Sampling(1.0, 10 * row, 0.9, row) for row in range(6)]
    together = sample(logits, sampling, range(6))
    alone = [sample(logits[row : row + 1], sampling[row : row + 1], [row]) for row in range(6)]
    assert together.tolist() == torch.cat(alone).tolist()
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    shuffled = sample(logits[order], [sampling[row] for row in order], order.tolist())
    assert shuffled.tolist() == together[order].tolist()


def test_neighbours_that_filter_do_not_change_an_unfiltered_row():
    logits = LOGITS.expand(2, -1)
    for position in range(50):
        alone = sample(logits[:1], [Sampling(1.0, seed=9)], [position])
        both = [Sampling(1.0, seed=9), Sampling(1.0, top_k=2, top_p=0.5)]
        assert sample(logits, both, [position] * 2)[0] == alone[0]


def test_top_k_draws_among_the_k_likeliest_with_their_renormalised_probabilities():
    counts = draws(Sampling(1.0, top_k=3, seed=2), 20_000).bincount(minlength=8)
    assert counts.nonzero().flatten().tolist() == [0, 3, 7]
    kept = counts[[0, 3, 7]]
    assert chi_square(kept, LOGITS[[0, 3, 7]].softmax(0)) < CHI_SQUARE[2]


def test_top_k_1_is_greedy_and_a_k_beyond_the_vocabulary_is_no_filter():
    assert set(draws(Sampling(5.0, top_k=1), 100).tolist()) == {3}
    unfiltered = draws(Sampling(1.0), 500).tolist()
    for top_k in (8, 1000, 2**63 - 1):
        assert draws(Sampling(1.0, top_k=top_k), 500).tolist() == unfiltered


def test_top_k_among_equal_logits_keeps_exactly_k_lowest_ids():
    kept = keep_top(torch.zeros(1, 6), torch.tensor([2]), torch.tensor([1.0]))
    assert kept.isfinite().tolist() == [[True, True, False, False, False, False]]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, [1]),
        (0.5, [1]),
        (0.51, [1, 3]),
        (0.75, [1, 3]),
        (0.8, [0, 1, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]], dtype=torch.float64).log2() * math.log(2)
    result = keep_top(logits, torch.tensor([0]), torch.tensor([top_p], dtype=torch.float64))
    assert result.isfinite().nonzero()[:, 1].tolist() == kept


def test_top_p_counts_what_top_k_left():
    # of the two likeliest, softmax gives 2/3 and 1/3: 0.6 is reached by the first alone
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    kept = keep_top(logits, torch.tensor([2]), torch.tensor([0.6]))
    assert kept.isfinite().tolist() == [[True, False, False]]


def test_the_likeliest_token_stays_however_small_top_p_is():
    settings = Sampling(1.0, top_p=1e-300, seed=1)
    assert sample(torch.tensor([[0.0, 1.0, 3.0]]), [settings], [5]).tolist() == [2]


def test_top_p_1_keeps_tokens_that_rounding_would_lose():
    logits = torch.cat((torch.zeros(1), torch.full((1000,), -40.0)))[None]
    assert keep_top(logits, torch.tensor([0]), torch.tensor([1.0])).isfinite().all()


def test_temperature_comes_before_top_p():
    hot = draws(Sampling(100.0, top_p=0.5, seed=1), 2000)
    assert hot.unique().numel() >= 4
    cold = draws(Sampling(0.01, top_p=0.5, seed=1), 2000)
    assert cold.unique().tolist() == [3]


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    tokens = draws(Sampling(temperature), 400)
    assert (tokens >= 0).all()
    assert tokens.unique().numel() == (1 if temperature < 1 else 8)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 3, 0.9)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_maximum_yields_no_token(sampling, value):
    logits = torch.stack((LOGITS, LOGITS.clone()))
    if value == -torch.inf:
        logits[1] = value
    else:
        logits[1, 4] = value
    tokens = sample(logits, [sampling] * 2, [0, 1])
    assert tokens[1] == INVALID
    assert 0 <= tokens[0] < 8


def test_tokens_of_logit_minus_infinity_are_never_drawn():
    logits = LOGITS.clone()
    logits[3] = -torch.inf
    assert 3 not in draws(Sampling(2.0, seed=1), 2000, logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", 2**63),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", None),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got ") as error:
        Sampling(**{field: value}).check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_every_legal_seed_draws(seed):
    assert draws(Sampling(1.0, seed=seed).check(), 200).unique().numel() > 4


def test_checked_settings_are_plain_numbers():
    """A tensor of them must be made in every step: any kind of number has to fit in."""
    checked = Sampling(Fraction(1, 2), np.int8(3), np.float32(0.5), True).check()
    assert [type(value) for value in checked] == [float, int, float, int]
    assert checked == (0.5, 3, 0.5, 1)
    assert Sampling(10**30).check().temperature == 1e30
