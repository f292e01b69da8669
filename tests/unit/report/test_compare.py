"""The number by which two loss curves are compared."""

import pytest

from megatron_kd.tools.report.compare import relative_difference


def test_the_largest_relative_difference_over_shared_iterations():
    reference = [1, 2, 3, 4], [8.0, 4.0, -2.0, 0.0]
    assert relative_difference(reference, reference) == 0
    assert relative_difference(reference, ([1, 2, 3, 9], [8.8, 3.0, -2.2, 99.0])) == 0.25
    assert relative_difference(([1], [4.0]), ([1], [8.0])) == 1  # of the first, not of the other


def test_curves_without_a_shared_iteration_are_refused():
    with pytest.raises(ValueError, match="no iteration in common"):
        relative_difference(([1, 2], [1.0, 1.0]), ([3], [1.0]))
