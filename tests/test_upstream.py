"""Claims about the table of `make upstream`; the tests themselves need the package index."""

from upstream.run import table


def test_a_test_whose_subtest_failed_counts_as_failed_and_an_excepted_one_does_not(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.test_modeling_hf_vit.PlainModelTests" name="test_a"/>'
        '<testcase classname="tests.test_modeling_hf_vit.PlainBackboneTests" name="test_b"><skipped/></testcase>'
        '<testcase classname="tests.test_modeling_hf_vit.DeiTModelTests" name="test_a"><skipped/><failure/></testcase>'
        '<testcase classname="tests.test_modeling_hf_vit.DeiTModelTests" name="test_c"><skipped type="pytest.xfail"/>'
        "</testcase></testsuite></testsuites>"
    )
    assert [line.split() for line in table(report).splitlines()] == [
        ["architecture", "passed", "failed", "excepted", "skipped"],
        ["Plain", "1", "0", "0", "1"],
        ["DeiT", "0", "1", "1", "0"],
    ]
