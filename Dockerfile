# terra serve in a container, on a CPU or on an NVIDIA GPU.
#
#   CPU    docker build -t terra .
#          docker run --rm -p 127.0.0.1:8000:8000 -v terra-data:/data terra
#   CUDA   docker build -t terra --build-arg EXTRA=vllm .
#          docker run --rm --gpus all --ipc=host -e TERRA_API_KEY=... -p 8000:8000 -v terra-data:/data terra \
#              dtype=bfloat16 device=cuda
#
# With EXTRA=vllm the wheels of PyTorch bring CUDA's libraries: the host needs the NVIDIA driver and its container
# toolkit alone. Further settings of terra serve follow the image's name. Inside, it listens on all addresses: publish the
# port to 127.0.0.1 as above, or set TERRA_API_KEY.

FROM python:3.11-slim-bookworm AS build

ARG EXTRA=cpu
WORKDIR /src
RUN python -m venv /opt/terra && /opt/terra/bin/pip install --no-cache-dir uv
COPY pyproject.toml README.md LICENSE ./
COPY .ci ./.ci
COPY conf ./conf
COPY tokenizer ./tokenizer
COPY decoder ./decoder
COPY terra ./terra
# The pinned versions and the override are the CPU's (see pyproject.toml); vLLM for CUDA chooses its own.
RUN if [ "$EXTRA" = cpu ]; then set -- --constraint .ci/constraints.txt --override .ci/overrides.txt; else set --; fi \
    && /opt/terra/bin/uv pip install --no-cache --compile-bytecode --python /opt/terra/bin/python "$@" ".[$EXTRA,serve]"

FROM python:3.11-slim-bookworm

# vLLM's CPU kernels and torch load libgomp and libnuma; torch's compiler on a GPU calls gcc.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 terra && install --directory --owner terra /data
COPY --from=build /opt/terra /opt/terra
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
ENV PATH=/opt/terra/bin:$PATH HOME=/home/terra PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["terra", "serve", "host=0.0.0.0", "port=8000", "data=/data"]
