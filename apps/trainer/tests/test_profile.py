"""What a profile says: classes of work, exclusive times, the window, and what is written or not."""

import json
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from forge_config import ConfigError
from forge_trainer.clock import Clock
from forge_trainer.hooks import ProfileConfig
from forge_trainer.profile.classes import CLASSES, class_of_kernel, class_of_operator, short
from forge_trainer.profile.hook import Profile, Window
from forge_trainer.profile.summary import _give, line_of, markdown, summarize
from forge_trainer.profile.trace import SPAN_MARK, WINDOW_MARK, Piece, Timeline, read
from forge_trainer.progress import Progress

ROOT = Path(__file__).parents[3]
H100 = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT": "matmul",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_splitK_NNT": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0": (
        "attention"
    ),
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)": "attention",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>(flash::Flash_fwd_params)": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_tem_fused_mm_3": "matmul",
    "triton_poi_fused__unsafe_view_mul_silu_silu_backward_view_0": "other",
    "triton_red_fused__to_copy_add_arange_copy_copy__div_eq_exp_log_mul_prepare_softmax_online": "other",
    "triton_per_fused__fused_rms_norm__fused_rms_norm_backward__unsafe_view_add_view_6": "other",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "memory",
    "Memset (Device)": "memory",
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda()>": "memory",
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**, float*)": "memory",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::elementwise_kernel<128, 4, BUnaryFunctor<float>>(int)": "other",
}
"""Names of kernels as an H100 has told them (benchmarks/results/gpu/profiled_h100.json), and of NCCL."""


@pytest.mark.parametrize(("name", "kind"), H100.items())
def test_kernels_of_a_gpu_have_their_class(name, kind):
    assert class_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (("aten::linear", "aten::addmm"), "matmul"),
        (
            ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math", "aten::bmm"),
            "attention",
        ),
        (("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"), "matmul"),
        (("Optimizer.step#AdamW.step", "aten::_fused_adamw_"), "optimizer"),
        (("aten::_fused_adamw_",), "optimizer"),
        (("_LinearCrossEntropy", "aten::addmm_"), "matmul"),
        (("Optimizer.step#Muon.step", "aten::mm"), "optimizer"),
        (("Optimizer.step#Muon.step", "c10d::allgather_"), "communication"),
        (("aten::to", "aten::_to_copy", "aten::copy_"), "memory"),
        (("aten::silu",), "other"),
    ],
)
def test_operators_of_a_cpu_have_their_class(path, kind):
    assert class_of_operator(path) == kind


def test_kernels_of_a_step_on_an_h100_add_up_to_what_the_page_of_its_speed_tells():
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "profiled_h100.json").read_text())
    ms = dict.fromkeys(CLASSES, 0.0)
    for row in found["results"]["longest"]:
        if row["kernel"] not in ("the loss", "Optimizer.step#AdamW.step"):  # marks over kernels
            ms[class_of_kernel(row["kernel"])] += row["ms"]
    assert ms["matmul"] == pytest.approx(340, rel=0.02)
    assert ms["attention"] == pytest.approx(89, rel=0.02)
    assert ms["optimizer"] == pytest.approx(13, rel=0.02)
    assert ms["communication"] == 0


def test_kernels_started_by_the_optimizer_are_its_own_but_for_communication():
    assert class_of_kernel("nvjet_sm90_tst_256x128", in_optimizer=True) == "optimizer"
    assert class_of_kernel("ncclDevKernel_AllGather_RING_LL", in_optimizer=True) == "communication"


def test_names_are_short():
    assert short("void at::native::elementwise_kernel<128, 4, BUnaryFunctor<float>>(int)") == (
        "at::native::elementwise_kernel<BUnaryFunctor>"
    )
    assert short("Memcpy DtoH (Device -> Pageable)") == "Memcpy DtoH"


