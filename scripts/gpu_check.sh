#!/usr/bin/env bash
# Expert slots on the GPU of another machine, which needs neither network nor compiler: what "pack" gathers here, "run" installs, measures and reports there.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/gpu_check.sh pack [--python 3.12] [--out DIR]
       scripts/gpu_check.sh run [--from DIR] [--out DIR] [--device NAME] [--model GGUF] [--tiny] [--minutes N]

pack: on a machine with network. Builds llama-cpp-python with Vulkan for any x86-64 CPU with AVX2 (as setup.sh --vulkan does, in a copy of this checkout: .venv stays as
it is), edgemoe with it, and gathers both with all they depend on in DIR, at most 60 MB. The other machine needs this checkout, DIR, Linux, Python with pip, and a Vulkan driver.

  --python V    the other machine's Python (default 3.12)
  --out DIR     default build/gpu_check

run: on the machine with the GPU. Makes an environment from DIR alone, finds the GPU, makes a model, and compares expert slots with no slots and with llama.cpp: first few
variants, which says whether the logits are right, then all of them, as often as time allows (3 times at most). Each part has a time limit; results are written as they come.

  --from DIR      what pack made (default build/gpu_check)
  --out DIR       gets gpu_check.md, .json and .log (default build/gpu_check_out)
  --device NAME   as llama.cpp calls it (default: the first discrete GPU, or else the first integrated one)
  --model GGUF    default: models/demo.gguf, or random weights in its shape where it is not there
  --tiny          a tiny model and few tokens: is everything in place?
  --minutes N     for all of it (default 8)

Exit code: 0, 1 when something failed or logits are wrong, 2 for a wrong argument.

examples:
  scripts/gpu_check.sh pack && rsync -a . gpu-machine:edgemoe/
  scripts/gpu_check.sh run
  scripts/gpu_check.sh run --device Vulkan1 --model /models/qwen3-30b-a3b-q4_k_m.gguf --minutes 20
  GGML_VK_VISIBLE_DEVICES=0 scripts/gpu_check.sh run --tiny --device Vulkan0     # Mesa's llvmpipe, where there is no GPU

environment:
  PYTHON   the interpreter that run takes (default python3); pack passes it on to setup.sh, like all that setup.sh knows
EOF
}

most_bytes=60000000
cmake_args="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
most_rounds=3

say() { printf 'gpu_check: %s\n' "$*"; }

fail() {  # fail WHAT FIX
    printf 'gpu_check: FAILED: %s\nfix: %s\n' "$1" "$2" >&2
    exit 1
}

absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

wrong() {  # wrong WHAT
    printf 'gpu_check: %s\n' "$1" >&2
    usage >&2
    exit 2
}

value() {  # value OPTION NUMBER_OF_ARGUMENTS: fails when none follows
    [ "$2" -ge 2 ] || wrong "$1: wanted a value"
}

# --- pack: on a machine with network ------------------------------------------------------------------------------

copy_checkout() {  # copy_checkout TREE: the files of this checkout as they are now, committed or not; TREE's own .venv stays
    mkdir -p "$1"
    find "$1" -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
    git ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d '' file; do if [ -f "$file" ]; then printf '%s\0' "$file"; fi; done |
        tar --null --no-recursion -T - -cf - | tar -xf - -C "$1"
}

library_path() {  # library_path SONAME: where this machine has it
    # To the end of the list: awk leaving early would end ldconfig with SIGPIPE.
    PATH=$PATH:/usr/sbin:/sbin ldconfig -p | awk -v name="$1" '$1 == name && /x86-64/ && !path { path = $NF } END { print path }'
}

describe_pack() {  # describe_pack FILE
    local commit changed=no
    commit=$(git rev-parse HEAD 2>/dev/null) || commit=
    [ -z "$(git status --porcelain)" ] || changed=yes
    "$python" scripts/gpu_check.py manifest "$1" "commit=$commit" "changed=$changed" "python=$version" "cmake_args=$CMAKE_ARGS -DGGML_VULKAN=ON" \
        "llama_version=$("$python" -c 'import importlib.metadata as m; print(m.version("llama-cpp-python"))')" "date=$(date -u +%Y-%m-%dT%H:%MZ)"
}

