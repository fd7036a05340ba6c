"""docs/record.md is in step with the schema and the anomalies."""

import record_page


def test_the_page_is_what_the_schema_says() -> None:
    assert record_page.PAGE.read_text(encoding="utf-8") == record_page.page(), "run scripts/record_page.py"