def by_brute_force(work, communication, spans, length):
    """How many moments of steps each kind has: work, else communication in flight, else the span or none."""
    found = dict.fromkeys(("matmul", "communication", "idle"), 0)
    for moment in range(length):
        span = next((name for a, b, name in spans if a <= moment < b), "between")
        if span == "evaluate":
            continue
        running = [level for level in (work, communication) if any(a <= moment < b for a, b, _ in level)]
        kind = "idle" if not running else "matmul" if running[0] is work else "communication"
        found[kind] += 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_has_one_owner_as_by_brute_force(seed):
    draw, length = random.Random(seed), 300
    cuts = [0, *sorted(draw.sample(range(1, length), 4))]
    spans = [
        (a, b, n) for (a, b), n in zip(pairwise(cuts), ("data", "step", "evaluate", "agree"), strict=True)
    ]
    inner, outer = spans[2][:2]

    def pieces(count, name):
        """None goes over a border of the evaluation: the device is waited for there."""
        found = []
        for number in range(count):
            start = draw.randrange(length - 1)
            end = min(length, start + draw.randrange(1, 40))
            border = next((one for one in (inner, outer) if start < one < end), end)
            found.append((start, border, f"{name}{number}"))
        return found

    work, talk = pieces(12, "w"), pieces(6, "c")
    line = Timeline(0.0, float(length), False)
    line.work = [Piece(a, b, "matmul", name) for a, b, name in work]
    line.communication = [Piece(a, b, "communication", name, "tp") for a, b, name in talk]
    line.spans = [Piece(a, b, "idle", name) for a, b, name in spans]
    summary = summarize(line, 2)
    expected = by_brute_force(work, talk, spans, length)
    assert summary["step_s"] == pytest.approx(sum(expected.values()) * 1e-6 / 2, rel=1e-12)
    assert sum(summary["classes_s"].values()) == pytest.approx(summary["step_s"], rel=1e-12)
    for kind, moments in expected.items():
        assert summary["classes_s"][kind] == pytest.approx(moments * 1e-6 / 2), kind
    assert summary["beside_s"] == {"evaluate": pytest.approx((outer - inner) * 1e-6)}
    seen = [(a, b) for a, b, _ in talk if not inner <= (a + b) / 2 <= outer]
    row = summary["communication"].get("tp", {"total_s": 0, "calls": 0})
    assert row["total_s"] == pytest.approx(sum(b - a for a, b in seen) * 1e-6 / 2)
    assert row["calls"] == len(seen) / 2


def test_free_times_stay_free_where_nothing_goes_on():
    pieces = [Piece(2, 4, "other", "x"), Piece(3, 6, "other", "y"), Piece(9, 20, "other", "z")]
    assert _give(pieces, [(0, 5), (7, 10)]) == [(0, 2), (7, 9)]
    assert [piece.alone_us for piece in pieces] == [2, 1, 1]
    assert _give([], [(0, 5)]) == [(0, 5)]
    assert _give([Piece(0, 1, "other", "x")], []) == []


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


def gpu_trace(path):
    """Matmul 30, optimizer 20, a copy 10, all-gather 40 of which 25 run beside the matmul, 25 idle."""
    nccl = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    gathered = {"Collective name": "_allgather_base", "Process Group Name": "7", "Out msg nelems": 1024}
    events = [
        event("user_annotation", WINDOW_MARK, 100, 100),
        event("gpu_user_annotation", WINDOW_MARK, 110, 80, tid=7),
        event("user_annotation", SPAN_MARK + "data", 100, 10),
        event("user_annotation", SPAN_MARK + "step", 110, 90),
        event("cpu_op", "aten::mm", 112, 3, **{"External id": 5, "Input Dims": [[64, 32], [32, 16], []]}),
        event("cuda_runtime", "cudaLaunchKernel", 113, 1, correlation=11),
        event("kernel", "nvjet_sm90_tst_256x128", 110, 30, tid=7, correlation=11, **{"External id": 5}),
        event("kernel", nccl, 115, 40, tid=8, dtype="BFloat16", **gathered),
        event("user_annotation", "Optimizer.step#AdamW.step", 130, 5),
        event("cuda_runtime", "cudaLaunchKernel", 131, 1, correlation=12),
        event(
            "kernel",
            "void at::native::vectorized_elementwise_kernel<4, AddFunctor>()",
            160,
            20,
            7,
            correlation=12,
        ),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 180, 10, tid=7),
        event("kernel", "nvjet_outside", 210, 30, tid=7),
        {"ph": "M", "name": "process_name", "pid": 1, "ts": 0, "args": {"name": "x"}},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_trace_of_a_gpu_is_summed_up_as_by_hand(tmp_path):
    line = read(gpu_trace(tmp_path / "t.json"), lambda group, span: f"group {group}")
    summary = summarize(line, 2)
    assert summary["on"] == "gpu" and summary["step_s"] == pytest.approx(50e-6)
    us = {kind: round(s * 2e6, 6) for kind, s in summary["classes_s"].items()}
    assert us == {
        "matmul": 30, "attention": 0, "communication": 15, "optimizer": 20, "memory": 10,
        "other": 0, "idle": 25,
    }  # fmt: skip
    gathered = summary["communication"]["group 7"]
    assert gathered["total_s"] == pytest.approx(20e-6) and gathered["exposed_s"] == pytest.approx(7.5e-6)
    assert gathered["bytes"] == 1024 * 2 / 2 and gathered["calls"] == 0.5
    assert {name: round(s * 2e6, 6) for name, s in summary["idle_s"].items()} == {"data": 10, "step": 15}
    first = summary["longest"][0]
    assert (
        first["what"] == "nvjet_sm90_tst_256x128 from aten::mm [64, 32] x [32, 16]" and first["calls"] == 0.5
    )
    told = summary | {"rank": 0, "device": "H100", "first_step": 10, "steps": 2}
    assert line_of(told) == (
        "profiled 2 steps of 0.05 ms: matmul 30%, idle 25%, optimizer 20%; "
        "longest: nvjet_sm90_tst_256x128 from aten::mm [64, 32] x [32, 16] 30%"
    )
    page = markdown(told | {"beside_s": {"evaluate": 2.5, "hooks": 1e-5}})
    assert "Beside all these steps there were evaluate 2,500.0 ms.\n" in page
    assert page.index("| matmul |") < page.index("| idle |") < page.index("| optimizer |")
    assert "the GPU waits, the host is in 'step'" in page