gather() {  # gather DIR: wheels, libraries and what they are
    local wheel library path
    mkdir -p "$1/wheels" "$1/lib"
    for wheel in "$cache/wheels/$(cat "$tree/.venv/edgemoe-setup/llama")"/*.whl; do cp "$wheel" "$1/wheels/"; done
    "$python" scripts/gpu_check.py slim "$1"/wheels/llama_cpp_python-*.whl
    say "building edgemoe's wheel"
    PATH=$tree/.venv/bin:$PATH "$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir -w "$1/wheels" "$tree"
    say "downloading what they depend on, for Python $version"
    "$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version "$version" --implementation cp "${platforms[@]}" \
        --find-links "$1/wheels" -d "$1/wheels" "$1"/wheels/edgemoe-*.whl
    for library in libvulkan.so.1 libgomp.so.1; do
        path=$(library_path "$library")
        [ -n "$path" ] || fail "this machine has no $library" "apt-get install libvulkan1 libgomp1"
        cp -L "$path" "$1/lib/$library"
    done
    describe_pack "$1/pack.json"
}

pack() {
    local version=3.12 out=build/gpu_check tree=$root/build/gpu_check_tree python cache bytes n platforms=()
    out=$root/$out
    while [ $# -gt 0 ]; do
        case $1 in
            --python) value "$1" $#; version=$2; shift ;;
            --out) value "$1" $#; out=$(absolute "$2"); shift ;;
            --help | -h) usage; exit 0 ;;
            *) wrong "$1: no such argument of pack" ;;
        esac
        shift
    done
    [[ $version =~ ^3\.1[0-9]$ ]] || wrong "--python $version: wanted a version such as 3.12"
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "this is $(uname -sm)" "pack on Linux x86_64: what it builds has to run on such a machine"
    if [ -e "$out" ] && [ ! -f "$out/pack.json" ]; then fail "$out exists and is no pack" "name another folder with --out"; fi
    cache=$(absolute "${EDGEMOE_CACHE:-${XDG_CACHE_HOME:-${HOME:-~}/.cache}/edgemoe}")
    cd "$root"
    git rev-parse --git-dir >/dev/null 2>&1 || fail "$root is no git checkout" "pack in a clone: git says which files belong to it"

    copy_checkout "$tree"
    # setup.sh builds no wheel for an environment that has one installed, but it is the wheel that goes into the pack.
    if [ -f "$tree/.venv/edgemoe-setup/llama" ] && ! compgen -G "$cache/wheels/$(cat "$tree/.venv/edgemoe-setup/llama")/*.whl" >/dev/null; then rm -rf "$tree/.venv"; fi
    python=$tree/.venv/bin/python
    export CMAKE_ARGS="${CMAKE_ARGS:+$CMAKE_ARGS }$cmake_args"
    EDGEMOE_CACHE=$cache "$tree/scripts/setup.sh" --vulkan
    # pip takes such a name literally: a wheel for glibc 2.17 is not found by asking for 2.28.
    for n in $(seq 28 -1 17); do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)

    # Beside its place and then renamed: an interrupted pack leaves nothing that looks finished.
    rm -rf "$out.partial"
    gather "$out.partial"
    bytes=$(find "$out.partial" -type f -printf '%s\n' | awk '{ n += $1 } END { print n }')
    find "$out.partial" -type f -printf '%s %P\n' | sort -rn | awk '{ printf "%8.2f MB  %s\n", $1 / 1e6, $2 }'
    [ "$bytes" -le "$most_bytes" ] || fail "$out.partial has $bytes bytes, wanted at most $most_bytes" "leave out or slim down the largest of these files"
    rm -rf "$out"
    mv "$out.partial" "$out"
    say "ready: $out, $((bytes / 1000000)) MB (next, on the machine with the GPU: scripts/gpu_check.sh run --from ...)"
}

# --- run: on the machine with the GPU -----------------------------------------------------------------------------

left() { echo $((minutes * 60 - SECONDS)); }

note() {  # note WHAT: said, and kept for the report
    say "$1"
    printf '%s\n' "$1" >>"$work/notes.txt"
}

took() { printf '%s %s s\n' "$1" $((SECONDS - $2)) >>"$work/parts.txt"; }  # took PART BEGAN

limited() {  # limited SECONDS COMMAND...: its output goes to the log; 124 when its time is up
    local seconds=$1 status=0
    shift
    printf '\n== %s\n' "$*" >>"$log"
    [ "$seconds" -gt 0 ] || return 124
    # Not in the foreground: a signal that ends this script must not wait for the command.
    timeout -k 5 "$seconds" "$@" >>"$log" 2>&1 &
    child=$!
    # The benchmark says what it is at. Not through a pipe: whoever reads the log next must find all of it.
    tail -n 0 -f --pid="$child" "$log" 2>/dev/null | sed -un 's/^round /gpu_check: round /p' &
    wait "$child" || status=$?
    child=
    return "$status"
}

log_tail() { tail -n "$1" "$log" | cut -c 1-300 >&2; }

clean_up() {
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
}

find_base() {  # the Python that the environment is made with
    base=$(command -v "${PYTHON:-python3}") || fail "no ${PYTHON:-python3}" "PYTHON=/path/to/python3 scripts/gpu_check.sh run"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$base is $("$base" -V), wanted 3.10 or newer" "PYTHON=/path/to/python3 scripts/gpu_check.sh run"
}

can_load() { "$base" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

find_libraries() {  # the pack's libraries, where this machine has none of its own
    local library name brought=()
    rm -rf "${work:?}/lib"
    mkdir "$work/lib"
    for library in "$from"/lib/*; do
        name=${library##*/}
        if can_load "$name"; then continue; fi
        cp "$library" "$work/lib/"
        brought+=("$name")
    done
    [ ${#brought[@]} -eq 0 ] && return
    export LD_LIBRARY_PATH="$work/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    note "not on this machine, from the pack: ${brought[*]}"
}

find_driver() {
    # Containers get NVIDIA's driver mounted, often without its description, or with that where Vulkan's loader does not look.
    local file library found=() elsewhere=()
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    for file in {/etc,/usr/share,/usr/local/share,"${HOME:-/root}/.local/share"}/vulkan/icd.d/*.json; do
        if [ -f "$file" ]; then found+=("$file"); fi
    done
    case " ${found[*]} " in *nvidia*) return 0 ;; esac
    for file in /usr/local/nvidia/{,share/}vulkan/icd.d/*.json /run/opengl-driver/share/vulkan/icd.d/*.json; do
        if [ -f "$file" ]; then elsewhere+=("$file"); fi
    done
    if [ ${#elsewhere[@]} -eq 0 ]; then
        for library in libGLX_nvidia.so.0 libEGL_nvidia.so.0; do
            if can_load "$library"; then
                elsewhere=("$work/nvidia_icd.json")
                printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' "$library" >"$work/nvidia_icd.json"
                break
            fi
        done
    fi
    [ ${#elsewhere[@]} -eq 0 ] && return
    VK_DRIVER_FILES=$(IFS=:; printf '%s' "${elsewhere[*]}${found[*]:+:${found[*]}}")
    export VK_DRIVER_FILES VK_ICD_FILENAMES=$VK_DRIVER_FILES  # loaders before 1.3.207 know the second name only
    note "VK_DRIVER_FILES=$VK_DRIVER_FILES"
}

use_environment() {  # use_environment KIND
    if [ "$1" = target ]; then
        python=$base
        export PYTHONPATH="$env/site${PYTHONPATH:+:$PYTHONPATH}"
    else
        python=$env/bin/python
    fi
}

install_into() {  # install_into KIND: an environment of the pack's wheels only; "system" takes what this machine has, too
    local install=(-m pip install --quiet --disable-pip-version-check --no-compile --no-index --find-links "$from/wheels")
    rm -rf "$env"
    case $1 in
        venv) limited "$(left)" "$base" -m venv "$env" && limited "$(left)" "$env/bin/python" "${install[@]}" edgemoe ;;
        target) limited "$(left)" "$base" "${install[@]}" --target "$env/site" edgemoe ;;
        system) limited "$(left)" "$base" -m venv --system-site-packages "$env" && limited "$(left)" "$env/bin/python" "${install[@]}" edgemoe ;;
    esac
}

make_environment() {
    local began=$SECONDS kind stamp
    # A folder that was moved, another Python or another pack need another environment.
    stamp="$env $("$base" -V) $(cat "$from/pack.json" "$from"/wheels/*.whl | cksum)"
    if [ "$(sed 1d "$env/stamp" 2>/dev/null)" = "$stamp" ]; then
        use_environment "$(sed -n 1p "$env/stamp")"
        return
    fi
    for kind in venv target system; do
        if install_into "$kind"; then
            printf '%s\n%s\n' "$kind" "$stamp" >"$env/stamp"
            use_environment "$kind"
            [ "$kind" = venv ] || note "environment: $kind, with $("$base" -V)"
            took environment "$began"
            return
        fi
    done
    log_tail 20
    fail "no environment with $("$base" -V)" "see $log; the pack is for Python $(sed -nE 's/.*"python": "(.*)".*/\1/p' "$from/pack.json"): PYTHON=... or pack --python ..."
}

choose_device() {
    local began=$SECONDS status=0
    device=$(timeout -k 5 120 "$python" scripts/gpu_check.py device "$work" ${device:+--device "$device"} 2> >(tee -a "$log" >&2)) || status=$?
    if [ "$status" -ne 0 ]; then
        # The loader's own words, once: they name the driver that did not load, and why.
        VK_LOADER_DEBUG=error,warn limited 60 "$python" scripts/gpu_check.py device "$work" || true
        fail "no device to measure (exit code $status)" "see $log, where Vulkan's loader says what it tried; VK_DRIVER_FILES names a driver's *_icd.json"
    fi
    took device "$began"
}

make_model() {
    local began=$SECONDS make=()
    if [ -n "$model" ]; then
        printf '%s\n' "${model##*/}" >"$work/model.txt"
    elif [ -n "$tiny" ]; then
        model=$work/tiny.gguf
        make=("$python" -c 'import sys; sys.path.insert(0, "tests"); from tiny_models import tiny_model; tiny_model(sys.argv[1])' "$model")
        printf 'tiny, random (2 layers of 16 experts): its speed says nothing\n' >"$work/model.txt"
    elif [ -f models/demo.gguf ]; then
        model=models/demo.gguf
        printf 'demo.gguf (models/README.md); its routing is more even than real ones\n' >"$work/model.txt"
    else
        model=$work/demo-shape.gguf
        make=("$python" scripts/make_random_model.py "$model" --shape demo)
        printf 'random weights in the shape of models/demo.gguf (30 layers of 128 experts, 8 used): hit rates are of no real model\n' >"$work/model.txt"
    fi
    say "model: $(cat "$work/model.txt")"
    if [ ${#make[@]} -gt 0 ] && [ ! -f "$model" ]; then
        if ! limited "$(left)" "${make[@]}"; then
            log_tail 20
            fail "no model" "see $log"
        fi
        took model "$began"
    fi
}

report() { timeout -k 5 60 "$python" scripts/gpu_check.py report "$work" "$out" "$@"; }

measure() {  # measure PASS ROUNDS SLOTS MISSES: one run of the benchmark, then a report of all there is; fails when it left no results
    # The benchmark writes after every round, so a last one that does not fit costs nothing but its own results.
    local began=$SECONDS limit=$(($(left) - 10)) status=0 how=''
    limited "$limit" "$python" scripts/bench_device_cache.py "$model" --device "$device" --gpu-layers -1 --slots "$3" --misses "$4" "${sizes[@]}" \
        --rounds "$2" --json "$work/$1.json" || status=$?
    took "$1" "$began"
    case $status in
        0 | 1) ;;  # 1: logits, which the report judges; or it failed and there are no results
        124 | 137) how="was cut off after $limit s" ;;
        *) how="ended with exit code $status: $(tail -n 1 "$log" | cut -c 1-200)" ;;
    esac
    [ -z "$how" ] || note "$1 $how"
    if [ ! -f "$work/$1.json" ]; then
        failed=1
        note "$1 left no results"
        log_tail 20
        status=-1
    fi
    report || true
    [ "$status" -ge 0 ]
}

