# bpsfast and PyTorch on CPUs: ranks, helpers and the scheduler. In the clone's folder:
#   docker build -f examples/docker/cpu.Dockerfile -t bpsfast:cpu .
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# The newest within Debian's release: of these only interfaces matter. RDMA's libraries find no card, unless one is passed in.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers iproute2 libibverbs1 openssh-client \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --extra-index-url "$TORCH_INDEX" /wheels/*.whl torch numpy
RUN useradd --create-home --uid 2000 train
USER 2000
WORKDIR /work
CMD ["bpsfast", "info"]
