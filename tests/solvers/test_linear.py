"""Linear programs small enough to be solved by hand."""

from __future__ import annotations

import pytest

from sim.solvers.linear import INF, INFEASIBLE, LinearProgram


def diet(whole: bool) -> LinearProgram:
    """Minimise 3x + 2y where 2x + y >= 5, x + 3y >= 6 and x <= 2: by hand (1.8, 1.4), of whole numbers (1, 3)."""
    program = LinearProgram()
    x = program.column(high=2.0, cost=3.0, whole=whole)
    y = program.column(high=INF, cost=2.0, whole=whole)
    assert (x, y, program.columns) == (0, 1, 2)
    assert program.row([(x, 2.0), (y, 1.0)], least=5.0) == 0
    assert program.row([(x, 1.0), (y, 3.0)], least=6.0) == 1
    return program


@pytest.mark.parametrize(
    ("whole", "relaxed", "answer"), [(False, False, (1.8, 1.4)), (True, True, (1.8, 1.4)), (True, False, (1, 3))]
)
def test_the_answer_is_that_found_by_hand(whole, relaxed, answer):
    found = diet(whole).solve(relaxed=relaxed)
    assert found.status == 0
    assert found.x == pytest.approx(answer)
    assert found.fun == pytest.approx(3 * answer[0] + 2 * answer[1])


def test_a_limit_that_is_changed_holds_in_the_next_answer():
    program = diet(whole=False)
    row = program.row([(1, 1.0)], most=INF)
    program.limit(row, 1.0)
    assert program.solve().status == INFEASIBLE  # x + 3y >= 6 needs x = 3 then
    program.limit(row, 4 / 3)
    assert program.solve().x == pytest.approx((2, 4 / 3))


def test_a_column_is_a_share_unless_it_has_other_bounds():
    program = LinearProgram()
    columns = [program.column(cost=-1.0), program.column(low=-2.0, cost=1.0), program.column(0.5, 0.5, -1.0)]
    program.row([(column, 1.0) for column in columns])
    assert program.solve().x == pytest.approx((1.0, -2.0, 0.5))
