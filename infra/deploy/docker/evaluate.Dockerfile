# Evaluates versions on held-out prompts.
#   docker run rollflow-evaluate --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "evaluate"]
CMD ["--help"]
