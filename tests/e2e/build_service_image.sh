#!/bin/bash
# Builds the Dockerfile's `service` target with Debian's buildah: no Docker engine and no registry, but root.
# Usage: build_service_image.sh CONTEXT WORK_DIR IMAGE
# The base is Debian bookworm with its Python 3.11, made by debootstrap and kept as WORK_DIR/base.tar for the next build.
# pip inside the build uses this machine's settings (files and PIP_* variables alike): one pip.conf, the certificates and
# local package folders are mounted read-only while it runs. None of it reaches the image.
set -euo pipefail
context=$1 work=$2 image=$3
mirror=${DEBOOTSTRAP_MIRROR:-http://deb.debian.org/debian}
mkdir -p "$work"

# A storage folder of this build's own: removing WORK_DIR leaves nothing on the machine.
buildah=(buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run")

if [ ! -f "$work/base.tar" ]; then
    rootfs=$(mktemp -d "$work/rootfs.XXXXXX")
    trap 'rm -rf "$rootfs"' EXIT
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$rootfs" "$mirror" \
        >"$work/debootstrap.log" 2>&1 || { tail -n 20 "$work/debootstrap.log" >&2; exit 1; }
    rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/*
    tar -C "$rootfs" -cf "$work/base.tar.part" .
    mv "$work/base.tar.part" "$work/base.tar"
fi

base=localhost/weightless-base
if ! "${buildah[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    container=$("${buildah[@]}" from scratch)
    "${buildah[@]}" add --quiet "$container" "$work/base.tar" / >/dev/null
    "${buildah[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    "${buildah[@]}" commit --quiet --rm "$container" "$base" >/dev/null
fi

# `pip config list` has merged files and environment; files and folders that it names are printed, to be mounted too.
mapfile -t named < <(python3 - "$work/pip.conf" <<'PYTHON'
import ast, configparser, pathlib, re, subprocess, sys

listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
merged = configparser.RawConfigParser()
for line in listed.splitlines():
    name, value = line.split("=", 1)
    section, key = name.rsplit(".", 1)
    section = "global" if section == ":env:" else section
    if not merged.has_section(section):
        merged.add_section(section)
    merged.set(section, key, ast.literal_eval(value).replace("\n", "\n\t"))
with open(sys.argv[1], "w") as file:
    merged.write(file)
words = [word for section in merged.sections() for value in merged[section].values() for word in value.split()]
paths = {pathlib.Path(re.sub("^file://", "", word)) for word in words if re.match("(file://)?/", word)}
paths = {path.parent if path.name == "simple" else path for path in paths}  # a folder index keeps its files beside it
print("\n".join(str(path) for path in sorted(paths) if path.exists()))
PYTHON
)
mounts=(--volume "$work/pip.conf:/etc/pip.conf:ro")
for path in /etc/ssl/certs "${named[@]}"; do
    if [ -e "$path" ] && [[ $path != /etc/ssl/certs/* ]]; then
        mounts+=(--volume "$path:$path:ro")
    fi
done

"${buildah[@]}" bud --quiet --isolation chroot --pull-never --target service --build-arg "BASE_IMAGE=$base" \
    "${mounts[@]}" --tag "$image" "$context"
