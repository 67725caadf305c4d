#!/usr/bin/env bash
# The C compiler of a test run: $LIGHTERING_COMPILER, which makes each library once. Dozens of processes ask for the same.
set -euo pipefail
arguments=() sources=() output=""
while [ $# -gt 0 ]; do
    case "$1" in
        -o) output=$2; shift ;;
        *.c) sources+=("$1"); arguments+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
[ -n "$output" ] || exec "$LIGHTERING_COMPILER" "${arguments[@]}"
key=$({ printf '%s\n' "${arguments[@]}"; cat -- "${sources[@]}"; } | sha256sum | cut -d " " -f 1)
made=$LIGHTERING_COMPILED/$key
# Whoever asks meanwhile waits: two threads, or two workers of pytest.
if command -v flock >/dev/null; then exec 9>"$made.lock" && flock 9; fi
if [ ! -e "$made" ]; then
    "$LIGHTERING_COMPILER" "${arguments[@]}" -o "$made.$$"
    mv "$made.$$" "$made"
fi
cp "$made" "$output"
