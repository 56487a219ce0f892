# bpsfast, PyTorch and CuPy for NVIDIA's GPUs, and what RDMA needs. No GPU has run bpsfast yet. In the clone's folder:
#   docker build -f examples/docker/cuda-rdma.Dockerfile -t bpsfast:cuda-rdma .
# The image's CUDA, PyTorch's and CuPy's must fit: CUDA_IMAGE and TORCH_INDEX choose the first two, CuPy follows PyTorch's.
ARG CUDA_IMAGE=nvidia/cuda:12.6.3-runtime-ubuntu24.04
FROM ubuntu:24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
       ibverbs-providers iproute2 libibverbs1 openssh-client python3 python3-venv rdma-core \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/bpsfast
ENV PATH=/opt/bpsfast/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu126
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url "$TORCH_INDEX" torch numpy
RUN cuda=$(python -c 'import torch; print(torch.version.cuda.partition(".")[0])') \
    && case "$cuda" in \
         12) extra=cuda ;; \
         13) extra=cuda13 ;; \
         *) echo "there is no CuPy here for CUDA $cuda" >&2; exit 1 ;; \
       esac \
    && wheel=$(echo /wheels/*.whl) \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "bpsfast[$extra] @ file://$wheel"
RUN useradd --create-home --uid 2000 train
USER 2000
WORKDIR /work
CMD ["bpsfast", "doctor"]
