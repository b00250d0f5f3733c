"""Free memory, as the machine and cgroups of both versions tell it."""

import pytest
from forge_ckpt.memory import free_memory_bytes

GB = 10**9


def put(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


V1 = "sys/fs/cgroup/memory"
CASES = {
    "nothing": ({}, None),
    "machine": ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1000000 kB"}, 1_024_000_000),
    "version 2, within a container": (
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 5 * GB,
            "sys/fs/cgroup/memory.current": 2 * GB,
        },
        3 * GB,
    ),
    "version 2, the job around the step is full": (
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0",
            "sys/fs/cgroup/slurm/job_1/step_0/memory.max": "max",
            "sys/fs/cgroup/slurm/job_1/step_0/memory.current": 1 * GB,
            "sys/fs/cgroup/slurm/job_1/memory.max": 4 * GB,
            "sys/fs/cgroup/slurm/job_1/memory.current": 3 * GB,
            "sys/fs/cgroup/slurm/job_1/memory.stat": f"anon {2 * GB}\ninactive_file {GB // 2}",
        },
        1.5 * GB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/job\n0::/",
            f"{V1}/job/memory.limit_in_bytes": 6 * GB,
            f"{V1}/job/memory.usage_in_bytes": 5 * GB,
            f"{V1}/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GB}",
            f"{V1}/memory.limit_in_bytes": 9223372036854771712,
            f"{V1}/memory.usage_in_bytes": 8 * GB,
            "proc/meminfo": "MemAvailable: 100000000 kB",
        },
        3 * GB,
    ),
    "version 1, of which only the root is there": (
        {
            "proc/self/cgroup": "4:cpu,memory:/far/away",
            f"{V1}/memory.limit_in_bytes": 2 * GB,
            f"{V1}/memory.usage_in_bytes": 3 * GB,
        },
        0,
    ),
    "nonsense": ({"proc/self/cgroup": "x", "proc/meminfo": "MemAvailable:"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_free_memory_is_the_least_that_is_left(tmp_path, case):
    files, expected = CASES[case]
    put(tmp_path, files)
    assert free_memory_bytes(tmp_path) == expected
