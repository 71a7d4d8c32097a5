# octavo serve on a CUDA machine. The host has the driver and the NVIDIA Container Toolkit; the CUDA
# libraries come with torch.
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /source
COPY LICENSE README.md pyproject.toml ./
COPY src ./src
COPY results ./results
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.11-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Triton compiles the launcher of every kernel with a C compiler. Debian keeps only the newest
# version of a package, so a pinned one would break the build one day.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 octavo \
    && install --directory --owner=octavo /cache
COPY --from=build /wheels /wheels
# The file, not the name: octavo is not on the index.
RUN pip install --no-cache-dir "$(echo /wheels/octavo-*.whl)[all]"

# Models, compiled kernels and compiled graphs outlive the container.
ENV HF_HOME=/cache/huggingface \
    OCTAVO_CACHE_DIR=/cache/octavo \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    TRITON_CACHE_DIR=/cache/octavo/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
VOLUME /cache

USER 1000
WORKDIR /home/octavo
EXPOSE 8000
# Loading a large model takes minutes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["octavo", "serve", "--host", "0.0.0.0", "--port", "8000"]
