# Trains, with DeepSpeed where the config says so.
#   docker run --gpus all rollflow-train --run s3://bucket/runs/RUN
FROM rollflow-base
ARG DEEPSPEED=deepspeed==0.19.8
USER root
RUN pip install --no-cache-dir ${DEEPSPEED}
USER rollflow
ENTRYPOINT ["rollflow", "role", "train"]
CMD ["--help"]
