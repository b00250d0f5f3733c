"""What `forge generate` and `forge export` say to arguments that cannot be right."""

import pytest
from forge_ckpt.error import CheckpointError
from forge_ckpt.weights import write_weights
from forge_model.error import ModelError
from forge_trainer.cli import main
from forge_trainer.write import room_for


def test_prompt_that_fills_the_model_is_told_by_its_length():
    with pytest.raises(ModelError, match=r"prompt of 100 tokens.* model.max_tokens = 32"):
        room_for(100, 32)
    assert room_for(30, 32) == 2


@pytest.mark.parametrize("seed", ["x", str(2**70), "-1"])
def test_seed_out_of_range_is_an_error_of_usage(seed, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "nowhere", f"--seed={seed}"])
    assert ended.value.code == 2 and "--seed" in capsys.readouterr().err


def test_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/out cannot be written"):
        write_weights(tmp_path / "file" / "out", {}, {})
