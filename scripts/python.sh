# find_python <who> [version]: $python becomes the newest Python on PATH that the project runs on and that is not of this
# version (3.13), one with a complete venv if there is any. It is empty, after a sentence by <who>, if there is none.
find_python() {
    local here=. parts found name
    # pyenv's python does not run in a folder that is gone.
    pwd -P >/dev/null 2>&1 || here=/
    for parts in ", ensurepip" ""; do
        for name in python3.13 python3.12 python3.11 python3 python; do
            # Its own path, for the same reason.
            if command -v "$name" >/dev/null && found=$(cd "$here" &&
                "$name" -c "import sys$parts; print(sys.executable); v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) or '%d.%d' % v == '${2:-}')" 2>/dev/null); then
                python=$found
                return
            fi
        done
    done
    python=
    echo "$1: Python 3.11, 3.12 or 3.13 is needed and was not found on PATH (Debian and Ubuntu: apt install python3 python3-venv)" >&2
    return 1
}
