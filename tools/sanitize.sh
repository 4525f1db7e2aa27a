#!/bin/sh
# sanitize.sh [TOOL ...]: the GPU tests of the kernels under NVIDIA's compute-sanitizer, all tools by default.
# Needs a GPU, compute-sanitizer (CUDA toolkit) and pytest; one line per run, its log in sanitize_logs.
set -u
cd "$(dirname "$0")/.."
command -v compute-sanitizer >/dev/null || { echo "sanitize: expected compute-sanitizer on the PATH, got none" >&2; exit 2; }
mkdir -p sanitize_logs
status=0

ATTENTION="each_kernel_is_right or out_may_be_q or invalid_row or append_w or dirty or uploaded or sync_policies or (split_kv_is_right and 32-64)"
PRODUCTS="(linear_is_right and 576 and not float32) or silu_mul or rope_append or choose_takes"
# initcheck does not see how torch's 16-bit products store, so there only rows alone and float32
INITIALIZED="(linear_is_right and 576 and (float32 or 1-torch.float16 or 1-torch.bfloat16)) or silu_mul or rope_append or choose_takes"
# racecheck takes minutes for torch's own kernels, which the tests compare with
OURS="regex=(split_kv|merge|plan|by_token|by_block|write_kv)_kernel"

check() {  # tool, name of the tests, tests, options
    tool=$1 name=$2 tests=$3
    shift 3
    log=sanitize_logs/$tool.$name.log
    PYTHONPATH=.:tests compute-sanitizer --tool "$tool" "$@" --error-exitcode 9 --print-limit 3 \
        python3 -m pytest --noconftest -q -m gpu tests/test_gpu.py -k "$tests" >"$log" 2>&1 || status=1
    echo "$tool $name: $(grep -E '(passed|failed)' "$log" | tail -n 1) $(grep 'SUMMARY:' "$log" | tail -n 1)"
}

for tool in ${*:-memcheck initcheck synccheck racecheck}; do
    case $tool in
        racecheck)
            check racecheck attention "$ATTENTION" --kernel-name "$OURS"
            check racecheck products "$PRODUCTS" ;;
        initcheck)
            check initcheck attention "$ATTENTION"
            check initcheck products "$INITIALIZED" ;;
        memcheck | synccheck)
            check "$tool" attention "$ATTENTION"
            check "$tool" products "$PRODUCTS" ;;
        *)
            echo "sanitize: expected memcheck, initcheck, synccheck or racecheck, got $tool" >&2
            exit 2 ;;
    esac
done
exit $status
