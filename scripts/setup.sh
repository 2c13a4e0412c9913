#!/usr/bin/env bash
# Makes .venv with llama-cpp-python (built for this CPU) and edgemoe. Run it again at any time: what is done is not redone.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/setup.sh [--test] [--vulkan] [--quiet] [--help]

Installs missing tools (apt-get, only if something is missing), makes .venv, builds llama-cpp-python for this CPU
(minutes; the wheel is kept in a cache) and installs edgemoe. Ends with .venv/bin/edgemoe.

  --test    also install what the tests need
  --vulkan  build llama.cpp with its Vulkan backend, for a GPU (takes twice as long). To be given each time: without it,
            setup.sh goes back to the wheel for the CPU. Both stay in the cache, so that takes under a minute
  --quiet   print nothing unless something fails

environment:
  EDGEMOE_CACHE   where built wheels are kept (default: ${XDG_CACHE_HOME:-~/.cache}/edgemoe)
  CMAKE_ARGS      passed to llama.cpp's build, e.g. CMAKE_ARGS=-DGGML_CUDA=ON; each setting has a wheel of its own
  VULKAN_SDK      where Vulkan's headers, loader and glslc are, if not the system's
  PYTHON, CC, CXX, CFLAGS, CXXFLAGS, CMAKE_BUILD_PARALLEL_LEVEL, PIP_*   as usual
EOF
}

llama_version=0.3.36
core_minutes=13  # what compiling llama.cpp took on one core of a server of 2023

test_extra='' quiet='' vulkan=''
for argument in "$@"; do
    case $argument in
        --test) test_extra=1 ;;
        --vulkan) vulkan=1 ;;
        --quiet) quiet=1 ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done

