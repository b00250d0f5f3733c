#!/usr/bin/env bash
# The first 25 minutes on a GPU: parts in order of worth, each with its own limit, each written before the next.
#   benchmarks/gpu/first_day.sh OUT [FIRST [LAST]]   parts FIRST to LAST, by number
#   benchmarks/gpu/first_day.sh --dry OUT            all of it on a CPU, with tiny models
# A call ends by itself after FIRST_DAY_S seconds (570), and says with which part the next one goes on.
# OUT/first_day.jsonl has a line for each part: number, name, exit code, seconds. A part that fails stops nothing;
# one that leaves no new JSON has failed, with code 97.
set -uo pipefail
cd "$(dirname "$0")/../.."
dry=; [ "${1:-}" = --dry ] && { dry=1; shift; }
out=${1:?folder of results}; first=${2:-1}; last=${3:-99}
mkdir -p "$out"; out=$(cd "$out" && pwd); here=benchmarks/gpu; number=0; failed=0; left=
end=$((SECONDS + ${FIRST_DAY_S:-$([ -n "$dry" ] && echo 3600 || echo 570)}))
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
[ -n "$dry" ] && export FORGE_GPU_TESTS_ON=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${PYTHON:-python3}

part() { # NAME LIMIT_S RESULT COMMAND...
    local name=$1 limit=$2 result=$out/$3 begun=$SECONDS code
    shift 3
    number=$((number + 1))
    { [ $number -ge "$first" ] && [ $number -le "$last" ] && [ -z "$left" ]; } || return 0
    [ $((end - SECONDS)) -ge 20 ] || { left=$number; return 0; }
    [ $((end - SECONDS)) -ge "$limit" ] || limit=$((end - SECONDS))
    printf '\n== %s %s (%s s at most)\n' "$number" "$name" "$limit"
    rm -f "$result"
    timeout -k 10 "$limit" "$@" >"$out/$number-$name.log" 2>&1
    code=$?
    [ $code = 0 ] && [ ! -s "$result" ] && code=97
    [ $code = 0 ] || failed=$((failed + 1))
    { [ $code = 124 ] || [ $code = 137 ]; } && [ $((end - SECONDS)) -lt 20 ] && left=$number  # cut off by the end of the call
    tail -n 4 "$out/$number-$name.log"
    printf '{"part": %s, "name": "%s", "code": %s, "seconds": %s}\n' \
        "$number" "$name" "$code" "$((SECONDS - begun))" | tee -a "$out/first_day.jsonl"
}
tests() { # NAME LIMIT_S FILE KEYWORDS
    part "$1" "$2" "$1.json" $python $here/tested.py "$3" -k "$4" --name "$1" --out "$out"
}
speed() { # NAME LIMIT_S SCRIPT MODELS SWEEPS
    local models=(--models $4) result=mfu.json
    [ "$3" = moe.py ] && result=moe_gpu.json
    [ -n "$dry" ] && { models=(--tiny); result=${result%.json}_tiny.json; }
    part "$1" "$2" "$1/$result" \
        $python $here/$3 "${models[@]}" --sweeps $5 --steps 5 --time-limit "$(($2 - 15))" --out "$out/$1"
}
tiny=${dry:+--tiny}; suffix=${dry:+_tiny}

part versions 60 versions.json $python -c 'import json, sys, torch; json.dump({
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    "memory_gib": torch.cuda.mem_get_info()[1] / 2**30 if torch.cuda.is_available() else None,
}, open(sys.argv[1] + "/versions.json", "w"))' "$out"
tests groups 120 test_groups.py ""
tests training 240 test_training.py "float32_training or bf16_training"
tests waits 240 test_training.py "never_waits"
export TORCH_LOGS=recompiles
tests attention 240 test_attention.py ""
unset TORCH_LOGS
tests numbers 120 test_numbers.py ""
tests experts 180 test_experts.py ""
tests eight-bits-and-offload 240 test_training.py "eight_bit or offload or benchmark"
speed 1b-base 120 mfu.py 1b base
speed 1b-fp8 240 mfu.py 1b fp8
speed 1b-state 180 mfu.py 1b state
speed 1b-documents 120 mfu.py 1b documents
speed moe-routing 240 moe.py moe-4b routing
part resume 240 "resume$suffix.json" \
    $python $here/resume.py $tiny --steps "$([ -n "$dry" ] && echo 12 || echo 40)" --out "$out"
part profiled 240 "profiled$suffix.json" $python $here/profiled.py $tiny --out "$out"
speed 8b-reference 480 mfu.py 8b reference
part loss 90 "loss_gpu$suffix.json" $python $here/loss.py $tiny --out "$out"
part commands 240 commands.json $python $here/commands.py \
    $([ -n "$dry" ] && echo "--steps 2 --runs debug vlm_debug_mot --at-once 2") --out "$out"
printf '\n%s parts failed; results in %s\n' "$failed" "$out"
[ -z "$left" ] || echo "the time of this call is over; go on with part $left: first_day.sh OUT $left"
[ "$failed" = 0 ]