measure_first() {  # sets misses to what works; whatever crashes takes the rest of its pass with it, so then each on its own
    local mode working=()
    if measure pass-1 1 "$first_slots" "$misses"; then return 0; fi
    for mode in ${misses//,/ }; do
        if [ "$(left)" -gt 60 ] && measure "pass-1-$mode" 1 "$first_slots" "$mode"; then working+=("$mode"); fi
    done
    misses=$(IFS=,; printf '%s' "${working[*]}")
    [ -n "$misses" ]
}

fits() {  # fits N_VARIANTS: one round, going by what the last pass took for one variant or for reading the reference, and with a quarter to spare
    each=$((1 + (SECONDS - began) / (n_last + 1)))
    [ $((each * ($1 + 1) * 5 / 4 + 10)) -le "$(left)" ]
}

measure_all() {
    # Besides slots: no slots, twice, and llama.cpp, twice. All experts in slots is one variant.
    local began=$SECONDS n_last=7 n_all=17 n_few=11 n_modes each
    say "first pass: are the logits right?"
    measure_first || return 0
    [ -z "$tiny" ] || return 0
    if [ "$misses" != cpu,load,auto ]; then
        n_modes=$(wc -w <<<"${misses//,/ }")
        n_last=$((4 + n_modes)) n_all=$((5 + 4 * n_modes)) n_few=$((5 + 2 * n_modes))
    fi
    if ! fits "$n_all" && fits "$n_few"; then
        # Drivers compile shaders at their first use: the first pass may have been slow for that alone.
        say "a short pass, for there may be no time for a long one; $(left) s left"
        began=$SECONDS n_last=$n_few
        measure pass-2 1 5%,25%,100% "$misses" || return 0
    fi
    if fits "$n_all"; then
        say "all variants; $(left) s left"
        measure pass-3 "$most_rounds" 5%,12.5%,25%,50%,100% "$misses" || true
    else
        note "no time for all variants: $(left) s left, each would take about $each s"
    fi
}

run() {
    local from=$root/build/gpu_check out=$root/build/gpu_check_out work=$root/build/gpu_check_run
    local device='' model='' tiny='' minutes=8 base python env log failed='' status=0 misses=cpu,load,auto first_slots=25% sizes=(--n-prompt 512 --n-decode 64)
    while [ $# -gt 0 ]; do
        case $1 in
            --from) value "$1" $#; from=$(absolute "$2"); shift ;;
            --out) value "$1" $#; out=$(absolute "$2"); shift ;;
            --device) value "$1" $#; device=$2; shift ;;
            --model) value "$1" $#; model=$(absolute "$2"); shift ;;
            --tiny) tiny=1; first_slots=25%,100% sizes=(--n-prompt 32 --n-decode 8) ;;
            --minutes) value "$1" $#; minutes=$2; shift ;;
            --help | -h) usage; exit 0 ;;
            *) wrong "$1: no such argument of run" ;;
        esac
        shift
    done
    [[ $minutes =~ ^[1-9][0-9]*$ ]] || wrong "--minutes $minutes: wanted a whole number"
    [ -f "$from/pack.json" ] || fail "$from: no pack" "scripts/gpu_check.sh pack, on a machine with network; then bring its folder here"
    [ -z "$model" ] || [ -f "$model" ] || fail "$model: no such file" "name a GGUF"
    command -v timeout >/dev/null || fail "no timeout command" "install coreutils"
    cd "$root"
    env=$work/env log=$out/gpu_check.log
    mkdir -p "$out" "$work"
    rm -f "$out"/gpu_check.{md,json} "$work"/pass-*.json "$work"/{machine.json,notes.txt,parts.txt,model.txt,tiny.gguf}
    : >"$log"
    cp "$from/pack.json" "$work/"
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM

    find_base
    find_libraries
    find_driver
    say "making an environment from $from"
    make_environment
    choose_device
    say "device: $device"
    make_model
    measure_all
    report --show || status=$?
    say "$out/gpu_check.md, .json and .log; took $SECONDS s"
    [ -z "$failed" ] && [ "$status" -eq 0 ]
}

child=''
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    pack | run) "$@" ;;
    --help | -h) usage ;;
    *) usage >&2; exit 2 ;;
esac
