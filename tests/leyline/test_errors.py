"""What a user reads when something is refused."""

from esper.leyline.errors import nearest


def test_a_name_that_is_nearly_right_is_suggested_before_all_that_are_known() -> None:
    assert nearest("nul", ["null", "digits"]) == "did you mean 'null'? Known names: digits, null."


def test_a_name_that_resembles_none_is_answered_with_all_that_are_known() -> None:
    assert nearest("large", ["small", "paper"]) == "known names: paper, small."
