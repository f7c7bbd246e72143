from __future__ import annotations
import warnings, pytest
from random_trainings import worst_difference
from reference import make_mesh
from simulation import simulation
def work(numbers, shape):
    out = {}
    for n in numbers:
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            with simulation(has_host_engine=False): worst_difference(n, make_mesh(shape))
        w=[str(x.message)[:200] for x in w if "were updated" in str(x.message)]
        if w: out[n] = w
    return out
@pytest.mark.parametrize("a", range(24, 110, 20))
def test_x(spawn, a):
    found = spawn(work, 2, range(a, a+20), (2,), timeout_s=200)
    assert not any(found), found
