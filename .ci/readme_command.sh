#!/usr/bin/env bash
# Print README.md's first bash block behind a comment, word for word: bash .ci/readme_command.sh "test command"
set -euo pipefail
cd "$(dirname "$0")/.."

command=$(sed -n "/<!-- $1 -->/,/^\`\`\`\$/p" README.md | sed -n '/^```bash$/,/^```$/p' | grep -v '^```' || true)
test -n "$command" || { echo "README.md has no bash block behind <!-- $1 -->" >&2; exit 1; }
echo "$command"
