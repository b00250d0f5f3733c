"""What is made of the answers of nvidia-smi; a script stands in for it."""

import pytest
from forge_resilience.gpu_health import FIELDS, gpu_problems


@pytest.fixture
def smi(tmp_path, monkeypatch):
    def answer(text, code=0):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\ncat <<END\n{text}\nEND\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return answer


def test_there_is_nothing_to_say_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_problems() is None


def test_healthy_gpus_have_no_problem(smi):
    smi("0, 0, No, No, Not Active, Not Active\n1, [N/A], [N/A], [N/A], Not Active, [Not Supported]")
    assert gpu_problems() == []


@pytest.mark.parametrize("field", range(len(FIELDS)))
def test_each_problem_is_told_of_its_gpu(smi, field):
    row = ["0", "No", "No", "Not Active", "Not Active"]
    row[field] = "3" if field == 0 else "Yes" if field < 3 else "Active"
    smi(f"0, 0, No, No, Not Active, Not Active\n1, {', '.join(row)}")
    (problem,) = gpu_problems() or []
    assert problem == f"GPU 1: {list(FIELDS.values())[field].format(3)}"


def test_driver_that_fails_is_a_problem(smi):
    smi("Failed to initialize NVML: Driver/library version mismatch", code=18)
    (problem,) = gpu_problems() or []
    assert problem == "nvidia-smi ended with 18: Failed to initialize NVML: Driver/library version mismatch"


def test_fields_that_a_driver_does_not_know_are_left_out(tmp_path, monkeypatch):
    path = tmp_path / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        'for field in remapped_rows.pending clocks_throttle_reasons.hw_slowdown; do case "$1" in *$field,*)\n'
        '  echo "Field \\"$field\\" is not a valid field to query."; exit 2 ;; esac; done\n'
        'echo "0, 3, No, Active"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told = [
        text for field, text in FIELDS.items() if field.startswith(("ecc", "clocks_throttle_reasons.hw_t"))
    ]
    assert gpu_problems() == [f"GPU 0: {text.format(3)}" for text in told]
