# Claims tickets and samples them. vLLM has an environment of its own, because it pins a torch of its own.
#   docker run --gpus all rollflow-rollout --run s3://bucket/runs/RUN
FROM rollflow-base
ARG VLLM=vllm==0.32.0
USER root
RUN python -m venv /app/.venv-vllm && /app/.venv-vllm/bin/pip install --no-cache-dir ${VLLM}
USER rollflow
ENV VLLM_NO_USAGE_STATS=1
ENTRYPOINT ["rollflow", "role", "rollout"]
CMD ["--help"]
