import re
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", README, re.DOTALL):
        (tmp_path / name).write_text(text)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["loaded"].value.optimizer.lr == 0.01


def test_readme_message_is_what_a_bad_file_gets(tmp_path, monkeypatch):
    test_readme_example_runs(tmp_path, monkeypatch)
    from forge_config import Config, ConfigError, load

    struct = next(
        one for one in Config.__subclasses__() if one.__name__ == "Job" and one.__module__ == "readme"
    )
    (expected,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    try:
        load(struct, "run.toml", ["--train.steps=0", "--optimizer.typ=sgd"])
    except ConfigError as error:
        assert str(error) == expected.strip("\n")
    else:
        raise AssertionError("the mistakes of the README are accepted")