HOME=${HOME:-~}  # services and some CI systems have none
cache=${EDGEMOE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgemoe}
case $cache in /*) ;; *) cache=$PWD/$cache ;; esac  # meant from where the user stands
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamps=$venv/edgemoe-setup
log=$root/build/setup.log
partial='' ticker=''
network_fix="check the network and proxy settings (PIP_INDEX_URL, PIP_CERT, ...), then run scripts/setup.sh again"

say() { [ -n "$quiet" ] || printf 'setup: %s\n' "$*"; }

fail() {  # fail WHAT FIX
    printf 'setup: FAILED: %s\nfix: %s\n' "$1" "$2" >&2
    exit 1
}

clean_up() {
    stop_ticker
    [ -z "$partial" ] || rm -rf "$partial"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- steps with a log and a clock ---------------------------------------------------------------------------------

objects_built() {  # ", 12 of 345 objects" from ninja's last "[12/345]" in the log
    tail -c 20000 "$log" | grep -oE '^ *\[[0-9]+/[0-9]+\]' | tail -n 1 | sed -E 's|.*\[([0-9]+)/([0-9]+)\]|, \1 of \2 objects|' || true
}

draw() { printf '\r\033[K\033[?7lsetup: %s\033[?7h' "$1"; }  # no wrapping: a second line could not be wiped

tick() {  # tick WHAT: shows how long it has been running; every second on a terminal, else every 30 s
    local began=$SECONDS elapsed
    while kill -0 $$ 2>/dev/null; do  # $$ is setup itself: nobody stops us if it is killed
        # Closed descriptors: a sleep that outlives us must hold neither the lock nor a reader of our output.
        sleep 1 >/dev/null 2>&1 9>&-
        elapsed=$((SECONDS - began))
        if [ -t 1 ]; then
            draw "$(printf '%d:%02d%s' $((elapsed / 60)) $((elapsed % 60)) "$(objects_built)"): $1"
        elif [ $((elapsed % 30)) -eq 0 ]; then
            printf 'setup: ... %d:%02d%s\n' $((elapsed / 60)) $((elapsed % 60)) "$(objects_built)"
        fi
    done
}

stop_ticker() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    [ ! -t 1 ] || printf '\r\033[K'
}

step() {  # step WHAT FIX COMMAND...: the command's output goes to the log
    local what=$1 fix=$2 began=$SECONDS status=0
    shift 2
    printf '\n== %s\n%s\n' "$what" "$*" >>"$log"
    if [ -z "$quiet" ]; then
        if [ -t 1 ]; then draw "$what"; else say "$what"; fi
        tick "$what" &
        ticker=$!
    fi
    "$@" >>"$log" 2>&1 || status=$?
    stop_ticker
    if [ "$status" -ne 0 ]; then
        printf -- '--- the last lines of %s:\n' "$log" >&2
        tail -n 20 "$log" | cut -c 1-300 >&2  # compiler commands are long
        fail "$what (exit code $status)" "$fix"
    fi
    if [ -t 1 ]; then say "$what, took $((SECONDS - began)) s"; fi
}

# --- tools --------------------------------------------------------------------------------------------------------

apt_install() {  # apt_install PACKAGE...
    local as_root=()
    if ! command -v apt-get >/dev/null; then
        fail "missing: $*" "install them with this system's package manager (names are Debian's), then run scripts/setup.sh again"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "missing: $*" "as root: apt-get install $*"
        sudo -v || fail "missing: $*" "as root: apt-get install $*"
        as_root=(sudo)
    fi
    as_root+=(env DEBIAN_FRONTEND=noninteractive)
    step "reading the package lists" "check the network, then run scripts/setup.sh again" "${as_root[@]}" apt-get update
    step "installing $* (a minute)" "as root: apt-get install $*" \
        "${as_root[@]}" apt-get install -y --no-install-recommends "$@"
}

find_python() {  # sets python to the first interpreter that is new enough, and python_name to how it was found
    # The base interpreter: `python3` may be .venv's own, which cannot remake itself.
    local show='import sys; print(getattr(sys, "_base_executable", "") or sys.executable); sys.exit(sys.version_info < (3, 10))'
    for python_name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if python=$("$python_name" -c "$show" 2>/dev/null); then return 0; fi
    done
    python=
    return 1
}

can_make_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

can_compile() {  # a program that links: gcc without g++, or without the C library's headers, is of no use
    local out status=0
    out=$(mktemp)
    printf '#include <vector>\nint main() { return (int) std::vector<int>().size(); }\n' |
        "${cxx[@]}" -x c++ -o "$out" - 2>/dev/null || status=1
    printf 'int main(void) { return 0; }\n' | "${cc[@]}" -x c -o "$out" - 2>/dev/null || status=1
    rm -f "$out"
    return "$status"
}

find_compilers() {  # sets the arrays cc and cxx; the order is CMake's own
    local pair
    if [ -n "${CC:-}${CXX:-}" ]; then
        read -r -a cc <<<"${CC:-cc}"
        read -r -a cxx <<<"${CXX:-c++}"
        can_compile
        return
    fi
    for pair in "cc c++" "gcc g++" "clang clang++"; do
        cc=("${pair% *}") cxx=("${pair#* }")
        if can_compile; then return 0; fi
    done
    return 1
}

has_cmake() {
    local version
    version=$(cmake --version 2>/dev/null | sed -nE '1s/.* ([0-9]+)\.([0-9]+).*/\1 \2/p') || return 1
    [ -n "$version" ] && [ $((${version% *} * 1000 + ${version#* })) -ge 3021 ]
}

ensure_tools() {
    local missing=()
    find_python || missing+=(python3 python3-venv)
    if [ -n "$python" ] && ! can_make_venv; then
        # Debian and Ubuntu keep venv in a package of its own, named after the interpreter.
        case $python_name in
            python3.*) missing+=("$python_name-venv") ;;
            *) missing+=(python3-venv) ;;
        esac
    fi
    find_compilers || missing+=(gcc g++)
    [ ${#missing[@]} -eq 0 ] && return
    apt_install "${missing[@]}"
    find_python || fail "no Python 3.10 or newer" "install one and name it: PYTHON=/path/to/python3 scripts/setup.sh"
    can_make_venv || fail "$python has no venv" "PYTHON=/usr/bin/python3 scripts/setup.sh"
    find_compilers || fail "${cxx[*]} does not compile a small program" "unset CC and CXX, or point them at a working compiler"
}

# --- Vulkan -------------------------------------------------------------------------------------------------------

macro() {  # macro HEADER NAME: what NAME stands for; fails if there is no such header
    local text
    text=$(printf '#include <%s>\n%s\n' "$1" "$2" |
        "${cxx[@]}" -I"${VULKAN_SDK:-/usr}/include" -E -P -x c++ - 2>/dev/null) || return 1
    printf '%s\n' "${text##*$'\n'}"
}

find_vulkan_headers() { vulkan_version=$(macro vulkan/vulkan_core.h VK_HEADER_VERSION); }

find_spirv_headers() { spirv_version=$(macro spirv/unified1/spirv.hpp SPV_VERSION.SPV_REVISION); }

find_glslc() { glslc=$(PATH="${VULKAN_SDK:+$VULKAN_SDK/bin:}$PATH" command -v glslc); }

has_vulkan_driver() {  # drivers describe themselves where Vulkan's loader looks for them
    local file
    [ -z "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] || return 0
    for file in {/etc,/usr/share,/usr/local/share,"$HOME/.local/share"}/vulkan/icd.d/*.json; do
        if [ -f "$file" ]; then return 0; fi
    done
    return 1
}

ensure_vulkan() {  # sets glslc, vulkan_version and spirv_version
    local missing=()
    find_vulkan_headers || missing+=(libvulkan-dev)
    find_spirv_headers || missing+=(spirv-headers)
    find_glslc || missing+=(glslc)
    has_vulkan_driver || missing+=(mesa-vulkan-drivers)
    [ ${#missing[@]} -eq 0 ] && return
    apt_install "${missing[@]}"
    if ! { find_vulkan_headers && find_spirv_headers && find_glslc; }; then
        fail "${missing[*]} installed, but ${cxx[*]} does not see all of it" \
            "unset VULKAN_SDK, CC and CXX, then run scripts/setup.sh --vulkan again"
    fi
}

lacks_layer_settings() { [ -n "$vulkan" ] && [ "$vulkan_version" -lt 272 ]; }

# --- .venv --------------------------------------------------------------------------------------------------------

venv_is_current() {
    # Scripts in a venv name it by its full path, and packages lie in a folder named after the Python version: after
    # a move of the checkout or an upgrade of Python it has to be made anew.
    [ "$(cat "$stamps/venv" 2>/dev/null)" = "$root $("$venv/bin/python" -V 2>/dev/null)" ] &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

ensure_venv() {
    venv_is_current && return
    if [ -e "$venv" ] && [ ! -e "$stamps" ]; then
        fail "$venv exists and is not ours" "move it away, then run scripts/setup.sh again"
    fi
    # The folder of stamps goes first: a venv that was cut short half-way is ours all the same.
    rm -rf "$venv"
    mkdir -p "$stamps"
    step "making .venv with $("$python" -V)" "remove .venv, then run scripts/setup.sh again" "$python" -m venv "$venv"
    printf '%s %s\n' "$root" "$("$venv/bin/python" -V)" >"$stamps/venv"
}

pip() { "$venv/bin/python" -m pip "$@"; }

ensure_build_tools() {
    # Builds run without isolation: edgemoe's needs the installed llama-cpp-python, and a CMake from PyPI that lives in
    # .venv cannot start inside pip's isolated environments. CMake and Ninja come from PyPI when the system's are
    # missing or too old; that needs no root.
    local missing=()
    "$venv/bin/python" -c 'import scikit_build_core' 2>/dev/null || missing+=("scikit-build-core[pyproject]>=0.10")
    has_cmake || missing+=("cmake>=3.21")
    command -v ninja >/dev/null || missing+=(ninja)
    [ ${#missing[@]} -eq 0 ] || step "installing build tools: ${missing[*]}" "$network_fix" pip install "${missing[@]}"
}

# --- llama-cpp-python ---------------------------------------------------------------------------------------------

sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c 1-32; }

choose_flags() {
    # GCC 12 miscompiles ggml's AMX tile configuration: the first batch of tokens then dies with SIGSEGV or SIGILL.
    # No layout that edgemoe uses gains from AMX, so it is off wherever the CPU has it, whatever the compiler.
    local amx_off="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    variant=
    # shellcheck disable=SC2086
    if grep -qsw amx_tile /proc/cpuinfo && "${cxx[@]}" $amx_off -x c++ -fsyntax-only /dev/null 2>/dev/null; then
        variant=", without AMX"
        export CFLAGS="${CFLAGS:+$CFLAGS }$amx_off" CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }$amx_off"
    fi
    if [ -n "$vulkan" ]; then
        variant+=", with Vulkan"
        core_minutes=$((core_minutes * 2))  # its shaders are compiled for every type of weights
        export CMAKE_ARGS="${CMAKE_ARGS:+$CMAKE_ARGS }-DGGML_VULKAN=ON"
    fi
    export CC="${cc[*]}" CXX="${cxx[*]}"
    if [ -z "${CMAKE_BUILD_PARALLEL_LEVEL:-}" ]; then
        CMAKE_BUILD_PARALLEL_LEVEL=$("$python" -c \
            'import runpy, sys; print(runpy.run_path(sys.argv[1])["build_jobs"]())' edgemoe/machine.py)
    fi
    export CMAKE_BUILD_PARALLEL_LEVEL
}

describe_build() {  # everything that the bytes of the wheel depend on
    printf 'llama-cpp-python %s\nCFLAGS %s\nCXXFLAGS %s\nLDFLAGS %s\nCMAKE_ARGS %s\n' \
        "$llama_version" "${CFLAGS:-}" "${CXXFLAGS:-}" "${LDFLAGS:-}" "${CMAKE_ARGS:-}"
    "${cc[@]}" --version | sed -n 1p
    "${cxx[@]}" --version | sed -n 1p
    uname -sm
    getconf GNU_LIBC_VERSION 2>/dev/null || true
    # The build is for this very CPU (-march=native).
    sed -nE '/^$/q; /^(model name|flags|Features|CPU (implementer|part|variant))/p' /proc/cpuinfo 2>/dev/null ||
        sysctl -n machdep.cpu.brand_string
    [ -z "$vulkan" ] || describe_vulkan
}

describe_vulkan() {
    printf 'Vulkan headers %s, SPIR-V headers %s\n' "$vulkan_version" "$spirv_version"
    "$glslc" --version
    if lacks_layer_settings; then printf 'layer settings: %s\n' "$(cksum <scripts/vulkan_layer_settings.hpp)"; fi
}

find_wheel() {  # sets wheel, empty if it is not in the cache
    local candidate
    wheel=
    for candidate in "$cache/wheels/$key"/*.whl; do
        if [ -f "$candidate" ]; then wheel=$candidate; fi
    done
}

build_wheel() {
    local minutes=$(((core_minutes + CMAKE_BUILD_PARALLEL_LEVEL - 1) / CMAKE_BUILD_PARALLEL_LEVEL))
    ensure_build_tools
    # Built beside its place in the cache and then renamed: an interrupted build leaves nothing that looks finished.
    partial=$(mktemp -d "$cache/wheels/.partial-XXXXXX")
    mkdir "$partial/tmp" "$partial/out"
    describe_build >"$partial/out/build.txt"
    local settings=(TMPDIR="$partial/tmp")
    if lacks_layer_settings; then
        # By name and search path: a checkout's full path may hold spaces. Not exported: edgemoe is built without it.
        settings+=(CXXFLAGS="${CXXFLAGS:+$CXXFLAGS }-include vulkan_layer_settings.hpp"
            CPLUS_INCLUDE_PATH="$root/scripts${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}")
    fi
    # --no-cache-dir: pip's own cache knows a wheel by its version, not by its flags.
    step "building llama-cpp-python $llama_version for this CPU$variant, $CMAKE_BUILD_PARALLEL_LEVEL jobs (about $minutes min)" \
        "see $log; short of memory? CMAKE_BUILD_PARALLEL_LEVEL=1 scripts/setup.sh${vulkan:+ --vulkan}" \
        env "${settings[@]}" "$venv/bin/python" -m pip wheel -v --no-deps --no-build-isolation --no-cache-dir \
        --no-binary llama-cpp-python -w "$partial/out" "llama-cpp-python==$llama_version"
    rm -rf "${cache:?}/wheels/$key"
    mv "$partial/out" "$cache/wheels/$key"
    rm -rf "$partial"
    partial=
    find_wheel
    [ -n "$wheel" ] || fail "pip left no wheel in $cache/wheels/$key" "see $log"
}

installed_llama() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("llama-cpp-python"))' 2>/dev/null || true
}

ensure_llama() {
    local cached=" (built before, from the cache)"
    key=$(describe_build | sha256)
    [ "$(cat "$stamps/llama" 2>/dev/null) $(installed_llama)" = "$key $llama_version" ] && return
    find_wheel
    if [ -z "$wheel" ]; then
        cached=
        build_wheel
    fi
    step "installing llama-cpp-python $llama_version$cached" "$network_fix" pip install --force-reinstall --no-deps "$wheel"
    printf '%s\n' "$key" >"$stamps/llama"
}

# --- edgemoe ------------------------------------------------------------------------------------------------------

hash_sources() {  # what the installed package is made of, and the llama.cpp it is linked with
    {
        printf '%s\n' "$key"
        find native edgemoe convert pyproject.toml README.md -type f ! -path '*/__pycache__/*' -print0 2>/dev/null |
            LC_ALL=C sort -z | xargs -0 cksum
    } | sha256
}

ensure_edgemoe() {
    local sources extra=
    sources=$(hash_sources)
    if [ -n "$test_extra" ] && ! { [ -x "$venv/bin/pytest" ] && [ -x "$venv/bin/hypothesis" ]; }; then
        extra="[test]"
    elif [ "$(cat "$stamps/edgemoe" 2>/dev/null)" = "$sources" ] && [ -x "$venv/bin/edgemoe" ]; then
        return
    fi
    ensure_build_tools
    step "building and installing edgemoe$extra (under a minute)" "see $log, then run scripts/setup.sh again" \
        pip install -v --no-build-isolation ".$extra"
    [ -x "$venv/bin/edgemoe" ] || fail "pip installed edgemoe without its command" "see $log"
    printf '%s\n' "$sources" >"$stamps/edgemoe"
}

# --- all of it ----------------------------------------------------------------------------------------------------

mkdir -p "$root/build" "$cache/wheels" || fail "cannot write to $root and $cache" "EDGEMOE_CACHE=/some/folder scripts/setup.sh"
if command -v flock >/dev/null; then
    exec 9>"$cache/setup.lock"
    if ! flock -n 9; then
        say "another setup is running; waiting for it"
        flock 9
    fi
    rm -rf "$cache/wheels"/.partial-*  # we hold the lock, so whoever left these is dead
fi
: >"$log"

python='' python_name='' cc=() cxx=()
ensure_tools
[ -z "$vulkan" ] || ensure_vulkan
export PATH="$venv/bin:$PATH"
choose_flags
ensure_venv
ensure_llama
ensure_edgemoe
say "ready: .venv/bin/edgemoe (next: .venv/bin/edgemoe doctor)"