@pytest.mark.parametrize("text", ["", '{"traceEvents": [', '{"traceEvents": []}', "[]"])
def test_trace_that_is_cut_off_or_has_no_window_is_an_error(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError):
        read(tmp_path / "t.json", lambda group, span: "")


@pytest.mark.parametrize(
    ("keys", "step", "found"),
    [
        ({}, 9, None), ({}, 10, range(10, 13)), ({}, 12, range(10, 13)), ({}, 13, None), ({}, 110, None),
        ({"every_steps": 100}, 110, range(110, 113)), ({"every_steps": 100}, 113, None),
        ({"every_steps": 3}, 13, range(13, 16)), ({"first_step": 1, "steps": 1}, 1, range(1, 2)),
    ],
)  # fmt: skip
def test_windows_begin_where_they_are_due(keys, step, found):
    assert ProfileConfig(**keys).window(step) == found


def test_windows_that_overlap_are_refused():
    with pytest.raises(ValueError, match="every_steps = 3 or more"):
        ProfileConfig(every_steps=2, steps=3)


@pytest.mark.parametrize(
    ("keys", "device", "said"),
    [
        ({"first_step": 9}, "cpu", "first_step = 9 in a run of 8 steps"),
        ({"first_step": 2, "ranks": (0, 2)}, "cpu", "ranks = [2] of 2"),
        ({"first_step": 2, "snapshot_step": 3}, "cpu", "a snapshot of memory needs a GPU"),
        ({"first_step": 2, "snapshot_on_oom": True}, "cpu", "a snapshot of memory needs a GPU"),
        ({"first_step": 2, "snapshot_step": 9}, "cuda", "snapshot_step = 9 in a run of 8 steps"),
    ],
)
def test_hook_that_could_show_nothing_is_refused(keys, device, said):
    with pytest.raises(ConfigError) as caught:
        ProfileConfig(**keys).build(run_of(device, {}))
    assert said in str(caught.value)


def test_trace_that_torch_has_not_written_is_an_error(tmp_path):
    window = object.__new__(Window)
    window._profile = SimpleNamespace(export_chrome_trace=lambda path: None)  # as on a full disk
    with pytest.raises(OSError, match="is the disk full"):
        window.export(tmp_path / "trace.json")


def test_two_such_hooks_are_refused():
    two = {"a": ProfileConfig(first_step=1), "b": ProfileConfig(first_step=2)}
    with pytest.raises(ConfigError, match="two hooks of type profile"):
        two["a"].build(run_of("cpu", two))


def run_of(device, hooks):
    """What is asked of a run before a hook is built."""
    job = SimpleNamespace(train=SimpleNamespace(steps=8), hooks=hooks)
    mesh = SimpleNamespace(device=SimpleNamespace(type=device))
    return SimpleNamespace(job=job, mesh=mesh, env=SimpleNamespace(world_size=2, rank=0))


def test_classes_of_a_summary_are_all_there():
    summary = summarize(Timeline(0.0, 10.0, False), 1)
    assert tuple(summary["classes_s"]) == CLASSES
    assert summary["classes_s"]["idle"] == pytest.approx(10e-6) == summary["step_s"]


class Played:
    """A window that is told what happens, instead of torch."""

    all: list = []

    def __init__(self, first, last, details, device):
        self.first, self.last, self.stopped, self.spans = first, last, False, []
        Played.all.append(self)

    def enter(self, span):
        self.spans.append(span)

    def stop(self):
        self.stopped = True


def test_run_that_goes_back_is_profiled_again_and_nothing_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr("forge_trainer.profile.hook.Window", Played)
    Played.all.clear()
    clock, progress = Clock(), Progress(step=0, until=20)
    run = run_of("cpu", {})
    run.clock, run.directory = clock, tmp_path
    hook = Profile(ProfileConfig(first_step=3, steps=4), run)
    written = []
    monkeypatch.setattr(hook, "_write", lambda window, steps, folder: written.append((window.first, steps)))
    hook.on_start(progress)
    for progress.step in (1, 2, 3, 4):  # the window began after step 2
        with clock.span("step"):
            pass
        hook.on_step(progress, None)
    assert [one.first for one in Played.all] == [3] and "step" in Played.all[0].spans
    progress.step = 1
    hook.rewind(progress)
    assert Played.all[0].stopped and not written
    for progress.step in (2, 3, 4, 5, 6, 7):
        hook.on_step(progress, None)
    assert written == [(3, 4)] and [one.last for one in Played.all] == [6, 6]
    progress.step = 4  # and once more, into the middle of the window
    hook.rewind(progress)
    assert [one.first for one in Played.all] == [3, 3, 5]
    hook.close()
    assert all(one.stopped for one in Played.all) and not clock.watchers
    assert [one.name for one in (tmp_path / "profile" / "step-00000003").iterdir()] == ["rank-0"]
