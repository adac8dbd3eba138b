"""The cells against the plain loop, at sizes that hypothesis chooses."""

import pytest
from cases import CELLS, Case
from checks import check_equal_to_the_loop

pytest.importorskip("hypothesis")  # where there is a GPU there may be no network to fetch it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SHARED = [HealthCheck.function_scoped_fixture]  # `device` is the same for all examples


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=SHARED)
@given(
    st.builds(
        Case,
        cell=st.sampled_from(CELLS),
        seq_len=st.integers(1, 20),
        batch=st.integers(1, 40),
        input_size=st.integers(1, 40),
        hidden_size=st.integers(1, 80),
        latent_size=st.integers(1, 80),
        num_layers=st.integers(1, 2),
        bias=st.booleans(),
        bidirectional=st.booleans(),
        lengths=st.booleans(),
        reset=st.booleans(),
        noise=st.sampled_from(["seed", "eps", "none"]),
        recompute=st.booleans(),
        chunk_size=st.none() | st.integers(1, 25),
    )
)
def test_equals_the_loop(device, case):
    check_equal_to_the_loop(device, case)
