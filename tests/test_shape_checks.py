"""While tests run, annotations are checked, but not in each call of a function that is called often."""

import pytest
from jaxtyping import TypeCheckError

from esper.leyline.tensor_dataclass import with_prefix
from shape_checks import ALWAYS_CHECKED


@pytest.mark.parametrize("test", ["the first", "the next"])
def test_each_test_checks_the_first_calls_of_a_function_and_few_later_ones(test):
    checked = []
    for call in range(1, 41):
        try:
            assert with_prefix(call, {}) == {}  # a prefix is a string
        except TypeCheckError:
            checked.append(call)
    assert ALWAYS_CHECKED == 8
    assert checked == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
