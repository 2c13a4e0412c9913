#!/usr/bin/env bash
# From a clean clone to a chat with a Mixture-of-Experts model: sets up, builds the demo model, runs a prompt, chats.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/quickstart.sh [--small] [--model PATH] [--no-chat] [--help]

  --small        the small demo model (154 MiB instead of 1.6 GB)
  --model PATH   a GGUF of your own (or a package) instead of the demo model
  --no-chat      stop after the prompt; without a terminal that is what happens anyway
EOF
}

prompt="Tell a very short story about a lighthouse and a fox."

say() { printf 'quickstart: %s\n' "$*"; }

fail() {  # fail WHAT FIX
    printf 'quickstart: FAILED: %s\nfix: %s\n' "$1" "$2" >&2
    exit 1
}

need_disk() {  # need_disk MIB FOLDER
    local free
    free=$(($(df -Pk "$2" | awk 'NR == 2 { print $4 }') / 1024))
    [ "$free" -ge "$1" ] || fail "$free MiB free in $2, wanted $1 MiB" "free some space; --small needs less"
}

small='' model='' chat=1
while [ $# -gt 0 ]; do
    case $1 in
        --small) small=1 ;;
        --model)
            [ $# -ge 2 ] || { usage >&2; exit 2; }
            model=$2
            shift
            ;;
        --no-chat) chat='' ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done

if [ -n "$model" ]; then
    [ -e "$model" ] || fail "$model: no such file" "name a GGUF file or a .edgemoe package"
    case $model in /*) ;; *) model=$PWD/$model ;; esac  # it was named from where the user stands
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Checked before anything is built. The environment takes 0.3 GB, llama.cpp's build as much again, the compilers 0.4 GB.
mib=0 demo=()
if [ -z "$model" ]; then
    demo=(scripts/make_demo_model.py)
    if [ -n "$small" ]; then
        demo+=(--small)
        model=models/demo-small.gguf mib=300
    else
        model=models/demo.gguf mib=1800
    fi
    if [ -e "$model" ]; then mib=0; fi
fi
if [ ! -x .venv/bin/edgemoe ]; then mib=$((mib + 1000)); fi
need_disk "$mib" "$PWD"

scripts/setup.sh
if [ ${#demo[@]} -gt 0 ]; then
    # It leaves a model alone that is there already.
    say "building the demo model if it is not there (a small download, then about 10 s)"
    .venv/bin/python "${demo[@]}"
fi
say "edgemoe run $model -n 200 -p \"$prompt\""
.venv/bin/edgemoe run "$model" -n 200 -p "$prompt"
if [ -n "$chat" ] && [ -t 0 ] && [ -t 1 ]; then
    say "edgemoe chat $model"
    exec .venv/bin/edgemoe chat "$model"
fi
