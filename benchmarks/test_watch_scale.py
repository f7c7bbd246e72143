"""The watch over many ranks: what grows with their number, and what must not."""

import pytest

import watch_scale


def test_a_round_costs_each_rank_the_same() -> None:
    few, many = (watch_scale.ask(number, 0.001) for number in (64, 512))
    assert many["requests of a rank"] <= few["requests of a rank"] <= 9
    assert many["MB"] < 9 * few["MB"], "nothing grows with the square"
    assert many["seconds"] < 1.0


@pytest.mark.parametrize("latency_s", [0.0003, 0.001])
def test_a_first_pass_leaves_no_keys(latency_s: float) -> None:
    found = watch_scale.first_pass(64, latency_s)
    assert found["keys left"] == 2
    assert found["requests of a rank"] < 2.1 * 3 * watch_scale.NUM_LAYERS
