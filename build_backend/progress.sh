#!/usr/bin/env bash
# Runs pip, and shows how far it is: progress.sh FILE pip install --verbose ...
# FILE gets all that it says; if it fails, its last words are shown.
set -uo pipefail
file=$1
shift
"$@" 2>&1 | tee "$file" | awk '
  # A step of ninja: "[2/6] c++ ... -c /path/csrc/cpu/step.cpp -o ..."
  match($0, /^ *\[[0-9]+\/[0-9]+\]/) {
    step = substr($0, RSTART, RLENGTH)
    source = match($0, / -c [^ -][^ ]*/) ? substr($0, RSTART + 4, RLENGTH - 4) : ""
    sub(/.*\/csrc\//, "csrc/", source)
    sub(/^ */, "  ", step)
    print step " " source
  }
  /^ *Downloading / { sub(/[^ ]*\//, ""); print " " $0 }
  /^ *Installing collected packages/ { print "  copying packages into place" }
  / was compiled before / || /^ *fusedrnn: / { print }
  { fflush() }'
status=${PIPESTATUS[0]}
if [ "$status" -ne 0 ]; then
  tail -n 60 "$file"
  echo "failed: $* (all of its words are in $file)"
  grep -E '^ *fusedrnn: ' "$file" | tail -n 1
fi
exit "$status"
