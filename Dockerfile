# The application's image: service, sidecar and command line. Which one runs is the command.
#   docker build -t strongroom .
# The engine's image is deploy/vllm.Dockerfile: it gets `strongroom/` alone.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY strongroom ./strongroom
COPY policy ./policy
COPY storage ./storage
COPY sidecar ./sidecar
COPY service ./service
COPY cli ./cli
COPY migrations ./migrations
RUN python -m venv /opt/strongroom \
    && /opt/strongroom/bin/pip install --no-cache-dir .

FROM python:3.12-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/strongroom --create-home strongroom \
    && chmod 700 /var/lib/strongroom
COPY --from=build /opt/strongroom /opt/strongroom
ENV PATH=/opt/strongroom/bin:$PATH PYTHONUNBUFFERED=1
USER strongroom
WORKDIR /var/lib/strongroom
EXPOSE 8420
ENTRYPOINT ["strongroom"]
CMD ["--help"]
