"""The table of `forge eval --tasks`."""

from forge_trainer.commands.task_table import task_table


def test_table_names_its_columns_and_has_a_row_for_each_metric():
    found = {
        "results": {
            "arc": {
                "alias": " - arc",
                "sample_len": 20,
                "acc,none": 0.25,
                "acc_stderr,none": 0.1,
                "name": "arc",
            },
            "gsm": {"exact,strict": 1.0, "exact_stderr,strict": "N/A", "exact,loose": 0.5},
        },
        "n-shot": {"arc": 5},
    }
    assert task_table(found).splitlines() == [
        "| task   | filter | n-shot | metric | value  | stderr |",
        "| ------ | ------ | ------ | ------ | ------ | ------ |",
        "|  - arc | none   | 5      | acc    | 0.2500 | 0.1000 |",
        "| gsm    | loose  |        | exact  | 0.5000 |        |",
        "| gsm    | strict |        | exact  | 1.0000 | N/A    |",
    ]


def test_table_of_tasks_without_numbers_has_its_columns():
    assert task_table({"results": {}}).startswith("| task | filter |")
