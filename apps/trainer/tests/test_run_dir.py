from forge_config import Change
from forge_trainer.run_dir import RunFiles, append_history, read_history


def test_event_after_a_torn_line_is_not_lost(tmp_path):
    append_history(tmp_path, 3, [Change("train.steps", 10, 20)])
    with RunFiles(tmp_path).history.open("a") as file:
        file.write('{"step": 5, "key": "optim')  # a crash
    append_history(tmp_path, 7, [Change("optimizer.lr", 0.1, 0.2)])
    assert [event["key"] for event in read_history(tmp_path)] == ["train.steps", "optimizer.lr"]
