#!/bin/sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/keep-running.sh"

