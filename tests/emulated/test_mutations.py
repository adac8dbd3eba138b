"""Every seeded bug's text still occurs once in the kernels."""

import pytest
from emulator.seeded_bugs import MUTATIONS, Mutation, mutated_headers


def test_each_bug_replaces_a_text_that_occurs_once():
    assert mutated_headers().keys() == {mutation.header for mutation in MUTATIONS}
    for text in ("a; a;", "b;"):
        with pytest.raises(ValueError, match=r"must occur once in .*x\.h, but occurs [02] times"):
            Mutation(1, "x.h", "a;", "").applied(text, text)
