"""The watch over many ranks: which costs grow with their number, and which must not."""

import pytest

import watch_scale

FEW, MANY = 64, 512
REQUESTS = 9  # Requests of each rank in a round.
REQUESTS_TO_AGREE = 2  # Requests for one collective.


def test_a_round_costs_each_rank_the_same() -> None:
    """Nothing grows with the square of the ranks."""
    few, many = (watch_scale.ask(number, 0.001) for number in (FEW, MANY))
    assert many["requests of a rank"] <= few["requests of a rank"] <= REQUESTS
    assert many["MB"] / few["MB"] < 1.1 * MANY / FEW
    assert many["seconds"] < 1.0


@pytest.mark.parametrize("latency_s", [0.0003, 0.001])
def test_a_first_pass_leaves_no_keys(latency_s: float) -> None:
    """Each rank counts in once for each collective."""
    found = watch_scale.first_pass(FEW, latency_s)
    assert found["keys left"] == REQUESTS_TO_AGREE, "that of the last collective, and its end"
    num_collectives = 3 * watch_scale.NUM_LAYERS
    assert found["requests of a rank"] < 1.05 * REQUESTS_TO_AGREE * num_collectives
