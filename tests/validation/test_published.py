"""What papers and lectures print, against traces and runs of ours."""

import pytest

from tests.validation.published import FIGURES


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.what} {figure.source}")
def test_printed_figure_is_met(figure):
    assert figure.ours() == pytest.approx(figure.printed, rel=figure.tolerance)
