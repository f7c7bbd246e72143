"""Which examples hypothesis tries."""

from __future__ import annotations

import hypothesis


def test_fresh_examples_follow_the_seed() -> None:
    """Where CI is set hypothesis leaves the seed out of account, if it is not told otherwise."""
    assert hypothesis.settings.get_profile("fixed").derandomize
    assert not hypothesis.settings.get_profile("fresh").derandomize
