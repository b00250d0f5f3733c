"""The page on checkpoints shows the figures of the fault tests as they were measured."""

from faults import BEGIN, END, PAGE, read_figures, table


def test_table_of_faults_in_the_docs_is_that_of_the_figures():
    assert f"{BEGIN}{table()}{END}" in PAGE.read_text(), "run python tests/shared/faults.py"
    assert all(figure["injected"] > 0 for figure in read_figures().values())
