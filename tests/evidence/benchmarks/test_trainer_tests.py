"""What the tests of zenflow/integrations noted."""

from evidence.benchmarks.trainer_tests import compared


def test_what_a_failed_or_skipped_test_would_have_compared_is_left_out():
    noted = "".join(
        f'<property name="{name}" value="{value}"/>'
        for name, value in {"trainer": "T", "mode": "keep", "compared": "losses",
                            "packages": "numpy"}.items()
    )  # fmt: skip
    case = "<testcase><properties>{}</properties>{}</testcase>"
    report = "".join(
        case.format(noted, end) for end in ("", "<failure/>", "<skipped/>", "<error/>")
    )
    (row,) = compared(f"<testsuites>{report}</testsuites>")
    assert row["versions"].startswith("numpy ")
    assert compared("<testsuites><testcase/></testsuites>") == []
