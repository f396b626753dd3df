# Two images from one file:
#   docker build --target service  -t weightless-service .     HTTP service and client, no torch
#   docker build --target exporter -t weightless-exporter .    the same and everything that a CUDA export needs
# The bases are arguments, so that a mirror or a base of one's own works (tests/e2e builds from a debootstrap'ed one).
# pip and apt use whatever configuration the base or the builder gives them; none is written here.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.1-devel-ubuntu24.04

# The wheel, and the service's packages: dependencies change less often than code, so they get a layer of their own.
FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
RUN python3 -c 'import pathlib, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; x = p["optional-dependencies"]; \
pathlib.Path("service.txt").write_text("\n".join(p["dependencies"] + x["postgres"])); \
pathlib.Path("exporter.txt").write_text("\n".join(p["dependencies"] + x["postgres"] + x["ray"] + x["exporter"]))' \
    && python3 -m venv /opt/weightless \
    && /opt/weightless/bin/pip install --no-cache-dir --no-compile -r service.txt
COPY exporter ./exporter
COPY service ./service
RUN /opt/weightless/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && /opt/weightless/bin/pip install --no-cache-dir --no-deps /dist/*.whl

FROM ${BASE_IMAGE} AS service
RUN groupadd --gid 10001 weightless \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/weightless --create-home --shell /usr/sbin/nologin weightless
COPY --from=build /opt/weightless /opt/weightless
# WEIGHTLESS_HOST opens the container's port. The service refuses to listen there without WEIGHTLESS_AUTH: set one.
ENV PATH=/opt/weightless/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    WEIGHTLESS_DATA_DIR=/var/lib/weightless \
    WEIGHTLESS_HOST=0.0.0.0
WORKDIR /var/lib/weightless
USER 10001:10001
EXPOSE 8080
VOLUME /var/lib/weightless
STOPSIGNAL SIGTERM
ENTRYPOINT ["weightless"]
CMD ["serve"]

# A CUDA export compiles and links: it needs a C++ compiler, binutils, Python's headers, openssl (torch's AOT cache) and ptxas.
FROM ${CUDA_IMAGE} AS exporter
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        binutils ca-certificates g++ openssl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 weightless \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/weightless --create-home --shell /usr/sbin/nologin weightless \
    && python3 -m venv /opt/weightless
COPY --from=build /src/exporter.txt /tmp/requirements.txt
RUN /opt/weightless/bin/pip install --no-cache-dir --no-compile -r /tmp/requirements.txt
COPY --from=build /dist /dist
RUN /opt/weightless/bin/pip install --no-cache-dir --no-deps /dist/*.whl
ENV PATH=/opt/weightless/bin:/usr/local/cuda/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1 \
    WEIGHTLESS_DATA_DIR=/var/lib/weightless \
    WEIGHTLESS_HOST=0.0.0.0
WORKDIR /var/lib/weightless
USER 10001:10001
EXPOSE 8080
VOLUME /var/lib/weightless
STOPSIGNAL SIGTERM
ENTRYPOINT ["weightless"]
CMD ["serve"]
