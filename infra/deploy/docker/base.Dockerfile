# Everything but the heavy engines. Build from the root of the repository:
#   docker build -t rollflow-base -f infra/deploy/docker/base.Dockerfile .
# torch comes as pip finds it, for Linux a CUDA build; for CPU alone give the index of PyTorch's CPU builds as
#   --build-arg TORCH_INDEX=URL
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX
RUN apt-get update && apt-get install --yes --no-install-recommends curl && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock pyproject.toml README.md ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} "$(grep '^torch==' requirements.lock)" \
    && pip install --no-cache-dir --requirement requirements.lock
COPY data_contracts data_contracts
COPY models models
COPY infra infra
COPY tasks tasks
COPY dashboards dashboards
COPY flows flows
RUN pip install --no-cache-dir --no-deps --editable .
RUN useradd --uid 1000 --create-home rollflow && mkdir -p /data && chown rollflow /data
USER rollflow
ENV ROLLFLOW_HOME=/data \
    ROLLFLOW_STORE=/data/store \
    ROLLFLOW_RUN__STORE=/data/store \
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 \
    DO_NOT_TRACK=1 \
    MLFLOW_DISABLE_TELEMETRY=true \
    PREFECT_SERVER_ANALYTICS_ENABLED=false
CMD ["rollflow", "--help"]
