# Python, torch and this package, for pods that mount nothing of their hosts. docs/kubernetes.md, "The image", tells how it is
# built and what may be given; `ci/image build` builds it without any registry.
#
# BASE: any image with Python 3.11 or newer, and pip or venv. Where it has torch (images of vendors), that one is used as it is.
ARG BASE=python:3.12-slim

# `--build-context wheels=FOLDER` takes the place of this stage: pip then takes wheels from there alone and asks no index.
FROM scratch AS wheels
COPY constraints.txt /

FROM ${BASE} AS build
# TORCH_VERSION in place of that in constraints.txt, TORCH_INDEX in place of pip's, both only where BASE has no torch. These stay
# in this stage: neither they nor pip's configuration (`--secret id=pip,src=FILE`) are in the history of the image.
ARG EXTRAS=torch,kubernetes
ARG TORCH_VERSION=
ARG TORCH_INDEX=
USER 0
COPY . /src
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=secret,id=pip \
    python3 -B /src/ci/image.d/install.py /src /opt/mlhpc

FROM ${BASE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pytest-mlhpc" \
      org.opencontainers.image.description="Continuous benchmarking of machine-learning training, and the torch that it measures" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
USER 0
# A name for the number: getpass and libraries like it stop without one.
RUN echo 'mlhpc:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'mlhpc:x:10001:' >> /etc/group
COPY --from=build /opt/mlhpc /opt/mlhpc
# Nothing is written but below /tmp and what pods mount: the root file system may be read-only.
ENV PATH=/opt/mlhpc/bin:$PATH HOME=/tmp TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /tmp
# A number: runAsNonRoot can be checked. Any other works as well.
USER 10001:10001
# Those of vendors' images print banners and change variables; pods say what they run.
ENTRYPOINT []
CMD ["mlhpc", "--help"]
