#!/usr/bin/env bash
# Runs a command on a machine with a GPU that has torch and no network, over a copy of this repository.
#   here:   benchmarks/gpu/run_on_device.sh wheels       fetch into .whl/ what that machine lacks
#   there:  benchmarks/gpu/run_on_device.sh COMMAND ...  with these wheels installed and src/ on the path
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels=${FORGE_WHEELS:-.whl} site=/tmp/forge-site

if [ "${1:-}" = wheels ]; then
    mkdir -p "$wheels"
    platforms=()
    for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${name}_x86_64")
    done
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$wheels" \
        msgspec tomli tomli-w lazy-loader xxhash torchao==0.18.0 pytest-timeout pytest-xdist execnet
    { git rev-parse --short=12 HEAD; [ -z "$(git status --porcelain --untracked-files=no)" ] || echo +; } | tr -d '\n' >"$wheels/COMMIT"
    du -sh "$wheels"
    exit
fi

if compgen -G "$wheels/*.whl" >/dev/null && [ ! -d $site ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $site "$wheels"/*.whl
fi
for folder in packages/*/src apps/*/src; do PYTHONPATH="$PWD/$folder:${PYTHONPATH:-}"; done
# torch is told no interface there; compilation may use all cores, unlike in tests on a shared machine
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$(nproc)}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export PYTHONPATH="$site:$PYTHONPATH" PYTHONUNBUFFERED=1
[ ! -f "$wheels/COMMIT" ] || FORGE_COMMIT=$(cat "$wheels/COMMIT") && export FORGE_COMMIT
exec "$@"
